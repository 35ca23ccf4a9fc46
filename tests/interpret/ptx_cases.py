"""Kernels of bare instructions, with what they must write by the text of the PTX ISA.

`PTX` is data like `tests.prims.prims_cases.PRIMS`, for the instructions that the interpreter covers
and no header of ``kernels_cu/prims`` uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.interpret.floating import APPROXIMATION_ERROR
from tests.interpret.ptx_warp_cases import WARP_PTX
from tests.prims.prim import Arguments, Prim, rng

COUNT = 256
WORD = 2**32

# ---- integers ------------------------------------------------------------------------------------


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def clamped(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def lop3(table: int) -> Callable[[int, int, int], int]:
    def evaluate(a: int, b: int, c: int) -> int:
        bits = (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1) for i in range(32))
        return sum((table >> index & 1) << i for i, index in enumerate(bits))

    return evaluate


def prmt(a: int, b: int, selectors: list[int]) -> int:
    pool = (a | b << 32).to_bytes(8, "little")
    result = 0
    for i, selector in enumerate(selectors):
        byte = pool[selector & 7]
        if selector & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * i
    return result


#: For each mode, what the two lowest bits n of the control select, lowest byte of the result first.
PRMT_MODES: list[Callable[[int], list[int]]] = [
    lambda n: [n, n + 1, n + 2, n + 3],  # f4e
    lambda n: [n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7],  # b4e
    lambda n: [n] * 4,  # rc8
    lambda n: [max(i, n) for i in range(4)],  # ecl
    lambda n: [min(i, n) for i in range(4)],  # ecr
    lambda n: [2 * (n & 1), 2 * (n & 1) + 1] * 2,  # rc16
]


def shf(left: bool, wraps: bool) -> Callable[[int, int, int], int]:
    def evaluate(a: int, b: int, c: int) -> int:
        n = c & 31 if wraps else min(c, 32)
        pair = b << 32 | a
        return (pair << n) >> 32 if left else pair >> n

    return evaluate


def bfe(a: int, position: int, length: int, sign: bool) -> int:
    """The loop of the PTX ISA."""
    last = min(position + length - 1, 31)
    fill = (a >> last & 1) if sign and length else 0
    at = [i + position for i in range(32)]
    return sum(((a >> p & 1) if i < length and p <= 31 else fill) << i for i, p in enumerate(at))


def bfi(a: int, b: int, position: int, length: int) -> int:
    for i in range(length):
        if position + i > 31:
            break
        b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def pieces(x: int, width: int, sign: bool) -> list[int]:
    parts = [x >> i & ((1 << width) - 1) for i in range(0, 32, width)]
    return [signed(p, width) if sign else p for p in parts]


def dp4a(a_sign: bool, b_sign: bool) -> Callable[[int, int, int], int]:
    return lambda a, b, c: (
        c + sum(x * y for x, y in zip(pieces(a, 8, a_sign), pieces(b, 8, b_sign), strict=True))
    )


def dp2a(high: bool, a_sign: bool, b_sign: bool) -> Callable[[int, int, int], int]:
    return lambda a, b, c: (
        c
        + sum(
            x * y
            for x, y in zip(
                pieces(a, 16, a_sign), pieces(b, 8, b_sign)[2 * high :][:2], strict=True
            )
        )
    )


def bfind(x: int, sign: bool, amount: bool = False) -> int:
    if sign and signed(x) < 0:
        x = ~x & (WORD - 1)
    place = x.bit_length() - 1
    return 31 - place if amount and place >= 0 else place


def divided(a: int, b: int) -> tuple[int, int]:
    a, b = signed(a), signed(b | 1)
    quotient = abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)
    return quotient, a - quotient * b


S32 = -(2**31), 2**31 - 1
INTEGERS: list[Callable[[int, int, int], int]] = [
    *map(lop3, (0x96, 0xE8, 0xCA, 0x1D)),
    lambda a, b, c: prmt(a, b, [c >> i & 15 for i in (0, 4, 8, 12)]),
    *(lambda a, b, c, mode=mode: prmt(a, b, mode(c & 3)) for mode in PRMT_MODES),
    *(shf(left, wraps) for left in (True, False) for wraps in (True, False)),
    *(lambda a, b, c, sign=sign: bfe(a, b & 63, c & 63, sign) for sign in (False, True)),
    lambda a, b, c: bfi(a, b, c & 63, b & 31),
    dp4a(False, False), dp4a(True, True), dp4a(False, True),
    dp2a(False, True, False), dp2a(True, False, True),
    lambda a, b, c: bin(a).count("1"),
    lambda a, b, c: 32 - a.bit_length(),
    lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    lambda a, b, c: bfind(a, False),
    lambda a, b, c: bfind(a, True),
    lambda a, b, c: bfind(a, False, amount=True),
    lambda a, b, c: a * b >> 32,
    lambda a, b, c: signed(a) * signed(b) >> 32,
    lambda a, b, c: a * b + c,
    lambda a, b, c: (a * b >> 32) + c,
    lambda a, b, c: c + abs(signed(a) - signed(b)),
    lambda a, b, c: clamped(signed(a) + signed(b), *S32),
    lambda a, b, c: clamped(signed(a) - signed(b), *S32),
    lambda a, b, c: a << min(b, 32),
    lambda a, b, c: a >> min(b, 32),
    lambda a, b, c: signed(a) >> min(b, 32),
    lambda a, b, c: divided(a, b)[0],
    lambda a, b, c: divided(a, b)[1],
    lambda a, b, c: min(signed(a), signed(b)),
    lambda a, b, c: max(a, b),
    lambda a, b, c: abs(signed(a)),
    lambda a, b, c: int(a == 0),
    lambda a, b, c: a if signed(c) >= 0 else b,
    lambda a, b, c: -1 if signed(a) < signed(b) else 0,
]  # fmt: skip


def integer_arguments() -> Arguments:
    """Random words; the upper half of the columns has small second and third operands."""
    x = rng().integers(0, WORD, (3, COUNT), np.uint32)
    edges = [0, 1, 2**31, 2**31 - 1, WORD - 1, 0x80808080]
    x[0, : len(edges)] = x[1, 6 : 6 + len(edges)] = x[2, 12 : 12 + len(edges)] = edges
    x[1:, 128:] %= 40
    return {"x": x, "y": np.full((len(INTEGERS), COUNT), 0xDEADBEEF, np.uint32)}


def integer_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    columns = [tuple(map(int, column)) for column in x.T]
    rows = [[evaluate(*column) % WORD for column in columns] for evaluate in INTEGERS]
    return {"y": np.array(rows, np.uint32)}


# ---- float32 -------------------------------------------------------------------------------------

ROUNDINGS = ("rn", "rz", "rm", "rp")
TINY = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max
NAN = np.uint32(0x7FFFFFFF)


@np.errstate(over="ignore")
def rounded(x: Fraction, mode: str, negative: bool) -> np.float32:
    """Round an exact number to float32; `negative` is the sign of a zero."""
    if x == 0:
        return np.float32(-0.0 if negative else 0.0)
    near = np.float32(float(x)) if abs(x) < Fraction(2) ** 129 else np.float32(math.inf)
    near = np.copysign(near, np.float32(-1 if x < 0 else 1))
    below, above = near, near
    if not np.isfinite(near) or Fraction(float(near)) > x:
        below = np.nextafter(near, np.float32(-np.inf))
    if np.isfinite(near) and Fraction(float(near)) < x:
        above = np.nextafter(near, np.float32(np.inf))
    if near == -np.inf:
        below, above = near, -LARGEST
    if below == above:
        return near
    if mode == "rn":
        limit = Fraction(2) ** 128
        low, high = (
            Fraction(float(v)) if np.isfinite(v) else (limit if v > 0 else -limit)
            for v in (below, above)
        )
        if x - low == high - x:
            return above if int(below.view(np.uint32)) & 1 else below
        return below if x - low < high - x else above
    toward_zero = below if x > 0 else above
    return {"rz": toward_zero, "rm": below, "rp": above}[mode]


def flushed(x: np.float32) -> np.float32:
    return np.copysign(np.float32(0), x) if abs(x) < TINY else x


def arithmetic(
    name: str, mode: str = "rn", ftz: bool = False, sat: bool = False
) -> Callable[..., np.uint32]:
    """One instruction on one lane: the bits of its result."""

    def evaluate(a: np.float32, b: np.float32, c: np.float32) -> np.uint32:
        if ftz:
            a, b, c = map(flushed, (a, b, c))
        if name == "sub":
            b = -b
        operands = (a, b, c) if name == "fma" else (a, b)
        usual: dict[str, Callable[[], Any]] = {
            "add": lambda: a + b, "sub": lambda: a + b, "mul": lambda: a * b,
            "div": lambda: np.divide(a, b), "fma": lambda: np.float64(a) * np.float64(b) + c,
        }  # fmt: skip
        with np.errstate(all="ignore"):
            special = np.float32(usual[name]())
        if not all(map(np.isfinite, operands)) or (name == "div" and b == 0):
            result = special
        else:
            x, y, z = (Fraction(float(v)) if np.isfinite(v) else Fraction(0) for v in (a, b, c))
            exact = {
                "add": lambda: x + y, "sub": lambda: x + y, "mul": lambda: x * y,
                "div": lambda: x / y, "fma": lambda: x * y + z,
            }[name]()  # fmt: skip
            product = bool(np.signbit(a)) != bool(np.signbit(b))
            if name in ("mul", "div"):
                negative = product
            else:
                signs = (product, bool(np.signbit(c)))
                if name != "fma":
                    signs = (bool(np.signbit(a)), bool(np.signbit(b)))
                zeros = (x * y, z) if name == "fma" else (x, y)
                negative = all(signs) if zeros == (0, 0) and signs[0] == signs[1] else mode == "rm"
            result = rounded(exact, mode, negative)
        if ftz:
            result = flushed(result)
        if sat:
            result = np.float32(0) if not result > 0 else min(result, np.float32(1))
        return NAN if np.isnan(result) else result.view(np.uint32)

    return evaluate


def extremum(largest: bool, ftz: bool = False, nan: bool = False) -> Callable[..., np.uint32]:
    def evaluate(a: np.float32, b: np.float32, _: np.float32) -> np.uint32:
        if ftz:
            a, b = flushed(a), flushed(b)
        if np.isnan(a) or np.isnan(b):
            if nan or (np.isnan(a) and np.isnan(b)):
                return NAN
            return (b if np.isnan(a) else a).view(np.uint32)
        ordered = sorted((a, b), key=lambda v: (v, not np.signbit(v)))
        return np.float32(ordered[1 if largest else 0]).view(np.uint32)

    return evaluate


ARITHMETIC = [
    *(
        arithmetic(name, mode, ftz)
        for name, ftz in (
            ("add", False), ("sub", True), ("mul", False), ("mul", True), ("fma", False),
            ("fma", True), ("div", False),
        )
        for mode in ROUNDINGS
    ),
    arithmetic("add", sat=True), arithmetic("mul", sat=True), arithmetic("fma", "rn", True, True),
    extremum(False), extremum(True), extremum(True, ftz=True), extremum(False, nan=True),
    extremum(True, nan=True),
]  # fmt: skip


def float_values(rows: int) -> np.ndarray:
    """Numbers of every size, some of which cancel; zeros, subnormals, infinities and NaN."""
    draw = rng()
    x = draw.standard_normal((rows, COUNT)) * 2.0 ** draw.integers(-3, 4, (rows, COUNT))
    x[:, 64:128] *= 2.0 ** draw.integers(-75, 64, (rows, 64))
    x[:, 128:140] *= 2.0**-127
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    x[:, 140:160] = np.float32(1) + x[:, 140:160].view(np.uint32) % 3 * np.float32(2.0**-23)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, LARGEST, -LARGEST, 1.0, 2.0**-126]
    payloads = [0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0x7FC01234, 0xFF812345]
    x[0, 128:133] = np.array(payloads, np.uint32).view(np.float32)
    for i in range(rows):
        x[i, 160:] = np.array(special, np.float32)[(np.arange(96) // (1, 9, 4)[i]) % len(special)]
    return x


def float_arguments(rows: int, results: int) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        y = np.full((results, COUNT), 0xDEADBEEF, np.uint32)
        return {"x": float_values(rows), "y": y}

    return arguments


def arithmetic_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    columns = list(x.T)
    return {"y": np.array([[f(*column) for column in columns] for f in ARITHMETIC], np.uint32)}


def root_arguments() -> Arguments:
    x = np.abs(float_values(1))[0]
    x[~np.isfinite(x) | (x == 0)] = 2.0
    x[x > 2.0**125] = 3.0  # the reciprocal stays normal
    return {"x": x, "y": np.zeros((8, COUNT), np.float32)}


def root_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    def root(value: Fraction) -> Fraction:
        """To 2^-80: no root of a float32 comes that near to the middle of two others."""
        scale = 4**240
        number = value.numerator * value.denominator * scale
        floor = math.isqrt(number)
        inexact = Fraction(0 if floor * floor == number else 1, 2)
        return (floor + inexact) / (value.denominator * 2**240)

    values = [Fraction(float(v)) for v in x]
    exact = [[root(v) for v in values], [1 / v for v in values]]
    rows = [[rounded(v, mode, False) for v in row] for row in exact for mode in ROUNDINGS]
    return {"y": np.array(rows, np.float32)}


# ---- approximations ------------------------------------------------------------------------------

#: Function and where it is asked.
APPROXIMATIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], tuple[float, float]]] = {
    "ex2": (np.exp2, (-120.0, 120.0)),
    "lg2": (np.log2, (0.5, 2.0)),
    "rcp": (np.reciprocal, (1.0, 2.0)),
    "sqrt": (np.sqrt, (1e-6, 1e6)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (1e-6, 1e6)),
    "sin": (np.sin, (-math.pi, math.pi)),
    "cos": (np.cos, (-math.pi, math.pi)),
    "tanh": (np.tanh, (-4.0, 4.0)),
}


def promised(name: str) -> dict[str, float]:
    """Return the allowed difference of an approximation and the interpreter's model of it."""
    kind, error = APPROXIMATION_ERROR[name]
    kinds = {"rel": "relative", "abs": "absolute", "ulp": "relative"}
    if kind == "ulp":  # of a number of 24 bits, whose last place is at most 2^-23 of it
        error *= 2.0**-23
    return {kinds[kind]: error}


