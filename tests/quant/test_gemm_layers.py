"""Layers of the same codes in one launch: the bits of separate calls, faults, and the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.operation import problem_of
from cupyattn.ops.operation import run as run_call
from cupyattn.plans.gemm import GemmPlan, LayerOperands, ProductOperands, buffer_of, plan_gemm
from cupyattn.problem.gemm_form import (
    HOPPER_TILES,
    PORTABLE_TILES,
    GemmKernel,
    choose_tiles,
    settle_layers,
    tile_count,
    tiles_alone,
)
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.gemm_cases import Product
from tests.quant.test_gemm_channel import by_channel
from tests.support.marks import slow_rows, slow_unless

ALONE = GemmTiles(64, 64, num_warps=8, num_stages=2)
#: Blocks share all tiles, or the tiles of the last wave.
SPLIT = GemmTiles(64, 64, num_warps=8, num_stages=2, splits=2)
TAIL = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=2)


def layers_of(seed: int, m: int, n: Sequence[int], k: int, **more: Any) -> list[Product]:
    """Draw products with the codes of the first; every second one has no bias."""
    first = by_channel(seed, (m, n[0], k), bias=True, **more)
    others = [by_channel(seed + i, (m, one, k), bias=i % 2 == 0, **more)
              for i, one in enumerate(n[1:], start=1)]  # fmt: skip
    return [first, *(one.but(a=first.a, a_scales=first.a_scales) for one in others)]


def places_of(products: Sequence[Product], results: Sequence[np.ndarray]) -> ProductOperands:
    own = [
        LayerOperands(*map(Operand.of, (p.b, p.b_scales, c)),
                      None if p.bias is None else Operand.of(p.bias))
        for p, c in zip(products, results, strict=True)
    ]  # fmt: skip
    first, *further = own
    codes = map(Operand.of, (products[0].a, products[0].a_scales))
    return ProductOperands(
        *codes, first.b, first.b_scales, first.c, bias=first.bias, further=tuple(further)
    )


def planned_together(
    products: Sequence[Product], results: Sequence[np.ndarray], tiles: GemmTiles, **how: Any
) -> GemmPlan:
    types = {p.bias.dtype.name for p in products if p.bias is not None}
    one = products[0]
    kernel = GemmKernel("channel", "sm90", tiles, "sm_90a")
    return plan_gemm(
        kernel, places_of(products, results), one.out_dtype, bias=max(types, default=""),
        activation=one.activation, **how,
    )  # fmt: skip


def run_together(
    products: Sequence[Product], tiles: GemmTiles, blocks: int | None = None
) -> list[np.ndarray]:
    """Interpret one launch as if a device ran no more blocks at a time; return the results.

    They lie in rows of wider arrays, whose other columns must stay.
    """
    one = products[0]
    wide = [np.full((len(p.a), len(p.b) + 8), np.nan, STORAGE[one.out_dtype]) for p in products]
    results = [x[:, : len(p.b)] for x, p in zip(wide, products, strict=True)]
    plan = planned_together(products, results, tiles, blocks=blocks)
    buffers = {"a": one.a, "a_scales": one.a_scales}
    for i, p in enumerate(products):
        own = {"b": p.b, "b_scales": p.b_scales, "bias": p.bias}
        buffers |= {buffer_of(name, i): x for name, x in own.items() if x is not None}
    for x in buffers.values():
        x.flags.writeable = False
    received = {buffer_of("c", i): x for i, x in enumerate(results)}
    interpret.run(plan, buffers | received, "sm_90a")
    assert all(np.isnan(x[:, len(p.b) :].astype(float)).all()
               for x, p in zip(wide, products, strict=True))  # fmt: skip
    return [np.ascontiguousarray(c) for c in results]


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "tiles", "blocks", "out_dtype"),
    [
        (130, (64, 96, 32), 272, ALONE, 4, "bfloat16"),  # a ring goes on from layer to layer
        (70, (100, 40), 400, TAIL, 4, "float16"),  # the second layer is shared
        (40, (64, 5, 70, 64), 256, SPLIT, None, "float32"),
        pytest.param(130, (36, 100), 656, GemmTiles(64, 64, 8, 2, tail_splits=4), 8,
                     "bfloat16", marks=pytest.mark.slow),
        pytest.param(300, (270, 512), 272, GemmTiles(128, 256, 12, 3, tail_splits=2), 8,
                     "float16", marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_the_bits_are_those_of_separate_calls(m, n, k, tiles, blocks, out_dtype) -> None:
    products = layers_of(3, m, n, k, out_dtype=out_dtype)
    found = run_together(products, tiles, blocks)
    for p, c in zip(products, found, strict=True):
        assert c.tobytes() == p.mirror().tobytes()
    if tiles.tail_splits > 1:
        alone = tiles_alone(m, n, tiles, blocks)
        assert 0 < alone < tile_count(m, n, tiles)


def test_a_layer_without_bias_keeps_the_sign_of_zero() -> None:
    """Beside a layer with a bias; its product underflows to -0."""
    with_bias, without = layers_of(4, 9, (32, 32), 128)
    tiny = np.full_like(without.b_scales, 2.0**-140)
    without = without.but(b_scales=tiny, a_scales=np.full_like(without.a_scales, 2.0**-20))
    with_bias = with_bias.but(a_scales=without.a_scales)
    _, c = run_together([with_bias, without], ALONE)
    expected = without.mirror()
    assert c.tobytes() == expected.tobytes() and np.signbit(expected).any()
    assert not expected.any()


def test_an_activation_of_all_layers() -> None:
    products = layers_of(5, 33, (40, 72), 160, activation="gelu", out_dtype="float16")
    for p, c in zip(products, run_together(products, ALONE), strict=True):
        alone = p.run(backend="interpret", tiles=ALONE, arch="sm_90a")
        assert c.tobytes() == alone.tobytes() and p.share_of_bound(c) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_warps_changes_a_bit(seed: int) -> None:
    products = layers_of(6, 130, (64, 100), 400)
    with interpret.schedule(seed):
        for p, c in zip(products, run_together(products, TAIL, 4), strict=True):
            assert c.tobytes() == p.mirror().tobytes()


@pytest.mark.slow
@given(
    st.integers(0, 2**32 - 8),
    st.integers(1, 140),
    st.lists(st.integers(1, 140), min_size=2, max_size=4),
    st.sampled_from([ALONE, TAIL, SPLIT]),
    st.integers(2, 8),
    st.sampled_from(tuple(STORAGE)),
)
def test_any_layers_have_the_bits_of_separate_calls(seed, m, n, tiles, blocks, out_dtype) -> None:
    products = layers_of(seed, m, n, 288, out_dtype=out_dtype)
    for p, c in zip(products, run_together(products, tiles, blocks), strict=True):
        assert c.tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize(
    ("tiles", "bias", "activation"),
    [(HOPPER_TILES[0], "bfloat16", ""), (HOPPER_TILES[1], "bfloat16", ""),
     *slow_rows((tiles, bias, activation) for tiles in HOPPER_TILES[2:]
                for bias in ("bfloat16", "") for activation in ("", "gelu_tanh"))],
    ids=str,
)  # fmt: skip
def test_nothing_spills(tiles: GemmTiles, bias: str, activation: str) -> None:
    kernel = GemmKernel("channel", "sm90", tiles, "sm_90a")
    plan = plan_gemm(kernel, places(4608), "bfloat16", bias=bias, activation=activation)
    module = plan.launches[0].module
    taken = kc.build(module, "sm_90a").kernels["gemm_int8_channel"]
    assert {("CFG_NEIGHBOURS", 1), ("CFG_LAYERS", 1)} <= {*module.defines}
    assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)


# ---- the sources, robbed of a line ---------------------------------------------------------------

HEADER, GEMM = "linear/sm90/gemm_layers.cuh", "prims/codes/gemm.cuh"
#: File, line, its replacement, and the finding: a hazard, or "": a wrong result.
THEFTS = {
    "the map of the layer before": (HEADER, "layer == 1 ? map1", "layer == 1 ? map0", ""),
    "rows of B by the columns of all": (HEADER, "col, n0 - layers.first[layer]", "col, n0", ""),
    "scales of the first layer": (
        HEADER, "layers.B_scale[layer]", "layers.B_scale[0]", "outside b_scales",
    ),
    "bias of the first layer": (HEADER, "layers.bias[layer]", "layers.bias[0]", "outside bias"),
    "results of the first layer": (
        HEADER, "layers.C[layer]", "layers.C[0]", "c is written, and nothing orders|outside",
    ),
    "pitch of the first layer": (
        HEADER, "layers.C_stride[layer]", "layers.C_stride[0]", "outside|out of bounds|nothing ord",
    ),
    "columns of the first layer": (HEADER, "layers.n[layer]", "layers.n[0]", ""),
    "columns counted on": (HEADER, "n0 -= layers.first[layer]", "n0 -= 0", ""),
    "a bias read where there is none": (
        GEMM, "LAYERS && p.bias == nullptr", "false", "null|outside|no array",
    ),
    "a tile of the next layer": (HEADER, "(n0 >= layers.first[1])", "(n0 > layers.first[1])", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda number, _: number < 3, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    file, line, instead, finding = THEFTS[theft]
    put_a_line_in_place(file, line, instead, tmp_path, monkeypatch)
    products = layers_of(8, 70, (40, 100, 72), 272)

    def is_wrong() -> bool:
        found = run_together(products, ALONE, 4)
        pairs = zip(products, found, strict=True)
        return any(c.tobytes() != p.mirror().tobytes() for p, c in pairs)

    check_found(is_wrong, finding)


# ---- which layers share a launch -----------------------------------------------------------------


def places(m: int, n: Sequence[int] = (3072,) * 3, k: int = 3072, **more: Any) -> ProductOperands:
    """Return layouts of layers of these sizes, each with a bias."""
    first, *further = (
        LayerOperands(
            Operand.contiguous((one, k), 1), Operand.contiguous((one, 1), 4),
            Operand.contiguous((m, one), 2), Operand.contiguous((one,), 2),
        )
        for one in n
    )  # fmt: skip
    return ProductOperands(
        Operand.contiguous((m, k), 1), Operand.contiguous((m, 1), 4), first.b, first.b_scales,
        first.c, bias=first.bias, further=tuple(further), **more,
    )  # fmt: skip


def test_tiles_are_chosen_for_all_layers() -> None:
    one, three = (choose_tiles(4608, n, 3072, HOPPER_TILES) for n in (3072, (3072,) * 3))
    assert (one.tail_splits, three.tail_splits) == (2, 1)  # 3.3 waves, and 9.8
    kernel = settle_layers([GemmKernel("channel", "sm90", one, "sm_90a")] * 3, 4608, (3072,) * 3,
                           3072)  # fmt: skip
    assert kernel is not None and kernel.tiles == three
    plan = plan_gemm(kernel, places(4608), "bfloat16", bias="bfloat16")
    assert (plan.alone, plan.shared) == (1296, 0) and len(plan.launches) == 1
    assert plan.launches[0].grid == HOPPER_BLOCKS and "layers=True" in str(plan)
    text = choose_tiles(512, (3072,) * 3, 3072, HOPPER_TILES)
    assert tile_count(512, (3072,) * 3, text) > HOPPER_BLOCKS // 2  # 48 tiles of one layer


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (4608, (3072,) * 3, 3072), (4096, (3072,) * 3, 3072), (512, (3072,) * 3, 3072),
        (4096, (2432,) * 3, 2432), (333, (2432,) * 3, 2432), (16_384, (1792,) * 3, 1792),
        (32_760, (5120,) * 3, 5120), (4608, (3072, 1024, 1024), 3072),
    ],
)  # fmt: skip
def test_projections_of_models_share_a_launch(m: int, n: tuple[int, ...], k: int) -> None:
    kernels = [
        GemmKernel("channel", "sm90", choose_tiles(m, one, k, HOPPER_TILES), "sm_90a") for one in n
    ]
    assert settle_layers(kernels, m, n, k) is not None


def test_layers_that_have_separate_launches() -> None:
    hopper = GemmKernel("channel", "sm90", HOPPER_TILES[0], "sm_90a")
    sizes = 4608, (3072,) * 2, 3072
    assert settle_layers([hopper, hopper], *sizes) is not None
    for other in (
        replace(hopper, form="portable", tiles=PORTABLE_TILES[0]), replace(hopper, strategy="block")
    ):  # fmt: skip
        assert settle_layers([other, other], *sizes) is None
        assert settle_layers([hopper, other], *sizes) is None
    assert settle_layers([hopper] * 5, 4608, (3072,) * 5, 3072) is None


# ---- the operation -------------------------------------------------------------------------------


def call_of(
    n: Sequence[int], activations: Sequence[str], biases: Sequence[Any], arch: str = "sm_90a"
) -> tuple[LayersSettings, dict[str, Any]]:
    """Return settings and arrays of layers that write into rows of joint arrays."""
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {"x": rng.standard_normal((40, 272)).astype(np.float16)}
    for number, (one, bias) in enumerate(zip(n, biases, strict=True)):
        w = rng.standard_normal((one, 272)).astype(np.float32)
        codes, scales = ca.weight_quant(w, strategy="channel")
        arrays |= {f"b{number}": codes, f"b_scales{number}": scales}
        arrays[f"c{number}"] = np.full((50, one), np.nan, np.float16)[7:47]
        if bias is not None:
            arrays[f"bias{number}"] = rng.standard_normal(one).astype(bias)
    return LayersSettings("float16", tuple(activations), arch, "interpret"), arrays


BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("activations", "biases", "arch", "launches"),
    [
        (("", "", ""), (BF16, None, BF16), "sm_90a", [("c", "c_1", "c_2")]),
        (("", "gelu", ""), (BF16,) * 3, "sm_90a", [("c", "c_1"), ("c",)]),
        pytest.param(("", "", ""), (BF16, np.float32, None), "sm_90a", [("c", "c_1"), ("c",)],
                     marks=pytest.mark.slow),
        (("",) * 5, (None,) * 5, "sm_90a", [("c", "c_1", "c_2", "c_3"), ("c",)]),
        pytest.param(("", "", ""), (BF16,) * 3, "sm_90", [("c",)] * 3, marks=pytest.mark.slow),
        pytest.param(("swiglu", "swiglu"), (None,) * 2, "sm_90a", [("c",)] * 2,
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_alike_layers_are_one_launch(activations, biases, arch, launches) -> None:
    settings, arrays = call_of((64, 96, 40, 32, 64)[: len(activations)], activations, biases, arch)
    for number, activation in enumerate(activations):
        if activation == "swiglu":
            c = arrays[f"c{number}"]
            arrays[f"c{number}"] = np.ascontiguousarray(c[:, : c.shape[1] // 2])
    _, *plans = LAYERS.plan(problem_of(LAYERS, settings, arrays)).plans
    buffers = [
        {name for param in plan.launches[0].params if isinstance(param, tuple)
         for value in param[1].values() for name in (value if isinstance(value, tuple) else [value])
         if str(name).startswith("c")}
        for plan in plans
    ]  # fmt: skip
    assert buffers == [{*names} for names in launches]
    awaits = [plan.launches[0].awaits for plan in plans]
    assert awaits == [("a", "a_scales"), *[()] * (len(plans) - 1)]
    run_call(LAYERS, settings, arrays)
    codes = ca.act_quant(arrays["x"], strategy="channel")
    for number, activation in enumerate(activations):
        weight = arrays[f"b{number}"], arrays[f"b_scales{number}"]
        alone = ca.int8_gemm(
            *codes, *weight, "float16", bias=arrays.get(f"bias{number}"),
            activation=activation or None, backend="interpret", arch=arch,
        )  # fmt: skip
        assert arrays[f"c{number}"].tobytes() == alone.tobytes()


def test_a_sum_has_a_separate_launch() -> None:
    settings, arrays = call_of((64, 64, 64), ("",) * 3, (None,) * 3)
    arrays["residual1"] = np.ones((40, 64), np.float16)
    _, *plans = LAYERS.plan(problem_of(LAYERS, settings, arrays)).plans
    assert [plan.features.layers for plan in plans] == [True, False]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "more", "said"),
    [
        ({"form": "portable"}, {}, "in form 'portable' with none of these: plan each"),
        ({"strategy": "block"}, {}, "got scales of blocks in form 'sm90'"),
        ({}, {"activation": "swiglu"}, "in form 'sm90' with swiglu: plan each layer separately"),
        ({}, {"residual": Operand.contiguous((80, 64), 2)}, "with residual: plan each"),
        ({}, {"n": (64,) * 5}, "at most 4 layers, got 5: plan them in several launches"),
    ],
    ids=str,
)
def test_layers_that_one_launch_does_not_take_are_refused(kernel, more, said) -> None:
    activation, n = more.pop("activation", ""), more.pop("n", (64, 64))
    own = replace(GemmKernel("channel", "sm90", ALONE, "sm_90a"), **kernel)
    with pytest.raises(UnsupportedError, match=said):
        plan_gemm(own, places(80, n, 128, **more), "bfloat16", activation=activation)
