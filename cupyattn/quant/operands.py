"""`quantize`: from three arrays to the operands of INT8 attention, on whatever device they lie."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn import checks, registry
from cupyattn.arrays import contiguous_last_axis, operand
from cupyattn.backends import as_input, choose, on_device_of, own_arch, run
from cupyattn.errors import UnsupportedError
from cupyattn.plans import Operand
from cupyattn.preparation import EPS, Preparation
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.packed import join
from cupyattn.quant.plan import parts, plan_quantize
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import (
    SCALE_MIN,
    channel_mean,
    group_count,
    in_padded_rows,
    quantize_affine,
    quantize_symmetric,
    quantize_values,
    quantize_values_affine,
)
from cupyattn.rotation import prepares_of
from cupyattn.rounding import Array, array_namespace
from cupyattn.scratch import saying_what_is_needed
from cupyattn.sequences import Sequences, one_entry, take_sequences
from cupyattn.targets import check_arch
from cupyattn.tiles import Tiles, check_kind


def quantize(
    q: Array,
    k: Array,
    v: Array,
    *,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
) -> QuantizedQKV:
    """Quantise Q and K to INT8, and V where `quant` says so.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32; any strides. Not modified. Packed (total_q, heads, head_dim).
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Of the same type; packed (total_k, heads_kv, head_dim). With ``pv="16bit"`` V is kept
        as it is, float32 as float16: past 65504 it becomes infinite.
    quant : QuantConfig, optional
        How; ``QuantConfig()`` when omitted.
    tiles : Tiles, optional
        Tiles of the attention kernel, whose sizes granularity "block" takes; fa_int8's own for
        this head_dim when omitted, in the form that runs (of V in 8 bits: in the portable form).
    arch : str, optional
        ``"sm_90a"``: that is the Hopper form; anything else: it is not. The device's own when
        omitted.
    backend : {"cuda", "mirror", "interpret"}, optional
        ``cuda`` for CuPy arrays, ``mirror`` or ``interpret`` for NumPy arrays, as for
        `cupyattn.attention`.
    cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k
        As for `cupyattn.attention_varlen`, which takes the result: operands are packed sequences.
        Means, scales and groups of rows are those of a sequence; given scales go with granularity
        "tensor" and "head", and are those of a batch of so many entries.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps
        As for `cupyattn.attention`: rows of Q and K are normalised and turned in the launches that
        quantise them, in float32, and then have codes, means and scales. With ``quant.fused`` they
        are rounded to their type before, as `attention` does.

    Returns
    -------
    QuantizedQKV
        Arrays of the kind that came in; codes of 4 bits two to a byte. The codes and scales of all
        backends agree bit for bit where the means do.

    Raises
    ------
    ValueError, TypeError
        For arrays that do not fit together, a backend that does not take them, or tiles that 8-bit
        values do not take.
    UnsupportedError
        For a head_dim past 256, and what `QuantConfig` says.
    DeviceMemoryError
        If what is made does not fit; nothing was launched then.

    Notes
    -----
    A NaN or an infinity gives the rows that share its scale a NaN scale, hence NaN scores: never
    finite garbage. In V it makes its channel NaN, in the rows that look at its group.
    `cupyattn.quant.quantizers.quantize_symmetric` and `quantize_affine` state formula and error.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 40, 16)).astype(np.float16)
    >>> x = quantize(q, k, v, quant=QuantConfig(granularity_q="token", granularity_k="head"))
    >>> x.q_scale.shape, x.k_scale.shape
    ((1, 2, 40), (1, 2, 1))
    """
    q, k, v = (operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    array_namespace(q, k, v)
    backend = choose(backend, q)
    checks.check_dtype(q, k, v)
    quant = QuantConfig() if quant is None else quant
    sequences = None
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    limits = {"max_len_q": max_len_q, "max_len_k": max_len_k}
    if any(x is not None for x in packed.values()):
        check_packed_quant(quant)
        named = zip("qkv", (q, k, v), strict=True)
        q, k, v = (one_entry(name, x).swapaxes(1, 2) for name, x in named)
        sizes = checks.check_shapes(q.shape, k.shape, v.shape)
        sequences = take_sequences(q, sizes[3:5], {**packed, **limits})
    elif any(x is not None for x in limits.values()):
        raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
    _, heads, heads_kv, len_q, len_kv, head_dim = checks.check_shapes(q.shape, k.shape, v.shape)
    longest = (len_q, len_kv) if sequences is None else (sequences.max_len_q, sequences.max_len_k)
    preparation = Preparation.of(
        {
            "rope": rope, "rope_interleaved": rope_interleaved, "rope_offset_q": rope_offset_q,
            "qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps,
        },
        (heads, heads_kv, *longest, head_dim),
    )  # fmt: skip
    tiles = _tiles_of(q, quant, tiles, arch, backend)
    if backend != "mirror":
        found = _quantize_kernels(q, k, v, quant, tiles, backend, sequences, preparation)
    elif sequences is None:
        found = quantize_mirror(q, k, v, quant, tiles, preparation=preparation)
    else:
        found = _quantize_sequences(q, k, v, quant, tiles, sequences, preparation)
    return found.in_nibbles() if quant.qk_bits == 4 else found


def _tiles_of(
    q: Array, quant: QuantConfig, tiles: Tiles | None, arch: str | None, backend: str
) -> Tiles:
    """Return the tiles of the attention kernel, checked against how V is quantised."""
    check_arch(arch)
    if tiles is not None:
        check_rows_of(tiles)
    arch = arch or own_arch(backend, q)
    if tiles is None:
        tiles = scale_tiles(registry.lookup("fa_int8"), q.shape[3], quant, arch)
    check_value_tiles(quant, tiles, arch)
    return tiles


def quantize_at(
    q: Array,
    k: Array,
    v: Array,
    places: Array,
    *,
    quant: QuantConfig,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str,
    key_sums: Array | None = None,
) -> QuantizedQKV:
    """Quantise some keys of many from where they lie, as `quantize` does keys that were moved.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
    k : array, (batch, heads_kv, len_kv, head_dim)
    v : array, (batch, heads_kv, count, head_dim)
        Rows that were moved together.
    places : array, int32, (batch, heads_kv, count), contiguous
        Of the keys that these values belong to, below len_kv: nobody looks.
    quant, tiles, arch
        As for `quantize`, but for ``fused``, which quantises in the attention kernel.
    backend : {"cuda", "interpret"}
    key_sums : array, float32, (batch, heads_kv, parts, head_dim), contiguous, optional
        Sums of all len_kv keys, in parts. What smoothing subtracts is then the mean of all of them,
        which any vector may stand for, and no key is read for its mean. A scale for each whole
        head, which takes a read before the codes anyway, goes with the mean of the keys at
        `places` all the same.

    Returns
    -------
    QuantizedQKV
        The bits of `quantize` on those keys moved together, to places aligned as those of k are:
        the order in which a mean is summed goes by the width of accesses. With `key_sums` the bits
        of codes with that mean, which is its ``k_mean``.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, DeviceMemoryError
        As `quantize`.
    """
    q, k, v = (operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    checks.check_dtype(q, k, v)
    tiles = _tiles_of(q, quant, tiles, arch, backend)
    found = _quantize_kernels(q, k, v, quant, tiles, backend, None, None, places, key_sums)
    return found.in_nibbles() if quant.qk_bits == 4 else found


def quantize_mirror(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    *,
    k_mean: Array | None = None,
    v_mean: Array | None = None,
    preparation: Preparation | None = None,
) -> QuantizedQKV:
    """Quantise NumPy arrays as the kernel quantises CuPy arrays.

    Parameters
    ----------
    q, k, v, quant, tiles
        As for `quantize`.
    k_mean, v_mean : array, (batch, heads_kv, head_dim), float32, optional
        The means to subtract where `quant` smooths; computed when omitted. The kernel sums in
        another order, so a comparison to the bit hands its means over.
    preparation : Preparation, optional
        What happens to the rows of q and k first.

    Returns
    -------
    QuantizedQKV
    """
    out_dtype = q.dtype.name
    if preparation is not None:
        prepare = preparation.stored if quant.fused else preparation.in_float32
        q, k = prepare(q, k)
    if quant.smooth_k and k_mean is None:
        k_mean = channel_mean(k)
    fields: dict[str, Any] = {"group_v": quant.group_v(tiles)}
    groups = {"q": quant.group_q(tiles), "k": quant.group_kv(tiles)}
    granularities = {"q": quant.granularity_q, "k": quant.granularity_k}
    static = static_scales(np, quant, q.shape, k.shape, tiles)
    for name, x in (("q", q), ("k", k)):
        how: dict[str, Any] = {
            "per_tensor": granularities[name] == "tensor",
            "mean": k_mean if name == "k" and quant.smooth_k else None,
        }
        if quant.zero_points:
            coded: tuple[Array, ...] = quantize_affine(x, groups[name], **how)
        else:
            how |= {"static_scale": static[name], "largest": quant.largest_code}
            coded = quantize_symmetric(x, groups[name], **how)
        coded = (in_padded_rows(coded[0]), *coded[1:])
        fields |= zip((f"{name}_codes", f"{name}_scale", f"{name}_zero"), coded, strict=False)
    if quant.form == "pv8":
        if quant.smooth_v:
            fields["v_mean"] = channel_mean(v) if v_mean is None else v_mean
        if quant.value_zero_points:
            coded = quantize_values_affine(v, fields["group_v"], fields.get("v_mean"))
        else:
            coded = quantize_values(
                v, fields["group_v"], fields.get("v_mean"), e4m3=quant.pv == "fp8"
            )
        fields |= zip(("v_codes", "v_scale", "v_zero"), coded, strict=False)
    return QuantizedQKV(
        v=None if quant.form == "pv8" else value_operand(v), group_q=groups["q"],
        group_kv=groups["k"], config=quant, out_dtype=out_dtype,
        k_mean=k_mean if quant.smooth_k else None, **fields,
    )  # fmt: skip


def _quantize_sequences(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    sequences: Sequences,
    preparation: Preparation | None,
) -> QuantizedQKV:
    """Quantise packed sequences one by one, and lay the results as the kernels lay theirs."""
    ends = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    parts = []
    for number, (of_q, of_k) in enumerate(zip(*map(pairwise, ends), strict=True)):
        rows, keys = slice(*of_q), slice(*of_k)
        one = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        parts.append(quantize_mirror(*one, quant.of_entry(number), tiles, preparation=preparation))
    nothing = q[:, :, :0], k[:, :, :0], v[:, :, :0]
    template = quantize_mirror(*nothing, quant.of_entry(0), tiles)
    joined: QuantizedQKV = replace(join(parts, template, sequences), config=quant)
    return joined


def check_packed_quant(quant: QuantConfig) -> None:
    """Raise UnsupportedError unless packed sequences can be quantised so."""
    granularities = quant.granularity_q, quant.granularity_k
    if quant.static and not {*granularities} <= {"tensor", "head"}:
        raise UnsupportedError(
            "given scales of packed sequences are supported for granularity 'tensor' and 'head', "
            f"got {granularities[0]!r} and {granularities[1]!r}: use one of these, or "
            "scales='dynamic'"
        )


def scale_tiles(
    variant: registry.Variant, head_dim: int, quant: QuantConfig, arch: str | None
) -> Tiles:
    """Return the tiles whose sizes granularity "block" takes: the variant's own, as it runs there.

    A step of the Hopper form then meets one scale of K.
    """
    form = quant.form
    if arch == "sm_90a" and "sm90" in variant.forms:
        if form == "portable":
            form = "sm90"
        elif quant.value_p_type == "u8" and quant.granularity_v == "channel":
            form = "sm90_pv8"
        elif quant.value_p_type == "u8" and not quant.zero_points:
            form = "sm90_pv8_by_tile"
    return variant.default_tiles(head_dim, form)


def check_rows_of(tiles: Tiles) -> None:
    """Raise unless tiles that are given for quantising are those of some INT8 kernel."""
    check_kind(tiles)
    if tiles.block_q % 16 or tiles.block_kv % 16:
        raise ValueError(
            f"fa_int8 does not take {tiles}: block_q and block_kv must be multiples of 16, the "
            "rows of a matrix product (tiles=None takes its own)"
        )


def check_value_tiles(quant: QuantConfig, tiles: Tiles, arch: str | None) -> None:
    """Raise ValueError unless 8-bit values, where asked for, take tiles of these sizes."""
    hopper = arch == "sm_90a" and quant.granularity_v == "channel" and tiles.block_kv % 32 == 0
    if quant.form == "pv8" and tiles.block_kv not in (32, 64, 128) and not hopper:
        raise ValueError(
            f"pv={quant.pv!r} needs tiles.block_kv of 32, 64 or 128, whole matrix products of 32 "
            f"keys, got {tiles.block_kv}"
        )


def scale_shape(x: tuple[int, ...], group: int, granularity: str) -> tuple[int, int, int]:
    """Return the shape of the scales of an operand of shape (batch, heads, length, head_dim)."""
    groups = group_count(x[2], group)
    return (1, 1, groups) if granularity == "tensor" else (x[0], x[1], groups)


def static_scales(
    xp: Any,
    quant: QuantConfig,
    q: tuple[int, ...],
    k: tuple[int, ...],
    tiles: Tiles,
    sequences: int | None = None,
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
    sequences : int, optional
        How many are packed in the operands: scales are given for a batch of so many, and returned
        as (1, heads or 1, sequences).

    Raises
    ------
    ValueError
        If a shape does not fit the operand, or (on NumPy, where looking costs nothing) a value is
        no finite number from 2^-126 up.
    UnsupportedError
        If zero points were to go with them.
    """
    if not quant.static:
        return {"q": None, "k": None}
    if quant.zero_points:
        raise UnsupportedError(
            "given scales quantise without zero points: use symmetric=True or scales='dynamic', or "
            "QuantizedQKV.from_codes for codes with scales and zero points of your own"
        )
    found: dict[str, Array | None] = {}
    for name, given, shape, group, granularity in (
        ("q", quant.scales[0], q, quant.group_q(tiles), quant.granularity_q),
        ("k", quant.scales[1], k, quant.group_kv(tiles), quant.granularity_k),
    ):
        batch = shape[0] if sequences is None else sequences
        wanted = scale_shape((batch, *shape[1:]), group, granularity)
        if hasattr(given, "dtype"):
            given = operand(f"the static {name}_scale", given)
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
        whole = array if array.shape == wanted else xp.broadcast_to(array, wanted)
        if sequences is not None:
            whole = xp.broadcast_to(whole, (sequences, *wanted[1:])).swapaxes(0, 2)
        found[name] = xp.ascontiguousarray(whole)
    return found


