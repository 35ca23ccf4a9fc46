"""The parser of PTX: each form of the syntax, the shipped kernels, and rejected text."""

from __future__ import annotations

import functools
import re
import struct

import pytest

from cupyattn.compiler import modules as kc
from cupyattn.compiler import target
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import ptx
from cupyattn.interpret.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Location,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from tests.compiler.test_contracts import GOOD, arch_of, spec_of

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<4>; .reg .f32 %f<8>;"


def kernel(body: str, *, module: str = "", parameters: str = "", tuning: str = "") -> Kernel:
    """Parse one kernel; its body starts on line 7 of the text."""
    assert "\n" not in module + parameters + tuning
    text = f"{HEADER}{module}\n.visible .entry k({parameters}) {tuning}\n{{\n{body}\n}}\n"
    return ptx.parse(text).kernels["k"]


def operands(instruction: str, **options: str) -> tuple[Operand, ...]:
    return kernel(f"{REGISTERS}\n{instruction};", **options).instructions[0].operands


# ---- operands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Immediate(0, "int")),
        ("-2147483648", Immediate(-(2**31), "int")),
        ("0xFF", Immediate(255, "int")),
        ("-0x1U", Immediate(-1, "int")),
        ("0b101", Immediate(5, "int")),
        ("4294967295U", Immediate(2**32 - 1, "int")),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("0fFF800000", Immediate(0xFF800000, "f32")),
        ("0d3ff0000000000000", Immediate(0x3FF0000000000000, "f64")),
        ("-1.5", Immediate(0xBFF8000000000000, "f64")),
        ("%tid.x", Special("%tid.x")),
        ("%nctaid.z", Special("%nctaid.z")),
        ("%laneid", Special("%laneid")),
        ("%lanemask_lt", Special("%lanemask_lt")),
        ("%clock64", Special("%clock64")),
        ("WARP_SZ", Special("WARP_SZ")),
        ("_", Sink()),
        ("table", Symbol("table")),
        ("k_param_0", Symbol("k_param_0")),
        ("table+8", Address(Symbol("table"), 8)),
        ("[table]", Address(Symbol("table"), 0)),
        ("[k_param_0+152]", Address(Symbol("k_param_0"), 152)),
        ("[64]", Address(Immediate(64, "int"), 0)),
    ],
)
def test_an_operand(text: str, expected: Operand) -> None:
    options = {"module": ".global .b32 table[4];", "parameters": ".param .u64 k_param_0"}
    (found,) = operands(f"op.x {text}", **options)
    assert found == expected and type(found) is type(expected)


def test_operands_of_registers() -> None:
    r1, r2 = Register("%r1", "b32", 0), Register("%r2", "b32", 1)
    p1 = Register("%p1", "pred", 2)
    rd3 = Register("%rd3", "b64", 3)
    body = """
        a.b %r1, %r2;   a %r1|%p1, !%p1;   a _|%p1, %r1|_;
        a [%rd3], [%rd3+16], [%rd3+-16], [%rd3-0x10], [ %rd3 + 4 ];
        a {%r1, %r2}, {%r2}, {0,%r1}, {_, %r2};
        a [%rd3, {%r1, %r2}], [%rd3, {%r2}];
    """
    one, two, three, four, five, six = kernel(REGISTERS + body).instructions
    assert one.operands == (r1, r2)
    assert two.operands == (Pair(r1, p1), Negated(p1))
    assert three.operands == (Pair(Sink(), p1), Pair(r1, Sink()))
    assert four.operands == tuple(Address(rd3, offset) for offset in (0, 16, -16, -16, 4))
    zero = Immediate(0, "int")
    assert five.operands == tuple(
        Vector(items) for items in ((r1, r2), (r2,), (zero, r1), (Sink(), r2))
    )
    assert six.operands == (Address(rd3, 0, (r1, r2)), Address(rd3, 0, (r2,)))


def test_only_registers_in_use_are_listed_by_first_use() -> None:
    k = kernel(f"{REGISTERS} add.s32 %r9, %r0, %r9; @%p3 ret;")
    assert [(r.name, r.type, r.index) for r in k.registers] == [
        ("%r9", "b32", 0), ("%r0", "b32", 1), ("%p3", "pred", 2),
    ]  # fmt: skip


def test_a_register_that_looks_like_two_ranges_is_the_declared_one() -> None:
    k = kernel(".reg .b32 %r<2>; .reg .f32 %r1<4>; op %r1, %r13;")
    assert [r.type for r in k.registers] == ["b32", "f32"]


