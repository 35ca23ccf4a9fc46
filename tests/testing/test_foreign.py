"""Kernels of other libraries: words that say what they round, and the bound that follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import STORAGE
from cupyattn.reference import attention_exact
from cupyattn.strategies import attention_inputs
from cupyattn.testing import assert_within_bound, judge, numerics
from tests.support.foreign import Foreign

TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": STORAGE["bfloat16"]}


@dataclass(frozen=True)
class Kernel:
    """Attention in float32 as other libraries compute it, one row at a time.

    `block` keys a step, `backwards` from the last one, in `slices` that are merged by their lse.
    `folded` multiplies the scores by scale * log2 e and subtracts that product of the maximum;
    otherwise they are scaled, stored as `scores`, and the maximum itself is subtracted.
    """

    p: str = "fp32"
    block: int = 16
    backwards: bool = False
    slices: int = 1
    folded: bool = False
    scores: str = "fp32"
    sums: str = "fp32"
    qk: str | None = None
    v: str | None = None

    def __call__(self, q: Any, k: Any, v: Any, admitted: Any, scale: float) -> tuple[Any, Any]:
        """Return o in q's type, and lse."""
        group, dtype = q.shape[1] // k.shape[1], q.dtype
        q, k, v = (np.float32(x) for x in (q, k, v))
        given, mean = q, np.zeros((*k.shape[:2], 1, k.shape[3]), np.float32)
        if self.qk == "int8" and k.shape[2]:
            mean = k.mean(axis=2, keepdims=True, dtype=np.float32)
            k = np.float32((k - mean).astype(dtype))
            q, k = (_int8(x) for x in (q, k))
        elif self.qk == "e4m3":
            q, k = (_e4m3(x, axis=None) for x in (q, k))
        if self.v == "e4m3":
            v = _e4m3(v, axis=2)
        o, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:3], -np.inf, np.float32)
        for b, h, i in np.ndindex(*q.shape[:3]):
            keys = np.flatnonzero(admitted[i])
            if keys.size:
                at = b, h // group
                o[b, h, i], lse[b, h, i] = self._row(q[b, h, i], k[at][keys], v[at][keys], scale)
                lse[b, h, i] += np.float32(scale) * (given[b, h, i] @ mean[at][0])
        return o.astype(dtype), lse

    def _row(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        parts = [
            self._slice(q, k[at], v[at], np.float32(scale))
            for at in np.array_split(np.arange(len(k)), self.slices)
            if at.size
        ]
        lse = np.array([part[1] for part in parts])
        total = lse.max() + np.log(np.exp(lse - lse.max()).sum())
        weights = np.exp(lse - total) if len(parts) > 1 else np.ones(1, np.float32)
        return sum(w * part[0] for w, part in zip(weights, parts, strict=True)), total

    def _slice(self, q: Any, k: Any, v: Any, scale: Any) -> tuple[Any, Any]:
        m, total, o = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32)
        starts = list(range(0, len(k), self.block))
        for start in starts[::-1] if self.backwards else starts:
            at = slice(start, start + self.block)
            s = k[at] @ q
            if not self.folded:
                s = np.float32(np.float32(s.astype(TYPES[self.scores]) * scale))
                s = np.float32(s.astype(TYPES[self.scores]))
            new = np.maximum(m, s.max())
            if self.folded:
                c = np.float32(scale * np.float32(np.log2(np.e)))
                p, alpha = np.exp2(s * c - new * c), np.exp2((m - new) * c)
            else:
                p, alpha = np.exp(s - new), np.exp(m - new)
            total = np.float32(total * alpha + p.sum(dtype=np.float32))
            if self.p == "e4m3":
                p = np.float32((p * np.float32(448)).astype(ml_dtypes.float8_e4m3fn)) / 448
            else:
                p = np.float32(p.astype(TYPES[self.p]))
            o, m = o * alpha + self._product(p, v[at]), new
        unit = np.float32(scale) if self.folded else np.float32(1)
        return o / total, m * unit + np.log(total)

    def _product(self, p: Any, v: Any) -> Any:
        if self.sums == "fp32":
            return p @ v
        o = np.zeros(v.shape[1], np.float16)
        for weight, row in zip(p, v, strict=True):
            o = np.float16(np.float32(o) + weight * row)
        return np.float32(o)


def _int8(x: Any) -> Any:
    """Codes of a scale for each 8 rows, dequantised."""
    out = np.zeros_like(x)
    for start in range(0, x.shape[2], 8):
        rows = x[:, :, start : start + 8]
        size = np.abs(rows).max(axis=(-2, -1), keepdims=True) / np.float32(127)
        scale = np.where(size > 0, size, np.float32(1))
        out[:, :, start : start + 8] = np.clip(np.rint(rows / scale), -127, 127) * scale
    return out


