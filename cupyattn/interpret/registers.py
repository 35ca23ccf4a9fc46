"""Find the registers that an instruction reads and writes, with their values, for observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cupyattn.interpret import alu
from cupyattn.interpret.lanes import Values
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ptx import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)
from cupyattn.interpret.semantics import reader

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

#: Indices of the registers that an instruction writes, and indices of its sources.
Indices = tuple[list[int], list[int]]

#: Opcodes whose first operand is not a result, even if it is a register, except that of a vote.
_WITHOUT_RESULT = {"bar", "barrier", "nanosleep"}


def registers_in(operand: Operand) -> list[Register]:
    """Return the registers that an operand names."""
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Negated):
        return [operand.register]
    parts: Sequence[Operand] = ()
    if isinstance(operand, Vector):
        parts = operand.items
    elif isinstance(operand, Address):
        parts = operand.base, *operand.coordinates
    elif isinstance(operand, Pair):
        parts = operand.first, operand.second
    return [register for part in parts for register in registers_in(part)]


def _has_result(instruction: Instruction) -> bool:
    first = instruction.operands[:1]
    return (
        bool(first)
        and not isinstance(first[0], Address)
        and (instruction.opcode not in _WITHOUT_RESULT or "red" in instruction.modifiers)
    )


def written(instruction: Instruction) -> tuple[Register, ...]:
    """Return the registers that an instruction writes."""
    return tuple(registers_in(instruction.operands[0])) if _has_result(instruction) else ()


def read(instruction: Instruction) -> tuple[Register, ...]:
    """Return the registers that an instruction reads, its guard first, each once."""
    found = [] if instruction.predicate is None else [instruction.predicate]
    for operand in instruction.operands[_has_result(instruction) :]:
        found += registers_in(operand)
    return tuple(dict.fromkeys(found))


def indices(instruction: Instruction) -> Indices:
    """Return the indices of the registers that an instruction writes, and indices of its sources.

    The registers are the same as in `written` and `read`. This function is faster.
    """
    results: list[int] = []
    sources = [] if instruction.predicate is None else [instruction.predicate.index]
    into = results if _has_result(instruction) else sources
    for operand in instruction.operands:
        if isinstance(operand, Register):  # the commonest
            into.append(operand.index)
        elif not isinstance(operand, Immediate):
            into += [register.index for register in registers_in(operand)]
        into = sources
    return results, sources


def result_type(instruction: Instruction, register: Register) -> str:
    """Return the PTX type of an instruction's result, or of its register if it names none.

    Registers are declared as plain bits, ``.b32``. Only the instruction says whether they receive
    an ``f32`` or an ``s32``.
    """
    operation = alu.lookup(instruction.opcode, instruction.modifiers)
    named = operation.results if operation else instruction.modifiers
    for name in named:
        if name in DTYPES and DTYPES[name].itemsize == DTYPES[register.type].itemsize:
            return name
    return register.type


def value(machine: Machine, register: Register) -> Values:
    """Return the values of a register in all lanes, as its declared type; zeros if unwritten."""
    return reader(register, register.type)(machine)


def executing(machine: Machine, instruction: Instruction, lanes: Lanes) -> Lanes:
    """Return the lanes whose guard lets them execute the current instruction."""
    guard = instruction.predicate
    if guard is None:
        return lanes
    held = value(machine, guard)
    return lanes.where(~held if instruction.negated else held)