# ---- instructions --------------------------------------------------------------------------------


def test_an_instruction_keeps_its_parts() -> None:
    body = f"{REGISTERS}\n@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 \t_, [%rd1],\n  %r1;"
    (found,) = kernel(body).instructions
    assert found.opcode == "mbarrier"
    assert found.modifiers == ("arrive", "expect_tx", "shared::cta", "b64")
    assert found.name == "mbarrier.arrive.expect_tx.shared::cta.b64"
    assert found.predicate == Register("%p1", "pred", 0) and found.negated
    assert found.text == f"@!%p1 {found.name} _, [%rd1], %r1"
    assert found.ptx_line == 8 and found.target is None and found.location is None


def test_statements_share_lines_and_comments_vanish() -> None:
    body = f"""{REGISTERS} // .reg .b32 %r<9>;
        {{  cvt.rn.f16.f32 %r1, %f2;}} /* bar.sync 0;
        ret; */ exit; .pragma "nounroll"; ret // none
        ;"""
    k = kernel(body)
    assert [i.text for i in k.instructions] == ["cvt.rn.f16.f32 %r1, %f2", "exit", "ret"]
    assert [i.ptx_line for i in k.instructions] == [8, 9, 9]


def test_branches_go_to_the_instruction_behind_their_label() -> None:
    k = kernel(f"""{REGISTERS}
        $L__BB0_1: add.s32 %r1, %r1, 1;
        @%p1 bra $L__BB0_1;
        @!%p1 bra.uni done;
        $L__BB0_2: another: ret;
        done: """)
    assert [i.target for i in k.instructions] == [None, 0, 4, None]
    assert k.labels == {"$L__BB0_1": 0, "$L__BB0_2": 3, "another": 3, "done": 4}
    guards = [(i.predicate.name if i.predicate else None, i.negated) for i in k.instructions]
    assert guards == [(None, False), ("%p1", False), ("%p1", True), (None, False)]
    assert k.instructions[1].operands == () and k.instructions[2].modifiers == ("uni",)


def test_inner_scopes_have_registers_and_labels_of_their_own() -> None:
    wait = "{ .reg .pred p; retry: try p, %r1; @p bra end; bra retry; end: }"
    body = f"try p, %r1; {wait} {wait} try p, %r1; bra end; end:"
    k = kernel(f".reg .pred p; .reg .b32 %r<2>; {body}")
    assert [r.name for r in k.registers] == ["p", "%r1", "p@1", "p@2"]
    firsts = [i.operands[0].name for i in k.instructions if i.opcode == "try"]
    assert firsts == ["p", "p@1", "p@2", "p"]
    assert [i.target for i in k.instructions if i.opcode == "bra"] == [4, 1, 7, 4, 9]
    assert k.labels == {"retry@1": 1, "end@1": 4, "retry@2": 4, "end@2": 7, "end": 9}


def test_a_branch_leaves_its_scope_and_names_of_the_outer_one_stay_visible() -> None:
    k = kernel(".reg .pred p, q; { { .reg .b32 p; op p, q; } op p, q; bra out; } out: ret;")
    assert [r.name for r in k.registers] == ["p@2", "q", "p"]
    assert [r.type for r in k.registers] == ["b32", "pred", "pred"]
    assert k.instructions[2].target == 3


def test_locations_carry_the_calls_that_inlined_them() -> None:
    k = kernel(
        f"""{REGISTERS} nop;
        .loc 1 10 3
        one;
        .loc 2 20 5, function_name $L__info_string0, inlined_at 1 10 3
        two;
        .loc 2 30 7, function_name $L__info_string1+4, inlined_at 2 20 5
        three;
        .loc 1 11 3
        .loc 2 20 5, function_name $L__info_string0, inlined_at 1 11 3
        .loc 2 30 7, function_name $L__info_string1, inlined_at 2 20 5
        four;
        .loc 1 0 0
        five;
        .loc 2 30 7
        six;""",
        module='.file 1 "a.cu" .file 2 "b//.cuh", 17, 18',
    )
    places = {
        i.opcode: [(at.file, at.line) for at in i.location.chain()] if i.location else None
        for i in k.instructions
    }
    assert places == {
        "nop": None,
        "one": [("a.cu", 10)],
        "two": [("b//.cuh", 20), ("a.cu", 10)],
        "three": [("b//.cuh", 30), ("b//.cuh", 20), ("a.cu", 10)],
        "four": [("b//.cuh", 30), ("b//.cuh", 20), ("a.cu", 11)],
        "five": [("a.cu", 0)],
        "six": [("b//.cuh", 30), ("b//.cuh", 20), ("a.cu", 11)],
    }
    assert k.instructions[1].location == Location("a.cu", 10, None)


