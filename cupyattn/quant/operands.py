"""`quantize`: from three arrays to the operands of INT8 attention, on whatever device they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn import checks, registry
from cupyattn.arrays import contiguous_last_axis
from cupyattn.backends import as_input, choose, on_device_of, run
from cupyattn.launch import Operand
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.plan import plan_operand, plan_values
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import (
    SCALE_MIN,
    channel_mean,
    group_count,
    padded_length,
    quantize_symmetric,
    quantize_values,
)
from cupyattn.rounding import Array, array_namespace
from cupyattn.tiles import Tiles


def quantize(
    q: Array,
    k: Array,
    v: Array,
    *,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    backend: str | None = None,
) -> QuantizedQKV:
    """Quantise Q and K to INT8, and V where `quant` says so.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32; any strides. Not modified.
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Of the same type. With ``pv="16bit"`` V is kept as it is, float32 as float16: past 65504 it
        becomes infinite.
    quant : QuantConfig, optional
        How; ``QuantConfig()`` when omitted.
    tiles : Tiles, optional
        Tiles of the attention kernel, whose sizes granularity "block" takes; fa_int8's own for
        this head_dim when omitted, in the form that `quant` asks for.
    backend : {"cuda", "mirror", "interpret"}, optional
        ``cuda`` for CuPy arrays, ``mirror`` or ``interpret`` for NumPy arrays, as for
        `cupyattn.attention`.

    Returns
    -------
    QuantizedQKV
        Arrays of the kind that came in. The codes and scales of all backends agree bit for bit
        where the means do.

    Raises
    ------
    ValueError, TypeError
        For arrays that do not fit together, a backend that does not take them, or tiles that 8-bit
        values do not take.
    UnsupportedError
        For a head_dim past 256, and what `QuantConfig` says.

    Notes
    -----
    A NaN or an infinity gives the rows that share its scale a NaN scale, hence NaN scores: never
    finite garbage. In V it makes its channel NaN, in the rows that look at its group.
    `cupyattn.quant.quantizers.quantize_symmetric` states formula and error.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 40, 16)).astype(np.float16)
    >>> x = quantize(q, k, v, quant=QuantConfig(granularity_q="token", granularity_k="head"))
    >>> x.q_scale.shape, x.k_scale.shape
    ((1, 2, 40), (1, 2, 1))
    """
    array_namespace(q, k, v)
    backend = choose(backend, q)
    checks.check_dtype(q, k, v)
    head_dim = checks.check_shapes(q.shape, k.shape, v.shape)[-1]
    quant = QuantConfig() if quant is None else quant
    if tiles is None:
        tiles = registry.lookup("fa_int8").default_tiles(head_dim, quant.form)
    check_value_tiles(quant, tiles)
    if backend == "mirror":
        return quantize_mirror(q, k, v, quant, tiles)
    return _quantize_kernels(q, k, v, quant, tiles, backend)


def quantize_mirror(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    *,
    k_mean: Array | None = None,
    v_mean: Array | None = None,
) -> QuantizedQKV:
    """Quantise NumPy arrays as the kernel quantises CuPy arrays.

    Parameters
    ----------
    q, k, v, quant, tiles
        As for `quantize`.
    k_mean, v_mean : array, (batch, heads_kv, head_dim), float32, optional
        The means to subtract where `quant` smooths; computed when omitted. The kernel sums in
        another order, so a comparison to the bit hands its means over.

    Returns
    -------
    QuantizedQKV
    """
    if quant.smooth_k and k_mean is None:
        k_mean = channel_mean(k)
    codes, scales = {}, {}
    groups = {"q": quant.group_q(tiles), "k": quant.group_kv(tiles)}
    granularities = {"q": quant.granularity_q, "k": quant.granularity_k}
    static = static_scales(np, quant, q.shape, k.shape, tiles)
    for name, x in (("q", q), ("k", k)):
        codes[name], scales[name] = quantize_symmetric(
            x,
            groups[name],
            per_tensor=granularities[name] == "tensor",
            mean=k_mean if name == "k" and quant.smooth_k else None,
            static_scale=static[name],
        )
    values: dict[str, Any] = {"v": None, "group_v": quant.group_v(tiles)}
    if quant.form == "pv8":
        if quant.smooth_v:
            values["v_mean"] = channel_mean(v) if v_mean is None else v_mean
        values["v_codes"], values["v_scale"] = quantize_values(
            v, values["group_v"], values.get("v_mean"), e4m3=quant.pv == "fp8"
        )
    else:
        values["v"] = value_operand(v)
    return QuantizedQKV(
        codes["q"], codes["k"], q_scale=scales["q"], k_scale=scales["k"], group_q=groups["q"],
        group_kv=groups["k"], config=quant, out_dtype=q.dtype.name,
        k_mean=k_mean if quant.smooth_k else None, **values,
    )  # fmt: skip


def check_value_tiles(quant: QuantConfig, tiles: Tiles) -> None:
    """Raise ValueError unless 8-bit values, where asked for, take tiles of these sizes."""
    if quant.form == "pv8" and tiles.block_kv not in (32, 64, 128):
        raise ValueError(
            f"pv={quant.pv!r} needs tiles.block_kv of 32, 64 or 128, whole matrix products of 32 "
            f"keys, got {tiles.block_kv}"
        )


def scale_shape(x: tuple[int, ...], group: int, granularity: str) -> tuple[int, int, int]:
    """Return the shape of the scales of an operand of shape (batch, heads, length, head_dim)."""
    if granularity == "tensor":
        return 1, 1, 1
    return x[0], x[1], group_count(x[2], group)


def static_scales(
    xp: Any, quant: QuantConfig, q: tuple[int, ...], k: tuple[int, ...], tiles: Tiles
) -> dict[str, Array | None]:
    """Return the given scales of Q and K in the shapes of dynamic ones, None where dynamic.

    Parameters
    ----------
    xp : module
        NumPy or CuPy: where the scales must lie.
    quant : QuantConfig
    q, k : tuple of int
        Shapes of the operands.
    tiles : Tiles

    Raises
    ------
    ValueError
        If a shape does not fit the operand, or (on NumPy, where looking costs nothing) a value is
        no finite number from 2^-126 up.
    """
    if not quant.static:
        return {"q": None, "k": None}
    found: dict[str, Array | None] = {}
    for name, given, shape, group, granularity in (
        ("q", quant.scales[0], q, quant.group_q(tiles), quant.granularity_q),
        ("k", quant.scales[1], k, quant.group_kv(tiles), quant.granularity_k),
    ):
        wanted = scale_shape(shape, group, granularity)
        array = xp.asarray(given, np.float32)
        if array.ndim == 0:
            array = array.reshape(1, 1, 1)
        fits = array.ndim == 3 and all(
            have in (1, want) and (have == want or axis < 2)
            for axis, (have, want) in enumerate(zip(array.shape, wanted, strict=True))
        )
        if not fits:
            raise ValueError(
                f"the static {name}_scale must have shape ({wanted[0]} or 1, {wanted[1]} or 1, "
                f"{wanted[2]}) for granularity_{name}={granularity!r}, got {array.shape}"
            )
        if xp is np and not (np.isfinite(array).all() and (array >= SCALE_MIN).all()):
            raise ValueError(f"the static {name}_scale must be finite and at least 2**-126")
        found[name] = xp.ascontiguousarray(xp.broadcast_to(array, wanted))
    return found


def value_operand(v: Array) -> Array:
    """Return V as the second product takes it: its own 16-bit type, float16 for float32."""
    return v.astype(np.float16) if v.dtype.name == "float32" else v


def _quantize_kernels(
    q: Array, k: Array, v: Array, quant: QuantConfig, tiles: Tiles, backend: str
) -> QuantizedQKV:
    """Quantise arrays where they lie, with the kernels of ``quantize.cu``."""
    groups = quant.group_q(tiles), quant.group_kv(tiles)
    with on_device_of(q):
        static = static_scales(array_namespace(q), quant, q.shape, k.shape, tiles)
        q_codes, q_scale, _ = _operand(
            q, groups[0], quant.granularity_q, False, static["q"], backend
        )
        k_codes, k_scale, k_mean = _operand(
            k, groups[1], quant.granularity_k, quant.smooth_k, static["k"], backend
        )
        values = {"v": value_operand(v)} if quant.form == "portable" else {"v": None}
        if quant.form == "pv8":
            values |= _value_codes(v, quant, quant.group_v(tiles), backend)
    return QuantizedQKV(
        q_codes, k_codes, q_scale=q_scale, k_scale=k_scale, group_q=groups[0], group_kv=groups[1],
        config=quant, out_dtype=q.dtype.name, k_mean=k_mean, group_v=quant.group_v(tiles), **values,
    )  # fmt: skip


def value_buffers(v: tuple[int, ...], group: int, smooth: bool) -> dict[str, tuple[Any, ...]]:
    """Return what `plan_values` writes and needs, beside ``"x"``: (shape, dtype, zero beforehand).

    Parameters
    ----------
    v : tuple of int
        Shape of V.
    group : int
        Keys that share the scale of a channel.
    smooth : bool
    """
    batch, heads, length, head_dim = v
    scale = batch, heads, group_count(length, group), head_dim
    found: dict[str, tuple[Any, ...]] = {
        "codes": ((batch, heads, head_dim, padded_length(length)), "int8", False),
        "scale": (scale, "float32", False),
        "absmax": (scale, "uint32", True),
    }
    return found | ({"mean": ((batch, heads, head_dim), "float32", True)} if smooth else {})


def _value_codes(v: Array, quant: QuantConfig, group: int, backend: str) -> dict[str, Array]:
    """Return codes, scales and mean (where smoothed) of V, by the names of QuantizedQKV."""
    xp = array_namespace(v)
    v = contiguous_last_axis(v)
    smooth = bool(quant.smooth_v)
    plan = plan_values(Operand.of(v), v.dtype.name, group, str(quant.p_type), smooth=smooth)
    buffers = {"x": as_input(v)}
    for name, (shape, dtype, zeros) in value_buffers(v.shape, group, smooth).items():
        buffers[name] = (xp.zeros if zeros else xp.empty)(shape, dtype)
    if not plan.launches:
        buffers["scale"].fill(1)
    run(backend, plan, buffers)
    return {f"v_{name}": a for name, a in buffers.items() if name in ("codes", "scale", "mean")}


def _operand(
    x: Array,
    group: int,
    granularity: str,
    smooth: bool,
    static_scale: Array | None,
    backend: str,
) -> tuple[Array, Array, Array | None]:
    """Return codes, scales and mean (None where not smoothed) of one operand."""
    xp = array_namespace(x)
    x = contiguous_last_axis(x)
    plan = plan_operand(
        Operand.of(x),
        x.dtype.name,
        group,
        per_tensor=granularity == "tensor",
        smooth=smooth,
        static=static_scale is not None,
    )
    # NOTE: an empty operand launches nothing: its scales are those of a group of zeros.
    allocate = xp.empty if plan.launches else xp.ones
    buffers = {"x": as_input(x), "codes": xp.empty(x.shape, np.int8)}
    if static_scale is None:
        buffers["scale"] = allocate(scale_shape(x.shape, group, granularity), np.float32)
        if any(launch.entry == "group_absmax" for launch in plan.launches):
            buffers["absmax"] = xp.zeros(buffers["scale"].shape, np.uint32)
    else:
        buffers["scale"], buffers["static_scale"] = static_scale.copy(), as_input(static_scale)
    if smooth:
        buffers["mean"] = xp.zeros((*x.shape[:2], x.shape[3]), np.float32)
    run(backend, plan, buffers)
    return buffers["codes"], buffers["scale"], buffers.get("mean")
