"""Integer arithmetic and operations on bits."""

from __future__ import annotations

from functools import cache, partial, reduce

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret.operation import (
    DTYPES,
    Evaluate,
    Maker,
    Operation,
    match,
    on_halves,
)

INTEGERS = "u16|u32|u64|s16|s32|s64"
SIGNED = "s16|s32|s64"
BITS = "b16|b32|b64"
PAIRS = "u16x2|s16x2"


def width(kind: str) -> int:
    """Return the bits of a PTX type."""
    return DTYPES[kind].itemsize * 8


def unsigned(kind: str) -> np.dtype[np.generic]:
    """Return the unsigned NumPy type as wide as a PTX type."""
    return DTYPES[f"u{width(kind)}"]


def _uniform(count: int, evaluate: Evaluate, kind: str) -> Operation:
    """An operation whose sources and result have one type."""
    return Operation((kind,) * count, (kind,), evaluate)


def _on_pairs(count: int, evaluate: Evaluate, kind: str) -> Operation:
    return _uniform(count, on_halves(evaluate, DTYPES[kind[:3]]), kind)


def saturate(x: Array, kind: str) -> Array:
    """Clamp integers to the range of a PTX type, and convert them to it."""
    have, want = np.iinfo(x.dtype), np.iinfo(DTYPES[kind])
    low, high = max(have.min, want.min), min(have.max, want.max)
    clamped = np.minimum(np.maximum(x, x.dtype.type(low)), x.dtype.type(high))
    return clamped.astype(DTYPES[kind])


# ---- sums and products ---------------------------------------------------------------------------


def _saturating(ufunc: np.ufunc) -> Evaluate:
    def evaluate(a: Array, b: Array) -> Array:
        return saturate(ufunc(a.astype(np.int64), b.astype(np.int64)), "s32")

    return evaluate


def _add_or_subtract(ufunc: np.ufunc, modifiers: tuple[str, ...]) -> Operation | None:
    if found := match(modifiers, INTEGERS):
        return _uniform(2, ufunc, *found)
    if found := match(modifiers, PAIRS):
        return _on_pairs(2, ufunc, *found)
    if match(modifiers, "sat", "s32"):
        return _uniform(2, _saturating(ufunc), "s32")
    return None


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * width(kind)}"


def _multiply_high(a: Array, b: Array) -> Array:
    """The upper half of products, computed from halves of 32 bits if there is no wider type."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        product = np.multiply(a.astype(wide), b.astype(wide))
        return np.right_shift(product, wide.type(bits)).astype(a.dtype)
    word, half = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64)
    (x1, x0), (y1, y0) = ((v >> word, v & half) for v in (x, y))
    middle = x1 * y0 + (x0 * y0 >> word)
    high = x1 * y1 + (middle >> word) + ((middle & half) + x0 * y1 >> word)
    if a.dtype.kind == "i":  # a negative factor x counts as x + 2^64
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def _multiply_wide(a: Array, b: Array) -> Array:
    wide = f"{a.dtype.kind}{a.dtype.itemsize * 2}"
    return np.multiply(a.astype(wide), b.astype(wide))


_PRODUCTS: dict[str, Evaluate] = {
    "lo": np.multiply,
    "hi": _multiply_high,
    "wide": _multiply_wide,
}


def _product(modifiers: tuple[str, ...]) -> tuple[str, str, Evaluate] | None:
    """The type of the factors, the type of the product, and the function that computes it."""
    found = match(modifiers, "lo|hi|wide", INTEGERS)
    if not found or found in (("wide", "u64"), ("wide", "s64")):
        return None
    part, kind = found
    return kind, _wide(kind) if part == "wide" else kind, _PRODUCTS[part]


def multiply(modifiers: tuple[str, ...]) -> Operation | None:
    """``mul``."""
    if not (found := _product(modifiers)):
        return None
    kind, result, product = found
    return Operation((kind, kind), (result,), product)


def multiply_add(modifiers: tuple[str, ...]) -> Operation | None:
    """``mad``."""
    if modifiers == ("hi", "sat", "s32"):
        add = _saturating(np.add)
        return _uniform(3, lambda a, b, c: add(_multiply_high(a, b), c), "s32")
    if not (found := _product(modifiers)):
        return None
    kind, result, product = found
    return Operation((kind, kind, result), (result,), lambda a, b, c: np.add(product(a, b), c))


def _divide(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient toward zero and remainder; both are all ones if the divisor is 0.

    PTX leaves division by zero unspecified. This is what the machine code of ptxas 13 returns for
    all six types, on sm_80 and sm_90: it replaces both results by -1 afterwards.
    """
    if a.dtype.kind == "i":
        bits = f"u{a.dtype.itemsize}"
        quotient, remainder = _divide(np.abs(a).view(bits), np.abs(b).view(bits))
        by_zero = np.equal(b, 0)
        negative = np.logical_and(np.less(np.bitwise_xor(a, b), 0), ~by_zero)
        signed: Array = np.where(negative, np.negative(quotient), quotient)
        negative = np.logical_and(np.less(a, 0), ~by_zero)
        rest: Array = np.where(negative, np.negative(remainder), remainder)
        return signed.view(a.dtype), rest.view(a.dtype)
    quotient = np.floor_divide(a, b)
    remainder = np.subtract(a, np.multiply(quotient, b))
    if np.count_nonzero(b) != np.size(b):
        ones = np.iinfo(a.dtype).max
        quotient, remainder = (np.where(np.equal(b, 0), ones, x) for x in (quotient, remainder))
    return quotient, remainder


