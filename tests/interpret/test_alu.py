"""Integer instructions, comparisons, selections and moves of the interpreter, against Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from cupyattn.interpret.alu import DTYPES, Operation, lookup, pack, unpack
from tests.support.lanes import LANES, generator

pytestmark = pytest.mark.usefixtures("quiet")

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")


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


Draw = Callable[[np.random.Generator, int], list[int]]


def ends(kind: str) -> list[int]:
    """Values at which shifts, signs and sums turn."""
    top = 1 << width(kind) - 1
    found = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, -1, -2, top, top - 1]
    return [wrap(x, kind) for x in found]


def values(kind: str) -> Draw:
    """Any values of an integer type, ends and small numbers often."""

    def draw(rng: np.random.Generator, count: int) -> list[int]:
        anything = rng.integers(2 ** width(kind), size=count, dtype=np.uint64, endpoint=False)
        columns = anything.tolist(), rng.choice(ends(kind), count), rng.integers(-9, 71, count)
        which = rng.integers(3, size=count)
        return [wrap(int(columns[i][lane]), kind) for lane, i in enumerate(which)]

    return draw


def fields(rng: np.random.Generator, count: int) -> list[int]:
    """Places and lengths of bit fields, small ones often."""
    return (rng.integers(256, size=count) >> rng.choice([0, 2], count)).tolist()


def always(value: int) -> Draw:
    return lambda rng, count: [value] * count


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


def check(name: str, expected: Callable[..., int], *, lanes: int = LANES, **given: Draw) -> None:
    """Compare an operation with a function of plain integers, on lanes that are drawn; one or two
    sources meet all ends, too. `given` draws sources by their numbers, ``s0`` first."""
    operation = named(name)
    rng = generator(name)
    sources = [given.get(f"s{i}", values(kind)) for i, kind in enumerate(operation.sources)]
    drawn = list(zip(*(draw(rng, lanes) for draw in sources), strict=True))
    if len(sources) < 3 and not given:
        drawn += itertools.product(*(ends(kind) for kind in operation.sources))
    got = run(operation, [list(column) for column in zip(*drawn, strict=True)])
    kind = operation.results[0]
    wrong = [
        (lane, found, right)
        for lane, found in zip(drawn, got, strict=True)
        if found != (right := wrap(expected(*lane), kind))
    ]
    assert not wrong, f"{name}: sources, found, expected: {wrong[:3]}"


# ---- sums and products ---------------------------------------------------------------------------


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("kind", INTEGERS)
def test_arithmetic(kind: str) -> None:
    bits = width(kind)
    check(f"add.{kind}", lambda a, b: a + b)
    check(f"sub.{kind}", lambda a, b: a - b)
    check(f"mul.lo.{kind}", lambda a, b: a * b)
    check(f"mul.hi.{kind}", lambda a, b: a * b >> bits)
    check(f"mad.lo.{kind}", lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind}", lambda a, b, c: (a * b >> bits) + c)
    check(f"min.{kind}", min)
    check(f"max.{kind}", max)
    check(f"sad.{kind}", lambda a, b, c: c + abs(a - b))
    ones = wrap(-1, kind)
    check(f"rem.{kind}", lambda a, b: a - b * truncated(a, b) if b else ones)
    check(f"div.{kind}", lambda a, b: truncated(a, b) if b else ones)
    if kind[0] == "s":
        check(f"neg.{kind}", lambda a: -a)
        check(f"abs.{kind}", abs)
    if bits < 64:
        check(f"mul.wide.{kind}", lambda a, b: a * b)
        check(f"mad.wide.{kind}", lambda a, b, c: a * b + c)


def test_saturating_arithmetic() -> None:
    check("add.sat.s32", lambda a, b: clamp(a + b, "s32"))
    check("sub.sat.s32", lambda a, b: clamp(a - b, "s32"))
    check("mad.hi.sat.s32", lambda a, b, c: clamp((a * b >> 32) + c, "s32"))
    check("min.relu.s32", lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", lambda a, b: max(a, b, 0))


@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
def test_pairs_of_16_bits(kind: str) -> None:
    def both(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def on_halves(a: int, b: int) -> int:
            low, high = (
                wrap(function(wrap(a >> at, kind[:3]), wrap(b >> at, kind[:3])), "u16")
                for at in (0, 16)
            )
            return low | high << 16

        return on_halves

    check(f"add.{kind}", both(lambda a, b: a + b))
    check(f"min.{kind}", both(min))
    check(f"max.{kind}", both(max))


def pieces(x: int, bits: int, kind: str) -> list[int]:
    return [wrap(x >> i, f"{kind}{bits}") for i in range(0, 32, bits)]


@pytest.mark.parametrize("a_kind", "us")
@pytest.mark.parametrize("b_kind", "us")
def test_dot_products(a_kind: str, b_kind: str) -> None:
    def dp4a(a: int, b: int, c: int) -> int:
        products = zip(pieces(a, 8, a_kind), pieces(b, 8, b_kind), strict=True)
        return c + sum(x * y for x, y in products)

    def dp2a(first: int) -> Callable[[int, int, int], int]:
        def dot(a: int, b: int, c: int) -> int:
            octets = pieces(b, 8, b_kind)[first : first + 2]
            return c + sum(x * y for x, y in zip(pieces(a, 16, a_kind), octets, strict=True))

        return dot

    check(f"dp4a.{a_kind}32.{b_kind}32", dp4a)
    check(f"dp2a.lo.{a_kind}32.{b_kind}32", dp2a(0))
    check(f"dp2a.hi.{a_kind}32.{b_kind}32", dp2a(2))


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BITS)
def test_bits(kind: str) -> None:
    check(f"and.{kind}", lambda a, b: a & b)
    check(f"or.{kind}", lambda a, b: a | b)
    check(f"xor.{kind}", lambda a, b: a ^ b)
    check(f"not.{kind}", lambda a: ~a)
    check(f"cnot.{kind}", lambda a: int(a == 0))
    check(f"mov.{kind}", lambda a: a)
    check(f"shl.{kind}", lambda a, n: a << min(n, 64))


@pytest.mark.parametrize("kind", (*BITS, *INTEGERS))
def test_right_shifts_keep_the_sign_and_stop_at_the_width(kind: str) -> None:
    check(f"shr.{kind}", lambda a, n: a >> min(n, width(kind)))


def test_predicates() -> None:
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert named("and.pred").evaluate(a, b).tolist() == [False, False, False, True]
    assert named("or.pred").evaluate(a, b).tolist() == [False, True, True, True]
    assert named("xor.pred").evaluate(a, b).tolist() == [False, True, True, False]
    assert named("not.pred").evaluate(a).tolist() == [True, True, False, False]


def test_lop3_is_any_function_of_three_bits() -> None:
    def expected(a: int, b: int, c: int, table: int) -> int:
        rows = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    for table in range(256):
        check("lop3.b32", expected, s3=always(table), lanes=12)


def test_funnel_shifts() -> None:
    def left(n_of: Callable[[int], int]) -> Callable[[int, int, int], int]:
        return lambda a, b, n: (b << 32 | a) << n_of(n) >> 32

    def right(n_of: Callable[[int], int]) -> Callable[[int, int, int], int]:
        return lambda a, b, n: (b << 32 | a) >> n_of(n)

    check("shf.l.wrap.b32", left(lambda n: n & 31))
    check("shf.l.clamp.b32", left(lambda n: min(n, 32)))
    check("shf.r.wrap.b32", right(lambda n: n & 31))
    check("shf.r.clamp.b32", right(lambda n: min(n, 32)))


@pytest.mark.parametrize("kind", ["u32", "u64", "s32", "s64"])
def test_bfe_follows_the_text_of_the_isa(kind: str) -> None:
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

    check(f"bfe.{kind}", expected, s1=fields, s2=fields)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bfi_follows_the_text_of_the_isa(kind: str) -> None:
    def expected(a: int, b: int, position: int, length: int) -> int:
        for i in range(length):
            if position + i < width(kind):
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    check(f"bfi.{kind}", expected, s2=fields, s3=fields)


PERMUTED = {
    "f4e": "3210 4321 5432 6543", "b4e": "5670 6701 7012 0123", "rc8": "0000 1111 2222 3333",
    "ecl": "3210 3211 3222 3333", "ecr": "0000 1110 2210 3210", "rc16": "1010 3232 1010 3232",
}  # fmt: skip


def test_prmt() -> None:
    def permuted(a: int, b: int, control: int) -> int:
        octets = (b << 32 | a).to_bytes(8, "little")
        result = 0
        for i in range(4):
            selector = control >> 4 * i & 15
            octet = octets[selector & 7]
            result |= ((255 if octet & 128 else 0) if selector & 8 else octet) << 8 * i
        return result

    check("prmt.b32", permuted)
    for uniform in generator("prmt of one control").integers(2**16, size=LANES // 12).tolist():
        check("prmt.b32", permuted, s2=always(uniform), lanes=12)
        check("prmt.b32", permuted, s2=always(uniform & 0x7777), lanes=12)
    for mode, table in PERMUTED.items():
        rows = [int(row, 16) for row in table.split()]
        check(f"prmt.b32.{mode}", lambda a, b, c, rows=rows: permuted(a, b, rows[c & 3]))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    check(f"popc.b{bits}", int.bit_count)
    check(f"clz.b{bits}", lambda a: bits - a.bit_length())
    check(f"brev.b{bits}", lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    for kind in (f"u{bits}", f"s{bits}"):
        check(f"bfind.{kind}", lambda a: (~a if a < 0 else a).bit_length() - 1)

        def amount(a: int) -> int:
            place = (~a if a < 0 else a).bit_length() - 1
            return bits - 1 - place if place >= 0 else -1

        check(f"bfind.shiftamt.{kind}", amount)


# ---- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("whole", "count"), [("b32", 2), ("b64", 2), ("b64", 4), ("b32", 4)])
def test_pack_puts_the_first_lowest_and_unpack_undoes_it(whole: str, count: int) -> None:
    packing, unpacking = pack(whole, count), unpack(whole, count)
    assert packing is not None and unpacking is not None
    assert packing.sources == unpacking.results and packing.results == unpacking.sources
    lanes = values(whole)(generator(whole), LANES)
    items = unpacking.evaluate(np.array(lanes, DTYPES[whole]))
    bits = width(whole) // count
    for i, item in enumerate(items):
        assert item.tolist() == [x >> bits * i & 2**bits - 1 for x in lanes]
    assert packing.evaluate(*items).tolist() == lanes


def test_vectors_that_no_register_holds_are_not_packed() -> None:
    assert pack("b32", 3) is None and unpack("b64", 3) is None


# ---- comparison and selection --------------------------------------------------------------------

COMPARE = {
    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__,
    "ge": int.__ge__,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@pytest.mark.parametrize("kind", INTEGERS)
def test_setp_of_integers(kind: str) -> None:
    rng = generator(kind)
    pairs = list(itertools.product(ends(kind), ends(kind)))
    pairs += zip(values(kind)(rng, LANES), values(kind)(rng, LANES), strict=True)
    pairs += [(a, a) for a, _ in pairs]
    lanes = np.array(pairs, DTYPES[kind]).T
    c = rng.random(len(pairs)) < 0.5
    names = {**COMPARE, **({k: COMPARE[v] for k, v in UNSIGNED.items()} if kind[0] == "u" else {})}
    for name, holds in names.items():
        first = np.array([holds(a, b) for a, b in pairs])
        assert_array_equal(named(f"setp.{name}.{kind}").evaluate(*lanes), first)
        p, q = named(f"setp.{name}.{kind}", 2).evaluate(*lanes)
        assert_array_equal([p, q], [first, ~first])
        for combination, join in COMBINE.items():
            both = named(f"setp.{name}.{combination}.{kind}", 2)
            assert both.sources == (kind, kind, "pred") and both.results == ("pred", "pred")
            p, q = both.evaluate(*lanes, c)
            assert_array_equal([p, q], [join(first, c), join(~first, c)])
            one = named(f"setp.{name}.{combination}.{kind}")
            assert_array_equal(one.evaluate(*lanes, c), join(first, c))


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


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_set_of_halves(kind: str) -> None:
    """1.0 in each half, as ``__hgt2`` has it, or 16 ones, as ``__hgt2_mask``."""
    dtype = DTYPES[kind]
    a, b = (np.array(x, dtype).view(np.uint32) for x in ([1, 2, np.nan, 4], [1.5, 1, 0, 4]))
    gt = named(f"set.gt.{kind}x2.{kind}x2").evaluate(a, b)
    assert gt.view(dtype).tolist() == [0, 1, 0, 0]
    assert named(f"set.gt.u32.{kind}x2").evaluate(a, b).tolist() == [0xFFFF0000, 0]
    assert named(f"set.nan.u32.{kind}x2").evaluate(a, b).tolist() == [0, 0x0000FFFF]
    assert named(f"set.geu.u32.{kind}x2").evaluate(a, b).tolist() == [0xFFFF0000, 0xFFFFFFFF]
    other = {"f16": "bf16", "bf16": "f16"}[kind]
    for name in (f"gt.{other}x2.{kind}x2", f"gt.and.u32.{kind}x2", f"gt.s32.{kind}x2"):
        assert lookup("set", tuple(name.split("."))) is None, name


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
