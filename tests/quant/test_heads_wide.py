"""Lanes with eight columns of each half of a prepared row, and two rows in flight: all bits of the
mirror.

Keys are drawn such that the sum of a channel is exact in any order. So means have the mirror's
bits, too, and both backends take the same call.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import QuantConfig, attention, interpret, quantize
from cupyattn.arrays.kinds import STORAGE
from cupyattn.interpret.access import address_reader
from cupyattn.interpret.findings import KernelFault, describe
from cupyattn.interpret.registers import executing
from cupyattn.plans.records import Launch
from cupyattn.problem.choose import QUANT
from cupyattn.quant import QuantizedQKV
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.test_heads_together import heads_of
from tests.support.marks import slow, slow_rows, slow_unless
from tests.support.padded import NAMES, entries
from tests.support.runs import Arrays, bits, embedded

#: Positions of keys, and then as many of queries.
POSITIONS = 1200
#: Numbers whose mean square is 1.
UNIT = np.array([2, 1, 1, 1, 1, 0, 0, 0])
ONE_HEAD = (1, 1)


def drawn(
    heads: tuple[int, int], lengths: tuple[int, int], head_dim: int = 128,
    dtype: str = "float16", batch: int = 1,
) -> Arrays:  # fmt: skip
    """Draw queries, keys whose normalised rows are whole numbers, and whole values.

    Rows differ in size by powers of two.
    """
    rng = np.random.default_rng(0)
    shape = batch, heads[1], lengths[1], head_dim
    q = rng.standard_normal((batch, heads[0], lengths[0], head_dim))
    q *= np.exp2(rng.uniform(-5, 5, q.shape[:3]))[..., None]
    k = rng.permuted(np.broadcast_to(np.resize(UNIT, head_dim), shape), axis=3)
    k = k * rng.choice([-1, 1], shape) * np.exp2(rng.integers(-3, 4, shape[:3]))[..., None]
    v = rng.integers(-20, 21, shape)
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))  # type: ignore[return-value]


def whole_or_half(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).integers(-6, 7, shape) / 2).astype(np.float32)


def prepared(head_dim: int = 128, *, interleaved: bool = True, split: int = 0) -> dict[str, Any]:
    """Options of a call: tables by column, and weights of two parts of the rows if `split`.

    Positions of queries have other numbers, which are not whole.
    """
    rng = np.random.default_rng(1)
    tables = []
    for seed in (2, 3):
        of_q = rng.standard_normal((POSITIONS, head_dim), np.float32)
        tables.append(np.concatenate([whole_or_half((POSITIONS, head_dim), seed), of_q]))
    shape = (2, head_dim) if split else (head_dim,)
    weights = rng.uniform(0.5, 2, shape).astype(np.float32), whole_or_half(shape, 4)
    return {
        "rope": tuple(tables), "rope_interleaved": interleaved, "rope_offset_q": POSITIONS,
        "qk_norm": weights, "qk_norm_eps": 2.0**-126, "qk_norm_split": split,
    }  # fmt: skip


class Launches(interpret.Observer):
    """Keeps what was launched."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def launch(self, one: Any, program: Any, arch: str) -> None:
        self.seen.append(one)


def assert_same(found: QuantizedQKV, expected: QuantizedQKV) -> None:
    assert found.buffers.keys() == expected.buffers.keys()
    for name, one in found.buffers.items():
        other = expected.buffers[name]
        same = one.shape == other.shape and bits(one) == bits(other)
        assert same, name  # pytest takes seconds to compare long bytes


def assert_bits(
    arrays: Arrays, quant: QuantConfig = QUANT["balanced"], *, together: Any = None,
    arch: str = "sm_90a", **options: Any,
) -> None:  # fmt: skip
    """Assert that the kernel returns what the mirror does, from blocks of `together` heads."""
    launches = Launches()
    given = {"quant": quant, "arch": arch, **options}
    before = [bits(x) for x in arrays]
    with interpret.observe(launches):
        found = quantize(*arrays, backend="interpret", **given)
    expected = quantize(*arrays, backend="mirror", **given)
    assert [bits(x) for x in arrays] == before, "an input was modified"
    if together is not None:
        last: Launch = launches.seen[-1]
        assert heads_of(last) == together
    assert_same(found, expected)


# ---- every end of a block, every form ------------------------------------------------------------