def divide(modifiers: tuple[str, ...]) -> Operation | None:
    """``div`` of integers."""
    found = match(modifiers, INTEGERS)
    return _uniform(2, lambda a, b: _divide(a, b)[0], *found) if found else None


def remainder(modifiers: tuple[str, ...]) -> Operation | None:
    """``rem``."""
    found = match(modifiers, INTEGERS)
    return _uniform(2, lambda a, b: _divide(a, b)[1], *found) if found else None


def _signed(ufunc: np.ufunc, modifiers: tuple[str, ...]) -> Operation | None:
    found = match(modifiers, SIGNED)
    return _uniform(1, ufunc, *found) if found else None


def _extremum(ufunc: np.ufunc, modifiers: tuple[str, ...]) -> Operation | None:
    if found := match(modifiers, INTEGERS):
        return _uniform(2, ufunc, *found)
    if found := match(modifiers, PAIRS):
        return _on_pairs(2, ufunc, *found)
    if match(modifiers, "relu", "s32"):
        return _uniform(2, lambda a, b: np.maximum(ufunc(a, b), 0), "s32")
    if match(modifiers, "relu", "s16x2"):
        return _on_pairs(2, lambda a, b: np.maximum(ufunc(a, b), 0), "s16x2")
    return None


def sum_of_differences(modifiers: tuple[str, ...]) -> Operation | None:
    """``sad``: c + |a - b|."""

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        return np.add(c, np.subtract(np.maximum(a, b), np.minimum(a, b)))

    found = match(modifiers, INTEGERS)
    return _uniform(3, evaluate, *found) if found else None


def dot_of_bytes(modifiers: tuple[str, ...]) -> Operation | None:
    """``dp4a``: c plus the product of vectors of four bytes."""

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        total = c.view(np.uint32)
        for shift in (0, 8, 16, 24):
            x, y = _piece(a, shift, a_kind + "8"), _piece(b, shift, b_kind + "8")
            total = np.add(total, np.multiply(x, y))
        return total.view(DTYPES[result])

    found = match(modifiers, "u32|s32", "u32|s32")
    if not found:
        return None
    a_kind, b_kind = (kind[0] for kind in found)
    result = "s32" if "s" in (a_kind, b_kind) else "u32"
    return Operation(("b32", "b32", result), (result,), evaluate)


def dot_of_halfwords(modifiers: tuple[str, ...]) -> Operation | None:
    """``dp2a``: c plus the product of two 16-bit numbers with two bytes of the other."""

    def evaluate(a: Array, b: Array, c: Array) -> Array:
        total = c.view(np.uint32)
        for i in (0, 1):
            x, y = _piece(a, 16 * i, a_kind + "16"), _piece(b, first + 8 * i, b_kind + "8")
            total = np.add(total, np.multiply(x, y))
        return total.view(DTYPES[result])

    found = match(modifiers, "lo|hi", "u32|s32", "u32|s32")
    if not found:
        return None
    first = 0 if found[0] == "lo" else 16
    a_kind, b_kind = (kind[0] for kind in found[1:])
    result = "s32" if "s" in (a_kind, b_kind) else "u32"
    return Operation(("b32", "b32", result), (result,), evaluate)


