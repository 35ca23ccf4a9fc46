"""Blocks that make codes of the same rows of several heads: plan, registers, the mirror's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import QuantConfig, quantize
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels import ladder
from cupyattn.plans.prepare_rows import Prepares
from cupyattn.plans.quantize import Part, plan_quantize
from cupyattn.plans.records import Launch
from cupyattn.problem.choose import QUANT
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import Norm, Preparation, Rope
from cupyattn.quant.config import GROUP_ALL
from cupyattn.reference.quantize import quantize_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.marks import slow_rows
from tests.support.runs import bits, embedded

#: As Flux, Kandinsky and HunyuanVideo prepare their rows.
HOW: dict[str, Any] = {"rope": "interleaved_by_column", "vectors": 1, "eps": 1e-6}
POSITIONS = 400


def last_launch(
    heads: tuple[int, int] = (24, 24),
    groups: tuple[int, int] = (2, 80),
    head_dim: int = 128,
    dtype: str = "float16",
    v: bool = False,
    how: dict[str, Any] | None = None,
    **fields: Any,
) -> Launch:
    """Return the launch that makes codes of Q and of K, and of V if asked."""
    parts = {
        name: Part(
            Operand.contiguous((1, n, 500, head_dim), np.dtype(STORAGE[dtype]).itemsize), group,
            smooth=name == "k", prepares=Prepares(name, **(HOW | (how or {}))), **fields,
        )
        for name, n, group in zip("qk", heads, groups, strict=True)
    }  # fmt: skip
    if v:
        parts["v"] = Part(parts["k"].x, GROUP_ALL, smooth=True)
    return plan_quantize(dtype, **parts, p_type="u8" if v else "").launches[-1]


def heads_of(launch: Launch) -> tuple[int, int]:
    """Return how many heads share a block, of Q and of K."""
    defines = dict(launch.module.defines)
    return defines.get("CFG_HEADS_Q", 1), defines.get("CFG_HEADS_K", 1)


@pytest.mark.parametrize(
    ("asked", "together"),
    [
        ({}, (4, 2)),
        ({"groups": (2, 16)}, (4, 4)),
        ({"groups": (1, 128), "v": True}, (4, 1)),
        ({"groups": (2, 64)}, (4, 2)),
        ({"v": True}, (4, 1)),  # V takes the shared memory for rows of K
        ({"heads": (6, 3)}, (2, 1)),
        ({"heads": (25, 25)}, (1, 1)),
        ({"head_dim": 64, "groups": (2, 128)}, (4, 2)),
        ({"head_dim": 256, "groups": (2, 96)}, (4, 1)),  # 16 warps would hold 64 KB
        ({"head_dim": 96}, (1, 1)),
        ({"head_dim": 32}, (1, 1)),  # two lanes to a row do not hold four sums of squares
        ({"dtype": "float32"}, (1, 1)),
        ({"how": {"rope": "interleaved"}}, (1, 1)),
        ({"how": {"rope": "half_split_by_column"}}, (4, 2)),
        ({"how": {"vectors": 2}}, (1, 1)),
        ({"groups": (128, 16)}, (1, 4)),
        ({"how": {"by_token": True}}, (1, 1)),
        ({"how": {"rotate": True}}, (1, 1)),
        ({"static": True}, (1, 1)),
        ({"zero_points": True}, (1, 1)),
        ({"gathered": True}, (1, 1)),
    ],
    ids=str,
)
def test_heads_share_a_block_where_they_read_the_same_tables(
    asked: dict[str, Any], together: tuple[int, int]
) -> None:
    assert heads_of(last_launch(**asked)) == together


@pytest.mark.parametrize("vectors", [(1, 24), (24, 1)])
def test_heads_have_blocks_of_their_own_if_an_operand_has_weights_by_head(
    vectors: tuple[int, int],
) -> None:
    """Blocks read weights before they know whose rows they take."""
    parts = {
        name: Part(
            Operand.contiguous((1, 24, 500, 128), 2), 2, smooth=name == "k",
            prepares=Prepares(name, **(HOW | {"vectors": n})),
        )
        for name, n in zip("qk", vectors, strict=True)
    }  # fmt: skip
    assert heads_of(plan_quantize("float16", **parts).launches[-1]) == (1, 1)


def test_a_grid_has_a_block_for_the_rows_of_its_heads() -> None:
    """Of 500 rows: 8 blocks for 4 heads of Q, and 7 for 2 heads of K."""
    launch = last_launch(groups=(2, 80))
    (_, q), (_, k), _, (_, turn) = launch.params
    assert turn["rounds"] == 6
    assert (q["blocks"], k["blocks"]) == (8, 2 * 7)
    assert k["first_blocks"] % 4 == 0  # sums of the same four heads
    assert launch.grid == (6 + turn["lag"]) * (8 + 14 + k["first_blocks"])


@pytest.mark.parametrize(
    ("head_dim", "groups", "v"),
    [(128, (2, 80), False), *slow_rows([(128, (1, 128), True), (64, (2, 128), False)])],
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_nothing_is_spilled(dtype: str, head_dim: int, groups: tuple[int, int], v: bool) -> None:
    """In registers of two blocks of 256 threads for a multiprocessor."""
    launch = last_launch(groups=groups, head_dim=head_dim, dtype=dtype, v=v)
    used = kc.build(launch.module, "sm_90a").kernels[launch.entry]
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    assert used.registers <= 128 and used.static_smem <= 48 * 1024


@pytest.mark.parametrize(
    ("arch", "kib"),
    [
        ("sm_90a", 228),
        ("sm_89", 100),
        *slow_rows([("sm_80", 164), ("sm_86", 100), ("sm_120", 100)]),
    ],
)
def test_a_multiprocessor_has_shared_memory_for_two_blocks(arch: str, kib: int) -> None:
    """If it has 100 KiB, more rows stay in registers. Each block takes 1 KiB more."""
    launch = last_launch()
    binary = kc.build(launch.module, arch)
    dynamic = binary.smem_bytes
    assert launch.dynamic_shared and (dynamic >= 64 * 1024) == (kib > 100)
    static = binary.kernels[launch.entry].static_smem
    assert 2 * (dynamic + static + 1024) <= kib * 1024


def drawn(
    heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, dtype: str = "float16"
) -> list[npt.NDArray[Any]]:
    """Rows of different sizes in every head, and keys with a mean of their head."""
    rng = np.random.default_rng(0)
    made = []
    for n, length in ((heads[0], lengths[0]), *[(heads[1], lengths[1])] * 2):
        x = rng.standard_normal((2, n, length, head_dim)) + np.arange(n)[:, None, None]
        made.append((x * np.exp2(np.arange(length) % 7 - 3)[:, None]).astype(STORAGE[dtype]))
    return made


def preparation(head_dim: int, *, interleaved: bool = True, split: int = 0) -> Preparation:
    """With weights of two parts of the rows, if `split` is the first row of the second."""
    rng = np.random.default_rng(1)
    tables = (rng.standard_normal((POSITIONS, head_dim), np.float32) for _ in range(2))
    weights = rng.uniform(0.5, 2, (2, 2 if split else 1, head_dim)).astype(np.float32)
    return Preparation(
        Rope(*tables, interleaved=interleaved, by_column=True), Norm(*weights, 1e-6, split=split)
    )


def assert_codes_are_the_mirrors(
    arrays: list[Any], quant: QuantConfig, how: Preparation, arch: str | None
) -> None:
    head_dim = arrays[0].shape[3]
    given = how.buffers
    weights = (given[name] for name in ("q_norm_weight", "k_norm_weight"))
    z = quantize(
        *arrays, quant=quant, backend="interpret", arch=arch,
        rope=(given["rope_cos"], given["rope_sin"]), rope_interleaved=how.rope.interleaved,
        qk_norm=tuple(w if how.norm.split else w[0] for w in weights), qk_norm_eps=1e-6,
        qk_norm_split=how.norm.split,
    )  # fmt: skip
    tiles = scale_tiles(ladder.lookup("fa_int8"), head_dim, quant, arch)
    mirror = quantize_mirror(
        *arrays, quant, tiles, k_mean=z.k_mean, v_mean=z.v_mean, preparation=how
    )
    for name in ("q_codes", "k_codes", "q_scale", "k_scale"):
        same = bits(getattr(z, name)) == bits(getattr(mirror, name))
        assert same, name  # pytest takes seconds to compare long bytes
    if z.k_mean is not None:
        expected = how.exact(*arrays[:2])[1].mean(axis=2)
        np.testing.assert_allclose(z.k_mean, expected, rtol=1e-4, atol=1e-4)


#: Heads of Q and K, their lengths, head_dim, type, quantisation and architecture.
Case = tuple[tuple[int, int], tuple[int, int], int, str, QuantConfig, str | None]
CASES: tuple[Case, ...] = (
    ((4, 2), (37, 90), 128, "float16", QUANT["balanced"], "sm_90a"),
    ((4, 4), (70, 70), 64, "bfloat16", QuantConfig(), None),
)
SLOW_CASES: tuple[Case, ...] = (
    ((8, 4), (37, 33), 128, "bfloat16", QuantConfig(), None),
    ((2, 2), (33, 170), 128, "float16", QUANT["balanced"], "sm_90a"),
    ((6, 3), (70, 90), 128, "float16", QUANT["balanced"], "sm_90a"),
    ((5, 5), (20, 90), 128, "float16", QUANT["balanced"], "sm_90a"),
    ((4, 4), (20, 40), 256, "bfloat16", QuantConfig(), None),
    ((4, 4), (20, 40), 96, "float16", QuantConfig(), None),
    ((4, 2), (300, 300), 64, "float16", QUANT["balanced"], "sm_90a"),
    ((4, 4), (40, 140), 128, "float16", QUANT["aggressive"], "sm_90a"),
    ((4, 4), (40, 140), 128, "float16", QuantConfig(smooth_k=False), None),
    ((4, 2), (37, 90), 128, "float16", QUANT["balanced"], "sm_86"),
)


@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "lengths", "head_dim", "dtype", "quant", "arch"), [*CASES, *slow_rows(SLOW_CASES)]
)
def test_codes_and_scales_are_the_mirrors(
    heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, dtype: str,
    quant: QuantConfig, arch: str | None, interleaved: bool,
) -> None:  # fmt: skip
    how = preparation(head_dim, interleaved=interleaved)
    assert_codes_are_the_mirrors(drawn(heads, lengths, head_dim, dtype), quant, how, arch)


@pytest.mark.parametrize(
    ("split", "quant"),
    [(30, QUANT["balanced"]), *slow_rows([(70, QUANT["balanced"]), (33, QuantConfig())])],
)
def test_parts_of_the_rows_have_weights_of_their_own(split: int, quant: QuantConfig) -> None:
    """A block may have rows of both."""
    launch = last_launch(how={"vectors": 2, "split": split})
    assert heads_of(launch) == (4, 2)
    used = kc.build(launch.module, "sm_90a").kernels[launch.entry]
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    how = preparation(128, split=split)
    assert_codes_are_the_mirrors(drawn((4, 2), (60, 90), 128), quant, how, "sm_90a")


@pytest.mark.parametrize(
    ("lengths", "split"), [((1, 2), 1), ((1, 2), 2), *slow_rows([((35, 83), 35), ((7, 81), 81)])]
)
def test_a_part_that_is_all_rows_keeps_its_weights_past_the_end(
    lengths: tuple[int, int], split: int
) -> None:
    """The last row repeats there and counts for its group's maximum."""
    arrays = drawn((4, 2), lengths, 128)
    assert_codes_are_the_mirrors(arrays, QUANT["balanced"], preparation(128, split=split), "sm_90a")


