"""Floating-point arithmetic, each result rounded once, in the direction of the instruction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret import exact
from cupyattn.interpret.exact import FORMATS, Format
from cupyattn.interpret.operation import (
    DTYPES,
    Evaluate,
    Maker,
    Operation,
    match,
    on_halves,
)
from cupyattn.kernels.numerics import EX2_APPROX_ERROR

ROUNDINGS = "rn|rz|rm|rp"
#: The forms of PTX's floating-point instructions, as patterns of their modifiers.
_SINGLE = (ROUNDINGS + "?", "ftz?", "sat?", "f32")
_DOUBLE = (ROUNDINGS + "?", "f64")
_HALF = ("rn?", "ftz?", "sat?", "f16|f16x2")
_BRAIN = ("rn?", "bf16|bf16x2")


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (``.sat``)."""
    return np.where(np.greater(x, 0), np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def rectify(x: Array) -> Array:
    """Replace negative numbers by 0; NaN stays (``.relu``)."""
    return np.where(np.less_equal(x, 0), x.dtype.type(0), x)


def finish(
    evaluate: Evaluate, fmt: Format, flags: tuple[str, ...], doubling: tuple[float, ...] = ()
) -> Evaluate:
    """Apply the modifiers ``ftz``, ``sat`` and ``relu``, and replace every NaN by the hardware's
    NaN.

    Parameters
    ----------
    evaluate : callable
        The rounded result of unmodified sources.
    fmt : Format
    flags : tuple of str
        All modifiers, including those that do not matter here.
    doubling : tuple of float, optional
        Factors for the sources, powers of two, that double the exact result; none if a result
        cannot round up to the smallest normal number.
    """
    flushes, saturates, rectifies = (flag in flags for flag in ("ftz", "sat", "relu"))
    if not (flushes or saturates or rectifies):
        return lambda *sources: exact.canonical(evaluate(*sources), fmt)
    factors = [fmt.dtype.type(factor) for factor in doubling]

    def finished(*sources: Array) -> Array:
        if flushes:
            sources = tuple(exact.flush(source, fmt) for source in sources)
        result = evaluate(*sources)
        if flushes and factors:
            twice = (np.multiply(s, f) for s, f in zip(sources, factors, strict=True))
            result = exact.flush_result(result, lambda: evaluate(*twice), fmt)
        elif flushes:
            result = exact.flush(result, fmt)
        if saturates:
            return saturate(result)
        return exact.canonical(rectify(result) if rectifies else result, fmt)

    return finished


def operation(
    count: int,
    kind: str,
    evaluate: Evaluate,
    flags: tuple[str, ...],
    doubling: tuple[float, ...] = (),
) -> Operation:
    """An operation whose sources and result have one type, or pairs of one type."""
    single = kind.removesuffix("x2")
    evaluate = finish(evaluate, FORMATS[single], flags, doubling)
    if single != kind:
        evaluate = on_halves(evaluate, DTYPES[single])
    return Operation((kind,) * count, (kind,), evaluate)


def _form(
    modifiers: tuple[str, ...], *forms: tuple[str, ...]
) -> tuple[str, str, tuple[str, ...]] | None:
    """Rounding, type and flags of the matching form; the rounding is to nearest if absent."""
    for form in forms:
        if found := match(modifiers, *form):
            rounding = next((f for f in found if f in ROUNDINGS.split("|")), "rn")
            return rounding, found[-1], found[:-1]
    return None


# ---- sum, product, quotient, root ----------------------------------------------------------------


def _sum(sign: int, fmt: Format, rounding: str) -> Evaluate:
    """a + b or a - b."""
    ufunc = np.add if sign > 0 else np.subtract
    if rounding == "rn":
        return ufunc

    def directed(a: Array, b: Array) -> Array:
        b = b if sign > 0 else np.negative(b)
        return exact.add(a.astype(np.float64), b.astype(np.float64), fmt, rounding)

    def directed64(a: Array, b: Array) -> Array:
        b = b if sign > 0 else np.negative(b)
        total = np.add(a, b)
        if rounding == "rm":
            total = exact.signed_zero(total, a, b)
        return exact.directed64(total, lambda r, x, y: x + y - r, rounding, a, b)

    return directed64 if fmt is FORMATS["f64"] else directed


def _product(fmt: Format, rounding: str) -> Evaluate:
    if rounding == "rn":
        return np.multiply
    if fmt is FORMATS["f64"]:
        return lambda a, b: exact.directed64(
            np.multiply(a, b), lambda r, x, y: x * y - r, rounding, a, b
        )
    return lambda a, b: exact.narrow(
        np.multiply(a.astype(np.float64), b.astype(np.float64)), fmt, rounding
    )


def _quotient(fmt: Format, rounding: str) -> Evaluate:
    if rounding == "rn":
        return np.divide
    if fmt is FORMATS["f64"]:

        def directed64(a: Array, b: Array) -> Array:
            divisor = np.where(np.equal(b, 0), np.nan, b)  # a / 0 is exact
            return exact.directed64(
                np.divide(a, b), lambda r, x, y: x / y - r, rounding, a, divisor
            )

        return directed64
    # If the quotient of two 24-bit numbers is not a 24-bit number, its distance from each of these
    # exceeds the rounding of float64. So the float64 quotient is on the right side.
    return lambda a, b: exact.narrow(
        np.divide(a.astype(np.float64), b.astype(np.float64)), fmt, rounding
    )


def _root(fmt: Format, rounding: str) -> Evaluate:
    if rounding == "rn":
        return np.sqrt
    if fmt is FORMATS["f64"]:
        return lambda a: exact.directed64(np.sqrt(a), lambda r, x: x - r * r, rounding, a)
    return lambda a: exact.narrow(np.sqrt(a.astype(np.float64)), fmt, rounding)  # as for a quotient


def _reciprocal(fmt: Format, rounding: str) -> Evaluate:
    quotient = _quotient(fmt, rounding)
    return lambda a: quotient(fmt.dtype.type(1), a)


def _fma(fmt: Format, rounding: str) -> Evaluate:
    if fmt is FORMATS["f64"]:
        return partial(exact.fma64, rounding=rounding)
    return partial(exact.fma, fmt=fmt, rounding=rounding)


def _arithmetic(
    count: int,
    build: Callable[[Format, str], Evaluate],
    forms: tuple[tuple[str, ...], ...],
    modifiers: tuple[str, ...],
    doubling: tuple[float, ...] = (),
) -> Operation | None:
    if not (found := _form(modifiers, *forms)):
        return None
    rounding, kind, flags = found
    fmt = FORMATS[kind.removesuffix("x2")]
    return operation(count, kind, build(fmt, rounding), flags, doubling)


_BASIC = (_SINGLE, _DOUBLE, _HALF, _BRAIN)
_EXPLICIT = ((ROUNDINGS, "ftz?", "f32"), (ROUNDINGS, "f64"))
_FUSED = (
    (ROUNDINGS, "ftz?", "sat?", "f32"),
    (ROUNDINGS, "f64"),
    ("rn", "ftz?", "sat|relu?", "f16|f16x2"),
    ("rn", "relu?", "bf16|bf16x2"),
)


# ---- selection and signs -------------------------------------------------------------------------


def _extremum(largest: bool, modifiers: tuple[str, ...]) -> Operation | None:
    """``max`` and ``min``: a number wins over NaN, unless ``.NaN``; -0 is below +0."""
    found = _form(
        modifiers, ("ftz?", "NaN?", "f32"), ("f64",), ("ftz?", "NaN?", "f16|f16x2"),
        ("NaN?", "bf16|bf16x2"),
    )  # fmt: skip
    if not found:
        return None
    _, kind, flags = found
    dtype = FORMATS[kind.removesuffix("x2")].dtype
    bits = np.dtype(f"u{dtype.itemsize}")
    ufunc = np.maximum if largest else np.minimum
    ignores_nan = "NaN" not in flags
    of_equals = np.bitwise_and if largest else np.bitwise_or

    def evaluate(a: Array, b: Array) -> Array:
        result = ufunc(a, b)
        if ignores_nan and np.count_nonzero(nan := np.not_equal(result, result)):
            # On some machines NumPy's fmax and fmin return a signalling NaN.
            result = np.where(nan, np.where(np.equal(a, a), a, b), result)
        equal = np.equal(a, b)
        if np.count_nonzero(equal):  # the same bits, or zeros: then the sign bits decide
            joined = of_equals(np.asarray(a).view(bits), np.asarray(b).view(bits))
            result = np.where(equal, joined.view(dtype), result)
        return result

    return operation(2, kind, evaluate, flags)


def _sign(ufunc: np.ufunc, modifiers: tuple[str, ...]) -> Operation | None:
    """``neg`` and ``abs``."""
    found = _form(modifiers, ("ftz?", "f32"), ("f64",), ("ftz?", "f16|f16x2"), ("bf16|bf16x2",))
    if not found:
        return None
    _, kind, flags = found
    return operation(1, kind, ufunc, flags)


def copy_sign(modifiers: tuple[str, ...]) -> Operation | None:
    """``copysign``: b with the sign of a."""
    found = match(modifiers, "f32|f64")
    return Operation(found * 2, found, lambda a, b: np.copysign(b, a)) if found else None


def property_test(modifiers: tuple[str, ...]) -> Operation | None:
    """``testp``."""
    found = match(modifiers, "finite|infinite|number|notanumber|normal|subnormal", "f32|f64")
    if not found:
        return None
    name, kind = found
    tiny = FORMATS[kind].tiny
    tests: dict[str, Evaluate] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: np.equal(a, a),
        "notanumber": np.isnan,
        # Zeros count as normal (PTX ISA, "testp").
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | np.equal(a, 0)),
        "subnormal": lambda a: np.logical_and(np.abs(a) < tiny, np.not_equal(a, 0)),
    }
    return Operation((kind,), ("pred",), tests[name])