# ---- declarations --------------------------------------------------------------------------------


def test_parameters_lie_as_the_abi_packs_them() -> None:
    k = kernel(
        "ret;",
        parameters=".param .u32 a, .param .align 8 .b8 b[20], .param .u8 c, "
        ".param .u64 .ptr .global .align 16 d, .param .align 64 .b8 e[128], .param .f32 f",
        tuning='.maxntid 32, 4, 2 .minnctapersm 1 .pragma "used_bytes_mask 240";',
    )
    assert k.parameters == (
        Parameter("a", 4, 4, 0),
        Parameter("b", 8, 20, 8),
        Parameter("c", 1, 1, 28),
        Parameter("d", 8, 8, 32),
        Parameter("e", 64, 128, 64),
        Parameter("f", 4, 4, 192),
    )
    assert k.max_threads == 256
    assert kernel("ret;").max_threads is None and kernel("ret;").parameters == ()


def test_variables_of_module_and_kernel() -> None:
    text = (
        HEADER
        + """
        .global .align 4 .f32 LOG2E = 0f3FB8AA3B;
        .visible .global .align 4 .u32 FULL = -1;
        .global .align 4 .u32 ZERO;
        .const .align 8 .b8 bytes[12] = {1, 2, 255, 0xF};
        .global .u16 halves[2][2] = {1,-2,3};
        .global .f64 one = 0d3FF0000000000000;
        .extern .shared .align 16 .b8 shared_bytes[];
        .visible .entry k() { .shared .align 1024 .b8 tile[14336]; .local .align 16 .b8 depot[64];
            mov.u64 %rd, tile; }"""
    )
    module = ptx.parse(text.replace("mov", ".reg .b64 %rd; mov"))
    assert module.version == "8.0" and module.target == "sm_80" and module.files == {}
    assert list(module.variables.values()) == [
        Variable("LOG2E", "global", 4, 4, struct.pack("<I", 0x3FB8AA3B), False),
        Variable("FULL", "global", 4, 4, b"\xff" * 4, False),
        Variable("ZERO", "global", 4, 4, None, False),
        Variable("bytes", "const", 8, 12, bytes([1, 2, 255, 15]).ljust(12, b"\0"), False),
        Variable("halves", "global", 2, 8, struct.pack("<4h", 1, -2, 3, 0), False),
        Variable("one", "global", 8, 8, struct.pack("<d", 1.0), False),
        Variable("shared_bytes", "shared", 16, 0, None, True),
    ]
    assert module.kernels["k"].variables == {
        "tile": Variable("tile", "shared", 1024, 14336, None, False),
        "depot": Variable("depot", "local", 16, 64, None, False),
    }


def test_debug_sections_are_passed_over() -> None:
    text = HEADER + '.entry k() { ret; } .file 1 "a.cu"\n.section .debug_str\n{\nx:\n.b8 95,0\n}\n'
    assert ptx.parse(text).files == {1: "a.cu"}


