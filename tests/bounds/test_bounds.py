"""The bounds hold, are not vacuous, and the inequalities that they rest on are true."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from cupyattn import distributions
from cupyattn.arrays.kinds import FINITE_MAX, STORAGE
from cupyattn.bounds import kernel, quantised, scores
from cupyattn.bounds.bound import exact as exact_of_block
from cupyattn.bounds.perturbation import gamma, half_ulp, softmax_perturbation
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.reference import attention as mirror
from cupyattn.reference import rounding
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact, score_blocks
from cupyattn.reference.rounding import round_to
from cupyattn.strategies import attention_inputs
from cupyattn.testing.verdict import Report, judge

Array = npt.NDArray[Any]

#: Small enough that short inputs take several steps.
SMALL_TILES = Tiles(32, 16, 2, 2)
CELLS = [(name, dtype) for name, variant in VARIANTS.items() for dtype in variant.dtypes]
seeds = st.integers(0, 2**32 - 1)


def run_mirror(
    q: Array, k: Array, v: Array, variant: str, *, quant: QuantConfig | None = None, **options: Any
) -> Report:
    """Judge the mirror of a rung on O, lse and, for INT8, quantisation."""
    quantized = None
    if VARIANTS[variant].family == "int8":
        quantized = quantize(q, k, v, quant=quant, tiles=options.get("tiles"))
        o, lse = attention_mirror(quantized, variant=variant, return_lse=True, **options)
    else:
        o, lse = attention_mirror(q, k, v, variant=variant, return_lse=True, **options)
    return judge(o, q, k, v, lse=lse, variant=variant, quantized=quantized, **options)


# The mirror keeps to its bound (J2), and quantisation to its own (J3).


@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
def test_mirror_is_within_its_bound(variant: str, data: st.DataObject) -> None:
    inputs = attention_inputs(
        dtypes=VARIANTS[variant].dtypes, tiles=Tiles(32, 16, 2), max_head_dim=128, max_scores=2**12,
        features=("window", "softcap", "mask", "bias"),
    )  # fmt: skip
    q, k, v, options = data.draw(inputs)
    quant = QuantConfig(
        granularity_q=data.draw(st.sampled_from(GRANULARITIES)),
        granularity_k=data.draw(st.sampled_from(GRANULARITIES)),
        smooth_k=data.draw(st.booleans()) and not options.get("softcap"),
    )
    report = run_mirror(q, k, v, variant, quant=quant, tiles=SMALL_TILES, **options)
    target(report.ratio, label="error / bound")
    assert report.passed, str(report)


@pytest.mark.parametrize("distribution", distributions.NAMES)
@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_mirror_is_within_its_bound_on_distributions(
    distribution: str, variant: str, dtype: str
) -> None:
    q, k, v = distributions.make(distribution, 1, 2, 40, 256, 64, dtype, seed=3, heads_kv=1)
    report = run_mirror(q, k, v, variant)
    assert report.passed, str(report)


@given(seeds, st.sampled_from(CELLS))
def test_mirror_is_within_its_bound_on_scales_far_apart(seed: int, cell: tuple[str, str]) -> None:
    """Rows, channels and whole operands of magnitudes that have nothing to do with each other."""
    variant, dtype = cell
    rng = np.random.default_rng(seed)
    largest = FINITE_MAX[dtype]

    def draw(length: int, low: float, high: float) -> Array:
        x = rng.standard_normal((1, 2, length, 24)) * 10.0 ** rng.uniform(low, high)
        x = x * 10.0 ** rng.uniform(-3, 3, (1, 2, length, 1) if rng.random() < 0.5 else 1)
        x = x * 10.0 ** rng.uniform(-3, 3, (1, 2, 1, 24) if rng.random() < 0.5 else 1)
        return np.clip(x, -largest, largest).astype(STORAGE[dtype])

    q, k = draw(19, -3, 3), draw(45, -3, 3)
    v = draw(45, -45, 4) if rng.random() < 0.5 else draw(45, -3, 38)
    with np.errstate(over="ignore"):  # float32 values past float16
        report = run_mirror(q, k, v, variant, tiles=SMALL_TILES, causal=bool(rng.random() < 0.5))
    target(report.ratio, label="error / bound")
    assert report.passed, str(report)


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_mirror_with_the_worst_exp2_is_within_its_bound(
    variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: an exp2 that errs by 2^-22, up or down at random, is what the PTX ISA allows."""
    rng = np.random.default_rng(5)
    correct = rounding.ex2

    def erring(x: Array) -> Array:
        y = correct(x).astype(np.float64)
        y = y * (1 + rng.choice([-1.0, 1.0], y.shape) * (2.0**-22 - 2.0**-24))
        return np.where(np.asarray(x) == 0, 1.0, y).astype(np.float32)

    monkeypatch.setattr(mirror, "ex2", erring)
    for distribution in ("normal", "sink"):
        q, k, v = distributions.make(distribution, 1, 2, 40, 200, 16, dtype, seed=2)
        report = run_mirror(q, k, v, variant, tiles=Tiles(32, 16, 2, 2))
        assert report.passed, str(report)


