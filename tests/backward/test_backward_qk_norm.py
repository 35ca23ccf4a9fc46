"""Gradients through `qk_norm` and of its weights: definition, mirror, kernels, and their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.gradients import (
    GradientsWithBiasAndNorm,
    GradientsWithNorm,
    backward_exact,
    judge_backward,
)
from cupyattn.gradients.prepared import back_exact, back_mirror
from cupyattn.plans.backward_rows import plan_norm_gradient
from cupyattn.plans.prepare_rows import Prepares
from cupyattn.problem.row_preparation import Norm, Preparation, Rope
from cupyattn.reference.exact import attention_exact
from tests.backward.backward_cases import Received, received, run_backward
from tests.support.runs import bits, normal, rope_tables

#: Shapes of the weights of Q and of K, of 4 heads and 2.
SHAPES = (((16,), (16,)), ((4, 16), (2, 16)), ((16,), (2, 16)))


def problem(shapes: Any = SHAPES[2], dtypes: Any = ("f4", "f4"), **options: Any) -> Any:
    """Operands of a backward pass after a norm, and the options of the call."""
    rng = np.random.default_rng(3)
    weights = tuple(
        (1 + rng.standard_normal(shape) / 2).astype(STORAGE.get(dtype, dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    q, k, v = normal((2, 4, 37, 16), (2, 2, 75, 16))
    options |= {"qk_norm": weights, "qk_norm_eps": 2.0**-10}
    return received(q, k, v, **options), options


def test_the_definition_is_the_derivative() -> None:
    """Central differences of weights, and of rows of q and k, in float64."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4), "a": (4, 4), "b": (1, 4)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    d_out = rng.standard_normal(shapes["q"])
    rope = Rope(*rng.uniform(-1, 1, (2, 9, 2)), interleaved=True, offset_q=2)

    def how(x: dict[str, Any]) -> Preparation:
        return Preparation(rope, Norm(x["a"], x["b"], 0.25))

    def loss(x: dict[str, Any]) -> Any:
        rows = how(x).exact(x["q"], x["k"])
        return (attention_exact(*rows, x["v"]) * d_out).sum()

    exact = backward_exact(d_out, *how(given).exact(given["q"], given["k"]), given["v"])
    found = back_exact(how(given), given["q"], given["k"], exact.dq, exact.dk)
    for name, gradient in zip("qkab", found, strict=True):
        differences = np.zeros(shapes[name])
        for at in np.ndindex(shapes[name]):
            sums = []
            for step in (1e-5, -1e-5):
                moved = {**given, name: given[name].copy()}
                moved[name][at] += step
                sums.append(loss(moved))
            differences[at] = (sums[0] - sums[1]) / 2e-5
        np.testing.assert_allclose(gradient, differences, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_rows_and_weights_are_within_their_bounds(shapes: Any, backend: str) -> None:
    inputs, options = problem(shapes, ("f4", "float16"), causal=True)
    one = run_backward(inputs, backend=backend, **options)
    one.check()
    assert isinstance(one.gradients, GradientsWithNorm)
    found = one.gradients.dq_weight, one.gradients.dk_weight
    assert [x.shape for x in found] == [*shapes]
    assert [x.dtype.name for x in found] == ["float32", "float16"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotary_embedding_and_a_bias_beside_it(interleaved: bool) -> None:
    rope = {"rope": rope_tables(80, 16), "rope_interleaved": interleaved, "rope_offset_q": 30}
    bias = np.random.default_rng(1).standard_normal((37, 75)).astype(np.float32)
    inputs, options = problem(bias=bias, softcap=2.0, **rope)
    for backend in ("mirror", "interpret"):
        one = run_backward(inputs, backend=backend, grad_bias=True, **options)
        one.check()
        assert isinstance(one.gradients, GradientsWithBiasAndNorm)


def test_rows_have_the_bits_of_the_mirror() -> None:
    """This tests only the pass: rows of odd strides and bfloat16, turned back by position."""
    for head_dim, vec in ((6, 2), (40, 8), (200, 8)):
        x, _, dy = normal((2, 3, 70, head_dim), (2, 3, 70, head_dim), "bfloat16")
        weight = np.random.default_rng(0).standard_normal((3, head_dim)).astype(np.float32)
        cos, sin = rope_tables(80, head_dim)
        how = Preparation(Rope(cos, sin, offset_q=7), Norm(weight, weight, 1e-6))
        expected = back_mirror(how, x, x, dy, dy)
        asked = Prepares("q", "half_split", 7, 3, 1e-6)
        plan = plan_norm_gradient(Operand.of(x), "bfloat16", asked, "float32")
        assert plan.features.vec == vec
        made = {"dx": np.zeros_like(x), "dweight": np.zeros_like(weight)}
        partial = np.empty(plan.workspace[0].shape, np.float32)
        buffers = {"x": x, "dy": dy, "rope_cos": cos, "rope_sin": -sin, "q_norm_weight": weight}
        interpret.run(plan, {**buffers, **made, "partial_dW": partial}, None)
        assert bits(made["dx"]) == bits(expected.dq)
        np.testing.assert_allclose(made["dweight"], expected.dq_weight, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_layouts_and_equal_bits(layout: str, backend: str) -> None:
    inputs, options = problem(SHAPES[1])
    swapped: Any = inputs
    if layout == "BSHD":
        swapped = (*(x.swapaxes(1, 2) for x in inputs[:5]), inputs[5])
    how = {"backend": backend, "deterministic": True}
    found = ca.attention_backward(*swapped, layout=layout, **how, **options)
    wanted = ca.attention_backward(*inputs, **how, **options)
    if layout == "BSHD":
        found = found._replace(**{n: getattr(found, n).swapaxes(1, 2) for n in ("dq", "dk", "dv")})
    assert [bits(x) for x in found] == [bits(x) for x in wanted]


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_packed_sequences_share_the_weights(backend: str) -> None:
    """Rows have the bits of separate calls; gradients of weights add up."""
    ends = np.array([0, 5, 5, 40])
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 2, 16)).astype(np.float16)
    weights = tuple(rng.standard_normal((2, 16)).astype(np.float32))
    o, lse = ca.attention_varlen(x, x, x, ends, ends, qk_norm=weights, return_lse=True)
    how = {"qk_norm": weights, "backend": backend, "deterministic": True}
    found = ca.attention_varlen_backward(x, x, x, x, o, lse, ends, ends, **how)
    sums = np.zeros((2, 16))
    for first, last in ((0, 5), (5, 40)):
        one, own = (y[first:last].swapaxes(0, 1)[None] for y in (x, o))
        alone = ca.attention_backward(one, one, one, one, own, lse[None, :, first:last], **how)
        assert bits(found.dq[first:last].swapaxes(0, 1)[None]) == bits(alone.dq)
        sums += alone[-2:]
    np.testing.assert_allclose(np.stack(found[-2:]), sums, atol=1e-4)


@pytest.mark.parametrize("fault", ["zeros", "the row before", "another head", "unweighted"])
def test_the_judge_sees_what_is_wrong(fault: str) -> None:
    inputs, options = problem(SHAPES[1])
    right = ca.attention_backward(*inputs, **options)
    changes: dict[str, dict[str, Any]] = {
        "zeros": {"dq_weight": 0 * right.dq_weight},
        "the row before": {"dk": np.roll(right.dk, 1, axis=2)},
        "another head": {"dk_weight": right.dk_weight[::-1]},
        "unweighted": {"dq": ca.attention_backward(
            *inputs, **options | {"qk_norm": tuple(map(np.ones_like, options["qk_norm"]))}
        ).dq},
    }  # fmt: skip
    assert judge_backward(right, *inputs, **options).passed
    report = judge_backward(right._replace(**changes[fault]), *inputs, **options)
    assert not report.passed and f"{next(iter(changes[fault]))} is OUTSIDE" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outlier", "tiny", "huge"])
def test_hard_inputs(name: str) -> None:
    """Rows whose squares are far apart, tiny and large rows."""
    inputs, options = problem(SHAPES[1])
    d_out, q, k, v, *_ = inputs
    if name == "outlier":
        q = q.copy()
        q[..., 3] *= np.float16(200)
    else:
        factor = np.float16(2.0**-14 if name == "tiny" else 2.0**12)
        q, k = q * factor, k * factor
    again: Received = received(q, k, v, **options)
    for backend in ("mirror", "interpret"):
        run_backward(again, backend=backend, **options).check()


def test_empty_rows_and_refusals() -> None:
    q, k, v = normal((1, 2, 0, 16), (1, 1, 9, 16))
    weights = np.ones(16, np.float16), np.ones(16, np.float32)
    lse = np.zeros((1, 2, 0), np.float32)
    for backend in ("mirror", "interpret"):
        found = ca.attention_backward(q, q, k, v, q, lse, qk_norm=weights, backend=backend)
        assert [x.shape for x in found[-2:]] == [(16,), (16,)]
        assert not any(x.any() for x in found)
    inputs, options = problem()
    with pytest.raises(TypeError, match="qk_norm must be a pair"):
        ca.attention_backward(*inputs, qk_norm=weights[0])
    with pytest.raises(UnsupportedError, match="takes float16 and bfloat16"):
        ca.attention_backward(*(x.astype(np.float32) for x in inputs), **options)
    of_tokens = {"qk_norm": (np.ones(64, np.float32), np.ones(32, np.float32))}
    for call in (ca.attention_backward, judge_backward):
        gradients = (inputs[1:4],) if call is judge_backward else ()
        with pytest.raises(UnsupportedError, match=r"got \(heads \* head_dim,\), which normalise"):
            call(*gradients, *inputs, **of_tokens)
    text = ca.explain_backward(*inputs, **options)
    assert "qk_norm: rows of q and k are divided by their root mean square" in text


@pytest.mark.parametrize("head_dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_kernels_spill_nothing(head_dim: int) -> None:
    asked = Prepares("q", "half_split", 0, 4, 1e-6)
    place = Operand.contiguous((1, 4, 300, head_dim), 2)
    plan = plan_norm_gradient(place, "float16", asked, "float32")
    assert [x.grid for x in plan.launches] == [4 * 5, 4 * head_dim // 32]
    for launch in plan.launches:
        taken = kc.build(launch.module, "sm_80").kernels[launch.entry]
        assert (taken.spill_stores, taken.spill_loads) == (0, 0)