# ---- what is rejected ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "line", "sentence"),
    [
        ("mov.u32 %r1, 1;\nmov.u32 %r1, %r99;", 9, "%r99 is not declared"),
        ("mov.u32 %r1, %r01;", 8, "%r01 is not declared"),
        ("mov.u32 %r1, tabel;", 8, "tabel is not declared"),
        ("ld.u32 %r1, [%rx+4];", 8, "%rx is not declared"),
        ("{ .reg .pred p; }\nop p;", 9, "p is not declared"),
        ("ret;\nbra $L__BB0_7;\nret;", 9, "there is no label '$L__BB0_7'"),
        ("{ inner: ret; }\nbra inner;", 9, "there is no label 'inner'"),
        ("bra;", 8, "there is no label ''"),
        ("a: ret;\na: ret;", 9, "label a is defined twice in one scope"),
        ("@%r1 ret;", 8, "%r1 is no declared predicate"),
        ("@%q ret;", 8, "%q is no declared predicate"),
        ("ret;\n?! what;\nret;", 9, "this is no instruction"),
        ("hello world;", 8, "world is not declared"),
        ("mov.u32 %r1, 010;", 8, "'010' is no operand"),
        ("mov.u32 %r1, 0f3F80;", 8, "'0f3F80' is no operand"),
        ("mov.u32 %r1,, %r2;", 8, "'' is no operand"),
        ("mov.u32 {%r1, %r2;", 8, "'{%r1' is no operand"),
        ("ld.u32 %r1, [%rd1+%r1];", 8, "'[%rd1+%r1]' is no operand"),
        ("mov.u32 %r1, %r2\nmov.u32 %r3, %r4;", 8, "no ';' ends this line"),
        ("ret;\nmov.u32 %r1, %r2", 9, "no ';' ends this statement"),
        (".frobnicate 3;", 8, "unknown directive .frobnicate"),
        (".reg .b32 a b;", 8, "this declares no registers"),
        (".reg .b31 a;", 8, ".b31 is no type of a register"),
        (".reg .b32 %r<5>;", 8, "register %r is declared twice"),
        (".shared .b8 x[4]; .shared .b8 x[4];", 8, "x is declared twice"),
        (".shared .b8 x[];", 8, "x has no extent"),
        (".shared .b7 x[4];", 8, ".b7 is no type of a variable"),
        (".global .u32 x = 0f3F800000;", 8, "this gives x no value of type .u32"),
        (".global .u32 x[2] = {1, 2, 3};", 8, "the initialiser has 12 bytes, the variable 8"),
        ("nop;\n.loc 3 1 1\nret;", 9, "the module has no .file 3"),
        (".loc here\nret;", 8, "this .loc names no position"),
    ],
)
def test_a_malformed_body_names_line_and_fault(body: str, line: int, sentence: str) -> None:
    with pytest.raises(PtxError, match=re.escape(sentence)) as caught:
        kernel(f"{REGISTERS}\n{body}")
    message = str(caught.value)
    quoted = f"{REGISTERS}\n{body}".split("\n")[line - 7].strip()
    assert message.startswith(f"PTX line {line}, {quoted!r}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        (HEADER + ".entry k() {\n.reg .b32 a;\nret;\n", 6, "in a scope that opens on line 4"),
        (HEADER + ".entry k() {\n{ ret;\n", 5, "in a scope that opens on line 5"),
        (HEADER + ".entry k();", 4, "kernel k has no body"),
        (HEADER + ".entry k() { ret; }\n.entry k() { ret; }", 5, "kernel k is defined twice"),
        (HEADER + ".entry k() .maxfoo 1 { ret; }", 4, "unknown directive before the body"),
        (HEADER + ".entry k() .maxntid { ret; }", 4, "unknown directive before the body"),
        (HEADER + ".entry k(.param .u33 a) { ret; }", 4, "'.param .u33 a' is no parameter"),
        (HEADER + ".frobnicate 3\n.global .u32 x;", 4, "unknown directive .frobnicate"),
        (HEADER + "garbage", 4, "this is no directive that ends with a ';'"),
        (HEADER + "garbage;", 4, "this declares nothing"),
        (HEADER + ".global .u32 x\n.global .u32 y;", 4, "is a ';' missing?"),
        (HEADER + ".global .u32 x = 1\n.global .u32 y;", 4, "is a ';' missing?"),
        (HEADER + "}", 4, "this is no directive"),
        (".version 8.0\n", 1, "the module has no .target"),
        ("", 1, "the module has no .version"),
    ],
)
def test_a_malformed_module_names_line_and_fault(text: str, line: int, sentence: str) -> None:
    with pytest.raises(PtxError, match=re.escape(sentence)) as caught:
        ptx.parse(text)
    assert str(caught.value).startswith(f"PTX line {line}, ")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (".entry k() { t: .branchtargets a, b; }", ".branchtargets"),
    ],
)
def test_jump_tables_are_unsupported(text: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"({what})")) as caught:
        ptx.parse(HEADER + text)
    assert str(caught.value).startswith("PTX line 4, ")


def test_device_functions_are_skipped_and_calls_are_instructions() -> None:
    text = """
.extern .func (.param .b32 r) vprintf (.param .b64 a);
.visible .func (.param .b32 r) f(.param .b32 a) { { ret; } }
.entry k() {
  .reg .b32 %r<2>;
  { .param .b32 p; st.param.b32 [p+0], %r1; .param .b32 r; call.uni (r), f, (p); }
}
"""
    kernel = ptx.parse(HEADER + text).kernels["k"]
    assert [i.name for i in kernel.instructions] == ["st.param.b32", "call.uni"]
    with pytest.raises(PtxError, match="no '}' ends this function"):
        ptx.parse(HEADER + ".func f() { ret;")