# The bound is not vacuous.


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_bound_is_a_few_percent_of_the_output(variant: str, dtype: str, head_dim: int) -> None:
    """At len 256 on normal data, of every row: 5 % with 16-bit P, far less with float32."""
    q, k, v = distributions.make("normal", 1, 2, 32, 256, head_dim, dtype, seed=head_dim)
    quantized = quantize(q, k, v) if variant == "fa_int8" else None
    operands = kernel.kernel_operands(quantized) if quantized else (q, k, v)
    total = kernel.attention(q, k, v, variant=variant, quantized=quantized).total
    expected = attention_exact(*operands)
    share = np.sqrt((total**2).mean(axis=-1) / (expected**2).mean(axis=-1))
    limits = {"float32": 0.001, "float16": 0.008, "bfloat16": 0.05}
    if variant in ("unfused", "fa", "fa_warps"):
        limits |= {"float16": 0.0015, "bfloat16": 0.005}
    elif variant == "fa_int8":
        limits["float32"] = limits["float16"]  # V and P in float16
    assert share.max() <= limits[dtype]


@pytest.mark.parametrize("variant", VARIANTS)
def test_some_error_reaches_a_twentieth_of_its_bound(variant: str) -> None:
    dtype = VARIANTS[variant].dtypes[0]
    ratios = [
        run_mirror(*distributions.make(name, 1, 2, 32, 256, 64, dtype, seed=1), variant).ratio
        for name in ("normal", "sink")
    ]
    assert max(ratios) >= 0.05


@pytest.mark.parametrize("variant", ["unfused", "fa"])
def test_float32_errors_reach_a_twentieth_of_their_bound(variant: str) -> None:
    """Short sums, where γ_n is not far from what rounding really does."""
    q, k, v = distributions.make("peaky", 1, 2, 64, 64, 5, "float32", seed=1)
    assert run_mirror(q, k, v, variant).ratio >= 0.05


def blocked(
    q: Array, k: Array, v: Array, *, block_kv: int = 16, rescale: bool = True, lost: int = 0
) -> Array:
    """Exact online softmax, with slips to plant."""
    S = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    m = np.full((*S.shape[:-1], 1), -np.inf)
    l, o = np.zeros_like(m), np.zeros(q.shape)  # noqa: E741
    for kv0 in range(0, k.shape[2] - lost, block_kv):
        keys = slice(kv0, min(kv0 + block_kv, k.shape[2] - lost))
        m_old, m = m, np.maximum(m, S[..., keys].max(axis=-1, keepdims=True))
        alpha = np.exp(m_old - m)
        P = np.exp(S[..., keys] - m)
        l = alpha * l + P.sum(axis=-1, keepdims=True)  # noqa: E741
        o = (alpha if rescale else 1.0) * o + P @ v[:, :, keys].astype(np.float64)
    return o / l


