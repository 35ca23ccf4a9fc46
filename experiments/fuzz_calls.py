"""The calls that `experiments.fuzz` makes, and what judges them.

Every expected value is computed here in float64. The library's own bound is the tolerance of INT8
attention alone, against attention of the codes as they are dequantised here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn import unfused
from cupyattn.diffusion import key_importance
from cupyattn.ops.explain import kernel_form

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
#: Largest relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
#: The library, whose calls are made with arguments of any kind.
api: Any = ca
#: Keys whose scores lie further below the maximum have no weight in float32.
REACH = 120.0
#: Float32 scores of this many times the scores before the bias are the bias alone.
ABSORBED = 2.0**26
VARIANTS = ("auto", "unfused", "fa", "fa_warps", "fa_tc", "fa_tc", "fa_int8", "fa_int8")
HEAD_DIMS = (8, 16, 33, 64, 80, 128)
LENGTHS_Q = (0, 1, 7, 16, 33, 65, 100, 130)
LENGTHS_KV = (0, 1, 5, 17, 64, 70, 129, 200)


class Wrong(Exception):
    """A result outside its limit, or memory that was changed."""


@dataclass(frozen=True)
class Setup:
    """How cases are drawn: what a case depends on beside its function and number."""

    seed: int = 0
    backend: str = "mirror"
    #: Compile-time configurations of each function.
    pool: int = 2000


class Case:
    """One call: random choices, arrays that must not change, and where they are sent."""

    def __init__(self, setup: Setup, function: int, number: int) -> None:
        self.rng = np.random.default_rng([setup.seed, function, number])
        self.backend = setup.backend
        #: What decides which kernels are compiled, drawn from a pool that cases share.
        self.slot = int(self.rng.integers(setup.pool))
        self.config = Draws(np.random.default_rng([setup.seed, function, self.slot, 1]))
        self.aligned = setup.backend != "mirror" and self.config.chance(0.7)
        #: Counted under this name beside the function's.
        self.rung = ""
        self._draws = Draws(self.rng)
        self.pick, self.chance = self._draws.pick, self._draws.chance
        self._held: list[Callable[[], bool]] = []
        self._hosts: dict[int, tuple[Any, np.ndarray]] = {}

    @property
    def small(self) -> bool:
        """Whether shapes are those that the interpreter takes in a second."""
        return self.backend == "interpret"

    def normal(self, *shape: int, dtype: str = "float16", size: float = 1.0) -> np.ndarray:
        """Return random numbers, sometimes the same along an axis with a stride of 0."""
        drawn = list(shape)
        if len(shape) > 2 and self.chance(0.15):
            axis = self.pick(*range(len(shape) - 1))
            drawn[axis] = min(1, shape[axis])
        found = (size * self.rng.standard_normal(drawn)).astype(DTYPES[dtype])
        return np.broadcast_to(found, shape)

    def placed(self, x: np.ndarray) -> np.ndarray:
        """Return the same values with other strides or at another address, in NaN padding."""
        once = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None)
                     for s, n in zip(x.strides, x.shape, strict=True))  # fmt: skip
        if x.size and slice(0, 1) in once:
            return np.broadcast_to(self.placed(x[once].copy()), x.shape)
        how = self.pick("plain", "plain", "odd", "reversed", "sliced", "transposed", "padded")
        if how == "padded" and self.aligned:
            how = "plain"
        if how == "odd":
            memory = np.full(x.nbytes + 32, 0xFF, np.uint8)
            y: np.ndarray = np.ndarray(x.shape, x.dtype, memory.data, int(self.rng.integers(1, 16)))
            y[...] = x
            return y
        if x.ndim < 2 or how == "plain":
            return x.copy()
        if how == "reversed":
            return x[..., ::-1, :].copy()[..., ::-1, :]
        if how == "sliced":
            whole = np.full((*x.shape[:-1], 2 * x.shape[-1]), _fill(x.dtype), x.dtype)
            whole[..., ::2] = x
            return whole[..., ::2]
        if how == "transposed":
            return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        return in_padding(x)

    def sent(self, x: np.ndarray, *, turned: bool = False) -> Any:
        """Return what the call is given for x, and hold it to staying the same.

        With `turned` the call is given axes 1 and 2 exchanged.
        """
        return self._hold(self.placed(x.swapaxes(1, 2) if turned else x))

    def like(self, sent: Any, x: np.ndarray) -> Any:
        """Return other values in memory of the same form."""
        given = self._hosts[id(sent)][1]
        if not given.size or 0 in given.strides:
            return sent
        low, high = np.lib.array_utils.byte_bounds(given)
        room = np.full(high - low + 32, 0xFF, np.uint8)
        start = (low - room.ctypes.data) % 16 + given.ctypes.data - low
        y: np.ndarray = np.ndarray(given.shape, given.dtype, room.data, start, given.strides)
        y[...] = x
        return self._hold(y)

    def values(self, sent: Any) -> np.ndarray:
        """Return the host's array behind one that was sent."""
        return self._hosts[id(sent)][1]

    def _hold(self, x: np.ndarray) -> Any:
        if self.backend != "cuda":
            before = x.tobytes()
            self._held.append(lambda: x.tobytes() == before)
            self._hosts[id(x)] = x, x
            return x
        y, room, raw = on_device(x)
        self._held.append(lambda: room.get().tobytes() == raw)
        self._hosts[id(y)] = y, x
        return y

    def receiver(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, bool]:
        """Return memory for a result within other memory, and whether its elements are aligned."""
        how = self.pick("plain", "padded", "odd")
        if how == "padded" and self.aligned:
            how = "plain"
        x = np.zeros(shape, DTYPES[dtype])
        if how == "padded":
            x = in_padding(x)
        elif how == "odd":
            memory = np.full(x.nbytes + 32, 0xFF, np.uint8)
            x = np.ndarray(x.shape, x.dtype, memory.data, self.pick(1, 3, 5))
        if self.backend != "cuda":
            if how == "padded":
                base: Any = x.base
                before = base.copy()
                around = np.ones(base.shape, bool)
                around[..., : x.shape[-2], 2 : 2 + x.shape[-1]] = False
                self._held.append(
                    lambda: base[around].tobytes() == before[around].tobytes()
                )  # fmt: skip
            return x, how != "odd" or not x.size
        y, room, _ = on_device(x)
        inside = on_host_bytes(x)
        start = y.data.ptr - room.data.ptr
        around_bytes = np.ones(room.size, bool)
        around_bytes[(start + inside).reshape(-1)] = False
        kept = room.get()[around_bytes].tobytes()
        self._held.append(lambda: room.get()[around_bytes].tobytes() == kept)
        return y, how != "odd" or not x.size

    def host(self, x: Any) -> np.ndarray:
        """Return a result as float64."""
        x = x.get() if hasattr(x, "get") else x
        return np.asarray(x.astype(np.float32) if x.dtype.name == "bfloat16" else x, np.float64)

    def options(self) -> dict[str, Any]:
        """Return the backend of a call on NumPy arrays."""
        return {} if self.backend == "cuda" else {"backend": self.backend}

    def check_inputs(self) -> None:
        """Raise Wrong if an input, or memory around a result, has changed."""
        if not all(same() for same in self._held):
            raise Wrong("an input, or memory around the result, was changed")