# ---- the kernels that ship -----------------------------------------------------------------------


@functools.cache
def shipped(source: str, arch: str) -> tuple[str, Module]:
    text = kc.translate(spec_of(source, {}), arch).ptx
    return text, ptx.parse(text)


#: Each source once, and one of them as the newer front end writes it.
SHIPPED = [*((source, arch_of(source)) for source in GOOD), ("attn_fa_tc.cu", "sm_100")]
every_kernel = pytest.mark.parametrize(("source", "arch"), SHIPPED)


@pytest.fixture(autouse=True)
def skip_unknown_architectures(request: pytest.FixtureRequest) -> None:
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    arch = parameters.get("arch")
    if arch is not None and arch not in target.supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")


def written(operand: Operand) -> str:
    """The text of an operand without blanks; what inner scopes declare loses its number."""
    match operand:
        case Register(name) | Special(name) | Symbol(name):
            return name.partition("@")[0]
        case Immediate(bits, "int"):
            return str(bits)
        case Immediate(bits, kind):
            return f"0f{bits:08X}" if kind == "f32" else f"0d{bits:016X}"
        case Address(base, offset, coordinates):
            at = f"+{offset}" if offset else ""
            return (
                f"[{written(base)}{at}{',' + written(Vector(coordinates)) if coordinates else ''}]"
            )
        case Vector(items):
            return "{" + ",".join(map(written, items)) + "}"
        case Negated(register):
            return f"!{written(register)}"
        case Pair(first, second):
            return f"{written(first)}|{written(second)}"
        case Sink():
            return "_"
    raise AssertionError(operand)


def rewritten(instruction: Instruction, labels: dict[int, set[str]]) -> set[str]:
    """Forms of an instruction without blanks: a label has several names."""
    guard = f"@{'!' * instruction.negated}{written(instruction.predicate)}" \
        if instruction.predicate else ""  # fmt: skip
    head = guard + instruction.name
    if instruction.target is not None:
        return {head + label for label in labels[instruction.target]}
    return {head + ",".join(map(written, instruction.operands))}


@every_kernel
def test_every_instruction_reads_back_as_it_was_written(source: str, arch: str) -> None:
    _, module = shipped(source, arch)
    for k in module.kernels.values():
        labels: dict[int, set[str]] = {}
        for label, index in k.labels.items():
            labels.setdefault(index, set()).add(label.partition("@")[0])
        for instruction in k.instructions:
            text = instruction.text.replace("0xffffffff", str(2**32 - 1)).replace(" + 0]", "]")
            plain = re.sub(r"\s", "", text)
            assert plain in rewritten(instruction, labels), instruction


@every_kernel
def test_no_statement_is_lost(source: str, arch: str) -> None:
    """There are as many instructions as semicolons that end no directive, and all entries."""
    text, module = shipped(source, arch)
    text = re.sub(r"//[^\n]*", "", text)
    entries = re.findall(r"\.entry (\w+)", text)
    assert list(module.kernels) == entries and entries
    code = re.sub(r'\.pragma\s+"[^"]*";', "", text[text.index(".entry") :])
    directives = len(re.findall(r"\.(?:reg|shared|local|global)\s+\.[^;]*;", code))
    expected = code.count(";") - directives
    assert sum(len(k.instructions) for k in module.kernels.values()) == expected


@every_kernel
def test_what_a_shipped_kernel_declares(source: str, arch: str) -> None:
    spec = spec_of(source, {})
    smem_bytes, (text, module) = kc.translate(spec, arch).smem_bytes, shipped(source, arch)
    assert module.target == arch
    if smem_bytes:
        size = struct.pack("<I", smem_bytes)
        assert module.variables["smem_bytes"].values == size
        assert module.variables["shared_bytes"].extern
    files = set(module.files.values())
    lines = text.splitlines()
    for name, k in module.kernels.items():
        assert f".entry {name}(" in text and k.max_threads
        assert [r.index for r in k.registers] == list(range(len(k.registers)))
        assert len({r.name for r in k.registers}) == len(k.registers)
        for instruction in k.instructions:
            assert instruction.opcode in lines[instruction.ptx_line - 1]
            assert instruction.location is not None
            chain = instruction.location.chain()
            assert {at.file for at in chain} <= files
            if instruction.location.line:  # in the end a line of the kernel itself
                assert chain[-1].file == str(spec.path)