# ---- approximations ------------------------------------------------------------------------------

#: Errors of the hardware's approximations that the PTX ISA allows, by kind. ``rel`` is relative to
#: the exact value, ``abs`` absolute, and ``ulp`` in last places of the result. The interpreter
#: computes the exact function, rounded once. The exception is a rule of the ISA: ``div.approx`` by
#: more than 2^126 gives zero.
APPROXIMATION_ERROR: dict[str, tuple[str, float]] = {
    "div.approx.f32": ("ulp", 2.0),
    "div.full.f32": ("ulp", 2.0),
    "rcp.approx.f32": ("ulp", 1.0),
    "rcp.approx.ftz.f64": ("rel", 2.0**-19),  # the ISA has no figure; seen: 2^-20.0
    "sqrt.approx.f32": ("rel", 2.0**-23),
    "rsqrt.approx.f32": ("rel", 2.0**-22.9),
    "rsqrt.approx.f64": ("ulp", 2.0),  # the ISA has no figure; seen: 1
    "rsqrt.approx.ftz.f64": ("rel", 2.0**-19),  # the ISA has no figure; seen: 2^-20.1
    "ex2.approx.f32": ("rel", EX2_APPROX_ERROR),
    "ex2.approx.f16": ("rel", 2.0**-9.9),
    "ex2.approx.ftz.bf16": ("rel", 2.0**-7),
    "lg2.approx.f32": ("abs", 2.0**-22),  # between 0.5 and 2; outside relative
    "sin.approx.f32": ("abs", 2.0**-20.5),  # within 2 pi of 0; 2^-14.7 within 100 pi
    "cos.approx.f32": ("abs", 2.0**-20.5),  # likewise
    "tanh.approx.f32": ("rel", 2.0**-11),
    "tanh.approx.f16": ("abs", 2.0**-10.987),
    "tanh.approx.bf16": ("abs", 2.0**-8),
}