@pytest.mark.slow
def test_rows_with_gaps_and_positions_from_an_offset() -> None:
    """Heads lie between the rows of a token, behind gaps of 16 bytes."""
    arrays = [
        embedded(np.ascontiguousarray(x.swapaxes(1, 2)), 8).swapaxes(1, 2)
        for x in drawn((4, 4), (37, 90), 64)
    ]
    before = [bits(x) for x in arrays]
    assert_codes_are_the_mirrors(arrays, QuantConfig(), preparation(64), None)
    assert [bits(x) for x in arrays] == before, "an input was modified"


@pytest.mark.slow
def test_packed_sequences_have_rows_and_means_of_their_own() -> None:
    """Sequences of 20, 0, 90 and 3 keys: a block holds rows of one of them."""
    ends = np.array([0, 20, 20, 110, 113], np.int32)
    how = preparation(128).buffers
    options = {
        "rope": (how["rope_cos"], how["rope_sin"]), "rope_interleaved": True,
        "qk_norm": (how["q_norm_weight"][0], how["k_norm_weight"][0]),
        "quant": QUANT["balanced"], "backend": "interpret", "arch": "sm_90a",
    }  # fmt: skip
    q, k, v = (x[0].swapaxes(0, 1) for x in drawn((4, 2), (113, 113), 128))
    z = quantize(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **options)
    for number, one in enumerate(z.sequences()):
        rows = slice(*ends[number : number + 2])
        if rows.start == rows.stop:
            continue
        alone = quantize(*(x[None, rows].swapaxes(1, 2) for x in (q, k, v)), **options)
        for name in ("q_codes", "k_codes", "q_scale", "k_scale", "k_mean"):
            assert bits(getattr(one, name)) == bits(getattr(alone, name)), name


