"""Find the library of an array, and the storage types of arrays."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

#: A NumPy or CuPy array; naming the type imports neither.
Array = Any

#: NumPy classes whose arrays are accepted.
PLAIN = (np.ndarray, np.memmap)

#: The score of a masked key.
NEG_INF = float("-inf")

#: Storage types by the names that `cupyattn.kernels.numerics.Numerics` uses.
STORAGE = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

#: Largest number of each storage type.
FINITE_MAX = {
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float32": 2.0**127 * (2 - 2.0**-23),
}


def array_namespace(*arrays: Array) -> Any:
    """Return the module, NumPy or CuPy, that all of `arrays` belong to.

    Raises
    ------
    TypeError
        If they are of different kinds, of neither kind, or refused by `check_kind`.

    Examples
    --------
    >>> array_namespace(np.zeros(3)).__name__
    'numpy'
    """
    modules = {_library_of(array) for array in arrays}
    if modules == {"cupy"}:
        return sys.modules["cupy"]
    if modules == {"numpy"}:
        for array in arrays:
            check_kind("arrays", array)
        return np
    kinds = ", ".join(f"{type(a).__module__}.{type(a).__qualname__}" for a in arrays)
    raise TypeError(f"expected NumPy arrays only or CuPy arrays only, got {kinds}")


def check_kind(name: str, array: Array) -> None:
    """Raise TypeError unless kernels read a NumPy array as NumPy itself does.

    They read `numpy.ndarray` and `numpy.memmap` so, in this machine's byte order. Other subclasses
    may have a mask, a unit or different operators, which a kernel would ignore.
    """
    _check_class(name, array)
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} must be in this machine's byte order, got dtype {array.dtype.str}: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )


def check_real(name: str, array: Array) -> None:
    """Raise TypeError for an array whose elements are no real numbers, such as complex ones."""
    if array.dtype.kind in "cOSUmM":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}: convert it")


def check_values(name: str, values: Any) -> None:
    """Raise TypeError for an array_like that is, or contains, an array `check_kind` refuses.

    The byte order is not checked, because NumPy converts the values that it reads.
    """
    for value in (values, *values) if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, np.ndarray):
            _check_class(name, value)


def as_host_array(name: str, values: Any, dtype: Any = None) -> np.ndarray:
    """Return an array_like as a plain NumPy array.

    Raises
    ------
    TypeError
        If it is, or contains, a masked array or another subclass that `check_kind` refuses.

    Examples
    --------
    >>> as_host_array("sigmas", [4, 1], np.float64)
    array([4., 1.])
    """
    check_values(name, values)
    return np.asarray(values, dtype)


def _check_class(name: str, array: Array) -> None:
    kind = type(array)
    if kind not in PLAIN and not isinstance(array, np.generic):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} must not be masked, because the mask would be ignored: pass "
                "x.filled(0) or x.data, and give attention the keys that count as mask= (True: "
                "attend)"
            )
        said = f"got {kind.__module__}.{kind.__qualname__}: pass np.asarray(x)"
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be NumPy or CuPy arrays, {said}")
        raise TypeError(f"{name} must be of numpy.ndarray or numpy.memmap, {said}")


def _library_of(array: Array) -> str:
    """Return the name of the library that an array belongs to; a subclass belongs to its base's."""
    library = type(array).__module__.partition(".")[0]
    return "numpy" if library != "cupy" and isinstance(array, np.ndarray) else library


def as_float64(x: Array) -> Array:
    """Return `x` as float64, exactly; bfloat16 is first converted to float32, also exactly."""
    if x.dtype.name == "bfloat16":
        x = x.astype(np.float32)
    return x.astype(np.float64, copy=False)