def _e4m3(x: Any, axis: int | None) -> Any:
    size = np.abs(x).max(axis=axis, keepdims=True, initial=0) / np.float32(448)
    scale = np.where(size > 0, size, np.float32(1))
    return np.float32((x / scale).astype(ml_dtypes.float8_e4m3fn)) * scale


def admitted(q: Any, k: Any, causal: bool, causal_align: str) -> Any:
    len_q, len_kv = q.shape[2], k.shape[2]
    shift = len_kv - len_q if causal_align == "bottom-right" else 0
    return np.arange(len_kv) <= np.arange(len_q)[:, None] + (shift if causal else len_kv)


#: Kernels, and the words for each.
KERNELS = (
    (Kernel(), {"p": "fp32"}),
    (Kernel(block=7, backwards=True, folded=True), {"p": "float32 P"}),
    (Kernel("fp16", block=32, backwards=True, folded=True), {"p": "fp16 P"}),
    (Kernel("bf16", block=5), {"p": "bf16 P"}),
    (Kernel("fp16", slices=4, folded=True), {"p": "fp16 P", "order": "any"}),
    (Kernel("fp16", scores="fp16", block=1000), {"p": "half", "scores": "fp16"}),
    (Kernel("bf16", scores="bf16", block=1000), {"p": "bf16", "scores": "bf16"}),
    (
        Kernel("fp16", qk="int8", sums="fp16"),
        {"p": "fp16 P", "qk": "int8", "accumulate": "fp16", "promote": 16},
    ),
    (Kernel("e4m3", qk="int8", v="e4m3"), {"p": "e4m3 P", "qk": "int8", "v": "e4m3"}),
    (Kernel("e4m3", qk="e4m3", v="e4m3"), {"p": "fp8", "qk": "e4m3", "v": "e4m3"}),
)  # fmt: skip


@settings(max_examples=60)
@given(
    attention_inputs(max_head_dim=40, max_scores=2**9),
    st.sampled_from(KERNELS),
)
def test_kernels_keep_the_bound_of_what_they_round(
    case: tuple[Any, Any, Any, dict[str, Any]], kernel: tuple[Kernel, dict[str, Any]]
) -> None:
    q, k, v, options = case
    run, said = kernel
    scale = options["scale"] or q.shape[-1] ** -0.5
    mask = admitted(q, k, options["causal"], options["causal_align"])
    with np.errstate(all="ignore"):
        o, lse = run(q, k, v, mask, scale)
    assert_within_bound(o, q, k, v, lse=lse, numerics=numerics(**said), **options)


def ordinary(dtype: str = "float16") -> tuple[Any, Any, Any]:
    return distributions.make("normal", 1, 1, 8, 128, 32, dtype, seed=3)


def run(kernel: Kernel, q: Any, k: Any, v: Any) -> Any:
    return kernel(q, k, v, admitted(q, k, False, ""), q.shape[-1] ** -0.5)[0]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Kernel("fp16"), {"p": "fp32"}),
        (Kernel("bf16"), {"p": "fp16"}),
        (Kernel("e4m3"), {"p": "bf16"}),
        (Kernel("fp32", scores="bf16"), {"p": "fp32"}),
        (Kernel("fp32", qk="int8"), {"p": "fp32"}),
        (Kernel("fp32", v="e4m3"), {"p": "bf16"}),
    ],
)
def test_a_kernel_that_rounds_more_than_it_says_is_found(
    kernel: Kernel, said: dict[str, Any]
) -> None:
    q, k, v = ordinary("float32")
    report = judge(run(kernel, q, k, v), q, k, v, numerics=numerics(**said))
    assert report.ratio > 1 and "fp32 sums: O is OUTSIDE" in str(report)


@pytest.mark.parametrize("said", [x for _, x in KERNELS], ids=str)
def test_a_key_that_is_lost_is_found(said: dict[str, Any]) -> None:
    q, k, v = ordinary()
    q[...], k[...], v[...] = 0, 0, 1
    v[:, :, :64] = -1
    o = attention_exact(q, k, v)
    assert judge(o, q, k, v, numerics=numerics(**said)).passed
    lost = attention_exact(q, k[:, :, 20:], v[:, :, 20:])
    assert judge(lost, q, k, v, numerics=numerics(**said)).ratio > 1


def test_each_word_widens_the_bound() -> None:
    q, k, v = ordinary()

    def bound(**said: Any) -> Any:
        return ca.bounds.attention(q, k, v, numerics=numerics(**{"p": "fp32"} | said)).total

    plain = bound()
    for said in (
        {"p": "fp16"}, {"p": "e4m3"}, {"accumulate": "fp16"}, {"accumulate": "fp22"},
        {"scores": "bf16"}, {"exponential": 1e-3}, {"order": "any"}, {"qk": "int8"},
        {"qk": "e4m3"}, {"v": "e4m3"}, {"out": "bf16"},
    ):  # fmt: skip
        assert (bound(**said) > plain).all(), said
    assert (bound(accumulate="fp16", promote=16) < bound(accumulate="fp16")).all()
    assert (bound(out="fp32") < plain).all()