def approximations() -> Iterator[Prim]:
    for name, (function, limits) in APPROXIMATIONS.items():

        def arguments(limits: tuple[float, float] = limits) -> Arguments:
            x = rng().uniform(*limits, COUNT).astype(np.float32)
            return {"x": x, "y": np.full(COUNT, np.nan, np.float32)}

        def expected(
            x: np.ndarray, function: Callable[[np.ndarray], np.ndarray] = function, **_: Any
        ) -> dict[str, np.ndarray]:
            return {"y": function(x.astype(np.float64))}

        yield Prim(
            f"ptx-{name}.approx", "ptx_float", f"approximate_{name}", COUNT, arguments, expected,
            **promised(f"{name}.approx.f32"),
        )  # fmt: skip
    yield Prim(
        "ptx-div.approx", "ptx_float", "approximate_div", COUNT,
        lambda: {
            "x": rng().uniform(0.5, 100.0, (2, COUNT)).astype(np.float32),
            "y": np.full((2, COUNT), np.nan, np.float32),
        },
        lambda x, **_: {"y": np.tile(x[0].astype(np.float64) / x[1], (2, 1))},
        **promised("div.approx.f32"),
    )  # fmt: skip


# ---- conversions ---------------------------------------------------------------------------------


def narrowed(x: np.ndarray, dtype: Any, mode: str = "rn") -> np.ndarray:
    """The bits of float32 rounded to 16 bits, to nearest even or toward zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(dtype).view(np.uint16)
        wide = bits.view(dtype).astype(np.float32)
    if mode == "rz":  # one back where rounding went away from zero
        bits = np.where(np.abs(wide) > np.abs(x), bits - np.uint16(1), bits)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits).astype(np.uint32)


def pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return high.astype(np.uint32) << 16 | low.astype(np.uint32)


def to_integer(x: np.ndarray, function: Callable[[float], int], low: int, high: int) -> list[int]:
    return [
        0 if np.isnan(v) else clamped(function(float(v)), low, high) if np.isfinite(v)
        else (high if v > 0 else low)
        for v in x
    ]  # fmt: skip


def tf32(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from zero; infinities and NaN are cut, as an H200 does it."""
    bits = x.view(np.uint32)
    return np.where(np.isfinite(x), bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def conversions_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    a, b = x
    n = a.view(np.int32).tolist()
    f16, bf16 = np.float16, ml_dtypes.bfloat16
    unit = np.where(a > 0, np.minimum(a, np.float32(1)), np.float32(0))
    above_zero = [np.where(v <= 0, np.float32(0), v) for v in (a, b)]
    with np.errstate(all="ignore"):
        small = np.where(np.abs(a) < TINY, np.float32(0), a)
    rows: list[Any] = [
        narrowed(a, f16), narrowed(a, f16, "rz"), narrowed(unit, f16),
        narrowed(a, bf16), narrowed(a, bf16, "rz"),
        pair(narrowed(a, f16), narrowed(b, f16)),
        pair(narrowed(a, bf16, "rz"), narrowed(b, bf16, "rz")),
        pair(*(narrowed(v, f16) for v in above_zero)),
        tf32(a),
        to_integer(a, round, *S32), to_integer(a, math.trunc, *S32),
        to_integer(a, math.floor, *S32), to_integer(a, math.ceil, *S32),
        to_integer(a, math.trunc, 0, WORD - 1), to_integer(small, round, -128, 127),
        to_integer(a, math.trunc, 0, 255),
        [clamped(v, -128, 127) for v in n], [clamped(v, 0, 255) for v in n],
        [clamped(v, 0, 65535) for v in n],
        [0x5678 << 16 | clamped(v >> 20, 0, 255) << 8 | clamped(v >> 7, 0, 255) for v in n],
        [clamped(v >> 8, -32768, 32767) << 16 | clamped(v >> 20, -32768, 32767) & 0xFFFF
         for v in n],
        *([rounded(Fraction(v), mode, False).view(np.uint32) for v in n] for mode in ROUNDINGS),
        [rounded(Fraction(v % WORD), "rz", False).view(np.uint32) for v in n],
    ]  # fmt: skip
    return {"y": np.array([[int(v) % WORD for v in row] for row in rows], np.uint32)}


def eight_bits_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    def to(v: np.ndarray, dtype: Any) -> np.ndarray:
        largest = np.float32(ml_dtypes.finfo(dtype).max)
        codes = np.clip(v, -largest, largest).astype(dtype).view(np.uint8)
        return np.where(np.isnan(v), 0x7F, codes.astype(np.uint32))

    a, b = x
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    with np.errstate(invalid="ignore"):
        positive = [np.where(v <= 0, np.float32(0), v) for v in (a, b)]
        rows = [to(a, e4m3) << 8 | to(b, e4m3), to(a, e5m2) << 8 | to(b, e5m2)]
        rows.append(to(positive[0], e4m3) << 8 | to(positive[1], e4m3))
    half = narrowed(np.arange(256, dtype=np.uint8).view(e4m3).astype(np.float32), np.float16)
    return {"y": np.stack([*rows, pair(half, half)]).astype(np.uint32)}


# ---- all of them ---------------------------------------------------------------------------------

PTX = [
    Prim("ptx-integers", "ptx_bits", "integers", COUNT, integer_arguments, integer_expected),
    Prim(
        "ptx-arithmetic", "ptx_float", "arithmetic", COUNT, float_arguments(3, len(ARITHMETIC)),
        arithmetic_expected,
    ),
    Prim("ptx-roots", "ptx_float", "roots", COUNT, root_arguments, root_expected),
    *approximations(),
    Prim(
        "ptx-conversions", "ptx_float", "conversions", COUNT, float_arguments(2, 26),
        conversions_expected,
    ),
    Prim(
        "ptx-eight_bits", "ptx_float", "eight_bits", COUNT, float_arguments(2, 4),
        eight_bits_expected, since=89,
    ),
    *WARP_PTX,
]  # fmt: skip
