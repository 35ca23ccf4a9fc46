"""`quantize`: from three arrays to the operands of INT8 attention, on any device."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import imported, is_cupy, operand, take, unchanged
from cupyattn.arrays.kinds import PLAIN, Array, array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.compiler.target import choose
from cupyattn.errors import shown
from cupyattn.kernels import limits as kernels_limits
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.call_operands import named, pair_of, scales_of, with_limits
from cupyattn.ops.coding import (
    Coding,
    Made,
    coding_problem,
    given_scales,
    made_of,
    read_beside,
    tiles_of,
)
from cupyattn.ops.operation import Operation, problem_of, run
from cupyattn.plans.quantize import plan_quantize
from cupyattn.plans.records import Work
from cupyattn.problem import checks
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.problem import Problem, ValueCheck
from cupyattn.problem.row_preparation import BUFFERS_OF, EPS, Preparation
from cupyattn.problem.sequences import (
    SEQUENCES,
    Sequences,
    describe_sequences,
    one_entry,
)
from cupyattn.quant import queries
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import CodeFacts, QuantizedQKV
from cupyattn.quant.static_scales import (
    check_packed_quant,
)
from cupyattn.reference.quantize import _quantize_sequences, quantize_mirror, value_operand


@explains_foreign_arguments
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
    qk_norm_split: int = 0,
) -> QuantizedQKV:
    """Quantise Q and K to INT8, and V where `quant` says so.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32; any strides; NumPy, CuPy, or anything with DLPack. Not
        modified. Packed (total_q, heads, head_dim).
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Of the same type; packed (total_k, heads_kv, head_dim). With ``pv="16bit"`` V is unchanged,
        except that float32 becomes float16, with infinity for magnitudes past 65504.
    quant : QuantConfig, optional
        How to quantise; ``QuantConfig()`` when omitted.
    tiles : Tiles, optional
        Tiles of the attention kernel, whose sizes granularity "block" uses. By default those of
        fa_int8 for this head_dim, in the form that runs (for V in 8 bits: in the portable form).
    arch : str, optional
        ``"sm_90a"`` for the Hopper form, anything else for the portable form; the architecture of
        the device when omitted.
    backend : {"cuda", "mirror", "interpret"}, optional
        ``cuda`` for CuPy arrays, ``mirror`` or ``interpret`` for NumPy arrays, as for
        `cupyattn.attention`.
    cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k
        As for `cupyattn.attention_varlen`, which takes the result: operands are packed sequences.
        Each sequence has separate means, scales and groups of rows. Given scales need granularity
        "tensor" or "head" and have one entry for each sequence.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps, qk_norm_split
        As for `cupyattn.attention`. The launches that quantise rows of Q and K first normalise and
        rotate them in float32. With ``quant.fused`` the rows are rounded to their type between, as
        `attention` does.

    Returns
    -------
    QuantizedQKV
        Codes of 4 bits are stored two to a byte. Its arrays are NumPy or CuPy arrays on the device
        of q; results of `cupyattn.attention` have the kind of q. Codes and scales of all backends
        agree bit for bit if their means agree.

    Raises
    ------
    ValueError, TypeError
        For arrays that do not fit together, a backend that does not take them, or tiles that do not
        support 8-bit values.
    UnsupportedError
        For a head_dim past 256, and as for `QuantConfig`.
    DeviceMemoryError
        If the results do not fit in memory. Nothing was launched.

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
        qk_norm_eps, qk_norm_split,
    )  # fmt: skip
    arrays = named(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    as_given: Callable[[Any], Any] = unchanged
    for option, pair in (("rope", rope), ("qk_norm", qk_norm)):
        if pair is not None:
            arrays |= pair_of(option, pair)
    if not type(q) is type(k) is type(v) in PLAIN and not all(map(is_cupy, arrays.values())):
        arrays, as_given = imported(arrays)
    facts: tuple[Any, ...] | None = tuple(map(type, settings))  # 1 is no True, though equal to it
    if len(arrays) > 3 and "cu_seqlens_q" in arrays and None in (max_len_q, max_len_k):
        settings, facts = with_limits(settings, arrays), None
    static = quant is not None and quant.static
    if quant is not None and static:
        settings, arrays = _with_scales(settings, quant, arrays)
    prepared: tuple[str, ...] = ()
    if quant is not None and quant.fused and (rope is not None or qk_norm is not None):
        arrays, settings, prepared = _prepared_first(arrays, settings)
    found: QuantizedQKV = run(QUANTIZE, settings, arrays, facts)
    if prepared:
        found = found.with_facts(prepared=prepared)
    if quant is not None and static:
        found = found.with_facts(config=quant)
    return found if as_given is unchanged else found.with_facts(as_given=as_given)


def check_described(
    q: Described,
    k: Described,
    v: Described,
    *,
    quant: QuantConfig | None,
    tiles: Tiles | None,
    arch: str | None,
    backend: str | None,
) -> None:
    """Raise as `quantize` does, for descriptions of operands."""
    settings = QuantizeSettings(quant, tiles, arch, backend)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    if quant is not None and quant.static:
        settings, arrays = _with_scales(settings, quant, arrays)
    problem_of(QUANTIZE, settings, arrays)


def _with_scales(
    settings: QuantizeSettings, quant: QuantConfig, arrays: Mapping[str, Any]
) -> tuple[QuantizeSettings, dict[str, Any]]:
    """Return a call with given scales among its arrays, and their descriptions in its settings."""
    scales = scales_of(quant, arrays, "BHSD")
    return settings._replace(quant=quant.described), {**arrays, **scales}


def _prepared_first(
    arrays: dict[str, Array], settings: QuantizeSettings
) -> tuple[dict[str, Array], QuantizeSettings, tuple[str, ...]]:
    """Return a call with prepared rows of Q and K, and their preparation.

    A kernel that quantises itself needs prepared rows. On the mirror the call is unchanged."""
    problem: Problem = problem_of(QUANTIZE, settings, arrays)
    how, packed = problem.settled.preparation, problem.settled.sequences is not None
    if problem.backend == "mirror":
        return arrays, settings, ()
    with on_device_of(arrays["q"]):
        bound = problem.bound(arrays)
        rows = how.with_arrays(bound).stored(bound["q"], bound["k"])
    names = {n for option in BUFFERS_OF.values() for n in option}
    given = {n: x for n, x in arrays.items() if n not in names}
    given |= {n: x[0].swapaxes(0, 1) if packed else x for n, x in zip("qk", rows, strict=True)}
    settings = settings._replace(
        rope_interleaved=False, rope_offset_q=0, qk_norm_eps=EPS, qk_norm_split=0
    )
    return given, settings, problem.facts.prepared


@functools.wraps(QuantizedQKV.with_q)
def _with_q(self: QuantizedQKV, q: Array, **options: Any) -> QuantizedQKV:
    arguments, as_given = queries.of_call(self, q, options)
    found: QuantizedQKV = queries.with_codes(self, quantize(**arguments), as_given)
    return found


# NOTE: the record stands above this package, so it cannot call the functions that make codes.
QuantizedQKV.with_q = _with_q  # type: ignore[method-assign]


def _rebuilt(state: dict[str, Any]) -> QuantizedQKV:
    """Return a record from a pickle; that names this function, so this module is imported."""
    record = object.__new__(QuantizedQKV)
    vars(record).update(state)
    return record


copyreg.pickle(QuantizedQKV, lambda record: (_rebuilt, (vars(record),)))


@explains_foreign_arguments
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
    qk_norm_split: int = 0,
) -> QuantizedQKV:
    """Quantise keys and values once, for queries that come later.

    Parameters
    ----------
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        float16, bfloat16 or float32; any strides; NumPy, CuPy, or anything with DLPack. Not
        modified. Packed (total_k, heads_kv, head_dim).
    quant, tiles, arch, backend
        As for `quantize`. Given scales of Q are checked when the queries are given.
    cu_seqlens_k, max_len_k
        As for `quantize`: keys and values are packed sequences. `QuantizedQKV.with_q` then takes
        ``cu_seqlens_q`` and ``max_len_q``.
    rope, rope_interleaved, qk_norm, qk_norm_eps, qk_norm_split
        As for `quantize`: the preparation of the rows of K. Give `QuantizedQKV.with_q` the same
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
    Use it for keys that serve many calls, as in cross-attention to a text. The mean that is
    subtracted depends only on the keys, so their codes do not depend on the queries.

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
        rope_interleaved=rope_interleaved, qk_norm=qk_norm, qk_norm_eps=qk_norm_eps,
        qk_norm_split=qk_norm_split, **sequences,
    )  # fmt: skip
    return found.with_facts(as_given=as_given, has_queries=False)


class QuantizeSettings(NamedTuple):
    """Arguments of `quantize`, except arrays."""

    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    arch: str | None = None
    backend: str | None = None
    max_len_q: int | None = None
    max_len_k: int | None = None
    rope_interleaved: bool = False
    rope_offset_q: int = 0
    qk_norm_eps: float = EPS
    qk_norm_split: int = 0


class _Quantize(Operation):
    """Quantising Q, K and V as an operation."""

    name = "quantize"

    def resolve(
        self, settings: QuantizeSettings, arrays: Mapping[str, Described]
    ) -> Problem:
        """Check the operands, and settle tiles and how they become codes."""
        rows = {name: arrays[name] for name in "qkv"}
        check_together(**rows)
        backend = choose(settings.backend, rows["q"].device >= 0)
        checks.check_one_dtype(**rows)
        quant = settings.quant or QuantConfig()
        sequences: Sequences | None = None
        looks: tuple[ValueCheck, ...] = ()
        if "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays:
            check_packed_quant(quant)
            rows = {name: one_entry(name, x).swapaxes(1, 2) for name, x in rows.items()}
            q, k, v = rows.values()
            sizes = kernels_limits.check_shapes(q.shape, k.shape, v.shape)
            limits = settings.max_len_q, settings.max_len_k
            sequences, looks = describe_sequences(q, sizes[3:5], arrays, limits)
        elif (settings.max_len_q, settings.max_len_k) != (None, None):
            raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
        q, k, v = rows.values()
        _, heads, heads_kv, *longest, head_dim = kernels_limits.check_shapes(
            q.shape, k.shape, v.shape
        )
        if sequences is not None:
            longest = [sequences.max_len_q, sequences.max_len_k]
        pairs = {
            option: tuple(arrays[name] for name in names) if names[0] in arrays else None
            for option, names in BUFFERS_OF.items()
        }
        sizes_of_rows = heads, heads_kv, longest[0], longest[1], head_dim
        preparation = Preparation.of({**settings._asdict(), **pairs}, sizes_of_rows, quant.rotate)
        tiles = tiles_of(rows["q"], quant, settings.tiles, settings.arch, backend)
        coding = Coding(quant, tiles, {}, sequences, preparation)
        scales = given_scales(coding, rows, arrays)
        if backend == "mirror":
            return Problem(
                what=self.name, backend=backend, results={}, looks=looks,
                operands=rows | read_beside(coding) | {name: arrays[name] for name in scales},
                facts=made_of(coding, rows), settled=coding,
            )  # fmt: skip
        return replace(coding_problem(rows, coding, backend, scales), looks=looks)

    def plan(self, problem: Problem) -> Work:
        """Return the launches."""
        coding = problem.settled
        plan = plan_quantize(
            problem.facts.out_dtype, **coding.parts, p_type=coding.quant.value_p_type,
            qk_bits=coding.quant.qk_bits,
        )  # fmt: skip
        return Work.of(plan)

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Compute the contents of a `QuantizedQKV` with NumPy."""
        coding, (q, k, v) = problem.settled, (arrays[name] for name in "qkv")
        quant, tiles, how = coding.quant.with_scales(arrays), coding.tiles, coding.preparation
        how = how and how.with_arrays(arrays)
        if coding.sequences is None:
            return {"whole": quantize_mirror(q, k, v, quant, tiles, preparation=how)}
        sequences = replace(coding.sequences, **{name: arrays[name] for name in SEQUENCES})
        return {"whole": _quantize_sequences(q, k, v, quant, tiles, sequences, how)}

    def restore(
        self, facts: Made, arrays: Mapping[str, Any], results: dict[str, Any]
    ) -> QuantizedQKV:
        """Return the operands of INT8 attention."""
        found = results.get("whole")
        if found is None:
            found = _gathered(facts, arrays, results)
        else:
            found = found.with_facts(prepared=facts.prepared)
        return found.in_nibbles() if facts.config.qk_bits == 4 else found


