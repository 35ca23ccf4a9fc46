"""Gradients beside INT8 and e4m3 operands: kernels keep their bound, and faults break it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import distributions
from cupyattn.gradients import backward_exact
from cupyattn.testing import judge, judge_backward, numerics

TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
LONG = {"fp16": "float16", "bf16": "bfloat16"}
HEADS, GROUP = 4, 2


def coded(x: Any, codes: str | None) -> Any:
    """Return what codes of x stand for: INT8 with a scale for a head, e4m3 with one for all."""
    if codes is None:
        return x
    if codes == "int8":
        largest = np.abs(x).max(axis=(2, 3), keepdims=True)
        unit = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
        return np.rint(x / unit) * unit
    unit = np.abs(x).max() / np.float32(448)
    return np.float32((x / unit).astype(ml_dtypes.float8_e4m3fn)) * unit


@dataclass(frozen=True)
class Backward:
    """Gradients behind a forward pass on codes.

    `everywhere`: the backward pass multiplies codes, too, otherwise what it received, and makes P
    of lse again. `smooth`: K loses its mean before it gets codes, in both passes.
    """

    p: str
    qk: str | None = None
    v: str | None = None
    everywhere: bool = False
    smooth: bool = False
    fault: str = ""

    def __call__(self, d_out: Any, q: Any, k: Any, v: Any, scale: float) -> list[Any]:
        """Return dq, dk, dv in q's type."""
        dtype, unit = q.dtype, np.float32(scale)
        d_out, q, k, v = (np.float32(x) for x in (d_out, q, k, v))
        mean = k.mean(axis=2, keepdims=True) if self.smooth else np.float32(0)
        Q, K, V = coded(q, self.qk), coded(np.float32((k - mean).astype(dtype)), self.qk), v
        V = coded(v, self.v)
        if self.fault == "scale_of_the_other_head":
            K = K * np.abs(k).max(axis=(2, 3), keepdims=True)[:, ::-1]
            K = K / np.abs(k).max(axis=(2, 3), keepdims=True)
        k, v, K, V = (np.repeat(x, GROUP, axis=1) for x in (k, v, K, V))
        S = Q @ K.swapaxes(2, 3) * unit
        top = S.max(axis=-1, keepdims=True)
        weights = np.exp(S - top)
        total = weights.sum(axis=-1, keepdims=True)
        o = np.float32(((self.operand(weights) @ V) / total).astype(dtype))
        P = weights / total
        if self.everywhere:
            q, k, v = Q, K, V
        else:
            shift = q @ np.repeat(mean * np.ones_like(K[:, ::GROUP]), GROUP, axis=1).swapaxes(2, 3)
            P = np.exp((q @ k.swapaxes(2, 3) - shift) * unit - top - np.log(total))
        dP = d_out @ v.swapaxes(2, 3)
        delta = (d_out * o).sum(axis=-1, keepdims=True)
        if self.fault == "delta_left_out":
            delta = 0 * delta
        dS = self.operand(P * (dP - delta))
        dq, dk = dS @ k * unit, dS.swapaxes(2, 3) @ q * unit
        dv = self.operand(P).swapaxes(2, 3) @ d_out
        if self.fault == "last_row_lost":
            dv = dv - P[:, :, -1:].swapaxes(2, 3) * d_out[:, :, -1:]
        if self.fault == "scale_left_out":
            dq = dq / unit
        heads = (q.shape[0], -1, GROUP, *k.shape[2:])
        dk, dv = (x.reshape(heads).sum(axis=2) for x in (dk, dv))
        return [x.astype(dtype) for x in (dq, dk, dv)]

    def operand(self, x: Any) -> Any:
        return np.float32(x.astype(TYPES[self.p]))

    @property
    def said(self) -> Any:
        return numerics(f"{self.p} P", qk=self.qk, v=self.v)


KERNELS = (
    Backward("fp16", "int8"), Backward("fp16", "int8", everywhere=True),
    Backward("fp16", "int8", smooth=True), Backward("fp16", "int8", "e4m3", True, True),
    Backward("bf16", "e4m3", "e4m3"), Backward("bf16", "e4m3", "e4m3", True),
    Backward("fp16", None, "int8", True), Backward("fp16", "int8", "int8", True, True),
)  # fmt: skip