def value_operand(v: Array) -> Array:
    """Return V as the second product takes it: its own 16-bit type, float16 for float32."""
    return v.astype(np.float16) if v.dtype.name == "float32" else v


def _quantize_kernels(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    backend: str,
    sequences: Sequences | None,
    preparation: Preparation | None,
    places: Array | None = None,
    key_sums: Array | None = None,
) -> QuantizedQKV:
    """Quantise arrays where they lie, with the kernels of ``quantize*.cu``.

    With `places`, those rows of k alone, as many as v has; `key_sums` as in `quantize_at`.
    """
    dtype = q.dtype.name
    if preparation is not None and quant.fused:
        q, k = preparation.stored(q, k)
        preparation = None
    arrays = {n: contiguous_last_axis(x) for n, x in zip("qkv", (q, k, v), strict=True)}
    packed = {n: None if sequences is None else sequences.packed(n) for n in arrays}
    operands = {n: Operand.of(x) for n, x in arrays.items()}
    if places is not None:
        operands["k"] = replace(operands["k"], shape=(*k.shape[:2], places.shape[2], k.shape[3]))
    found = parts(quant, tiles, operands, packed, prepares_of(preparation))
    if places is not None:
        found["k"] = replace(found["k"], gathered=True)
    if key_sums is not None and found["k"].sums_apart:
        found["k"] = replace(found["k"], summed=(key_sums.shape[2], k.shape[2]))
    plan = plan_quantize(dtype, **found, p_type=quant.value_p_type, qk_bits=quant.qk_bits)
    xp = array_namespace(q)
    needed = {work.name: work.nbytes for work in plan.workspace}
    for name, part in found.items():
        sizes = part.buffers(name).items()
        needed |= {b: math.prod(shape) * np.dtype(kind).itemsize for b, (shape, kind) in sizes}
    on_device = backend == "cuda"
    with on_device_of(q), saying_what_is_needed("quantize", needed, on_device=on_device):
        count = None if sequences is None else sequences.batch
        made: dict[str, Array] = {}
        given: dict[str, Array] = {}
        for name, scale in static_scales(
            xp, quant, q.shape, operands["k"].shape, tiles, count
        ).items():
            if scale is not None:
                made[f"{name}_scale"] = scale.copy()
                given[f"{name}_static_scale"] = as_input(scale)
        for name, part in found.items():
            # Of packed sequences what lies between theirs is 0; so is the mean of no keys.
            empty = not all(part.x.shape)
            new = xp.zeros if sequences or empty else xp.empty
            for b, (shape, kind) in part.buffers(name).items():
                if b not in made and b not in given:
                    made[b] = new(shape, kind)
            if empty and sequences is None and not part.static:  # what a group of zeros has
                made[f"{name}_scale"].fill(1)
                if part.zero_points:
                    made[f"{name}_zero"].fill(-128)
        buffers = {**made, **given, **{name: as_input(x) for name, x in arrays.items()}}
        if places is not None:
            buffers["k_places"] = as_input(places)
        if found["k"].summed:
            buffers["k_partial_sum"] = as_input(key_sums)
        if preparation is not None:
            buffers |= {name: as_input(x) for name, x in preparation.buffers.items()}
        if sequences is not None:
            offsets = ("cu_seqlens_q", "cu_seqlens_k")
            buffers |= {name: as_input(getattr(sequences, name)) for name in offsets}
        run(backend, plan, buffers)
        kept = made | {name: made[name][..., : q.shape[3]] for name in ("q_codes", "k_codes")}
        if "v" not in found:
            kept["v"] = value_operand(v)
    return QuantizedQKV(
        group_q=quant.group_q(tiles), group_kv=quant.group_kv(tiles), config=quant,
        out_dtype=dtype, group_v=quant.group_v(tiles), **{"v": None, **kept},
        **({} if sequences is None else vars(sequences)),
    )  # fmt: skip