QUANTIZE = _Quantize()


def quantize_at(
    q: Array,
    k: Array,
    v: Array,
    places: Array,
    settings: QuantizeSettings,
    key_sums: Array | None = None,
) -> QuantizedQKV:
    """Quantise some of many keys in place, as `quantize` does after they were moved together.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
    k : array, (batch, heads_kv, len_kv, head_dim)
    v : array, (batch, heads_kv, count, head_dim)
        Rows that were moved together.
    places : array, int32, (batch, heads_kv, count), contiguous
        Indices of the keys of these values, below len_kv, which is not checked.
    settings : QuantizeSettings
        As for `quantize`, on a device or in the interpreter, but without ``fused``, which would
        quantise in the attention kernel.
    key_sums : array, float32, (batch, heads_kv, parts, head_dim), contiguous, optional
        Sums of all len_kv keys, in parts. Smoothing may subtract any vector; it then subtracts the
        mean of all keys, without reading them again. A scale for each whole head needs a read
        before the codes in any case, so it uses the mean of the keys at `places`. So do rotated
        keys.

    Returns
    -------
    QuantizedQKV
        The bits of `quantize` on these keys, moved together with the alignment of k: the order in
        which a mean is summed depends on the width of accesses. With `key_sums`, the bits of codes
        with that mean, which is its ``k_mean``.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, DeviceMemoryError
        As `quantize`.
    """
    arrays = {"q": q, "k": k, "v": v, "k_places": places}
    arrays |= {} if key_sums is None else {"k_partial_sum": key_sums}
    quant = settings.quant or QuantConfig()
    arrays |= scales_of(quant, arrays, "BHSD")
    asked = settings._replace(quant=quant.described)
    found: QuantizedQKV = run(QUANTIZE_AT, asked, arrays, None)
    return found.with_facts(config=quant)


