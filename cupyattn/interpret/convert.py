"""Execute ``cvt``, between integers and floats of every width, with PTX's rounding and clamping."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret import exact
from cupyattn.interpret.exact import FORMATS
from cupyattn.interpret.floating import ROUNDINGS, rectify, saturate
from cupyattn.interpret.integer import saturate as saturate_integer
from cupyattn.interpret.operation import DTYPES, Evaluate, Maker, Operation, halves, match, packed

INTEGERS = "u8|u16|u32|u64|s8|s16|s32|s64"
FLOATS = "f16|bf16|f32|f64"
#: Rounding to whole numbers.
WHOLE: dict[str, np.ufunc] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _largest(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]


def _integer_to_integer(saturates: bool, to: str) -> Evaluate:
    if saturates:
        return partial(saturate_integer, kind=to)
    return lambda a: a.astype(DTYPES[to])  # truncates, or extends by the sign of the source


def _integer_to_float(rounding: str, to: str, saturates: bool) -> Evaluate:
    fmt = FORMATS[to]

    def convert(a: Array) -> Array:
        if a.dtype.itemsize < 8:
            return exact.narrow(a.astype(np.float64), fmt, rounding)
        if rounding == "rn" and to in ("f32", "f64"):
            return a.astype(fmt.dtype)
        high = np.multiply(np.right_shift(a, 32).astype(np.float64), 2.0**32)
        total, lost = exact.two_sum(high, np.bitwise_and(a, 0xFFFFFFFF).astype(np.float64))
        if to == "f64":
            return exact.adjust(total, lost, rounding)
        return exact.narrow(exact.round_to_odd(total, lost), fmt, rounding)

    return (lambda a: saturate(convert(a))) if saturates else convert


def _float_to_integer(rounding: str, flushes: bool, source: str, to: str) -> Evaluate:
    """Out-of-range values are clamped, and NaN becomes 0; float64 and 64-bit integers differ."""
    fmt, dtype = FORMATS[source], DTYPES[to]
    limits = np.iinfo(dtype)
    # Both are powers of two, or 0: exact as float64.
    low, past = float(limits.min), float(limits.max + 1)
    top_bit = np.array(1 << limits.bits - 1, f"u{dtype.itemsize}").view(dtype)
    of_nan = top_bit if source == "f64" or limits.bits == 64 else dtype.type(0)
    ufunc = WHOLE[rounding]

    def evaluate(a: Array) -> Array:
        wide = a.astype(np.float64)
        if flushes:
            wide = np.where(np.abs(a) >= fmt.tiny, wide, np.where(np.equal(a, a), 0.0, wide))
        whole = ufunc(wide)
        inside = np.logical_and(whole >= low, whole < past)
        if np.count_nonzero(inside) == inside.size:
            return whole.astype(dtype)
        result = np.where(inside, whole, 0.0).astype(dtype)
        result = np.where(whole < low, dtype.type(limits.min), result)
        result = np.where(whole >= past, dtype.type(limits.max), result)
        return np.where(np.isnan(whole), of_nan, result)

    return evaluate


def _float_to_float(rounding: str, flags: tuple[str, ...], source: str, to: str) -> Evaluate:
    have, want = FORMATS[source], FORMATS[to]
    direction = "rn" if rounding in ("", *WHOLE) else rounding
    # Conversions that only move bits keep the payload of a NaN.
    keeps_nan = to == "f64" or (source, to) in (("f64", "f32"), ("bf16", "f32"), ("f32", "f32"))

    def evaluate(a: Array) -> Array:
        if "ftz" in flags and source == "f32":
            a = exact.flush(a, have)
        if rounding in WHOLE:
            a = WHOLE[rounding](a)
        wide = a.astype(np.float64)
        result = exact.narrow(wide, want, direction)
        if "ftz" in flags and to == "f32":
            twice = partial(exact.narrow, wide * 2, want, direction)
            result = exact.flush_result(result, twice, want)
        if "sat" in flags:
            return saturate(result)
        if "satfinite" in flags:
            infinite = np.isinf(result)
            result = np.where(infinite, np.copysign(_largest(want.dtype), result), result)
        if "relu" in flags:
            result = rectify(result)
        return result if keeps_nan else exact.canonical(result, want)

    if any(flags) or rounding in WHOLE or direction != "rn":
        return evaluate
    if source == to:
        return lambda a: exact.canonical(np.array(a), want) if not keeps_nan else np.array(a)
    if (source, to) == ("f64", "bf16") or {source, to} == {"f16", "bf16"}:
        return evaluate
    if keeps_nan:
        return lambda a: a.astype(want.dtype)
    return lambda a: exact.canonical(a.astype(want.dtype), want)


def _scalar(modifiers: tuple[str, ...]) -> Operation | None:
    """Conversion of one number to one number."""
    found = match(
        modifiers, f"{ROUNDINGS}|{'|'.join(WHOLE)}?", "ftz?", "sat?", "relu?", "satfinite?",
        f"{INTEGERS}|{FLOATS}", f"{INTEGERS}|{FLOATS}",
    )  # fmt: skip
    if not found:
        return None
    rounding, *others, to, source = found
    flags = tuple(flag for flag in others if flag)
    whole, directed = rounding in WHOLE, rounding in ROUNDINGS.split("|")
    if to in FORMATS and source in FORMATS:
        narrows = DTYPES[to].itemsize < DTYPES[source].itemsize or {to, source} == {"f16", "bf16"}
        if narrows != directed or (whole and to != source):
            return None
        return Operation((source,), (to,), _float_to_float(rounding, flags, source, to))
    if "relu" in flags or "satfinite" in flags:
        return None
    if to in FORMATS and directed:
        return Operation((source,), (to,), _integer_to_float(rounding, to, "sat" in flags))
    if source in FORMATS and whole:
        return Operation((source,), (to,), _float_to_integer(rounding, "ftz" in flags, source, to))
    if to in FORMATS or source in FORMATS or rounding or "ftz" in flags:
        return None
    return Operation((source,), (to,), _integer_to_integer("sat" in flags, to))


def _pair(modifiers: tuple[str, ...]) -> Operation | None:
    """Conversion of two float32 to the upper and the lower half of a register."""
    found = match(modifiers, "rn|rz", "relu?", "satfinite?", "f16x2|bf16x2", "f32")
    if not found:
        return None
    rounding, *flags, to, source = found
    single = _float_to_float(rounding, tuple(filter(None, flags)), source, to.removesuffix("x2"))
    return Operation(("f32", "f32"), (to,), lambda a, b: packed(single(b), single(a)))


# ---- 8-bit floats --------------------------------------------------------------------------------

_EIGHT_BITS = {
    "e4m3x2": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2x2": np.dtype(ml_dtypes.float8_e5m2),
}


def _to_eight_bits(to: str, rectifies: bool) -> Evaluate:
    """Out-of-range values, infinities among them, become the largest number; NaN is 0x7f."""
    dtype = _EIGHT_BITS[to]
    largest = np.float32(_largest(dtype))

    def evaluate(a: Array) -> Array:
        a = rectify(a) if rectifies else a
        bits = np.minimum(np.maximum(a, -largest), largest).astype(dtype).view(np.uint8)
        return np.where(np.isnan(a), np.uint8(0x7F), bits).astype(np.uint16)

    return evaluate


def _eight_bits(modifiers: tuple[str, ...]) -> Operation | None:
    """Conversion of two float32 (the upper first) or float16 to a pair of 8-bit floats and back."""
    if found := match(modifiers, "rn", "satfinite", "relu?", "e4m3x2|e5m2x2", "f32|f16x2"):
        relu, to, source = found[2:]
        single = _to_eight_bits(to, bool(relu))

        def two(a: Array, b: Array) -> Array:
            return np.bitwise_or(np.left_shift(single(a), 8), single(b))

        def both(a: Array) -> Array:
            low, high = halves(a, DTYPES["f16"])
            return two(high.astype(np.float32), low.astype(np.float32))

        if source == "f32":
            return Operation(("f32", "f32"), (to,), two)
        return Operation((source,), (to,), both)
    if found := match(modifiers, "rn", "relu?", "f16x2", "e4m3x2|e5m2x2"):
        _, relu, to, source = found

        def back(a: Array) -> Array:
            numbers = []
            for shift in (0, 8):
                byte = np.right_shift(a, shift).astype(np.uint8).view(_EIGHT_BITS[source])
                number = exact.canonical(byte.astype(np.float16), FORMATS["f16"])
                numbers.append(rectify(number) if relu else number)
            return packed(*numbers)

        return Operation((source,), (to,), back)
    return None


# ---- tf32, packs of integers ---------------------------------------------------------------------

_TF32_NAN = np.uint32(0x7FFFE000)
#: Bits of a float32 that tf32 has.
_TF32_MASK = np.uint32(0xFFFFE000)


def _tf32(modifiers: tuple[str, ...]) -> Operation | None:
    """Round float32 to 10 bits of fraction; the 13 lowest bits of the register are 0."""
    found = match(modifiers, "rn|rz|rna", "satfinite?", "relu?", "tf32", "f32")
    if not found:
        return None
    rounding, saturates, rectifies = found[:3]

    def evaluate(a: Array) -> Array:
        a = rectify(a) if rectifies else a
        bits = whole = np.asarray(a).view(np.uint32)
        if rounding == "rn":
            odd = np.bitwise_and(np.right_shift(bits, np.uint32(13)), np.uint32(1))
            bits = np.add(bits, np.add(odd, np.uint32(0xFFF)))
        elif rounding == "rna":
            bits = np.add(bits, np.uint32(0x1000))
        bits = np.bitwise_and(bits, _TF32_MASK)
        rounded = np.where(np.isfinite(a), bits.view(np.float32), a)
        if saturates:
            largest = np.uint32(0x7F7FE000).view(np.float32)
            rounded = np.where(np.isinf(rounded), np.copysign(largest, rounded), rounded)
        if rounding == "rna":  # observed on an H200: a NaN is truncated like a number
            return np.where(np.isnan(a), whole & _TF32_MASK, rounded.view(np.uint32))
        return np.where(np.isnan(rounded), _TF32_NAN, rounded.view(np.uint32))

    return Operation(("f32",), ("b32",), evaluate)


def _pack(modifiers: tuple[str, ...]) -> Operation | None:
    """``cvt.pack``: two clamped integers, the second lowest, below the low bits of a third."""
    if found := match(modifiers, "pack", "sat", "u16|s16", "s32"):
        kind, bits = found[2], 16
    elif found := match(modifiers, "pack", "sat", "u8|s8|u4|s4|u2|s2", "s32", "b32"):
        kind, bits = found[2], int(found[2][1:])
    else:
        return None
    low = -(1 << bits - 1) if kind[0] == "s" else 0
    high = low + (1 << bits) - 1
    mask, step = np.uint32((1 << bits) - 1), np.uint32(bits)

    def two(a: Array, b: Array) -> Array:
        clamped = (np.minimum(np.maximum(x, np.int32(low)), np.int32(high)) for x in (a, b))
        upper, lower = (np.bitwise_and(x.view(np.uint32), mask) for x in clamped)
        return np.bitwise_or(np.left_shift(upper, step), lower)

    if bits == 16:
        return Operation(("s32", "s32"), ("b32",), two)
    return Operation(
        ("s32", "s32", "b32"),
        ("b32",),
        lambda a, b, c: np.bitwise_or(np.left_shift(c, np.uint32(2 * bits)), two(a, b)),
    )


def convert(modifiers: tuple[str, ...]) -> Operation | None:
    """``cvt``."""
    for form in (_scalar, _pair, _eight_bits, _tf32, _pack):
        if made := form(modifiers):
            return made
    return None


#: Functions that make the operation of each opcode from its modifiers.
OPCODES: dict[str, Maker] = {"cvt": convert}
