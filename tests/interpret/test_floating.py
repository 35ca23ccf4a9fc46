"""Floats of the interpreter: correct rounding against fractions, conversions against ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cupyattn.interpret.alu import APPROXIMATION_ERROR, DTYPES, Operation, lookup
from tests.support.exact_floats import BINARY, Binary, combine
from tests.support.lanes import LANES, generator

pytestmark = pytest.mark.usefixtures("quiet")

ROUNDINGS = ("rn", "rz", "rm", "rp")
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}
COUNT = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "sqrt": 1, "rcp": 1}


def named(name: str) -> Operation:
    opcode, *modifiers = name.split(".")
    found = lookup(opcode, tuple(modifiers))
    assert found is not None, name
    return found


def patterns(kind: str, rng: np.random.Generator, count: int = LANES) -> list[int]:
    """Bits of floats: any, few leading ones, few trailing ones, near the ends, of middling size."""
    form = BINARY[kind]
    bits, fraction = form.dtype.itemsize * 8, form.precision - 1
    infinity = (1 << bits - 1) - (1 << fraction)
    one = int(np.ones(1, form.dtype).view(form.bits)[0])
    points = [0, 1, 1 << fraction, (2 << fraction) - 1, one, infinity - 1, infinity]

    def pattern(x: int, which: int, n: int, point: int, by: int, e: int, sign: int) -> int:
        if which == 0:
            return x
        if which == 1:
            return x >> n << n
        if which == 2:
            return x | (1 << n) - 1
        if which == 3:
            return max(points[point] + by, 0) | sign
        return x % (1 << fraction) | (one + (e << fraction)) | sign

    anything = rng.integers(2**bits, size=count, dtype=np.uint64).tolist()
    bounds = ((0, 5), (0, fraction + 1), (0, len(points)), (-3, 4), (-4, 5), (0, 2))
    *columns, signs = (rng.integers(*ends, size=count).tolist() for ends in bounds)
    return [
        pattern(*x, sign << bits - 1) for *x, sign in zip(anything, *columns, signs, strict=True)
    ]


def tuples(kind: str, name: str, sources: int, count: int = LANES) -> list[tuple[int, ...]]:
    """Draw lanes of an instruction of so many sources."""
    rng = generator(name)
    return list(zip(*(patterns(kind, rng, count) for _ in range(sources)), strict=True))


def bits_of(values: list[float], form: Binary) -> np.ndarray:
    return np.array(values, np.float64).astype(form.dtype).view(form.bits)


def assert_rounds(
    op: str, kind: str, rounding: str, lanes: list[tuple[int, ...]], flag: str = ""
) -> None:
    """Compare an operation, bit for bit, with fractions."""
    form = BINARY[kind]
    columns = np.array(lanes, form.bits).T.copy().view(form.dtype)
    middle = [rounding] if kind in ("f32", "f64") or op == "fma" else []
    operation = named(".".join([op, *middle, *([flag] if flag else []), kind]))
    got = operation.evaluate(*columns)
    assert got.dtype == form.dtype and got.shape == (len(lanes),)
    expected = [
        combine(op, [float(x) for x in lane], form, rounding, flag == "ftz")
        for lane in columns.astype(np.float64).T
    ]
    nan = np.isnan(np.array(expected))
    assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    assert_array_equal(got.view(form.bits)[~nan], bits_of(expected, form)[~nan])
    if kind in NAN:
        assert set(got.view(form.bits)[nan].tolist()) <= {NAN[kind]}


CASES = [
    *((op, kind, rounding) for op in COUNT for kind in ("f32", "f64") for rounding in ROUNDINGS),
    *((op, kind, "rn") for op in ("add", "sub", "mul", "fma") for kind in ("f16", "bf16")),
]


@pytest.mark.parametrize(("op", "kind", "rounding"), CASES, ids=".".join)
def test_arithmetic_is_rounded_once(op: str, kind: str, rounding: str) -> None:
    lanes = tuples(kind, f"{op}.{rounding}.{kind}", COUNT[op])
    assert_rounds(op, kind, rounding, lanes)


@pytest.mark.parametrize(
    ("kind", "rounding"), [(kind, rounding) for op, kind, rounding in CASES if op == "fma"]
)
def test_fma_that_cancels_or_lies_midway(kind: str, rounding: str) -> None:
    form = BINARY[kind]
    lanes = []
    for number, (a, b) in enumerate(tuples(kind, f"cancels {kind} {rounding}", 2, LANES // 2)):
        by = number % 5 - 2
        x, y = np.array([a, b], form.bits).view(form.dtype)
        near = int((-(x * y)).reshape(1).view(form.bits)[0]) + by
        lanes.append((a, b, near % 2 ** (form.dtype.itemsize * 8)))
        # One, and half a last place, a little more or less: 1 + 2^-p (1 + by 2^-p).
        half = bits_of([1.0, 2.0**-form.precision], form)
        step = int(bits_of([1.0 + by * 2.0 ** (1 - form.precision)], form)[0])
        lanes.append((int(half[1]), step, int(half[0])))
    assert_rounds("fma", kind, rounding, lanes)


@pytest.mark.parametrize("op", ["add", "mul", "div", "fma", "rcp"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_flushing_looks_at_results_with_unbounded_exponents(op: str, rounding: str) -> None:
    lanes = tuples("f32", f"{op}.{rounding}.ftz", COUNT[op])
    for last in range(9):  # products and quotients next to the smallest normal number
        tiny = [int(x) for x in np.array([2.0**-126 * (2 - last * 2.0**-23), 0.5], "f4").view("u4")]
        two = int(np.float32(2.0).view("u4"))
        edges = {
            "mul": (tiny[0], tiny[1]),
            "div": (tiny[0], two),
            "add": (tiny[0], 1 << 23),
            "fma": (tiny[0], tiny[1], 0),
            "rcp": (two + (125 << 23) + last,),
        }
        lanes.append(edges[op])
    assert_rounds(op, "f32", rounding, lanes, "ftz")


@pytest.mark.parametrize("name", ["mul.ftz.f16", "fma.rn.ftz.f16", "add.ftz.f16"])
def test_flushing_of_halves(name: str) -> None:
    op = name.split(".")[0]
    assert_rounds(op, "f16", "rn", tuples("f16", name, COUNT[op]), "ftz")


def test_seen_on_hardware() -> None:
    """Cases in which tininess decides; the results were observed on a GPU (sm_90)."""
    mul = named("mul.rm.ftz.f32").evaluate(
        np.array([0xA9800000], "u4").view("f4"), np.array([0x167FFFFF], "u4").view("f4")
    )
    assert mul.view("u4").tolist() == [0x80000000]
    fma = named("fma.rn.ftz.f32").evaluate(
        *(np.array([x], "u4").view("f4") for x in (0x800001, 0xAD0ADA, 0x80800000))
    )
    assert fma.view("u4").tolist() == [0x80800000]
    half = named("mul.ftz.f16").evaluate(
        np.array([0x17FF], "u2").view("f2"), np.array([0x2800], "u2").view("f2")
    )
    assert half.view("u2").tolist() == [0]


def test_saturation_and_relu() -> None:
    x = np.array([-1.0, -0.0, 0.25, 1.5, np.inf, np.nan], np.float32)
    got = named("add.sat.f32").evaluate(x, np.zeros_like(x))
    assert got.view("u4").tolist() == np.array([0, 0, 0.25, 1, 1, 0], "f4").view("u4").tolist()
    half, one, zero = x.astype(np.float16), np.ones(6, np.float16), np.zeros(6, np.float16)
    got = named("fma.rn.relu.f16").evaluate(half, one, zero)
    expected = np.array([0, 0, 0.25, 1.5, np.inf, np.nan], np.float16)
    expected[-1:] = np.array([0x7FFF], np.uint16).view(np.float16)
    assert_array_equal(got.view("u2"), expected.view("u2"))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_are_two_numbers(kind: str) -> None:
    for op, flag in (("add", ""), ("mul", ""), ("fma", "rn"), ("min", ""), ("neg", "")):
        modifiers = f".{flag}" if flag else ""
        single, pair = named(f"{op}{modifiers}.{kind}"), named(f"{op}{modifiers}.{kind}x2")
        words = np.array(tuples(kind, f"{op} {kind}", len(pair.sources)), np.uint16).T.copy()
        expected = single.evaluate(*(word.view(DTYPES[kind]) for word in words))
        got = pair.evaluate(*(word.view(np.uint32) for word in words))
        assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("kind", BINARY)
def test_min_max_order_zeros_and_ignore_nan(kind: str) -> None:
    form = BINARY[kind]
    lanes = tuples(kind, f"minmax {kind}", 2)
    a, b = np.array(lanes, form.bits).T.copy().view(form.dtype)
    for name, choose in (("min", min), ("max", max)):
        got = named(f"{name}.{kind}").evaluate(a, b)
        propagates = named(f"{name}.NaN.{kind}").evaluate(a, b) if kind != "f64" else None
        for i, (x, y) in enumerate(zip(a.astype(float), b.astype(float), strict=True)):
            if math.isnan(x) or math.isnan(y):
                rest = [v for v in (x, y) if not math.isnan(v)]
                assert float(got[i]) == rest[0] if rest else math.isnan(float(got[i]))
                assert propagates is None or math.isnan(float(propagates[i]))
                continue
            chosen = choose((x, y), key=lambda v: (v, math.copysign(1.0, v)))
            assert bits_of([chosen], form)[0] == got.view(form.bits)[i]
            if propagates is not None:
                assert propagates.view(form.bits)[i] == got.view(form.bits)[i]


def test_signs_and_properties() -> None:
    x = np.array([-np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 2, np.nan], np.float32)
    assert_array_equal(named("neg.f32").evaluate(x)[:-1], -x[:-1])
    assert_array_equal(named("abs.ftz.f32").evaluate(x)[:5], np.array([np.inf, 1, 0, 0, 0], "f4"))
    signed = named("copysign.f32").evaluate(x, np.full(8, 3.0, np.float32))
    assert signed[:-1].tolist() == [-3, -3, -3, -3, 3, 3, 3]
    expected = {
        "finite": [0, 1, 1, 1, 1, 1, 1, 0], "infinite": [1, 0, 0, 0, 0, 0, 0, 0],
        "number": [1, 1, 1, 1, 1, 1, 1, 0], "notanumber": [0, 0, 0, 0, 0, 0, 0, 1],
        "normal": [0, 1, 0, 1, 1, 0, 1, 0], "subnormal": [0, 0, 1, 0, 0, 1, 0, 0],
    }  # fmt: skip
    for name, values in expected.items():
        assert named(f"testp.{name}.f32").evaluate(x).tolist() == [bool(v) for v in values]


# ---- approximations ------------------------------------------------------------------------------

FUNCTIONS = {
    "rcp": lambda x: 1 / x, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x),
    "ex2": lambda x: 2.0**x, "lg2": math.log2, "sin": math.sin, "cos": math.cos,
    "tanh": math.tanh,
}  # fmt: skip


@pytest.mark.parametrize("op", FUNCTIONS)
def test_approximations_are_the_rounded_function(op: str) -> None:
    drawn = 2.0 ** generator(op).uniform(-100, math.log2(100), LANES)
    x = np.array([*drawn, *2.0 ** np.arange(-100, 7), *range(1, 101)], np.float32)
    got = named(f"{op}.approx.f32").evaluate(x)
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        exact = FUNCTIONS[op](value)
        assert abs(result - exact) <= 2.0**-24 * 1.01 * abs(exact) + 2.0**-150, value
    kind, error = APPROXIMATION_ERROR[f"{op}.approx.f32"]
    assert kind in ("rel", "abs", "ulp") and error > 0


def test_ends_of_approximations() -> None:
    x = np.array([-np.inf, -1.0, -0.0, 0.0, np.inf, np.nan], np.float32)
    nan, inf = np.nan, np.inf
    expected = {
        "rcp": [-0.0, -1, -inf, inf, 0.0, nan], "sqrt": [nan, nan, -0.0, 0.0, inf, nan],
        "rsqrt": [nan, nan, -inf, inf, 0.0, nan], "ex2": [0.0, 0.5, 1, 1, inf, nan],
        "lg2": [nan, nan, -inf, -inf, inf, nan], "cos": [nan, math.cos(1), 1, 1, nan, nan],
        "sin": [nan, -math.sin(1), -0.0, 0.0, nan, nan],
        "tanh": [-1, -math.tanh(1), -0.0, 0.0, 1, nan],
    }  # fmt: skip
    for op, values in expected.items():
        got = named(f"{op}.approx.f32").evaluate(x)
        want = np.array(values, np.float32)
        assert_array_equal(np.isnan(got), np.isnan(want), op)
        known = ~np.isnan(want)
        assert_array_equal(got.view("u4")[known], want.view("u4")[known], op)
        assert set(got.view("u4")[~known].tolist()) <= {0x7FFFFFFF}


def test_approximations_flush_and_divide() -> None:
    x = np.array([-126.0, -126.5, -130.0, 1e-40], np.float32)
    assert named("ex2.approx.ftz.f32").evaluate(x).tolist() == [2.0**-126, 0.0, 0.0, 1.0]
    kept = named("ex2.approx.f32").evaluate(x)
    assert kept[2] == np.float32(2.0**-130) and kept[1] > 0
    a = np.array([1.0, np.inf, -1.0, 3.0], np.float32)
    b = np.array([2.0**127, 2.0**127, 2.0**127, 2.0], np.float32)
    got = named("div.approx.f32").evaluate(a, b)
    assert np.isnan(got[1]) and got[[0, 2, 3]].tolist() == [0.0, -0.0, 1.5]
    assert np.signbit(got[2])
    assert named("div.full.f32").evaluate(a, b)[0] == np.float32(2.0**-127)
    coarse = named("rcp.approx.ftz.f64").evaluate(np.array([3.0, 0.0, -np.inf, np.nan]))
    assert coarse.view("u8")[0] & 0xFFFFFFFF == 0 and coarse[0] == pytest.approx(1 / 3, rel=2e-6)
    assert coarse[1] == np.inf and coarse[2] == 0 and coarse.view("u8")[3] == 0x7FFFFFFF00000000


# ---- conversions ---------------------------------------------------------------------------------

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
TO_WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def ends(kind: str) -> tuple[int, int]:
    limits = np.iinfo(DTYPES[kind])
    return int(limits.min), int(limits.max)


def integers(kind: str, name: str, count: int = LANES) -> list[int]:
    """Any integers of a type, of any length, and both ends."""
    low, high = ends(kind)
    rng = generator(name)
    drawn = rng.integers(low, high, size=count, dtype=DTYPES[kind], endpoint=True)
    return [
        low,
        high,
        *(
            drawn
            >> rng.integers(DTYPES[kind].itemsize * 8, size=count, dtype="u1").astype(DTYPES[kind])
        ).tolist(),
    ]


@pytest.mark.parametrize("source", BINARY)
@pytest.mark.parametrize("to", INTEGERS)
def test_float_to_integer_clamps(source: str, to: str) -> None:
    form, (low, high) = BINARY[source], ends(to)
    steps = (-2, -1, -0.5, 0, 0.5, 1, 1.5)
    around = bits_of([end + by for end in (low, high, 0, high + 1) for by in steps], form)
    lanes = patterns(source, generator(f"{to} {source}"), LANES // 4)
    x = np.array([*lanes, *around], form.bits).view(form.dtype)
    for rounding, whole in TO_WHOLE.items():
        got = named(f"cvt.{rounding}.{to}.{source}").evaluate(x)
        assert got.dtype == DTYPES[to]
        for value, result in zip(x.astype(np.float64), got, strict=True):
            if np.isnan(value):
                top = 1 << DTYPES[to].itemsize * 8 - 1
                top = top if to[0] == "u" else -top
                expected = top if source == "f64" or to in ("u64", "s64") else 0
            elif np.isinf(value):
                expected = high if value > 0 else low
            else:
                expected = min(max(whole(Fraction(float(value))), low), high)
            assert int(result) == expected, (rounding, value)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("to", BINARY)
def test_integer_to_float_is_rounded_once(source: str, to: str) -> None:
    form, (low, high) = BINARY[to], ends(source)
    # 2^k + 2^(k - p) plus or minus one: midway between two floats, and next to it.
    midway = [
        (1 << k) + (1 << max(k - form.precision, 0)) + by for k in range(64) for by in (-1, 0, 1)
    ]
    lanes = integers(source, f"{to} {source}", LANES // 4)
    lanes += [x for x in midway if low <= x <= high]
    x = np.array(lanes, DTYPES[source])
    for rounding in ROUNDINGS:
        got = named(f"cvt.{rounding}.{to}.{source}").evaluate(x)
        expected = [form.round(Fraction(v), rounding) if v else 0.0 for v in lanes]
        assert_array_equal(got.view(form.bits), bits_of(expected, form))


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("to", INTEGERS)
def test_integer_to_integer(source: str, to: str) -> None:
    lanes = integers(source, f"{to} {source}")
    x = np.array(lanes, DTYPES[source])
    bits, (first, last) = DTYPES[to].itemsize * 8, ends(to)
    wrapped = [(v - first) % 2**bits + first for v in lanes]
    assert named(f"cvt.{to}.{source}").evaluate(x).tolist() == wrapped
    clamped = [min(max(v, first), last) for v in lanes]
    assert named(f"cvt.sat.{to}.{source}").evaluate(x).tolist() == clamped


NARROWER = [("f64", "f32"), ("f64", "f16"), ("f64", "bf16"), ("f32", "f16"), ("f32", "bf16"),
            ("f16", "bf16"), ("bf16", "f16")]  # fmt: skip


@pytest.mark.parametrize(("source", "to"), NARROWER)
def test_narrowing_rounds_once_in_every_direction(source: str, to: str) -> None:
    form, wide = BINARY[to], BINARY[source]
    rng = generator(f"{to} {source}")
    lanes = np.array(patterns(source, rng, LANES // 2), wide.bits)
    if {source, to} != {"f16", "bf16"}:  # a number of the narrow type and a little: midway, or near
        narrow = np.array(patterns(to, rng, LANES // 2), form.bits).view(form.dtype)
        steps = np.array([-1, 0, 1, 2**12, 2**12 + 1, 2**28, 2**28 - 1, 2**15, 2**41])
        by = rng.choice(steps, len(narrow)).astype(wide.bits)
        lanes = np.concatenate([lanes, narrow.astype(wide.dtype).view(wide.bits) + by])
    x = lanes.view(wide.dtype)
    values = x.astype(np.float64)
    for rounding in ROUNDINGS:
        got = named(f"cvt.{rounding}.{to}.{source}").evaluate(x)
        expected = [
            form.round(Fraction(float(v)), rounding) if np.isfinite(v) and v else float(v)
            for v in values
        ]
        nan = np.isnan(values)
        assert_array_equal(np.isnan(got.astype(np.float64)), nan)
        assert_array_equal(got.view(form.bits)[~nan], bits_of(expected, form)[~nan])


@pytest.mark.parametrize(
    ("source", "to"), [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64")]
)
def test_widening_is_exact(source: str, to: str) -> None:
    bits = BINARY[source].bits
    x = np.arange(0, 2**16, dtype=np.uint32).astype(bits) << (0 if bits.itemsize == 2 else 16)
    x = x.astype(bits).view(DTYPES[source])
    finite = np.isfinite(x)
    got = named(f"cvt.{to}.{source}").evaluate(x)
    assert_array_equal(got[finite], x.astype(np.float64)[finite].astype(DTYPES[to]))
    assert_array_equal(np.isnan(got), np.isnan(x))


def test_conversions_with_modifiers() -> None:
    x = np.array([-2.5, -0.5, 0.5, 1.5, 2.5, 1e-40, 1e38, np.inf, np.nan], np.float32)
    whole = named("cvt.rni.f32.f32").evaluate(x)
    assert_array_equal(whole[:8], np.array([-2, -0.0, 0, 2, 2, 0, 1e38, np.inf], np.float32))
    assert np.signbit(whole[1])
    assert named("cvt.rpi.f32.f32").evaluate(x)[5] == 1
    assert named("cvt.rpi.ftz.f32.f32").evaluate(x)[5] == 0
    assert named("cvt.rpi.ftz.s32.f32").evaluate(x)[5] == 0
    assert named("cvt.sat.f32.f32").evaluate(x).tolist()[:4] == [0, 0, 0.5, 1]
    assert named("cvt.sat.f32.f32").evaluate(x)[-1] == 0
    half = named("cvt.rn.satfinite.f16.f32").evaluate(x)
    assert half[6] == 65504 and half[7] == 65504 and half.view("u2")[8] == 0x7FFF
    assert named("cvt.rn.f16.f32").evaluate(x)[6] == np.inf
    assert named("cvt.rn.relu.bf16.f32").evaluate(x).astype("f4").tolist()[:3] == [0, 0, 0.5]
    assert named("cvt.rn.bf16.f32").evaluate(x).view("u2")[8] == 0x7FFF
    edge = np.array([2.0**-126 * (1 - 2.0**-25), 2.0**-126 * (1 - 2.0**-24)])
    assert named("cvt.rn.ftz.f32.f64").evaluate(edge).tolist() == [2.0**-126, 0.0]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_take_the_upper_half_first(kind: str) -> None:
    x, y = np.array(tuples("f32", kind, 2), np.uint32).T.copy().view(np.float32)
    for form in ("rn", "rz", "rn.relu", "rn.satfinite"):
        pair = named(f"cvt.{form}.{kind}x2.f32").evaluate(x, y)
        single = named(f"cvt.{form}.{kind}.f32")
        low, high = (single.evaluate(v).view(np.uint16).astype(np.uint32) for v in (y, x))
        assert_array_equal(pair, low | high << 16)


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"),
    [("e4m3", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)],
)
@given(a=st.integers(0, 2**32 - 1), b=st.floats(-1000, 1000, width=32))
@example(a=0x7F800000, b=-448.0)
@example(a=0x7FC00000, b=464.0)
def test_eight_bit_floats(kind: str, dtype: type, largest: float, a: int, b: float) -> None:
    x, y = np.array([a], np.uint32).view(np.float32), np.array([b], np.float32)

    def one(value: np.ndarray) -> int:
        if np.isnan(value[0]):
            return 0x7F
        clamped = np.clip(value, np.float32(-largest), np.float32(largest))
        return int(clamped.astype(dtype).view(np.uint8)[0])

    packed = named(f"cvt.rn.satfinite.{kind}x2.f32").evaluate(x, y)
    assert packed.tolist() == [one(y) | one(x) << 8]
    back = named(f"cvt.rn.f16x2.{kind}x2").evaluate(packed).view(np.float16)
    expected = packed.view(np.uint8).view(dtype).astype(np.float16)
    assert_array_equal(back, expected)
    halves = np.array([b, -b], np.float32).astype(np.float16)
    both = named(f"cvt.rn.satfinite.{kind}x2.f16x2").evaluate(halves.view(np.uint32))
    wide = halves.astype(np.float32)
    assert both.tolist() == [one(wide[:1]) | one(wide[1:]) << 8]


def test_eight_bit_floats_round_to_nearest_even_everywhere() -> None:
    """Every midpoint of two neighbours, and the float32 on either side of it."""
    for kind, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        every = np.arange(0x7C, dtype=np.uint8).view(dtype).astype(np.float32)
        lower, upper = every[:-1], every[1:]
        middle = (lower + upper) / 2
        convert = named(f"cvt.rn.satfinite.{kind}x2.f32")
        zero = np.zeros_like(middle)
        codes = np.arange(len(middle))
        assert_array_equal(convert.evaluate(zero, np.nextafter(middle, zero)), codes)
        assert_array_equal(convert.evaluate(zero, np.nextafter(middle, upper)), codes + 1)
        assert_array_equal(convert.evaluate(zero, middle), codes + codes % 2)


def test_tf32_keeps_ten_bits() -> None:
    for a in patterns("f32", generator("tf32")):
        check_tf32(a)


def check_tf32(a: int) -> None:
    x = np.array([a], np.uint32).view(np.float32)
    form = Binary(np.dtype(np.float32), 11, -126, 127)
    nearest, away = (named(f"cvt.{r}.tf32.f32").evaluate(x).view("f4")[0] for r in ("rn", "rna"))
    if np.isnan(x[0]):  # as seen on an H200, rna cuts a NaN like a number, to infinity at times
        assert np.isnan(nearest) and away.view(np.uint32) == a & ~0x1FFF
        return
    value = Fraction(float(x[0])) if np.isfinite(x[0]) else None
    expected = form.round(value, "rn") if value else float(x[0])
    assert float(nearest) == expected
    if value is not None and np.isfinite(away):
        place = abs(Fraction(float(away)) - value)
        assert place <= abs(Fraction(expected) - value) if np.isfinite(expected) else True
        if place and place == abs(Fraction(expected) - value) and expected != float(away):
            assert abs(float(away)) > abs(float(x[0]))


@given(a=st.integers(-(2**31), 2**31 - 1), b=st.integers(-300, 300), c=st.integers(0, 2**32 - 1))
def test_packs_of_clamped_integers(a: int, b: int, c: int) -> None:
    x, y, z = np.array([a], np.int32), np.array([b], np.int32), np.array([c], np.uint32)
    for bits in (2, 4, 8, 16):
        for sign in "us":
            low = -(1 << bits - 1) if sign == "s" else 0
            first, second = (min(max(v, low), low + 2**bits - 1) % 2**bits for v in (a, b))
            expected = first << bits | second
            if bits == 16:
                got = named(f"cvt.pack.sat.{sign}16.s32").evaluate(x, y)
            else:
                got = named(f"cvt.pack.sat.{sign}{bits}.s32.b32").evaluate(x, y, z)
                expected |= c << 2 * bits
            assert got.tolist() == [expected % 2**32]
