"""The gradient of an additive bias: definition, mirror, kernel, and every axis that broadcasts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import as_float64
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.gradients import GradientsWithBias, backward_exact, judge_backward
from cupyattn.kernels.backward_tiles import bias_tiles
from cupyattn.plans.backward import plan_backward
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.block_mask import BlockMask
from cupyattn.reference.exact import attention_exact
from tests.backward.backward_cases import Received, received, run_backward
from tests.backward.test_backward_kernels import SMALLEST_LIMIT, call_of, operands_of
from tests.support.runs import bits, normal

#: Shapes of a bias of scores (2, 4, 37, 75).
SHAPES = ((37, 75), (1, 4, 37, 75), (2, 1, 37, 75), (2, 4, 1, 75), (4, 37, 1), (2, 1, 1, 1), (1, 1))


def problem(shape: tuple[int, ...], dtype: Any = "f4", **options: Any) -> tuple[Received, Any]:
    """Operands of a backward pass with a bias of a shape, and the options of the call."""
    q, k, v = normal((2, 4, 37, 16), (2, 2, 75, 16))
    options["bias"] = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    return received(q, k, v, **options), {**options, "grad_bias": True}


@pytest.mark.parametrize("shape", [(5, 7), (1, 4, 1, 7), (2, 1, 5, 1), (1, 1)])
def test_the_definition_is_the_derivative(shape: tuple[int, ...]) -> None:
    """Central differences of biases that float32 holds, whose steps do not round."""
    rng = np.random.default_rng(0)
    q, d_out = rng.standard_normal((2, 2, 4, 5, 3))
    k, v = rng.standard_normal((2, 2, 2, 7, 3))
    bias = (rng.integers(-2048, 2048, shape) / 1024).astype(np.float32)
    found = backward_exact(d_out, q, k, v, bias=bias, softcap=1.5, grad_bias=True)
    assert isinstance(found, GradientsWithBias)
    differences = np.zeros(shape)
    for at in np.ndindex(shape):
        sums = []
        for step in (2.0**-10, -(2.0**-10)):
            moved = bias.copy()
            moved[at] += step
            sums.append((attention_exact(q, k, v, bias=moved, softcap=1.5) * d_out).sum())
        differences[at] = (sums[0] - sums[1]) * 2.0**9
    np.testing.assert_allclose(found.dbias, differences, atol=1e-6)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_axis_that_broadcasts_is_summed(shape: tuple[int, ...], backend: str) -> None:
    inputs, options = problem(shape, causal=True)
    one = run_backward(inputs, backend=backend, **options)
    assert isinstance(one.gradients, GradientsWithBias)
    assert one.gradients.dbias.shape == shape and one.gradients.dbias.dtype == np.float32
    one.check()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fault", ["zeros", "the row before", "a head left out"])
def test_a_wrong_gradient_breaks_the_bound(fault: str, dtype: str) -> None:
    q, k, v = distributions.make("normal", 1, 2, 64, 100, 64, "float16", seed=4)
    bias = np.random.default_rng(3).standard_normal((64, 100)).astype(dtype)
    inputs = received(q, k, v, bias=bias)
    exact = backward_exact(*map(as_float64, inputs), bias=bias, grad_bias=True)
    assert isinstance(exact, GradientsWithBias)
    assert judge_backward(exact, *inputs, bias=bias).passed
    one_head = [as_float64(x)[:, :1] for x in inputs]
    wrong = {
        "zeros": 0 * exact.dbias,
        "the row before": np.roll(exact.dbias, 1, axis=0),
        "a head left out": backward_exact(*one_head, bias=bias, grad_bias=True)[3],
    }
    report = judge_backward(exact._replace(dbias=wrong[fault]), *inputs, bias=bias)
    assert not report.passed and "dbias is OUTSIDE" in str(report)


def test_other_gradients_keep_their_bits_and_a_gradient_of_lse_goes_in() -> None:
    inputs, options = problem((37, 75))
    d_lse = np.random.default_rng(5).standard_normal((2, 4, 37)).astype(np.float32)
    options["d_lse"] = d_lse
    both = run_backward(inputs, backend="interpret", **options)
    both.check()
    del options["grad_bias"]
    alone = run_backward(inputs, backend="interpret", **options)
    assert [bits(x) for x in both.gradients[:3]] == [bits(x) for x in alone.gradients]


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_layouts_and_rotary_embeddings(layout: str) -> None:
    """The gradient of a bias is not turned back, and has the shape of the bias in any layout."""
    inputs, options = problem((1, 4, 37, 75), "float16")
    tables = np.random.default_rng(0).uniform(-1, 1, (2, 75, 8)).astype(np.float32)
    options["rope"] = tuple(tables)
    swapped = inputs
    if layout == "BSHD":
        swapped = (*(x.swapaxes(1, 2) for x in inputs[:5]), inputs[5])
    found = ca.attention_backward(*swapped, layout=layout, **options)
    wanted = ca.attention_backward(*inputs, **options)
    assert bits(found[3]) == bits(wanted[3]) and found[3].dtype == np.float16
    assert found[0].shape == swapped[1].shape


def test_blocks_that_are_dropped_have_no_gradient() -> None:
    q, k, v = normal((1, 2, 130, 16), (1, 1, 140, 16))
    kept = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], bool)[None, None]
    bias = np.random.default_rng(3).standard_normal((130, 140)).astype(np.float32)
    options = {"bias": bias, "block_mask": BlockMask(kept, 64, 64)}
    one = run_backward(received(q, k, v, **options), backend="interpret", grad_bias=True, **options)
    one.check()
    assert not one.gradients[3][:64, 64:128].any() and one.gradients[3][64:128, 64:128].all()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_packed_sequences_that_share_a_bias(backend: str) -> None:
    """Each adds the gradient of its corner; past the longest there is none."""
    ends = np.array([0, 5, 5, 40])
    x = np.random.default_rng(2).standard_normal((40, 2, 16)).astype(np.float16)
    bias = np.random.default_rng(3).standard_normal((2, 48, 48)).astype(np.float32)
    limits = {"max_len_q": 48, "max_len_k": 48}
    o, lse = ca.attention_varlen(x, x, x, ends, ends, bias=bias, return_lse=True, **limits)
    found = ca.attention_varlen_backward(
        x, x, x, x, o, lse, ends, ends, bias=bias, grad_bias=True, backend=backend, **limits
    )
    expected = np.zeros((2, 48, 48))
    for first, last in ((0, 5), (5, 40)):
        rows, n = slice(first, last), last - first
        one, own = (y[rows].swapaxes(0, 1)[None] for y in (x, o))
        own_bias = bias[:, :n, :n]
        expected[:, :n, :n] += backward_exact(
            one, one, one, one, own, bias=own_bias, grad_bias=True
        )[3]
    assert found[3].shape == bias.shape and not found[3][:, 35:].any()
    np.testing.assert_allclose(found[3], expected, atol=1e-4)


@pytest.mark.parametrize(("heads", "heads_kv", "len_q"), [(2, 1, 0), (0, 0, 5)])
def test_empty_axes(heads: int, heads_kv: int, len_q: int) -> None:
    """Without heads the kernel divided by their number."""
    q, k, v = normal((1, heads, len_q, 16), (1, heads_kv, 9, 16))
    bias = np.ones((1, 9), np.float32)
    lse = np.zeros((1, heads, len_q), np.float32)
    for backend in ("mirror", "interpret"):
        found = ca.attention_backward(
            q, q, k, v, q, lse, bias=bias, grad_bias=True, backend=backend
        )
        assert found[3].shape == (1, 9) and not found[3].any()


def test_what_does_not_fit_is_told() -> None:
    inputs, options = problem((37, 75))
    with pytest.raises(ValueError, match="grad_bias=True needs the bias of the forward pass"):
        ca.attention_backward(*inputs, grad_bias=True)
    options["grad_bias"] = "yes"
    with pytest.raises(TypeError, match="grad_bias must be True or False, got 'yes'"):
        ca.attention_backward(*inputs, **options)


@pytest.mark.parametrize(
    "head_dim", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 256))]
)
def test_the_kernel_spills_nothing_and_fits_in_shared_memory(head_dim: int) -> None:
    call = call_of(200, 300, head_dim, causal=True, bias="float32")
    operands = operands_of(call, dbias=(1, 4, 200, 300))
    plan = plan_backward(settle_backward(call, vars(operands), deterministic=True), operands)
    launch = plan.launches[-1]
    tiles = bias_tiles(head_dim)
    assert launch.grid == 4 * -(-200 // tiles.block_q) * -(-300 // tiles.block_kv)
    binary = kc.build(launch.module, "sm_80")
    taken = binary.kernels["backward_bias"]
    assert (taken.spill_stores, taken.spill_loads) == (0, 0), taken
    devices.check_shared_memory(binary.smem_bytes, SMALLEST_LIMIT, launch.entry)