def drawn(kernel: Backward, name: str = "normal", seed: int = 0) -> tuple[Any, ...]:
    q, k, v = distributions.make(name, 2, HEADS, 21, 35, 8, LONG[kernel.p], seed, HEADS // GROUP)
    return np.random.default_rng(seed).standard_normal(q.shape).astype(q.dtype), q, k, v


@pytest.mark.parametrize("name", distributions.NAMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_keep_the_bound_of_their_codes(kernel: Backward, name: str) -> None:
    d_out, q, k, v = drawn(kernel, name)
    with np.errstate(over="ignore", invalid="ignore"):  # of rows that the bound leaves out
        found = kernel(d_out, q, k, v, 0.3)
    asked = {"scale": 0.3}
    report = judge_backward(found, d_out, q, k, v, numerics=kernel.said, **asked)
    assert report.passed, report
    if name == "normal":  # codes cost more than 16 bits do
        plain = numerics(f"{kernel.p} P")
        assert not judge_backward(found, d_out, q, k, v, numerics=plain, **asked).passed


@pytest.mark.parametrize(
    "fault", ["delta_left_out", "scale_of_the_other_head", "last_row_lost", "scale_left_out"]
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_faults_break_the_bound(fault: str, everywhere: bool) -> None:
    kernel = Backward("fp16", "int8", everywhere=everywhere, fault=fault)
    d_out, q, k, v = drawn(kernel)
    k[:, 1] *= 3
    report = judge_backward(
        kernel(d_out, q, k, v, 0.3), d_out, q, k, v, numerics=kernel.said, scale=0.3
    )
    assert not report.passed, report


def test_each_code_widens_the_bound() -> None:
    d_out, q, k, v = drawn(Backward("fp16"))
    found = backward_exact(d_out, q, k, v)
    wrong = [x + np.float64(1e-2) for x in found]

    def ratios(**codes: str) -> list[float]:
        said = numerics("fp16", **codes)
        report = judge_backward(wrong, d_out, q, k, v, numerics=said)
        return [share.ratio for share in report.shares]

    plain = ratios()
    for codes in ({"qk": "int8"}, {"qk": "e4m3"}):
        assert all(a < b for a, b in zip(ratios(**codes), plain, strict=True)), codes
    for codes in ({"v": "int8"}, {"v": "e4m3"}):  # dV has no product with V
        wider = ratios(**codes)
        assert wider[0] < plain[0] and wider[1] < plain[1] and wider[2] == plain[2], codes


def test_one_number_that_is_not_finite_spoils_all_that_share_its_scale() -> None:
    d_out, q, k, v = drawn(Backward("fp16"))
    found = [x.copy() for x in Backward("fp16")(d_out, q, k, v, 0.3)]
    k[0, 0, 3, 2] = np.inf
    for x in found:
        x[0, : x.shape[1] // 2] = np.nan  # the head of keys, and the heads that share it
        x[1, -1] += 1  # the other entry
    for codes, passed in (("int8", False), ("e4m3", True)):
        with np.errstate(invalid="ignore"):
            report = judge_backward(
                found, d_out, q, k, v, numerics=numerics("fp16", qk=codes), scale=0.3
            )
        assert report.passed is passed, codes


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_codes_without_scales_are_refused_with_the_way_out(dtype: Any) -> None:
    x = np.ones((1, 1, 4, 8), dtype)
    full = np.ones((1, 1, 4, 8), np.float32)
    said = numerics("bf16")
    says = rf"k has 8 bits \({np.dtype(dtype).name}\): give the numbers .* times its scale"
    with pytest.raises(TypeError, match=says):
        judge(full, full, x, x, numerics=said)
    with pytest.raises(TypeError, match=says):
        judge_backward([full] * 3, full, full, x, x, numerics=said)


def test_numbers_that_codes_stand_for_are_judged() -> None:
    """Codes and scales that the caller made: float32 holds their products."""
    rng = np.random.default_rng(0)
    codes = [rng.integers(-127, 128, (1, 2, 32, 16)).astype(np.float32) for _ in range(3)]
    q, k, v = (x * np.float32(0.02) for x in codes)
    s = (codes[0] @ codes[1].swapaxes(2, 3)) * np.float32(0.02 * 0.02 * 0.25)
    weights = np.exp(s - s.max(axis=-1, keepdims=True))
    o = (weights.astype(ml_dtypes.bfloat16).astype(np.float32) @ codes[2]) * np.float32(0.02)
    o = o / weights.sum(axis=-1, keepdims=True)
    said = numerics("bf16 P", out="fp32")
    assert judge(o, q, k, v, numerics=said).passed
    assert not judge(o * np.float32(1.02), q, k, v, numerics=said).passed