class Draws:
    """Random choices."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def pick(self, *choices: Any) -> Any:
        """Return one of several choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        """Return True in this share of all cases."""
        return bool(self.rng.random() < share)


def _fill(dtype: Any) -> Any:
    return np.nan if dtype.kind in "fV" else 0


def in_padding(x: np.ndarray) -> np.ndarray:
    """Return the same values within a larger array of NaN."""
    whole = np.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3), _fill(x.dtype), x.dtype)
    whole[..., :-1, 2:-1] = x
    return whole[..., :-1, 2:-1]


def on_host_bytes(x: np.ndarray) -> np.ndarray:
    """Return where each byte of x lies, counted from its first element."""
    found = np.zeros((), np.int64)
    for count, stride in zip((*x.shape, x.itemsize), (*x.strides, 1), strict=True):
        found = found[..., None] + np.arange(count) * stride
    return found


def on_device(x: np.ndarray) -> tuple[Any, Any, bytes]:
    """Return a copy with the same strides and alignment, the memory around it, and its bytes."""
    import ctypes

    import cupy

    low, high = np.lib.array_utils.byte_bounds(x) if x.size else (x.ctypes.data, x.ctypes.data)
    raw = np.full(high - low + 48, 0xFF, np.uint8)
    pad = 16 + low % 16
    if high > low:
        raw[pad : pad + high - low] = np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
    room = cupy.asarray(raw)
    start = pad + x.ctypes.data - low
    y = cupy.ndarray(x.shape, x.dtype, room.data + start, strides=x.strides)
    return y, room, raw.tobytes()


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
    """What becomes of the scores of a call, in float64."""

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
    """What becomes of the rows of Q and K before the scores, in float64."""

    given: dict[str, Any]
    angles: tuple[np.ndarray, np.ndarray] | None = None
    offset: int = 0
    interleaved: bool = False
    weights: tuple[np.ndarray, np.ndarray] | None = None
    eps: float = 1e-6

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
            mean = (x * x).mean(-1, keepdims=True)
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
        kind = case.pick(*DTYPES)
        weights = tuple((1 + 0.3 * case.rng.standard_normal(case.pick((dim,), (n, dim))))
                        .astype(DTYPES[kind]) for n in (q[1], k[1]))  # fmt: skip
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


