"""Attention in float64 for `experiments.accuracy.fuzz`: scores, codes, and how far a result may be
off.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from experiments._harness.fuzz_cases import DTYPES, Case, Wrong

#: Largest relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
#: Keys whose scores lie further below the maximum have no weight in float32.
REACH = 120.0
#: Float32 scores of this many times the scores before the bias are the bias alone.
ABSORBED = 2.0**26


def near(name: str, found: np.ndarray, exact: np.ndarray, limit: Any) -> None:
    """Raise Wrong unless every element lies within its limit."""
    if found.shape != exact.shape:
        raise Wrong(f"{name} has shape {found.shape}, not {exact.shape}")
    with np.errstate(invalid="ignore"):
        bad = ~(abs(found - exact) <= limit) & ~(found == exact)
    if bad.any():
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        limit = np.broadcast_to(limit, exact.shape)[where]
        raise Wrong(f"{name}{list(where)} = {found[where]}, exactly {exact[where]} +- {limit}")


def f64(x: np.ndarray) -> np.ndarray:
    """Return x as float64."""
    return x.astype(np.float32).astype(np.float64)  # bfloat16 has no other way


def softmax(S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P and lse; a row of -inf is 0 and -inf."""
    top = S.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(S - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total == 0, 1, total), (top + np.log(total))[..., 0]