class _QuantizeAt(_Quantize):
    """Quantising some keys of many as an operation."""

    name = "quantize_at"

    def resolve(
        self, settings: QuantizeSettings, arrays: Mapping[str, Described]
    ) -> Problem:
        """Check the operands, and settle tiles and how they become codes."""
        rows = {name: arrays[name] for name in "qkv"}
        checks.check_one_dtype(**rows)
        backend = choose(settings.backend, rows["q"].device >= 0)
        quant = settings.quant or QuantConfig()
        tiles = tiles_of(rows["q"], quant, settings.tiles, settings.arch, backend)
        (_, heads, len_q, head_dim), (_, heads_kv, len_kv, _) = rows["q"].shape, rows["v"].shape
        preparation = Preparation.of(
            {**settings._asdict(), **dict.fromkeys(BUFFERS_OF)},
            (heads, heads_kv, len_q, len_kv, head_dim),
            quant.rotate,
        )
        coding = Coding(quant, tiles, preparation=preparation)
        scales = given_scales(coding, rows, arrays)
        return coding_problem(rows, coding, backend, scales, arrays)


QUANTIZE_AT = _QuantizeAt()


def _gathered(
    facts: Made, arrays: Mapping[str, Any], results: dict[str, Any]
) -> QuantizedQKV:
    """Return the results of kernels, and V if it is unchanged, as operands of attention."""
    of_facts = facts._asdict()
    v, sequences, head_dim = (of_facts.pop(name) for name in ("v", "sequences", "head_dim"))
    kept = results | {name: results[name][..., :head_dim] for name in ("q_codes", "k_codes")}
    if v is not None:
        kept["v"] = operand("v", value_operand(v.bound(arrays["v"])))
    if sequences is not None:
        kept |= {name: x.bound(arrays[name]) for name, x in sequences.offsets.items()}
        of_facts |= {"max_len_q": sequences.max_len_q, "max_len_k": sequences.max_len_k}
    if "q_zero" in kept and "k_zero" in kept:  # whose constructor adds up its codes
        return QuantizedQKV(**of_facts, **{"v": None, **kept})
    return QuantizedQKV.of_buffers(CodeFacts(**of_facts), kept)