def _piece(x: Array, shift: int, kind: str) -> Array:
    """An integer within 32 bits, sign-extended to 32 bits."""
    piece = np.right_shift(x, np.uint32(shift)).astype(DTYPES[kind])
    return piece.astype(np.int32).view(np.uint32)


# ---- bits ----------------------------------------------------------------------------------------


def _logical(bitwise: np.ufunc, logical: np.ufunc, modifiers: tuple[str, ...]) -> Operation | None:
    if found := match(modifiers, BITS):
        return _uniform(bitwise.nin, bitwise, *found)
    return _uniform(logical.nin, logical, "pred") if modifiers == ("pred",) else None


def logical_not(modifiers: tuple[str, ...]) -> Operation | None:
    """``cnot``: 1 for zero, else 0."""

    def evaluate(a: Array) -> Array:
        return np.equal(a, 0).astype(a.dtype)

    found = match(modifiers, BITS)
    return _uniform(1, evaluate, *found) if found else None


def any_logic(modifiers: tuple[str, ...]) -> Operation | None:
    """``lop3``: the function of three bits that a table of eight bits names."""

    def evaluate(a: Array, b: Array, c: Array, table: Array) -> Array:
        rows = int(np.ravel(table)[0])  # an immediate: the same in every lane
        complement = rows.bit_count() > 4
        if complement:
            rows ^= 0xFF
        result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
        for row in range(8):
            if rows >> row & 1:
                term = np.bitwise_and(
                    a if row & 4 else np.invert(a), b if row & 2 else np.invert(b)
                )
                result |= np.bitwise_and(term, c if row & 1 else np.invert(c))
        return np.invert(result) if complement else result

    if modifiers != ("b32",):
        return None
    return Operation(("b32",) * 3 + ("u32",), ("b32",), evaluate)


def shift_left(modifiers: tuple[str, ...]) -> Operation | None:
    """``shl``; a shift of the width or more leaves zeros, in NumPy as in PTX."""
    found = match(modifiers, BITS)
    if not found:
        return None
    (kind,) = found
    count = _count(kind)
    return Operation((kind, "u32"), (kind,), lambda a, n: np.left_shift(a, count(n)))


def shift_right(modifiers: tuple[str, ...]) -> Operation | None:
    """``shr``: zeros or, for signed types, signs come in from the left."""
    found = match(modifiers, f"{BITS}|{INTEGERS}")
    if not found:
        return None
    (kind,) = found
    count = _count(kind)
    return Operation((kind, "u32"), (kind,), lambda a, n: np.right_shift(a, count(n)))


def _count(kind: str) -> Evaluate:
    """Return a function that converts a shift count to the shifted type, at most its width."""
    most, dtype = np.array(width(kind), np.uint32), DTYPES[kind]
    return lambda n: np.minimum(n, most).astype(dtype)


_WORD = np.array(32, np.uint64)


def funnel_shift(modifiers: tuple[str, ...]) -> Operation | None:
    """``shf``: the upper (``l``) or lower (``r``) word of the shifted pair {b, a}."""

    def evaluate(a: Array, b: Array, n: Array) -> Array:
        pair = np.bitwise_or(np.left_shift(b.astype(np.uint64), _WORD), a)
        n = np.bitwise_and(n, np.uint32(31)) if wraps else np.minimum(n, np.uint32(32))
        if left:
            return np.right_shift(np.left_shift(pair, n), _WORD).astype(np.uint32)
        return np.right_shift(pair, n).astype(np.uint32)

    found = match(modifiers, "l|r", "wrap|clamp", "b32")
    if not found:
        return None
    left, wraps = found[0] == "l", found[1] == "wrap"
    return Operation(("b32", "b32", "u32"), ("b32",), evaluate)


def _field(position: Array, length: Array, kind: str) -> tuple[Array, Array]:
    """Position, and mask of the length, of a field of bits; both are read from a byte."""
    word = unsigned(kind)
    position, length = (np.bitwise_and(x, 0xFF).astype(word) for x in (position, length))
    one = word.type(1)
    return position, np.subtract(np.left_shift(one, length), one)


