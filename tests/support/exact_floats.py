"""Rounding by fractions to PTX's floating-point types, written without the package."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Binary:
    """A binary format: bits of precision, exponents of the smallest and largest normal number."""

    dtype: np.dtype
    precision: int
    smallest: int
    largest: int

    @property
    def tiny(self) -> Fraction:
        return Fraction(2) ** self.smallest

    @property
    def bits(self) -> np.dtype:
        return np.dtype(f"u{self.dtype.itemsize}")

    def round(self, exact: Fraction, rounding: str, flushes: bool = False) -> float:
        """Round a nonzero fraction; `flushes` rounds with unbounded exponents, then drops."""
        magnitude = abs(exact)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if magnitude < Fraction(2) ** exponent:
            exponent -= 1
        if not flushes:
            exponent = max(exponent, self.smallest)
        place = Fraction(2) ** (exponent - self.precision + 1)
        count, rest = divmod(magnitude / place, 1)
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1),
            "rz": False,
            "rm": rest > 0 and exact < 0,
            "rp": rest > 0 and exact > 0,
        }[rounding]
        rounded = (count + up) * place
        sign = -1.0 if exact < 0 else 1.0
        if flushes and rounded < self.tiny:
            return sign * 0.0
        if rounded >= Fraction(2) ** (self.largest + 1):
            finite = (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.largest
            inward = {"rn": False, "rz": True, "rm": exact > 0, "rp": exact < 0}[rounding]
            return sign * (float(finite) if inward else math.inf)
        return sign * float(rounded)


BINARY = {
    "f16": Binary(np.dtype(np.float16), 11, -14, 15),
    "bf16": Binary(np.dtype(ml_dtypes.bfloat16), 8, -126, 127),
    "f32": Binary(np.dtype(np.float32), 24, -126, 127),
    "f64": Binary(np.dtype(np.float64), 53, -1022, 1023),
}


def _class_of(x: float) -> float:
    """A number that behaves like x where only infinities, zeros, NaN and signs decide."""
    return math.copysign(1.0, x) if math.isfinite(x) and x else x


def combine(op: str, sources: list[float], form: Binary, rounding: str, flushes: bool) -> float:
    """Return a sum, difference, product, quotient, root or fused result, rounded once."""
    if flushes:
        tiny = float(form.tiny)
        sources = [math.copysign(0.0, x) if abs(x) < tiny else x for x in sources]
    if op == "rcp":
        op, sources = "div", [1.0, *sources]
    if op == "sub":
        op, sources = "add", [sources[0], -sources[1]]
    a, b, c = (*sources, 0.0, 0.0)[:3]
    if op == "sqrt":
        return _root(a, form, rounding)
    if not all(map(math.isfinite, sources)) or (op == "div" and b == 0):
        a, b, c = map(_class_of, (a, b, c))
        with np.errstate(all="ignore"):
            a64, b64, c64 = map(np.float64, (a, b, c))
            return float({"add": a64 + b64, "mul": a64 * b64, "div": a64 / b64,
                          "fma": a64 * b64 + c64}[op])  # fmt: skip
    x, y, z = map(Fraction, (a, b, c))
    exact = {"add": lambda: x + y, "mul": lambda: x * y, "div": lambda: x / y,
             "fma": lambda: x * y + z}[op]()  # fmt: skip
    if exact:
        return form.round(exact, rounding, flushes)
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if op in ("mul", "div"):
        return sign * 0.0
    first, second = (a, b) if op == "add" else (sign, c)
    if math.copysign(1.0, first) == math.copysign(1.0, second):
        return math.copysign(0.0, first)
    return -0.0 if rounding == "rm" else 0.0


def _root(a: float, form: Binary, rounding: str) -> float:
    if a == 0 or not math.isfinite(a) or a < 0:
        return a if a == 0 or a > 0 else math.nan
    # Bracket the root by integers far finer than any format; a rest makes it lie between.
    scaled = Fraction(a) * Fraction(4) ** 1200
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(whole) + (0 if whole * whole == scaled else Fraction(1, 2))
    return form.round(exact / Fraction(2) ** 1200, rounding)