def _approximate(
    count: int,
    function: Callable[..., Any],
    forms: tuple[tuple[str, ...], ...],
    modifiers: tuple[str, ...],
) -> Operation | None:
    found = _form(modifiers, *forms)
    if not found:
        return None
    _, kind, flags = found
    fmt = FORMATS[kind.removesuffix("x2")]

    def evaluate(*sources: Array) -> Array:
        wide = function(*(source.astype(np.float64) for source in sources))
        return exact.narrow(wide, fmt)

    return operation(count, kind, evaluate, flags)


_FAST = ("approx", "ftz?", "f32")


def divide(modifiers: tuple[str, ...]) -> Operation | None:
    """``div``."""
    if found := _form(modifiers, *_EXPLICIT):
        rounding, kind, flags = found
        return operation(2, kind, _quotient(FORMATS[kind], rounding), flags, (2.0, 1.0))
    if match(modifiers, "full", "ftz?", "f32"):
        return operation(2, "f32", np.divide, modifiers)
    if match(modifiers, *_FAST):
        return operation(2, "f32", _approximate_quotient, modifiers)
    return None


def _approximate_quotient(a: Array, b: Array) -> Array:
    """Compute a / b from 1 / b, which is 0 for the largest b."""
    huge = np.logical_and(np.abs(b) > np.float32(2.0**126), np.isfinite(b))
    return np.where(huge, np.multiply(a, np.copysign(np.float32(0), b)), np.divide(a, b))


