"""Gradients of other libraries: kernels of two kinds keep their bound, and faults break it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupyattn import distributions, gradients
from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import UnsupportedError
from cupyattn.gradients import backward_exact
from cupyattn.testing import judge_backward, numerics

TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": STORAGE["bfloat16"]}
LONG = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Backward:
    """Gradients in float32 as other libraries compute them.

    `kept`: P of the forward pass is kept, every step is stored as `scores`, and Delta is the sum of
    P dP, as autograd does. Otherwise P is made of lse again, and Delta of O. `split`: heads of a
    group are stored before they are added up. Faults: see `FAULTS`.
    """

    p: str = "fp32"
    scores: str = "fp32"
    kept: bool = False
    split: bool = False
    fault: str = ""

    def __call__(
        self, d_out: Any, q: Any, k: Any, v: Any, scale: float, mask: Any = True, bias: Any = 0,
        softcap: float = 0.0, sinks: Any = None, d_lse: Any = None,
    ) -> list[Any]:  # fmt: skip
        """Return dq, dk, dv in q's type."""
        dtype, group = q.dtype, q.shape[1] // k.shape[1]
        q, k, v, d_out = (np.float32(x) for x in (q, k, v, d_out))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        unit = np.float32(scale)
        s = self.stored(self.stored(q @ k.swapaxes(2, 3)) * unit)
        slope = np.float32(1)
        if softcap:
            t = self.stored(np.tanh(self.stored(s / np.float32(softcap))))
            s, slope = self.stored(np.float32(softcap) * t), self.stored(1 - self.stored(t * t))
        s = np.where(mask, self.stored(s + np.float32(bias)), np.float32(-np.inf))
        top = s.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, np.float32(sinks)[:, None, None])
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(s - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(np.float32(sinks)[:, None, None] - top)
        inverse = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)
        o = np.float32(((self.operand(weights) @ v) * inverse).astype(dtype))
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        P = self.stored(weights * inverse) if self.kept else np.exp(s - np.where(total > 0, lse, 0))
        dP = self.stored(d_out @ v.swapaxes(2, 3))
        delta = (P * dP).sum(axis=-1) if self.kept else (d_out * o).sum(axis=-1)
        if d_lse is not None:
            delta = delta - np.where(total[..., 0] > 0, np.float32(d_lse), 0)
        if self.fault == "delta_left_out":
            delta = 0 * delta
        dS = self.stored(P * self.stored(dP - delta[..., None]))
        dS = self.operand(self.stored(dS * slope))
        if self.fault == "slope_left_out":
            dS = self.operand(P * (dP - delta[..., None]))
        if self.fault == "eight_bits":
            dS = np.float32(np.float32(dS * 64).astype(np.int8)) / 64
        P = self.operand(P)
        if self.fault == "scale_twice":
            unit = unit * unit
        if self.fault == "scale_in_bfloat16":
            unit = np.float32(np.array(unit).astype(TYPES["bf16"]))
        dq, dk, dv = dS @ k * unit, dS.swapaxes(2, 3) @ q * unit, P.swapaxes(2, 3) @ d_out
        if self.fault == "last_row_lost":
            dv = dv - P[:, :, -1:].swapaxes(2, 3) * d_out[:, :, -1:]
        heads = (q.shape[0], -1, group, *k.shape[2:])
        if self.split:
            dk, dv = (np.float32(x.astype(dtype)) for x in (dk, dv))
        dk, dv = (x.reshape(heads) for x in (dk, dv))
        if self.fault == "first_head_of_a_group":
            dk = dk[:, :, :1]
        return [x.astype(dtype) for x in (dq, dk.sum(axis=2), dv.sum(axis=2))]

    def stored(self, x: Any) -> Any:
        return np.float32(np.float32(x).astype(TYPES[self.scores] if self.kept else np.float32))

    def operand(self, x: Any) -> Any:
        return np.float32(np.float32(x).astype(TYPES[self.p]))

    @property
    def said(self) -> Any:
        return numerics(self.p, scores=self.scores if self.kept else "fp32")


KERNELS = (
    Backward(), Backward("fp16"), Backward("bf16", split=True), Backward("fp32", kept=True),
    Backward("fp16", "fp16", kept=True, split=True), Backward("bf16", "bf16", kept=True),
)  # fmt: skip
SHAPE = (2, 4, 21, 35, 8)
Case = tuple[tuple[Any, ...], dict[str, Any]]


