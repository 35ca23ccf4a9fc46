"""The three steps of attention alone, and the plans of their kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import cupyattn as ca
from cupyattn import unfused
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.distributions import make
from cupyattn.kernels import ladder
from cupyattn.plans import records
from cupyattn.plans.unfused import plan_unfused_step
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.form import settle
from tests.support.planned import plan_attention


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_steps_make_the_rung(dtype: str, causal: bool) -> None:
    q, k, v = make("normal", 2, 4, 21, 34, 24, dtype, heads_kv=2)
    S = unfused.scores(q, k, causal=causal)
    P, lse = unfused.softmax(S, return_lse=True)
    o = unfused.weighted_sum(P, v)
    want_o, want_lse = ca.attention(q, k, v, variant="unfused", causal=causal, return_lse=True)
    assert S.dtype == P.dtype == np.float32 and o.dtype == q.dtype
    np.testing.assert_array_equal(o.view(np.uint8), want_o.view(np.uint8))
    np.testing.assert_array_equal(lse, want_lse)


def test_each_step_is_what_it_says() -> None:
    q, k, v = make("normal", 1, 2, 9, 11, 16, "float32")
    S = unfused.scores(q, k, scale=0.3)
    np.testing.assert_allclose(S, 0.3 * (q @ k.swapaxes(-1, -2)), rtol=1e-5, atol=1e-6)
    P, lse = unfused.softmax(S, return_lse=True)
    np.testing.assert_allclose(P, scipy.special.softmax(S, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(lse, scipy.special.logsumexp(S, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(unfused.weighted_sum(P, v), P @ v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_softmax_takes_scores_of_any_size(interpreted: str, monkeypatch: Any) -> None:
    """log2(e) times finfo.min is no float32."""
    monkeypatch.setenv("CUPYATTN_INTERPRET", interpreted)
    least = np.finfo(np.float32).min
    rows = [[least] * 3, [-least, -least, 0], [least, least, -np.inf], [least, 0, 1], [-np.inf] * 3]
    P, lse = unfused.softmax(np.array([[rows]], np.float32), return_lse=True)
    np.testing.assert_allclose(P[0, 0, :3], [[1 / 3] * 3, [0.5, 0.5, 0], [0.5, 0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(P[0, 0, 3:], [[0, 0.268941, 0.731059], [0] * 3], rtol=1e-5)
    assert lse[0, 0, :3].tolist() == [least, -least, least]
    np.testing.assert_allclose(lse[0, 0, 3:], [1.313262, -np.inf], rtol=1e-6)


def test_scores_can_be_changed_between_the_steps() -> None:
    q, k, v = make("normal", 1, 1, 4, 6, 8)
    S = unfused.scores(q, k)
    before = S.copy()
    S[..., 2:] = -np.inf
    S[:, :, 1] = -np.inf
    P = unfused.softmax(S)
    assert (P[..., 2:] == 0).all() and (P[:, :, 1] == 0).all()
    assert np.isneginf(S[..., 2:]).all() and (S[:, :, 0, :2] == before[:, :, 0, :2]).all()
    want = ca.reference.attention_exact(q, k[:, :, :2], v[:, :, :2])
    o = unfused.weighted_sum(P, v)
    assert (o[:, :, 1] == 0).all()
    np.testing.assert_allclose(o[:, :, 0].astype(float), want[:, :, 0], rtol=2e-3)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_empty_axes(shape: tuple[int, int, int, int]) -> None:
    batch, heads, len_q, len_kv = shape
    q, k, v = make("normal", batch, heads, len_q, len_kv, 8)
    S = unfused.scores(q, k)
    assert S.shape == shape
    o = unfused.weighted_sum(unfused.softmax(S), v)
    assert o.shape == q.shape and (o == 0).all()


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda q, k, v: unfused.scores(q, k.astype(np.float32))),
        (ValueError, lambda q, k, v: unfused.scores(q, k[..., :4])),
        (ValueError, lambda q, k, v: unfused.scores(q, k, scale=-1.0)),
        (TypeError, lambda q, k, v: unfused.scores(q, [1.0])),
        (TypeError, lambda q, k, v: unfused.softmax(q)),
        (ValueError, lambda q, k, v: unfused.softmax(np.zeros((3, 4), np.float32))),
        (TypeError, lambda q, k, v: unfused.weighted_sum(q, v)),
        (ValueError, lambda q, k, v: unfused.weighted_sum(np.zeros((1, 2, 5, 4), np.float32), v)),
        (ValueError, lambda q, k, v: unfused.weighted_sum(np.zeros((1, 3, 5, 7), np.float32), v)),
    ],
)
def test_what_does_not_fit_is_refused(error: type[Exception], call: Any) -> None:
    q, k, v = make("normal", 1, 2, 5, 7, 8)
    with pytest.raises(error):
        call(q, k, v)


# ---- plans ---------------------------------------------------------------------------------------


def step(name: str, **buffers: Any) -> records.Plan:
    sizes = AttentionSpec(2, 4, 2, 70, 50, 24, "float16", 0.2, return_lse=name == "softmax")
    operands = {n: Operand.of(a) for n, a in buffers.items()}
    kernel = settle(ladder.lookup("unfused"), sizes)
    return plan_unfused_step(name, kernel, operands)


def test_steps_launch_what_the_whole_launches() -> None:
    q, k, v = make("normal", 2, 4, 70, 50, 24, heads_kv=2)
    o = np.empty_like(q)
    sizes = AttentionSpec(2, 4, 2, 70, 50, 24, "float16", 0.2, return_lse=True)
    operands = {name: Operand.of(array) for name, array in zip("qkvo", (q, k, v, o), strict=True)}
    whole = plan_attention(ladder.lookup("unfused"), sizes, *operands.values())
    parts = [step("scores", q=q, k=k), step("softmax"), step("weighted_sum", v=v, o=o)]
    for want, part in zip(whole.launches, parts, strict=True):
        (got,) = part.launches
        assert (got.entry, got.grid, got.block) == (want.entry, want.grid, want.block)
        assert got.dynamic_shared == want.dynamic_shared
        (struct, values), (_, expected) = got.params[0], want.params[0]
        assert values["S"] == "S" and not part.workspace
        used = {n: x for n, x in values.items() if isinstance(x, str)}
        assert used.items() <= expected.items()
        for name, address in used.items():
            if f"{name}_stride" in struct.names:
                assert values[f"{name}_stride"] == expected[f"{name}_stride"], address
    assert [set(p.launches[0].params[0][1].values()) & {"q", "k", "v", "o", "lse"} for p in
            [parts[1]]] == [{"lse"}]  # fmt: skip


@pytest.mark.parametrize("name", ["scores", "softmax", "weighted_sum"])
def test_a_step_compiles(name: str) -> None:
    q, k, v = make("normal", 2, 4, 70, 50, 24, heads_kv=2)
    buffers = {"scores": {"q": q, "k": k}, "softmax": {}, "weighted_sum": {"v": v, "o": q}}[name]
    (one,) = step(name, **buffers).launches
    assert one.entry in kc.build(one.module, "sm_90").kernels


def test_bfloat16_values_have_an_address() -> None:
    array = np.zeros((1, 1, 2, 8), ml_dtypes.bfloat16)
    assert Operand.of(array).itemsize == 2