FAULTS = {
    "zeros": lambda q, k, v: np.zeros(q.shape),
    "missing rescale of O": lambda q, k, v: blocked(q, k, v, rescale=False),
    "lost last key": lambda q, k, v: blocked(q, k, v, lost=1),
    "keys shifted by one": lambda q, k, v: attention_exact(q, np.roll(k, 1, axis=2), v),
    "two columns of V swapped": lambda q, k, v: attention_exact(q, k, v)[..., ::-1],
    "scale of head_dim + 1": lambda q, k, v: attention_exact(
        q, k, v, scale=(q.shape[-1] + 1) ** -0.5
    ),
    "head 0's keys for every head": lambda q, k, v: attention_exact(q, k[:, :1], v[:, :1]),
    "one row repeated": lambda q, k, v: attention_exact(q, k, v)[:, :, [0, *range(q.shape[2] - 1)]],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("variant", "dtype"), [c for c in CELLS if c[0] != "fa_int8"])
def test_planted_faults_break_the_bound(fault: str, variant: str, dtype: str) -> None:
    q, k, v = distributions.make("normal", 1, 2, 16, 256, 64, dtype, seed=4)
    assert judge(blocked(q, k, v), q, k, v, variant=variant).passed
    assert judge(FAULTS[fault](q, k, v), q, k, v, variant=variant).ratio > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_causal_off_by_one_breaks_the_bound(dtype: str) -> None:
    q, k, v = distributions.make("normal", 1, 1, 256, 256, 64, dtype, seed=4)
    exact = attention_exact(q, k, v, causal=True)
    assert judge(exact, q, k, v, variant="fa_tc", causal=True).passed
    one_more = attention_exact(
        q[:, :, :-1], k, v, causal=True, causal_align="bottom-right"
    )  # row i sees i + 2 keys
    slipped = np.concatenate([one_more, exact[:, :, -1:]], axis=2)
    assert judge(slipped, q, k, v, variant="fa_tc", causal=True).ratio > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_wrong_scale_group_breaks_the_bound(dtype: str) -> None:
    q, k, v = distributions.make("normal", 1, 2, 16, 256, 64, dtype, seed=4)
    quantized = quantize(q, k, v, quant=QuantConfig(granularity_q="token", granularity_k="thread"))
    operands = kernel.kernel_operands(quantized)
    judged = {"variant": "fa_int8", "quantized": quantized}
    assert judge(attention_exact(*operands), q, k, v, **judged).passed
    for name in ("q_scale", "k_scale"):
        wrong = np.roll(getattr(quantized, name), 1, axis=-1)
        fields = {**quantized.__dict__, name: wrong}
        slipped = kernel.kernel_operands(type(quantized)(**fields))
        assert judge(attention_exact(*slipped), q, k, v, **judged).ratio > 1, name


# The inequalities.


@given(seeds, st.floats(-4, 2.2), st.sampled_from(["flat", "peaked", "one huge"]))
def test_softmax_perturbation(seed: int, log_size: float, kind: str) -> None:
    """Random and adversarial perturbations within d; the worst put +d on one side of a channel."""
    rng = np.random.default_rng(seed)
    keys, channels = int(rng.integers(1, 12)), 5
    s = rng.standard_normal(keys) * {"flat": 0.1, "peaked": 10.0, "one huge": 1.0}[kind]
    d = rng.random(keys) * 10.0**log_size
    if kind == "one huge":
        d[rng.integers(keys)] *= 100
    v = rng.standard_normal((keys, channels))
    P = np.exp(s - s.max())
    P /= P.sum()
    o = P @ v
    delta_o, P_plus, delta_lse, Z_minus = softmax_perturbation(P[None], d[None], v, o[None])
    order = np.argsort(v, axis=0)
    candidates = [rng.uniform(-1, 1, keys) * d for _ in range(8)]
    for channel in range(channels):  # all thresholds: the extreme points of a linear fraction
        for cut in range(keys + 1):
            delta = d.copy()
            delta[order[:cut, channel]] *= -1
            candidates += [delta, -delta]
    worst = np.zeros(channels)
    for delta in candidates:
        with np.errstate(over="ignore", invalid="ignore"):
            t = s + delta + rng.standard_normal()  # a shift costs nothing
            W = np.exp(t - t.max())
        p = W / W.sum()
        worst = np.maximum(worst, np.abs(p @ v - o))
        assert (p <= P_plus[0] * (1 + 1e-12)).all()
        log_Z = delta.max() + np.log(P @ np.exp(delta - delta.max()))
        assert abs(log_Z) <= delta_lse[0] * (1 + 1e-12) + 1e-14
        assert log_Z >= math.log(max(Z_minus[0], 1e-300)) - 1e-12 or Z_minus[0] == 0
    slack = 1e-13 * np.abs(v).max()
    assert (worst <= delta_o[0] * (1 + 1e-9) + slack).all()
    target(float((worst / (delta_o[0] + slack)).max()), label="sharpness")