def lengths(case: Case) -> tuple[int, int]:
    """Draw how many queries and keys there are."""
    count = 6 if case.small else 8
    return case.pick(*LENGTHS_Q[:count]), case.pick(*LENGTHS_KV[:count])


def operands(
    case: Case, dtypes: Sequence[str] = tuple(DTYPES), dims: Sequence[int] = HEAD_DIMS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw Q, K and V."""
    dtype = case.config.pick(*dtypes)
    dim = case.config.pick(*(dims[:4] if case.small else dims))
    batch, heads_kv, group = case.pick(1, 2), case.pick(1, 2), case.pick(1, 1, 3)
    len_q, len_kv = lengths(case)
    size = case.pick(1.0, 1.0, 4.0)
    q = case.normal(batch, heads_kv * group, len_q, dim, dtype=dtype, size=size)
    k = case.normal(batch, heads_kv, len_kv, dim, dtype=dtype, size=size)
    return q, k, case.normal(batch, heads_kv, len_kv, dim, dtype=dtype)


class Attention:
    """A call of attention that has been drawn, and its judgement."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # NOTE: one rung after another, so that a small pool has all of them.
        self.variant = VARIANTS[case.slot % len(VARIANTS)]
        case.rung = self.variant
        dtypes = tuple(DTYPES)
        if self.variant in ("fa_tc", "fa_warps") and case.config.chance(0.97):
            known = ca.VARIANTS[self.variant].dtypes
            dtypes = tuple(d for d in dtypes if d in known)
        self.q, self.k, self.v = operands(case, dtypes)
        shape = (*self.q.shape[:3], self.k.shape[2])
        self.scoring = draw_scoring(case, shape, self.q.shape[3])
        self.turning = draw_turning(case, self.q.shape, self.k.shape)
        self.given: dict[str, Any] = {**self.scoring.given, **self.turning.given}
        if self.variant == "fa_int8":
            prepared = self.turning.of(f64(self.q), f64(self.k))
            self.quant = draw_quant(case, *prepared, bool(self.scoring.softcap))
            self.given["quant"] = self.quant
        self.bshd = case.chance(0.2)
        self.sent = [case.sent(x, turned=self.bshd) for x in (self.q, self.k, self.v)]
        self.options = {"variant": self.variant, "return_lse": True, **self.given,
                        **case.options()}  # fmt: skip

    def bhsd(self, x: Any) -> Any:
        """Return a view in the layout of the judgement, or back."""
        return x.swapaxes(1, 2) if self.bshd else x

    def codes(self, sent: Sequence[Any]) -> Any:
        """Return the operands quantised by the library, as the call does it."""
        names = ("quant", "rope", "rope_offset_q", "rope_interleaved", "qk_norm")
        options = {n: self.given[n] for n in names if n in self.given}
        # NOTE: NumPy sums a mean in the order of memory, and attention copies such operands.
        tidy = [x if self.case.backend == "cuda" or x.strides[-1] == x.itemsize
                else np.ascontiguousarray(x) for x in map(self.bhsd, sent)]  # fmt: skip
        return api.quantize(*tidy, **options, **self.case.options())

    def takes_codes(self) -> dict[str, Any]:
        """Return the options of a call on operands that are quantised."""
        without = ("quant", "rope", "rope_offset_q", "rope_interleaved", "qk_norm")
        return {n: x for n, x in self.options.items() if n not in without}

    def judge(self, o: Any, lse: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray,
              z: Any = None) -> None:  # fmt: skip
        """Raise Wrong unless these are attention of q, k and v, or of codes z."""
        case, dtype = self.case, self.q.dtype.name
        found, found_lse = self.bhsd(case.host(o)), case.host(lse)
        Q, K = self.turning.of(f64(q), f64(k))
        V = by_query_head(f64(v), q.shape[1])
        S, size, _ = self.scoring.scores(Q, K)
        off: Any = 0.0
        if self.turning.changes:
            off = 4 * ROUNDING[dtype] * size
        if z is None:
            P, exact_lse = softmax(S)
            near("o", found, P @ V, limits(S, size, V, dtype, off, self.scoring.alone))
            check_hull(found, S, V, 8 * ROUNDING[dtype] + 2.0**-18)
        else:
            off = self.judge_codes(found, z, Q, K) + off
            P, exact_lse = softmax(S)
            much = {"16bit": 2.0**-8, "int8": 0.2, "fp8": 0.2}[self.quant.pv]
            slack = much * abs(V).max(initial=0)
            limit = limits(S, size, V, dtype, off) + slack
            near("o of the caller's arrays", found, P @ V, limit)
        largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
        near("lse", found_lse, exact_lse, 2.0**-18 * (largest + size) + off + 2.0**-7)

    def judge_codes(self, o: np.ndarray, z: Any, Q: np.ndarray, K: np.ndarray) -> float:
        """Judge O by the codes, within the library's bound; return what scores lose by them."""
        form = {}
        if self.case.backend == "cuda":
            form = kernel_form(z, **self.takes_codes())
        z = on_host(z)
        q, k, v = dequantised(z)
        v = by_query_head(v, q.shape[1])
        S, size, _ = self.scoring.scores(q, k)
        names = ("scale", "causal", "causal_align", "window", "softcap", "block_mask")
        options = {n: self.given[n] for n in names if n in self.given}
        options |= {n: self.case.values(self.given[n]) for n in ("mask", "bias") if n in self.given}
        bound = ca.bounds.attention(
            None, None, None, variant="fa_int8", quantized=z, **options, **form
        ).total
        exact = softmax(S)[0] @ v
        near("o of the codes", o, exact, bound * (1 + 1e-9) + 1e-12)
        steps = []
        for x, prepared, codes in ((q, Q, z.q_scale), (k, K, z.k_scale)):
            steps.append(0.51 * float(codes.max(initial=0)) * (1 + (not z.config.symmetric)))
            loss = 2 * ROUNDING[self.q.dtype.name] if z.config.fused else 2.0**-18
            much = steps[-1] + loss * (abs(prepared) + 1e-3)
            near("dequantised operands", x, prepared, much)
        sums = [abs(x).sum(-1).max(initial=0) for x in (Q, K)]
        cost = steps[0] * sums[1] + steps[1] * sums[0] + Q.shape[3] * steps[0] * steps[1]
        return float(cost * abs(self.scoring.scale))


def attention(case: Case) -> None:
    """All rungs of `cupyattn.attention`."""
    call = Attention(case)
    shape = call.bhsd(call.q).shape
    options = {**call.options, "layout": "BSHD" if call.bshd else "BHSD"}
    z = None
    if call.variant == "fa_int8":
        z = call.codes(call.sent)
        # NOTE: blocks are those of the form that runs, which on a device may differ.
        blocks = case.backend == "cuda" and "block" in (
            call.quant.granularity_q, call.quant.granularity_k, call.quant.granularity_v
        )  # fmt: skip
        if blocks or case.chance(0.3):
            call.bshd, shape = False, call.q.shape
            options = call.takes_codes()
            call.sent = [z]
    aligned = True
    if case.chance(0.25):
        options["out"], aligned = case.receiver(shape, call.q.dtype.name)
    try:
        found = api.attention(*call.sent, **options)
    except ValueError:
        if aligned:
            raise
        return  # as it must
    if not aligned:
        raise Wrong("an out with misaligned elements was taken")
    if "out" in options and found[0] is not options["out"]:
        raise Wrong("the result is another array than out")
    call.judge(*found, call.q, call.k, call.v, z)


def plan(case: Case) -> None:
    """A prepared call on two sets of values."""
    call = Attention(case)
    layout = "BSHD" if call.bshd else "BHSD"
    prepared = api.plan(*call.sent, layout=layout, **call.options)
    values, sent = (call.q, call.k, call.v), call.sent
    for _ in range(2):
        blocks = call.variant == "fa_int8" and case.backend == "cuda" and "block" in (
            call.quant.granularity_q, call.quant.granularity_k, call.quant.granularity_v
        )  # fmt: skip
        z = call.codes(sent) if call.variant == "fa_int8" and not blocks else None
        found = prepared(*sent)
        if not blocks:
            call.judge(*found, *values, z)
        again = [case.like(s, x[::-1, ::-1].swapaxes(1, 2) if call.bshd else x[::-1, ::-1])
                 for s, x in zip(sent, values, strict=True)]  # fmt: skip
        values = tuple(call.bhsd(case.values(s)) for s in again)  # type: ignore[assignment]
        if call.variant == "fa_int8" and call.quant.static:
            return  # scales that other values may exceed
        sent = again


def _packed(case: Case, dtypes: Sequence[str]) -> tuple[Any, ...]:
    """Draw packed operands, their ends, and what changes scores."""
    dtype, dim = case.config.pick(*dtypes), case.config.pick(8, 16, 64)
    counts = [case.rng.choice([0, 1, 5, 17, 33], size=3) for _ in "qk"]
    ends = [np.concatenate([[0], np.cumsum(n)]).astype(case.pick("int32", "int64")) for n in counts]
    heads_kv, group = case.pick(1, 2), case.pick(1, 2)
    q = case.normal(int(ends[0][-1]), heads_kv * group, dim, dtype=dtype)
    k, v = (case.normal(int(ends[1][-1]), heads_kv, dim, dtype=dtype) for _ in "kv")
    shape = (3, heads_kv * group, *(int(n.max()) for n in counts))
    scoring = draw_scoring(case, shape, dim, packed=True)
    return q, k, v, ends, scoring


def _sequences(ends: Sequence[np.ndarray]) -> Any:
    return enumerate(zip(*(zip(e[:-1], e[1:], strict=True) for e in ends), strict=True))


def _rows(x: np.ndarray, a: int, b: int) -> np.ndarray:
    return f64(x[a:b].swapaxes(0, 1)[None])


def varlen(case: Case) -> None:
    """`attention_varlen` on sequences of many lengths, some empty."""
    variant = VARIANTS[case.slot % 6]
    case.rung = variant
    known = tuple(DTYPES) if variant == "auto" else ca.VARIANTS[variant].dtypes
    q, k, v, ends, scoring = _packed(case, known)
    options = {"max_len_q": 33, "max_len_k": 33} if case.chance(0.3) and not (
        {"mask", "bias", "block_mask"} & set(scoring.given)) else {}  # fmt: skip
    o, lse = api.attention_varlen(
        *map(case.sent, (q, k, v, *ends)), variant=variant, return_lse=True, **options,
        **scoring.given, **case.options(),
    )  # fmt: skip
    o, lse = case.host(o), case.host(lse)
    for i, ((a, b), (c, d)) in _sequences(ends):
        x, y, z = _rows(q, a, b), _rows(k, c, d), _rows(v, c, d)
        one = scoring.entry(i, b - a, d - c)
        S, size, _ = one.scores(x, y)
        P, exact_lse = softmax(S)
        z = by_query_head(z, x.shape[1])
        limit = limits(S, size, z, q.dtype.name, 0.0, one.alone)
        near(f"o of {i}", o[a:b].swapaxes(0, 1)[None], P @ z, limit)
        largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
        near(f"lse of {i}", lse[None, :, a:b], exact_lse, 2.0**-18 * (largest + size) + 2.0**-7)


def _check_gradients(
    scoring: Scoring, dtype: str, given: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> None:
    """Judge gradients of float64 operands (d_out, q, k, v), all (batch, heads, len, head_dim)."""
    G, Q, k, v = given
    S, size, slope = scoring.scores(Q, k)
    K, V = (by_query_head(x, Q.shape[1]) for x in (k, v))
    P, scale = softmax(S)[0], scoring.scale
    dP = G @ V.swapaxes(2, 3)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True)) * slope * scale

    def summed(x: np.ndarray) -> np.ndarray:
        group = Q.shape[1] // k.shape[1]
        parts: np.ndarray = x.reshape(x.shape[0], k.shape[1], group, *x.shape[2:]).sum(2)
        return parts

    exact = dS @ K, summed(dS.swapaxes(2, 3) @ Q), summed(P.swapaxes(2, 3) @ G)
    error = row_error(S, size, scoring.alone)
    # NOTE: where float32 cannot tell scores apart, weights may be any.
    weights = np.where(error > 0.1, np.isfinite(S), P)
    error = 12 * ROUNDING[dtype] + np.expm1(3 * error)
    outer = (abs(G) @ (weights @ abs(V)).swapaxes(2, 3)).max(-1, keepdims=True, initial=0)
    means = (weights * abs(dP)).sum(-1, keepdims=True)
    spread = weights * (abs(dP) + means + outer) * abs(scale) * error
    sizes = (spread @ abs(K), summed(spread.swapaxes(2, 3) @ abs(Q)),
             summed((weights * error).swapaxes(2, 3) @ abs(G)))  # fmt: skip
    for name, one, want, much in zip(("dq", "dk", "dv"), found, exact, sizes, strict=True):
        near(name, one, want, much + 1e-5)