def drawn(kernel: Backward, name: str = "normal", seed: int = 0) -> tuple[Any, ...]:
    """d_out, q, k, v with two heads of keys for four of queries."""
    batch, heads, len_q, len_kv, head_dim = SHAPE
    q, k, v = distributions.make(
        name, batch, heads, len_q, len_kv, head_dim, LONG[kernel.p], seed, 2
    )
    return np.random.default_rng(seed).standard_normal(q.shape).astype(q.dtype), q, k, v


def causal(align: str) -> Any:
    shift = SHAPE[3] - SHAPE[2] if align == "bottom-right" else 0
    return np.arange(SHAPE[3]) <= np.arange(SHAPE[2])[:, None] + shift


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, (kernel, name) in enumerate(itertools.product(KERNELS, distributions.NAMES))
    ],
)
def test_kernels_keep_the_bound_of_what_they_round(kernel: Backward, name: str) -> None:
    d_out, q, k, v = drawn(kernel, name)
    found = kernel(d_out, q, k, v, 0.3)
    report = judge_backward(found, d_out, q, k, v, numerics=kernel.said, scale=0.3)
    assert report.passed, report
    align = "top-left"
    found = kernel(d_out, q, k, v, 0.3, mask=causal(align))
    report = judge_backward(
        found, d_out, q, k, v, numerics=kernel.said, scale=0.3, causal=True, causal_align=align
    )
    assert report.passed, report


@pytest.mark.parametrize("kernel", KERNELS)
def test_features(kernel: Backward) -> None:
    rng = np.random.default_rng(1)
    d_out, q, k, v = drawn(kernel, seed=1)
    mask = rng.random((2, 1, 21, 35)) < 0.4
    mask[0, 0, 3] = False  # a row without keys
    bias = rng.standard_normal((1, 4, 1, 35)).astype(q.dtype)
    sinks = (3 + rng.standard_normal(4)).astype(np.float32)
    d_lse = rng.standard_normal(q.shape[:3]).astype(np.float32)
    for options in (
        {"mask": mask}, {"bias": bias}, {"softcap": 1.5}, {"sinks": sinks}, {"d_lse": d_lse},
        {"mask": mask, "bias": bias, "softcap": 0.7, "sinks": sinks, "d_lse": d_lse},
    ):  # fmt: skip
        found = kernel(d_out, q, k, v, 0.4, **options)
        asked = {"numerics": kernel.said, "scale": 0.4}
        report = judge_backward(found, d_out, q, k, v, **asked, **options)
        assert report.passed, (options.keys(), report)
        for left_out in options:
            rest = {name: x for name, x in options.items() if name != left_out}
            assert not judge_backward(found, d_out, q, k, v, **asked, **rest).passed, left_out


