"""``wmma``: every shape, type and layout computes the product, and its accesses are checked."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import interpret
from cupyattn.errors import UnsupportedError
from cupyattn.interpret.tensor_core import accumulation_error

TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
    "u8": np.uint8, "f32": np.float32, "s32": np.int32,
}  # fmt: skip
SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
PRODUCTS = [
    *itertools.product(SHAPES, [("f16", "f16"), ("f16", "f32"), ("bf16", "f32")], ["row", "col"]),
    *itertools.product(SHAPES, [("s8", "s32"), ("u8", "s32")], ["row", "col"]),
    *itertools.product(["m16n16k8"], [("tf32", "f32")], ["row", "col"]),
]
#: Elements from a row of memory to the next.
STRIDE = 48


def registers(kind: str, elements: int, operand: bool) -> int:
    """Registers of a fragment, by the table of the PTX ISA."""
    return 8 if operand and kind == "f16" else elements * np.dtype(TYPES[kind]).itemsize // 128


def listed(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def kernel(
    shape: str, kind: str, sums: str, layouts: tuple[str, str, str, str], between: str = "",
    space: str = "global", saturates: bool = False,
) -> str:  # fmt: skip
    """Return PTX that stores A B + C as D, with layouts of A, B, C and D."""
    m, n, k = sizes(shape)
    a, b, c = (
        listed(first, registers(x, count, first < 40))
        for first, x, count in ((0, kind, m * k), (20, kind, k * n), (40, sums, m * n))
    )
    types = f"{sums}.{sums}" if kind == "f16" else f"{sums}.{kind}.{kind}.{sums}"
    end = ".satfinite" if saturates else ""
    by_a, by_b, by_c, by_d = layouts
    return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry product(
  .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u32 ld
) {{
  .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
  ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
  ld.param.u64 %rd4, [d]; ld.param.u32 %r90, [ld];
  wmma.load.a.sync.aligned.{by_a}.{shape}.{space}.{kind} {a}, [%rd1], %r90;
  wmma.load.b.sync.aligned.{by_b}.{shape}.{space}.{kind} {b}, [%rd2], %r90;
  wmma.load.c.sync.aligned.{by_c}.{shape}.{sums} {c}, [%rd3], %r90;
  wmma.mma.sync.aligned.{by_a}.{by_b}.{shape}.{types}{end} {c}, {a}, {b}, {c};
  {between}
  wmma.store.d.sync.aligned.{by_d}.{shape}.{space}.{sums} [%rd4], {c}, %r90;
  ret;
}}"""


def sizes(shape: str) -> tuple[int, int, int]:
    return SHAPES.get(shape, (16, 16, 8))


