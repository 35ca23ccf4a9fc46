"""`quantize`: from three arrays to the operands of INT8 attention, on whatever device they lie."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.interchange import (
    as_it_is,
    contiguous_last_axis,
    operand,
    take,
    taken,
    taken_pair,
)
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import choose, own_arch
from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.kernels import limits as kernels_limits
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.ops.operation import Known, run
from cupyattn.plans.prepare_rows import prepares_of
from cupyattn.plans.quantize import Part, operand_parts, plan_quantize
from cupyattn.plans.records import Work
from cupyattn.problem import checks
from cupyattn.problem.borrowed_names import points_to_our_names
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.row_preparation import EPS, PAIRS, Preparation
from cupyattn.problem.sequences import Sequences, one_entry, take_sequences
from cupyattn.problem.support import value_tiles_support
from cupyattn.quant import queries
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.static_scales import check_packed_quant, static_scales
from cupyattn.reference.quantize import _quantize_sequences, quantize_mirror, value_operand


@points_to_our_names
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
        float16, bfloat16 or float32; any strides; NumPy, CuPy, or anything with DLPack. Not
        modified. Packed (total_q, heads, head_dim).
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
        Codes of 4 bits two to a byte. Its arrays are NumPy's or CuPy's, on the device of q; what
        `cupyattn.attention` makes of it is of the kind of q. The codes and scales of all backends
        agree bit for bit where the means do.

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
    if quant is not None and not isinstance(quant, QuantConfig):
        raise TypeError(f"quant must be a cupyattn.QuantConfig or None, got {shown(quant)}")
    settings = QuantizeSettings(
        quant, tiles, arch, backend, max_len_q, max_len_k, rope_interleaved, rope_offset_q,
        qk_norm_eps,
    )  # fmt: skip
    arrays = {"q": q, "k": k, "v": v}
    others = {
        "rope": rope, "qk_norm": qk_norm, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    arrays |= {name: array for name, array in others.items() if array is not None}
    known = None
    if len(arrays) == 3 and (quant is None or not quant.static):  # nothing is looked at or kept
        known = Known(arrays, tuple(map(type, settings)))  # 1 is no True, though equal to it
    found: QuantizedQKV = run(QUANTIZE, settings, arrays, known)
    return found


@functools.wraps(QuantizedQKV.with_q)
def _with_q(self: QuantizedQKV, q: Array, **options: Any) -> QuantizedQKV:
    arguments, as_given = queries.of_call(self, q, options)
    found: QuantizedQKV = queries.with_codes(self, quantize(**arguments), as_given)
    return found


# NOTE: the record stands above this package, so it cannot call what makes codes.
QuantizedQKV.with_q = _with_q  # type: ignore[method-assign]


def _rebuilt(state: dict[str, Any]) -> QuantizedQKV:
    """Return a record from a pickle; that names this function, so this module is imported."""
    record = object.__new__(QuantizedQKV)
    vars(record).update(state)
    return record


copyreg.pickle(QuantizedQKV, lambda record: (_rebuilt, (vars(record),)))


@points_to_our_names
def quantize_kv(
    k: Array,
    v: Array,
    *,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    cu_seqlens_k: Any = None,
    max_len_k: int | None = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
) -> QuantizedQKV:
    """Quantise keys and values once, for queries that come later.

    Parameters
    ----------
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        float16, bfloat16 or float32; any strides; NumPy, CuPy, or anything with DLPack. Not
        modified. Packed (total_k, heads_kv, head_dim).
    quant, tiles, arch, backend
        As for `quantize`. Given scales of Q are held to the queries when they come.
    cu_seqlens_k, max_len_k
        As for `quantize`: keys and values are packed sequences. `QuantizedQKV.with_q` then takes
        ``cu_seqlens_q`` and ``max_len_q``.
    rope, rope_interleaved, qk_norm, qk_norm_eps
        As for `quantize`: what happens to the rows of K first. Give `QuantizedQKV.with_q` the same
        for the queries.

    Returns
    -------
    QuantizedQKV
        The codes of `quantize` of these keys and values, with no query row: attention refuses it.
        ``quantize_kv(k, v).with_q(q)`` has the bits of ``quantize(q, k, v)``.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, DeviceMemoryError
        As `quantize`.

    Notes
    -----
    For keys that meet queries again and again, as in cross-attention to a text. The mean that is
    subtracted from the keys is theirs alone, so their codes do not depend on the queries.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 40, 16)).astype(np.float16)
    >>> kv = quantize_kv(k, v)
    >>> whole = quantize(q, k, v)
    >>> bool((kv.with_q(q).q_codes == whole.q_codes).all() and (kv.k_codes == whole.k_codes).all())
    True
    """
    (taken_k, as_given), (taken_v, _) = take("k", k), take("v", v)
    packed = cu_seqlens_k is not None
    names = "(total_k, heads_kv, head_dim)" if packed else "(batch, heads_kv, len_kv, head_dim)"
    if taken_k.ndim != names.count(",") + 1 or taken_k.shape != taken_v.shape:
        raise ValueError(
            f"k and v must both be {names}, got k.shape={tuple(taken_k.shape)} "
            f"v.shape={tuple(taken_v.shape)}"
        )
    checks.check_one_dtype(k=taken_k, v=taken_v)
    sequences: dict[str, Any] = {"max_len_k": max_len_k}
    if packed:
        no_rows = taken_k[:0]
        ends, _ = take("cu_seqlens_k", cu_seqlens_k)
        with on_device_of(ends):
            no_lengths = array_namespace(ends).zeros_like(ends)
        sequences |= {"cu_seqlens_q": no_lengths, "cu_seqlens_k": ends, "max_len_q": 0}
    else:
        no_rows = taken_k[:, :, :0]
    found = quantize(
        no_rows, taken_k, taken_v, quant=quant, tiles=tiles, arch=arch, backend=backend, rope=rope,
        rope_interleaved=rope_interleaved, qk_norm=qk_norm, qk_norm_eps=qk_norm_eps, **sequences,
    )  # fmt: skip
    return replace(found, as_given=as_given, has_queries=False)


class QuantizeSettings(NamedTuple):
    """What `quantize` asks for, beside arrays: its arguments."""

    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    arch: str | None = None
    backend: str | None = None
    max_len_q: int | None = None
    max_len_k: int | None = None
    rope_interleaved: bool = False
    rope_offset_q: int = 0
    qk_norm_eps: float = EPS


@dataclass(frozen=True)
class Coding:
    """How operands become codes, settled.

    Parameters
    ----------
    quant : QuantConfig
    tiles : Tiles
        Those of the attention kernel.
    parts : mapping of str to Part
        What is done for each operand; empty on the mirror.
    sequences : Sequences or None
    preparation : Preparation or None
        What happens to the rows of Q and K first.
    """

    quant: QuantConfig
    tiles: Tiles
    parts: Mapping[str, Part] = field(default_factory=dict)
    sequences: Sequences | None = None
    preparation: Preparation | None = None


class CodeFacts(NamedTuple):
    """What `QuantizedQKV` is told beside arrays, and the head_dim that its rows of codes hold."""

    group_q: int
    group_kv: int
    group_v: int
    config: QuantConfig
    out_dtype: str
    head_dim: int
    sequences: Sequences | None = None
    prepared: tuple[str, ...] = ()
    as_given: Callable[[Any], Any] = as_it_is


class _Quantize:
    """Quantising Q, K and V as an operation."""

    name = "quantize"

    def resolve(self, settings: QuantizeSettings, arrays: Mapping[str, Any]) -> Problem:
        """Check the operands, and settle tiles and how they become codes."""
        q, as_given = take("q", arrays["q"])
        k, v = taken(k=arrays["k"], v=arrays["v"])
        array_namespace(q, k, v)
        backend = choose(settings.backend, q)
        checks.check_dtype(q, k, v)
        quant = settings.quant or QuantConfig()
        asked = {**_NOTHING, **settings._asdict(), **arrays}
        asked |= {option: taken_pair(names, asked[option]) for option, names in PAIRS.items()}
        sequences = None
        if "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays:
            check_packed_quant(quant)
            named = zip("qkv", (q, k, v), strict=True)
            q, k, v = (one_entry(name, x).swapaxes(1, 2) for name, x in named)
            sizes = kernels_limits.check_shapes(q.shape, k.shape, v.shape)
            sequences = take_sequences(q, sizes[3:5], asked)
        elif (settings.max_len_q, settings.max_len_k) != (None, None):
            raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
        _, heads, heads_kv, *longest, head_dim = kernels_limits.check_shapes(
            q.shape, k.shape, v.shape
        )
        if sequences is not None:
            longest = [sequences.max_len_q, sequences.max_len_k]
        preparation = Preparation.of(asked, (heads, heads_kv, longest[0], longest[1], head_dim))
        tiles = _tiles_of(q, quant, settings.tiles, settings.arch, backend)
        coding = Coding(quant, tiles, {}, sequences, preparation)
        if backend == "mirror":
            problem = Problem(
                what=self.name, backend=backend, operands={"q": q, "k": k, "v": v}, results={},
                facts=_facts(coding, q), settled=coding,
            )  # fmt: skip
        else:
            problem = coding_problem(q, k, v, coding, backend)
        return replace(problem, facts=problem.facts._replace(as_given=as_given))

    def plan(self, problem: Problem) -> Work:
        """Return the launches."""
        coding = problem.settled
        plan = plan_quantize(
            problem.facts.out_dtype, **coding.parts, p_type=coding.quant.value_p_type,
            qk_bits=coding.quant.qk_bits,
        )  # fmt: skip
        return Work.of(plan)

    def mirror(self, problem: Problem) -> dict[str, Any]:
        """Return what a `QuantizedQKV` holds, from NumPy."""
        coding, (q, k, v) = problem.settled, problem.operands.values()
        quant, tiles, how = coding.quant, coding.tiles, coding.preparation
        if coding.sequences is None:
            return {"whole": quantize_mirror(q, k, v, quant, tiles, preparation=how)}
        return {"whole": _quantize_sequences(q, k, v, quant, tiles, coding.sequences, how)}

    def restore(
        self, facts: CodeFacts, arrays: Mapping[str, Any], results: dict[str, Any]
    ) -> QuantizedQKV:
        """Return the operands of INT8 attention."""
        found = results.get("whole")
        if found is None:
            found = _gathered(facts, arrays, results)
        else:
            found = replace(found, prepared=facts.prepared, as_given=facts.as_given)
        return found.in_nibbles() if facts.config.qk_bits == 4 else found


QUANTIZE = _Quantize()
#: Arguments of `quantize` that are arrays, where they are not given.
_NOTHING = dict.fromkeys(("rope", "qk_norm", "cu_seqlens_q", "cu_seqlens_k"))


def _facts(coding: Coding, q: Array) -> CodeFacts:
    quant, tiles = coding.quant, coding.tiles
    groups = quant.group_q(tiles), quant.group_kv(tiles), quant.group_v(tiles)
    done = {} if coding.preparation is None else vars(coding.preparation)
    options = {"rope": "rope", "norm": "qk_norm"}
    prepared = tuple(options[name] for name, asked in done.items() if asked is not None)
    return CodeFacts(*groups, quant, q.dtype.name, int(q.shape[-1]), coding.sequences, prepared)


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
    value_tiles_support(quant, tiles, arch).check()
    return tiles


def quantize_at(
    q: Array,
    k: Array,
    v: Array,
    places: Array,
    settings: QuantizeSettings,
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
        Of the keys that these values belong to, below len_kv: that is not checked.
    settings : QuantizeSettings
        As for `quantize`, but for ``fused``, which quantises in the attention kernel; on a device
        or in the interpreter.
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
    arrays = {"q": q, "k": k, "v": v, "k_places": places}
    arrays |= {} if key_sums is None else {"k_partial_sum": key_sums}
    found: QuantizedQKV = run(QUANTIZE_AT, settings, arrays)
    return found


class _QuantizeAt(_Quantize):
    """Quantising some keys of many as an operation."""

    name = "quantize_at"

    def resolve(self, settings: QuantizeSettings, arrays: Mapping[str, Any]) -> Problem:
        """Check the operands, and settle tiles and how they become codes."""
        q, k, v = (operand(name, arrays[name]) for name in "qkv")
        checks.check_dtype(q, k, v)
        backend, quant = choose(settings.backend, q), settings.quant or QuantConfig()
        tiles = _tiles_of(q, quant, settings.tiles, settings.arch, backend)
        places, sums = arrays["k_places"], arrays.get("k_partial_sum")
        return coding_problem(q, k, v, Coding(quant, tiles), backend, places, sums)


QUANTIZE_AT = _QuantizeAt()


def check_rows_of(tiles: Tiles) -> None:
    """Raise unless tiles that are given for quantising are those of some INT8 kernel."""
    check_kind(tiles)
    if tiles.block_q % 16 or tiles.block_kv % 16:
        raise ValueError(
            f"fa_int8 does not take {tiles}: block_q and block_kv must be multiples of 16, the "
            "rows of a matrix product (tiles=None takes its own)"
        )


def coding_problem(
    q: Array,
    k: Array,
    v: Array,
    coding: Coding,
    backend: str,
    places: Array | None = None,
    key_sums: Array | None = None,
) -> Problem:
    """Settle how the kernels of ``quantize*.cu`` make codes of arrays where they lie.

    With `places`, of those rows of k alone, as many as v has; `key_sums` as in `quantize_at`.
    """
    quant, tiles, sequences = coding.quant, coding.tiles, coding.sequences
    preparation = coding.preparation
    with on_device_of(q):
        if preparation is not None and quant.fused:
            q, k = preparation.stored(q, k)
            preparation = None
        arrays = {n: contiguous_last_axis(x) for n, x in zip("qkv", (q, k, v), strict=True)}
    described = {n: Operand.of(x) for n, x in arrays.items()}
    if places is not None:
        shape = (*k.shape[:2], places.shape[2], k.shape[3])
        described["k"] = replace(described["k"], shape=shape)
    packed = {n: None if sequences is None else sequences.packed(n) for n in arrays}
    found = operand_parts(quant, tiles, described, packed, prepares_of(preparation))
    if places is not None:
        found["k"] = replace(found["k"], gathered=True)
        arrays["k_places"] = places
    if key_sums is not None and found["k"].sums_apart:
        found["k"] = replace(found["k"], summed=(key_sums.shape[2], k.shape[2]))
        arrays["k_partial_sum"] = key_sums
    if "v" not in found:
        del arrays["v"]
    if preparation is not None:
        arrays |= preparation.buffers
    if sequences is not None:
        arrays |= {n: getattr(sequences, n) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    count = None if sequences is None else sequences.batch
    shapes = tuple(q.shape), described["k"].shape
    with on_device_of(q):
        given_scales = static_scales(array_namespace(q), quant, *shapes, tiles, count)
    arrays |= {f"{n}_static_scale": scale for n, scale in given_scales.items() if scale is not None}
    results = _results(found, given_scales, packed=sequences is not None)
    coding = replace(coding, parts=found)
    return Problem(
        what="quantize", backend=backend, operands=arrays, results=results,
        facts=_facts(coding, q), settled=coding,
    )  # fmt: skip


def _results(
    found: Mapping[str, Part], given_scales: Mapping[str, Array | None], *, packed: bool
) -> dict[str, Result]:
    """Return what the kernels make, and what is there before: scales that are given, zeros between
    packed sequences, and what no keys and a group of zeros have."""
    results = {}
    for name, part in found.items():
        empty = not all(part.x.shape)
        of_nothing: dict[str, Any] = {}
        if empty and not packed and not part.static:
            of_nothing = {f"{name}_scale": 1, f"{name}_zero": -128}
        for buffer, (shape, dtype) in part.buffers(name).items():
            if buffer == f"{name}_static_scale":
                continue
            fill = of_nothing.get(buffer, 0 if packed or empty else None)
            if buffer == f"{name}_scale" and given_scales.get(name) is not None:
                fill = given_scales[name]
            results[buffer] = Result(shape, np.dtype(dtype), fill)
    return results


def _gathered(
    facts: CodeFacts, arrays: Mapping[str, Any], results: dict[str, Any]
) -> QuantizedQKV:
    """Return the results of kernels, and V where it stays as it is, as operands of attention."""
    of_facts = facts._asdict()
    sequences, head_dim = of_facts.pop("sequences"), of_facts.pop("head_dim")
    kept = results | {name: results[name][..., :head_dim] for name in ("q_codes", "k_codes")}
    if "v_codes" not in results:
        v, _ = take("v", arrays["v"])
        v = v if facts.sequences is None else one_entry("v", v).swapaxes(1, 2)
        kept["v"] = value_operand(v)
    return QuantizedQKV(
        **of_facts, **{"v": None, **kept}, **({} if sequences is None else vars(sequences))
    )