def by_query_head(x: np.ndarray, heads: int) -> np.ndarray:
    """Return keys or values (batch, heads_kv, ...) once for every query head."""
    return np.repeat(x, heads // x.shape[1], axis=1)


@dataclass
class Scoring:
    """Options that change the scores of a call, in float64."""

    scale: float
    softcap: float = 0.0
    bias: np.ndarray | None = None
    kept: np.ndarray | None = None
    causal: bool = False
    top_left: bool = False
    window: tuple[int, int] = (-1, -1)
    given: dict[str, Any] = field(default_factory=dict)
    alone: Any = False

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
        """Return scores of float64 operands, their largest sum of terms, and the slope.

        Leaves in `alone` where a score is its bias alone.
        """
        k = by_query_head(k, q.shape[1])
        S = q @ k.swapaxes(2, 3) * self.scale
        size = float((abs(q) @ abs(k).swapaxes(2, 3) * abs(self.scale)).max(initial=0))
        slope = np.ones_like(S)
        if self.softcap:
            capped = np.tanh(S / self.softcap)
            S, slope = self.softcap * capped, 1 - capped**2
            size += self.softcap
        if self.bias is not None:
            # NOTE: beside a bias whose float32 spacing exceeds them, scores vanish.
            self.alone = abs(self.bias) >= ABSORBED * (abs(S) + 2.0**-20 * size)
            S = np.where(self.alone, self.bias, S + self.bias)
        if self.kept is not None:
            S = np.where(self.kept, S, -np.inf)
        return np.where(self.admitted(*S.shape[2:]), S, -np.inf), size, slope

    def admitted(self, len_q: int, len_kv: int) -> np.ndarray:
        """Return where causal masks and windows let a row attend."""
        shift = 0 if self.top_left else len_kv - len_q
        at = np.arange(len_kv) - np.arange(len_q)[:, None] - shift
        left, right = self.window
        right = 0 if self.causal else right
        good: np.ndarray = (left < 0) | (at >= -left)
        if right >= 0:
            good = good & (at <= right)
        return np.broadcast_to(good, (len_q, len_kv))

    def entry(self, number: int, len_q: int, len_kv: int) -> Scoring:
        """Return that of one packed sequence."""
        bias, kept = (x if x is None else x[number : number + 1, :, :len_q, :len_kv]
                      for x in (self.bias, self.kept))  # fmt: skip
        return replace(self, bias=bias, kept=kept)


def row_error(S: np.ndarray, size: float, alone: Any = False) -> np.ndarray:
    """Return how far float32 may put the scores of each row apart, (..., 1).

    Rows whose float32 scores are one large bias, the same for all keys in reach, have no error.
    """
    top = S.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        counts = np.isfinite(S) & (top - S < REACH)
    largest = np.where(counts, abs(S), 0).max(-1, keepdims=True, initial=0)
    flat = (((top == S) & alone) | ~counts).all(-1, keepdims=True)
    return np.where(flat, 0.0, np.minimum(2.0**-20 * (largest + size), 1.0))


def limits(
    S: np.ndarray, size: float, v: np.ndarray, dtype: str, off: Any = 0.0, alone: Any = False
) -> np.ndarray:
    """Return how far a row of O may be: rounding of scores in float32, of P and O in their type."""
    error = np.minimum(row_error(S, size, alone) + off, 1.0)
    most = abs(v).max(axis=(2, 3), keepdims=True, initial=0)
    limit: np.ndarray = most * (np.expm1(2 * error) + 8 * ROUNDING[dtype] + 2.0**-18)
    return limit + 2.0**-22


def check_hull(o: np.ndarray, S: np.ndarray, v: np.ndarray, slack: float) -> None:
    """Raise Wrong where a row of O is no mean of values that its keys may have."""
    if not v.size or not o.size:
        return
    least, most = v.min(2, keepdims=True), v.max(2, keepdims=True)
    some = np.isfinite(S).any(-1, keepdims=True)
    room = slack * (abs(v).max() + 2.0**-14)
    bad = some & ~((o >= least - room) & (o <= most + room))
    if bad.any():
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        raise Wrong(f"o{list(where)} = {o[where]} lies outside the values of its keys")


def draw_scoring(
    case: Case, shape: tuple[int, int, int, int], head_dim: int, *, packed: bool = False,
    blocks: bool = True,
) -> Scoring:  # fmt: skip
    """Draw what changes scores of a shape (batch, heads, len_q, len_kv)."""
    batch, heads, len_q, len_kv = shape
    config = case.config
    given: dict[str, Any] = {}
    made = Scoring(head_dim**-0.5, given=given)
    if case.chance(0.2):
        made.scale = given["scale"] = case.pick(0.3, 0.3, 1.0, 1.0, 2.0**-30, 0.0)
    if config.chance(0.15):
        made.softcap = given["softcap"] = 5.0
    if config.chance(0.35):
        kind = config.pick("float32", "float16", "bfloat16")
        sizes = case.pick(1, batch), case.pick(1, heads), case.pick(1, len_q), len_kv
        bias = case.normal(*sizes, dtype=kind, size=case.pick(1.0, 30.0)).copy()
        least = float(np.finfo(np.float32).min) if kind == "float32" else float(
            ml_dtypes.finfo(DTYPES[kind]).min)  # fmt: skip
        if case.backend == "cuda":  # Hopper forms count what overflows as -inf: tests/hopper
            least *= min(made.scale, 1.0) / 2
        hidden = case.pick(-1e4, -1e9 if kind != "float16" else -6e4, least, least, -least, -np.inf)
        bias[case.rng.random(sizes) < case.pick(0.3, 0.3, 0.9, 1.0)] = hidden
        if case.chance(0.3):
            bias[case.rng.random(sizes) < 0.2] = -np.inf
        given["bias"] = case.sent(bias)
        made.bias = np.broadcast_to(f64(bias), shape)
    kept = []
    if config.chance(0.25):
        mask = case.rng.random((case.pick(1, batch), 1, case.pick(1, len_q), len_kv)) < 0.7
        short = not packed and mask.shape[:2] == (1, 1) and case.chance(0.5)
        given["mask"] = case.sent(mask[0, 0] if short else mask)
        kept.append(np.broadcast_to(mask, shape))
    if blocks and config.chance(0.15):
        sizes_of = config.pick((64, 64), (128, 64), (128, 128))
        counts = (case.pick(1, batch), case.pick(1, heads),
                  *(-(-n // b) for n, b in zip(shape[2:], sizes_of, strict=True)))  # fmt: skip
        block = case.rng.random(counts) < 0.7
        given["block_mask"] = ca.BlockMask(block, *sizes_of)
        dense = block.repeat(sizes_of[0], 2)[:, :, :len_q].repeat(sizes_of[1], 3)[..., :len_kv]
        kept.append(np.broadcast_to(dense, shape))
    if kept:
        made.kept = np.logical_and.reduce(kept)
    given["causal_align"] = case.pick("bottom-right", "top-left")
    made.top_left = given["causal_align"] == "top-left"
    if config.chance(0.35):
        made.causal = given["causal"] = True
    if config.chance(0.2):
        sides = config.pick((True, False), (False, True), (True, True))
        made.window = given["window"] = (case.pick(2, 9, 70) if sides[0] else -1,
                                         case.pick(0, 5, 40) if sides[1] else -1)  # fmt: skip
    return made


@dataclass
class Turning:
    """Preparation of the rows of Q and K before the scores, in float64."""

    given: dict[str, Any]
    angles: tuple[np.ndarray, np.ndarray] | None = None
    offset: int = 0
    interleaved: bool = False
    weights: tuple[np.ndarray, np.ndarray] | None = None
    eps: float = 1e-6
    by_token: bool = False

    @property
    def changes(self) -> bool:
        """Whether rows are changed at all."""
        return self.angles is not None or self.weights is not None

    def of(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return Q and K prepared."""
        one, other = (None, None) if self.weights is None else self.weights
        return self._rows(q, one, self.offset), self._rows(k, other, 0)

    def _rows(self, x: np.ndarray, weight: np.ndarray | None, start: int) -> np.ndarray:
        if weight is not None:
            mean = (x * x).mean((-3, -1) if self.by_token else -1, keepdims=True)
            x = x / np.sqrt(mean + self.eps) * weight.reshape(-1, 1, x.shape[-1])
        if self.angles is None:
            return x
        cos, sin = (a[start : start + x.shape[2]] for a in self.angles)
        half = x.shape[-1] // 2
        pairs = ((slice(0, None, 2), slice(1, None, 2)) if self.interleaved
                 else (slice(0, half), slice(half, None)))  # fmt: skip
        y = np.empty_like(x)
        first, second = (x[..., p] for p in pairs)
        y[..., pairs[0]] = first * cos - second * sin
        y[..., pairs[1]] = second * cos + first * sin
        return y


def draw_turning(case: Case, q: tuple[int, ...], k: tuple[int, ...]) -> Turning:
    """Draw tables of rope and weights of a norm for operands of these shapes."""
    config, dim, given = case.config, q[3], dict[str, Any]()
    made = Turning(given)
    odd = dim % 2 == 1 and config.chance(0.9)  # which is refused
    if config.chance(0.2) and not odd:
        made.offset = case.pick(0, 0, 3, 40)
        made.interleaved = config.chance(0.5)
        kind = case.pick(*DTYPES)
        count = max(made.offset + q[2], k[2]) + case.pick(0, 2)
        angle = case.rng.uniform(-4, 4, (count, dim // 2))
        tables = tuple(f(angle).astype(DTYPES[kind]) for f in (np.cos, np.sin))
        given.update(rope=tuple(map(case.sent, tables)), rope_offset_q=made.offset,
                     rope_interleaved=made.interleaved)  # fmt: skip
        if dim % 2 == 0:
            made.angles = f64(tables[0]), f64(tables[1])
    if config.chance(0.1) and not odd:
        kind, made.by_token = case.pick(*DTYPES), config.chance(0.3)
        shapes = ((n * dim,) if made.by_token else case.pick((dim,), (n, dim))
                  for n in (q[1], k[1]))  # fmt: skip
        weights = tuple((1 + 0.3 * case.rng.standard_normal(shape)).astype(DTYPES[kind])
                        for shape in shapes)  # fmt: skip
        given["qk_norm"] = tuple(map(case.sent, weights))
        made.weights = f64(weights[0]), f64(weights[1])
    return made


def draw_quant(case: Case, q: np.ndarray, k: np.ndarray, softcap: bool) -> Any:
    """Draw how operands, prepared and in float64, are quantised."""
    config = case.config
    parts: dict[str, Any] = {
        "granularity_q": config.pick("thread", "thread", "token", "head", "block", "tensor"),
        "granularity_k": config.pick("thread", "thread", "token", "head", "block", "tensor"),
        "pv": config.pick("16bit", "16bit", "int8", "fp8"),
        "smooth_k": not softcap and config.chance(0.7),
    }
    kind = config.pick("", "", "zero points", "4 bits", "static", "fused")
    if kind == "zero points":
        parts["symmetric"] = False
    elif kind == "4 bits":
        parts["qk_bits"] = 4
    elif kind == "fused":
        parts |= {"fused": True, "smooth_k": False, "pv": "16bit"}
        parts |= {f"granularity_{x}": config.pick("thread", "token") for x in "qk"}
    elif kind == "static":
        parts |= dict.fromkeys(("granularity_q", "granularity_k"), config.pick("tensor", "head"))
        steps = [max(float(abs(x).max(initial=0)), 1e-3) * much * case.pick(1, 1.7) / 127
                 for x, much in ((q, 1.01), (k, 2.02))]  # fmt: skip
        if parts["granularity_q"] == "head":
            steps = [np.full((case.pick(1, x.shape[0]), x.shape[1], 1), step, np.float32)
                     for x, step in zip((q, k), steps, strict=True)]  # fmt: skip
        parts["scales"] = tuple(steps)
    if parts["pv"] == "int8":
        parts["p_type"] = config.pick("u8", "s8")
    if parts["pv"] != "16bit":
        parts |= {"granularity_v": config.pick("block", "channel"), "smooth_v": config.chance(0.6)}
    return ca.QuantConfig(**parts)


def on_host(z: Any) -> Any:
    """Return quantised operands with NumPy arrays, 8-bit codes."""
    names = [n for n, x in vars(z).items() if hasattr(x, "get")]
    return (replace(z, **{n: getattr(z, n).get() for n in names}) if names else z).unpacked()


def dequantised(z: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what codes on the host stand for, with their means: written apart from the library."""

    def rows(codes: np.ndarray, scale: np.ndarray, zero: Any, group: int) -> np.ndarray:
        at = np.arange(codes.shape[2]) // group
        less = 0 if zero is None else zero.astype(np.float64)[..., at][..., None]
        found: np.ndarray = (codes - less) * scale.astype(np.float64)[..., at][..., None]
        return found

    q = rows(z.q_codes.astype(np.float64), z.q_scale, z.q_zero, z.group_q)
    k = rows(z.k_codes.astype(np.float64), z.k_scale, z.k_zero, z.group_kv)
    if z.k_mean is not None:
        k = k + z.k_mean.astype(np.float64)[:, :, None]
    if z.v is not None:
        return q, k, f64(z.v)
    key = np.arange(z.k_codes.shape[2])
    n, t, j = key % 16 // 8, key % 8 // 2, key % 2
    codes = z.v_codes[..., key // 16 * 16 + 4 * t + 2 * n + j].swapaxes(2, 3)
    e4m3 = z.config.pv == "fp8"
    v = f64(codes.copy().view(ml_dtypes.float8_e4m3fn)) if e4m3 else codes.astype(np.float64)
    if z.v_zero is not None:
        v = v - z.v_zero.astype(np.float64)[:, :, key // z.group_v]
    v = v * z.v_scale.astype(np.float64)[:, :, key // z.group_v]
    if z.v_mean is not None:
        v = v + z.v_mean.astype(np.float64)[:, :, None]
    return q, k, v
