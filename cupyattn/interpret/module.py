"""The parts of a PTX module: kernels, their instructions and operands, source lines, variables.

`cupyattn.interpret.ptx` parses them from text. This module does not define the effects of
instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Location(NamedTuple):
    """A source line and, if it was inlined, the call.

    Parameters
    ----------
    file : str
        Path in the ``.file`` directive.
    line : int
        From 1; 0 if the compiler knows none.
    inlined_at : Location or None
        The call, if the line belongs to an inlined function.
    """

    file: str
    line: int
    inlined_at: Location | None

    def chain(self) -> tuple[Location, ...]:
        """Return this line, the call that inlined it, the call around that: innermost first."""
        found: list[Location] = []
        location: Location | None = self
        while location is not None:
            found.append(location)
            location = location.inlined_at
        return tuple(found)


@dataclass(frozen=True)
class Register:
    """A register: its name, unique in its kernel, declared type, and index among used registers."""

    name: str
    type: str
    index: int


class Immediate(NamedTuple):
    """A number: an integer as written, or the bit pattern of a float (`kind` f32 or f64)."""

    bits: int
    kind: str


class Special(NamedTuple):
    """A special register such as ``%tid.x``, or the constant ``WARP_SZ``."""

    name: str


class Symbol(NamedTuple):
    """A variable or parameter; as an operand, its address."""

    name: str


class Address(NamedTuple):
    """``[base+offset]``, for tensor copies ``[base, {coordinates}]``; ``name+8`` is one as well."""

    base: Register | Symbol | Immediate
    offset: int
    coordinates: tuple[Operand, ...] = ()


class Vector(NamedTuple):
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


class Negated(NamedTuple):
    """The predicate operand ``!%p1``."""

    register: Register


class Pair(NamedTuple):
    """Two results of one instruction, ``%r1|%p1``."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """``_``: an unused result."""


Operand: TypeAlias = (
    Register | Immediate | Special | Symbol | Address | Vector | Negated | Pair | Sink
)


class Instruction(NamedTuple):
    """One instruction.

    Parameters
    ----------
    opcode : str
        ``"ld"``.
    modifiers : tuple of str
        ``("global", "v4", "u32")``; ``"shared::cta"`` is one modifier.
    operands : tuple of Operand
        As written, results first; empty for ``bra``, whose label is `target`, and for
        ``call``.
    predicate : Register or None
        The guard, for ``@%p1`` and ``@!%p1``.
    negated : bool
        Whether the guard is ``@!%p1``.
    target : int or None
        Target of ``bra``: the index of an instruction, or the number of instructions if the label
        ends the body.
    location : Location or None
        Source line; None before the first ``.loc`` of the kernel.
    text : str
        As written, white space collapsed, without the semicolon.
    ptx_line : int
        Line of the PTX text, from 1.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    target: int | None
    location: Location | None
    text: str
    ptx_line: int

    @property
    def name(self) -> str:
        """Opcode and modifiers as written."""
        return ".".join((self.opcode, *self.modifiers))


class Variable(NamedTuple):
    """A variable in memory.

    Parameters
    ----------
    name : str
        Unique in its kernel, or in the module.
    space : str
        ``"global"``, ``"const"``, ``"shared"`` or ``"local"``.
    align, size : int
        Bytes; size 0 for ``extern`` arrays without extent.
    values : bytes or None
        Initial bytes, None without an initialiser (CUDA zeroes global and constant memory then).
    extern : bool
        Whether its memory is allocated outside: dynamic shared memory.
    """

    name: str
    space: str
    align: int
    size: int
    values: bytes | None
    extern: bool


class Parameter(NamedTuple):
    """A kernel's parameter; `offset` is its place in the buffer that the ABI packs."""

    name: str
    align: int
    size: int
    offset: int


class Kernel(NamedTuple):
    """A kernel: one ``.entry``.

    Parameters
    ----------
    name : str
        Entry point.
    parameters : tuple of Parameter
        In order.
    registers : tuple of Register
        Registers that instructions name, by index. The name of a register declared in an inner
        ``{ }`` contains the number of its scope: ``p@3``.
    instructions : tuple of Instruction
        In order.
    labels : dict of str to int
        Index of the next instruction; labels of inner scopes are named as registers are.
    variables : dict of str to Variable
        Declared in the body.
    named : set of str
        Variables and parameters that instructions name.
    max_threads : int or None
        Threads of a block, by ``.maxntid`` or ``.reqntid``.
    cluster : int
        Blocks of a cluster, by ``.reqnctapercluster``; 1 without clusters.
    min_blocks : int
        Blocks that must fit on an SM, by ``.minnctapersm``; 1 without it.
    max_registers : int or None
        Registers of a thread, by ``.maxnreg``.
    """

    name: str
    parameters: tuple[Parameter, ...]
    registers: tuple[Register, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    variables: dict[str, Variable]
    named: set[str]
    max_threads: int | None
    cluster: int = 1
    min_blocks: int = 1
    max_registers: int | None = None


class Module(NamedTuple):
    """One PTX text: ISA version, architecture, kernels, variables, source files by number."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    files: dict[int, str]
