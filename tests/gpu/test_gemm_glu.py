"""Gated linear units of products of INT8 codes on a device: the certain bound, in every form."""

from __future__ import annotations

from itertools import product as combinations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.quant.activation import GLU
from cupyattn.quant.blocks import STRATEGIES
from cupyattn.reference.gemm import activate
from tests.gpu.support import arch_of, cupy, on_device
from tests.gpu.test_gemm import CELLS_OF, FORMS, capability
from tests.quant.gemm_cases import REGIMES, product
from tests.quant.test_gemm_channel import activations

#: Activation and type of the result, of which a list of cases takes the next one each time.
KINDS = tuple(combinations(GLU, STORAGE))


def arch_of_form(form: str) -> str | None:
    return arch_of("gemm@sm90" if form == "sm90" else "gemm")


@pytest.mark.parametrize(
    ("form", "tiles", "strategy", "kind"),
    [
        (*cell, strategy, KINDS[number % len(KINDS)])
        for strategy, cells in CELLS_OF.items()
        for number, cell in enumerate(cells)
    ],
    ids=str,
)
def test_all_tiles_hold_the_bound(form: str, tiles: GemmTiles, strategy: str, kind) -> None:
    """Halves that end within a block of scales, and halves of whole blocks."""
    if form == "portable" and tiles.splits > 1 and capability() < 90:
        pytest.skip("needs clusters of blocks: compute capability 9.0 or later")
    activation, out_dtype = kind
    for half in (200, 384):
        p = product(
            half, (333, 2 * half, 1040), out_dtype=out_dtype, bias=True, activation=activation,
            strategy=strategy,
        )  # fmt: skip
        assert p.share_of_bound(p.run_guarded(cupy, arch=arch_of_form(form), tiles=tiles)) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", GLU)
@pytest.mark.parametrize("out_dtype", STORAGE)
def test_few_rows_and_many_with_sums(out_dtype: str, activation: str, form: str, strategy) -> None:
    """Alone, added to a residual, and times factors of all rows or of groups of them."""
    first = KINDS.index((activation, out_dtype))
    for number, (m, groups) in enumerate(((1, 1), (77, 7), (512, 2))):
        gates = (None, 0, groups)[(first + number) % 3]
        p = product(
            m, (m, 2 * 712, 1040), out_dtype=out_dtype, bias=gates != 0, activation=activation,
            strategy=strategy, gates=gates,
        )  # fmt: skip
        assert p.share_of_bound(p.run_guarded(cupy, arch=arch_of_form(form))) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_outliers_and_a_sum(form: str) -> None:
    for seed in (4, 5):  # in bfloat16 and in float16
        p = product(
            seed, (300, 2 * 290, 512), out_dtype="float32", bias=True, activation="swiglu",
            outliers=72, gates=2,
        )  # fmt: skip
        assert p.share_of_bound(p.run_guarded(cupy, arch=arch_of_form(form))) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_many_tiles_give_the_same_bits_a_hundred_times(form: str, strategy: str) -> None:
    """Several waves: the ring of stages goes on, and the last wave is shared or not."""
    p = product(
        1, (3000, 3200, 1104), out_dtype="float16", bias=True, activation="geglu",
        strategy=strategy,
    )  # fmt: skip
    first = p.run_guarded(cupy, arch=arch_of_form(form))
    assert p.share_of_bound(first) <= 1
    moved = dict(zip(("a", "a_scales", "b", "b_scales"), on_device(*p.operands), strict=True))
    (moved["bias"],) = on_device(p.bias)
    for _ in range(100):
        assert p.but(**moved).run(arch=arch_of_form(form)).get().tobytes() == first.tobytes()


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(0, 600)),
    st.sampled_from(REGIMES),
    st.sampled_from(KINDS),
    st.sampled_from(STRATEGIES),
    st.sampled_from(FORMS),
)
def test_any_shape_holds_its_bound(seed, shape, regime, kind, strategy, form) -> None:
    m, half, k = shape
    activation, out_dtype = kind
    p = product(
        seed, (m, 2 * half, k), regime, out_dtype=out_dtype, bias=bool(seed % 2),
        activation=activation, strategy=strategy,
    )  # fmt: skip
    names = ("a", "a_scales", "b", "b_scales", "bias")
    moved = {n: cupy.asarray(x) for n in names if (x := getattr(p, n)) is not None}
    c = p.but(**moved).run(arch=arch_of_form(form)).get()
    assert c.shape == (m, half) and p.share_of_bound(c) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_operands_amid_others(form: str, strategy: str) -> None:
    """Rows that end within their stride, at odd addresses, NaN in the scales beside those read."""
    p = product(6, (290, 2 * 136, 500), bias=True, activation="swiglu", strategy=strategy)
    expected = p.run_guarded(cupy, arch=arch_of_form(form)).tobytes()
    for offset in (1, 4, 16):
        a, b = (cupy.full((len(x), 560), 127, cupy.int8) for x in (p.a, p.b))
        a_scales, b_scales = (
            cupy.full((len(x), 7), cupy.nan, cupy.float32) for x in (p.a_scales, p.b_scales)
        )
        blocks = p.a_scales.shape[1]
        views = {
            "a": a[:, offset : offset + 500], "a_scales": a_scales[:, 1 : 1 + blocks],
            "b": b[:, offset : offset + 500], "b_scales": b_scales[:, 2 : 2 + blocks],
        }  # fmt: skip
        for name, view in views.items():
            view[...] = cupy.asarray(getattr(p, name))
        around = np.full(280, np.nan, ml_dtypes.bfloat16)
        around[offset % 8 :][:272] = p.bias
        views["bias"] = cupy.asarray(around)[offset % 8 :][:272]
        assert p.but(**views).run(arch=arch_of_form(form)).get().tobytes() == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["normal", "outlier", "sparse", "constant"])
def test_a_layer_holds_its_bound(kind: str, strategy: str) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((600, 1000)) / 32).astype(ml_dtypes.bfloat16)
    x = activations(kind, 300, 1000, 1).astype(ml_dtypes.bfloat16).reshape(2, 150, 1000)
    for activation in GLU:
        options = {"strategy": strategy, "activation": activation}
        host = ca.Int8Linear.from_weight(w, w[:, 0], **options)
        layer = ca.Int8Linear.from_weight(*on_device(w, w[:, 0]), **options)
        exact = activate(as_float64(x) @ as_float64(w).T + as_float64(w[:, 0]), activation)
        for _ in range(2):  # the second is a call that came again
            y = layer(*on_device(x)).get()
            assert y.shape == (2, 150, 300)
            assert (np.abs(as_float64(y) - exact) <= host.error(x, w)).all()