#: Faults, and options under which they matter.
FAULTS = {
    "delta_left_out": {}, "slope_left_out": {"softcap": 1.0}, "eight_bits": {}, "scale_twice": {},
    "scale_in_bfloat16": {}, "last_row_lost": {}, "first_head_of_a_group": {},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("p", ["fp32", "fp16"])
def test_faults_break_the_bound(fault: str, p: str) -> None:
    scale, options = 0.3, FAULTS[fault]
    for wrong, kernel in ((False, Backward(p)), (True, Backward(p, fault=fault))):
        if p == "fp16" and fault == "scale_in_bfloat16":
            continue  # 2^-9 of a gradient is less than what 16 bits cost
        d_out, q, k, v = drawn(kernel)
        found = kernel(d_out, q, k, v, scale, **options)
        report = judge_backward(
            found, d_out, q, k, v, numerics=kernel.said, scale=scale, **options
        )
        assert report.passed != wrong, report


def test_a_kernel_that_rounds_more_than_it_says_is_found() -> None:
    d_out, q, k, v = (x.astype(np.float32) for x in drawn(Backward("fp16")))
    found = Backward("fp16")(d_out, q, k, v, 0.3)
    assert judge_backward(found, d_out, q, k, v, numerics=numerics("fp16"), scale=0.3).passed
    assert not judge_backward(found, d_out, q, k, v, numerics=numerics("fp32"), scale=0.3).passed


def test_each_word_widens_the_bound() -> None:
    d_out, q, k, v = drawn(Backward("fp16"))
    found = Backward("fp16")(d_out, q, k, v, 0.3)

    def bounds(**words: Any) -> list[float]:
        said = numerics(**{"p": "fp16", **words})
        report = judge_backward(found, d_out, q, k, v, numerics=said, scale=0.3)
        return [share.ratio for share in report.shares]

    plain = bounds()
    for words in (
        {"p": "bf16"}, {"accumulate": "fp16"}, {"scores": "fp16"}, {"scaled_q": "fp16"},
        {"exponential": 1e-3}, {"order": "any"}, {"out": "bf16"},
    ):  # fmt: skip
        wider = bounds(**words)
        assert all(a <= b for a, b in zip(wider, plain, strict=True)), words
        assert sum(wider) < sum(plain), words


def layouts(found: list[Any], arrays: list[Any], turn: Callable[[Any], Any]) -> tuple[Any, Any]:
    return [turn(x) for x in found], [turn(x) for x in arrays]


def test_packed_padded_and_transposed() -> None:
    kernel = Backward("fp16")
    d_out, q, k, v = drawn(kernel)
    said, asked = kernel.said, {"numerics": kernel.said}
    found = kernel(d_out, q, k, v, 8**-0.5)
    other, arrays = layouts(found, [d_out, q, k, v], lambda x: np.swapaxes(x, 1, 2))
    assert judge_backward(other, *arrays, layout="BSHD", **asked).passed

    # Packed: the first sequence of both entries, one without rows, one without keys.
    parts = [[x[entry].swapaxes(0, 1) for x in (d_out, q, k, v)] for entry in (0, 1)]
    of_parts = [[x[entry].swapaxes(0, 1) for x in found] for entry in (0, 1)]
    none = [np.zeros((0, 4, 8), np.float16), np.ones((3, 2, 8), np.float16)]
    d_out_p, q_p = (np.concatenate([a[i] for a in parts]) for i in (0, 1))
    k_p, v_p = (np.concatenate([parts[0][i], none[1], parts[1][i]]) for i in (2, 3))
    ends_q = np.array([0, 21, 21, 42], np.int32)
    ends_k = np.array([0, 35, 38, 73], np.int32)
    dq = np.concatenate([one[0] for one in of_parts])
    dk, dv = (np.concatenate([of_parts[0][i], 0 * none[1], of_parts[1][i]]) for i in (1, 2))
    packed = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, **asked}
    assert judge_backward([dq, dk, dv], d_out_p, q_p, k_p, v_p, **packed).passed
    dv[36, 0, 0] = 1e-3
    report = judge_backward([dq, dk, dv], d_out_p, q_p, k_p, v_p, **packed)
    assert not report.passed and report.shares[2].index[0] == 1

    lengths_q, lengths_kv = np.array([21, 9], np.int32), np.array([35, 12], np.int32)
    keys = np.arange(35) < lengths_kv[:, None, None, None]
    mask = keys & (np.arange(21)[:, None] < lengths_q[:, None, None, None])
    padded = kernel(d_out, q, k, v, 8**-0.5, mask=mask)
    lengths = {"lengths_q": lengths_q, "lengths_kv": lengths_kv, "numerics": said}
    d_out[1, :, 9:], q[1, :, 9:], k[1, :, 12:] = np.nan, np.nan, np.nan
    assert judge_backward(padded, d_out, q, k, v, **lengths).passed
    assert not judge_backward(found, d_out, q, k, v, **lengths).passed
    d_lse = np.zeros((2, 4, 21), np.float32)
    d_lse[1, :, 9:] = np.nan
    assert judge_backward(padded, d_out, q, k, v, d_lse=d_lse, **lengths).passed
    wrong = [50 * x for x in padded]
    assert not judge_backward(wrong, d_out, q, k, v, d_lse=d_lse, **lengths).passed


def test_a_gradient_of_the_bias() -> None:
    kernel = Backward("fp32")
    d_out, q, k, v = drawn(kernel)
    bias = np.random.default_rng(2).standard_normal((1, 4, 1, 35)).astype(np.float32)
    exact = backward_exact(d_out, q, k, v, bias=bias, grad_bias=True)
    found = [*kernel(d_out, q, k, v, 8**-0.5, bias=bias), exact[3].astype(np.float32)]
    asked = {"numerics": kernel.said, "bias": bias}
    assert judge_backward(found, d_out, q, k, v, **asked).passed
    found[3] = found[3] * np.float32(1.01)
    report = judge_backward(found, d_out, q, k, v, **asked)
    assert [share.ratio <= 1 for share in report.shares] == [True, True, True, False]