def extract_field(modifiers: tuple[str, ...]) -> Operation | None:
    """``bfe``: a field of bits, extended by zeros or by its sign."""

    def evaluate(a: Array, position: Array, length: Array) -> Array:
        bits = np.asarray(a).view(unsigned(kind))
        position, mask = _field(position, length, kind)
        field = np.bitwise_and(np.right_shift(bits, position), mask)
        if kind[0] == "s":
            length = np.bitwise_and(length, 0xFF).astype(bits.dtype)
            top = bits.dtype.type(width(kind) - 1)
            last = np.minimum(position + length - bits.dtype.type(1), top)
            sign = np.bitwise_and(np.right_shift(bits, last), bits.dtype.type(1))
            # Bits above the word count as sign bits, too.
            kept = np.bitwise_and(mask, np.right_shift(bits.dtype.type(_ones(kind)), position))
            extends = np.logical_and(sign, length != 0)
            field = np.where(extends, np.bitwise_or(field, np.invert(kept)), field)
        return field.view(DTYPES[kind])

    found = match(modifiers, "u32|u64|s32|s64")
    if not found:
        return None
    (kind,) = found
    return Operation((kind, "u32", "u32"), (kind,), evaluate)


def _ones(kind: str) -> int:
    return int((1 << width(kind)) - 1)


def insert_field(modifiers: tuple[str, ...]) -> Operation | None:
    """``bfi``: the low bits of a, put at a position of b."""

    def evaluate(a: Array, b: Array, position: Array, length: Array) -> Array:
        position, mask = _field(position, length, kind)
        mask, bits = np.left_shift(mask, position), np.left_shift(a, position)
        return np.bitwise_or(np.bitwise_and(bits, mask), np.bitwise_and(b, np.invert(mask)))

    found = match(modifiers, "b32|b64")
    if not found:
        return None
    (kind,) = found
    return Operation((kind, kind, "u32", "u32"), (kind,), evaluate)


#: The selectors of each mode of ``prmt``, by the two lowest bits of its control.
_BYTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@cache
def _byte_moves(control: int) -> list[tuple[bool, np.ufunc, Array, Array]] | None:
    """Return source, direction, distance and mask of a byte move; None if it extends signs."""
    masks: dict[tuple[bool, int], int] = {}
    for i in range(4):
        selector = control >> 4 * i & 15
        if selector & 8:
            return None
        move = selector >= 4, 8 * (i - selector % 4)
        masks[move] = masks.get(move, 0) | 0xFF << 8 * i
    return [
        (
            of_b,
            np.left_shift if left > 0 else np.right_shift,
            np.array(abs(left), np.uint32),
            np.array(mask, np.uint32),
        )
        for (of_b, left), mask in masks.items()
    ]


def _moved(a: Array, b: Array, moves: list[tuple[bool, np.ufunc, Array, Array]]) -> Array:
    """Return the bytes selected by `_byte_moves`, combined."""
    parts = [np.bitwise_and(shift(b if of_b else a, by), mask) for of_b, shift, by, mask in moves]
    return np.broadcast_to(reduce(np.bitwise_or, parts), np.broadcast(a, b).shape)


def permute_bytes(modifiers: tuple[str, ...]) -> Operation | None:
    """``prmt``: four of the eight bytes {b, a}, or their signs spread over a byte."""

    def evaluate(a: Array, b: Array, control: Array) -> Array:
        if table is not None:
            control = table[np.bitwise_and(control, 3)]
        if np.ndim(control) == 0 and (moves := _byte_moves(int(control) & 0xFFFF)):
            return _moved(a, b, moves)
        pair = np.bitwise_or(np.left_shift(b.astype(np.uint64), _WORD), a)
        signs = np.count_nonzero(np.bitwise_and(control, 0x8888))
        result = np.zeros(np.broadcast(a, b, control).shape, np.uint32)
        for shift in range(0, 16, 4):
            selector = np.right_shift(control, np.uint32(shift))
            place = np.left_shift(np.bitwise_and(selector, 7), np.uint32(3)).astype(np.uint64)
            byte = np.bitwise_and(np.right_shift(pair, place).astype(np.uint32), 0xFF)
            if signs:
                spread = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
                byte = np.where(selector & 8, spread, byte)
            result |= np.left_shift(byte, np.uint32(2 * shift))
        return result

    found = match(modifiers, "b32", "|".join(_BYTE_MODES) + "?")
    if not found:
        return None
    mode = found[1]
    table = np.array(_BYTE_MODES[mode], np.uint32) if mode else None
    return Operation(("b32", "b32", "b32"), ("b32",), evaluate)


