"""Gradients of rows whose float32 log-sum-exp is too coarse to give P, in every form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler.modules import KERNELS
from cupyattn.gradients import backward_bound, judge_backward
from cupyattn.gradients.exact import COARSE_LSE
from cupyattn.plans.backward import COARSE_ROWS
from tests.backward.backward_cases import FORMS, HOPPER_FORMS, interpreted_as
from tests.backward.coarse_cases import LOWEST, VALUES, biased, check, defined, large_products

KINDS = [
    *((value, kind) for value in VALUES for kind in ("even", "masked", "padded")),
    *((value, "steps") for value in VALUES[:3]),
]


def judged(found: Any, inputs: Any, **options: Any) -> None:
    report = judge_backward(found, *inputs, **options)
    assert report.passed, str(report)


def test_constants_are_those_of_the_kernels() -> None:
    source = (KERNELS / "prims/score/gradient.cuh").read_text()
    assert f"COARSE_LSE = {COARSE_LSE}f;" in source
    assert f"COARSE_ROWS = {COARSE_ROWS};" in source


@pytest.mark.parametrize("value", [-1e6, -1e7, -1e9, LOWEST])
def test_even_weights_under_a_large_negative_bias(value: float) -> None:
    x = np.ones((1, 1, 40, 16), np.float16)
    bias = np.full((1, 1, 1, 40), value, np.float32)
    o, lse = ca.attention(x, x, x, bias=bias, return_lse=True)
    found = ca.attention_backward(x, x, x, x, o, lse, bias=bias)
    assert abs(float(found.dv.astype(np.float64).sum()) - 640) < 0.5
    judged(found, (x, x, x, x, o, lse), bias=bias)


@pytest.mark.parametrize(("value", "kind"), KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_mirror(value: float, kind: str, deterministic: bool) -> None:
    inputs, options = biased(value, kind)
    found = ca.attention_backward(*inputs, deterministic=deterministic, **options)
    check(found, defined(inputs, **options))
    judged(found, inputs, **options)


@pytest.mark.parametrize(("value", "kind"), KINDS[2::4])
@pytest.mark.parametrize("form", FORMS)
def test_the_portable_forms(value: float, kind: str, form: str) -> None:
    inputs, options = biased(value, kind)
    found = ca.attention_backward(*inputs, **interpreted_as(form), **options)
    check(found, defined(inputs, **options))
    judged(found, inputs, **options)


@pytest.mark.parametrize(
    ("form", "head_dim"),
    [*((form, 64) for form in FORMS), *((form, 64) for form in HOPPER_FORMS),
     *(pytest.param("sm90_deterministic", x, marks=pytest.mark.slow) for x in (192, 256))],
)  # fmt: skip
def test_large_products_in_every_form(form: str, head_dim: int) -> None:
    inputs = large_products(head_dim)
    found = ca.attention_backward(*inputs, scale=1 / 8, **interpreted_as(form))
    check(found, defined(inputs, scale=1 / 8), columns=1)


def test_large_products_on_the_mirror() -> None:
    inputs = large_products(64)
    found = ca.attention_backward(*inputs, scale=1 / 8)
    check(found, defined(inputs, scale=1 / 8), columns=1)


def test_packed_sequences_and_a_mask() -> None:
    inputs, options = biased(-1e9)
    mask = np.ones(options["bias"].shape, bool)
    mask[..., 30:] = False
    bias = np.where(mask, options["bias"], -np.inf).astype(np.float32)
    d_out, q, k, v, *_ = inputs
    o, lse = ca.attention(q, k, v, **options, mask=mask, return_lse=True)
    for how in ({}, {"backend": "interpret"}):
        found = ca.attention_backward(d_out, q, k, v, o, lse, mask=mask, **options, **how)
        check(found, defined(inputs, bias))
    rows = [x[0].swapaxes(0, 1) for x in (d_out, q, k, v)]
    ends = {"cu_seqlens_q": np.array([0, 24]), "cu_seqlens_k": np.array([0, 40])}
    one = {"bias": options["bias"][:1], "backend": "interpret"}
    o, lse = ca.attention_varlen(*rows[1:], **ends, **one, variant="fa_tc", return_lse=True)
    found = ca.attention_varlen_backward(*rows, o, lse, **ends, **one)
    first = tuple(x[:1] for x in inputs)
    check([x.swapaxes(0, 1)[None] for x in found], defined(first, options["bias"][:1]))


def test_the_judge_finds_weights_of_one() -> None:
    """Every key had the weight 1, the logarithm of the sum being lost in lse."""
    x = np.ones((1, 1, 40, 16), np.float16)
    bias = np.full((1, 1, 1, 40), -1e9, np.float32)
    o, lse = ca.attention(x, x, x, bias=bias, return_lse=True)
    found = ca.attention_backward(x, x, x, x, o, lse, bias=bias)
    wrong = found._replace(dv=np.full_like(found.dv, 40))
    report = judge_backward(wrong, x, x, x, x, o, lse, bias=bias)
    assert not report.passed and report.ratio > 100, str(report)


def test_the_bound_does_not_grow_with_lse() -> None:
    x = np.ones((1, 1, 40, 16), np.float16)
    largest = []
    for value in (-1e4, -1e6, -1e9, LOWEST):
        bias = np.full((1, 1, 1, 40), value, np.float32)
        o, lse = ca.attention(x, x, x, bias=bias, return_lse=True)
        bound = backward_bound(x, x, x, x, o, lse, bias=bias)
        largest.append(float(bound.total("dv").max()))
    assert max(largest) < 2e-3 and max(largest) < 1.01 * min(largest), largest
