"""cupyattn/testing/same_values.py: texts of PTX that compute the same, and texts that do not."""

from __future__ import annotations

import pytest

from cupyattn.testing.same_values import same_values

START = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry f(
  .param .u64 x
)
{
.reg .pred %p<5>;
.reg .b32 %r<20>;
.reg .b64 %rd<9>;
ld.param.u64 %rd1, [x];
mov.u32 %r1, %tid.x;
"""
#: Two values, and an instruction that uses both.
ONE, OTHER = "ld.global.u32 %r2, [%rd1];", "ld.global.u32 %r3, [%rd1+4];"
USE = "sub.s32 %r4, %r2, %r3; st.global.u32 [%rd1+8], %r4;"


def text(body: str) -> str:
    return f"{START}{body}\nret;\n}}\n"


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (ONE + OTHER + USE, OTHER + ONE + USE),
        (ONE + OTHER + USE, (ONE + OTHER + USE).replace("%r4", "%r9")),
        ("add.s32 %r2, %r1, 5; st.global.u32 [%rd1], %r2;",
         "add.s32 %r2, 5, %r1; st.global.u32 [%rd1], %r2;"),
    ],
    ids=["loads", "names of registers", "operands of a sum"],
)  # fmt: skip
def test_order_without_effect(body: str, other: str) -> None:
    assert same_values(text(body), text(other))


LOOP = """
mov.u32 %r5, 0;
mov.u32 %r6, 1;
$again:
add.s32 %r5, %r5, %r1;
mul.lo.s32 %r6, %r6, %r5;
setp.lt.s32 %p1, %r5, 99;
@%p1 bra $again;
st.global.u32 [%rd1], %r6;
"""


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (ONE + OTHER + USE, ONE + OTHER + USE.replace("%r2, %r3", "%r3, %r2")),
        (ONE + OTHER + USE, ONE + OTHER.replace("+4", "+8") + USE),
        (ONE + "st.global.u32 [%rd1], %r1;" + OTHER + USE,
         "st.global.u32 [%rd1], %r1;" + ONE + OTHER + USE),
        ("st.global.u32 [%rd1], 1; bar.sync 0;", "bar.sync 0; st.global.u32 [%rd1], 1;"),
        ("st.global.u32 [%rd1], 1; bar.sync 0;", "st.global.u32 [%rd1], 1;"),
        ("bar.sync %r1;", "mov.u32 %r2, 1; bar.sync %r2;"),
        (LOOP, LOOP.replace("lt.s32", "le.s32")),
        (LOOP, LOOP.replace("%r6, %r5;", "%r6, %r1;")),
        (LOOP, LOOP.replace("mov.u32 %r6, 1", "mov.u32 %r6, 2")),
        (LOOP, LOOP.replace("add.s32 %r5, %r5, %r1;\nmul.lo.s32 %r6, %r6, %r5;",
                            "mul.lo.s32 %r6, %r6, %r5;\nadd.s32 %r5, %r5, %r1;")),
        (LOOP, LOOP.replace("@%p1", "@!%p1")),
        ("add.cc.u32 %r2, %r1, %r1; add.cc.u32 %r3, %r1, 5; addc.u32 %r4, %r2, %r3;"
         "st.global.u32 [%rd1], %r4;",
         "add.cc.u32 %r3, %r1, 5; add.cc.u32 %r2, %r1, %r1; addc.u32 %r4, %r2, %r3;"
         "st.global.u32 [%rd1], %r4;"),
        ("mov.u32 %r2, %clock; mov.u32 %r3, %clock; sub.s32 %r4, %r3, %r2;"
         "st.global.u32 [%rd1], %r4;",
         "mov.u32 %r3, %clock; mov.u32 %r2, %clock; sub.s32 %r4, %r3, %r2;"
         "st.global.u32 [%rd1], %r4;"),
        ("ld.global.v2.u32 {%r2, _}, [%rd1]; st.global.u32 [%rd1], %r2;",
         "ld.global.v2.u32 {_, %r2}, [%rd1]; st.global.u32 [%rd1], %r2;"),
    ],
    ids=["a difference", "an address", "a load before a store", "a store before a barrier",
         "no barrier", "a barrier's number", "a bound", "a factor", "a start", "order in a loop",
         "a guard", "a carry", "a clock", "half of a vector"],
)  # fmt: skip
def test_what_differs(body: str, other: str) -> None:
    assert same_values(text(body), text(body))
    assert not same_values(text(body), text(other))


def test_declarations_differ() -> None:
    body = text("ret;")
    assert not same_values(body, body.replace("sm_80", "sm_90"))
    assert not same_values(body, body.replace(".address_size", ".shared .b8 s[4];\n.address_size"))
    assert same_values(body, body.replace("%r<20>", "%r<30>"))
