"""`attention` and `explain`: check the arguments, look the rung up, run it where the arrays are."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from cupyattn import arrays, checks, launch, registry
from cupyattn.checks import AttentionCall
from cupyattn.errors import UnsupportedError
from cupyattn.launch import Operand, Plan
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.registry import Variant
from cupyattn.tiles import Tiles

#: What ``variant="auto"`` runs by accuracy class and dtype, the fastest of those measured
#: (experiments/results/ladder.json).
_AUTO = {
    "full": {"float16": "fa_tc", "bfloat16": "fa_tc", "float32": "fa_warps"},
    "balanced": dict.fromkeys(("float16", "bfloat16", "float32"), "fa_int8"),
}
#: Arguments of the interface that no rung takes yet, with the value that means "absent".
_ABSENT: dict[str, Any] = {
    "window": (-1, -1),
    "softcap": 0.0,
    "mask": None,
    "bias": None,
    "rope": None,
    "block_mask": None,
}


@dataclass(frozen=True)
class _Request:
    """One call, taken apart: operands in layout BHSD and what to do with them."""

    variant: Variant
    call: AttentionCall
    backend: str
    q: Any
    k: Any
    v: Any
    quantized: QuantizedQKV | None
    restore: Any
    tiles: Tiles | None
    arch: str | None
    causal_align: str


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
        Tile sizes in place of the rung's own.
    arch : str, optional
        Architecture to compile for, for example ``"sm_90"``; the device's own when omitted.
    backend : {"cuda", "mirror"}, optional
        ``cuda`` for CuPy arrays, ``mirror`` (NumPy, same blocks and rounding points) for NumPy.
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
    absent = {"window": window, "softcap": softcap, "mask": mask, "bias": bias, "rope": rope}
    request = _request(
        q, k, v, variant=variant, accuracy=accuracy, scale=scale, causal=causal,
        causal_align=causal_align, layout=layout, return_lse=return_lse, quant=quant, tiles=tiles,
        arch=arch, backend=backend, check_finite=check_finite,
        absent={**absent, "block_mask": block_mask},
    )  # fmt: skip
    if out is not None:
        receiver, _ = arrays.take("out", out)
        receiver = _to_bhsd(receiver, layout)
        checks.check_out(receiver, request.call, (request.q, request.k, request.v))
    else:
        receiver = None
    o, lse = _run_cuda(request, receiver) if request.backend == "cuda" else _run_mirror(request)
    if receiver is not None:
        if o is not receiver:
            receiver[...] = o
        o = out
    else:
        o = request.restore(_to_bhsd(o, layout))
    return (o, request.restore(lse)) if return_lse else o


def explain(q: Any, k: Any = None, v: Any = None, **options: Any) -> str:
    """Say what `attention` would do with the same arguments, without running it.

    Parameters
    ----------
    q, k, v, **options
        As for `attention`.

    Returns
    -------
    str
        Rung and why, form, tiles, launches with grid and block, workspace bytes.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 4, 8), np.float16)
    >>> print(explain(q, q, q).splitlines()[0])
    fa_tc: the fastest rung of accuracy class 'full' for float16
    """
    defaults = {
        "variant": "auto", "accuracy": "full", "scale": None, "causal": False,
        "causal_align": "bottom-right", "layout": "BHSD", "return_lse": False, "quant": None,
        "tiles": None, "arch": None, "backend": None, "check_finite": False,
    }  # fmt: skip
    ignored = {"out"}
    unknown = set(options) - set(defaults) - set(_ABSENT) - ignored
    if unknown:
        raise TypeError(f"explain got an unexpected argument {sorted(unknown)[0]!r}")
    chosen = {name: options.get(name, default) for name, default in defaults.items()}
    absent = {name: options.get(name, value) for name, value in _ABSENT.items()}
    request = _request(q, k, v, **chosen, absent=absent)
    if chosen["variant"] == "auto" and request.quantized is None:
        why = f"the fastest rung of accuracy class {chosen['accuracy']!r} for {request.call.dtype}"
    else:
        why = (
            "asked for by name" if request.quantized is None else "the rung for quantised operands"
        )
    where = {"cuda": "on the device", "mirror": "in NumPy, with the kernel's blocks and rounding"}
    plan, _ = _plan(request, None)
    return f"{request.variant.name}: {why}\nruns {where[request.backend]}\n{plan}"


def _request(
    q: Any,
    k: Any,
    v: Any,
    *,
    variant: str,
    accuracy: str,
    scale: float | None,
    causal: bool,
    causal_align: str,
    layout: str,
    return_lse: bool,
    quant: QuantConfig | None,
    tiles: Tiles | None,
    arch: str | None,
    backend: str | None,
    check_finite: bool,
    absent: dict[str, Any],
) -> _Request:
    for name, value in absent.items():
        neutral = _ABSENT[name]
        if value is not neutral and not (neutral is not None and value == neutral):
            raise UnsupportedError(
                f"{name} is not supported yet, only causal, grouped heads and any lengths are: "
                "apply it to the scores with cupyattn.unfused in the meantime"
            )
    if isinstance(q, QuantizedQKV):
        return _quantized_request(
            q, k, v, variant, quant, layout, backend, tiles, arch, causal_align,
            scale=scale, causal=causal, return_lse=return_lse,
        )  # fmt: skip
    taken, restores = zip(
        *(arrays.take(n, a) for n, a in zip("qkv", (q, k, v), strict=True)), strict=True
    )
    kinds = {arrays.namespace(a).__name__ for a in taken}
    if len(kinds) > 1:
        raise TypeError(
            f"q, k and v must lie on the same device, got {' and '.join(sorted(kinds))} arrays"
        )
    q, k, v = (arrays.contiguous_last_axis(_to_bhsd(a, layout)) for a in taken)
    call = checks.check_attention(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, return_lse=return_lse
    )
    rung = registry.lookup(_auto(accuracy, call.dtype) if variant == "auto" else variant)
    if call.dtype not in rung.dtypes:
        raise UnsupportedError(
            f"{rung.name} takes {', '.join(rung.dtypes)}, got {call.dtype}: convert the arrays, "
            "or use variant='auto'"
        )
    if quant is not None and rung.family != "int8":
        raise ValueError(f"quant is for fa_int8, got variant {rung.name!r}")
    if check_finite:
        _check_finite(q, k, v)
    quantized = quantize(q, k, v, quant=quant, tiles=tiles) if rung.family == "int8" else None
    return _Request(
        rung, call, _backend(backend, q), q, k, v, quantized, restores[0], tiles, arch, causal_align
    )


def _quantized_request(
    quantized: QuantizedQKV,
    k: Any,
    v: Any,
    variant: str,
    quant: QuantConfig | None,
    layout: str,
    backend: str | None,
    tiles: Tiles | None,
    arch: str | None,
    causal_align: str,
    *,
    scale: float | None,
    causal: bool,
    return_lse: bool,
) -> _Request:
    if k is not None or v is not None or quant is not None:
        raise ValueError(
            "a QuantizedQKV carries q, k, v and their config: give no k, v or quant beside it"
        )
    if layout != "BHSD":
        raise ValueError(f"a QuantizedQKV has layout 'BHSD', got layout={layout!r}")
    rung = registry.lookup("fa_int8" if variant == "auto" else variant)
    if rung.family != "int8":
        raise ValueError(f"a QuantizedQKV runs on fa_int8, got variant={variant!r}")
    codes = quantized.q_codes, quantized.k_codes, quantized.v
    sizes = checks.check_shapes(*(tuple(a.shape) for a in codes))
    shift = checks.check_causal(causal_align, sizes[3], sizes[4])
    call = AttentionCall(
        *sizes, quantized.out_dtype, checks.check_scale(scale, sizes[5]), bool(causal),
        shift if causal else 0, bool(return_lse),
    )  # fmt: skip
    return _Request(
        rung,
        call,
        _backend(backend, codes[0]),
        *codes,
        quantized,
        lambda a: a,
        tiles,
        arch,
        causal_align,
    )


def _auto(accuracy: str, dtype: str) -> str:
    if accuracy == "aggressive":
        raise UnsupportedError("accuracy='aggressive' (8-bit P.V) is not there yet: use 'balanced'")
    if accuracy not in _AUTO:
        raise ValueError(f"accuracy must be 'full', 'balanced' or 'aggressive', got {accuracy!r}")
    return _AUTO[accuracy][dtype]


def _backend(backend: str | None, array: Any) -> str:
    natural = "cuda" if arrays.is_cupy(array) else "mirror"
    if backend == "interpret" or (
        backend is None and natural == "mirror" and os.environ.get("CUPYATTN_INTERPRET") == "1"
    ):
        raise UnsupportedError(
            "backend='interpret' is not there yet: NumPy arrays run on 'mirror', "
            "CuPy arrays on 'cuda'"
        )
    if backend not in (None, "cuda", "mirror"):
        raise ValueError(f"backend must be 'cuda', 'mirror' or 'interpret', got {backend!r}")
    if backend is not None and backend != natural:
        raise ValueError(
            f"backend={backend!r} takes {'CuPy' if backend == 'cuda' else 'NumPy'} arrays, "
            f"got {arrays.namespace(array).__name__}"
        )
    return natural


def _to_bhsd(array: Any, layout: str) -> Any:
    """Return a view with heads before length, or back: the exchange is its own inverse."""
    if layout == "BHSD":
        return array
    if layout == "BSHD":
        return array.swapaxes(1, 2) if array.ndim == 4 else array
    raise ValueError(f"layout must be 'BHSD' or 'BSHD', got {layout!r}")


def _check_finite(q: Any, k: Any, v: Any) -> None:
    for name, array in zip("qkv", (q, k, v), strict=True):
        if not bool(arrays.namespace(array).isfinite(array.astype("float32")).all()):
            raise ValueError(f"{name} holds a NaN or an infinity (check_finite=True)")


def _plan(request: _Request, o: Operand | None) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a request and the buffers that it reads."""
    call, z = request.call, request.quantized
    o = o or Operand.contiguous(call.output_shape, 4 if call.dtype == "float32" else 2)
    options: dict[str, Any] = {"tiles": request.tiles, "arch": request.arch}
    if z is None:
        inputs = {"q": request.q, "k": request.k, "v": request.v}
        operands = (Operand.of(a) for a in inputs.values())
        return launch.plan_attention(request.variant, call, *operands, o, **options), inputs
    inputs = {
        "q_codes": z.q_codes,
        "k_codes": z.k_codes,
        "v": z.v,
        "q_scale": z.q_scale,
        "k_scale": z.k_scale,
    }
    if z.k_mean is not None:
        inputs["k_mean"] = z.k_mean
    q_codes, k_codes, v, q_scale, k_scale, *_ = (Operand.of(a) for a in inputs.values())
    plan = launch.plan_int8(
        request.variant, call, q_codes, k_codes, v, o, q_scale, k_scale,
        group_q=z.group_q, group_kv=z.group_kv, smoothed=z.k_mean is not None, **options,
    )  # fmt: skip
    return plan, inputs


