"""Parse PTX text to a `Module`: kernels, their instructions, registers, labels and source lines.

The parser knows the syntax of PTX and none of its semantics: any ``opcode.modifier operands;`` is
an instruction. It resolves names. Every operand is a declared register, variable, parameter,
special register or number. Every branch goes to the index of an instruction. Every instruction has
its source lines, including inlined calls.
"""

from __future__ import annotations

import math
import re
import struct
from bisect import bisect_right
from functools import lru_cache
from typing import NoReturn

from cupyattn.errors import UnsupportedError
from cupyattn.interpret.module import (
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
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = [
    "Address", "Immediate", "Instruction", "Kernel", "Location", "Module", "Negated", "Operand",
    "Pair", "Parameter", "PtxError", "Register", "Sink", "Special", "Symbol", "Variable",
    "Vector", "parse",
]  # fmt: skip


class PtxError(ValueError):
    """The text is not PTX that the parser can read; the message names the line and quotes it."""


def parse(text: str) -> Module:
    """Read a PTX module.

    Parameters
    ----------
    text : str
        As NVRTC writes it.

    Returns
    -------
    Module

    Raises
    ------
    PtxError
        If the text is malformed, naming the line.
    UnsupportedError
        If it holds indirect branches, or variables that start as addresses. Device functions are
        skipped; a call is an instruction that no program knows.

    Examples
    --------
    >>> body = ".reg .b32 %r<2>; mov.u32 %r1, %tid.x; ret;"
    >>> module = parse(f".version 8.0 .target sm_80 .entry copy() {{ {body} }}")
    >>> [instruction.name for instruction in module.kernels["copy"].instructions]
    ['mov.u32', 'ret']
    """
    return _module(_Text(text))


# ---- the grammar ---------------------------------------------------------------------------------

#: Bytes of the types of variables, parameters and registers.
_SIZES = {f"{kind}{bits}": bits // 8 for kind in "bsu" for bits in (8, 16, 32, 64)}
_SIZES |= {"f16": 2, "f32": 4, "f64": 8, "b128": 16}
_REGISTER_TYPES = {*_SIZES, "pred", "f16x2", "bf16", "bf16x2", "e4m3x2", "e5m2x2"}
_NAME = r"[A-Za-z_$%][\w$]*"

#: Directives that are not supported, because no kernel uses them.
_CALLS = ("alias", "branchtargets", "calltargets", "callprototype")

_TEXT = re.compile(r"\S")
_STRING_OR_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"\n]*)"(?:\s*,\s*\d+){0,2}')
#: Parts of a module other than kernels and variables; the groups name the text to keep.
_TOP = re.compile(
    r"\.version\s+(?P<version>\d+\.\d+)|\.target\s+(?P<target>\w+)(?:\s*,\s*\w+)*"
    r"|\.address_size\s+(?P<address_size>\d+)|\.section\s+[\w.]+\s*\{[^{}]*\}|\.pragma\s[^;]*;"
    r'|\.file\s+\d+\s+"[^"\n]*"(?:\s*,\s*\d+){0,2}'
)
_STATEMENT = re.compile(r"[^;{}]*(?:\{[^{}]*\}[^;{}]*)?;")
_DIRECTIVE = re.compile(r"(?:\.(?:visible|weak|extern|common)\s+)*\.(\w+)")
#: A device function, up to its body or the ';' of a declaration.
_FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.func\b[^{;]*")
#: Name, parameters, and directives before the body.
_ENTRY = re.compile(
    rf"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+({_NAME})\s*(?:\(([^()]*)\))?"
    r"((?:[^{;\"]|\"[^\"]*\"\s*;)*)"
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)"
    r"(?:\s+\.ptr(?:\s+\.(?:global|const|shared|local))?(?:\s+\.align\s+\d+)?)?"
    rf"\s+(?P<name>{_NAME})\s*(?:\[\s*(?P<extent>\d+)\s*\])?"
)
_TUNING = re.compile(
    r"\.(?:maxntid|reqntid)\s+(?P<threads>\d+(?:\s*,\s*\d+)*)|\.explicitcluster"
    r"|\.reqnctapercluster\s+(?P<cluster>\d+(?:\s*,\s*\d+)*)"
    r"|\.maxnreg\s+(?P<max_registers>\d+)|\.minnctapersm\s+(?P<min_blocks>\d+)"
    r"|\.(?:maxnctapersm|maxclusterrank)\s+[\d\s,]+"
    r'|\.pragma\s+"[^"]*"\s*;'
)
_VARIABLE = re.compile(
    r"(?P<linkage>(?:\.(?:visible|weak|common|extern)\s+)*)\.(?P<space>global|const|shared|local)\s+"
    rf"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>{_NAME})\s*"
    r"(?P<extents>(?:\[\s*\d*\s*\]\s*)*)(?:=(?P<initialiser>.*))?", re.DOTALL,
)
_BODY = re.compile(
    rf"\s*(?:\.loc\s+(?P<loc>[^\n]*)|(?P<label>{_NAME})\s*:|(?P<brace>[{{}}])"
    r"|(?P<statement>[^\s;{}][^;]*);)"
)
#: A variable's address as the value of another.
_ADDRESS_OF = re.compile(rf"(?:generic\({_NAME}\)|{_NAME})(?:\s*\+\s*\d+)?")
#: Parameters and results of a call of a device function.
_ARGUMENT = re.compile(rf"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+({_NAME})\s*(?:\[\d*\])?$")
_LOC = re.compile(
    r"(\d+)\s+(\d+)\s+(\d+)\s*"
    r"(?:,\s*function_name\s+[\w$.+ ]+,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+)\s*)?"
)
#: Negation and name of the guard, name and operands of the instruction.
_INSTRUCTION = re.compile(
    rf"(?:@(!?)\s*({_NAME})\s+)?([a-z]\w*(?:\.[\w:]+)*)(?:\s+(.*))?",
    re.DOTALL,
)
_REG = re.compile(rf"\.reg\s+\.(\w+)\s+({_NAME}(?:<\d+>)?(?:\s*,\s*{_NAME}(?:<\d+>)?)*)")
#: A comma between operands, outside of braces and brackets.
_COMMA = re.compile(r",(?![^{}]*\}|[^\[\]]*\])")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0|[1-9]\d*)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})|(-?\d+\.\d*(?:[eE][+-]?\d+)?)")
_ADDRESS = re.compile(r"([\w$%]+)\s*(?:(\+\s*-?|-)\s*(\w+))?\s*(?:,\s*\{([^{}]*)\})?")
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyzw]|WARP_SZ"
    r"|%(?:laneid|n?warpid|n?smid|gridid|lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?"
    r"|globaltimer(?:_lo|_hi)?|cluster_n?ctarank|is_explicit_cluster|current_graph_exec"
    r"|(?:dynamic|total|aggr)_smem_size|pm\d+(?:_64)?|envreg\d+)"
)


