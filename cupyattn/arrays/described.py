"""Descriptions of arrays, from which calls are resolved: everything but the values.

Descriptions take no memory. A view or a copy of a description is another description, which records
its steps. `Described.bound` applies these steps to the array itself, just before the launch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.form import ArrayForm, checked_forms, form_of
from cupyattn.arrays.operand import Operand

#: Functions of the steps that return views. `_COPIES` has the steps that return new memory.
_VIEWS: dict[str, Callable[..., Any]] = {
    "swapaxes": lambda x, one, other: x.swapaxes(one, other),
    "front": lambda x: x[None],
    "first": lambda x: x[0],
    "cut": lambda x, axis, start, stop: x[(slice(None),) * axis + (slice(start, stop),)],
    "reshape": lambda x, *shape: x.reshape(shape),
    "broadcast": lambda x, *shape: _library(x).broadcast_to(x, shape),
}
_COPIES: dict[str, Callable[..., Any]] = {
    "gathered": lambda x, *shape: x.reshape(shape),
    "whole": lambda x: _library(x).ascontiguousarray(x),
    "aligned": lambda x: aligned_copy(x),
    "cast": lambda x, dtype: x.astype(dtype, order="C"),
    "clipped": lambda x, low, high: _library(x).clip(x, low, high).astype("int32"),
    "moved": lambda x, device: sys.modules["cupy"].asarray(x),
    "filled": lambda x, value, *shape: _library(x).full(shape, value, x.dtype),
    "copied": lambda x: x.copy(),
    "negated": lambda x: -x,
    "exchanged": lambda x, axis, *as_seen: exchanged_copy(x.reshape(as_seen), axis, x.shape),
    "padded": lambda x, width: padded_copy(x, width),
}
_STEPS = _VIEWS | _COPIES
_DIGITS = "0123456789"


@dataclass(frozen=True)
class Described:
    """An array without its memory.

    Parameters
    ----------
    name : str
        Name of the caller's array that this is, or is made of.
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : numpy.dtype
    misalignment : int
        Its address modulo 16.
    device : int
        Number of the device that holds it; -1 for the host, which holds NumPy arrays.
    writeable : bool
    steps : tuple
        Steps to apply to the caller's array: their names, each with its arguments.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    misalignment: int = 0
    device: int = -1
    writeable: bool = True
    steps: tuple[tuple[Any, ...], ...] = ()

    @classmethod
    def of(cls, name: str, array: Any) -> Described:
        """Describe a NumPy or CuPy array."""
        return cls(*form_of(name, array))

    @classmethod
    def contiguous(
        cls, name: str, shape: Sequence[int], dtype: Any, device: int = -1
    ) -> Described:
        """Describe an array in C order, at an address that counts as aligned."""
        dtype = np.dtype(dtype)
        return cls(name, tuple(shape), _c_order(shape, dtype.itemsize), dtype, 0, device)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def library(self) -> str:
        """The library of the array, ``"numpy"`` or ``"cupy"``."""
        return "numpy" if self.device < 0 else "cupy"

    @property
    def capability(self) -> int:
        """Compute capability, times ten, of the device that holds the array."""
        return capability_of_device(self.device)

    @functools.cached_property
    def place(self) -> Operand:
        """The array's `Operand`, which plans read."""
        strides = tuple(s // self.itemsize for s in self.strides)
        return Operand(self.shape, strides, self.itemsize, self.misalignment)

    @property
    def as_read(self) -> ArrayForm:
        """The form of the array that kernels read."""
        strides = tuple(s if n > 1 else 0 for s, n in zip(self.strides, self.shape, strict=True))
        return self.name, self.shape, strides, self.dtype, self.misalignment, self.device, True

    @property
    def is_aligned(self) -> bool:
        """Whether every element is aligned to its size."""
        size = self.itemsize
        odd = any(s % size for s, n in zip(self.strides, self.shape, strict=True) if n > 1)
        return not odd and self.misalignment % size == 0

    @property
    def is_contiguous(self) -> bool:
        """Whether it is in C order."""
        wanted = zip(self.shape, self.strides, _c_order(self.shape, self.itemsize), strict=True)
        return 0 in self.shape or all(s == want for n, s, want in wanted if n > 1)

    @property
    def has_whole_rows(self) -> bool:
        """Whether the last axis is contiguous."""
        return not (self.ndim and self.shape[-1] > 1 and self.strides[-1] != self.itemsize)

    @property
    def is_copied(self) -> bool:
        """Whether a call copies the caller's array."""
        return any(step[0] in _COPIES for step in self.steps)

    @property
    def is_padded(self) -> bool:
        """Whether it is a copy whose rows lie further apart than their numbers reach."""
        return any(step[0] == "padded" for step in self.steps)

    @property
    def reach(self) -> tuple[int, int]:
        """Offsets in bytes of its lowest element and past its highest; equal if it is empty."""
        if not self.size:
            return 0, 0
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + self.itemsize

    # ---- views, and copies of arrays that kernels cannot read in place ---------------------------

    def swapaxes(self, one: int, other: int) -> Described:
        """Describe the view with two axes exchanged."""
        order = list(range(self.ndim))
        order[one], order[other] = order[other], order[one]
        shape, strides = (tuple(x[i] for i in order) for x in (self.shape, self.strides))
        return self._after("swapaxes", one, other, shape=shape, strides=strides)

    def front(self) -> Described:
        """Describe the view with an axis of length 1 before the others."""
        strides = (self.itemsize * max(self.size, 1), *self.strides)
        return self._after("front", shape=(1, *self.shape), strides=strides)

    def first(self) -> Described:
        """Describe the first element along the first axis."""
        return self._after("first", shape=self.shape[1:], strides=self.strides[1:])

    def cut(self, axis: int, start: int, stop: int) -> Described:
        """Describe a part of an axis, from one element up to another."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        place = (self.misalignment + start * self.strides[axis]) % 16
        return self._after("cut", axis, start, stop, shape=shape, misalignment=place)

    def broadcast_to(self, shape: tuple[int, ...]) -> Described:
        """Describe the view in a shape that it broadcasts to."""
        more = len(shape) - self.ndim
        strides = tuple(
            0 if axis < more or self.shape[axis - more] != n else self.strides[axis - more]
            for axis, n in enumerate(shape)
        )
        return self._after("broadcast", *shape, shape=tuple(shape), strides=strides)

    def rows(self) -> Described:
        """Describe it with one axis before the last: a view, or a copy if no view exists."""
        return self._joined(math.prod(self.shape[:-1]), self.shape[-1])

    def columns(self) -> Described:
        """Describe it with one axis behind the first: a view, or a copy if no view exists."""
        return self._joined(self.shape[0], math.prod(self.shape[1:]))

    def _joined(self, *shape: int) -> Described:
        if self.shape == shape:
            return self
        strides = _joined_strides(self.shape, self.strides, shape, self.itemsize)
        if strides is None:
            return self._copied("gathered", *shape, shape=shape)
        return self._after("reshape", *shape, shape=shape, strides=strides)

    def in_rows_of(self, width: int) -> Described:
        """Describe the view of an array in C order as rows of so many elements."""
        shape = (self.size // width, width)
        return self._after("reshape", *shape, shape=shape, strides=_c_order(shape, self.itemsize))

    def readable(self) -> Described:
        """Describe it, or an aligned copy if its elements are misaligned."""
        return self if self.is_aligned else self._copied("aligned")

    def with_whole_rows(self) -> Described:
        """Describe it, or a copy in C order if its last axis is not contiguous."""
        return self if self.has_whole_rows else self._copied("whole")

    def whole(self) -> Described:
        """Describe it, or a copy in C order if it has another order."""
        return self if self.is_contiguous else self._copied("whole")

    def cast(self, dtype: Any) -> Described:
        """Describe it, or a copy in C order of another type."""
        dtype = np.dtype(dtype)
        return self if self.dtype == dtype else self._copied("cast", dtype, dtype=dtype)

    def clipped(self, low: int, high: int) -> Described:
        """Describe a copy in int32 whose elements are at least `low` and at most `high`."""
        return self._copied("clipped", low, high, dtype=np.dtype(np.int32))

    def beside(self, other: Described) -> Described:
        """Describe it; if it is on the host, its copy on the device of another array."""
        if self.device == other.device or self.device >= 0:
            return self
        return self._copied("moved", other.device, device=other.device)

    def at_multiples_of(self, nbytes: int) -> Described:
        """Describe it, or a copy, at an address that is a multiple of `nbytes`."""
        return self if self.misalignment % nbytes == 0 else self._copied("copied")

    def with_padded_rows(self, nbytes: int) -> Described:
        """Describe a copy in C order whose rows begin at multiples of so many bytes."""
        count = nbytes // self.itemsize
        width = -(-self.shape[-1] // count) * count
        strides = _c_order((*self.shape[:-1], width), self.itemsize)
        return self._after("padded", width, strides=strides, misalignment=0)

    def filled(self, value: float, shape: tuple[int, ...]) -> Described:
        """Describe an array of another shape, filled with one number."""
        return self._copied("filled", value, *shape, shape=shape)

    def negated(self) -> Described:
        """Describe a copy of the negated numbers."""
        return self._copied("negated")

    def exchanged(self, axis: int, shape: tuple[int, ...]) -> Described:
        """Describe a copy with both halves exchanged along an axis of length 2 of a shape."""
        return self._copied("exchanged", axis, *shape)

    def _copied(self, step: str, *arguments: Any, **changed: Any) -> Described:
        shape, dtype = changed.get("shape", self.shape), changed.get("dtype", self.dtype)
        strides = _c_order(shape, dtype.itemsize)
        return self._after(step, *arguments, strides=strides, misalignment=0, **changed)

    def _after(self, step: str, *arguments: Any, **changed: Any) -> Described:
        return replace(self, steps=(*self.steps, (step, *arguments)), **changed)

    def bound(self, array: Any) -> Any:
        """Apply the steps to the caller's array, and return the result.

        New arrays are allocated on the current device.
        """
        for step, *arguments in self.steps:
            array = _STEPS[step](array, *arguments)
        return array


def describe(arrays: Mapping[str, Any], receives: tuple[str, ...] = ()) -> dict[str, Described]:
    """Describe NumPy or CuPy arrays as kernels read them; descriptions are returned unchanged.

    Parameters
    ----------
    arrays : mapping of str to array or Described
    receives : tuple of str
        Names, without numbers at the end, of the arrays that are written to.

    Raises
    ------
    TypeError
        For an array of another library.
    """
    given = {name: x for name, x in arrays.items() if not isinstance(x, Described)}
    found = {form[0]: Described(*form) for form in checked_forms(given)}
    every = {name: found.get(name, x) for name, x in arrays.items()}
    return {n: x if n.rstrip(_DIGITS) in receives else x.readable() for n, x in every.items()}


def places_of(described: Mapping[str, Described]) -> dict[str, Operand]:
    """Return the `Operand` of each array, by name."""
    return {name: x.place for name, x in described.items()}


def bound_to(described: Mapping[str, Described], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the described arrays, made of the caller's arrays by name."""
    return {name: x.bound(arrays[x.name]) for name, x in described.items()}


def check_together(**named: Described | None) -> None:
    """Raise unless all arrays that are not None are of one library and on one device.

    Raises
    ------
    TypeError, ValueError
    """
    places = {name: x.device for name, x in named.items() if x is not None}
    if len(set(places.values())) > 1:
        if min(places.values()) < 0:
            kinds = ", ".join(f"{x.library}.ndarray" for x in named.values() if x is not None)
            raise TypeError(f"expected NumPy arrays only or CuPy arrays only, got {kinds}")
        where = ", ".join(f"{name} on {number}" for name, number in places.items())
        raise ValueError(f"all arrays of a call must lie on one device, got {where}")


def check_receiver(out: Described, shape: Sequence[int], dtype: str) -> None:
    """Raise ValueError unless `out` can receive a result.

    `out` must have the shape and dtype of the result, aligned elements and a contiguous last axis.
    It must be writeable and must not overlap itself.
    """
    if out.shape != tuple(shape) or str(out.dtype) != dtype:
        raise ValueError(
            f"out must have shape {tuple(shape)} and dtype {dtype}, "
            f"got shape {out.shape} and dtype {out.dtype}"
        )
    if not out.is_aligned:
        raise ValueError(
            f"out must have its elements at multiples of their {out.itemsize} bytes, got address "
            f"{out.itemsize} n + {out.misalignment % out.itemsize} and strides {out.strides}: pass "
            "an array of its own memory, as empty() returns, and copy the result"
        )
    if not out.size:
        return  # the strides of an empty array have no meaning, and it shares no memory
    if not out.has_whole_rows:
        raise ValueError(
            f"out must have a contiguous last axis, got strides {out.strides}: give an array in C "
            "order, or a view of whole rows"
        )
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out must not be a broadcast view, got strides {out.strides}")
    if _overlaps_itself(out):
        raise ValueError(
            f"out must not overlap itself, got shape {out.shape} with strides {out.strides}: give "
            "an array whose elements each have a place in memory of their own"
        )
    if not out.writeable:
        raise ValueError("out must be an array that may be written to, got a read-only one")


def _overlaps_itself(out: Described) -> bool:
    """Whether steps along an axis may land within the elements of the axes with smaller steps."""
    extent = out.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True)):
        if n > 1 and stride < extent:
            return True
        extent += (n - 1) * stride
    return False