@pytest.mark.parametrize("quant", ["balanced", pytest.param("aggressive", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lengths",
    [
        (1, 1), (3, 2), (33, 79), (7, 81), (66, 161),
        *slow([(2, 3), (31, 31), (32, 32), (65, 33), (79, 80), (81, 113), (161, 239), (5, 1023),
               (4, 1024), (1, 1100)]),
    ],
    ids=str,
)  # fmt: skip
def test_units_that_rows_do_not_fill(lengths: tuple[int, int], quant: str) -> None:
    """Units of 32 rows in blocks of 80 keys, means of some rows of many, and a single token."""
    together = (4, 2) if quant == "balanced" else (4, 1)
    assert_bits(drawn((4, 2), lengths), QUANT[quant], together=together, **prepared())


@pytest.mark.parametrize(
    ("heads", "together"),
    [
        ((3, 3), (1, 1)), ((2, 2), (2, 2)), ((6, 2), (2, 2)),
        *slow_rows([
            ((1, 1), (1, 1)), ((2, 1), (2, 1)), ((4, 1), (4, 1)), ((5, 5), (1, 1)),
            ((6, 3), (2, 1)), ((6, 6), (2, 2)), ((8, 4), (4, 2)),
        ]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("quant", ["balanced", pytest.param("aggressive", marks=pytest.mark.slow)])
def test_heads_in_two_batch_entries(
    heads: tuple[int, int], together: tuple[int, int], quant: str
) -> None:
    one_of_k = quant == "aggressive"  # codes of V take the shared memory
    assert_bits(
        drawn(heads, (35, 83), batch=2), QUANT[quant],
        together=(together[0], 1) if one_of_k else together, **prepared(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "dtype", "interleaved", "quant"),
    [
        (64, "bfloat16", False, "balanced"), (256, "float16", True, "balanced"),
        (128, "bfloat16", False, "balanced"),
        *slow_rows(
            (head_dim, dtype, interleaved, quant)
            for head_dim in (64, 96, 128, 256)
            for dtype in ("float16", "bfloat16")
            for interleaved in (True, False)
            for quant in QUANT
        ),
    ],
)  # fmt: skip
def test_sizes_types_and_pairs(head_dim: int, dtype: str, interleaved: bool, quant: str) -> None:
    arrays = drawn((4, 4), (35, 83), head_dim, dtype)
    assert_bits(arrays, QUANT[quant], **prepared(head_dim, interleaved=interleaved))


#: Rows that share scales in Q and in K, and the heads that share blocks.
GROUPS: dict[str, tuple[QuantConfig, tuple[int, int]]] = {
    "thread, thread": (QuantConfig(), (4, 4)),
    "head, block": (QuantConfig("head", "block"), (1, 2)),
    "tensor, block": (QuantConfig("tensor", "block"), (1, 2)),
    "block, token": (QuantConfig("block", "token"), (1, 4)),
    "token, head": (QuantConfig("token", "head"), (4, 1)),
    "token, tensor": (QuantConfig("token", "tensor"), (4, 1)),
    "token, token": (QuantConfig("token", "token"), (4, 4)),
    "token, no mean": (QuantConfig("token", "token", smooth_k=False), (4, 4)),
    "block, no mean": (QuantConfig("thread", "block", smooth_k=False), (4, 2)),
    "4 bits": (QuantConfig("thread", "block", qk_bits=4), (4, 2)),
}


@pytest.mark.parametrize("name", slow_unless(lambda n, _: n < 2, GROUPS))
def test_groups_of_rows(name: str) -> None:
    """Heads share blocks of Q and of K, or of one of them only: both need the weights."""
    quant, together = GROUPS[name]
    assert_bits(drawn((4, 4), (35, 83)), quant, together=together, **prepared())


# ---- weights, positions and addresses ------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "split", "quant"),
    [
        ((35, 83), 31, "balanced"), ((35, 83), 35, "balanced"), ((7, 81), 81, "balanced"),
        *slow_rows(
            (lengths, split, quant)
            for lengths, splits in (((35, 83), (1, 34, 35, 80, 82)), ((1, 2), (1, 2, 3)))
            for split in splits
            for quant in QUANT
        ),
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_text_and_image(lengths: tuple[int, int], split: int, quant: str) -> None:
    """The parts meet within the rows of a warp, a pair, and behind the last row."""
    together = (4, 2) if quant == "balanced" else (4, 1)
    arrays = drawn((4, 2), lengths)
    assert_bits(arrays, QUANT[quant], together=together, **prepared(split=split))


@pytest.mark.parametrize("without", ["qk_norm", *slow(["rope", "one vector"])])
def test_rows_of_other_preparations_take_one_head(without: str) -> None:
    options = prepared()
    if without == "one vector":
        weights = options["qk_norm"]
        options["qk_norm"] = tuple(np.tile(w, (n, 1)) for w, n in zip(weights, (4, 2), strict=True))
        options["qk_norm"][0][3] *= 3
    else:
        for name in [name for name in options if name.startswith(without)]:
            del options[name]
    arrays = drawn((4, 2), (35, 83))
    quant = QUANT["balanced"]
    if without == "qk_norm":  # keys are whole, but not small
        arrays = arrays[0], np.sign(arrays[1]), arrays[2]
    assert_bits(arrays, quant, together=ONE_HEAD, **options)


@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_between_other_rows(interleaved: bool) -> None:
    """Heads lie between the rows of a token, behind gaps of 16 bytes of NaN."""
    arrays = tuple(
        embedded(np.ascontiguousarray(x.swapaxes(1, 2)), 8).swapaxes(1, 2)
        for x in drawn((4, 2), (35, 83), batch=2)
    )
    assert_bits(arrays, together=(4, 2), **prepared(interleaved=interleaved))


#: Ends of sequences of 1, 0, 36, 81 and 2 rows.
ENDS = np.array([0, 1, 1, 37, 118, 120], np.int32)


@pytest.mark.parametrize("quant", ["balanced", pytest.param("aggressive", marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", [0, pytest.param(35, marks=pytest.mark.slow)])
def test_packed_sequences(quant: str, split: int) -> None:
    """A block holds rows of one of them. Room that no sequence takes may hold anything."""
    q, k, v = (x[0].swapaxes(0, 1) for x in drawn((4, 2), (ENDS[-1], ENDS[-1])))
    options = {"quant": QUANT[quant], "arch": "sm_90a", **prepared(split=split)}
    ends = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    found, expected = (
        quantize(q, k, v, **ends, backend=backend, **options) for backend in ("interpret", "mirror")
    )
    for one, other in zip(found.sequences(), expected.sequences(), strict=True):
        if one.len_kv:
            assert_same(one, other)


@pytest.mark.slow
def test_padded_entries() -> None:
    """Rows past the length of an entry are NaN, and reach no mean and no scale."""
    lengths = np.array([(3, 70), (2, 33), (3, 1)])
    arrays = drawn((2, 2), (3, 70), batch=len(lengths))
    for x, own in zip(arrays, lengths.T[[0, 1, 1]], strict=True):
        for entry, length in zip(x, own, strict=True):
            entry[:, length:] = np.nan
    asked: dict[str, Any] = {
        "quant": QUANT["balanced"], "variant": "fa_int8", "arch": "sm_90a", "backend": "interpret",
        **prepared(),
    }  # fmt: skip
    numbers = dict(zip(NAMES, lengths.T.astype(np.int32), strict=True))
    o = attention(*arrays, **numbers, **asked)
    for entry, alone in entries(arrays, numbers):
        expected = attention(*alone, **asked)
        assert bits(o[entry, :, : expected.shape[2]]) == bits(expected[0]), entry


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "quant", "interleaved"),
    [
        ("float16", "balanced", True), ("bfloat16", "balanced", False),
        *slow_rows(
            (dtype, quant, interleaved)
            for dtype in ("float16", "bfloat16")
            for quant in ("aggressive", "thread", "rows")
            for interleaved in (True, False)
        ),
    ],
)  # fmt: skip
def test_rows_of_any_kind(dtype: str, quant: str, interleaved: bool) -> None:
    """Zeros, an infinity, a NaN, the least and the largest numbers, in either row of a lane.

    A head of K with a NaN has no mean. Another head has zeros and large numbers, and a mean.
    """
    configs = {**QUANT, "thread": QuantConfig(), "rows": QuantConfig("token", "token")}
    q, k, v = drawn((4, 4), (35, 83), dtype=dtype)
    numbers = ml_dtypes.finfo(q.dtype)
    largest, least = numbers.max, numbers.smallest_subnormal
    for x in (q, k):
        n = x.shape[2]
        x[0, 0, 0, 5], x[0, 1, 1, 64 + 7], x[0, 1, 4, 127] = np.nan, np.inf, -np.inf
        x[0, 0, 3], x[0, 0, 7, 1::2] = 0, 0
        x[0, 0, n - 1], x[0, 1, n - 1] = largest, -largest
        x[0, 0, n - 2], x[0, 1, n - 3, ::2] = least, -least
        x[0, 1, 9] = -0.0
        x[0, 2, n - 2 :] = 0
    q[0, 3, :2], k[0, 3, n - 1] = largest, 2.0**15
    assert_bits((q, k, v), configs[quant], **prepared(interleaved=interleaved))
    assert_bits((q[:, :, :2], k[:, :, :2], v[:, :, :2]), configs[quant], **prepared())


# ---- accesses ------------------------------------------------------------------------------------

SECTOR = 32


def at_a_sector(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy that begins where a sector does."""
    memory = np.empty(x.nbytes + SECTOR, np.uint8)
    first = -memory.ctypes.data % SECTOR
    copy = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[:] = x
    return copy


class TableReads(interpret.Observer):
    """Counts what warps read of rotation tables, 16 bytes a lane.

    Attributes
    ----------
    nbytes : Counter of str
        Bytes by the code that reads them: of ``"sums"``, or of ``"heads"``.
    halves : int
        Halves of sectors whose other half is not in the next access of the warp.
    """

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()
        self.halves = 0
        self._before: dict[int, set[int]] = {}

    def before(self, machine: Any, lanes: Any) -> None:
        one = machine.program.steps[machine.place].instruction
        where = "" if one.location is None else describe(one.location)
        if one.opcode != "ld" or "rope.cuh" not in where:
            return
        index = executing(machine, one, lanes).index
        address = address_reader(one.operands[1])(machine)[index]
        self.nbytes["sums" if "quantize_sums" in where else "heads"] += 16 * len(index)
        for warp in np.unique(index // 32).tolist():
            both = set((address[index // 32 == warp] // (SECTOR // 2)).tolist())
            if (before := self._before.pop(warp, None)) is None:
                self._before[warp] = both
            else:
                both |= before
                self.halves += sum(half ^ 1 not in both for half in both)


def test_tables_are_read_by_whole_sectors_and_once_for_two_heads() -> None:
    """Q reads them once for four heads, and sums once for each head."""
    reads = TableReads()
    options = prepared()
    options["rope"] = tuple(map(at_a_sector, options["rope"]))
    with interpret.observe(reads):
        quantize(*drawn((4, 4), (64, 96)), quant=QuantConfig(), backend="interpret", **options)
    row = 2 * 4 * 128  # bytes of both tables
    assert reads.halves == 0
    assert reads.nbytes["heads"] == row * (64 + 2 * 96)
    # Rounds of 64 rows, and half the numbers of a round that does not follow.
    assert row * 4 * 96 <= reads.nbytes["sums"] <= row * 4 * (2 * 64 + 64 // 2)


# ---- mistakes ------------------------------------------------------------------------------------

HEADS, SUMS = (f"prims/codes/quantize_{x}.cuh" for x in ("heads", "sums"))
TURNS = "prims/schedule/quantize_turns.cuh"
EITHER = (AssertionError, KernelFault)
#: What goes wrong, the source, a line and what stands for it, and how it shows.
FAULTS: dict[str, tuple[str, str, str, Any]] = {
    "halves of the columns": (
        HEADS, "(row + a * BETWEEN)", "(row + (1 - a) * BETWEEN)", AssertionError,
    ),
    "factors of two rows": (
        HEADS, "factor[0] = second ? other : own, factor[1] = second ? own : other;",
        "factor[1] = second ? other : own, factor[0] = second ? own : other;", AssertionError,
    ),
    "rows past the end in sums": (
        SUMS, "if (row0 + i * ROWS_PER_PASS + row_in_pass() < at.rows)",
        "if (row0 + row_in_pass() < at.rows)", AssertionError,
    ),
    "halves of stored codes": (
        HEADS, "(codes + a * BETWEEN,", "(codes + (1 - a) * BETWEEN,", AssertionError,
    ),
    "scales of two rows": (
        HEADS, "scale[i] = __shfl_sync(FULL_WARP, own, i, 2 * N);",
        "scale[i] = __shfl_sync(FULL_WARP, own, N - 1 - i, 2 * N);", AssertionError,
    ),
    "inverses of two rows": (
        HEADS, "__shfl_sync(FULL_WARP, own, N + i, 2 * N)",
        "__shfl_sync(FULL_WARP, own, N, 2 * N)", AssertionError,
    ),
    "rows past the end in maxima": (
        HEADS, "at < rows ? __float_as_uint(most[i]) : 0", "__float_as_uint(most[i])",
        AssertionError,
    ),
    "rows past the end in codes": (
        HEADS, "if (row_of(unit) < rows)", "if (row_of(unit) < ROWS)", EITHER,
    ),
    "rows past the end in codes of Q": (HEADS, "if (exists)", "if (true)", EITHER),
    "a unit past the rows": (
        HEADS, "row_of(unit + 1) < rows", "row_of(unit + 1) < ROWS", KernelFault,
    ),
    "mask of the sums": (
        HEADS, "__shfl_xor_sync(FULL_WARP, sent, offset)",
        "__shfl_xor_sync(FULL_WARP, sent, offset == 1 ? 2 : offset)", AssertionError,
    ),
    "side of the sums": (
        HEADS, "const bool second = threadIdx.x & offset;",
        "const bool second = threadIdx.x & 2 * offset;", AssertionError,
    ),
    "halves of the sums": (
        HEADS, "__shfl_xor_sync(FULL_WARP, sum, ROWS)", "__shfl_xor_sync(FULL_WARP, sum, 2 * ROWS)",
        AssertionError,
    ),
    "mask of the maxima": (
        HEADS, "__shfl_xor_sync(FULL_WARP, second ? bits : more, 1)",
        "__shfl_xor_sync(FULL_WARP, second ? bits : more, 2)", AssertionError,
    ),
    "maxima over half a row": (
        HEADS, "offset < LANES * Cut::GROUP; offset *= 2", "offset < LANES; offset *= 2",
        AssertionError,
    ),
    "maxima of a row of K": (HEADS, "admit(most[nth], x);", "admit(most[0], x);", AssertionError),
    "maxima of a row of Q": (
        HEADS, "admit(most[i], own[i].element(a, j))", "admit(most[i], own[0].element(a, j))",
        AssertionError,
    ),
    "mean of the first head": (HEADS, "shared.mean[head_of(unit, nth)]", "shared.mean[0]",
                               AssertionError),
    "weights of K": (HEADS, "weights_of(Cut::MEAN)[NORM_BY_PART && at >= how.split]",
                     "weights_of(false)[NORM_BY_PART && at >= how.split]", AssertionError),
    "part of K": (HEADS, "NORM_BY_PART && at >= how.split", "NORM_BY_PART && row0 >= how.split",
                  AssertionError),
    "part of Q": (HEADS, "weights[second]", "weights[0]", AssertionError),
    "part of the sums": (SUMS, "NORM_BY_PART && row[i] >=",
                         "NORM_BY_PART && row[0] >=", AssertionError),
    "weights of the sums": (SUMS, "weights_of(true)", "weights_of(false)", AssertionError),
    "second row left out of the sums": (
        SUMS, "if (row0 + i * ROWS_PER_PASS + row_in_pass() < at.rows)",
        "if (i == 0 && row0 + i * ROWS_PER_PASS + row_in_pass() < at.rows)", AssertionError,
    ),
    "tables of the second row": (
        SUMS, "load_tables(i + 1, LAST);", "tables[i + 1] = tables[i];", AssertionError,
    ),
    "rows of the round before": (
        SUMS, "find_rows(row0 + ROWS * ROWS_PER_PASS);", "find_rows(row0);", AssertionError,
    ),
    "words of the first head": (HEADS, "next[i][a] = then[i][a];", "next[i][a] = then[0][a];",
                                AssertionError),
    "tables of the unit before": (
        HEADS, "load_tables(how, unit + 1)", "load_tables(how, unit)", AssertionError,
    ),
    "no barrier after the weights": (
        TURNS, "__syncthreads();  // the number", "__syncwarp();  // the number", KernelFault,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_unless(lambda n, _: n < 3, FAULTS))
def test_planted_mistakes_are_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, instead, seen = FAULTS[name]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    options = prepared(split=41 if name.startswith("part of") else 0)
    options["rope"][0][113] *= 8  # the last key's numbers are the largest of its group
    with pytest.raises(seen):
        assert_bits(drawn((4, 2), (43, 114)), **options)