class _Text:
    """The text, and the reader's position: `where` is the offset for error messages."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        # Comments become blanks, so offsets and lines do not change.
        self.text = _STRING_OR_COMMENT.sub(_blank_comment, text)
        self.where = 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self) -> int:
        """Return the number of the line, from 1."""
        return bisect_right(self._starts, self.where)

    def go_to(self, line: int) -> None:
        """Move to the start of a line."""
        self.where = self._starts[line - 1]

    def skip_blanks(self, offset: int) -> int:
        """Move to the first character from `offset` on that is no white space."""
        match = _TEXT.search(self.text, offset)
        self.where = match.start() if match else len(self.text)
        return self.where

    def _quoted(self, sentence: str) -> str:
        line = self.line()
        return f"PTX line {line}, {self.lines[line - 1].strip()!r}: {sentence}"

    def fail(self, sentence: str) -> NoReturn:
        raise PtxError(self._quoted(sentence))

    def unsupported(self, what: str) -> NoReturn:
        raise UnsupportedError(self._quoted(f"{what} cannot be interpreted, kernels without can"))


def _blank_comment(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] == '"':
        return found
    if found[1] == "/":
        return " " * len(found)
    return "\n".join(" " * len(line) for line in found.split("\n"))


def _number(text: str) -> Immediate | None:
    """Return the number that a text represents, or None."""
    if _INTEGER.fullmatch(text):
        return Immediate(int(text.rstrip("U"), 0), "int")
    match = _FLOAT.fullmatch(text)
    if match is None:
        return None
    if match[1]:
        return Immediate(int(match[1], 16), "f32")
    if match[2]:
        return Immediate(int(match[2], 16), "f64")
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(text)))
    return Immediate(bits, "f64")


# ---- the module ----------------------------------------------------------------------------------


def _module(text: _Text) -> Module:
    facts: dict[str, str] = {}
    kernels: dict[str, Kernel] = {}
    variables: dict[str, Variable] = {}
    files = {int(number): name for number, name in _FILE.findall(text.text)}
    offset = text.skip_blanks(0)
    while offset < len(text.text):
        if match := _TOP.match(text.text, offset):
            facts |= {key: value for key, value in match.groupdict().items() if value}
        elif match := _ENTRY.match(text.text, offset):
            kernel, offset = _kernel(text, match, variables, files)
            if kernel.name in kernels:
                text.fail(f"kernel {kernel.name} is defined twice")
            kernels[kernel.name] = kernel
            offset = text.skip_blanks(offset)
            continue
        elif match := _FUNCTION.match(text.text, offset):
            offset = text.skip_blanks(_behind_function(text, match.end()))
            continue
        elif match := _STATEMENT.match(text.text, offset):
            _declare(text, match[0].rstrip(";"), variables)
        else:
            _reject_directive(text, text.text[offset:])
            text.fail("this is no directive that ends with a ';'")
        offset = text.skip_blanks(match.end())
    text.where = 0
    for name in ("version", "target"):
        if name not in facts:
            text.fail(f"the module has no .{name}")
    if facts.get("address_size") == "32":
        text.unsupported("addresses of 32 bits")
    return Module(facts["version"], facts["target"], kernels, variables, files)


def _behind_function(text: _Text, offset: int) -> int:
    """Return the offset behind a device function: kernels without calls do not need it."""
    if text.text[offset : offset + 1] == ";":
        return offset + 1
    depth = 0
    for match in re.finditer(r"[{}]", text.text[offset:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return offset + match.end()
    text.fail("no '}' ends this function")


def _reject_directive(text: _Text, statement: str) -> None:
    """Raise unless a directive declares a variable or a kernel."""
    match = _DIRECTIVE.match(statement)
    if match is None or match[1] in ("global", "const", "shared", "local", "entry"):
        return
    if match[1] in _CALLS:
        text.unsupported(f"device functions, calls and indirect branches (.{match[1]})")
    text.fail(f"unknown directive .{match[1]}")


def _declare(text: _Text, statement: str, into: dict[str, Variable]) -> None:
    """Read the declaration of a variable."""
    _reject_directive(text, statement)
    match = _VARIABLE.fullmatch(statement.strip())
    if match is None:
        text.fail("this declares nothing; is a ';' missing?")
    name, kind = match["name"], match["type"]
    if name in into:
        text.fail(f"{name} is declared twice")
    if kind not in _SIZES:
        text.fail(f".{kind} is no type of a variable")
    extents = [int(extent or 0) for extent in re.findall(r"\[\s*(\d*)\s*\]", match["extents"])]
    size = _SIZES[kind] * math.prod(extents)
    extern = ".extern" in match["linkage"]
    if size == 0 and not extern:
        text.fail(f"{name} has no extent")
    values = None
    if match["initialiser"] is not None:
        values = _initialiser(text, match["initialiser"].strip(), name, kind, size)
    align = int(match["align"] or _SIZES[kind])
    into[name] = Variable(name, match["space"], align, size, values, extern)


def _initialiser(text: _Text, initialiser: str, name: str, kind: str, size: int) -> bytes:
    """Return the bytes that an initialiser gives a variable, padded with zeros."""
    inner = re.fullmatch(r"\{(.*)\}", initialiser, re.DOTALL)
    width = _SIZES[kind]
    content = b""
    for item in inner[1].split(",") if inner else [initialiser]:
        number = _number(item.strip())
        if number is None and _ADDRESS_OF.fullmatch(item.strip()):
            text.unsupported(f"a variable that starts as an address ({name})")
        if number is None or (number.kind != kind if kind[0] == "f" else number.kind != "int"):
            text.fail(f"this gives {name} no value of type .{kind}; is a ';' missing?")
        content += (number.bits % (1 << 8 * width)).to_bytes(width, "little")
    if len(content) > size:
        text.fail(f"the initialiser has {len(content)} bytes, the variable {size}")
    return content.ljust(size, b"\0")


def _kernel(
    text: _Text, header: re.Match[str], variables: dict[str, Variable], files: dict[int, str]
) -> tuple[Kernel, int]:
    """Read a kernel from its header on; return it and the offset behind its body."""
    name = header[1]
    parameters = _parameters(text, header[2] or "")
    body = _Body(text, {*variables, *(parameter.name for parameter in parameters)}, files)
    tuning = _tuning(text, *header.span(3))
    end = body.read(name, header.end())
    text.where = header.start()
    registers, instructions = tuple(body.registers), tuple(body.instructions)
    kernel = Kernel(
        name, parameters, registers, instructions, body.labels, body.variables, body.named,
        tuning.get("threads"), tuning.get("cluster", 1), tuning.get("min_blocks", 1),
        tuning.get("max_registers"),
    )  # fmt: skip
    return kernel, end


def _parameters(text: _Text, declarations: str) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    end = 0
    for declaration in declarations.split(",") if declarations.strip() else ():
        match = _PARAMETER.fullmatch(declaration.strip())
        if match is None or match["type"] not in _SIZES:
            text.fail(f"{declaration.strip()!r} is no parameter")
        width = _SIZES[match["type"]]
        size = width * int(match["extent"] or 1)
        align = int(match["align"] or width)
        offset = -(-end // align) * align
        end = offset + size
        found.append(Parameter(match["name"], align, size, offset))
    return tuple(found)


def _tuning(text: _Text, start: int, end: int) -> dict[str, int]:
    """Read the directives between parameters and body, by their groups in `_TUNING`."""
    found: dict[str, int] = {}
    offset = text.skip_blanks(start)
    while offset < end:
        match = _TUNING.match(text.text, offset)
        if match is None:
            text.fail("unknown directive before the body of a kernel")
        for name, numbers in match.groupdict().items():
            if numbers:
                found[name] = math.prod(int(number) for number in numbers.split(","))
        offset = text.skip_blanks(match.end())
    return found


# ---- the body of a kernel ------------------------------------------------------------------------


class _Scope:
    """The declarations of one ``{ }``; number 0 is the whole body."""

    def __init__(self, number: int, line: int, parent: _Scope | None) -> None:
        self.number = number
        self.line = line
        self.parent = parent
        self.ranges: dict[str, tuple[str, int]] = {}  # .reg .b32 %r<5>: "%r" to ("b32", 5)
        self.types: dict[str, str] = {}
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[int, str]] = []  # index of the instruction, label
        #: Operands by their text; the parent's until a declaration gives names another meaning.
        self.operands: dict[str, Operand] = parent.operands if parent else {}

    def named(self, name: str) -> str:
        """Return a name that is unique in the kernel."""
        return f"{name}@{self.number}" if self.number else name

    def type_of(self, name: str) -> str | None:
        """Return the type of a register that this scope declares, or None for any other name."""
        if name in self.types:
            return self.types[name]
        for end in range(len(name.rstrip("0123456789")), len(name)):
            if name[:end] in self.ranges:
                kind, count = self.ranges[name[:end]]
                number = name[end:]
                if int(number) < count and (number[0] != "0" or number == "0"):
                    return kind
        return None


class _Body:
    """The body of one kernel while it is read."""

    def __init__(self, text: _Text, symbols: set[str], files: dict[int, str]) -> None:
        self._text = text
        self._symbols = symbols
        self._files = files
        self._scope = _Scope(0, 0, None)
        self._scopes = 0
        self._location: Location | None = None
        self._locations: dict[tuple[str, ...], Location] = {}  # by file, line and column as written
        self.registers: list[Register] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.variables: dict[str, Variable] = {}
        self.named: set[str] = set()  # variables and parameters that operands name

    def read(self, kernel: str, start: int) -> int:
        """Read up to the brace that closes the body; return the offset behind it."""
        text = self._text
        text.where = start
        self._scope.line = text.line()
        if text.text[start : start + 1] != "{":
            text.fail(f"kernel {kernel} has no body")
        offset = start + 1
        while match := _BODY.match(text.text, offset):
            kind = match.lastgroup or ""
            part, text.where, offset = match[kind], match.start(kind), match.end()
            if kind == "statement":
                self._statement(part)
            elif kind == "loc":
                self._loc(part)
            elif kind == "label":
                self._label(part)
            elif part == "{":
                self._scopes += 1
                self._scope = _Scope(self._scopes, text.line(), self._scope)
            else:
                parent = self._close()
                if parent is None:
                    return offset
                self._scope = parent
        if text.skip_blanks(offset) < len(text.text):
            text.fail("no ';' ends this statement")
        text.where = len(text.text.rstrip())
        text.fail(f"the text ends in a scope that opens on line {self._scope.line}")

    def _close(self) -> _Scope | None:
        """Set the targets of the scope's branches; return the enclosing scope."""
        scope = self._scope
        for index, label in scope.branches:
            if label in scope.labels:
                target = scope.labels[label]
                self.instructions[index] = self.instructions[index]._replace(target=target)
            elif scope.parent is not None:
                scope.parent.branches.append((index, label))
            else:
                self._text.go_to(self.instructions[index].ptx_line)
                self._text.fail(f"there is no label {label!r}")
        self.labels |= {scope.named(label): index for label, index in scope.labels.items()}
        return scope.parent

    def _label(self, name: str) -> None:
        if name in self._scope.labels:
            self._text.fail(f"label {name} is defined twice in one scope")
        self._scope.labels[name] = len(self.instructions)

    def _loc(self, arguments: str) -> None:
        match = _LOC.fullmatch(arguments)
        if match is None:
            self._text.fail("this .loc names no position")
        place, call_place = match.group(1, 2, 3), match.group(4, 5, 6)
        location = self._locations.get(place)
        if match[4]:
            # The last .loc of the call's position says where the call itself was inlined.
            call = self._locations.get(call_place)
            if call is None:
                call = Location(self._file(match[4]), int(match[5]), None)
            location = Location(self._file(match[1]), int(match[2]), call)
        elif location is None:
            location = Location(self._file(match[1]), int(match[2]), None)
        # NOTE: after an instruction of line 0 the compiler repeats a position without its calls. An
        # inlined function has no separate positions, so the earlier calls apply.
        self._location = self._locations[place] = location

    def _file(self, number: str) -> str:
        if int(number) not in self._files:
            self._text.fail(f"the module has no .file {number}")
        return self._files[int(number)]

    def _statement(self, statement: str) -> None:
        if statement[0] != ".":
            self._instruction(statement)
        elif statement.startswith(".reg"):
            self._declare_registers(statement)
        elif match := _ARGUMENT.match(statement):
            self._symbols.add(match[1])  # of a call, which stops the kernel if it is reached
        elif statement.split()[0] != ".pragma":
            _declare(self._text, statement, self.variables)
            self._symbols |= self.variables.keys()

    def _declare_registers(self, statement: str) -> None:
        match = _REG.fullmatch(statement.strip())
        if match is None:
            self._text.fail("this declares no registers; is a ';' missing?")
        if match[1] not in _REGISTER_TYPES:
            self._text.fail(f".{match[1]} is no type of a register")
        scope = self._scope
        for item in match[2].split(","):
            name, _, count = item.strip().rstrip(">").partition("<")
            if name in scope.types or name in scope.ranges:
                self._text.fail(f"register {name} is declared twice")
            if count:
                scope.ranges[name] = match[1], int(count)
            else:
                scope.types[name] = match[1]
        scope.operands = {}

    def _instruction(self, statement: str) -> None:
        match = _INSTRUCTION.fullmatch(statement)
        if match is None:
            self._text.fail("this is no instruction")
        sign, guard, name, listed = match.groups("")
        opcode, modifiers = _split_name(name)
        if opcode == "brx":
            self._text.unsupported(f"indirect branches ({opcode})")
        predicate = None
        if guard:
            predicate = self._register(guard)
            if predicate is None or predicate.type != "pred":
                self._text.fail(f"{guard} is no declared predicate")
        listed = listed.strip()
        operands: tuple[Operand, ...] = ()
        if opcode == "bra":
            self._scope.branches.append((len(self.instructions), listed))
        elif listed and opcode != "call":
            operands = self._operands(listed)
        at, line, text = self._location, self._text.line(), " ".join(statement.split())
        self.instructions.append(
            Instruction(opcode, modifiers, operands, predicate, sign == "!", None, at, text, line)
        )

    # ---- operands --------------------------------------------------------------------------------

    def _operands(self, listed: str) -> tuple[Operand, ...]:
        """Read operands separated by commas."""
        known = self._scope.operands
        simple = "{" not in listed and "[" not in listed
        found = []
        for item in listed.split(",") if simple else _COMMA.split(listed):
            item = item.strip()
            operand = known.get(item)
            if operand is None:
                operand = known[item] = self._operand(item)
            found.append(operand)
        return tuple(found)

    def _operand(self, item: str) -> Operand:
        if item == "_":
            return Sink()
        if item[:1] == "{" and item[-1:] == "}":
            return Vector(self._operands(item[1:-1]))
        if item[:1] == "[" and item[-1:] == "]":
            return self._address(item[1:-1].strip(), item)
        if item[:1] == "!":
            register = self._register(item[1:].strip())
            if register is not None:
                return Negated(register)
        first, bar, second = item.partition("|")
        if bar:
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        named = self._named(item)
        if named is not None:
            return named
        if item.partition("+")[0].strip() in self._symbols:
            return self._address(item, item)
        self._no_operand(item)

    def _named(self, item: str) -> Register | Immediate | Special | Symbol | None:
        """Return the operand that one word names."""
        if item[:1].isdecimal():  # no name begins so
            return _number(item)
        register = self._register(item)
        if register is not None:
            return register
        if item in self._symbols:
            self.named.add(item)
            return Symbol(item)
        if _SPECIAL.fullmatch(item):
            return Special(item)
        return _number(item)

    def _register(self, name: str) -> Register | None:
        scope: _Scope | None = self._scope
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            kind = scope.type_of(name)
            if kind is not None:
                register = Register(scope.named(name), kind, len(self.registers))
                self.registers.append(register)
                scope.registers[name] = register
                return register
            scope = scope.parent
        return None

    def _address(self, item: str, whole: str) -> Address:
        match = _ADDRESS.fullmatch(item)
        if match is None:
            self._no_operand(whole)
        base, sign, offset, coordinates = match.groups()
        named = self._named(base)
        if named is None or isinstance(named, Special):
            self._no_operand(base)
        distance = 0
        if offset is not None:
            number = _number(offset)
            if number is None or number.kind != "int":
                self._no_operand(whole)
            distance = -number.bits if "-" in sign else number.bits
        return Address(named, distance, self._operands(coordinates) if coordinates else ())

    def _no_operand(self, item: str) -> NoReturn:
        if re.fullmatch(_NAME, item):
            self._text.fail(f"{item} is not declared")
        if "\n" in item:
            self._text.fail("no ';' ends this line, and with the next it is no instruction")
        self._text.fail(f"{item!r} is no operand")


@lru_cache(maxsize=4096)
def _split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Split an instruction's name into opcode and modifiers."""
    opcode, *modifiers = name.split(".")
    return opcode, tuple(modifiers)
