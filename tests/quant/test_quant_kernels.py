"""quantize*.cu without a GPU: they compile, do not spill, and accept packed sequences."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import architectures, target
from cupyattn.compiler import modules as kc
from cupyattn.compiler.ptxas import Resources
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.prepare_rows import prepares_of
from cupyattn.plans.quantize import STEPS, Part, operand_parts, plan_quantize
from cupyattn.plans.quantize_blocks import block_rows, value_columns
from cupyattn.plans.records import Plan
from cupyattn.plans.structs import QUANTIZE_PARAMS, pack
from cupyattn.problem.row_preparation import Preparation
from cupyattn.quant import GROUP_ALL, QuantConfig
from cupyattn.quant.quantizers import rows_of_mean
from tests.support.marks import slow, slow_unless

GROUPS = (1, 2, 16, 64, 128, GROUP_ALL)

#: One cell per (dtype, head_dim), with the groups rotated over the head sizes.
CELLS = [
    (dtype, head_dim, GROUPS[(3 * i + j) % len(GROUPS)])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate((64, 128, 256, 40, 7, 255, 1))
]


def operand(dtype: str, head_dim: int, batch: int = 2) -> Operand:
    return Operand.contiguous((batch, 3, 300, head_dim), STORAGE[dtype].itemsize)


def of_k(dtype: str, head_dim: int, group: int, **options: bool) -> Plan:
    return plan_quantize(dtype, k=Part(operand(dtype, head_dim), group, **options))


def of_v(dtype: str, head_dim: int, group: int, p_type: str = "u8", **options: bool) -> Plan:
    return plan_quantize(dtype, v=Part(operand(dtype, head_dim), group, **options), p_type=p_type)


# ---- the struct ----------------------------------------------------------------------------------


def test_params_pack() -> None:
    plan = of_k("float16", 64, 16, smooth=True)
    (encode,) = plan.launches
    assert [pack(*encode.params[i], {})["blocks"][0] for i in (0, 2)] == [0, 0]
    names = ("", "_codes", "_scale", "_partial_sum", "_mean", "_summed_slices", "_head_sum")
    addresses = {f"k{name}": 1000 + i for i, name in enumerate(names)}
    packed = pack(*encode.params[1], addresses)[0]
    assert packed["X"] == 1000 and packed["partial_sum"] == 1003 and packed["mean"] == 1004
    assert packed["summed_slices"] == 1005 and packed["head_sum"] == 1006
    assert packed["static_scale"] == packed["absmax"] == packed["extrema"] == 0  # null
    assert packed["X_stride"].tolist() == [3 * 300 * 64, 300 * 64, 64]
    assert (packed["scale_stride_batch"], packed["scale_stride_head"]) == (3 * 19, 19)
    turn = pack(*encode.params[3], {"next_piece": 1007})[0]
    assert turn["next"] == 1007 and turn["rounds"] == 2 * 3
    pieces = packed["blocks"] + packed["first_blocks"]
    assert encode.grid == (turn["rounds"] + turn["lag"]) * pieces


def test_steps_are_those_of_the_header() -> None:
    text = (kc.KERNELS / "prims" / "config.cuh").read_text()
    names = re.search(r"enum class Step \{ (.*?) \};", text)[1]
    assert tuple(names.lower().split(", ")) == STEPS


# ---- the plan ------------------------------------------------------------------------------------


@given(
    st.one_of(st.sampled_from((*GROUPS, 48, 112, 256, 4096)), st.integers(1, 300)),
    st.integers(1, 256),
    st.sampled_from((2, 4)),
    st.sampled_from(((8, 32), (8, 64), (16, 32))),
)
def test_blocks_hold_whole_groups_or_divide_one(group, head_dim, itemsize, block) -> None:
    num_warps, registers = block
    for vec in (v for v in (1, 2, 4, 8) if head_dim % v == 0 and v * itemsize <= 16):
        rows = block_rows(group, head_dim, itemsize, vec, num_warps, registers)
        assert rows % group == 0 or group % rows == 0
        assert rows * head_dim * itemsize <= 4 * 32 * registers * num_warps
        if group <= 16:
            assert rows % group == 0  # what the default granularities need is read once
        columns = value_columns(head_dim, itemsize, vec, num_warps)
        assert columns % vec == 0 and columns < 2 * max(head_dim, vec)
        assert 128 * columns * itemsize <= 128 * 32 * num_warps


def entries(plan: Plan) -> list[str]:
    return [launch.entry for launch in plan.launches]


def steps(plan: Plan) -> str:
    return plan.note


def test_launches_of_each_kind() -> None:
    assert entries(of_k("float16", 64, 16)) == ["quantize"]
    for plan in (
        of_k("float16", 64, 1, smooth=True), of_k("float16", 64, GROUP_ALL, smooth=True),
        of_k("float16", 64, GROUP_ALL, per_tensor=True), of_v("float16", 64, GROUP_ALL),
    ):  # fmt: skip
        assert entries(plan)[-1] == "quantize"
    assert entries(of_k("float16", 64, 1, smooth=True)) == ["quantize"]
    assert entries(of_k("float16", 64, GROUP_ALL, smooth=True)) == ["quantize"]
    one_for_all = of_k("float16", 64, GROUP_ALL, per_tensor=True)
    assert entries(one_for_all) == ["quantize_reduce", "quantize"]
    assert steps(of_k("float16", 64, GROUP_ALL, smooth=True)) == "k: extrema, then codes"
    assert steps(of_k("float16", 64, 16, static=True)) == "k: codes"
    assert steps(of_v("float16", 64, 64)) == "v: values"
    three = of_k("float16", 64, GROUP_ALL, per_tensor=True, smooth=True)
    assert steps(three) == "k: sums, then reach, then codes"
    assert entries(three) == ["quantize_reduce", "quantize_reduce", "quantize"]


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_q_k_and_v_take_one_launch_by_default(head_dim: int) -> None:
    for quant in (
        QuantConfig(), QuantConfig(pv="int8"), QuantConfig(pv="fp8", symmetric=False),
        QuantConfig("head", "head", "channel", pv="int8"), QuantConfig("block", "block"),
        QuantConfig("token", "token", symmetric=False, pv="int8"),
    ):  # fmt: skip
        plan, found = of_call(quant, (1, 4, 5000, head_dim), (1, 2, 7000, head_dim))
        assert entries(plan) == ["quantize"], quant
        assert len(found) == 3 if quant.pv != "16bit" else 2
    alone = QuantConfig(smooth_k=False)
    assert entries(of_call(alone, (1, 4, 50, head_dim), (1, 2, 7000, head_dim))[0]) == ["quantize"]


def of_call(quant: QuantConfig, q: tuple[int, ...], k: tuple[int, ...], dtype: str = "float16"):
    itemsize = STORAGE[dtype].itemsize
    operands = {n: Operand.contiguous(s, itemsize) for n, s in zip("qkv", (q, k, k), strict=True)}
    found = operand_parts(quant, Tiles(64, 64, 4), operands, dict.fromkeys("qkv"))
    return plan_quantize(dtype, **found, p_type=quant.value_p_type), found


def test_memory_is_what_the_formula_says() -> None:
    """Codes, padded for V, scales and means; and sums of slices, at most 64 to a head, counted."""
    batch, heads, kv_heads, len_q, len_kv, d = 2, 6, 3, 1000, 2001, 64
    quant = QuantConfig(pv="int8")
    plan, found = of_call(quant, (batch, heads, len_q, d), (batch, kv_heads, len_kv, d))
    nbytes = {
        name: math.prod(shape) * np.dtype(dtype).itemsize
        for operand_name, part in found.items()
        for name, (shape, dtype) in part.buffers(operand_name).items()
    }
    padded = -(-len_kv // 128) * 128
    kv = batch * kv_heads
    assert nbytes == {
        "q_codes": batch * heads * len_q * d, "q_scale": 4 * batch * heads * len_q // 2,
        "k_codes": kv * len_kv * d, "k_scale": 4 * kv * -(-len_kv // 16), "k_mean": 4 * kv * d,
        "v_codes": kv * padded * d, "v_scale": 4 * kv * -(-len_kv // 64) * d,
        "v_mean": 4 * kv * d,
    }  # fmt: skip
    # 44 would fit, but none is shorter than the rows of a block, and 512 of 2,001 rows are summed.
    splits = -(-(15 * 32 + 32) // 256)
    assert {w.name: w.nbytes for w in plan.workspace} == {
        "k_partial_sum": 4 * kv * splits * d, "v_partial_sum": 4 * kv * splits * d,
        "k_summed_slices": 4 * kv, "v_summed_slices": 4 * kv, "next_piece": 4,
        "k_head_sum": 8 * kv * d, "v_head_sum": 8 * kv * d,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "length"), [(1, 2**20), (16, 16384), (60, 4096), (24, 118_800), (960, 512), (3, 5)]
)
def test_slices_fill_the_device_and_cover_every_row(heads: int, length: int) -> None:
    plan = plan_quantize(
        "float16", k=Part(Operand.contiguous((1, heads, length, 128), 2), 16, smooth=True)
    )
    _, params = plan.launches[0].params[1]
    splits, rows = params["splits"], params["split_rows"]
    summed = rows_of_mean(length)
    assert (splits - 1) * rows < summed <= splits * rows and rows % 128 == 0
    assert splits <= 64 and params["first_blocks"] == splits
    if length > 1000:
        assert heads * splits >= min(220, 64 * heads)


def pieces_of(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield (task, operand, block of the operand) of the blocks of a launch, in their order."""
    (launch,) = plan.launches
    turn = launch.params[3][1]
    operands = [(name, launch.params["qkv".index(name)][1]) for name in "vkq"]
    operands = [(name, params) for name, params in operands if params]
    pieces = 0
    for round_ in range(turn["rounds"] + turn["lag"]):
        for name, params in operands:
            first, blocks = params["first_blocks"], params["blocks"]
            if round_ < turn["rounds"]:
                yield from (("sum", name, round_ * first + i) for i in range(first))
            head = round_ - (turn["lag"] if first else 0)
            if 0 <= head < turn["rounds"]:
                yield from (("code", name, head * blocks + i) for i in range(blocks))
            pieces += first + blocks
    assert pieces == launch.grid


