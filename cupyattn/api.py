"""`attention` and `explain`: the two functions that most callers need."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from cupyattn import backends, launch
from cupyattn.launch import Operand, Plan
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.operands import scale_shape
from cupyattn.quant.plan import plan_operand
from cupyattn.request import Options, Request, resolve
from cupyattn.rounding import STORAGE, array_namespace
from cupyattn.tiles import Tiles

#: Compute capability times ten of the devices that the Hopper forms are for.
HOPPER_CAPABILITY = 90


def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    variant: str = "auto",
    accuracy: str = "full",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    block_mask: Any = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    out: Any = None,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    check_finite: bool = False,
) -> Any:
    """Scaled dot-product attention, ``softmax(scale * Q K^T) V``.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim), or QuantizedQKV
        Queries, float16, bfloat16 or float32: CuPy, NumPy, or anything with DLPack. Any strides;
        an array whose last axis is not contiguous is copied. A `QuantizedQKV` carries all three
        operands and runs ``fa_int8`` on them.
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Keys and values; `heads_kv` divides `heads` (grouped heads).
    variant : {"auto", "unfused", "fa", "fa_warps", "fa_tc", "fa_int8"} or a registered name
        The rung. One asked for by name is never replaced.
    accuracy : {"full", "balanced"}
        With ``variant="auto"``: the input's own 16/32-bit arithmetic, or INT8 Q.K^T.
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    causal : bool
        Query i attends key j only where ``j <= i + shift``.
    causal_align : {"bottom-right", "top-left"}
        ``shift = len_kv - len_q``, or 0.
    window, softcap, mask, bias, rope, block_mask
        Part of the interface, not offered yet.
    layout : {"BHSD", "BSHD"}
        Order of the axes of q, k, v and the result.
    return_lse : bool
        Return the log-sum-exp too.
    out : array, optional
        Receives O; shape and dtype of the result, sharing memory with no input.
    quant : QuantConfig, optional
        How ``fa_int8`` quantises.
    tiles : Tiles, optional
        Tile sizes in place of the rung's own, those of its portable form.
    arch : str, optional
        Architecture to compile for, for example ``"sm_90"``; the device's own when omitted. On
        ``"sm_90a"`` (an H100 or H200's own) a rung with a Hopper form runs in that form where it
        takes the call; `explain` says so.
    backend : {"cuda", "mirror", "interpret"}, optional
        ``cuda`` for CuPy arrays. For NumPy arrays ``mirror`` (same blocks and rounding points), or
        ``interpret``: the kernels themselves, compiled and executed on NumPy, every access
        checked. ``CUPYATTN_INTERPRET=1`` makes that the default.
    check_finite : bool
        Raise if q, k or v holds a NaN or an infinity (waits for the device).

    Returns
    -------
    o : array, (batch, heads, len_q, head_dim)
        Dtype and kind of q, on its device and the current stream.
    lse : array, float32, (batch, heads, len_q)
        With `return_lse`: natural logarithm of the sum of ``exp(score)``. A row that may attend to
        nothing has ``o = 0`` and ``lse = -inf``.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit together; the message gives the values.
    UnsupportedError
        For what the rung cannot do; the message says what is supported.
    KernelFault
        With ``backend="interpret"``: a kernel's first hazard.

    Notes
    -----
    docs/MATH_REFERENCE.md derives the error bound that every rung is held to, per element.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = k = v = np.ones((1, 1, 4, 8), np.float16)
    >>> ca.attention(q, k, v, causal=True)[0, 0, :, 0]
    array([1., 1., 1., 1.], dtype=float16)
    """
    options = Options(
        variant, accuracy, scale, causal, causal_align, window, softcap, mask, bias, rope,
        block_mask, layout, return_lse, out, quant, tiles, arch, backend, check_finite,
    )  # fmt: skip
    request = resolve(q, k, v, options)
    o, lse = _run_mirror(request) if request.backend == "mirror" else _run_kernels(request)
    result = request.restore(o) if out is None else out
    return (result, request.restore_lse(lse)) if return_lse else result


def explain(q: Any, k: Any = None, v: Any = None, **options: Any) -> str:
    """Say what `attention` would do with the same arguments, without doing it.

    Parameters
    ----------
    q, k, v, **options
        As for `attention`.

    Returns
    -------
    str
        Rung and why, where it runs, and for every plan: form, tiles, features, launches with grid
        and block, workspace bytes.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 4, 8), np.float16)
    >>> print(explain(q, q, q).splitlines()[0])
    fa_tc: the fastest rung of accuracy class 'full' for float16
    """
    known = {field.name for field in fields(Options)}
    for name in options:
        if name not in known:
            raise TypeError(f"explain got an unexpected argument {name!r}")
    request = resolve(q, k, v, Options(**options))
    where = {
        "cuda": "runs on the device",
        "mirror": "runs in NumPy, with the blocks and the rounding of these launches",
        "interpret": "runs these launches in the interpreter, on NumPy",
    }
    lines = [f"{request.variant.name}: {request.why}", where[request.backend]]
    return "\n".join([*lines, *map(str, plans(request))])


def plans(request: Request) -> list[Plan]:
    """Plan a request from shapes and strides alone: the quantising passes, then attention."""
    call, options, z = request.call, request.options, request.quantized
    o = request.receiver
    if o is None:
        o = Operand.contiguous(call.output_shape, STORAGE[call.dtype].itemsize)
    else:
        o = Operand.of(o)
    if request.variant.family != "int8":
        q, k, v = (Operand.of(a) for a in (request.q, request.k, request.v))
        return [
            launch.plan_attention(
                request.variant, call, q, k, v, o, tiles=options.tiles, arch=_arch(request)
            )
        ]
    if z is not None:
        return [_plan_quantized(request, z, o)]
    quant, tiles = options.quant or QuantConfig(), options.tiles
    tiles = tiles or request.variant.default_tiles(call.head_dim)
    groups = quant.group_q(tiles), quant.group_kv(tiles)
    passes, codes, scales = [], [], []
    for array, group, granularity, smooth in (
        (request.q, groups[0], quant.granularity_q, False),
        (request.k, groups[1], quant.granularity_k, quant.smooth_k),
    ):
        x, per_tensor = Operand.of(array), granularity == "tensor"
        passes.append(
            plan_operand(
                x, call.dtype, group, per_tensor=per_tensor, smooth=smooth, static=quant.static
            )
        )
        codes.append(Operand.contiguous(x.shape, 1))
        scales.append(Operand.contiguous(scale_shape(x.shape, group, granularity), 4))
    v = Operand.of(request.v)
    if call.dtype == "float32":
        v = Operand.contiguous(v.shape, 2)
    plan = launch.plan_int8(
        request.variant, call, codes[0], codes[1], v, o, scales[0], scales[1], group_q=groups[0],
        group_kv=groups[1], smoothed=quant.smooth_k, tiles=tiles,
    )  # fmt: skip
    return [*passes, plan]


def _arch(request: Request) -> str | None:
    """Return the architecture to plan for: the caller's, or that of the device of the arrays.

    Tiles that a caller names are those of the portable form, unless he names ``"sm_90a"`` too.
    """
    options = request.options
    if options.arch is not None or options.tiles is not None or request.backend != "cuda":
        return options.arch
    hopper = int(request.q.device.compute_capability) == HOPPER_CAPABILITY
    return "sm_90a" if hopper else None


def _plan_quantized(request: Request, z: QuantizedQKV, o: Operand) -> Plan:
    q_codes, k_codes, v, q_scale, k_scale = (
        Operand.of(a) for a in (z.q_codes, z.k_codes, z.v, z.q_scale, z.k_scale)
    )
    return launch.plan_int8(
        request.variant, request.call, q_codes, k_codes, v, o, q_scale, k_scale,
        group_q=z.group_q, group_kv=z.group_kv, smoothed=z.k_mean is not None,
        tiles=request.options.tiles,
    )  # fmt: skip


def _receiver(request: Request, xp: Any) -> Any:
    """Return where O goes, in layout BHSD: the caller's array, or one contiguous in his layout."""
    if request.receiver is not None:
        return request.receiver
    batch, heads, len_q, head_dim = request.call.output_shape
    if request.options.layout == "BSHD":
        shape = (batch, len_q, heads, head_dim)
        return xp.empty(shape, STORAGE[request.call.dtype]).swapaxes(1, 2)
    return xp.empty(request.call.output_shape, STORAGE[request.call.dtype])


