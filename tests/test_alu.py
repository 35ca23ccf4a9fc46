"""Integer instructions, comparisons, selections and moves of the interpreter, against Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.interpret.alu import DTYPES, Operation, lookup, pack, unpack

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Operations are meant to run so: overflow and NaN are results."""
    with np.errstate(all="ignore"):
        yield


def named(name: str, results: int = 1) -> Operation:
    opcode, *modifiers = name.split(".")
    found = lookup(opcode, tuple(modifiers), results)
    assert found is not None, name
    return found


def width(kind: str) -> int:
    return DTYPES[kind].itemsize * 8


def wrap(x: int, kind: str) -> int:
    """The value of a type with the low bits of x."""
    bits = width(kind)
    x &= (1 << bits) - 1
    signed = DTYPES[kind].kind == "i"
    return x - (1 << bits) if signed and x >> (bits - 1) else x


def clamp(x: int, kind: str) -> int:
    low = -(1 << width(kind) - 1) if kind[0] == "s" else 0
    return min(max(x, low), low + (1 << width(kind)) - 1)


def values(kind: str) -> st.SearchStrategy[int]:
    """Any value of an integer type, ends and small numbers often."""
    bits = width(kind)
    ends = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, -1, -2, 1 << bits - 1, (1 << bits - 1) - 1]
    patterns = st.one_of(st.integers(0, 2**bits - 1), st.sampled_from(ends), st.integers(-9, 70))
    return patterns.map(lambda x: wrap(x, kind))


def run(operation: Operation, sources: list[list[int]]) -> list[int]:
    """Evaluate lanes of integers; check types, shapes and that no source is written to."""
    arrays = [
        np.array(lanes, DTYPES[kind])
        for lanes, kind in zip(sources, operation.sources, strict=True)
    ]
    kept = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    result = operation.evaluate(*arrays)
    assert result.dtype == DTYPES[operation.results[0]] and result.shape == arrays[0].shape
    for array, copy in zip(arrays, kept, strict=True):
        assert not np.shares_memory(result, array)
        np.testing.assert_array_equal(array, copy)
    for i in range(len(arrays)):  # an immediate comes as one number for all lanes
        one = [a[0:1].reshape(()) if i == j else a[:1] for j, a in enumerate(arrays)]
        assert np.broadcast_to(operation.evaluate(*one), (1,))[0] == result[0]
    return [int(x) for x in result]


def check(name: str, data: st.DataObject, expected: Callable[..., int], **given: Any) -> None:
    """Compare an operation with a function of plain integers, on lanes that are drawn."""
    operation = named(name)
    lanes = st.tuples(
        *(given.get(f"s{i}", values(kind)) for i, kind in enumerate(operation.sources))
    )
    drawn = data.draw(st.lists(lanes, min_size=1, max_size=40))
    got = run(operation, [list(column) for column in zip(*drawn, strict=True)])
    kind = operation.results[0]
    assert got == [wrap(expected(*lane), kind) for lane in drawn]


# ---- sums and products ---------------------------------------------------------------------------


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def quotient(kind: str) -> Callable[[int, int], int]:
    return lambda a, b: truncated(a, b) if b else (-1 if kind[0] == "s" else 2 ** width(kind) - 1)


@pytest.mark.parametrize("kind", INTEGERS)
@given(data=st.data())
def test_arithmetic(kind: str, data: st.DataObject) -> None:
    bits = width(kind)
    check(f"add.{kind}", data, lambda a, b: a + b)
    check(f"sub.{kind}", data, lambda a, b: a - b)
    check(f"mul.lo.{kind}", data, lambda a, b: a * b)
    check(f"mul.hi.{kind}", data, lambda a, b: a * b >> bits)
    check(f"mad.lo.{kind}", data, lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind}", data, lambda a, b, c: (a * b >> bits) + c)
    check(f"min.{kind}", data, min)
    check(f"max.{kind}", data, max)
    check(f"sad.{kind}", data, lambda a, b, c: c + abs(a - b))
    check(f"rem.{kind}", data, lambda a, b: a - b * truncated(a, b) if b else a)
    if kind[0] == "u":
        check(f"div.{kind}", data, quotient(kind))
    else:
        check(f"div.{kind}", data, truncated, s1=values(kind).filter(bool))
        check(f"neg.{kind}", data, lambda a: -a)
        check(f"abs.{kind}", data, abs)
    if bits < 64:
        check(f"mul.wide.{kind}", data, lambda a, b: a * b)
        check(f"mad.wide.{kind}", data, lambda a, b, c: a * b + c)


