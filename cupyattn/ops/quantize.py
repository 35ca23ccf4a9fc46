"""`quantize`: from three arrays to the operands of INT8 attention, on whatever device they lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import contiguous_last_axis, operand
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.arrays.memory import as_input, on_device_of
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import choose, own_arch
from cupyattn.kernels import ladder
from cupyattn.kernels import limits as kernels_limits
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.ops.run import run
from cupyattn.plans.prepare_rows import prepares_of
from cupyattn.plans.quantize import check_value_tiles, parts, plan_quantize
from cupyattn.problem import checks
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import EPS, Preparation
from cupyattn.problem.sequences import Sequences, one_entry, take_sequences
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.static_scales import check_packed_quant, static_scales
from cupyattn.reference.quantize import _quantize_sequences, quantize_mirror, value_operand
from cupyattn.runtime.scratch import saying_what_is_needed


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
        sizes = kernels_limits.check_shapes(q.shape, k.shape, v.shape)
        sequences = take_sequences(q, sizes[3:5], {**packed, **limits})
    elif any(x is not None for x in limits.values()):
        raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
    sizes = kernels_limits.check_shapes(q.shape, k.shape, v.shape)
    _, heads, heads_kv, len_q, len_kv, head_dim = sizes
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
        tiles = scale_tiles(ladder.lookup("fa_int8"), q.shape[3], quant, arch)
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


def check_rows_of(tiles: Tiles) -> None:
    """Raise unless tiles that are given for quantising are those of some INT8 kernel."""
    check_kind(tiles)
    if tiles.block_q % 16 or tiles.block_kv % 16:
        raise ValueError(
            f"fa_int8 does not take {tiles}: block_q and block_kv must be multiples of 16, the "
            "rows of a matrix product (tiles=None takes its own)"
        )


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