@pytest.mark.parametrize(("len_q", "len_kv"), [(5000, 7000), (300, 40_000), (1, 1), (20_000, 128)])
@pytest.mark.parametrize("pv", ["16bit", "int8"])
def test_every_piece_of_work_is_done_once_and_waits_for_earlier_ones(len_q, len_kv, pv) -> None:
    quant = QuantConfig(pv=pv)
    plan, found = of_call(quant, (2, 6, len_q, 128), (2, 3, len_kv, 128))
    pieces = list(pieces_of(plan))
    assert len(pieces) == len(set(pieces))
    rows = {"q": plan.tiles.block_q, "k": plan.tiles.block_kv, "v": 128}
    for name, part in found.items():
        heads, length = math.prod(part.x.shape[:2]), part.x.shape[2]
        made = [block for what, of, block in pieces if (what, of) == ("code", name)]
        assert sorted(made) == list(range(heads * -(-length // rows[name])))
        if not part.smooth:
            continue
        splits = plan.launches[0].params["qkv".index(name)][1]["splits"]
        for head in range(heads):
            of_head = len(made) // heads
            last = pieces.index(("sum", name, head * splits + splits - 1))
            assert last < pieces.index(("code", name, head * of_head))


@pytest.mark.parametrize("heads", [1, 24])
def test_no_round_is_idle_where_heads_are_few(heads: int) -> None:
    """Codes come one round later at the latest than the last sums; Q's wait for none."""
    plan, _ = of_call(QuantConfig(), (1, heads, 256, 64), (1, heads, 256, 64))
    assert plan.launches[0].grid <= 2 * len(list(pieces_of(plan)))


def test_grids_cover_every_row_once() -> None:
    plan = of_k("bfloat16", 128, 16, smooth=True)
    rows = plan.tiles.block_kv
    made = [block for what, _, block in pieces_of(plan) if what == "code"]
    assert made == list(range(6 * math.ceil(300 / rows)))
    assert {w.name: w.shape for w in plan.workspace} == {
        "k_partial_sum": (2, 3, 3, 128), "k_summed_slices": (6,), "next_piece": (1,),
        "k_head_sum": (6, 128),
    }  # fmt: skip
    assert [launch.grid for launch in of_v("float16", 64, 64).launches] == [6 * 3]
    whole = [what for what, _, _ in pieces_of(of_v("float16", 256, GROUP_ALL))]
    assert (whole.count("sum"), whole.count("code")) == (6 * 5, 6 * 3 * 2)
    assert pack(*of_v("float16", 64, 64).launches[0].params[2], defaultdict(int))["padded"] == 384


def test_a_tensor_shares_one_scale() -> None:
    struct, params = of_k("float16", 64, GROUP_ALL, per_tensor=True).launches[0].params[1]
    assert struct is QUANTIZE_PARAMS
    assert params["scale_stride_batch"] == params["scale_stride_head"] == 0


def test_batch_and_heads_past_65535_go_into_one_axis() -> None:
    part = Part(Operand.contiguous((70000, 2, 5, 8), 2), 1, smooth=True)
    pieces = list(pieces_of(plan_quantize("float16", k=part)))
    assert len(pieces) == 2 * 140_000 and len(set(pieces)) == len(pieces)


def test_empty_operands_launch_nothing() -> None:
    for shape in ((0, 2, 5, 8), (1, 2, 0, 8)):
        empty, other = (Part(Operand.contiguous(s, 2), 16) for s in (shape, (1, 2, 5, 8)))
        assert plan_quantize("float16", empty, empty).launches == ()
        (launch,) = plan_quantize("float16", other, empty).launches
        assert launch.grid == 2


def test_a_grid_that_is_too_large_is_refused() -> None:
    part = Part(Operand.contiguous((2**20, 2**12, 64, 128), 2), 16)
    with pytest.raises(UnsupportedError, match="blocks, more than 2147483647"):
        plan_quantize("float16", part)


def test_strides_decide_the_width_of_loads() -> None:
    def vec(*operands: Operand) -> int:
        return plan_quantize("float16", *(Part(x, 16) for x in operands)).features.vec

    whole = Operand.contiguous((2, 3, 300, 64), 2)
    odd = Operand((2, 3, 300, 64), (3 * 300 * 66, 300 * 66, 66, 1), 2, 0)
    shifted = Operand(whole.shape, whole.strides, 2, 2)
    assert (vec(whole), vec(odd), vec(shifted)) == (8, 2, 1)
    assert (vec(whole, odd), vec(shifted, whole)) == (2, 1)  # one width for all operands


# ---- the compiler --------------------------------------------------------------------------------


#: Where everything must stay in registers.
NO_SPILLS = pytest.mark.parametrize(
    "arch", ["sm_80", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_89", "sm_90"))]
)


def resources(plan: Plan, arch: str) -> list[Resources]:
    """Compile what a plan launches, and nothing else; return what each launch takes."""
    if arch not in target.supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    found = []
    for launch in plan.launches:
        binary = kc.build(launch.module, arch)
        assert binary.smem_bytes == 0
        found.append(binary.kernels[launch.entry])
    return found


@pytest.mark.parametrize(
    "arch",
    slow_unless(lambda _, x: x in ("sm_80", "sm_90a", "sm_120"), architectures.ARCHITECTURES),
)
def test_compiles_for_every_architecture(arch) -> None:
    dtype, head_dim, group = CELLS[architectures.ARCHITECTURES.index(arch) % len(CELLS)]
    x = operand(dtype, head_dim)
    k, v = Part(x, group, smooth=True), Part(x, 64, smooth=True)
    assert len(resources(plan_quantize(dtype, Part(x, 2), k, v, "u8"), arch)) == 1


@NO_SPILLS
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        *CELLS[:1],
        *(
            pytest.param(*one, marks=[pytest.mark.slow] if number % 2 else [])
            for number, one in enumerate(CELLS[3::3] + CELLS[1:3])
        ),
    ],
)
def test_what_runs_spills_nothing(dtype, head_dim, group, arch) -> None:
    for static in (False, True):
        for used in resources(of_k(dtype, head_dim, group, smooth=True, static=static), arch):
            assert (used.spill_stores, used.spill_loads) == (0, 0), used


@NO_SPILLS
@pytest.mark.parametrize("head_dim", [256, 7, *slow((64, 128, 40, 255))])
def test_quantising_values_spills_nothing(head_dim, arch) -> None:
    for dtype, group, p_type in (
        ("float16", 32, "u8"), ("bfloat16", GROUP_ALL, "s8"), ("float32", 64, "e4m3"),
    ):  # fmt: skip
        if p_type == "e4m3" and arch == "sm_80":
            continue
        for used in resources(of_v(dtype, head_dim, group, p_type, smooth=True), arch):
            assert (used.spill_stores, used.spill_loads) == (0, 0), used
            assert used.static_smem <= 48 * 1024


#: Head size, type, and whether codes are symmetric, of the quick tests.
AT_ONCE = ((128, "float16", True), (128, "bfloat16", False))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "symmetric"),
    [
        pytest.param(*one, marks=[] if one in AT_ONCE else [pytest.mark.slow])
        for one in itertools.product((64, 128, 256), ("float16", "bfloat16"), (True, False))
    ],
)
def test_enough_blocks_share_a_multiprocessor(head_dim: int, dtype: str, symmetric: bool) -> None:
    """Three blocks of 256 threads keep memory busy: 80 registers, a third of shared memory."""
    quant = QuantConfig(pv="int8", symmetric=symmetric)
    plan, _ = of_call(quant, *[(1, 2, 500, head_dim)] * 2, dtype)
    for used in resources(plan, "sm_90"):
        assert used.registers <= 80 and used.static_smem <= 48 * 1024
        assert (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.parametrize("dtype", ["float16", *slow(("bfloat16", "float32"))])
def test_two_blocks_of_prepared_rows_share_a_multiprocessor(dtype: str) -> None:
    """They stay numbers from their maxima to their codes: 128 registers, and none spills."""
    table, weight = np.zeros((500, 64), np.float32), np.ones(128, np.float32)
    options = {"rope": (table, table), "rope_interleaved": False, "rope_offset_q": 0,
               "qk_norm": (weight, weight), "qk_norm_eps": 1e-6}  # fmt: skip
    hows = prepares_of(Preparation.of_arrays(options, (3, 3, 500, 500, 128)))
    x = Operand.contiguous((2, 3, 500, 128), np.dtype(STORAGE[dtype]).itemsize)
    q, k = Part(x, 2, prepares=hows["q"]), Part(x, 16, smooth=True, prepares=hows["k"])
    (used,) = resources(plan_quantize(dtype, q, k), "sm_90")
    assert used.registers <= 128 and (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.slow
def test_values_fit_where_prepared_rows_take_many_warps() -> None:
    """Groups of 128 prepared rows of 256 columns take 16 warps, zero points twice the ends."""
    table = np.zeros((500, 128), np.float32)
    options = {"rope": (table, table), "rope_interleaved": False, "rope_offset_q": 0,
               "qk_norm": None, "qk_norm_eps": 1e-6}  # fmt: skip
    hows = prepares_of(Preparation.of_arrays(options, (3, 3, 500, 500, 256)))
    x = Operand.contiguous((1, 3, 500, 256), 2)
    q = Part(x, 128, zero_points=True, prepares=hows["q"])
    k = Part(x, 32, smooth=True, zero_points=True, prepares=hows["k"])
    plan = plan_quantize("float16", q, k, Part(x, 32, smooth=True, zero_points=True), "u8")
    assert plan.launches[-1].block == 512
    for used in resources(plan, "sm_80"):
        assert used.static_smem <= 48 * 1024


def test_extrema_of_the_widest_rows_fit_into_shared_memory() -> None:
    """Scales of heads for Q and a mean of K: both kinds of folds in one module."""
    plan, _ = of_call(QuantConfig("head", "block"), *[(1, 2, 500, 256)] * 2, "float32")
    assert resources(plan, "sm_80")[0].static_smem <= 48 * 1024