@pytest.mark.parametrize("h", [1e-6, 0.1, 1.0, 5.0])
def test_total_variation_is_sharp(h: float) -> None:
    """Two equally likely halves moved apart by 2h attain tanh(h/2)."""
    v = np.array([[1.0], [0.0]])
    P = np.array([[0.5, 0.5]])
    moved = np.exp([h, -h]) / np.exp([h, -h]).sum()
    assert moved[0] - 0.5 == pytest.approx(math.tanh(h) / 2)
    # Half the mass and the same h: 1/2 (tanh h) is below tanh(h/2), reached at p = 1/(1 + e^h).
    p = np.array([1 / (1 + math.exp(h)), 1 / (1 + math.exp(-h))])
    moved = p * np.exp([h, -h]) / (p * np.exp([h, -h])).sum()
    assert moved[0] - p[0] == pytest.approx(math.tanh(h / 2))
    delta_o, *_ = softmax_perturbation(p[None], np.full((1, 2), h), v, p[None] @ v)
    assert moved[0] - p[0] <= delta_o[0, 0] * (1 + 1e-12)
    assert delta_o[0, 0] <= math.tanh(h / 2) * (1 + 1e-12)
    assert softmax_perturbation(P, np.zeros((1, 2)), v, P @ v)[0].max() == 0


@given(seeds, st.floats(-6, 1))
def test_each_bound_of_a_mean_holds_alone(seed: int, log_size: float) -> None:
    """[L7] and [L8] each, not only the least that `softmax_perturbation` takes."""
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(2, 12))
    s, v = 3 * rng.standard_normal(keys), rng.standard_normal(keys)
    P = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    d = np.full(keys, 10.0**log_size) if rng.random() < 0.5 else rng.random(keys) * 10.0**log_size
    o = P @ v
    spread = np.abs(v - o)
    by_largest = 0.5 * math.expm1(2 * d.max()) * (P @ spread)
    by_key = (P * np.expm1(d)) @ spread / (P @ np.exp(-d))
    signs = [np.where(v > threshold, 1.0, -1.0) for threshold in (*v, o)]
    signs += [-sign for sign in signs] + [rng.uniform(-1, 1, keys) for _ in range(8)]
    worst = 0.0
    for sign in signs:
        moved = P * np.exp(sign * d)
        worst = max(worst, abs(moved @ v / moved.sum() - o))
    assert worst <= by_largest * (1 + 1e-9) + 1e-14
    assert worst <= by_key * (1 + 1e-9) + 1e-14
    known = softmax_perturbation(P[None], d[None], v[:, None], o[None, None])[0][0, 0]
    assert known <= min(by_largest, by_key) * (1 + 1e-9) + 1e-13
    if np.ptp(d) == 0 and log_size < -2:
        assert worst >= 0.9 * by_largest  # attained to first order