def test_what_is_not_finite_is_promised_nothing() -> None:
    kernel = Backward("fp16")
    d_out, q, k, v = drawn(kernel)
    found = kernel(d_out, q, k, v, 0.3)
    k[0, 0, 3, 2] = np.inf
    wrong = [x.copy() for x in found]
    for x in wrong:  # the first head of keys, and both heads of queries that share it
        x[0, : x.shape[1] // 2] = np.nan
    asked = {"numerics": kernel.said, "scale": 0.3}
    with np.errstate(invalid="ignore"):
        assert judge_backward(wrong, d_out, q, k, v, **asked).passed
        wrong[2][1, 1, 0, 0] += 1
        assert not judge_backward(wrong, d_out, q, k, v, **asked).passed


def test_rows_that_overflow_are_promised_nothing() -> None:
    """Scores past float16 become NaN, and from there reach keys that the row does not attend to."""
    kernel = Backward("fp16", "fp16", kept=True)
    d_out, q, k, v = drawn(kernel)
    mask = np.random.default_rng(3).random((2, 1, 21, 35)) < 0.5
    q[0, 1, 4] = 60000
    asked = {"numerics": kernel.said, "scale": 0.3, "mask": mask}
    with np.errstate(all="ignore"):
        found = kernel(d_out, q, k, v, 0.3, mask=mask)
        assert not np.isfinite(found[1][0, 0]).any()
        assert judge_backward(found, d_out, q, k, v, **asked).passed
        found[1][1, 0, 0] = 0
        assert not judge_backward(found, d_out, q, k, v, **asked).passed


def test_misuses_are_one_sentence() -> None:
    kernel = Backward("fp16")
    d_out, q, k, v = drawn(kernel)
    found = kernel(d_out, q, k, v, 0.3)
    ends = np.array([0, 21], np.int32)
    for words, error, says in (
        ({"numerics": None}, TypeError, r"numerics must be what .* got None"),
        ({"numerics": numerics("e4m3")}, UnsupportedError, "dS in 8 bits has no bound"),
        ({"numerics": kernel.said, "rope": (q, q)}, TypeError, "unexpected keyword .* 'rope'"),
        ({"numerics": kernel.said, "layout": "bshd"}, ValueError, "layout must be .*'bshd'"),
        ({"numerics": kernel.said, "causal": "false"}, TypeError, "causal must be .*'false'"),
        ({"numerics": kernel.said, "cu_seqlens_q": ends}, TypeError, "give both"),
        (
            {"numerics": kernel.said, "cu_seqlens_q": [0, 33], "cu_seqlens_k": ends}, TypeError,
            "cu_seqlens_q must be a NumPy or CuPy array",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            judge_backward(found, d_out, q, k, v, **words)
    for beside in ({"sinks": np.zeros(4, np.float32)}, {"cu_seqlens_q": ends}):
        with pytest.raises(ValueError, match="a gradient of the bias cannot be judged beside"):
            judge_backward([*found, q], d_out, q, k, v, numerics=kernel.said, **beside)
    with pytest.raises(ValueError, match="gradients must be dq, dk, dv, got 2 of them"):
        judge_backward(found[:2], d_out, q, k, v, numerics=kernel.said)
    rows = [x[0].swapaxes(0, 1) for x in (*found, d_out, q, k, v)]
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": np.array([0, 35], np.int32)}
    longer = [np.concatenate([x, np.full_like(x[:2], np.nan)]) for x in rows[:3]]
    with pytest.raises(ValueError, match=r"dq must have shape \(21, 4, 8\)"):
        judge_backward(longer, *rows[3:], numerics=kernel.said, **packed)
    with pytest.raises(ValueError, match="dq must have shape"):
        judge_backward([found[1], *found[1:]], d_out, q, k, v, numerics=kernel.said)
    with pytest.raises(TypeError, match="needs out and lse of this library's forward pass, or"):
        gradients.judge_backward(found, d_out, q, k, v)
    assert gradients.judge_backward(
        found, d_out, q, k, v, numerics=kernel.said, scale=0.3
    ).passed  # fmt: skip