def meetings(out: Described, read: Mapping[str, Described]) -> dict[str, tuple[int, int]]:
    """Return, for each array that is read, the range of distances at which `out` overlaps it."""
    low, high = out.reach
    found = {}
    for name, x in read.items():
        first, last = x.reach
        if first < last and low < high and not x.is_copied:
            found[name] = first - high, last - low
    return found


@functools.cache
def capability_of_device(device: int) -> int:
    """Return the compute capability of a device, times ten."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


def aligned_copy(array: Any) -> Any:
    """Return a copy in C order, made without a misaligned access."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C", copy=True)
    cupy, size = sys.modules["cupy"], int(array.dtype.itemsize)
    # NOTE: copies bytes, because a copy of elements would read at misaligned addresses.
    shape, strides = (*array.shape, size), (*array.strides, 1)
    found = cupy.ndarray(shape, "uint8", array.data, strides).copy(order="C")
    return found.view(array.dtype).reshape(array.shape)


def exchanged_copy(array: Any, axis: int, shape: tuple[int, ...]) -> Any:
    """Copy an array with both halves of an axis exchanged, and return the copy in another shape."""
    return _library(array).roll(array, 1, axis).reshape(shape)


def padded_copy(array: Any, width: int) -> Any:
    """Return a copy whose rows begin `width` elements apart; elements in between are not set."""
    wide = _library(array).empty((*array.shape[:-1], width), array.dtype)
    found = wide[..., : array.shape[-1]]
    found[...] = array
    return found


def _library(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def _c_order(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _joined_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], joined: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    """Return the strides of a view that joins the axes before the last, or after the first.

    None if their elements are not evenly spaced, so that no such view exists.
    """
    if 0 in shape:
        return _c_order(joined, itemsize)
    at_front = shape[-1:] == joined[-1:]
    some = slice(None, -1) if at_front else slice(1, None)
    kept = strides[-1:] if at_front else strides[:1]
    steps = [(n, s) for n, s in zip(shape[some], strides[some], strict=True) if n > 1]
    for (_, outer), (n, inner) in zip(steps, steps[1:], strict=False):
        if outer != n * inner:
            return None
    own = steps[-1][1] if steps else itemsize * (joined[-1] if at_front else 1)
    return (own, *kept) if at_front else (*kept, own)