def backward(case: Case) -> None:
    """Gradients, with the output and lse of the forward pass."""
    q, k, v = operands(case, ("float16", "bfloat16"))
    d_out = case.normal(*q.shape, dtype=q.dtype.name)
    scoring = draw_scoring(case, (*q.shape[:3], k.shape[2]), q.shape[3])
    sent = [case.sent(x) for x in (d_out, q, k, v)]
    o, lse = api.attention(*sent[1:], return_lse=True, **scoring.given, **case.options())
    found = api.attention_backward(
        *sent, o, lse, deterministic=case.config.pick(None, True, False), **scoring.given,
        **case.options(),
    )  # fmt: skip
    _check_gradients(scoring, q.dtype.name, [f64(x) for x in (d_out, q, k, v)],
                     [case.host(x) for x in found])  # fmt: skip


def varlen_backward(case: Case) -> None:
    """Gradients of packed sequences."""
    q, k, v, ends, scoring = _packed(case, ("float16", "bfloat16"))
    d_out = case.normal(*q.shape, dtype=q.dtype.name)
    sent = [case.sent(x) for x in (d_out, q, k, v)]
    places = [case.sent(e) for e in ends]
    o, lse = api.attention_varlen(
        *sent[1:], *places, return_lse=True, **scoring.given, **case.options()
    )
    found = api.attention_varlen_backward(
        *sent, o, lse, *places, deterministic=case.config.pick(None, True, False),
        **scoring.given, **case.options(),
    )  # fmt: skip
    dq, dk, dv = (case.host(x) for x in found)
    for i, ((a, b), (c, d)) in _sequences(ends):
        given = [_rows(x, *at) for x, at in ((d_out, (a, b)), (q, (a, b)), (k, (c, d)),
                                             (v, (c, d)))]  # fmt: skip
        parts = [x[s:e].swapaxes(0, 1)[None] for x, (s, e) in ((dq, (a, b)), (dk, (c, d)),
                                                               (dv, (c, d)))]  # fmt: skip
        _check_gradients(scoring.entry(i, b - a, d - c), q.dtype.name, given, parts)