def _run_cuda(request: _Request, receiver: Any) -> tuple[Any, Any]:
    import cupy

    call = request.call
    # NOTE: arrays may lie on another device than the current one; the kernel must run on theirs.
    device = request.q.device
    with contextlib.nullcontext() if device.id == cupy.cuda.device.get_device_id() else device:
        o = (
            cupy.empty(
                call.output_shape, request.v.dtype if request.quantized is None else _dtype(call)
            )
            if receiver is None
            else receiver
        )
        lse = cupy.empty(call.lse_shape, "float32") if call.return_lse else None
        plan, inputs = _plan(request, Operand.of(o))
        buffers = {**inputs, "o": o} if lse is None else {**inputs, "o": o, "lse": lse}
        launch.run_cuda(plan, buffers, request.arch)
    return o, lse


def _dtype(call: AttentionCall) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if call.dtype == "bfloat16" else call.dtype)


def _run_mirror(request: _Request) -> tuple[Any, Any]:
    from cupyattn import reference

    operands = (
        (request.q, request.k, request.v)
        if request.quantized is None
        else (request.quantized, None, None)
    )
    return reference.attention_mirror(  # type: ignore[no-any-return]
        *operands, variant=request.variant.name, tiles=request.tiles, scale=request.call.scale,
        causal=request.call.causal, causal_align=request.causal_align, return_lse=True,
    )  # fmt: skip
