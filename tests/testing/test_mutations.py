"""Faults that are planted in CUDA source."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cupyattn.testing.mutations import KINDS, machine_code, mutants

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_kernel" / "attention.cu"


def lines(source: str, kind: str) -> list[str]:
    return [one.after.strip() for one in mutants(source) if one.kind == kind]


@pytest.mark.parametrize(
    ("kind", "source", "after"),
    [
        ("barrier", "{\n  __syncthreads();  // why\n}", ";  // why"),
        ("barrier", "{\n  x = 1; __syncwarp(mask); y = 2;\n}", "x = 1; ; y = 2;"),
        ("barrier", "{\n  cp_async_wait<1>();\n}", ";"),
        ("barrier", "{\n  if (last) mbarrier_arrive(&full[i]);\n}", "if (last) ;"),
        ("barrier", '{\n  asm volatile("bar.sync 1, 64;" ::: "memory");\n}', ";"),
        ("barrier", '{\n  asm volatile("cp.async.wait_group %0;\\n" ::"n"(N));\n}', ";"),
        ("operand", "x = a - b[i];", "x = b[i] - a;"),
        ("operand", "x = sum[d] / l;", "x = l / sum[d];"),
        ("operand", "f(row, column, 3);", "f(column, row, 3);"),
        ("operand", "x = head + row;", "x = head - row;"),
        ("edge", "if (row < len) x = 0;", "if (row <= len) x = 0;"),
        ("edge", "if (a >= 0 && b) x = 0;", "if (a >= 0 || b) x = 0;"),
        ("edge", "x = min(TILE, n);", "x = max(TILE, n);"),
        ("edge", "x = n - 1;", "x = n;"),
        ("edge", "for (int i = 0; i < n; ++i) f(i);", "for (int i = 1; i < n; ++i) f(i);"),
        ("edge", "for (int i = 0; i < n; ++i) f(i);", "for (int i = 0; i < n - 1; ++i) f(i);"),
        ("scale", "x = s * scale;", "x = s;"),
        ("scale", "o *= alpha;", "o *= 1;"),
        ("scale", "l += p;", "l = p;"),
        ("scale", "x = 0.5f;", "x = 1.0f;"),
        ("scale", "x = 0.0f;", "x = 1.0f;"),
        ("scale", "m = -INFINITY;", "m = 0.0f;"),
        ("scale", "p = exp2f(s);", "p = expf(s);"),
    ],
)  # fmt: skip
def test_a_fault_of_each_operator(kind: str, source: str, after: str) -> None:
    assert after in lines(source, kind)


@pytest.mark.parametrize(
    ("kind", "line", "after"),
    [
        ("barrier", "bar.sync 0;", ""),
        ("barrier", "@%p1 cp.async.wait_group 0;", ""),
        ("barrier", "wgmma.wait_group.sync.aligned 0;", ""),
        ("operand", "sub.f32 %f3, %f1, %f2;", "sub.f32 %f3, %f2, %f1;"),
        ("operand", "add.s32 %r3, %r1, 8;", "sub.s32 %r3, %r1, 8;"),
        ("edge", "setp.lt.s32 %p1, %r1, %r2;", "setp.le.s32 %p1, %r1, %r2;"),
        ("edge", "max.f32 %f3, %f1, %f2;", "min.f32 %f3, %f1, %f2;"),
        ("scale", "mul.f32 %f3, %f1, %f2;", "mul.f32 %f3, %f1, 0f3F800000;"),
        ("scale", "fma.rn.f32 %f4, %f1, %f2, %f3;", "fma.rn.f32 %f4, %f1, 0f3F800000, %f3;"),
        ("scale", "mov.f32 %f1, 0f3F800000;", "mov.f32 %f1, 0f40000000;"),
        ("scale", "mov.f32 %f1, 0f00000000;", "mov.f32 %f1, 0f3F800000;"),
    ],
)  # fmt: skip
def test_a_fault_of_each_operator_of_ptx(kind: str, line: str, after: str) -> None:
    found = mutants(f"{{\n  {line}\n  ret; // 0f3F800000\n}}", ptx=True)
    assert [one.after.strip() for one in found if one.kind == kind] == [after]


@pytest.mark.parametrize(
    "source",
    [
        "// a - b < c * 1.0f", "/* __syncthreads();\n x - y */", "#define N (A - 1)\n",
        "#if A < \\\n  B - 1\n#endif", 'printf("a - b < 1.0f");', "static_assert(A < B, \"\");",
        "template <typename T> void f(T x);", "array<float, 4> x;", "void __syncthreads2() {}",
        "x = __shfl_xor_sync(mask, y, 1) ;",
    ],
)  # fmt: skip
def test_what_is_no_code_or_no_place_is_left_alone(source: str) -> None:
    assert [x for x in mutants(source) if x.kind != "operand" or "shfl" not in source] == []


def test_names_are_unique_and_texts_differ() -> None:
    source = EXAMPLE.read_text()
    found = list(mutants(source))
    assert len({one.name for one in found}) == len(found) == len({one.text for one in found}) > 50
    assert Counter(one.kind for one in found).keys() == KINDS.keys()
    for one in found:
        assert one.before in source and one.after in one.text and one.before != one.after
        assert source.splitlines()[one.line - 1] in one.before


def test_machine_code_has_no_lines() -> None:
    ptx = ".version 8.0\n// why\n.file 1 \"a.cu\"\n.loc 1 2 3\nadd.s32 a, b, c;\n.section .debug\nx"
    assert machine_code(ptx) == ".version 8.0\nadd.s32 a, b, c;"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("fma.rn.f32 \t%f1, %f3, %f2, %f4;", "fma.rn.f32 \t%f1, %f2, %f3, %f4;", True),
        ("@!%p1 mul.lo.s32 %r1, %r2, -3;", "@!%p1 mul.lo.s32 %r1, -3, %r2;", True),
        ("setp.ne.s32 %p1, %r2, %r1;", "setp.ne.s32 %p1, %r1, %r2;", True),
        ("max.f32 %f1, %f3, 0f00000000;", "max.f32 %f1, 0f00000000, %f3;", True),
        (".minnctapersm 3", ".minnctapersm 1", True),
        (".maxntid 128, 1, 1", ".maxntid 256, 1, 1", False),
        ("fma.rn.f32 %f1, %f4, %f3, %f2;", "fma.rn.f32 %f1, %f2, %f3, %f4;", False),
        ("sub.s32 %r1, %r3, %r2;", "sub.s32 %r1, %r2, %r3;", False),
        ("setp.lt.s32 %p1, %r2, %r1;", "setp.lt.s32 %p1, %r1, %r2;", False),
        ("shl.b32 %r1, %r3, %r2;", "shl.b32 %r1, %r2, %r3;", False),
    ],
)
def test_symmetric_operands_have_no_order_in_machine_code(one: str, other: str, same: bool) -> None:
    assert (machine_code(f"\t{one}\n") == machine_code(f"\t{other}\n")) == same


def test_a_constant_that_nothing_reads_is_no_machine_code() -> None:
    ptx = ".global .align 4 .u32 BYTES = {};\nadd.s32 a, b, c;\n{}"
    assert machine_code(ptx.format(1, "")) == machine_code(ptx.format(2, ""))
    read = "ld.global.u32 a, [BYTES];"
    assert machine_code(ptx.format(1, read)) != machine_code(ptx.format(2, read))
