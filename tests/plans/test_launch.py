"""Plans without a GPU: parameter structs, grids, access widths, offsets, refused calls."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.described import Described
from cupyattn.arrays.memory import data_address
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import resolved
from cupyattn.plans import assemble, records
from cupyattn.plans.codes import Scales
from cupyattn.plans.records import Plan
from cupyattn.plans.structs import ATTN_PARAMS, SCORE_PARAMS, pack
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.operands import Codes, Operands
from cupyattn.problem.settings import check_attention
from cupyattn.quant import QuantizedQKV
from tests.support.planned import plan_attention, plan_int8

HALF_PRECISION_RUNGS = ("unfused", "fa", "fa_warps", "fa_tc")


def call_of(
    batch: int = 1,
    heads: int = 1,
    len_q: int = 4,
    len_kv: int = 4,
    head_dim: int = 8,
    dtype: str = "float16",
    **options: Any,
) -> AttentionSpec:
    heads_kv = options.pop("heads_kv", heads)
    scale = options.pop("scale", head_dim**-0.5)
    return AttentionSpec(batch, heads, heads_kv, len_q, len_kv, head_dim, dtype, scale, **options)


def contiguous_operands(call: AttentionSpec) -> tuple[Operand, Operand, Operand, Operand]:
    itemsize = 4 if call.dtype == "float32" else 2
    q = Operand.contiguous(call.output_shape, itemsize)
    kv = Operand.contiguous((call.batch, call.heads_kv, call.len_kv, call.head_dim), itemsize)
    return q, kv, kv, q


def plan_of(call: AttentionSpec, variant: str = "fa_tc", **options: Any) -> Plan:
    if variant != "fa_int8":
        operands = contiguous_operands(call)
        return plan_attention(ladder.lookup(variant), call, *operands, **options)
    codes = Operand.contiguous(call.output_shape, 1)
    k_codes = Operand.contiguous((call.batch, call.heads_kv, call.len_kv, call.head_dim), 1)
    v, o = (Operand.contiguous(x.shape, 2) for x in (k_codes, codes))
    q_scale = Operand.contiguous((call.batch, call.heads, max(1, call.len_q)), 4)
    k_scale = Operand.contiguous((call.batch, call.heads_kv, max(1, call.len_kv)), 4)
    scales = Scales(q_scale, k_scale, smoothed=False)
    return plan_int8(call, Operands(codes, k_codes, v, o), Codes(1, 1), scales, **options)


# ---- parameter structs ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [*HALF_PRECISION_RUNGS, "fa_int8"])
def test_every_launch_fills_every_field(variant: str) -> None:
    plan = plan_of(call_of(return_lse=True), variant)
    for one in plan.launches:
        for table, values in one.params:
            assert set(values) == set(table.names or ())


def test_pack_names_addresses_and_keeps_64_bits() -> None:
    strides = (2**40, -(2**33), 0)
    packed = pack(
        ATTN_PARAMS,
        {"Q": "q", "lse": None, "Q_stride": strides, "len_q": 7, "scale": 0.125},
        {"q": 2**47 + 64},
    )
    assert packed.shape == (1,) and packed.nbytes == ATTN_PARAMS.itemsize
    assert packed["Q"][0] == 2**47 + 64 and packed["lse"][0] == 0
    assert tuple(packed["Q_stride"][0]) == strides
    assert packed["len_q"][0] == 7 and packed["scale"][0] == 0.125


def test_scale_log2_is_rounded_once() -> None:
    scale = 1 / 3
    values = plan_of(call_of(scale=scale)).launches[0].params[0][1]
    packed = pack(ATTN_PARAMS, values, dict.fromkeys("qkvo", 0))
    assert packed["scale_log2"][0] == np.float32(scale * math.log2(math.e))
    assert packed["scale"][0] == np.float32(scale)


# ---- grids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fa", "fa_warps", "fa_tc", "fa_int8"])
@pytest.mark.parametrize("len_q", [1, 127, 128, 129])
def test_a_fused_rung_is_one_launch_over_query_tiles(variant: str, len_q: int) -> None:
    tiles = Tiles(64, 32, 4, 2)
    plan = plan_of(call_of(2, 3, len_q, 5), variant, tiles=tiles)
    (one,) = plan.launches
    assert (one.grid, one.block) == (2 * 3 * math.ceil(len_q / 64), 128)
    assert one.entry == f"attn_{variant}" and one.dynamic_shared and plan.workspace == ()


def test_the_unfused_rung_is_three_launches_and_a_workspace() -> None:
    tiles = Tiles(32, 16, 4)
    plan = plan_of(call_of(2, 3, 65, 50), "unfused", tiles=tiles)
    assert [(one.entry, one.grid) for one in plan.launches] == [
        ("attn_unfused_scores", 6 * 3 * 4),
        ("attn_unfused_softmax", 6 * math.ceil(65 / 4)),
        ("attn_unfused_weighted_sum", 6 * 3),
    ]
    assert [w.shape for w in plan.workspace] == [(2, 3, 65, 50)]
    assert plan.workspace[0].nbytes == 4 * 6 * 65 * 50
    assert "workspace 78,000 bytes" in str(plan)


@pytest.mark.parametrize("variant", [*HALF_PRECISION_RUNGS, "fa_int8"])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"len_q": 0}])
def test_an_empty_output_is_no_launch(variant: str, empty: dict[str, int]) -> None:
    assert plan_of(call_of(**empty), variant).launches == ()


@pytest.mark.parametrize("variant", [*HALF_PRECISION_RUNGS, "fa_int8"])
def test_no_keys_still_write_the_output(variant: str) -> None:
    entries = [one.entry for one in plan_of(call_of(len_kv=0), variant).launches]
    if variant == "unfused":  # there is no score, but there are rows
        assert entries == ["attn_unfused_softmax", "attn_unfused_weighted_sum"]
    else:
        assert entries == [f"attn_{variant}"]


@pytest.mark.parametrize("variant", [*HALF_PRECISION_RUNGS, "fa_int8"])
def test_more_than_65535_heads_are_one_grid(variant: str) -> None:
    plan = plan_of(call_of(70_000, 4), variant)
    assert plan.launches[-1].grid == 280_000


@pytest.mark.parametrize("variant", [*HALF_PRECISION_RUNGS, "fa_int8"])
def test_a_grid_that_does_not_exist_is_an_error(variant: str) -> None:
    with pytest.raises(UnsupportedError, match=r"blocks, more than 2147483647: split"):
        plan_of(call_of(2**20, 2**11, 1, 1), variant)
    assert plan_of(call_of(2**20, 2**10, 1, 1), variant).launches


def test_blocks_of_a_hopper_form_never_count_past_32_bits() -> None:
    """Each goes on until it is given a tile past the last: numbers up to tiles + blocks."""
    last = 2**31 - 1 - assemble.HOPPER_BLOCKS
    assert plan_of(call_of(last, 1, 1, 1, head_dim=8), "fa_tc", arch="sm_90a").form == "sm90"
    call = call_of(last + 1, 1, 1, 1, head_dim=8)
    with pytest.raises(UnsupportedError, match=f"{last + 1} blocks, more than {last}: split"):
        plan_of(call, "fa_tc", arch="sm_90a")
    assert plan_of(call, "fa_tc").form == "portable"


def test_a_dtype_that_a_rung_lacks_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="fa_tc takes float16, bfloat16, got float32"):
        plan_of(call_of(dtype="float32"), "fa_tc")


# ---- the Hopper form -----------------------------------------------------------------------------


def test_the_hopper_form_is_planned_where_it_takes_the_call() -> None:
    plan = plan_of(call_of(2, 3, 300, 500, head_dim=64), "fa_tc", arch="sm_90a")
    assert plan.form == "sm90" and not plan.note
    (launched,) = plan.launches
    assert launched.module.hopper and launched.grid == 2 * 3 * 2
    maps = [param for param in launched.params if isinstance(param, records.TensorMap)]
    assert [m.buffer for m in maps] == ["q", "k", "v", "o"]
    assert maps[0].box == (1, 1, plan.tiles.block_q, 64) and maps[1].shape == (2, 3, 500, 64)
    assert maps[3].box == (1, 1, assemble.HOPPER_STORE_ROWS, 64)
    assert not plan.workspace  # tiles of equal work are dealt out beforehand
    for uneven in ({"causal": True}, {"window": True}):
        plan = plan_of(call_of(2, 3, 300, 500, head_dim=64, **uneven), "fa_tc", arch="sm_90a")
        assert [w.name for w in plan.workspace if w.zeros] == ["next_tile"]
    many = plan_of(call_of(64, 64, 4096, 4096, head_dim=64), "fa_tc", arch="sm_90a")
    assert many.launches[0].grid == assemble.HOPPER_BLOCKS


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(1, 1, 64, 0, head_dim=64), "there are no keys"),
        (call_of(1, 1, 64, 64, head_dim=36), "multiples of 16 bytes, got q at"),
    ],
)
def test_a_note_says_why_the_hopper_form_was_left_out(call: AttentionSpec, reason: str) -> None:
    plan = plan_of(call, "fa_tc", arch="sm_90a")
    assert plan.form == "portable" and reason in plan.note and reason in str(plan)
    assert not plan_of(call, "fa_tc").note


@pytest.mark.parametrize(
    ("len_q", "len_kv", "head_dim", "causal", "block_q"),
    [
        (512, 512, 128, False, 128), (1024, 1024, 128, False, 128), (1152, 1120, 128, False, 192),
        (4096, 4096, 128, False, 192), (65, 4096, 128, False, 128), (4096, 4096, 128, True, 192),
        (1024, 1024, 64, True, 128), (2048, 2048, 64, True, 192), (512, 512, 64, False, 192),
    ],
)  # fmt: skip
def test_short_sequences_get_tiles_that_fit_them(
    len_q: int, len_kv: int, head_dim: int, causal: bool, block_q: int
) -> None:
    call = call_of(1, 1, len_q, len_kv, head_dim=head_dim, causal=causal)
    assert plan_of(call, "fa_tc", arch="sm_90a").tiles.block_q == block_q
    asked = ladder.lookup("fa_tc").default_tiles(128, "sm90")
    given = plan_of(call_of(1, 1, len_q, len_kv, head_dim=128), tiles=asked, arch="sm_90a")
    assert given.tiles == asked


def test_the_hopper_form_stores_where_the_copy_engine_can() -> None:
    call = call_of(1, 2, 64, 64, head_dim=64)
    x = Operand.contiguous((1, 2, 64, 64), 2)
    odd = replace(x, strides=(2 * 64 * 65, 64 * 65, 65, 1))
    for o, form in ((x, "sm90"), (odd, "portable")):
        plan = plan_attention(ladder.VARIANTS["fa_tc"], call, x, x, x, o, arch="sm_90a")
        assert plan.form == form and ("got o at" in plan.note) == (form == "portable")


def test_a_rung_without_a_hopper_form_runs_its_portable_one() -> None:
    plan = plan_of(call_of(), "fa", arch="sm_90a")
    assert plan.form == "portable" and not plan.note


# ---- operands ------------------------------------------------------------------------------------


def test_operand_of_views() -> None:
    base = np.zeros((4, 6, 10, 16), np.float16)
    whole = Operand.of(base)
    assert whole.strides == (960, 160, 16, 1) and whole == Operand.contiguous(base.shape, 2)
    reverse = Operand.of(base[:, ::-1, ::2])
    assert reverse.strides == (960, -160, 32, 1) and reverse.shape == (4, 6, 5, 16)
    swapped = Operand.of(base.swapaxes(1, 2))
    assert swapped.row_strides == (960, 16, 160)
    one_head = np.broadcast_to(base[:, :1], base.shape)
    assert Operand.of(one_head).row_strides == (960, 0, 16)
    assert Operand.of(base[:1, :, :1]).row_strides == (0, 160, 0)
    assert Operand.of(base[..., 3:11]).misalignment == (whole.misalignment + 6) % 16


def brute_force_allows(array: np.ndarray, width: int) -> bool:
    """Whether every access of `width` elements, row by row, is aligned and inside its row."""
    size = width * array.itemsize
    if size > 16 or array.shape[-1] % width:
        return False
    rows = itertools.product(*(range(n) for n in array.shape[:-1]))
    strides = array.strides[:-1]
    address = data_address(array)
    return all(
        (address + sum(i * s for i, s in zip(row, strides, strict=True))) % size == 0
        for row in rows
    )


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """A 4-D view with a contiguous last axis: cut out of a larger array, turned, repeated."""
    dtype = draw(st.sampled_from([np.int8, np.float16, np.float32]))
    head_dim = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 20, 24]))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    padding = [draw(st.integers(0, 2)) for _ in range(3)]
    row = head_dim + draw(st.sampled_from([0, 0, 1, 2, 4, 8, 16]))
    base = np.zeros((*(n + p for n, p in zip(shape, padding, strict=True)), row), dtype)
    start = draw(st.integers(0, row - head_dim))
    view = base[: shape[0], : shape[1], : shape[2], start : start + head_dim]
    if draw(st.booleans()):
        view = view.swapaxes(1, 2)
    if draw(st.booleans()):
        view = view[::-1, ::-1]
    if draw(st.booleans()):
        view = np.broadcast_to(view[:1], view.shape)
    return view


@given(array=views(), width=st.sampled_from([1, 2, 4, 8, 16]))
def test_a_width_is_allowed_exactly_where_every_access_is_aligned(
    array: np.ndarray, width: int
) -> None:
    assert Operand.of(array).allows(width) == brute_force_allows(array, width)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vec_is_the_widest_that_head_dim_allows(dtype: str) -> None:
    most = 16 // np.dtype(dtype).itemsize
    widest = {d: max(w for w in (1, 2, 4, 8) if d % w == 0 and w <= most) for d in range(1, 257)}
    chosen = {d: plan_of(call_of(head_dim=d, dtype=dtype), "fa").features.vec for d in widest}
    assert chosen == widest


def test_one_narrow_operand_narrows_them_all() -> None:
    call = call_of(head_dim=64)
    operands = list(contiguous_operands(call))
    for i, (change, vec) in enumerate(
        [({"misalignment": 8}, 4), ({"misalignment": 2}, 1), ({"strides": (256, 256, 66, 1)}, 2)]
    ):
        narrow = replace(operands[i], **change)
        mixed = [*operands[:i], narrow, *operands[i + 1 :]]
        assert plan_attention(ladder.lookup("fa"), call, *mixed).features.vec == vec


@given(head_dim=st.integers(1, 256), offset=st.sampled_from([0, 2, 4, 8]))
def test_int8_codes_move_twice_as_many_elements(head_dim: int, offset: int) -> None:
    """attn_fa_int8.cu derives CODE_VEC from VEC; it must be aligned wherever VEC is chosen."""
    call = call_of(head_dim=head_dim)
    codes = Operand(call.output_shape, Operand.contiguous(call.output_shape, 1).strides, 1, offset)
    halves = Operand.contiguous(call.output_shape, 2)
    scale = Operand.contiguous((1, 1, 4), 4)
    operands = Operands(codes, codes, halves, halves)
    plan = plan_int8(call, operands, Codes(1, 1), Scales(scale, scale, smoothed=False))
    vec = plan.features.vec
    code_vec = 2 * vec if head_dim % (2 * vec) == 0 else vec
    assert codes.allows(code_vec) and halves.allows(vec)


# ---- index arithmetic ----------------------------------------------------------------------------


def located(plan: Plan, call: AttentionSpec) -> list[tuple[int, int, int]]:
    """Step S0 of the fused kernels, for every block: (batch, head, first query row)."""
    q_blocks = -(-call.len_q // plan.tiles.block_q)
    blocks = range(plan.launches[-1].grid)
    rows = (block % q_blocks * plan.tiles.block_q for block in blocks)
    heads = (divmod(block // q_blocks, call.heads) for block in blocks)
    return [(batch, head, q0) for (batch, head), q0 in zip(heads, rows, strict=True)]


@given(array=views(), block_q=st.sampled_from([1, 2, 16]))
def test_blocks_cover_every_row_once_and_stay_inside(array: np.ndarray, block_q: int) -> None:
    if array.dtype == np.int8:
        array = array.view(np.int8).astype(np.float16)
    batch, heads, len_q, head_dim = array.shape
    call = call_of(batch, heads, len_q, len_q, head_dim, str(array.dtype))
    operand = Operand.of(array)
    plan = plan_attention(
        ladder.lookup("fa"), call, *[operand] * 4, tiles=Tiles(block_q, 8, 1)
    )
    stride = plan.launches[0].params[0][1]["Q_stride"]
    low, high = (data_address(array) + end for end in Described.of("q", array).reach)
    seen = []
    for b, h, q0 in located(plan, call):
        for row in range(q0, min(q0 + block_q, len_q)):
            offset = b * stride[0] + h * stride[1] + row * stride[2]
            address = data_address(array) + offset * array.itemsize
            assert address == data_address(array[b, h, row])
            assert low <= address and address + head_dim * array.itemsize <= high
            seen.append((b, h, row))
    assert sorted(seen) == list(itertools.product(range(batch), range(heads), range(len_q)))


def test_offsets_past_two_to_the_31_keep_their_bits() -> None:
    call = call_of(64, 32, 8192, 8192, 256)
    assert math.prod(call.output_shape) == 2**32
    plan = plan_of(call, "fa_tc")
    packed = pack(*plan.launches[0].params[0], dict.fromkeys("qkvo", 0))
    last = np.array([63, 31, 8191])
    for name in ("Q_stride", "K_stride", "V_stride", "O_stride"):
        assert int(packed[name][0] @ last) + 255 == 2**32 - 1


@pytest.mark.parametrize("variant", ladder.VARIANTS)
def test_kernels_step_through_memory_in_64_bits(variant: str) -> None:
    """An index that multiplies a length or a stride starts from a 64-bit number."""
    text = (kc.KERNELS / f"attn_{variant}.cu").read_text()
    assert "int64_t batch_head = " in text
    assert "int64_t batch = batch_head / call.heads, head = batch_head % call.heads;" in text
    assert not re.search(r"int \w+ = [^;]*\b(?:p|call)\.\w+_stride", text)


# ---- what is still wrong -------------------------------------------------------------------------


def test_int8_codes_at_odd_addresses() -> None:
    call = call_of(head_dim=64)
    codes = replace(Operand.contiguous(call.output_shape, 1), misalignment=1)
    halves, scale = Operand.contiguous(call.output_shape, 2), Operand.contiguous((1, 1, 4), 4)
    operands = Operands(codes, codes, halves, halves)
    plan = plan_int8(call, operands, Codes(1, 1), Scales(scale, scale, smoothed=False))
    assert plan.launches


def test_a_kernel_of_ones_own_has_one_form(tmp_path: Path) -> None:
    """A copy of a rung with a Hopper form must not get that form's parameters and tiles."""
    mine = replace(ladder.lookup("fa_tc"), name="mine", source=tmp_path / "attn_mine.cu")
    call = call_of(len_q=64, len_kv=64, head_dim=64)
    plan = plan_attention(mine, call, *contiguous_operands(call), arch="sm_90a")
    assert plan.form == "portable"