@given(seeds, st.floats(-7, -1))
def test_an_error_that_a_row_shares_is_a_shift(seed: int, log_size: float) -> None:
    """[L10]: large scores times 1 + kappa move a softmax by kappa times their differences alone."""
    rng = np.random.default_rng(seed)
    kappa, offset = 10.0**log_size, rng.choice([-1e4, 0.0, 1e4])
    s, v = 4 * rng.standard_normal(9) + offset, rng.standard_normal((9, 3))

    def softmax(x: Array) -> Array:
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

    P = softmax(s)
    d = kappa * (s.max() - s)
    delta_o, P_plus, *_ = softmax_perturbation(P[None], d[None], v, (P @ v)[None])
    for factor in (1 - kappa, 1 + kappa):
        moved = softmax(factor * s)
        assert (np.abs(moved @ v - P @ v) <= delta_o[0] + 1e-11).all()
        assert (moved <= P_plus[0] + 1e-11).all()
    # What `perturb` counts is this, and it does not grow with the offset.
    q, k = np.ones((1, 1, 1, 1), np.float32), (offset + s - s.mean()).astype(np.float32)
    (block,) = score_blocks(q, k[None, None, :, None], k[None, None, :, None], scale=1.0)
    scaling = scores.Scaling(kappa, 0.0, 0.0, 0.0, 1.0)
    n = numerics("float32", "portable", "float32")
    found = scores.perturb(block, n, SMALL_TILES, 1.0, scaling)
    S = block.S[0, 0, 0, 0]
    np.testing.assert_allclose(found.r3[0, 0, 0, 0], kappa * (S.max() - S), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(found.shift[0, 0, 0, 0], kappa * abs(S.max()), rtol=1e-5)


def find_shift(delta: Array, d: Array) -> bool:
    """Whether one shift a per row brings every perturbation within d: |delta - a| <= d."""
    return bool(((delta - d).max(axis=-1) <= (delta + d).min(axis=-1)).all())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [1, 64])
