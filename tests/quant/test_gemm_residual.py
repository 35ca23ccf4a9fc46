"""Products that are added to another matrix, times factors: bound, kernels, faults, arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.quant.activation import ACTIVATIONS
from cupyattn.quant.blocks import STRATEGIES
from cupyattn.reference.gemm import activate
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import REGIMES, Product, product, run

SMALL = GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=2)
#: Of four tiles of 8 columns to a warp, whose rows all lanes of it store.
WIDE = GemmTiles(32, 64, num_warps=2, num_stages=2)
TWO = GemmTiles(32, 32, num_warps=2, num_stages=2, splits=2)
LARGE = GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=2)


# ---- what it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_exact_sum_is_that_of_the_numbers(strategy: str) -> None:
    p = product(0, (8, 20, 300), bias=True, activation="silu", gates=2, strategy=strategy)
    plain = ca.quant.gemm_exact(*p.operands, bias=p.bias, activation="silu")
    gate = as_float64(p.gate).repeat(4, axis=0)
    expected = as_float64(p.residual) + gate * plain
    np.testing.assert_allclose(ca.quant.gemm_exact(*p.operands, **p.after), expected, rtol=1e-12)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 4), st.integers(1, 140), st.integers(0, 400)),
    st.integers(0, 3),
    st.sampled_from(REGIMES),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from(STRATEGIES),
)
def test_the_mirror_holds_its_bound(
    seed, shape, gates, regime, out_dtype, activation, strategy
) -> None:
    rows, n, k = shape
    p = product(
        seed, (rows * max(gates, 1), n, k), regime, out_dtype=out_dtype, bias=bool(seed % 2),
        activation=activation, strategy=strategy, gates=gates,
    )  # fmt: skip
    assert p.share_of_bound(p.run()) <= 1


@pytest.mark.parametrize(
    "fault", ["gate of the first group", "gates exchanged", "residual of the next row", "no gate"]
)
def test_a_fault_breaks_the_bound(fault: str) -> None:
    p = product(2, (20, 140, 300), bias=True, activation="gelu", gates=2, strategy="channel")
    wrong = {
        "gate of the first group": p.but(gate=p.gate[0]),
        "gates exchanged": p.but(gate=p.gate[::-1]),
        "residual of the next row": p.but(residual=np.roll(p.residual, 1, axis=0)),
        "no gate": p.but(gate=None),
    }[fault]
    assert p.share_of_bound(wrong.mirror()) > 10


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "shape", "tiles", "out_dtype", "gates"),
    [
        ("channel", (36, 45, 200), SMALL, "float32", 2),
        ("channel", (130, 300, 272), LARGE, "float16", 2),
        ("block", (33, 64, 256), SMALL, "bfloat16", 1),
        ("block", (40, 34, 700), TWO, "float32", 0),
        pytest.param("channel", (40, 34, 700), TWO, "float16", 4, marks=pytest.mark.slow),
        pytest.param("block", (130, 300, 272), LARGE, "bfloat16", 13, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_is_the_mirror_to_the_bit(strategy, shape, tiles, out_dtype, gates) -> None:
    p = product(3, shape, out_dtype=out_dtype, bias=True, strategy=strategy, gates=gates)
    before = p.residual.tobytes()
    c = run(p, tiles)
    assert c.tobytes() == p.mirror(tiles.splits).tobytes() and p.residual.tobytes() == before
    assert p.share_of_bound(c) <= 1


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gate_of_float32_keeps_its_digits(strategy: str, out_dtype: str) -> None:
    """Models with modulation in float32 have such gates; the gate also has odd addresses."""
    p = product(6, (36, 46, 200), out_dtype=out_dtype, bias=True, strategy=strategy, gates=2)
    wide = np.full((2, 60), np.nan, np.float32)
    for first in (0, 3, 4):
        gate = wide[:, first : first + 46]
        gate[:] = p.gate.astype(np.float32) * np.float32(1 + 2.0**-12)
        q = p.but(gate=gate)
        c = run(q, SMALL)
        assert c.tobytes() == q.mirror().tobytes() != p.mirror().tobytes()
        assert q.share_of_bound(c) <= 1


def test_residuals_amid_others() -> None:
    """Leading axes, strides and odd addresses, with NaN beside the numbers that are read."""
    p = product(4, (34, 33, 200), out_dtype="float16", strategy="channel", gates=2)
    residual, gate = (np.full((len(x), 70), np.nan, np.float16) for x in (p.residual, p.gate))
    residual[:, 1:34], gate[:, 3:36] = p.residual, p.gate
    q = p.but(
        a=p.a.reshape(2, 17, 200), a_scales=p.a_scales.reshape(2, 17, 1),
        residual=residual[:, 1:34].reshape(2, 17, 33), gate=gate[:, 3:36],
    )  # fmt: skip
    c = q.run(backend="interpret", tiles=SMALL)
    assert c.shape == (2, 17, 33) and c.tobytes() == p.mirror().tobytes()


SOURCE = "prims/codes/gemm.cuh"
#: Line, what comes in its place, and what must be found: a hazard, or "": a wrong result.
THEFTS = {
    "gate of the first group": ("own / p.gate_rows * p.gate_stride", "0 * p.gate_stride", ""),
    "residual past the last row": ("min(row, p.m - 1);  // past", "row;  // past", "out of"),
    "columns of a pair exchanged": (
        "fmaf(gate.v[j], y.v[j], residual.v[j])", "fmaf(gate.v[j], y.v[j], residual.v[1 - j])", "",
    ),
    "gate left out": ("fmaf(gate.v[j], y.v[j], residual.v[j])", "y.v[j] + residual.v[j]", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place(SOURCE, line, instead, tmp_path, monkeypatch)
    p = product(8, (40, 40, 392), out_dtype="float16", strategy="channel", gates=2)
    p.check_theft(lambda: run(p, WIDE), finding)


# ---- the layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_holds_its_bound(strategy: str) -> None:
    rng = np.random.default_rng(5)
    w, x = (rng.standard_normal(s).astype(np.float16) for s in ((40, 300), (2, 6, 300)))
    residual = rng.standard_normal((2, 6, 40)).astype(np.float16)
    gate = rng.standard_normal((2, 40)).astype(np.float16)
    layer = ca.Int8Linear.from_weight(w / 16, w[:, 0], strategy=strategy, activation="gelu")
    y = layer(x, residual=residual, gate=gate)
    exact = activate(as_float64(x) @ as_float64(w / 16).T + as_float64(w[:, 0]), "gelu")
    exact = as_float64(residual) + as_float64(gate)[:, None] * exact
    error = layer.error(x, w / 16, residual=residual, gate=gate)
    assert (np.abs(as_float64(y) - exact) <= error).all()
    assert y.tobytes() != layer(x, residual=residual).tobytes()


# ---- arguments -----------------------------------------------------------------------------------

P = product(0, (4, 6, 200), gates=2)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (P.but(residual=None), ValueError, "gate goes with residual"),
        (P.but(residual=P.residual.astype("float16")), TypeError, "residual must be float32 as"),
        (P.but(gate=P.gate.astype("float16")), TypeError, "gate must be float32 as out_dtype"),
        (P.but(residual=P.residual[:3]), ValueError, r"residual must have shape \(4, 6\)"),
        (P.but(gate=P.gate[:, :5]), ValueError, r"gate must be \(6,\) or \(groups, 6\).*\(2, 5\)"),
        (P.but(gate=P.gate.repeat(2, 0)[:3]), ValueError, r"that divide the 4 rows, got \(3, 6\)"),
        (P.but(gate=P.gate[:0]), ValueError, r"got \(0, 6\)"),
    ],
)
def test_what_cannot_be_is_said(wrong: Product, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        wrong.run()


def test_the_result_may_not_lie_where_the_residual_does() -> None:
    with pytest.raises(ValueError, match="out must not share memory with residual"):
        P.run(out=P.residual)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_empty_products(backend: str) -> None:
    for shape in ((0, 5, 8), (5, 0, 8)):
        assert product(0, shape, gates=1).run(backend=backend).shape == shape[:2]