def test_tensors_and_arrays_of_any_library_are_judged() -> None:
    q, k, v = ordinary()
    o = run(Kernel("fp16"), q, k, v)
    assert judge(*map(Foreign, (o, q, k, v)), numerics=numerics("fp16 P")).passed


def test_what_is_not_finite_is_promised_nothing() -> None:
    q, k, v = ordinary()
    q[0, 0, 2, 1] = np.nan
    for said in ({"p": "fp16"}, {"p": "fp16", "qk": "int8"}):
        report = judge(attention_exact(q, k, v), q, k, v, numerics=numerics(**said))
        assert report.passed
    plain = numerics("fp16")
    assert judge(np.zeros_like(q), q, k, v, numerics=plain).ratio == np.inf
    k[0, 0, 5] = np.inf  # spoils the scale of every code of its head
    bound = ca.bounds.attention(q, k, v, numerics=numerics("fp16", qk="int8"))
    assert np.isinf(bound.total).all() and np.isinf(bound.lse).all()


def test_the_largest_head_dim_and_no_keys() -> None:
    q, k, v = distributions.make("normal", 1, 2, 5, 7, 256, "float32", seed=0)
    assert judge(run(Kernel(), q, k, v), q, k, v, numerics=numerics("fp32")).passed
    k, v = k[:, :, :0], v[:, :, :0]
    for qk in (None, "int8", "e4m3"):
        assert judge(0 * q, q, k, v, numerics=numerics("fp32", qk=qk, v="e4m3")).passed
        assert judge(0 * q + 1e-9, q, k, v, numerics=numerics("fp32", qk=qk)).ratio == np.inf


def test_masks_and_biases_are_options_like_any() -> None:
    q, k, v = ordinary()
    bias = np.where(np.arange(128) % 3 == 0, -1e9, 0.5).astype(np.float32)
    o = attention_exact(q, k, v, bias=bias, window=(40, 40))
    options = {"bias": bias, "window": (40, 40), "numerics": numerics("fp16 P")}
    assert_within_bound(o.astype(np.float16), q, k, v, **options)
    assert not judge(o, q, k, v, **options | {"window": (39, 40)}).passed


def test_words_that_are_none_are_refused() -> None:
    for said, message in (
        ({"p": "fp4 P"}, "p must be one of 'fp32', 'fp16', 'bf16', 'e4m3', got 'fp4'"),
        ({"p": 16}, "p must be a type such as 'fp16 P', got 16"),
        ({"p": "fp16", "accumulate": "int32"}, "accumulate must be one of 'fp32', 'fp16', 'fp22'"),
        ({"p": "fp16", "scores": "e4m3"}, "scores must be one of"),
        ({"p": "fp16", "qk": "fp16"}, "qk must be one of 'int8', 'e4m3', got 'fp16'"),
        ({"p": "fp16", "v": "int4"}, "v must be one of"),
        ({"p": "fp16", "out": "e4m3"}, "out must be one of"),
        ({"p": "fp16", "order": "random"}, "order must be 'sequential' or 'any', got 'random'"),
        ({"p": "fp16", "promote": 0}, "promote must be a positive number of keys or None, got 0"),
        ({"p": "fp16", "promote": 1.5}, "promote must be"),
        ({"p": "fp16", "exponential": 1.0}, "exponential must be a relative error"),
        ({"p": "fp16", "tanh": -1.0}, "tanh must be a relative error of at least 0"),
        ({"p": "fp16", "scaled_q": "e4m3"}, "scaled_q must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            numerics(**said)  # type: ignore[arg-type]


def test_what_the_bound_does_not_cover_is_refused() -> None:
    q, k, v = ordinary()
    flash = numerics("fp16 P")
    with pytest.raises(TypeError, match=r"numerics=cupyattn.testing.numerics\('fp16 P'\)"):
        judge(q, q, k, v)
    with pytest.raises(ValueError, match="leave quantized out"):
        judge(q, q, k, v, numerics=flash, variant="fa_int8", quantized=ca.quantize(q, k, v))
    with pytest.raises(ValueError, match="must be a result of cupyattn.testing.numerics"):
        from cupyattn.bounds.foreign import bound_foreign

        bound_foreign(None, replace(flash, foreign=None))  # type: ignore[arg-type]


def test_narrower_bounds_of_our_kernels_are_refused() -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    for narrower in ({"sums": True}, {"signed": lambda v: v}):
        with pytest.raises(ValueError, match="signed and sums hold this library's kernels"):
            judge(x, x, x, x, numerics=numerics("fp16 P"), **narrower)


def test_words_are_no_numerics() -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    with pytest.raises(TypeError, match=r"numerics must be what cupyattn\.testing\.numerics"):
        judge(x, x, x, x, numerics="fp16 P")  # type: ignore[arg-type]
