"""Tensor-core instructions of the interpreter, against products of plain matrices.

The fragment layouts are written out here once more, element by element, from the formulas of the
PTX ISA; matrices hold integers small enough for every product and sum to be exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from cupyattn.interpret.tensor_core import (
    accumulation_error,
    elements,
    find_mma,
    ldmatrix,
    mma,
    stmatrix,
)
from cupyattn.interpret.warpgroup import (
    Descriptor,
    find_wgmma,
    operand_addresses,
    swizzled_address,
)
from cupyattn.kernels.numerics import TENSOR_CORE_ROUNDOFF
from tests.prims.prims_mma_cases import swizzle

pytestmark = pytest.mark.usefixtures("quiet")

NUMBERS: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
    "f32": np.float32, "s32": np.int32,
}  # fmt: skip
RANGE = {"u8": (0, 256), "s8": (-128, 128), "s4": (-8, 8), "u4": (0, 16)}
WARPS = 3

At = Callable[[int, int, int], tuple[int, int]]


# ---- layouts: row and column of element i of lane 4 g + t, as the ISA states them ----------------


def a_16(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k16 in 16 bits."""
    return (g if i < 2 or 4 <= i < 6 else g + 8), t * 2 + (i & 1) + (0 if i < 4 else 8)


def a_16_half(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k8 in 16 bits."""
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def a_8(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k32 in 8 bits."""
    return (g if i < 4 or 8 <= i < 12 else g + 8), t * 4 + (i & 3) + (0 if i < 8 else 16)


def a_8_half(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k16 in 8 bits."""
    return (g if i < 4 else g + 8), t * 4 + (i & 3)


def a_4(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k64 in 4 bits."""
    return (g if i < 8 or 16 <= i < 24 else g + 8), t * 8 + (i & 7) + (0 if i < 16 else 32)


def a_4_half(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k32 in 4 bits."""
    return (g if i < 8 else g + 8), t * 8 + (i & 7)


def a_32(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k8 in tf32."""
    return (g if i in (0, 2) else g + 8), t + (0 if i < 2 else 4)


def a_32_half(g: int, t: int, i: int) -> tuple[int, int]:
    """A of m16n8k4 in tf32."""
    return (g if i == 0 else g + 8), t


def b_16(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 2 + (i & 1) + (0 if i < 2 else 8), g


def b_8(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 4 + (i & 3) + (0 if i < 4 else 16), g


def b_4(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 8 + (i & 7) + (0 if i < 8 else 32), g


def b_32(g: int, t: int, i: int) -> tuple[int, int]:
    return t + (0 if i < 1 else 4), g


def c_16x8(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


LAYOUTS: dict[tuple[int, int], tuple[At, At]] = {
    (16, 8): (a_16_half, b_16), (16, 16): (a_16, b_16), (8, 16): (a_8_half, b_8),
    (8, 32): (a_8, b_8), (4, 32): (a_4_half, b_4), (4, 64): (a_4, b_4),
    (32, 4): (a_32_half, b_32), (32, 8): (a_32, b_32),
}  # fmt: skip
WIDTHS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4}
WIDTHS["u4"] = 4


def registers_of(matrices: np.ndarray, kind: str, at: At) -> np.ndarray:
    """Distribute matrices (warps, rows, columns) over registers (warps, 32, count)."""
    per_lane = matrices[0].size // 32
    bits = WIDTHS.get(kind, {"f16": 16}.get(kind, 32))
    words = np.zeros((len(matrices), 32, max(per_lane * bits // 32, 1)), np.uint32)
    for warp, lane, i in itertools.product(range(len(matrices)), range(32), range(per_lane)):
        value = matrices[(warp, *at(lane // 4, lane % 4, i))]
        if bits == 4:
            pattern = int(value) & 15
        else:
            pattern = int(np.array(value).astype(NUMBERS[kind]).view(f"u{bits // 8}"))
        words[warp, lane, i * bits // 32] |= np.uint32(pattern << i * bits % 32)
    return words


def matrices_of(registers: np.ndarray, kind: str, shape: tuple[int, int], at: At) -> np.ndarray:
    """Collect what `registers_of` distributes."""
    values = np.ascontiguousarray(registers).view(NUMBERS[kind])
    matrices = np.empty((len(registers), *shape), values.dtype)
    for warp, lane, i in np.ndindex(values.shape):
        matrices[(warp, *at(lane // 4, lane % 4, i))] = values[warp, lane, i]
    return matrices


def integers(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    low, high = RANGE.get(kind, (-8, 9))
    return np.random.default_rng(seed).integers(low, high, shape)


FLOATS = [
    (depth, a, b, c, d)
    for a, b, depths in (
        ("f16", "f16", (8, 16)),
        ("bf16", "bf16", (8, 16)),
        ("tf32", "tf32", (4, 8)),
        ("e4m3", "e4m3", (16, 32)),
        ("e5m2", "e5m2", (16, 32)),
        ("e4m3", "e5m2", (16, 32)),
    )  # fmt: skip
    for depth in depths
    for c, d in (("f32", "f32"), ("f16", "f16"))
    if c == "f32" or a in ("f16", "e4m3")
]
INTEGERS = [
    (depth, a, b, "s32", "s32")
    for kinds, depths in ((("s8", "u8"), (16, 32)), (("s4", "u4"), (32, 64)))
    for a, b in itertools.product(kinds, kinds)
    for depth in depths
]


@pytest.mark.parametrize(("depth", "a_type", "b_type", "c_type", "d_type"), FLOATS + INTEGERS)
def test_mma_is_a_product_of_matrices(
    depth: int, a_type: str, b_type: str, c_type: str, d_type: str
) -> None:
    A = integers((WARPS, 16, depth), a_type, 1)
    B = integers((WARPS, depth, 8), b_type, 2)
    C = integers((WARPS, 16, 8), c_type, 3)
    a_at, b_at = LAYOUTS[WIDTHS[a_type], depth]
    modifiers = ("sync", "aligned", f"m16n8k{depth}", "row", "col", d_type, a_type, b_type, c_type)
    sources = (
        registers_of(A, a_type, a_at), registers_of(B, b_type, b_at),
        registers_of(C, c_type, c_16x8),
    )  # fmt: skip
    result = mma(modifiers, *sources)
    assert result.dtype == np.uint32
    D = matrices_of(result, d_type, (16, 8), c_16x8)
    assert_array_equal(D.astype(np.int64), A @ B + C)


def test_saturation_of_integer_sums() -> None:
    A = np.full((1, 16, 32), 127)
    B = np.full((1, 32, 8), 127)
    C = np.full((1, 16, 8), 2**31 - 1)
    registers = (
        registers_of(A, "s8", a_8), registers_of(B, "s8", b_8), registers_of(C, "s32", c_16x8),
    )  # fmt: skip
    types = ("s32", "s8", "s8", "s32")
    plain = mma(("sync", "aligned", "m16n8k32", "row", "col", *types), *registers)
    clamped = mma(("sync", "aligned", "m16n8k32", "row", "col", "satfinite", *types), *registers)
    exact = 127 * 127 * 32 + 2**31 - 1
    assert set(plain.view(np.int32).ravel()) == {exact - 2**32}
    assert set(clamped.view(np.int32).ravel()) == {2**31 - 1}


F32_F16 = ("sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32")


def one_sum(terms: list[float], c: float, modifiers: tuple[str, ...] = F32_F16) -> np.ndarray:
    """D[0, 0] of a product whose first row of A holds `terms` and first column of B ones."""
    A, B, C = np.zeros((1, 16, 16)), np.zeros((1, 16, 8)), np.zeros((1, 16, 8))
    A[0, 0, : len(terms)], B[0, : len(terms), 0], C[0, 0, 0] = terms, 1, c
    kind = modifiers[-2]
    a, b = registers_of(A, kind, a_16), registers_of(B, kind, b_16)
    result = mma(modifiers, a, b, registers_of(C, modifiers[-1], c_16x8))
    return result.view(NUMBERS[modifiers[5]])[0, 0, 0]


def test_sums_are_cut_once() -> None:
    assert one_sum([2.0**-12], 4097.0) == 4097.0
    assert one_sum([2.0**-12, 2.0**-12], 4097.0) == 4097.0 + 2.0**-11
    assert one_sum([1.0, 2.0**-24], 0.0) == 1.0
    assert one_sum([1.0, 2.0**-24, 2.0**-24], 0.0) == 1.0 + 2.0**-23  # lost bits are not
    assert one_sum([1.0, -(2.0**-24)], 0.0) == 1.0 - 2.0**-24
    assert one_sum([2.0, 2.0**-24, -(2.0**-23)], -2.0) == -(2.0**-24)
    f16 = (*F32_F16[:5], "f16", "f16", "f16", "f16")
    assert one_sum([1.0, 2.0**-11, 2.0**-14], 0.0, f16) == np.float16(1 + 2.0**-10)  # to nearest


def test_special_sums() -> None:
    assert one_sum([np.inf], 1.0) == np.inf
    assert one_sum([65504.0], -np.inf) == -np.inf
    assert np.signbit(one_sum([-0.0], -0.0)) == np.False_
    nan = one_sum([np.inf, -np.inf], 0.0)
    assert nan.view(np.uint32) == 0x7FFFFFFF
    f16 = (*F32_F16[:5], "f16", "f16", "f16", "f16")
    assert one_sum([np.nan], 0.0, f16).view(np.uint16) == 0x7FFF
    assert one_sum([65504.0, 65504.0], 0.0, f16) == np.inf
    bf16 = (*F32_F16[:5], "f32", "bf16", "bf16", "f32")
    largest = float(np.finfo(np.float32).max)
    assert one_sum([2.0**127, 2.0**127], 0.0, bf16) == np.inf
    assert one_sum([1.0], largest, bf16) == largest
    assert one_sum([-(2.0**-133)], 2.0**-149, bf16) == -(2.0**-133) + 2.0**-149


def aligned_sum(terms: np.ndarray, extra_bits: int) -> float:
    """Sum as tensor cores do: align to the largest, cut below its last bit kept, add, cut."""
    largest = np.abs(terms).max()
    if largest == 0:
        return 0.0
    last = 2.0 ** (np.floor(np.log2(largest)) - 23 - extra_bits)
    total = float(np.trunc(terms / last).sum() * last)
    place = 2.0 ** (np.floor(np.log2(abs(total))) - 23) if total else 1.0
    return float(np.trunc(total / place) * place)


@pytest.mark.parametrize("extra_bits", [0, 1, 2])
def test_the_stated_error_covers_how_tensor_cores_add(extra_bits: int) -> None:
    draw = np.random.default_rng(extra_bits)
    A = (draw.standard_normal((64, 16, 16)) * 2.0 ** draw.integers(-6, 7, (64, 16, 16))).astype(
        "f2"
    )
    B = draw.standard_normal((64, 16, 8)).astype("f2")
    C = draw.standard_normal((64, 16, 8)).astype("f4")
    product = find_mma(F32_F16)
    assert product is not None
    registers = (
        product.a.scatter(A).view(np.uint32), product.b.scatter(B).view(np.uint32),
        product.accumulator.c.scatter(C).view(np.uint32),
    )  # fmt: skip
    D = product.accumulator.d.gather(product(*registers).view(np.float32)).astype(np.float64)
    a, b, c = (x.astype(np.float64) for x in (A, B, C))
    bound = accumulation_error(16, np.abs(a) @ np.abs(b) + np.abs(c))
    worst = 0.0
    for m, i, j in np.ndindex(D.shape):
        hardware = aligned_sum(np.append(a[m, i] * b[m, :, j], c[m, i, j]), extra_bits)
        worst = max(worst, abs(hardware - D[m, i, j]) / bound[m, i, j])
    assert worst <= 1
    assert worst > 0.02, "the bound says nothing"
    assert bound.min() >= 18 * TENSOR_CORE_ROUNDOFF * np.abs(c).min()


@pytest.mark.parametrize(
    "name",
    ["m16n8k16.row.row.f32.f16.f16.f32", "m16n8k16.row.col.f32.f16.bf16.f32",
     "m16n8k32.row.col.f32.f16.f16.f32", "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
     "m16n8k32.row.col.f32.s8.s8.s32", "m8n8k4.row.col.f32.f16.f16.f32",
     "m16n8k8.row.col.f16.bf16.bf16.f16"],
)  # fmt: skip
def test_unknown_products_are_not_found(name: str) -> None:
    modifiers = ("sync", "aligned", *name.split("."))
    assert find_mma(modifiers) is None
    with pytest.raises(ValueError, match=r"mma\.sync\.aligned\.m"):
        mma(modifiers, *[np.zeros((1, 32, 4), np.uint32)] * 3)


# ---- 8 x 8 tiles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(tiles: int, transposed: bool) -> None:
    matrices = np.arange(WARPS * tiles * 64, dtype=np.uint16).reshape(WARPS, tiles, 8, 8)
    rows = matrices.reshape(WARPS, tiles * 8, 8).view(np.uint32)
    registers = ldmatrix(rows, transposed)
    assert registers.shape == (WARPS, 32, tiles) and registers.dtype == np.uint32
    for warp, lane, tile in np.ndindex(registers.shape):
        r, c = divmod(lane, 4)
        matrix = matrices[warp, tile].T if transposed else matrices[warp, tile]
        expected = int(matrix[r, 2 * c]) | int(matrix[r, 2 * c + 1]) << 16
        assert int(registers[warp, lane, tile]) == expected
    assert_array_equal(stmatrix(registers, transposed), rows)


# ---- warpgroups ----------------------------------------------------------------------------------


def d_64xn(t: int, i: int) -> tuple[int, int]:
    """Row and column of accumulator i of thread t of a warpgroup."""
    row = t // 32 * 16 + t % 32 // 4 + (8 if i // 2 % 2 else 0)
    return row, i // 4 * 8 + t % 4 * 2 + i % 2


def wgmma_modifiers(n: int, kind: str, d_type: str = "f32") -> tuple[str, ...]:
    return ("mma_async", "sync", "aligned", f"m64n{n}k{256 // WIDTHS[kind]}", d_type, kind, kind)


def descriptor(start: int, leading: int, stride: int, mode: int, base_offset: int = 0) -> int:
    fields = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32
    return fields | base_offset << 49 | mode << 62


def test_descriptor_fields() -> None:
    bits = descriptor(0x12340, 0x80, 0x3FFF0, 2, 5)
    assert Descriptor.decode(bits) == Descriptor(0x12340, 0x80, 0x3FFF0, 5, 64)
    assert [Descriptor.decode(mode << 62).swizzle for mode in range(4)] == [16, 128, 64, 32]


def test_swizzles_exchange_chunks_by_the_row() -> None:
    for chunks in (2, 4, 8):
        rows = 32
        plain = np.arange(rows * chunks) * 16
        expected = [16 * swizzle(chunks, i // chunks, i % chunks) for i in range(rows * chunks)]
        assert_array_equal(swizzled_address(plain, 16 * chunks), expected)
    plain = np.arange(0, 4096, 16)
    assert_array_equal(swizzled_address(plain, 16), plain)
    # A pattern that starts three rows of 128 bytes late.
    moved = swizzled_address(plain + 3 * 128, 128, 3) - 3 * 128
    assert_array_equal(moved, swizzled_address(plain, 128))


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("line", [16, 32, 64, 128])
@pytest.mark.parametrize("k_major", [True, False])
def test_operand_addresses_follow_the_canonical_layouts(
    width: int, line: int, k_major: bool
) -> None:
    """Written from the strides of the ISA, for tiles of 64 rows or columns."""
    mode = {16: 0, 32: 3, 64: 2, 128: 1}[line]
    start, leading, stride, size = 8192, 4096 + 128, 8 * line + 1024, width // 8
    depth = 256 // width
    addresses = operand_addresses(
        descriptor(start, leading, stride, mode), 64, depth, width, k_major
    )
    for row, k in np.ndindex(64, depth):
        along, across = (k, row) if k_major else (row, k)
        chunk, within = divmod(along * size, 16)
        if line == 16:
            apart = (leading, stride) if k_major else (stride, leading)
            plain = chunk * apart[0] + across // 8 * apart[1] + across % 8 * 16
        else:
            atom, chunk = divmod(chunk, line // 16)
            plain = atom * leading + across // 8 * stride + across % 8 * line + chunk * 16
        address = start + plain
        exchanged = address ^ ((address >> 7 & line // 16 - 1) << 4)
        assert addresses[row, k] == exchanged + within


def placed(X: np.ndarray, memory: np.ndarray, start: int) -> None:
    """Lay rows out in boxes of 64 columns, swizzled over 128 bytes, as tests/prims/sources do."""
    for row, column in np.ndindex(X.shape):
        box, inside = divmod(column, 64)
        chunk = swizzle(8, row, inside // 8)
        at = start // 2 + box * len(X) * 64 + chunk * 8 + inside % 8
        memory[at] = X[row, column].view(np.uint16)


@pytest.mark.parametrize("columns", [64, 96, 128])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wgmma_of_two_operands_in_shared_memory(kind: str, columns: int) -> None:
    """The kernel `ss` of tests/prims/sources/prims_wgmma.cu, with its results on hardware."""
    depth, rows = 80, 128
    A, B = (integers((n, depth), kind, n).astype(NUMBERS[kind]) for n in (rows, columns))
    memory = np.full(2**16, 0x7FFF, np.uint16)
    a_start, b_start = 1024, 1024 + 2 * rows * 128
    placed(A, memory, a_start)
    placed(B, memory, b_start)
    product = find_wgmma(wgmma_modifiers(columns, kind))
    assert product is not None
    c = np.ones((2, 128, columns // 2), np.float32).view(np.uint32)
    for k in range(depth // 16):
        within = k % 4 * 32
        a_tiles = [
            operand_addresses(
                descriptor(a_start + group * 64 * 128 + k // 4 * rows * 128 + within, 16, 1024, 1),
                64, 16, 16, True,
            )
            for group in (0, 1)
        ]  # fmt: skip
        b_tile = operand_addresses(
            descriptor(b_start + k // 4 * columns * 128 + within, 16, 1024, 1),
            columns, 16, 16, True,
        )  # fmt: skip
        a = elements(memory[np.stack(a_tiles) // 2], kind)
        b = elements(memory[np.stack([b_tile, b_tile]) // 2], kind)
        c = product(a, b, c)
    D = np.empty((rows, columns))
    for group, t, i in np.ndindex(c.shape):
        row, column = d_64xn(t, i)
        D[group * 64 + row, column] = c.view(np.float32)[group, t, i]
    assert_array_equal(D, 1 + A.astype(np.float32) @ B.astype(np.float32).T)


@pytest.mark.parametrize("columns", [64, 96, 128])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wgmma_with_a_in_registers(kind: str, columns: int) -> None:
    """The kernel `rs` of tests/prims/sources/prims_wgmma.cu, with its results on hardware."""
    keys, start = 48, 2048
    A, B = (integers(s, kind, s[0]).astype(NUMBERS[kind]) for s in ((64, keys), (keys, columns)))
    memory = np.full(2**15, 0x7FFF, np.uint16)
    placed(B, memory, start)
    product = find_wgmma(wgmma_modifiers(columns, kind))
    assert product is not None
    pairs = A.view(np.uint32)
    c = np.ones((1, 128, columns // 2), np.float32).view(np.uint32)
    for k in range(keys // 16):
        a = np.empty((1, 128, 4), np.uint32)
        for t, i in np.ndindex(128, 4):
            row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
            a[0, t, i] = pairs[row, k * 8 + i // 2 * 4 + t % 4]
        tile = operand_addresses(
            descriptor(start + k * 16 * 128, keys * 128, 1024, 1), columns, 16, 16, False
        )
        c = product(product.rows_of_registers(a), elements(memory[tile // 2], kind)[None], c)
    D = np.empty((64, columns))
    for t, i in np.ndindex(c.shape[1:]):
        D[d_64xn(t, i)] = c.view(np.float32)[0, t, i]
    assert_array_equal(D, 1 + A.astype(np.float32) @ B.astype(np.float32))


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8"])
@pytest.mark.parametrize("columns", [8, 256])
def test_wgmma_of_every_type(kind: str, columns: int) -> None:
    depth, groups = 256 // WIDTHS[kind], 2
    d_type = "s32" if kind in ("s8", "u8") else "f32"
    product = find_wgmma(wgmma_modifiers(columns, kind, d_type))
    assert product is not None
    A, B = (integers((groups, n, depth), kind, n) for n in (64, columns))
    a_at, _ = LAYOUTS[WIDTHS[kind], depth]
    registers = registers_of(A.reshape(groups * 4, 16, depth), kind, a_at)
    a = product.rows_of_registers(registers.reshape(groups, 128, -1))
    assert_array_equal(a, A)
    C = integers((groups, 64, columns), d_type, 3)
    c = np.empty((groups, 128, columns // 2), NUMBERS[d_type])
    for group, t, i in np.ndindex(c.shape):
        c[group, t, i] = C[(group, *d_64xn(t, i))]
    for scale_d, sign in ((True, 1), (np.array([True, False]), -1)):
        kept = C * np.reshape(np.broadcast_to(scale_d, groups), (groups, 1, 1))
        expected = sign * (A @ B.swapaxes(1, 2)) + kept
        result = product(a, B.astype(np.float64), c.view(np.uint32), scale_d, sign)
        for group, t, i in np.ndindex(c.shape):
            value = result.view(c.dtype)[group, t, i]
            assert value == expected[(group, *d_64xn(t, i))]


def test_what_does_not_count_may_be_nan() -> None:
    product = find_wgmma(wgmma_modifiers(8, "f16"))
    assert product is not None
    c = np.full((1, 128, 4), np.nan, np.float32).view(np.uint32)
    result = product(np.ones((1, 64, 16)), np.ones((1, 8, 16)), c, np.array([False]))
    assert set(result.view(np.float32).ravel().tolist()) == {16.0}


def test_half_accumulators_of_warpgroups() -> None:
    product = find_wgmma(wgmma_modifiers(16, "f16", "f16"))
    assert product is not None
    A, B, C = (integers((1, *s), "f16", s[0]) for s in ((64, 16), (16, 16), (64, 16)))
    c = np.zeros((1, 128, 8), np.float16)
    for t, i in np.ndindex(128, 8):
        c[0, t, i] = C[(0, *d_64xn(t, i))]
    result = product(A.astype(float), B.astype(float), c.view(np.uint32)).view(np.float16)
    expected = A @ B.swapaxes(1, 2) + C
    for t, i in np.ndindex(128, 8):
        assert result[0, t, i] == expected[(0, *d_64xn(t, i))]


@pytest.mark.parametrize(
    "name", ["m64n12k16.f32.f16.f16", "m64n64k8.f32.f16.f16", "m64n40k32.s32.s8.s8",
             "m64n64k16.satfinite.f32.f16.f16", "m64n264k16.f32.f16.f16"],
)  # fmt: skip
def test_unknown_products_of_warpgroups_are_not_found(name: str) -> None:
    assert find_wgmma(("mma_async", "sync", "aligned", *name.split("."))) is None