@given(data=st.data())
def test_saturating_arithmetic(data: st.DataObject) -> None:
    check("add.sat.s32", data, lambda a, b: clamp(a + b, "s32"))
    check("sub.sat.s32", data, lambda a, b: clamp(a - b, "s32"))
    check("mad.hi.sat.s32", data, lambda a, b, c: clamp((a * b >> 32) + c, "s32"))
    check("min.relu.s32", data, lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", data, lambda a, b: max(a, b, 0))


@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
@given(data=st.data())
def test_pairs_of_16_bits(kind: str, data: st.DataObject) -> None:
    def both(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def on_halves(a: int, b: int) -> int:
            low, high = (
                wrap(function(wrap(a >> at, kind[:3]), wrap(b >> at, kind[:3])), "u16")
                for at in (0, 16)
            )
            return low | high << 16

        return on_halves

    check(f"add.{kind}", data, both(lambda a, b: a + b))
    check(f"min.{kind}", data, both(min))
    check(f"max.{kind}", data, both(max))


def pieces(x: int, bits: int, kind: str) -> list[int]:
    return [wrap(x >> i, f"{kind}{bits}") for i in range(0, 32, bits)]


@pytest.mark.parametrize("a_kind", "us")
@pytest.mark.parametrize("b_kind", "us")
@given(data=st.data())
def test_dot_products(a_kind: str, b_kind: str, data: st.DataObject) -> None:
    def dp4a(a: int, b: int, c: int) -> int:
        products = zip(pieces(a, 8, a_kind), pieces(b, 8, b_kind), strict=True)
        return c + sum(x * y for x, y in products)

    def dp2a(first: int) -> Callable[[int, int, int], int]:
        def dot(a: int, b: int, c: int) -> int:
            octets = pieces(b, 8, b_kind)[first : first + 2]
            return c + sum(x * y for x, y in zip(pieces(a, 16, a_kind), octets, strict=True))

        return dot

    check(f"dp4a.{a_kind}32.{b_kind}32", data, dp4a)
    check(f"dp2a.lo.{a_kind}32.{b_kind}32", data, dp2a(0))
    check(f"dp2a.hi.{a_kind}32.{b_kind}32", data, dp2a(2))


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BITS)
@given(data=st.data())
def test_bits(kind: str, data: st.DataObject) -> None:
    check(f"and.{kind}", data, lambda a, b: a & b)
    check(f"or.{kind}", data, lambda a, b: a | b)
    check(f"xor.{kind}", data, lambda a, b: a ^ b)
    check(f"not.{kind}", data, lambda a: ~a)
    check(f"cnot.{kind}", data, lambda a: int(a == 0))
    check(f"mov.{kind}", data, lambda a: a)
    check(f"shl.{kind}", data, lambda a, n: a << min(n, 64))


@pytest.mark.parametrize("kind", (*BITS, *INTEGERS))
@given(data=st.data())
def test_right_shifts_keep_the_sign_and_stop_at_the_width(kind: str, data: st.DataObject) -> None:
    check(f"shr.{kind}", data, lambda a, n: a >> min(n, width(kind)))


def test_predicates() -> None:
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert named("and.pred").evaluate(a, b).tolist() == [False, False, False, True]
    assert named("or.pred").evaluate(a, b).tolist() == [False, True, True, True]
    assert named("xor.pred").evaluate(a, b).tolist() == [False, True, True, False]
    assert named("not.pred").evaluate(a).tolist() == [True, True, False, False]


@given(data=st.data(), table=st.integers(0, 255))
def test_lop3_is_any_function_of_three_bits(data: st.DataObject, table: int) -> None:
    def expected(a: int, b: int, c: int, table: int) -> int:
        rows = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    check("lop3.b32", data, expected, s3=st.just(table))


@given(data=st.data())
def test_funnel_shifts(data: st.DataObject) -> None:
    def left(n_of: Callable[[int], int]) -> Callable[[int, int, int], int]:
        return lambda a, b, n: (b << 32 | a) << n_of(n) >> 32

    def right(n_of: Callable[[int], int]) -> Callable[[int, int, int], int]:
        return lambda a, b, n: (b << 32 | a) >> n_of(n)

    check("shf.l.wrap.b32", data, left(lambda n: n & 31))
    check("shf.l.clamp.b32", data, left(lambda n: min(n, 32)))
    check("shf.r.wrap.b32", data, right(lambda n: n & 31))
    check("shf.r.clamp.b32", data, right(lambda n: min(n, 32)))


FIELD = st.one_of(st.integers(0, 70), st.integers(0, 255))


@pytest.mark.parametrize("kind", ["u32", "u64", "s32", "s64"])
@given(data=st.data())
def test_bfe_follows_the_text_of_the_isa(kind: str, data: st.DataObject) -> None:
    top = width(kind) - 1

    def expected(a: int, position: int, length: int) -> int:
        sign = 0
        if kind[0] == "s" and length:
            sign = a >> min(position + length - 1, top) & 1
        inside = range(top + 1)
        bits = (
            a >> (position + i) & 1 if i < length and position + i <= top else sign for i in inside
        )
        return sum(bit << i for i, bit in enumerate(bits))

    check(f"bfe.{kind}", data, expected, s1=FIELD, s2=FIELD)


@pytest.mark.parametrize("kind", ["b32", "b64"])
@given(data=st.data())
def test_bfi_follows_the_text_of_the_isa(kind: str, data: st.DataObject) -> None:
    def expected(a: int, b: int, position: int, length: int) -> int:
        for i in range(length):
            if position + i < width(kind):
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    check(f"bfi.{kind}", data, expected, s2=FIELD, s3=FIELD)


PERMUTED = {
    "f4e": "3210 4321 5432 6543", "b4e": "5670 6701 7012 0123", "rc8": "0000 1111 2222 3333",
    "ecl": "3210 3211 3222 3333", "ecr": "0000 1110 2210 3210", "rc16": "1010 3232 1010 3232",
}  # fmt: skip


@given(data=st.data(), uniform=st.integers(0, 0xFFFF))
def test_prmt(data: st.DataObject, uniform: int) -> None:
    def permuted(a: int, b: int, control: int) -> int:
        octets = (b << 32 | a).to_bytes(8, "little")
        result = 0
        for i in range(4):
            selector = control >> 4 * i & 15
            octet = octets[selector & 7]
            result |= ((255 if octet & 128 else 0) if selector & 8 else octet) << 8 * i
        return result

    check("prmt.b32", data, permuted)
    check("prmt.b32", data, permuted, s2=st.just(uniform))
    check("prmt.b32", data, permuted, s2=st.just(uniform & 0x7777))
    for mode, table in PERMUTED.items():
        rows = [int(row, 16) for row in table.split()]
        check(f"prmt.b32.{mode}", data, lambda a, b, c, rows=rows: permuted(a, b, rows[c & 3]))


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
def test_counting(bits: int, data: st.DataObject) -> None:
    check(f"popc.b{bits}", data, int.bit_count)
    check(f"clz.b{bits}", data, lambda a: bits - a.bit_length())
    check(f"brev.b{bits}", data, lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    for kind in (f"u{bits}", f"s{bits}"):
        check(f"bfind.{kind}", data, lambda a: (~a if a < 0 else a).bit_length() - 1)

        def amount(a: int) -> int:
            place = (~a if a < 0 else a).bit_length() - 1
            return bits - 1 - place if place >= 0 else -1

        check(f"bfind.shiftamt.{kind}", data, amount)


# ---- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("whole", "count"), [("b32", 2), ("b64", 2), ("b64", 4), ("b32", 4)])
@given(data=st.data())
def test_pack_puts_the_first_lowest_and_unpack_undoes_it(
    whole: str, count: int, data: st.DataObject
) -> None:
    packing, unpacking = pack(whole, count), unpack(whole, count)
    assert packing is not None and unpacking is not None
    assert packing.sources == unpacking.results and packing.results == unpacking.sources
    x = data.draw(values(whole))
    items = unpacking.evaluate(np.array([x], DTYPES[whole]))
    bits = width(whole) // count
    assert [int(item[0]) for item in items] == [x >> bits * i & 2**bits - 1 for i in range(count)]
    assert packing.evaluate(*items).tolist() == [x]


def test_vectors_that_no_register_holds_are_not_packed() -> None:
    assert pack("b32", 3) is None and unpack("b64", 3) is None


# ---- comparison and selection --------------------------------------------------------------------

COMPARE = {
    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__,
    "ge": int.__ge__,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE = {"and": bool.__and__, "or": bool.__or__, "xor": bool.__xor__}


@pytest.mark.parametrize("kind", INTEGERS)
@given(data=st.data(), c=st.booleans())
def test_setp_of_integers(kind: str, data: st.DataObject, c: bool) -> None:
    a, b = (data.draw(values(kind)) for _ in "ab")
    lanes = np.array([[a], [b]], DTYPES[kind])
    names = {**COMPARE, **({k: COMPARE[v] for k, v in UNSIGNED.items()} if kind[0] == "u" else {})}
    for name, holds in names.items():
        first = bool(holds(a, b))
        assert named(f"setp.{name}.{kind}").evaluate(*lanes).tolist() == [first]
        p, q = named(f"setp.{name}.{kind}", 2).evaluate(*lanes)
        assert (p.tolist(), q.tolist()) == ([first], [not first])
        for combination, join in COMBINE.items():
            both = named(f"setp.{name}.{combination}.{kind}", 2)
            assert both.sources == (kind, kind, "pred") and both.results == ("pred", "pred")
            p, q = both.evaluate(*lanes, np.array([c]))
            assert (p.tolist(), q.tolist()) == ([join(first, c)], [join(not first, c)])
            one = named(f"setp.{name}.{combination}.{kind}")
            assert one.evaluate(*lanes, np.array([c])).tolist() == [join(first, c)]


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_setp_of_floats_knows_nan(kind: str) -> None:
    numbers = np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, np.nan]).astype(DTYPES[kind])
    for a in numbers:
        for b in numbers:
            x, y = float(a), float(b)
            unordered = np.isnan(x) or np.isnan(y)
            ordered = {
                "eq": x == y, "ne": x != y and not unordered, "lt": x < y, "le": x <= y,
                "gt": x > y, "ge": x >= y,
            }  # fmt: skip
            expected = {
                **ordered,
                **{f"{name}u": value or unordered for name, value in ordered.items()},
                "num": not unordered,
                "nan": unordered,
            }
            for name, value in expected.items():
                got = named(f"setp.{name}.{kind}").evaluate(np.array([a]), np.array([b]))
                assert got.tolist() == [value], (name, x, y)


def test_setp_flushes_and_compares_halves() -> None:
    small = np.array([1e-40, -1e-40], np.float32)
    zero = np.zeros(2, np.float32)
    assert named("setp.gt.f32").evaluate(small, zero).tolist() == [True, False]
    assert named("setp.eq.ftz.f32").evaluate(small, zero).tolist() == [True, True]
    pair = np.array([1.0, 2.0], np.float16).view(np.uint32)
    assert lookup("setp", ("lt", "f16x2")) is None  # it has two results
    low, high = named("setp.lt.f16x2", 2).evaluate(
        pair, np.array([1.5, 1.5], np.float16).view("u4")
    )
    assert (low.tolist(), high.tolist()) == ([True], [False])


def test_set_and_select() -> None:
    a, b = np.array([1, 5], np.int32), np.array([3, 3], np.int32)
    assert named("set.lt.u32.s32").evaluate(a, b).tolist() == [0xFFFFFFFF, 0]
    assert named("set.lt.f32.s32").evaluate(a, b).tolist() == [1.0, 0.0]
    holds = np.array([True, False])
    assert named("set.lt.or.s32.s32").evaluate(a, b, ~holds).tolist() == [-1, -1]
    assert named("selp.s32").evaluate(a, b, holds).tolist() == [1, 3]
    assert named("selp.f32").evaluate(np.float32(2), np.float32(3), holds).tolist() == [2.0, 3.0]
    signs = np.array([-1, 0], np.int32)
    assert named("slct.s32.s32").evaluate(a, b, signs).tolist() == [3, 5]
    numbers = np.array([np.nan, -0.0], np.float32)
    assert named("slct.s32.f32").evaluate(a, b, numbers).tolist() == [3, 5]
    tiny = np.array([-1e-40, -1e-30], np.float32)
    assert named("slct.s32.f32").evaluate(a, b, tiny).tolist() == [3, 3]
    assert named("slct.ftz.s32.f32").evaluate(a, b, tiny).tolist() == [1, 3]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["ld.global.u32", "bra", "add.f8", "add.sat.u32", "mul.s32", "mul.wide.s64", "shl.s32",
     "setp.lt.b32", "setp.lo.s32", "setp.ltu.s32", "cvt.s32.f32", "cvt.f16.f32", "cvt.rn.f32.f16",
     "fma.f32", "fma.rn.sat.relu.f16", "ex2.f32", "cvta.to.global.u64", "setp.eq.ftz.f64",
     "slct.ftz.u32.s32", "popc.u32"],
)  # fmt: skip
def test_what_ptx_has_not_is_not_found(name: str) -> None:
    opcode, *modifiers = name.split(".")
    assert lookup(opcode, tuple(modifiers)) is None
    assert lookup(opcode, tuple(modifiers), 2) is None


def test_one_result_is_not_two() -> None:
    assert lookup("lop3", ("b32",), 2) is None and lookup("add", ("s32",), 2) is None


def test_lookup_gives_the_same_operation_again() -> None:
    assert lookup("add", ("s32",)) is lookup("add", ("s32",))
