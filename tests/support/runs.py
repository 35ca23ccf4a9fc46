"""Shared by tests of whole calls, on a device and in the interpreter: problems, runs, judgements,
and buffers with guards around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, attention_varlen, interpret, quantize
from cupyattn.arrays import interchange, memory
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.ladder import VARIANTS, Variant, lookup
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans.codes import Scales
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.operands import Codes, Operands
from cupyattn.problem.row_preparation import OPTIONS as PREPARATION
from cupyattn.problem.settings import check_attention
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from cupyattn.runtime import ready
from cupyattn.testing import verdict  # fmt: skip
from experiments._harness.few_blocks import hopper_blocks as hopper_blocks
from tests.support.planned import plan_attention, plan_int8

#: Every rung in every form that takes any call: ``"fa_tc"`` is the portable form, ``"fa_tc@sm90"``
#: the Hopper form, ``"fa_int8@pv8"`` the form with P and V in 8 bits. Lengths alone ask for the
#: split form; ``"fa_int8@fused"`` has the bits of fa_int8 (tests/kernels/test_fused.py),
#: ``"fa_int8@sm90_pv8"`` has tests/hopper/test_hopper_pv8.py, ``"fa_int8@sm90_pv8_by_tile"``
#: tests/hopper/test_hopper_by_tile.py, and ``"fa_int8@sm90_fp8"`` tests/hopper/test_hopper_fp8.py.
RUNGS = [
    name if form == "portable" else f"{name}@{form}"
    for name, variant in VARIANTS.items()
    for form in variant.forms
    if form not in ("split", "fused", "sm90_pv8", "sm90_pv8_by_tile", "sm90_fp8")
]
#: Those that every device runs.
PORTABLE = [rung for rung in RUNGS if "@" not in rung]


def variant_of(rung: str) -> Variant:
    return lookup(rung.partition("@")[0])


#: Spills that default tiles may have, in bytes by rung, dtype and head_dim: an address or two, read
#: once a step. The largest under NVRTC 13.0 and 13.5.
SPILLED = {
    ("fa_int8@pv8", dtype, head_dim): spilled
    for dtype in ("float16", "bfloat16", "float32")
    for head_dim, spilled in ((64, 4), (128, 16))
} | {
    ("fa_int8", "float32", 128): 16,
    ("fa_tc", "float16", 128): 36,
    ("fa_tc", "bfloat16", 128): 36,
    ("fa_int8@v8", "float16", 128): 64,  # on 8.9
    ("fa_int8@pv8", "float32", 64): 8,
    ("fa_int8@pv8", "float32", 256): 8,
}
#: The same by rung and head_dim, with a scale for every two rows and 16 keys, as a stack frame. The
#: Hopper form needs it for steps that are weighted again at the end of a row of keys.
SPILLED_FINE = {("fa_int8@sm90", 64): 224, ("fa_int8@pv8", 64): 16}
#: The same for packed sequences.
SPILLED_PACKED = {("fa_int8@pv8", 64): 4, ("fa_int8@pv8", 128): 28}
#: The same for padded entries. The form of P and V in 8 bits without Hopper has no register left at
#: head_dim 128.
SPILLED_PADDED = SPILLED_PACKED | {("fa_int8@pv8_whole", 128): 128}
#: The same for the split form with more than 16 rows: one number, stored before the loop and loaded
#: after it.
SPILLED_SPLIT = 4

#: Every rung with every storage type that it takes.
CELLS = [(rung, dtype) for rung in RUNGS for dtype in variant_of(rung).dtypes]

#: Rungs with one score per thread: they take the interpreter several times as long.
SCALAR = ("unfused", "fa", "fa_warps")


def in_turn(turn: int, rungs: Sequence[str] = tuple(VARIANTS)) -> list[Any]:
    """Return rungs as parameters of a test in the interpreter: two scalar rungs are marked slow.

    `turn` selects the third, which is quick. tests/kernels/test_cross.py crosses all with all
    features.
    """
    late = {rung for number, rung in enumerate(SCALAR) if number != turn % 3}
    return [pytest.param(rung, marks=[pytest.mark.slow] if rung in late else []) for rung in rungs]


def cells_in_turn(turn: int, cells: Sequence[tuple[str, str]] = CELLS) -> list[Any]:
    """Return cells as parameters of a test in the interpreter. Slow are cells of other types than
    float16, two scalar rungs as in `in_turn`, and the form of tests/quant/test_pv8_whole.py."""
    rungs = dict.fromkeys(rung for rung, _ in cells)
    late = {one.values[0] for one in in_turn(turn, tuple(rungs)) if one.marks}
    late.add("fa_int8@pv8_whole")
    return [
        pytest.param(
            rung, dtype, marks=[pytest.mark.slow] if rung in late or dtype != "float16" else []
        )
        for rung, dtype in cells
    ]


def on_both(turn: int, rungs: Sequence[str] = tuple(VARIANTS)) -> list[Any]:
    """Return pairs of rung and backend: all on the mirror, in the interpreter as `in_turn`."""
    interpreted = [
        pytest.param(*one.values, "interpret", marks=one.marks) for one in in_turn(turn, rungs)
    ]
    return [*((rung, "mirror") for rung in rungs), *interpreted]


#: Rungs whose operands are the caller's arrays.
PLAIN = [rung for rung in RUNGS if variant_of(rung).family != "int8"]
#: Elements of NaN on either side of a guarded array.
GUARD = 512

#: Options that are arrays.
ADDED = ("mask", "bias")
#: Options of backward passes: an array, and whether a bias has a gradient.
D_LSE, GRAD_BIAS = "d_lse", "grad_bias"

Arrays = tuple[Any, Any, Any]


# ---- arrays --------------------------------------------------------------------------------------


def normal(
    q: Sequence[int], kv: Sequence[int], dtype: str = "float16", seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N(0, 1) on the host."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in (q, kv, kv))


def revealing(
    batch: int, heads_kv: int, lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield operands and options that reveal mistakes: tails, several tiles, grouped heads, rising
    maxima, offsets in K, scores around 0 and far below. Windows, softcap, mask and bias."""
    for causal in (True, False):
        for seed, (len_q, len_kv) in enumerate(lengths):
            kv = (batch, heads_kv, len_kv, 64)
            q, k, v = normal((batch, 2 * heads_kv, len_q, 64), kv, seed=seed)
            k = k * 2 + 1
            yield (q, k, v), {"causal": causal}
            far_below_zero = q + 3, k - 7, v
            yield far_below_zero, {"causal": causal}
    len_q, len_kv = lengths[-1]
    q, k, v = normal((batch, 2 * heads_kv, len_q, 64), (batch, heads_kv, len_kv, 64))
    yield (q, k, v), {"window": (9, 30)}
    yield (q, k, v), {"window": (0, -1), "causal_align": "top-left"}
    rng = np.random.default_rng(0)
    shape = batch, 2 * heads_kv, len_q, len_kv
    by_head = np.arange(shape[1])[:, None, None], *np.ogrid[: -(-len_q // 64), : -(-len_kv // 64)]
    yield (q, k, v), {"block_mask": BlockMask((sum(by_head) % 2 == 1)[None], 64, 64)}
    bias = 2 * rng.standard_normal(shape)
    bias[..., : len_kv // 2] = -1e9  # as many do for masks: here in whole blocks, the first ones
    bias[rng.random(shape) < 0.2] = -np.inf
    added = {"mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32)}
    yield (q, k, v), {"softcap": 1.5, "causal": True, **added}
    tables = rope_tables(max(len_q, len_kv) + 9, 64)
    yield (q, k, v), {"rope": tables, "rope_offset_q": 9}
    yield (q, k, v), {"rope": tables, "rope_interleaved": True, "causal": True}
    yield (q, k, v), {"rope": column_tables(max(len_q, len_kv), 64)}


def rope_tables(positions: int, head_dim: int, dtype: str = "float32") -> tuple[Any, Any]:
    """Cosines and sines of the usual angles, position * 10000^(-2 d / head_dim)."""
    frequencies = 10000.0 ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(STORAGE[dtype]), np.sin(angles).astype(STORAGE[dtype])


def column_tables(positions: int, head_dim: int, seed: int = 0) -> tuple[Any, Any]:
    """Tables of numbers for each column, no two of a pair equal, some of them larger than 1."""
    numbers = np.random.default_rng(seed).uniform(-1.5, 1.5, (2, positions, head_dim))
    return tuple(numbers.astype(np.float32))


def widened(tables: tuple[Any, Any], interleaved: bool) -> tuple[Any, Any]:
    """Return tables of numbers for each column that repeat the number of each pair."""
    one, other = (np.repeat(x, 2, 1) if interleaved else np.tile(x, 2) for x in tables)
    return one, other


def revealing_splits() -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield the same for the split form: several rows of several heads, many keys."""
    q, k, v = normal((1, 6, 3, 64), (1, 2, 601, 64))
    yield (q, k * 2 + 1, v), {"causal": True}
    yield (q + 3, k - 7, v), {}
    yield (q, k, v), {"window": (70, 30), "causal_align": "top-left"}
    yield normal((1, 3, 12, 64), (1, 1, 513, 64)), {"causal": True}  # which two warps share


def revealing_stacks() -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield the same for stacked heads: rows of several of them in a warp, and in two tiles."""
    for heads, len_q, len_kv in ((8, 9, 600), (10, 15, 530)):
        yield normal((1, heads, len_q, 64), (1, 1, len_kv, 64)), {"causal": True}


#: Problems that reveal mistakes in forms for which `revealing` has no calls.
REVEALING = {"split": revealing_splits, "sm90": revealing_stacks}


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def bits(array: Any) -> bytes:
    """The elements of an array in C order, as bytes: NaN equals itself, -0 does not equal 0."""
    return np.ascontiguousarray(on_host(array)).tobytes()


def embedded(x: np.ndarray, pad: int = 8, fill: float = np.nan, *, xp: Any = np) -> Any:
    """Return `x` as a view of a larger buffer of `xp` that holds `fill` everywhere else."""
    shape = tuple(n + 2 for n in x.shape[:-1]) + (x.shape[-1] + 2 * pad,)
    buffer = np.full(shape, fill, x.dtype)
    inside = tuple(slice(1, n + 1) for n in x.shape[:-1]) + (slice(pad, pad + x.shape[-1]),)
    buffer[inside] = x
    return xp.asarray(buffer)[inside]


@dataclass(frozen=True)
class Guarded:
    """An array of NaN with `GUARD` elements of NaN before and behind it."""

    buffer: Any
    array: Any

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str, *, xp: Any = np) -> Guarded:
        count = int(np.prod(shape))
        buffer = xp.asarray(np.full(count + 2 * GUARD, np.nan, STORAGE[dtype]))
        return cls(buffer, buffer[GUARD : GUARD + count].reshape(shape))

    def check(self) -> None:
        """Raise unless both guards are unchanged and the array has been written in full."""
        buffer = on_host(self.buffer)
        before = np.full(GUARD, np.nan, buffer.dtype).tobytes()
        assert buffer[:GUARD].tobytes() == before, "written before the array"
        assert buffer[-GUARD:].tobytes() == before, "written behind the array"
        assert not np.isnan(buffer[GUARD:-GUARD].astype(np.float32)).any(), "left unwritten"


def revealing_zero_points(rung: str) -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield problems for zero points, which differ between groups."""
    q, k, v = normal((1, 4, 35, 64), (1, 2, 150, 64))
    rising = np.linspace(-3, 3, 150, dtype=np.float16)[:, None]
    sides = np.float16([1, -1]).repeat(32)  # so that no key outweighs all others
    given = {"pv": "int8", "smooth_v": False} if rung.endswith("@pv8") else {}
    for granularity in ("token", "thread"):
        quant = QuantConfig(granularity, granularity, symmetric=False, **given)
        options = {"quant": quant, "causal": granularity == "token"}
        yield (q + np.float16(1), k + rising * sides, v + rising), options


# ---- runs ----------------------------------------------------------------------------------------


def run_plan(backend: str, plan: Any, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run one plan on a device, or in the interpreter."""
    (ready if backend == "cuda" else interpret).run(plan, buffers, arch)


def asked_for(rung: str) -> dict[str, Any]:
    """Options of `attention` that choose the named rung, except the architecture."""
    chosen: dict[str, Any] = {"variant": variant_of(rung).name}
    if rung.endswith(("@pv8", "@sm90_pv8_by_tile")):
        chosen["quant"] = QuantConfig(pv="int8")
    if rung.endswith("@pv8_whole"):
        chosen["quant"] = QuantConfig(pv="int8", granularity_v="channel")
    if rung.endswith("@v8"):
        chosen["quant"] = QuantConfig(pv="int8", p_type="16bit")
    if rung.endswith("@sm90_pv8"):
        chosen["quant"] = QuantConfig(pv="int8", granularity_v="channel")
    if rung.endswith("@sm90_fp8"):
        chosen["quant"] = QuantConfig(pv="fp8", granularity_v="channel")
    if rung.endswith("@fused"):
        chosen["quant"] = QuantConfig(smooth_k=False, fused=True)
    return chosen


def attend(rung: str, *operands: Any, **options: Any) -> Any:
    """Call `attention` with the named rung."""
    chosen = {**asked_for(rung), **options}
    if isinstance(operands[0], QuantizedQKV):
        chosen.pop("quant", None)
    return attention(*operands, **chosen)


def plan_taken(rung: str, inputs: Arrays, **options: Any) -> Any:
    """Return the plan for these arrays, as the Hopper form does not take all of them."""
    asked = dict(**{**asked_for(rung), **options})
    return explain.plans(resolved(*inputs, **asked))[-1]


def form_taken(rung: str, inputs: Arrays, **options: Any) -> str:
    """Return the form of that plan."""
    return str(plan_taken(rung, inputs, **options).form)


@dataclass(frozen=True)
class Run:
    """One call, with all that is needed to judge it."""

    rung: str
    form: str
    inputs: Arrays
    options: dict[str, Any]
    quantized: QuantizedQKV | None
    o: Any
    lse: Any
    tiles: Tiles | None = None  # with the call's tiles the judge predicts codes of P

    def judge(self, *, host: bool = True) -> verdict.Report:
        """J2, and J3 where the operands were quantised; on the host unless told otherwise."""
        move = on_host if host else (lambda array: array)
        z = self.quantized if self.quantized is None or not host else host_copy(self.quantized)
        q, k, v = map(move, self.inputs)
        options = {n: move(a) if n in ADDED else a for n, a in self.options.items()}
        options.pop("quant", None)  # `quantized` has its result
        if (kept := options.get("block_mask")) is not None:
            options["block_mask"] = BlockMask(move(kept.mask), *kept.blocks)
        for name in ("rope", "qk_norm"):
            if options.get(name):
                options[name] = tuple(map(move, options[name]))
        return verdict.judge(
            move(self.o), q, k, v, variant=variant_of(self.rung).name, lse=move(self.lse),
            quantized=z, form=self.form, **{"tiles": self.tiles, **options},
        )  # fmt: skip

    def check(self) -> verdict.Report:
        """Raise unless every judgement holds."""
        report = self.judge()
        assert report.passed, str(report)
        return report


def assert_same(left: Run, right: Run) -> None:
    assert bits(left.o) == bits(right.o) and bits(left.lse) == bits(right.lse)


def host_copy(z: QuantizedQKV) -> QuantizedQKV:
    return replace(z, **{n: on_host(a) for n in QUANTIZED if (a := getattr(z, n)) is not None})


def quantized(
    rung: str,
    inputs: Arrays,
    backend: str | None,
    options: dict[str, Any],
    quant: QuantConfig | None = None,
    arch: str | None = None,
) -> QuantizedQKV | None:
    """Return the operands of the INT8 rung, None for the others."""
    if variant_of(rung).family != "int8":
        return None
    quant = quant or asked_for(rung).get("quant", QuantConfig())
    quant = replace(quant, smooth_k=quant.smooth_k and not options.get("softcap"))
    given = {name: options[name] for name in PREPARATION if name in options}
    return quantize(*inputs, quant=quant, backend=backend, arch=arch, **given)


def quantiser(backend: str | None) -> str | None:
    """Return the backend that makes the codes of a call of another kernel.

    The mirror replaces the interpreter, because it needs no module. Its bits are the same
    (tests/quant/test_quantize_interpret.py, tests/interpret/test_interpret_attention.py), except
    means, which are summed in another order.
    """
    return "mirror" if backend == "interpret" else backend


def run(
    rung: str,
    inputs: Arrays,
    *,
    arch: str | None = None,
    backend: str | None = None,
    quant: QuantConfig | None = None,
    **options: Any,
) -> Run:
    """Call `attention`, and keep the quantised operands of the INT8 rung, which `quant` makes."""
    z = quantized(rung, inputs, quantiser(backend), options, quant, arch)
    given = options if quant is None else {**options, "quant": quant}
    plan = plan_taken(rung, inputs, arch=arch, backend=backend, **given)
    if z is None or plan.form == "fused":
        operands, rest = inputs, given
    else:
        operands, rest = (z,), {n: x for n, x in options.items() if n not in PREPARATION}
    o, lse = attend(rung, *operands, return_lse=True, arch=arch, backend=backend, **rest)
    return Run(rung, plan.form, inputs, options, z, o, lse, plan.tiles)


def packed(
    lengths: Sequence[tuple[int, int]],
    heads: int,
    heads_kv: int,
    head_dim: int = 64,
    dtype: str = "float16",
    seed: int = 0,
) -> tuple[Arrays, tuple[Any, Any]]:
    """N(0, 1) for sequences of these lengths of q and k, packed, and where they begin and end."""
    ends = tuple(np.cumsum((0, *one), dtype=np.int32) for one in zip(*lengths, strict=True))
    shapes = (ends[0][-1], heads, head_dim), (ends[1][-1], heads_kv, head_dim)
    return normal(*shapes, dtype, seed), ends


def sequences(inputs: Arrays, ends: Any) -> Iterator[tuple[slice, Arrays]]:
    """Yield the rows of q of every packed sequence, and its operands in layout BHSD."""
    q, k, v = (x.swapaxes(0, 1)[None] for x in inputs)
    ends_q, ends_k = (on_host(x).tolist() for x in ends)
    for pair_q, pair_k in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        rows, keys = slice(*pair_q), slice(*pair_k)
        yield rows, (q[:, :, rows], k[:, :, keys], v[:, :, keys])


def check_each_alone(
    found: tuple[Any, Any], inputs: Arrays, ends: Any, call: Callable[..., tuple[Any, Any]]
) -> None:
    """Assert that O and lse of packed sequences have the bits of a call on each of them alone."""
    o, lse = found
    for rows, one in sequences(inputs, ends):
        if rows.start < rows.stop:
            expected, expected_lse = call(*one)
            assert bits(o[rows].swapaxes(0, 1)) == bits(expected), rows
            assert bits(lse[:, rows]) == bits(expected_lse), rows


def of_sequence(options: dict[str, Any], number: int, one: Arrays) -> dict[str, Any]:
    """Return the options of one packed sequence: the parts of its entry, cut to its lengths."""
    len_q, len_kv = one[0].shape[2], one[1].shape[2]
    corner = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
    found = dict(options)
    for name in ADDED:
        if found.get(name) is not None:
            axes = zip(corner[4 - found[name].ndim :], found[name].shape, strict=True)
            found[name] = found[name][tuple(at if n > 1 else slice(n) for at, n in axes)]
    if found.get("block_mask") is not None:
        found["block_mask"] = found["block_mask"].corner(number, len_q, len_kv)
    if found.get("quant") is not None:
        found["quant"] = found["quant"].of_entry(number)
    return found


def run_packed(
    rung: str,
    inputs: Arrays,
    ends: Any,
    *,
    arch: str | None = None,
    backend: str | None = None,
    **options: Any,
) -> list[Run]:
    """Call `attention_varlen`; return the results of every sequence that has rows."""
    asked = {**asked_for(rung), "arch": arch, "backend": backend, **options}
    o, lse = attention_varlen(*inputs, *ends, return_lse=True, **asked)
    o = o.swapaxes(0, 1)[None]
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    plan = explain.plans(resolved(*inputs, **asked, **named))[-1]
    judged = {**options, "tiles": plan.tiles}
    found = []
    for number, (rows, one) in enumerate(sequences(inputs, ends)):
        if rows.start == rows.stop:
            continue
        own = of_sequence(judged, number, one)
        # A prediction of codes is narrow enough to tell one mean of V from another.
        by = backend if (quant := own.get("quant")) and quant.smooth_v else quantiser(backend)
        z = quantized(rung, one, by, options, quant, arch)
        found.append(Run(rung, plan.form, one, own, z, o[:, :, rows], lse[None, :, rows]))
    return found


def run_into(
    rung: str,
    inputs: Arrays,
    o: Any,
    lse: Any,
    *,
    arch: str | None = None,
    backend: str = "cuda",
    **options: Any,
) -> Run:
    """Plan and launch by hand, into the buffers given for both results."""
    call = check_attention(*inputs, return_lse=True, **options)
    variant = variant_of(rung)
    form = form_taken(rung, inputs, arch=arch, backend=backend, **options)
    added = {n: interchange.broadcast(options[n], call.score_shape) for n in ADDED if n in options}
    described = {name: Operand.of(array) for name, array in added.items()}
    z = quantized(rung, inputs, quantiser(backend), options, arch=arch)
    if z is None:
        operands = dict(zip("qkv", inputs, strict=True))
        lie = map(Operand.of, (*inputs, o))
        plan = plan_attention(variant, call, *lie, added=described, arch=arch)
    else:
        operands = {n: a for n in QUANTIZED if (a := getattr(z, n)) is not None}
        v = z.v if z.v_codes is None else z.v_codes
        lie = Operands(*map(Operand.of, (z.q_codes, z.k_codes, v, o)), **described)
        of_scales = map(Operand.of, (z.q_scale, z.k_scale))
        scales = Scales(*of_scales, smoothed=z.k_mean is not None)
        plan = plan_int8(call, lie, Codes.of(z), scales, arch=arch)
    buffers = {name: memory.as_input(array) for name, array in (operands | added).items()}
    run_plan(backend, plan, {**buffers, "o": o, "lse": lse}, arch)
    return Run(rung, form, inputs, options, z, o, lse, plan.tiles)
