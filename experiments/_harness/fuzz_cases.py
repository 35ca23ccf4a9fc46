"""A case of `experiments.accuracy.fuzz`: its choices, its memory, what must not change there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Wrong(Exception):
    """A result outside its limit, or memory that was changed."""


@dataclass(frozen=True)
class Setup:
    """Settings of the draw, on which a case depends beside its function and number."""

    seed: int = 0
    backend: str = "mirror"
    #: Compile-time configurations of attention.
    pool: int = 2000


class Case:
    """One call: random choices, arrays that must not change, and where they are sent."""

    def __init__(
        self, setup: Setup, function: int, number: int, *, same_kernels: bool = False
    ) -> None:
        self.rng = np.random.default_rng([setup.seed, function, number])
        self.backend = setup.backend
        #: Index of the compiled kernels, drawn from a pool that cases share.
        shared = 0 if same_kernels else function  # options of attention, which is the first
        self.slot = int(self.rng.integers(setup.pool if shared == 0 else -(-setup.pool // 3)))
        self.config = Draws(np.random.default_rng([setup.seed, shared, self.slot, 1]))
        self.aligned = setup.backend != "mirror" and self.config.chance(0.7)
        #: Counted under this name beside the function's.
        self.rung = ""
        self._draws = Draws(self.rng)
        self.pick, self.chance = self._draws.pick, self._draws.chance
        self._held: list[Callable[[], bool]] = []
        self._hosts: dict[int, tuple[Any, np.ndarray]] = {}

    @property
    def small(self) -> bool:
        """Whether shapes are small enough for a second in the interpreter."""
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