def _either(first: Maker, second: Maker, modifiers: tuple[str, ...]) -> Operation | None:
    return first(modifiers) or second(modifiers)


def _inverse(x: Array) -> Array:
    return np.divide(1.0, x)


def _inverse_root(x: Array) -> Array:
    return np.divide(1.0, np.sqrt(x))


_UPPER_WORD = np.uint64(0xFFFFFFFF00000000)


def _coarse(function: Callable[..., Any], modifiers: tuple[str, ...]) -> Operation | None:
    """``rcp`` and ``rsqrt.approx.ftz.f64``: from the upper word of a float64 to the upper word."""
    if modifiers != ("approx", "ftz", "f64"):
        return None

    fmt = FORMATS["f64"]
    nan = np.array(0x7FFFFFFF00000000, np.uint64).view(np.float64)

    def evaluate(a: Array) -> Array:
        upper = np.bitwise_and(np.asarray(a).view(np.uint64), _UPPER_WORD).view(np.float64)
        exactly = exact.flush(np.asarray(function(exact.flush(upper, fmt))), fmt)
        result = np.bitwise_and(exactly.view(np.uint64), _UPPER_WORD).view(np.float64)
        return np.where(np.isnan(exactly), nan, result)

    return Operation(("f64",), ("f64",), evaluate)


_HALF_FAST = ("approx", "f16|f16x2")
_BRAIN_FAST = ("approx", "bf16|bf16x2")

OPCODES: dict[str, Maker] = {
    "add": partial(_arithmetic, 2, partial(_sum, 1), _BASIC),
    "sub": partial(_arithmetic, 2, partial(_sum, -1), _BASIC),
    "mul": partial(_arithmetic, 2, _product, _BASIC, doubling=(2.0, 1.0)),
    "fma": partial(_arithmetic, 3, _fma, _FUSED, doubling=(2.0, 1.0, 2.0)),
    "mad": partial(_arithmetic, 3, _fma, _FUSED[:2], doubling=(2.0, 1.0, 2.0)),
    "div": divide,
    "sqrt": partial(
        _either,
        partial(_arithmetic, 1, _root, _EXPLICIT),
        partial(_approximate, 1, np.sqrt, (_FAST,)),
    ),
    "rcp": partial(
        _either,
        partial(_arithmetic, 1, _reciprocal, _EXPLICIT, doubling=(0.5,)),
        partial(_either, partial(_approximate, 1, _inverse, (_FAST,)), partial(_coarse, _inverse)),
    ),
    "rsqrt": partial(
        _either,
        partial(_approximate, 1, _inverse_root, (_FAST, ("approx", "f64"))),
        partial(_coarse, _inverse_root),
    ),
    "ex2": partial(
        _approximate, 1, np.exp2,
        (_FAST, ("approx", "ftz?", "f16|f16x2"), ("approx", "ftz", "bf16|bf16x2")),
    ),
    "lg2": partial(_approximate, 1, np.log2, (_FAST,)),
    "sin": partial(_approximate, 1, np.sin, (_FAST,)),
    "cos": partial(_approximate, 1, np.cos, (_FAST,)),
    "tanh": partial(
        _approximate, 1, np.tanh, (("approx", "f32"), _HALF_FAST, _BRAIN_FAST)
    ),
    "max": partial(_extremum, True),
    "min": partial(_extremum, False),
    "neg": partial(_sign, np.negative),
    "abs": partial(_sign, np.abs),
    "copysign": copy_sign,
    "testp": property_test,
}  # fmt: skip
