"""Look up the NumPy function of an arithmetic instruction; moves and comparisons are defined here.

`lookup` parses names once. The operation that it returns only does arithmetic.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret import convert, floating, integer
from cupyattn.interpret.exact import FORMATS, flush
from cupyattn.interpret.floating import APPROXIMATION_ERROR
from cupyattn.interpret.operation import (
    DTYPES,
    Evaluate,
    Maker,
    Operation,
    halves,
    match,
    on_halves,
)

__all__ = ["APPROXIMATION_ERROR", "DTYPES", "Operation", "lookup", "pack", "unpack"]

_PLAIN = "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"

# ---- moves ---------------------------------------------------------------------------------------


def move(modifiers: tuple[str, ...]) -> Operation | None:
    """``mov`` of one register; `pack` and `unpack` are its other forms."""
    found = match(modifiers, f"pred|{_PLAIN}")
    return Operation(found, found, np.array) if found else None


@cache
def pack(whole: str, count: int) -> Operation | None:
    """Return ``mov`` from a vector of registers: the first is the lowest part of the result.

    Parameters
    ----------
    whole : {"b16", "b32", "b64"}
        Type of the result.
    count : {2, 4}
        Registers in the vector.
    """
    piece = _piece(whole, count)
    if piece is None:
        return None
    dtype, bits = DTYPES[whole], DTYPES[piece].itemsize * 8

    def evaluate(*items: Array) -> Array:
        result = items[0].astype(dtype)
        for i, item in enumerate(items[1:], 1):
            higher = np.left_shift(item.astype(dtype), dtype.type(bits * i))
            result = np.bitwise_or(result, higher)
        return result

    return Operation((piece,) * count, (whole,), evaluate)


@cache
def unpack(whole: str, count: int) -> Operation | None:
    """Return ``mov`` to a vector of registers, the reverse of `pack`: it has `count` results."""
    piece = _piece(whole, count)
    if piece is None:
        return None
    dtype, bits = DTYPES[whole], DTYPES[piece].itemsize * 8

    def evaluate(a: Array) -> tuple[Array, ...]:
        return tuple(
            np.right_shift(a, dtype.type(bits * i)).astype(DTYPES[piece]) for i in range(count)
        )

    return Operation((whole,), (piece,) * count, evaluate)


def _piece(whole: str, count: int) -> str | None:
    sizes = {("b16", 2): "b8", ("b32", 2): "b16", ("b32", 4): "b8", ("b64", 2): "b32"}
    return {**sizes, ("b64", 4): "b16"}.get((whole, count))


# ---- comparison and selection --------------------------------------------------------------------

#: Comparisons. On floats they are false for NaN, except ne and the names that end in u.
_COMPARE: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
#: A comparison that is true for NaN is the opposite of one that is false for NaN.
_UNORDERED = {
    "equ": np.not_equal,
    "neu": np.equal,
    "ltu": np.greater_equal,
    "leu": np.greater,
    "gtu": np.less_equal,
    "geu": np.less,
}
_COMBINE: dict[str, np.ufunc] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _comparison(name: str, kind: str, flushes: bool) -> Evaluate | None:
    """Return the comparison of two values of a type, or None if PTX has none of that name."""
    if kind not in FORMATS:
        if kind[0] == "b" and name not in ("eq", "ne"):
            return None
        return _COMPARE.get(name) or (_UNSIGNED.get(name) if kind[0] == "u" else None)
    fmt = FORMATS[kind]
    compare: Evaluate
    if name == "ne":  # NumPy's comparison is true for NaN

        def compare(a: Array, b: Array) -> Array:
            return np.logical_or(np.less(a, b), np.greater(a, b))
    elif name in _COMPARE:
        compare = _COMPARE[name]
    elif name == "neu":
        compare = np.not_equal
    elif name == "equ":

        def compare(a: Array, b: Array) -> Array:
            return np.logical_not(np.logical_or(np.less(a, b), np.greater(a, b)))
    elif name in _UNORDERED:
        opposite = _UNORDERED[name]

        def compare(a: Array, b: Array) -> Array:
            return np.logical_not(opposite(a, b))
    elif name in ("num", "nan"):
        ufunc = np.logical_or if name == "nan" else np.logical_and
        test = np.isnan if name == "nan" else (lambda x: np.equal(x, x))

        def compare(a: Array, b: Array) -> Array:
            return ufunc(test(a), test(b))
    else:
        return None
    if not flushes:
        return compare
    return lambda a, b: compare(flush(a, fmt), flush(b, fmt))


_COMPARISONS = "|".join((*_COMPARE, *_UNSIGNED, *_UNORDERED, "num", "nan"))


def set_predicate(modifiers: tuple[str, ...]) -> Operation | None:
    """``setp`` with one result; of pairs of float16, with one for each half."""
    found = match(modifiers, _COMPARISONS, "and|or|xor?", "ftz?", f"{_PLAIN}|f16|bf16|f16x2|bf16x2")
    if not found:
        return None
    name, combine, ftz, kind = found
    single = kind.removesuffix("x2")
    compare = _comparison(name, single, bool(ftz))
    if compare is None or (ftz and single not in ("f16", "f32")):
        return None
    first = compare
    if combine:
        ufunc = _COMBINE[combine]

        def first(a: Array, b: Array, c: Array) -> Array:
            return ufunc(compare(a, b), c)

    sources = (kind, kind, "pred") if combine else (kind, kind)
    if single == kind:
        return Operation(sources, ("pred",), first)
    dtype = DTYPES[single]

    def of_halves(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        (a0, a1), (b0, b1) = halves(a, dtype), halves(b, dtype)
        return first(a0, b0, *c), first(a1, b1, *c)

    return Operation(sources, ("pred", "pred"), of_halves)


def set_predicates(modifiers: tuple[str, ...]) -> Operation | None:
    """``setp`` with two results, the second made of the opposite comparison."""
    made = set_predicate(modifiers)
    if made is None or len(made.results) == 2:
        return made
    combine = modifiers[1] if modifiers[1] in _COMBINE else ""
    compare = set_predicate(tuple(m for m in modifiers if m not in _COMBINE))
    if compare is None:
        return None
    holds = compare.evaluate

    def evaluate(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        first = holds(a, b)
        second = np.logical_not(first)
        if not combine:
            return first, second
        ufunc = _COMBINE[combine]
        return ufunc(first, *c), ufunc(second, *c)

    return Operation(made.sources, ("pred", "pred"), evaluate)


def set_number(modifiers: tuple[str, ...]) -> Operation | None:
    """``set``: all ones (or 1.0) where a comparison holds, else 0; of pairs, in each half."""
    pair = match(modifiers, _COMPARISONS, "ftz?", "f16x2|bf16x2|u32", "f16x2|bf16x2")
    if pair:
        return _set_halves(*pair)
    found = match(
        modifiers, _COMPARISONS, "and|or|xor?", "ftz?", "u16|s16|u32|s32|f16|bf16|f32",
        f"{_PLAIN}|f16|bf16",
    )  # fmt: skip
    if not found:
        return None
    *_, to, kind = found
    made = set_predicate(tuple(m for m in (*found[:3], kind) if m))
    if made is None:
        return None
    holds, dtype = made.evaluate, DTYPES[to]
    true = dtype.type(1) if to in FORMATS else np.array(-1).astype(dtype)[()]
    return Operation(made.sources, (to,), lambda *s: np.where(holds(*s), true, dtype.type(0)))


def _set_halves(name: str, ftz: str, to: str, kind: str) -> Operation | None:
    """``set`` of pairs of 16-bit floats: 1.0 or, as ``u32``, 16 ones in each half."""
    single = kind.removesuffix("x2")
    made = set_predicate(tuple(m for m in (name, ftz, single) if m))
    if made is None or to not in (kind, "u32"):
        return None
    holds, dtype = made.evaluate, DTYPES[single] if to == kind else np.dtype(np.uint16)
    true = dtype.type(1) if to == kind else dtype.type(0xFFFF)

    def evaluate(a: Array, b: Array) -> Array:
        return np.where(holds(a, b), true, dtype.type(0))

    return Operation((kind, kind), (to,), on_halves(evaluate, DTYPES[single]))


def select(modifiers: tuple[str, ...]) -> Operation | None:
    """``selp``: a where c holds, else b."""
    found = match(modifiers, _PLAIN)
    if not found:
        return None
    return Operation((*found, *found, "pred"), found, lambda a, b, c: np.where(c, a, b))


def select_by_sign(modifiers: tuple[str, ...]) -> Operation | None:
    """``slct``: a where c is at least 0, else b; NaN is not."""
    found = match(modifiers, "ftz?", _PLAIN, "s32|f32")
    if not found or (found[0] and found[2] != "f32"):
        return None
    ftz, kind, sign = found

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        return np.where(np.greater_equal(flush(c, FORMATS[sign]) if ftz else c, 0), a, b)

    return Operation((kind, kind, sign), (kind,), evaluate)


# ---- all of them ---------------------------------------------------------------------------------

_HERE: dict[str, Maker] = {
    "mov": move,
    "setp": set_predicate,
    "set": set_number,
    "selp": select,
    "slct": select_by_sign,
}
_MAKERS = (_HERE, integer.OPCODES, floating.OPCODES, convert.OPCODES)
#: Names of all arithmetic instructions.
OPCODES = tuple(sorted({opcode for makers in _MAKERS for opcode in makers}))


@cache
def lookup(opcode: str, modifiers: tuple[str, ...], results: int = 1) -> Operation | None:
    """Return the operation of an instruction.

    Parameters
    ----------
    opcode : str
        E.g. ``"add"``.
    modifiers : tuple of str
        E.g. ``("rn", "f32")``.
    results : {1, 2}
        2 if the instruction names a pair of results, ``setp ... %p1|%p2``.

    Returns
    -------
    Operation or None
        None if it is not an arithmetic instruction, or has an unknown modifier or an unknown number
        of results.

    Examples
    --------
    >>> add = lookup("add", ("s32",))
    >>> add.sources, add.results, add.evaluate(np.int32([1, 2]), np.int32([3, 4])).tolist()
    (('s32', 's32'), ('s32',), [4, 6])
    """
    if opcode == "setp" and results == 2:
        return set_predicates(modifiers)
    for makers in _MAKERS:
        if opcode in makers and (made := makers[opcode](modifiers)):
            return made if len(made.results) == results else None
    return None