@pytest.mark.parametrize("size", [0.05, 3.0, 100.0])
def test_weights_are_those_of_scores_perturbed_by_d(
    size: float, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2 to R4: P times all later alphas is exp(s + delta), |delta| <= d but for a common shift."""
    correct = rounding.ex2

    def erring(x: Array) -> Array:
        """Too large in alpha, which is one number a row; too small in p."""
        sign = 1.0 if np.asarray(x).ndim == 4 else -1.0
        y = correct(x).astype(np.float64) * (1 + sign * (2.0**-22 - 2.0**-24))
        return np.where(np.asarray(x) == 0, 1.0, y).astype(np.float32)

    monkeypatch.setattr(mirror, "ex2", erring)
    q, k, v = distributions.make("normal", 1, 1, 12, 96, head_dim, dtype, seed=6)
    q = (size * q.astype(np.float32)).astype(dtype)
    k = np.sort(k, axis=2)  # many rises
    tiles = Tiles(16, 4, 1)
    _, steps = attention_mirror(q, k, v, variant="fa", tiles=tiles, trace=True)
    later, weights = 1.0, []
    for step in steps[::-1]:
        weights.append(step.P.astype(np.float64) * later)
        later = later * step.alpha.astype(np.float64)[..., None]
    W = np.concatenate(weights[::-1], axis=-1)
    (block,) = score_blocks(q, k, v)
    n, sigma = numerics("float32", "portable", dtype), head_dim**-0.5
    scaling = scores.scaling_errors(n, sigma, None)
    score = scores.perturb(block, n, tiles, sigma, scaling)
    S, d = block.S[:, :, 0], score.d[:, :, 0]
    kept = W > 2.0**-100
    delta = np.where(kept, np.log(np.where(kept, W, 1.0)) - S, 0.0)
    delta = np.where(kept, delta, np.median(delta))
    assert find_shift(delta, np.where(kept, d, np.inf))
    assert head_dim > 1 or not find_shift(delta, np.where(kept, d / 20, np.inf))


def test_scaling_errors() -> None:
    """R3: three float32 roundings of a dequantised score are covered, and two would not do."""
    rng = np.random.default_rng(0)
    q, k, v = distributions.make("normal", 1, 1, 2, 2, 16, "float16", seed=0)
    n = numerics("int8", "portable", "float16")
    worst = 0.0
    for _ in range(40):
        q_scale = np.float32(1.0 + rng.random() * 2.0**-4)
        quant = QuantConfig(
            granularity_q="tensor", granularity_k="tensor", scales=(float(q_scale), 1.0)
        )
        sigma = float(rng.uniform(0.1, 0.4))
        scaling = scores.scaling_errors(n, sigma, quantize(q, k, v, quant=quant))
        k_scale = rng.uniform(1, 2, 20000).astype(np.float32)
        dot = rng.integers(1, 2**18, 20000)
        row = np.float32(sigma * math.log2(math.e)) * q_scale
        computed = (dot.astype(np.float32) * k_scale * row).astype(np.float64)
        exact = sigma * math.log2(math.e) * float(q_scale) * dot * k_scale.astype(np.float64)
        error = np.abs(computed / exact - 1).max()
        assert error <= (1 + scaling.common) * (1 + scaling.own) - 1
        worst = max(worst, error)
    assert worst > 2.2 * 2.0**-24
    log2e = scores.LOG2E
    for family, constants in (("float32", (0.3 * log2e,)), ("unfused", (0.3, log2e))):
        common = math.prod(float(np.float32(x)) / x for x in constants) - 1
        scaling = scores.scaling_errors(numerics(family, "portable", "float16"), 0.3, None)
        assert abs(common) <= scaling.common <= 2 * 2.0**-24


def test_attended_keys_have_probabilities() -> None:
    """A probability of exp(-1e4) is no mask."""
    q = np.full((1, 1, 3, 1), 100.0, np.float32)
    k = np.array([0.0, -100.0, 0.0], np.float32).reshape(1, 1, 3, 1)
    (block,) = score_blocks(q, k, k, causal=True)
    P = exact_of_block(block)[0]
    assert ((P > 0) == block.admitted).all()


def test_probabilities_that_underflow_count() -> None:
    """Two keys 2000 apart: a perturbation of 1500 each turns them round, though P[1] is 1e-869."""
    P, v = np.array([[1.0, 1e-300]]), np.array([[0.0], [1.0]])
    delta_o, P_plus, delta_lse, _ = softmax_perturbation(P, np.full((1, 2), 1500.0), v, P @ v)
    assert delta_o[0, 0] == 1 and P_plus[0, 1] == 1 and delta_lse[0] == 1500


def test_a_rounded_mean_is_not_taken_for_exact() -> None:
    """P[1] is below float64's resolution of o, and a perturbation of 50 makes it count."""
    s, v = np.array([50.0, 0.0]), np.array([[1.0], [2.0]])
    P = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    d = np.array([[50.0, 0.0]])
    assert (P @ v)[0] == 1.0
    assert softmax_perturbation(P[None], d, v, (P @ v)[None])[0][0, 0] >= 0.5


@given(seeds, st.sampled_from(["float16", "bfloat16"]), st.integers(-150, 100))
def test_half_ulp(seed: int, fmt: str, exponent: int) -> None:
    x = np.random.default_rng(seed).uniform(0.5, 2, 50) * 2.0**exponent
    x = np.minimum(x, FINITE_MAX[fmt]).astype(np.float32).astype(np.float64)
    error = np.abs(round_to(x, fmt).astype(np.float64) - x)
    assert (error <= half_ulp(x, fmt)).all()
    assert (error <= half_ulp(x * 1.5, fmt)).all()
    ties = np.array([1 + 2.0**-11, 1 + 2.0**-8, 2.0**-26, 2.0**-134, 1e-45])
    error = np.abs(round_to(ties, fmt).astype(np.float64) - ties)
    assert (error <= half_ulp(ties, fmt)).all()


@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_gamma(n: int) -> None:
    u = 2.0**-24
    assert (1 + u) ** n - 1 <= gamma(n, u) and (1 - u) ** -n - 1 <= gamma(n, u) * (1 + 1e-12)
    assert gamma(n, u) <= n * u * (1 + 2 * n * u)


@given(seeds)
def test_rises_are_counted(seed: int) -> None:
    """R4: at least as many steps as those at which the mirror's alpha is no 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 1, 9, 4)) for _ in range(3))
    k = np.sort(k, axis=2) if rng.random() < 0.3 else np.round(np.tile(k, (1, 1, 6, 1)))
    q, k = q.astype(np.float32), k.astype(np.float32)
    v = np.resize(v, k.shape).astype(np.float32)
    tiles = Tiles(16, int(rng.integers(1, 9)), 1)
    _, steps = attention_mirror(q, k, v, variant="fa", tiles=tiles, trace=True)
    rescaled = sum((step.alpha != 1) & (step.alpha != 0) for step in steps)
    S = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * 0.5
    known = np.full(S.shape, 1e-5)
    after, rises, running, drift = scores.count_rises(
        S, known, np.ones(S.shape, bool), tiles.block_kv
    )
    np.testing.assert_allclose(drift, 1e-5, rtol=1e-9)
    assert (rises >= rescaled).all() and (after[..., 0] == rises).all()
    assert (after[..., -1] == 0).all() and (running[..., -1] == S.max(axis=-1)).all()


def test_one_maximum_for_all_exponents_telescopes() -> None:
    """R4: alpha from the M that stands in the exponents loses nothing at logits of 1e4."""
    rng = np.random.default_rng(0)
    c = np.float32(np.log2(np.e) / 8)
    m = np.sort(rng.uniform(5e4, 8e4, 40).astype(np.float32))  # dots: logits up to 1e4
    m[1:] = m[0] + np.cumsum(rng.uniform(0, 1, 39)).astype(np.float32)
    M = m * c
    weight_shared = np.prod(np.exp2((M[:-1] - M[1:]).astype(np.float64)))
    weight_naive = np.prod(np.exp2(((m[:-1] - m[1:]) * c).astype(np.float64)))
    exact = np.exp2(float(M[0]) - float(M[-1]))
    assert abs(weight_shared / exact - 1) < 1e-6 < 1e-5 < abs(weight_naive / exact - 1)


# J3.


@given(seeds, st.sampled_from(("float16", "bfloat16", "float32")), st.floats(0.05, 2.0))
def test_static_scales_that_clip_are_within_their_bound(
    seed: int, dtype: str, share: float
) -> None:
    """R1: where values lie past 127 scales, the clipped part is in the bound."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 2, 20, 16)).astype(STORAGE[dtype]) for _ in range(3))
    scale = share * 4.0 / 127
    quant = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(scale, scale))
    quantized = quantize(q, k, v, quant=quant)
    o = attention_exact(*kernel.kernel_operands(quantized))
    report = judge(o, q, k, v, variant="fa_int8", quantized=quantized)
    assert report.quantisation is not None and report.quantisation <= 1


