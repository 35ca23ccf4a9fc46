"""Arithmetic instructions of the interpreter, and the parser of their modifiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyattn.arrays.kinds import Array

#: One result, or a tuple of them where an instruction has several.
Evaluate = Callable[..., Any]

#: NumPy's type of a value of each PTX type. Pairs of numbers stay packed, as registers hold them.
DTYPES: dict[str, np.dtype[Any]] = {
    **{f"b{width}": np.dtype(f"u{width // 8}") for width in (8, 16, 32, 64)},
    **{f"u{width}": np.dtype(f"u{width // 8}") for width in (8, 16, 32, 64)},
    **{f"s{width}": np.dtype(f"i{width // 8}") for width in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "u16x2": np.dtype(np.uint32),
    "s16x2": np.dtype(np.uint32),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "pred": np.dtype(np.bool_),
}


class Operation(NamedTuple):
    """An instruction that computes numbers from numbers, without other effects.

    Parameters
    ----------
    sources, results : tuple of str
        PTX types.
    evaluate : callable
        Takes one array of ``DTYPES[type]`` per source and returns a new array per result: a single
        array, or a tuple of several. It never writes to its arguments. Run it under
        ``np.errstate(all="ignore")``, because overflow and NaN are valid results.
    """

    sources: tuple[str, ...]
    results: tuple[str, ...]
    evaluate: Evaluate


#: Makes the operation for some modifiers, or None if PTX or this interpreter has none.
Maker = Callable[[tuple[str, ...]], "Operation | None"]


@cache
def _choices(pattern: str) -> tuple[frozenset[str], bool]:
    return frozenset(pattern.removesuffix("?").split("|")), pattern.endswith("?")


def match(modifiers: tuple[str, ...], *patterns: str) -> tuple[str, ...] | None:
    """Read modifiers in PTX's order.

    Parameters
    ----------
    modifiers : tuple of str
        Without their dots.
    *patterns : str
        Alternatives separated by ``|``; a final ``?`` lets the whole be absent.

    Returns
    -------
    tuple of str or None
        The match of each pattern, ``""`` for an absent modifier; None if the modifiers differ.

    Examples
    --------
    >>> match(("rn", "f32"), "rn|rz", "ftz?", "f32|f64")
    ('rn', '', 'f32')
    >>> match(("f32",), "rn|rz", "f32") is None
    True
    """
    found = []
    rest = iter((*modifiers, None))
    modifier = next(rest)
    for pattern in patterns:
        choices, optional = _choices(pattern)
        if modifier in choices:
            found.append(str(modifier))
            modifier = next(rest)
        elif optional:
            found.append("")
        else:
            return None
    return tuple(found) if modifier is None else None


def halves(packed: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the low and the high 16-bit number of 32-bit registers."""
    low, high = packed.astype(np.uint16), np.right_shift(packed, 16).astype(np.uint16)
    return low.view(dtype), high.view(dtype)


def packed(low: Array, high: Array) -> Array:
    """Put two 16-bit numbers into one 32-bit register."""
    bits = np.left_shift(high.view(np.uint16), 16, dtype=np.uint32)
    return np.bitwise_or(bits, low.view(np.uint16))


def on_halves(evaluate: Evaluate, dtype: np.dtype[Any]) -> Evaluate:
    """Convert a function of 16-bit numbers to one of 32-bit registers with two numbers each."""

    @wraps(evaluate)
    def both(*sources: Array) -> Array:
        low, high = zip(*(halves(source, dtype) for source in sources), strict=True)
        return packed(evaluate(*low), evaluate(*high))

    return both
