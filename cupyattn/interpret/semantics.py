"""Building blocks of all instructions: operands as arrays, and the table of opcodes.

An opcode's *builder* turns a parsed instruction into a `Step`, once; the step then runs on any
`Machine`. A builder returns None for a modifier that it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyattn.errors import UnsupportedError
from cupyattn.interpret.findings import describe
from cupyattn.interpret.lanes import Values
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ordering import WARP
from cupyattn.interpret.ptx import (
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

Read = Callable[["Machine"], Values]
Write = Callable[["Machine", Values, "Lanes"], None]
Execute = Callable[["Machine", "Lanes"], None]


class Step(NamedTuple):
    """One instruction, ready to run.

    Parameters
    ----------
    instruction : Instruction
    execute : callable
        Executes the instruction for some lanes.
    together : callable, optional
        For instructions that the lanes of a warp execute together: returns for every lane the mask
        of the lanes that must take part (``0xffffffff``: the whole warp).
    warps : int
        Number of neighbouring warps that execute it together.
    leaves : bool
        Whether `execute` itself decides where and when its lanes continue.
    again : bool
        Whether its lanes may repeat it.
    modelled : bool
        Whether the interpreter knows the instruction; `execute` raises if not.
    """

    instruction: Instruction
    execute: Execute
    together: Read | None = None
    warps: int = 1
    leaves: bool = False
    again: bool = False
    modelled: bool = True


Builder = Callable[[Instruction], "Step | Execute | None"]
#: Builder of each opcode that is not in `cupyattn.interpret.alu`.
BUILDERS: dict[str, Builder] = {}


def instruction(*opcodes: str) -> Callable[[Builder], Builder]:
    """Enter a builder in the table."""

    def enter(builder: Builder) -> Builder:
        for opcode in opcodes:
            BUILDERS[opcode] = builder
        return builder

    return enter


def access_width(instruction: Instruction) -> tuple[str, int] | None:
    """Return the space of an instruction's access (or ``"generic"``) and the bytes of each lane."""
    if instruction.opcode not in ACCESSES:
        return None
    return ACCESSES[instruction.opcode](instruction)


#: Functions that return the width of each opcode's accesses.
ACCESSES: dict[str, Callable[[Instruction], tuple[str, int] | None]] = {}


# ---- operands ------------------------------------------------------------------------------------


def immediate(bits: int, dtype: np.dtype[Any]) -> Values:
    """Return a number written in the text as an array without axes."""
    if dtype == np.bool_:
        return np.array(bits != 0)
    width = dtype.itemsize
    return np.array(bits & ((1 << 8 * width) - 1), f"u{width}").view(dtype)


def reader(operand: Operand, type_name: str) -> Read:
    """Return a function that reads an operand as an array: one value per lane, or one for all."""
    dtype = DTYPES[type_name]
    if isinstance(operand, Register):
        return _register_reader(operand, dtype)
    if isinstance(operand, Negated):
        positive = _register_reader(operand.register, dtype)
        return lambda machine: ~positive(machine)
    if isinstance(operand, Immediate):
        value = immediate(operand.bits, dtype)
        return lambda machine: value
    if isinstance(operand, Special):
        name = operand.name
        return lambda machine: machine.special(name).astype(dtype)
    if isinstance(operand, Symbol):
        symbol = operand.name
        return lambda machine: machine.symbol(symbol).astype(dtype)
    raise TypeError(f"{operand} is no value")


def register_type(register: Register) -> np.dtype[Any]:
    """Return the type of a register's bits."""
    return _bits_of(register.type)


@functools.cache
def _bits_of(type_name: str) -> np.dtype[Any]:
    if type_name == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"u{int(type_name[1:]) // 8}")


def _register_reader(register: Register, dtype: np.dtype[Any]) -> Read:
    index, held = register.index, register_type(register)
    if held.itemsize == dtype.itemsize:

        def read(machine: Machine) -> Values:
            value = machine.registers[index]
            if value is None:
                value = machine.undefined(register)
            return value if value.dtype == dtype else value.view(dtype)

        return read
    if held.itemsize < dtype.itemsize:
        raise TypeError(f"{register.name} is narrower than {dtype}")
    narrow = np.dtype(f"u{dtype.itemsize}")

    def truncate(machine: Machine) -> Values:
        value = machine.registers[index]
        if value is None:
            value = machine.undefined(register)
        return value.view(held).astype(narrow).view(dtype)

    return truncate


def writer(operand: Operand) -> Write:
    """Return a function that stores values in a register; wider registers are sign-extended."""
    if isinstance(operand, Sink):
        return lambda machine, value, lanes: None
    if not isinstance(operand, Register):
        raise TypeError(f"{operand} is no register")
    index, held = operand.index, register_type(operand)

    def write(machine: Machine, value: Values, lanes: Lanes) -> None:
        if value.dtype.itemsize != held.itemsize:
            if value.dtype.kind not in "iu":
                value = value.view(f"u{value.dtype.itemsize}")
            value = value.astype(f"{value.dtype.kind}{held.itemsize}")
        machine.set(index, value, lanes)

    return write


def not_known(instruction: Instruction) -> UnsupportedError:
    """Return the error about an instruction that the interpreter does not know."""
    where = instruction.location
    line = f"{describe(where)}, " if where is not None else ""
    call = instruction.opcode == "call" or instruction.name.startswith("st.param")
    what = ", the call of a function that was not inlined" if call else ""
    return UnsupportedError(
        f"the interpreter does not know {instruction.name}{what} "
        f"({line}PTX line {instruction.ptx_line}: {instruction.text}): run this kernel on a device"
    )


def unsupported(instruction: Instruction) -> Execute:
    """Return a function that reports an unknown instruction when it is executed."""

    def execute(machine: Machine, lanes: Lanes) -> None:
        raise not_known(instruction)

    return execute


def guarded(step: Step) -> Step:
    """Return a step that applies the guard of its instruction, ``@%p`` or ``@!%p``."""
    guard = step.instruction.predicate
    if guard is None or step.instruction.target is not None:
        return step
    condition = reader(Negated(guard) if step.instruction.negated else guard, "pred")
    leaves, whole = step.leaves, step.together is whole_warp

    def execute(machine: Machine, lanes: Lanes) -> None:
        chosen = lanes.where(condition(machine))
        if whole and (parted := (chosen.bits != 0) & (chosen.bits != lanes.bits)).any():
            message = "the guard of an instruction of whole warps differs between lanes of a warp"
            machine.report("divergence", message, machine.lane, chosen.mask & parted.repeat(WARP))
        if chosen:
            step.execute(machine, chosen)
        if leaves and (others := lanes.where(~condition(machine))):
            machine.go(machine.place + 1, others)

    return step._replace(execute=execute)


_WHOLE_WARP = np.array(0xFFFFFFFF, np.uint32)


def whole_warp(machine: Machine) -> Values:
    """The mask of an instruction that all lanes of a warp execute together."""
    return _WHOLE_WARP