def drawn(kind: str, rows: int, columns: int, layout: str, rng: Any) -> tuple[Any, Any]:
    """Return a matrix, and memory that holds it in a layout with rows of STRIDE elements."""
    dtype = np.dtype(TYPES[kind])
    if dtype.kind in "iu":
        limits = np.iinfo(np.int16 if kind == "s32" else dtype)
        matrix = rng.integers(limits.min, limits.max, (rows, columns), dtype, endpoint=True)
    else:
        matrix = rng.standard_normal((rows, columns)).astype(dtype)
    if kind == "tf32":
        matrix = (matrix.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    there = matrix if layout == "row" else matrix.T
    memory = np.zeros((len(there), STRIDE), dtype)
    memory[:, : there.shape[1]] = there
    return matrix, memory


def arguments(
    shape: str, kind: str, sums: str, layouts: tuple[str, str, str, str]
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return A, B and C, and the arguments of a kernel."""
    m, n, k = sizes(shape)
    rng = np.random.default_rng(0)
    a, of_a = drawn(kind, m, k, layouts[0], rng)
    b, of_b = drawn(kind, k, n, layouts[1], rng)
    c, of_c = drawn(sums, m, n, layouts[2], rng)
    d = np.zeros((m if layouts[3] == "row" else n, STRIDE), TYPES[sums])
    given = {"a": of_a, "b": of_b, "c": of_c, "d": d, "ld": np.int32(STRIDE)}
    return a, b, c, given


@pytest.mark.parametrize(("shape", "kinds", "layout"), PRODUCTS)
def test_products(shape: str, kinds: tuple[str, str], layout: str) -> None:
    kind, sums = kinds
    other = "col" if layout == "row" else "row"
    for layouts in ((layout, other, "row", layout), (layout, layout, "col", other)):
        a, b, c, given = arguments(shape, kind, sums, layouts)
        ptx = kernel(shape, kind, sums, layouts)
        interpret.launch(ptx, "product", 1, 32, given)
        m, n, k = sizes(shape)
        found = given["d"][:, : n if layouts[3] == "row" else m]
        found = (found if layouts[3] == "row" else found.T).astype(np.float64)
        exact = a.astype(np.float64) @ b.astype(np.float64) + c
        size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) + np.abs(c)
        bound = 0 if sums == "s32" else accumulation_error(k, size, d_type=sums)
        assert (np.abs(found - exact) <= bound).all()
        assert not given["d"][:, max(m, n) :].any()  # nothing beside the matrix


def test_sums_of_codes_saturate_where_asked() -> None:
    layouts = ("row", "col", "row", "row")
    for saturates, expected in ((True, 2**31 - 1), (False, -(2**31) + 15)):
        *_, given = arguments("m16n16k16", "s8", "s32", layouts)
        for name, value in (("a", 1), ("b", 1), ("c", 2**31 - 1)):
            given[name][:] = value
        ptx = kernel("m16n16k16", "s8", "s32", layouts, saturates=saturates)
        interpret.launch(ptx, "product", 1, 32, given)
        assert (given["d"][:, :16] == expected).all()


def test_elements_of_a_fragment_are_scaled_one_by_one() -> None:
    layouts = ("row", "col", "row", "col")
    halves = "; ".join(f"mul.f32 %r{i}, %r{i}, 0f3F000000" for i in range(40, 48))
    a, b, c, given = arguments("m16n16k16", "f16", "f32", layouts)
    ptx = kernel("m16n16k16", "f16", "f32", layouts, between=f"{halves};")
    interpret.launch(ptx, "product", 1, 32, given)
    exact = (a.astype(np.float64) @ b.astype(np.float64) + c) / 2
    assert np.allclose(given["d"][:, :16].T, exact, atol=1e-5)


def test_a_product_with_another_layout_than_the_load_is_wrong() -> None:
    layouts = ("row", "col", "row", "row")
    a, b, c, given = arguments("m16n16k16", "s8", "s32", layouts)
    ptx = kernel("m16n16k16", "s8", "s32", layouts)
    ptx = ptx.replace("mma.sync.aligned.row.col", "mma.sync.aligned.col.col")
    interpret.launch(ptx, "product", 1, 32, given)
    assert (given["d"][:, :16] != a.astype(np.int32) @ b.astype(np.int32) + c).any()


def found(ptx: str, given: dict[str, Any], block: int = 32, **words: Any) -> str:
    """Return the finding of a launch."""
    with pytest.raises(interpret.KernelFault) as caught:
        interpret.launch(ptx, "product", 1, block, given, **words)
    return f"{caught.value.finding.kind}: {caught.value.finding.message}"


def test_accesses_are_checked() -> None:
    layouts = ("row", "col", "row", "row")
    ptx = kernel("m16n16k16", "f16", "f32", layouts)
    *_, given = arguments("m16n16k16", "f16", "f32", layouts)
    for changed, says in (
        ({"a": given["a"][:15]}, "out of bounds"),
        ({"d": given["d"][:15]}, "out of bounds"),
        ({"ld": np.int32(STRIDE + 8)}, "out of bounds"),
        ({"ld": np.int32(STRIDE - 1)}, "misaligned: a row or column of the matrix does not start"),
    ):
        assert found(ptx, given | changed).startswith(says), changed
    assert found(ptx, given, 64).startswith("race")  # two warps store one matrix
    of_lane = "mov.u32 %r91, %tid.x; mad.wide.u32 %rd1, %r91, 16, %rd1; wmma.load.a"
    says = "invalid operand: the lanes of a warp name different addresses or strides"
    assert found(ptx.replace("wmma.load.a", of_lane, 1), given).startswith(says)
    half = "mov.u32 %r91, %tid.x; setp.lt.u32 %p1, %r91, 16; @%p1 wmma.store.d"
    ptx = ptx.replace(".reg .f32", ".reg .pred %p<3>; .reg .f32").replace("wmma.store.d", half)
    assert found(ptx, given).startswith("divergence")


SHARED = """
extern "C" __global__ void product(const unsigned* x, float* y) {
  __shared__ alignas(32) unsigned tile[16 * 8];
  __shared__ alignas(32) float sums[16 * 16];
  const int i = threadIdx.x;
  for (int j = i; j < 16 * 8; j += blockDim.x) tile[j] = x[j];
  __syncthreads();
  if (i < 32) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(tile);
    const unsigned to = (unsigned)__cvta_generic_to_shared(sums);
    asm volatile(
        "{ .reg .b32 a<8>, b<8>; .reg .f32 c<8>; .reg .b64 p;\\n"
        "mov.f32 c0, 0f00000000; mov.f32 c1, c0; mov.f32 c2, c0; mov.f32 c3, c0;\\n"
        "mov.f32 c4, c0; mov.f32 c5, c0; mov.f32 c6, c0; mov.f32 c7, c0;\\n"
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {a0,a1,a2,a3,a4,a5,a6,a7}, [%0], 16;\\n"
        "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {b0,b1,b2,b3,b4,b5,b6,b7}, [%0], 16;\\n"
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {c0,c1,c2,c3,c4,c5,c6,c7},\\n"
        "  {a0,a1,a2,a3,a4,a5,a6,a7}, {b0,b1,b2,b3,b4,b5,b6,b7}, {c0,c1,c2,c3,c4,c5,c6,c7};\\n"
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%1], {c0,c1,c2,c3,c4,c5,c6,c7}, 16;\\n"
        "}" ::"r"(from), "r"(to) : "memory");
  }
  __syncthreads();  // sums
  for (int j = i; j < 256; j += blockDim.x) y[j] = sums[j];
}
"""


def test_barriers_around_fragments_in_shared_memory() -> None:
    x = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float16)
    given = {"x": x.view(np.uint32), "y": np.zeros((16, 16), np.float32)}
    interpret.launch(SHARED, "product", 1, 64, given)
    exact = x.astype(np.float64) @ x.astype(np.float64).T
    assert (np.abs(given["y"] - exact) <= accumulation_error(16, np.abs(x) @ np.abs(x).T)).all()
    for barrier in ("__syncthreads();\n  if", "__syncthreads();  // sums"):
        without = SHARED.replace(barrier, barrier.replace("__syncthreads();", ""))
        assert found(without, given, 64).startswith("race")
        assert found(without, given, 32).startswith("race")  # lanes of one warp, too
    short = SHARED.replace("float sums[16 * 16]", "float sums[15 * 16]").replace("< 256", "< 240")
    assert found(short, given, 64).startswith("out of bounds")
    empty = SHARED.replace("tile[j] = x[j]", "if (j < 100) tile[j] = x[j]")
    assert found(empty, given, 64).startswith("never written")


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("load.a.sync.aligned.row.m8n8k32.global.s4", "{%r1}, [%rd1], %r90"),
        ("load.a.sync.aligned.row.m8n8k4.global.f64", "{%rd2}, [%rd1], %r90"),
        ("load.a.sync.aligned.row.m16n16k16.global.f16", "{%r1,%r2,%r3,%r4}, [%rd1], %r90"),
        ("store.d.sync.aligned.row.m16n16k16.global.bf16", "[%rd1], {%r1,%r2,%r3,%r4}, %r90"),
        ("mma.sync.aligned.row.col.m16n16k16.s32.s8.u8.s32", "{%r1}, {%r2}, {%r3}, {%r4}"),
    ],
)
def test_other_forms_are_named(name: str, operands: str) -> None:
    layouts = ("row", "col", "row", "row")
    *_, given = arguments("m16n16k16", "f16", "f32", layouts)
    ptx = kernel("m16n16k16", "f16", "f32", layouts, between=f"wmma.{name} {operands};")
    with pytest.raises(UnsupportedError, match=rf"does not know wmma\.{name.replace('.', '[.]')}"):
        interpret.launch(ptx, "product", 1, 32, given)