HEADS, SUMS = (f"prims/codes/quantize_{x}.cuh" for x in ("heads", "sums"))


@pytest.mark.parametrize(
    ("source", "line", "instead", "seen"),
    [
        (HEADS, "shared.mean[head_of(unit, nth)]", "shared.mean[0]", AssertionError),
        (
            "prepare/quantize.cu", "__syncthreads();  // means and zeros are there", "// there",
            KernelFault,
        ),
        *slow_rows([
            (HEADS, "X + head_of(unit, i) * p.X_stride.head", "X", AssertionError),
            (HEADS, "head_of(unit, i) * GROUPS + uint32_t", "uint32_t", AssertionError),
            (HEADS, "held[i * NUM_THREADS] =", "held[0] =", (AssertionError, KernelFault)),
            (HEADS, "TableRow::offset(min(row_of(unit), rows - 1))",
             "TableRow::offset(min(row_of(0), rows - 1))", AssertionError),
            (HEADS, "ceil_div(own, STEP)", "ceil_div(own - 9, STEP)",
             (AssertionError, KernelFault)),
            (HEADS, "weights_of(Cut::MEAN)[NORM_BY_PART && at >= how.split]",
             "weights_of(Cut::MEAN)[0]", AssertionError),
            (HEADS, "if (row_of(unit) < rows)", "if (row_of(unit) < ROWS)",
             (AssertionError, KernelFault)),
            ("prepare/quantize.cu", "here.of_head(g / Heads::GROUPS)", "here.of_head(0)",
             (AssertionError, KernelFault)),
            ("prims/codes/quantize_rows.cuh", "block / slices * heads_of_block",
             "block / slices", (AssertionError, KernelFault)),
            ("prims/schedule/quantize_turns.cuh", "__syncthreads();  // the number and the weights",
             "// the number", KernelFault),
            (SUMS, "p.position + row[i]", "p.position + row[0]", AssertionError),
            (SUMS, "weight[NORM_BY_PART && row[i] >= int(p.weight_step)]", "weight[0]",
             AssertionError),
        ]),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_planted_mistakes_are_seen(
    source: str, line: str, instead: str, seen: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By J1, or by the interpreter: a race, or a read of what nothing wrote."""
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    arrays = drawn((4, 4), (37, 90), 128)
    with pytest.raises(seen):
        for split in (0, 30) if "weight" in line else (0,):
            how = preparation(128, split=split)
            assert_codes_are_the_mirrors(arrays, QUANT["balanced"], how, "sm_90a")