def test_codes_whose_last_axis_is_strided_are_copied_or_refused() -> None:
    codes = np.zeros((1, 1, 8, 64), np.int8)[..., ::2]
    v = np.zeros((1, 1, 8, 32), np.float16)
    operands = QuantizedQKV.from_codes(codes, codes, v, 1.0, 1.0)
    request = resolved(operands, None, None)
    assert request.rows["q"].place.strides[-1] == 1


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_scales_that_float32_does_not_hold_are_refused(scale: float) -> None:
    """If it were 0 or infinity, the factor would make NaN of every masked score."""
    q = np.zeros((1, 1, 4, 8), np.float16)
    with pytest.raises(ValueError, match="scale must be"):
        check_attention(q, q, q, scale=scale)


def test_lengths_near_two_to_the_31_are_refused() -> None:
    """ceil_div(len, BLOCK) and kv0 += BLOCK_KV are 32-bit in the kernels: they would wrap."""
    longest = (1, 1, 2**31 - 1, 1)
    with pytest.raises(UnsupportedError):
        check_shapes(longest, longest, longest)


@pytest.mark.parametrize(
    ("batch", "shape", "once"),
    [(2, (2, 4), 1), (2, (1, 4), 0), (2, (2, 1), 0), (1, (1, 4), 1), (1, (1, 1), 0)],
)
def test_a_bias_that_no_two_heads_share_is_read_once(
    batch: int, shape: tuple[int, int], once: int
) -> None:
    q = np.zeros((batch, 4, 200, 64), np.float16)
    bias = np.broadcast_to(np.zeros((*shape, 200, 200), np.float16), (batch, 4, 200, 200))
    prepared = ca.plan(q, q, q, bias=bias, variant="fa_tc", arch="sm_90a", backend="interpret")
    (launch,) = prepared.plans[-1].launches
    (values,) = [x[1] for x in launch.params if isinstance(x, tuple) and x[0] == SCORE_PARAMS]
    assert values["bias_once"] == once