def _length(x: Array) -> Array:
    """Number of bits up to the highest set bit; a float64 represents 32 bits exactly."""
    if x.dtype.itemsize < 8:
        return np.frexp(x.astype(np.float64))[1].astype(np.uint32)
    high = np.right_shift(x, _WORD)
    low = _length(x.astype(np.uint32))
    return np.where(high != 0, np.add(_length(high.astype(np.uint32)), np.uint32(32)), low)


def _counted(evaluate: Evaluate, modifiers: tuple[str, ...]) -> Operation | None:
    """An operation on 32 or 64 bits that counts."""
    found = match(modifiers, "b32|b64")
    return Operation(found, ("u32",), evaluate) if found else None


def _leading_zeros(a: Array) -> Array:
    return np.subtract(np.uint32(a.dtype.itemsize * 8), _length(a))


def find_leading(modifiers: tuple[str, ...]) -> Operation | None:
    """``bfind``: the position of the highest bit that is set or, in a negative number, not set."""

    def evaluate(a: Array) -> Array:
        if kind[0] == "s":
            magnitude: Array = np.where(a < 0, np.invert(a), a)
            a = magnitude.view(unsigned(kind))
        place = np.subtract(_length(a), np.uint32(1))  # all ones if there is none
        if not amount:
            return place
        return np.where(a != 0, np.subtract(np.uint32(width(kind) - 1), place), place)

    found = match(modifiers, "shiftamt?", "u32|u64|s32|s64")
    if not found:
        return None
    amount, kind = found
    return Operation((kind,), ("u32",), evaluate)


def reverse_bits(modifiers: tuple[str, ...]) -> Operation | None:
    """``brev``: neighbours change places, then neighbouring pairs, and so on."""

    def evaluate(a: Array) -> Array:
        for shift, mask in steps:
            up = np.left_shift(np.bitwise_and(a, mask), shift)
            a = np.bitwise_or(up, np.bitwise_and(np.right_shift(a, shift), mask))
        return a

    found = match(modifiers, "b32|b64")
    if not found:
        return None
    word = unsigned(*found).type
    shifts = [1 << i for i in range(width(*found).bit_length() - 1)]
    steps = [(word(n), word(_ones(*found) // ((1 << n) + 1))) for n in shifts]
    return _uniform(1, evaluate, *found)


#: Functions that make the operation of each opcode from its modifiers.
OPCODES: dict[str, Maker] = {
    "add": partial(_add_or_subtract, np.add),
    "sub": partial(_add_or_subtract, np.subtract),
    "mul": multiply,
    "mad": multiply_add,
    "div": divide,
    "rem": remainder,
    "abs": partial(_signed, np.abs),
    "neg": partial(_signed, np.negative),
    "min": partial(_extremum, np.minimum),
    "max": partial(_extremum, np.maximum),
    "sad": sum_of_differences,
    "dp4a": dot_of_bytes,
    "dp2a": dot_of_halfwords,
    "and": partial(_logical, np.bitwise_and, np.logical_and),
    "or": partial(_logical, np.bitwise_or, np.logical_or),
    "xor": partial(_logical, np.bitwise_xor, np.logical_xor),
    "not": partial(_logical, np.invert, np.logical_not),
    "cnot": logical_not,
    "lop3": any_logic,
    "shl": shift_left,
    "shr": shift_right,
    "shf": funnel_shift,
    "bfe": extract_field,
    "bfi": insert_field,
    "prmt": permute_bytes,
    "popc": partial(_counted, lambda a: np.bitwise_count(a).astype(np.uint32)),
    "clz": partial(_counted, _leading_zeros),
    "brev": reverse_bits,
    "bfind": find_leading,
}