def quantize(case: Case) -> None:
    """Codes times scales are the operands, but for half a step."""
    q, k, v = operands(case)
    turning = draw_turning(case, q.shape, k.shape)
    Q, K = turning.of(f64(q), f64(k))
    quant = draw_quant(case, Q, K, False)
    made = api.quantize(*map(case.sent, (q, k, v)), quant=quant, **turning.given, **case.options())
    z = on_host(made)
    share = 0.501 if quant.symmetric else 1.001
    loss = 0.0 if not turning.changes else 2 * ROUNDING[q.dtype.name] if quant.fused else 2.0**-20
    found = dequantised(z)
    for name, x, exact, scale, group in (("q", found[0], Q, z.q_scale, z.group_q),
                                         ("k", found[1], K, z.k_scale, z.group_kv)):  # fmt: skip
        step = scale.astype(np.float64)[..., np.arange(x.shape[2]) // group][..., None]
        much = abs(exact) + abs(exact).max(-1, keepdims=True, initial=0) * turning.changes
        near(name, x, exact, share * step + (loss + 2.0**-21) * (much + 1e-6))
        if quant.static:
            continue
        tallest = 2.02 * abs(exact).max(initial=0) / quant.largest_code
        near(f"{name}_scale", np.where(step == 1, 1, np.minimum(step, tallest)), step, 1e-30)
    if quant.pv == "16bit":
        near("v", found[2], f64(v), 2.0**-11 * abs(f64(v)) + 2.0**-24)
        return
    step = z.v_scale.astype(np.float64)[:, :, np.arange(k.shape[2]) // z.group_v]
    centred = f64(v) - (0 if z.v_mean is None else z.v_mean.astype(np.float64)[:, :, None])
    limit = share * step if quant.pv == "int8" else 2.0**-4 * abs(centred) + 2.0**-9 * step
    near("v", found[2], f64(v), limit + 2.0**-20 * (abs(f64(v)) + abs(centred)))


def _spread(x: np.ndarray, shape: tuple[int, ...], *, across: bool) -> np.ndarray:
    x = x.repeat(128, axis=1)[:, : shape[1]]
    return x.repeat(128, axis=0)[: shape[0]] if across else x


def act_quant(case: Case) -> None:
    """Rows of activations in blocks of 128."""
    x = case.normal(case.pick(1, 3, 17), case.pick(1, 100, 128, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.act_quant(case.sent(x), **case.options())
    step = _spread(case.host(scales), x.shape, across=False)
    near("x", case.host(codes) * step, f64(x), 0.501 * step)
    near("largest code", abs(case.host(codes)).max(), np.array(127.0), 0)


def _weight(case: Case) -> tuple[np.ndarray, Any, Any, np.ndarray]:
    """Draw a weight and quantise it; return it, codes, scales and steps."""
    w = case.normal(case.pick(1, 130, 200), case.pick(1, 100, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.weight_quant(case.sent(w), **case.options())
    return w, codes, scales, _spread(case.host(scales), w.shape, across=True)


def weight_quant(case: Case) -> None:
    """A weight in blocks of 128 by 128."""
    w, codes, _, step = _weight(case)
    near("w", case.host(codes) * step, f64(w), 0.501 * step)
    near("largest code", abs(case.host(codes)).max(), np.array(127.0), 0)


def weight_dequant(case: Case) -> None:
    """Codes of a weight, back to numbers of every type."""
    shape = case.pick(1, 130, 200), case.pick(1, 100, 300)
    codes = case.rng.integers(-127, 128, shape).astype(np.int8)
    blocks = -(-shape[0] // 128), -(-shape[1] // 128)
    scales = abs(case.normal(*blocks, dtype="float32")) + np.float32(0.01)
    kind = case.pick(*DTYPES)
    again = api.weight_dequant(case.sent(codes), case.sent(scales), 128, kind, **case.options())
    exact = codes * _spread(f64(scales), shape, across=True)
    near("w", case.host(again), exact, (ROUNDING[kind] + 2.0**-24) * abs(exact) + 1e-30)


def int8_gemm(case: Case) -> None:
    """The product of codes."""
    rows, n, depth = case.pick(1, 5, 33), case.pick(1, 40, 130), case.pick(1, 100, 300)
    a, b = (case.rng.integers(-127, 128, (r, depth)).astype(np.int8) for r in (rows, n))
    blocks = -(-depth // 128)
    scales = [abs(case.normal(*s, dtype="float32")) + np.float32(0.01)
              for s in ((rows, blocks), (-(-n // 128), blocks))]  # fmt: skip
    kind = case.config.pick(*DTYPES)
    options: dict[str, Any] = {}
    added = np.zeros(n)
    if case.config.chance(0.3):
        bias = case.normal(n, dtype=case.config.pick("float32", kind))
        options["bias"], added = case.sent(bias), f64(bias)
    aligned = True
    if case.chance(0.2):
        options["out"], aligned = case.receiver((rows, n), kind)
        if not options["out"].flags.c_contiguous:
            aligned = False
    try:
        c = api.int8_gemm(*map(case.sent, (a, scales[0], b, scales[1])), kind, **options,
                          **case.options())  # fmt: skip
    except ValueError:
        if aligned:
            raise
        return  # as it must
    if not aligned:
        raise Wrong("an out with misaligned elements or rows apart was taken")
    A = f64(a) * _spread(f64(scales[0]), a.shape, across=False)
    B = f64(b) * _spread(f64(scales[1]), b.shape, across=True)
    size, exact = abs(A) @ abs(B).T + abs(added), A @ B.T + added
    with np.errstate(over="ignore"):
        exact = np.where(abs(exact) > 65000, exact.astype(DTYPES[kind]).astype(np.float64), exact)
    near("c", case.host(c), exact, 2.0**-20 * size + ROUNDING[kind] * 2 * size)


def int8_linear(case: Case) -> None:
    """A layer, beside the steps of its codes."""
    depth, kind = case.pick(100, 128, 300), case.config.pick(*DTYPES)
    w, x = case.normal(40, depth, dtype=kind), case.normal(case.pick(1, 7), depth, dtype=kind)
    layer = ca.Int8Linear.from_weight(case.sent(w))
    W, X = f64(w), f64(x)
    step_w, step_x = abs(W).max() / 254, abs(X).max() / 254
    limit = step_w * abs(X).sum(-1)[:, None] + step_x * abs(W).sum(-1) + depth * step_w * step_x
    exact = X @ W.T
    near("y", case.host(layer(case.sent(x), **case.options())), exact,
         1.01 * limit + 4 * ROUNDING[kind] * (abs(exact) + limit))  # fmt: skip


def importance(case: Case) -> None:
    """The mean share of every key, from all rows."""
    q, k, _ = operands(case)
    if not q.size or not k.size:
        return
    found = case.host(key_importance(case.sent(q), case.sent(k), rows=1000, **case.options()))
    Q, K = f64(q), by_query_head(f64(k), q.shape[1])
    S = Q @ K.swapaxes(2, 3) / np.sqrt(q.shape[3])
    size = (abs(Q) @ abs(K).swapaxes(2, 3)).max() / np.sqrt(q.shape[3])
    P = softmax(S)[0].mean(2)
    exact = P.reshape(k.shape[0], k.shape[1], -1, k.shape[2]).mean(2)
    # K1: scaled rows are rounded to the type of q once more.
    near("importance", found, exact, 1e-4 + np.expm1(4 * ROUNDING[q.dtype.name] * size))


def steps(case: Case) -> None:
    """The three steps of unfused attention."""
    before = os.environ.get("CUPYATTN_INTERPRET")
    os.environ["CUPYATTN_INTERPRET"] = str(int(case.backend == "interpret"))
    try:
        _steps(case)
    finally:
        if before is None:
            del os.environ["CUPYATTN_INTERPRET"]
        else:
            os.environ["CUPYATTN_INTERPRET"] = before


def _steps(case: Case) -> None:
    q, k, v = operands(case)
    scoring = draw_scoring(case, (*q.shape[:3], k.shape[2]), q.shape[3])
    S = unfused.scores(case.sent(q), case.sent(k), **scoring.given)
    exact, size, _ = scoring.scores(f64(q), f64(k))
    finite = np.where(np.isfinite(exact), abs(exact), 0)
    near("S", case.host(S), exact, 2.0**-18 * (size + finite) + 1e-6)
    P, lse = unfused.softmax(S, return_lse=True)
    want, want_lse = softmax(case.host(S))
    near("P", case.host(P), want, 2.0**-18 + np.expm1(row_error(case.host(S), 0.0)))
    near("lse", case.host(lse), want_lse, 2.0**-18 * (finite.max(-1, initial=0) + 1) + 2.0**-18)
    o = unfused.weighted_sum(P, case.sent(v))
    heads = by_query_head(f64(v), q.shape[1])
    most = abs(heads).max(initial=0)
    near("o", case.host(o), case.host(P) @ heads, 4 * ROUNDING[q.dtype.name] * most + 1e-5)


def block_mask(case: Case) -> None:
    """`BlockMask.from_dense` keeps a block if and only if any of its elements is True."""
    len_q, len_kv = lengths(case)
    dense = case.rng.random((case.pick(1, 2), case.pick(1, 3), len_q, len_kv)) < case.pick(
        1e-4, 0.01, 0.5)  # fmt: skip
    sizes = case.pick((64, 64), (128, 64), (64, 128), (128, 128))
    found = api.BlockMask.from_dense(case.sent(dense), *sizes)
    counts = [-(-n // b) for n, b in zip((len_q, len_kv), sizes, strict=True)]
    want = np.zeros((*dense.shape[:2], *counts), bool)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = dense[..., i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
            want[..., i, j] = part.any((2, 3))
    near("blocks", case.host(found.mask), want.astype(np.float64), 0)
    whole = case.host(found.to_dense(len_q, len_kv))
    if (whole < dense).any() or whole.shape != dense.shape:
        raise Wrong("the blocks lack an element of the mask")


FUNCTIONS: dict[str, Callable[[Case], None]] = {
    "attention": attention, "attention_varlen": varlen, "attention_backward": backward,
    "attention_varlen_backward": varlen_backward, "plan": plan, "quantize": quantize,
    "act_quant": act_quant, "weight_quant": weight_quant, "weight_dequant": weight_dequant,
    "int8_gemm": int8_gemm, "Int8Linear": int8_linear, "key_importance": importance,
    "unfused": steps, "BlockMask.from_dense": block_mask,
}  # fmt: skip