def _quantize(request: Request) -> QuantizedQKV:
    """Return the quantised operands of a request for the INT8 rung."""
    options = request.options
    return request.quantized or quantize(
        request.q, request.k, request.v, quant=options.quant, tiles=options.tiles,
        backend=request.backend,
    )  # fmt: skip


def _run_kernels(request: Request) -> tuple[Any, Any]:
    call, xp = request.call, array_namespace(request.q)
    # NOTE: the arrays may lie on another device than the current one; kernels run on theirs, on the
    # stream that is current there.
    with backends.on_device_of(request.q):
        if request.variant.family == "int8":
            z = _quantize(request)
            names = ("q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean")
            inputs = {name: getattr(z, name) for name in names}
        else:
            z, inputs = None, {"q": request.q, "k": request.k, "v": request.v}
        o = _receiver(request, xp)
        lse = xp.empty(call.lse_shape, "float32") if call.return_lse else None
        plan = plans(request)[0] if z is None else _plan_quantized(request, z, Operand.of(o))
        buffers = {name: backends.as_input(array) for name, array in inputs.items()}
        backends.run(request.backend, plan, {**buffers, "o": o, "lse": lse}, request.options.arch)
    return o, lse


def _run_mirror(request: Request) -> tuple[Any, Any]:
    from cupyattn import reference

    operands = (request.q, request.k, request.v)
    if request.variant.family == "int8":
        operands = (_quantize(request), None, None)
    options = request.options
    o, lse = reference.attention_mirror(
        *operands, variant=request.variant.name, tiles=options.tiles, scale=options.scale,
        causal=options.causal, causal_align=options.causal_align, return_lse=True,
    )  # fmt: skip
    receiver = _receiver(request, np)
    receiver[...] = o
    return receiver, lse
