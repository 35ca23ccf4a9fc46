"""kernels_cu/quantize*.cu without a GPU: they compile, spill nothing, and take what is packed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import compile as kc
from cupyattn.errors import UnsupportedError
from cupyattn.features import DTYPES
from cupyattn.launch import Operand
from cupyattn.params import pack
from cupyattn.quant import GROUP_ALL
from cupyattn.quant.plan import QUANTIZE_PARAMS, block_shape, plan_operand, plan_values
from cupyattn.rounding import STORAGE

GROUPS = (1, 2, 16, 64, 128, GROUP_ALL)
HEADER = kc.KERNELS / "prims" / "quant.cuh"

#: One cell per (dtype, head_dim), with the groups rotated over the head sizes.
CELLS = [
    (dtype, head_dim, GROUPS[(3 * i + j) % len(GROUPS)])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate((64, 128, 256, 40, 7, 255, 1))
]


def contiguous(dtype: str, head_dim: int, group: int, **options: bool):
    operand = Operand.contiguous((2, 3, 300, head_dim), STORAGE[dtype].itemsize)
    return plan_operand(operand, dtype, group, **options)


# ---- the struct ----------------------------------------------------------------------------------


def test_params_are_the_fields_of_the_header_in_order() -> None:
    text = re.sub(r"//.*", "", HEADER.read_text())
    body = re.search(r"struct QuantizeParams \{(.*?)\};", text, re.DOTALL)[1]
    declared = [" ".join(line.split()).rpartition(" ") for line in body.split(";") if line.strip()]
    types = {"int64_t": "i8", "int32_t": "i4", "Strides": "(3,)i8"}
    expected = [(name, np.dtype("u8" if "*" in t else types[t])) for t, _, name in declared]
    assert [(name, QUANTIZE_PARAMS[name]) for name in QUANTIZE_PARAMS.names] == expected


def test_params_lie_where_the_compiler_puts_them(tmp_path: Path) -> None:
    checks = [f"static_assert(sizeof(QuantizeParams) == {QUANTIZE_PARAMS.itemsize});"]
    for name, (_, offset) in QUANTIZE_PARAMS.fields.items():
        checks.append(f"static_assert(__INTADDR__(&((QuantizeParams*)0)->{name}) == {offset});")
    source = tmp_path / "layout.cu"
    source.write_text(
        '#include "prims/quant.cuh"\n'
        + "\n".join(checks)
        + '\nextern "C" __global__ void layout(const __grid_constant__ QuantizeParams p) {}\n'
    )
    assert "layout" in kc.build(kc.ModuleSpec(source), "sm_80").kernels


def test_params_pack() -> None:
    plan = contiguous("float16", 64, 16, smooth=True)
    names = ("x", "codes", "scale", "absmax", "partial_sum", "mean", "static_scale")
    addresses = {name: 1000 + i for i, name in enumerate(names)}
    packed = pack(*plan.launches[-1].params[0], addresses)[0]
    assert packed["X"] == 1000 and packed["mean"] == 1005
    assert packed["static_scale"] == 0 and packed["absmax"] == 0  # null: a block finds it itself
    assert packed["X_stride"].tolist() == [3 * 300 * 64, 300 * 64, 64]
    assert (packed["scale_stride_batch"], packed["scale_stride_head"]) == (3 * 19, 19)


# ---- the plan ------------------------------------------------------------------------------------


@given(
    st.one_of(st.sampled_from((*GROUPS, 48, 112, 256, 4096)), st.integers(1, 300)),
    st.integers(1, 256),
    st.sampled_from((2, 4)),
)
def test_blocks_hold_whole_groups_or_divide_one(group, head_dim, itemsize) -> None:
    for vec in (v for v in (1, 2, 4, 8) if head_dim % v == 0 and v * itemsize <= 16):
        rows, num_warps, whole = block_shape(group, head_dim, itemsize, vec)
        assert rows % group == 0 if whole else group % rows == 0
        assert rows % num_warps == 0 and 1 <= num_warps <= 16
        assert rows * head_dim * itemsize <= 128 * 32 * num_warps  # 32 registers of every thread
        if group <= 16:
            assert whole or group % 4  # what the default granularities need is read once


def entries(plan) -> list[str]:
    return [launch.entry for launch in plan.launches]


def test_launches_of_each_kind() -> None:
    assert entries(contiguous("float16", 64, 16)) == ["quantize_int8"]
    means = ["channel_sum", "channel_mean"]
    assert entries(contiguous("float16", 64, 1, smooth=True)) == [*means, "quantize_int8"]
    assert entries(contiguous("float16", 64, GROUP_ALL)) == ["group_absmax", "encode_int8"]
    assert entries(contiguous("float16", 64, 16, static=True)) == ["encode_int8"]


def test_grids_cover_every_row_once() -> None:
    plan = contiguous("bfloat16", 128, 16, smooth=True)
    rows = plan.tiles.block_q
    assert [launch.grid for launch in plan.launches] == [6 * 2, 6, 6 * math.ceil(300 / rows)]
    (sums,) = plan.workspace
    assert sums.shape == (2, 3, 2, 128)


def test_a_tensor_shares_one_scale() -> None:
    struct, params = contiguous("float16", 64, GROUP_ALL, per_tensor=True).launches[0].params[0]
    assert struct is QUANTIZE_PARAMS
    assert params["scale_stride_batch"] == params["scale_stride_head"] == 0


def test_batch_and_heads_past_65535_go_into_one_axis() -> None:
    operand = Operand.contiguous((70000, 2, 5, 8), 2)
    plan = plan_operand(operand, "float16", 1, smooth=True)
    assert [launch.grid for launch in plan.launches] == [140000] * 3


def test_empty_operands_launch_nothing() -> None:
    for shape in ((0, 2, 5, 8), (1, 2, 0, 8)):
        assert plan_operand(Operand.contiguous(shape, 2), "float16", 16).launches == ()


def test_a_grid_that_is_too_large_is_refused() -> None:
    operand = Operand.contiguous((2**20, 2**12, 64, 128), 2)
    with pytest.raises(UnsupportedError, match="blocks, more than 2147483647"):
        plan_operand(operand, "float16", 16)


def test_strides_decide_the_width_of_loads() -> None:
    whole = Operand.contiguous((2, 3, 300, 64), 2)
    assert plan_operand(whole, "float16", 16).features.vec == 8
    odd = Operand((2, 3, 300, 64), (3 * 300 * 66, 300 * 66, 66, 1), 2, 0)
    assert plan_operand(odd, "float16", 16).features.vec == 2
    shifted = Operand(whole.shape, whole.strides, 2, 2)
    assert plan_operand(shifted, "float16", 16).features.vec == 1


# ---- the compiler --------------------------------------------------------------------------------


#: Where everything must stay in registers.
NO_SPILLS = pytest.mark.parametrize(
    "arch", ["sm_80", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_89", "sm_90"))]
)


def resources(plan, arch: str) -> dict[str, kc.Resources]:
    """Compile what a plan launches, and nothing else; return what each kernel takes."""
    if arch not in kc.supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    found: dict[str, kc.Resources] = {}
    for spec in dict.fromkeys(one.module for one in plan.launches):
        binary = kc.build(spec, arch)
        assert binary.smem_bytes == 0
        found |= binary.kernels
    return found


@pytest.mark.parametrize("arch", kc.ARCHITECTURES)
def test_compiles_for_every_architecture(arch) -> None:
    dtype, head_dim, group = CELLS[kc.ARCHITECTURES.index(arch) % len(CELLS)]
    plan = contiguous(dtype, head_dim, group, smooth=True)
    assert set(entries(plan)) <= set(resources(plan, arch))
    operand = Operand.contiguous((2, 3, 300, head_dim), STORAGE[dtype].itemsize)
    values = plan_values(operand, dtype, 64)
    assert set(entries(values)) == set(resources(values, arch))


@NO_SPILLS
@pytest.mark.parametrize(("dtype", "head_dim", "group"), CELLS[::3] + CELLS[1:3])
def test_what_runs_spills_nothing(dtype, head_dim, group, arch) -> None:
    for static in (False, True):
        plan = contiguous(dtype, head_dim, group, smooth=True, static=static)
        found = resources(plan, arch)
        for entry in entries(plan):
            used = found[entry]
            assert (used.spill_stores, used.spill_loads) == (0, 0), (entry, used)


@NO_SPILLS
@pytest.mark.parametrize(
    "head_dim", [64, 256, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 40, 255))]
)
def test_quantising_values_spills_nothing(head_dim, arch) -> None:
    for dtype, group, p_type in (
        ("float16", 32, "u8"), ("bfloat16", GROUP_ALL, "s8"), ("float32", 64, "e4m3"),
    ):  # fmt: skip
        if p_type == "e4m3" and arch == "sm_80":
            continue
        operand = Operand.contiguous((2, 3, 300, head_dim), STORAGE[dtype].itemsize)
        plan = plan_values(operand, dtype, group, p_type, smooth=True)
        found = resources(plan, arch)
        steps = ["channel_sum", "channel_mean", "channel_absmax", "encode_values"]
        assert entries(plan) == steps
        for entry in steps:
            used = found[entry]
            assert (used.spill_stores, used.spill_loads) == (0, 0), (entry, used)
            assert used.static_smem <= 48 * 1024


def test_grids_over_values_cover_every_key_once() -> None:
    operand = Operand.contiguous((2, 3, 300, 64), 2)
    per_tile, per_channel = (plan_values(operand, "float16", g) for g in (64, GROUP_ALL))
    assert [launch.grid for launch in per_tile.launches] == [6 * 5, 6 * 3]
    assert [launch.grid for launch in per_channel.launches] == [6 * 2, 6 * 3]
    _, params = per_tile.launches[0].params[0]
    assert (params["splits"], params["split_rows"], params["padded"]) == (5, 64, 384)
    for shape in ((0, 2, 5, 8), (1, 2, 0, 8)):
        assert plan_values(Operand.contiguous(shape, 2), "float16", 32).launches == ()
