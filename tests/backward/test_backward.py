"""Gradients: the definition, the mirror within its bound, noticed faults, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.bounds import kernel, prepared, quantised
from cupyattn.errors import UnsupportedError
from cupyattn.gradients import (
    Gradients,
    backward_bound,
    backward_exact,
    backward_mirror,
    judge_backward,
)
from cupyattn.gradients.bounds import gradient_bounds
from cupyattn.gradients.mirror import mirror_gradients
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.kernels.backward_tiles import hopper_backward_tiles
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.row_preparation import Rope
from cupyattn.problem.settings import check_attention
from cupyattn.quant import QuantConfig
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from cupyattn.strategies import attention_inputs
from tests.backward.backward_cases import (
    FORMS,
    Received,
    gradients_of_lse,
    received,
    run_backward,
    run_packed_backward,
    scaled,
)
from tests.support.runs import GRAD_BIAS, bits, embedded, normal, rope_tables

Array = npt.NDArray[Any]
DTYPES = ("float16", "bfloat16")

# The definition.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.4},
        {"window": (2, 1), "causal_align": "top-left"},
        {"softcap": 2.0},
        {"softcap": 1.5, "mask": True, "bias": True},
    ],
    ids=str,
)
def test_the_definition_is_the_derivative(options: dict[str, Any]) -> None:
    """Central differences of dO times O plus dlse times lse, on a tiny problem of grouped heads."""
    rng = np.random.default_rng(0)
    operands = {"q": rng.standard_normal((1, 4, 5, 3))}
    operands |= {name: rng.standard_normal((1, 2, 7, 3)) for name in "kv"}
    d_out, options = rng.standard_normal((1, 4, 5, 3)), dict(options)
    d_lse = rng.standard_normal((1, 4, 5))
    if options.get("mask"):
        options["mask"] = rng.random((1, 4, 5, 7)) < 0.7
        options["bias"] = rng.standard_normal((1, 4, 5, 7)).astype(np.float32)
    found = backward_exact(d_out, **operands, d_lse=d_lse, **options)
    for name, gradient in zip("qkv", found, strict=True):
        differences = np.zeros_like(gradient)
        for at in np.ndindex(gradient.shape):
            sums = []
            for step in (1e-5, -1e-5):
                moved = operands[name].copy()
                moved[at] += step
                o, lse = attention_exact(**{**operands, name: moved}, return_lse=True, **options)
                sums.append((o * d_out).sum() + (lse * d_lse)[lse != -np.inf].sum())
            differences[at] = (sums[0] - sums[1]) / 2e-5
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


def test_with_exact_results_of_a_forward_pass_the_definition_is_the_same() -> None:
    rng = np.random.default_rng(1)
    d_out, q = rng.standard_normal((2, 2, 6, 9, 4))
    k, v = rng.standard_normal((2, 2, 3, 8, 4))
    o, lse = attention_exact(q, k, v, causal=True, return_lse=True)
    given_results = backward_exact(d_out, q, k, v, o, lse, causal=True)
    for x, y in zip(given_results, backward_exact(d_out, q, k, v, causal=True), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


# The mirror keeps to its bound (J2).


def test_the_mirror_has_the_tiles_of_the_record() -> None:
    """The Hopper form at head_dim 128 sums dQ over blocks of 128 keys, the portable one of 64."""
    inputs = received(*normal((1, 2, 70, 128), (1, 2, 300, 128)))
    problem = BackwardProblem(*inputs)
    portable = problem.portable_kernel(deterministic=False)
    wider = replace(portable, keys_tiles=hopper_backward_tiles(128))
    made = [mirror_gradients(problem, kernel) for kernel in (portable, wider)]
    assert bits(made[0].dq) != bits(made[1].dq)
    named = {"backend": "mirror", "deterministic": False}
    for arch, expected in ((None, made[0]), ("sm_90a", made[1])):
        found = ca.attention_backward(*inputs, arch=arch, **named)
        assert [bits(x) for x in found] == [bits(x) for x in expected]
        assert judge_backward(found, *inputs).passed
    bounds = [gradient_bounds(problem, kernel, None, None) for kernel in (portable, wider)]
    assert (bounds[1].total("dq") < bounds[0].total("dq")).all()


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_mirror_is_within_its_bound(form: str, data: st.DataObject) -> None:
    q, k, v, options = data.draw(
        attention_inputs(
            dtypes=DTYPES, tiles=Tiles(32, 64, 4), max_head_dim=128, max_scores=2**12,
            features=("window", "softcap", "mask", "bias"),
        )
    )  # fmt: skip
    seed = data.draw(st.integers(0, 99))
    inputs = received(q, k, v, seed=seed, **options)
    if data.draw(st.booleans()):
        unit = np.float32(data.draw(st.sampled_from((2.0**-14, 1.0, 2.0**9))))
        d_lse = unit * gradients_of_lse(np.random.default_rng(seed), q.shape[:3])
        options = {**options, "d_lse": d_lse}
    if options.get("bias") is not None:
        options = {**options, GRAD_BIAS: True}
    found = backward_mirror(*inputs, deterministic=FORMS[form], **options)
    report = judge_backward(found, *inputs, **options)
    target(report.ratio, label="error / bound")
    assert report.passed, str(report)


@pytest.mark.parametrize("distribution", distributions.NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mirror_is_within_its_bound_on_distributions(distribution: str, dtype: str) -> None:
    q, k, v = distributions.make(distribution, 1, 2, 70, 150, 64, dtype, seed=3, heads_kv=1)
    inputs = received(q, k, v)
    report = judge_backward(backward_mirror(*inputs), *inputs)
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2.0**-14, 2.0**-6, 2.0**9])
def test_mirror_is_within_its_bound_where_dO_is_small_or_large(dtype: str, factor: float) -> None:
    """With a scaled loss, dS is subnormal in float16, or leaves its range."""
    d_out, *rest = received(*distributions.make("normal", 1, 2, 40, 90, 32, dtype, seed=2))
    inputs: Received = (scaled(d_out, factor), *rest)
    with np.errstate(over="ignore"):
        report = judge_backward(backward_mirror(*inputs), *inputs)
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_with_the_bounds_of_a_forward_pass_the_gradients_are_the_true_ones(
    variant: str, dtype: str
) -> None:
    """R8 and R9 then hold what out and lse are off by."""
    q, k, v = distributions.make("normal", 1, 2, 40, 150, 64, dtype, seed=5)
    quantized = ca.quantize(q, k, v) if variant == "fa_int8" else None
    operands = (q, k, v) if quantized is None else (quantized,)
    out, lse = attention_mirror(*operands, variant=variant, return_lse=True)
    forward = kernel.attention(q, k, v, variant=variant, quantized=quantized)
    out_error, lse_error = forward.total, forward.lse
    if quantized is not None:  # straight-through: what quantising costs comes on top
        cost = quantised.quantisation(q, k, v, quantized)
        out_error, lse_error = out_error + cost.total, lse_error + cost.lse
    d_out = np.random.default_rng(6).standard_normal(q.shape).astype(q.dtype)
    inputs = (d_out, q, k, v, out, lse)
    exact, found = backward_exact(d_out, q, k, v), backward_mirror(*inputs)
    bound = backward_bound(*inputs, out_error=out_error, lse_error=lse_error)
    for name, gradient, expected in zip(Gradients._fields, found, exact, strict=True):
        assert (np.abs(as_float64(gradient) - expected) <= bound.total(name)).all(), name
        alone = backward_bound(*inputs).total(name)
        assert (alone <= bound.total(name)).all() and (alone < bound.total(name)).any()


# The bound is not vacuous.


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_is_a_few_percent_of_the_gradients(dtype: str, head_dim: int) -> None:
    """At 256 x 256 on normal data, root mean square of a row, in the median over rows."""
    inputs = received(*distributions.make("normal", 1, 1, 256, 256, head_dim, dtype, seed=7))
    bound, exact = backward_bound(*inputs), backward_exact(*inputs)
    limit = {"float16": 0.008, "bfloat16": 0.05}[dtype]
    for name, expected in zip(Gradients._fields, exact, strict=True):
        share = np.sqrt((bound.total(name) ** 2).mean(axis=-1) / (expected**2).mean(axis=-1))
        assert np.median(share) <= limit and share.max() <= 2 * limit, name


def exact_of(inputs: Received, **options: Any) -> Gradients:
    return backward_exact(*(as_float64(x) for x in inputs), **options)


def changed(found: Gradients, **gradients: Array) -> Gradients:
    return found._replace(**gradients)


FAULTS: dict[str, Callable[[Received], Gradients]] = {
    "zeros": lambda x: Gradients(*(0 * g for g in exact_of(x))),
    "Delta left out": lambda x: exact_of((*x[:4], 0 * x[4], x[5])),
    "Delta of the row before": lambda x: exact_of((*x[:4], np.roll(x[4], 1, axis=2), x[5])),
    "log-sum-exp of the row before": lambda x: exact_of((*x[:5], np.roll(x[5], 1, axis=2))),
    "scale forgotten in dQ": lambda x: changed(exact_of(x), dq=exact_of(x).dq * 8),
    "dK without its scale": lambda x: changed(exact_of(x), dk=exact_of(x).dk * 8),
    "columns of dV exchanged": lambda x: changed(exact_of(x), dv=exact_of(x).dv[..., ::-1]),
    "last key lost to dQ": lambda x: changed(
        exact_of(x), dq=exact_of((*x[:2], x[2][:, :, :-1], x[3][:, :, :-1], *x[4:])).dq
    ),
    "last row lost to dK and dV": lambda x: changed(
        exact_of((np.append(x[0][:, :, :-1], 0 * x[0][:, :, -1:], axis=2), *x[1:])),
        dq=exact_of(x).dq,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_break_the_bound(fault: str, dtype: str) -> None:
    inputs = received(*distributions.make("normal", 1, 2, 64, 100, 64, dtype, seed=4))
    assert judge_backward(exact_of(inputs), *inputs).passed
    report = judge_backward(FAULTS[fault](inputs), *inputs)
    assert not report.passed and "OUTSIDE" in str(report)


@pytest.mark.parametrize("fault", ["left out", "added", "of the row before"])
def test_a_wrong_gradient_of_lse_breaks_the_bound(fault: str) -> None:
    inputs = received(*distributions.make("normal", 1, 2, 64, 100, 64, "float16", seed=4))
    d_lse = gradients_of_lse(np.random.default_rng(0), (1, 2, 64))
    wrong = {"left out": 0 * d_lse, "added": -d_lse, "of the row before": np.roll(d_lse, 1, axis=2)}
    assert judge_backward(exact_of(inputs, d_lse=d_lse), *inputs, d_lse=d_lse).passed
    found = exact_of(inputs, d_lse=wrong[fault])
    assert not judge_backward(found, *inputs, d_lse=d_lse).passed


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_without_keys_a_row_has_no_gradient_whatever_that_of_its_lse_is(backend: str) -> None:
    mask = np.ones((1, 1, 37, 21), bool)
    mask[..., 5, :] = False
    inputs = received(*normal((1, 2, 37, 32), (1, 1, 21, 32)), mask=mask)
    d_lse = gradients_of_lse(np.random.default_rng(0), (1, 2, 37))
    d_lse[..., 5] = np.nan
    one = run_backward(inputs, d_lse=d_lse, mask=mask, backend=backend)
    one.check()
    assert np.isneginf(inputs[5][..., 5]).all() and not as_float64(one.gradients.dq)[:, :, 5].any()


def test_the_gradient_of_lse_must_go_with_it() -> None:
    inputs = received(*normal((1, 2, 37, 32), (1, 1, 21, 32)))
    with pytest.raises(ValueError, match=r"d_lse must have shape \(1, 2, 37\)"):
        ca.attention_backward(*inputs, d_lse=inputs[5][..., :5])
    with pytest.raises(TypeError, match="d_lse must be float32, got d_lse.dtype=float16"):
        ca.attention_backward(*inputs, d_lse=inputs[5].astype(np.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_error_reaches_a_third_of_its_bound(dtype: str) -> None:
    inputs = received(*distributions.make("normal", 1, 2, 64, 100, 64, dtype, seed=4))
    report = judge_backward(backward_mirror(*inputs), *inputs)
    assert all(share.ratio >= 1 / 3 for share in report.shares), str(report)


def test_nothing_is_promised_of_what_is_not_finite_and_everything_elsewhere() -> None:
    inputs = list(received(*distributions.make("normal", 1, 4, 8, 9, 16, "float16", heads_kv=2)))
    inputs[2] = inputs[2].copy()
    inputs[2][0, 0, 3, 1] = np.nan
    bound = backward_bound(*inputs)
    for name, first_heads in (("dq", 2), ("dk", 1), ("dv", 1)):
        total = bound.total(name)
        assert np.isinf(total[:, :first_heads]).all() and np.isfinite(total[:, first_heads:]).all()


# The call.


def small(dtype: str = "float16", **options: Any) -> Received:
    return received(*normal((2, 4, 9, 16), (2, 2, 12, 16), dtype), **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_runs_the_mirror_on_numpy_arrays(form: str) -> None:
    inputs = small(causal=True)
    run = run_backward(inputs, deterministic=FORMS[form], causal=True)
    expected = backward_mirror(*inputs, deterministic=FORMS[form], causal=True)
    assert [bits(x) for x in run.gradients] == [bits(x) for x in expected]
    assert [x.dtype for x in run.gradients] == [np.float16] * 3
    run.check()


def test_layouts_strides_and_masks_that_broadcast() -> None:
    rng = np.random.default_rng(0)
    options = {"mask": rng.random((12,)) < 0.8, "bias": rng.standard_normal((4, 1, 12))}
    options["bias"] = options["bias"].astype(np.float16)
    inputs = small(**options)
    expected = run_backward(inputs, **options).gradients
    exchanged = [x.swapaxes(1, 2) for x in inputs[:5]]
    found = ca.attention_backward(*exchanged, inputs[5], layout="BSHD", **options)
    assert [bits(x.swapaxes(1, 2)) for x in found] == [bits(x) for x in expected]
    amid_nan = [embedded(x) for x in inputs]
    found = ca.attention_backward(*amid_nan, **options)
    assert [bits(x) for x in found] == [bits(x) for x in expected]


def test_a_forward_pass_in_int8_has_16_bit_gradients() -> None:
    q, k, v = normal((1, 2, 40, 64), (1, 2, 90, 64))
    out, lse = ca.attention(q, k, v, variant="fa_int8", return_lse=True)
    d_out = np.ones_like(q)
    run_backward((d_out, q, k, v, out, lse)).check()
    true = backward_exact(d_out, q, k, v)
    found = ca.attention_backward(d_out, q, k, v, out, lse)
    for name, x, y in zip(Gradients._fields, found, true, strict=True):
        assert np.linalg.norm(as_float64(x) - y) <= 0.05 * np.linalg.norm(y), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_rotary_embedding(form: str, interleaved: bool) -> None:
    """They equal the turned operands' gradients, turned back; R0 is added to the bound."""
    q, k, v = normal((1, 2, 19, 32), (1, 1, 33, 32))
    options = {"rope_interleaved": interleaved, "rope_offset_q": 14}
    rope = rope_tables(40, 32)
    turn = Rope.of_arrays(rope, interleaved, 14, 19, 33, 32)
    assert turn is not None
    inputs = received(*turn.turned(q, k), v, causal=True)
    given = inputs[0], q, k, *inputs[3:]
    asked = {"causal": True, "deterministic": FORMS[form], "rope": rope, **options}
    exact, bound = (f(*inputs, causal=True) for f in (backward_exact, backward_bound))
    back = replace(turn, sin=-turn.sin)
    expected = back.exact(exact.dq, exact.dk)
    totals = [bound.total(name) for name in ("dq", "dk")]
    either = [Rope(abs(turn.cos), side * abs(turn.sin), interleaved, 14) for side in (1, -1)]
    spread = [np.maximum(*pair) for pair in zip(*(x.exact(*totals) for x in either), strict=True)]
    for backend in ("mirror", "interpret"):
        found = ca.attention_backward(*given, backend=backend, **asked)
        for n, (gradient, position) in enumerate(zip(found[:2], (14, 0), strict=True)):
            largest = (np.abs(exact[n]) + totals[n]).astype(np.float16)
            rounding = prepared.rotation(largest, turn, position)
            assert (np.abs(as_float64(gradient) - expected[n]) <= spread[n] + rounding).all()
        assert (np.abs(as_float64(found.dv) - exact.dv) <= bound.total("dv")).all()
    unturned = backward_exact(*given, causal=True)
    assert np.abs(unturned.dq - expected[0]).max() > 100 * spread[0].max()


