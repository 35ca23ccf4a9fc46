"""Relations between two calls that hold whatever a kernel computes, on the mirror and in it.

Scores are whole numbers and the scale is ln 2, so that every exponential is a power of two and
every sum exact in any order: what may not change does not change by a bit. Elsewhere: a window is
a mask (`test_features.py`), parts merge by their log-sum-exp (`test_bug_classes.py`), positions and
slices of rotary embeddings (`test_rope.py`), and all of it on a device (`tests/gpu/test_exact.py`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupyattn import attention
from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.quant import QuantizedQKV
from tests.support.runs import bits

LN2 = math.log(2.0)
LEN_Q, LEN_KV, HEAD_DIM = 21, 70, 16
CASES = pytest.mark.parametrize(
    ("rung", "backend"),
    [
        (name, backend)
        for backend in ("mirror", "interpret")
        for name, variant in VARIANTS.items()
        if variant.family != "unfused"  # it rounds natural scores
    ],
)


def attend(rung: str, backend: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Run a rung on whole-number scores; the INT8 rung takes them as codes of scale 1."""
    operands = (q, k, v)
    if VARIANTS[rung].family == "int8":
        codes = (x.astype(np.int8) for x in (q, k))
        operands = (QuantizedQKV.from_codes(*codes, v, 1.0, 1.0),)
    return attention(
        *operands, variant=rung, backend=backend, scale=LN2, return_lse=True, **options
    )


def whole_numbers(dtype: str = "float16") -> tuple[Any, Any, Any]:
    """Scores -4 to 4 (q reads channel 0 of k), values -8 to 8."""
    rng = np.random.default_rng(0)
    q = np.zeros((1, 2, LEN_Q, HEAD_DIM))
    q[..., 0] = 1
    k, v = rng.integers(-8, 9, (2, 1, 2, LEN_KV, HEAD_DIM))
    k[..., 0] = rng.integers(-4, 5, k.shape[:3])
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))


@CASES
def test_keys_in_another_order_change_nothing(rung: str, backend: str) -> None:
    q, k, v = whole_numbers()
    order = np.random.default_rng(1).permutation(LEN_KV)
    mask = np.random.default_rng(2).random((LEN_Q, LEN_KV)) < 0.5
    for options, shuffled in (({}, {}), ({"mask": mask}, {"mask": mask[:, order]})):
        o, lse = attend(rung, backend, q, k, v, **options)
        again, lse_again = attend(rung, backend, q, k[:, :, order], v[:, :, order], **shuffled)
        assert bits(o) == bits(again)
        np.testing.assert_allclose(lse, lse_again, rtol=2.0**-21)
    wrong, _ = attend(rung, backend, q, k[:, :, order], v)
    assert bits(wrong) != bits(o), "the order says nothing here"


@CASES
def test_shifted_scores_change_only_the_log_sum_exp(rung: str, backend: str) -> None:
    q, k, v = whole_numbers()
    shifted = k.copy()
    shifted[..., 0] += 64
    o, lse = attend(rung, backend, q, k, v)
    again, lse_again = attend(rung, backend, q, shifted, v)
    assert bits(o) == bits(again)
    np.testing.assert_allclose(lse_again - lse, 64 * LN2, rtol=2.0**-19)


@CASES
def test_values_enter_linearly(rung: str, backend: str) -> None:
    """Twice the values, twice the output, to the bit; a channel of V is a channel of O."""
    q, k, v = whole_numbers()
    o, lse = attend(rung, backend, q, k, v)
    double, lse_again = attend(rung, backend, q, k, (2 * v).astype(v.dtype))
    assert bits(double) == bits((2 * o).astype(o.dtype)) and bits(lse) == bits(lse_again)
    order = np.random.default_rng(1).permutation(HEAD_DIM)
    exchanged, _ = attend(rung, backend, q, k, np.ascontiguousarray(v[..., order]))
    assert bits(exchanged) == bits(o[..., order])


@CASES
def test_a_key_that_is_there_twice_weighs_twice(rung: str, backend: str) -> None:
    """Against a bias of ln 2 on a single one; and a key masked is a key left out."""
    q, k, v = whole_numbers()
    twice = [np.concatenate([x, x[:, :, 5:6]], axis=2) for x in (k, v)]
    o, _ = attend(rung, backend, q, *twice)
    bias = np.zeros(LEN_KV, np.float32)
    bias[5] = LN2
    biased, _ = attend(rung, backend, q, k, v, bias=bias)
    difference = np.abs(o.astype(np.float64) - biased.astype(np.float64))
    assert difference.max() <= 2.0**-9 * 8
    keep = np.arange(LEN_KV) != 5
    left_out, lse = attend(
        rung, backend, q, np.ascontiguousarray(k[:, :, keep]), np.ascontiguousarray(v[:, :, keep])
    )
    masked, lse_masked = attend(rung, backend, q, k, v, mask=keep)
    assert bits(left_out) == bits(masked)
    np.testing.assert_allclose(lse, lse_masked, rtol=2.0**-21)