def test_lse_pays_for_the_mean_that_codes_of_q_meet() -> None:
    """R1: equal keys have no error once centred; their mean meets the codes of q in lse."""
    q, k, v = distributions.make("normal", 1, 1, 20, 30, 16, "float16", seed=0)
    k[...] = np.round(40 * k[:, :, :1])
    quantized = quantize(q, k, v)
    bound = quantised.quantisation(q, k, v, quantized)
    exact = attention_exact(q, k, v, return_lse=True)
    operands = attention_exact(*quantized.dequantize("float64"), return_lse=True)
    error = np.abs(operands[1] - exact[1])
    assert (error <= bound.lse).all() and error.max() > 0.1 * bound.lse.max()
    assert error.max() > 1e-3 and bound.total.max() < 1e-3 * np.abs(v).max()


def test_quantisation_bound_shrinks_with_the_groups() -> None:
    q, k, v = distributions.make("outlier", 1, 1, 64, 128, 64, "float16", seed=0)
    totals = []
    for granularity in ("tensor", "block", "token"):
        quant = QuantConfig(granularity_q=granularity, granularity_k=granularity)
        quantized = quantize(q, k, v, quant=quant, tiles=SMALL_TILES)
        totals.append(np.median(quantised.quantisation(q, k, v, quantized).total))
    assert totals[0] > totals[1] > totals[2]


# The form of a Bound.


def test_terms_sum_to_the_total_and_rows_select() -> None:
    q, k, v = distributions.make("normal", 2, 4, 33, 40, 16, "float16", seed=0, heads_kv=2)
    whole = kernel.attention(q, k, v, variant="fa_tc", causal=True)
    assert tuple(whole.terms) == kernel.TERMS and whole.total.shape == q.shape
    assert all((term >= 0).all() for term in whole.terms.values())
    np.testing.assert_allclose(sum(whole.terms.values()), whole.total)
    assert whole.lse.shape == q.shape[:3]
    rows = np.array([32, 0, 7])
    some = kernel.attention(q, k, v, variant="fa_tc", causal=True, rows=rows)
    np.testing.assert_allclose(some.total, whole.total[:, :, rows], rtol=1e-9)
    np.testing.assert_allclose(some.lse, whole.lse[:, :, rows], rtol=1e-9)


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_terms_follow_numerics(variant: str, dtype: str) -> None:
    """A rounding point that a kernel does not have costs nothing."""
    q, k, v = distributions.make("normal", 1, 1, 16, 48, 16, dtype, seed=0)
    quantized = quantize(q, k, v) if variant == "fa_int8" else None
    terms = kernel.attention(q, k, v, variant=variant, quantized=quantized).terms
    assert (terms["R5"].max() > 0) == (variant in ("fa_tc", "fa_int8"))
    assert terms["R2"].max() > 0 and terms["R4"].min() > 0 and terms["R6"].min() > 0
    if variant == "fa_int8":
        assert terms["R2"].max() < 1e-12  # float64's own share