def test_positions_begin_anew_in_packed_sequences() -> None:
    lengths, rope = ((5, 9), (20, 12)), rope_tables(20, 32)
    for backend in ("mirror", "interpret"):
        for one in run_packed_backward(lengths, backend=backend, rope=rope):
            alone = ca.attention_backward(*one.received, backend=backend, rope=rope)
            assert [bits(x) for x in one.gradients] == [bits(x) for x in alone]


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(len_q: int, len_kv: int) -> None:
    inputs = received(*normal((1, 2, len_q, 64), (1, 2, len_kv, 64)))
    for backend in ("mirror", "interpret"):
        for deterministic in (False, True):
            run = run_backward(inputs, deterministic=deterministic, backend=backend)
            assert not any(as_float64(x).any() for x in run.gradients)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_out": np.zeros((2, 4, 8, 16), np.float16)}, ValueError,
         r"d_out must have shape \(2, 4, 9, 16\).* got d_out.shape=\(2, 4, 8, 16\)"),
        ({"lse": np.zeros((2, 9, 4), np.float32)}, ValueError, r"lse must have shape \(2, 4, 9\)"),
        ({"lse": np.zeros((2, 4, 9))}, TypeError, "lse must be float32, got lse.dtype=float64"),
        ({"deterministic": "yes"}, TypeError, "deterministic must be True, False or None"),
        ({"deterministic": np.ones(2)}, TypeError, "True, False or None, got an array of shape"),
        ({"out": np.zeros((2, 4, 9, 16), ml_dtypes.bfloat16)}, TypeError,
         "out must be float16, got out.dtype=bfloat16"),
        ({"q": np.zeros((2, 4, 9, 16), np.float32)}, UnsupportedError,
         "takes float16 and bfloat16, got q.dtype=float32: convert"),
        ({"qk_norm": (np.ones(16), np.ones(16))}, TypeError, "q_weight of qk_norm must be one of"),
        ({"layout": "SBHD"}, ValueError, "layout must be 'BHSD' or 'BSHD'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' takes CuPy arrays"),
        ({"scale": -1.0}, ValueError, "scale must be positive"),
        ({"k": np.zeros((2, 3, 12, 16), np.float16)}, ValueError, "heads"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    named = dict(zip(("d_out", "q", "k", "v", "out", "lse"), small(), strict=True))
    with pytest.raises(error, match=message):
        ca.attention_backward(**{**named, **change})


def test_packed_sequences_need_their_offsets() -> None:
    d_out, q, k, v, out, lse = (x[0].swapaxes(0, 1) for x in small())
    with pytest.raises(TypeError, match="needs cu_seqlens_q and cu_seqlens_k"):
        ca.attention_varlen_backward(d_out, q, k, v, out, lse.T, None, None)
    ends = np.array([0, 9]), np.array([0, 12])
    with pytest.raises(ValueError, match=r"lse must have shape \(4, 9\).* lse.shape=\(9, 4\)"):
        ca.attention_varlen_backward(d_out, q, k, v, out, lse, *ends)


def test_shapes_are_told_in_the_layout_of_the_call() -> None:
    d_out, *operands, out, lse = (x.swapaxes(1, 2) if x.ndim == 4 else x for x in small())
    message = r"d_out must have shape \(2, 9, 4, 16\), .* got d_out.shape=\(2, 4, 9, 16\)"
    with pytest.raises(ValueError, match=message):
        ca.attention_backward(d_out.swapaxes(1, 2), *operands, out, lse, layout="BSHD")


def test_quantised_operands_are_told_what_to_do() -> None:
    d_out, q, k, v, out, lse = small()
    quantized = ca.quantize(q, k, v, quant=QuantConfig())
    with pytest.raises(UnsupportedError, match="give the arrays that were quantised"):
        ca.attention_backward(d_out, quantized, k, v, out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_of_operands_is_that_of_the_forward_pass(dtype: str) -> None:
    q, k, v = normal((1, 1, 3, 8), (1, 1, 3, 8), dtype)
    assert check_attention(q, k, v).dtype == dtype == STORAGE[dtype].name


def test_what_would_run_is_told() -> None:
    inputs = small(causal=True)
    text = ca.explain_backward(*inputs, causal=True)
    assert text.startswith("atomic: ") and "row i attends key j where j <= i+3" in text
    assert "backward_sums<<<" in text and "workspace" in text
    exchanged = [x.swapaxes(1, 2) for x in inputs[:5]]
    text = ca.explain_backward(*exchanged, inputs[5], layout="BSHD", deterministic=True)
    assert text.startswith("deterministic: asked for") and "backward_queries<<<" in text


def test_memory_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("cupyattn.interpret.run", nothing)
    inputs = small()
    message = "attention_backward needs .* of them for 'dQ_sum'.* split the batch"
    with pytest.raises(ca.DeviceMemoryError, match=message):
        ca.attention_backward(*inputs, backend="interpret")