def test_rows_without_keys_have_no_error() -> None:
    q, k, v = distributions.make("normal", 1, 1, 8, 3, 16, "float16", seed=0)
    bound = kernel.attention(q, k, v, causal=True)  # rows 0 to 4 see nothing
    assert (bound.total[:, :, :5] == 0).all() and (bound.lse[:, :, :5] == 0).all()
    assert (bound.total[:, :, 5:] > 0).all()
    nothing = kernel.attention(q, k[:, :, :0], v[:, :, :0])
    assert nothing.total.shape == q.shape and not nothing.total.any() and not nothing.lse.any()


def test_one_key_costs_only_sums_and_store() -> None:
    """With one key, o = v whatever the score: R2 to R4 have nothing to perturb."""
    q, k, v = distributions.make("normal", 1, 1, 4, 1, 16, "float32", seed=0)
    terms = kernel.attention(1000 * q, k, v).terms
    assert max(terms[tag].max() for tag in ("R2", "R3")) < 1e-30
    assert terms["R4"].max() < 1e-30


def test_nothing_is_promised_where_numbers_are_not_finite() -> None:
    q, k, v = distributions.make("normal", 1, 1, 4, 6, 8, "float32", seed=0)
    k[0, 0, 5, 0] = np.nan
    total = kernel.attention(q, k, v, causal=True).total  # rows 0..3 see keys 0..2, .. 0..5
    assert np.isfinite(total[0, 0, :3]).all() and np.isinf(total[0, 0, 3]).all()
    k[0, 0, 5, 0] = 0
    v[0, 0, 5, 1] = np.inf
    total = kernel.attention(q, k, v).total
    assert np.isinf(total[..., 1]).all() and np.isfinite(total[..., 0]).all()


def test_nothing_is_promised_past_the_range() -> None:
    """A score of 2^27 in log2 units, beyond which exp2(S c - M) may overflow; values of 2^125."""
    q, k, v = distributions.make("normal", 1, 1, 4, 6, 8, "float32", seed=0)
    bound = kernel.attention(1e5 * q, 1e5 * k, v)
    assert np.isinf(bound.total).any() and np.isinf(bound.terms["R4"]).any()
    x = np.full((1, 1, 4, 8), 2.0**125, STORAGE["bfloat16"])
    bound = kernel.attention(0 * x, 0 * x, x, variant="fa_tc")
    assert np.isinf(bound.terms["R7"]).all()


@pytest.mark.parametrize("variant", ["unfused", "fa", "fa_warps", "fa_tc"])
def test_values_as_large_as_float16_has_are_promised_to_be_finite(variant: str) -> None:
    x = np.full((1, 1, 4, 8), 65504.0, np.float16)
    total = kernel.attention(0 * x, x, x, variant=variant).total
    assert total.max() < 100  # of 65504: what P in 16 bits may take from it, and a step


def test_operands_must_fit_the_numerics() -> None:
    q, k, v = distributions.make("normal", 1, 1, 4, 6, 8, "float16", seed=0)
    with pytest.raises(ValueError, match="fa_int8 works on quantised operands: give"):
        kernel.attention(q, k, v, variant="fa_int8")
    with pytest.raises(TypeError, match="quantized"):
        kernel.attention(None, None, None)
    with pytest.raises(ValueError, match="fa_tc works on q, k and v as they are: leave"):
        kernel.attention(q, k, v, variant="fa_tc", quantized=quantize(q, k, v))
