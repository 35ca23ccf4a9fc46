"""Instructions of single lanes: arithmetic, moves, conversions of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cupyattn.interpret import alu
from cupyattn.interpret.memory import WINDOWS
from cupyattn.interpret.operation import DTYPES, Operation
from cupyattn.interpret.ptx import Address, Instruction, Operand, Pair, Special, Symbol, Vector
from cupyattn.interpret.semantics import Execute, Read, instruction, reader, writer

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine


def arithmetic(inst: Instruction) -> Execute | None:
    """Return the function of an arithmetic instruction, or None for other instructions."""
    if not inst.operands:
        return None
    target, *sources = inst.operands
    results = (target.first, target.second) if isinstance(target, Pair) else (target,)
    operation = alu.lookup(inst.opcode, inst.modifiers, len(results))
    if operation is None or len(sources) != len(operation.sources):
        return None
    execute = _evaluate(operation, sources, results)
    if inst.opcode in ("div", "rem") and DTYPES[operation.sources[1]].kind in "iu":
        return _after_divisor(reader(sources[1], operation.sources[1]), execute)
    return execute


def _after_divisor(read: Read, execute: Execute) -> Execute:
    """Report a divisor of 0 before the instruction does anything.

    PTX ISA, "div" and "rem": division by zero yields an unspecified value.
    """

    def checked(machine: Machine, lanes: Lanes) -> None:
        zero = read(machine) == 0
        if zero.any() and (bad := machine.each(zero)[lanes.index]).any():
            message = "an integer is divided by 0, whose result PTX leaves unspecified"
            machine.report("invalid operand", message, lanes.index, bad)
        execute(machine, lanes)

    return checked


def _evaluate(
    operation: Operation, sources: Sequence[Operand], results: Sequence[Operand]
) -> Execute:
    """Return a function that reads the sources, evaluates, and stores the results."""
    reads = [reader(x, t) for x, t in zip(sources, operation.sources, strict=True)]
    writes = [writer(x) for x in results]
    evaluate = operation.evaluate
    if len(writes) > 1:

        def execute_all(machine: Machine, lanes: Lanes) -> None:
            values = evaluate(*[read(machine) for read in reads])
            for write, value in zip(writes, values, strict=True):
                write(machine, value, lanes)

        return execute_all
    (write,) = writes

    def execute(machine: Machine, lanes: Lanes) -> None:
        write(machine, evaluate(*[read(machine) for read in reads]), lanes)

    return execute


@instruction("mov")
def move(inst: Instruction) -> Execute | None:
    """Copy a register, a number, an address; pack or unpack a vector."""
    if len(inst.modifiers) != 1:
        return None
    target, source = inst.operands
    (type_name,) = inst.modifiers
    if isinstance(source, Vector):
        packing = alu.pack(type_name, len(source.items))
        return None if packing is None else _evaluate(packing, source.items, (target,))
    if isinstance(target, Vector):
        unpacking = alu.unpack(type_name, len(target.items))
        return None if unpacking is None else _evaluate(unpacking, (source,), target.items)
    if isinstance(source, Address):  # name + offset
        if not isinstance(source.base, Symbol):
            return None
        name, offset = source.base.name, source.offset
        write = writer(target)
        dtype = f"u{int(type_name[1:]) // 8}"
        return lambda machine, lanes: write(
            machine, (machine.symbol(name) + offset).astype(dtype), lanes
        )
    if isinstance(source, Special) and type_name not in ("u32", "b32", "s32"):
        return None
    read, write = reader(source, type_name), writer(target)
    return lambda machine, lanes: write(machine, read(machine), lanes)


@instruction("cvta")
def convert_address(inst: Instruction) -> Execute | None:
    """Convert addresses between the generic window and the window of one space."""
    to, *rest = inst.modifiers
    (space, type_name) = rest if to == "to" else (to, *rest)
    if type_name not in ("u64", "b64"):
        return None
    window = WINDOWS.get(space.partition("::")[0], 0)
    step = np.uint64(-window % 2**64 if to == "to" else window)
    read, write = reader(inst.operands[1], type_name), writer(inst.operands[0])
    return lambda machine, lanes: write(machine, read(machine) + step, lanes)


@instruction("isspacep")
def is_in_space(inst: Instruction) -> Execute | None:
    """Test whether a generic address is in a window."""
    space = inst.modifiers[0].partition("::")[0]
    if space not in ("global", *WINDOWS):
        return None
    read, write = reader(inst.operands[1], "u64"), writer(inst.operands[0])
    number = np.uint64(WINDOWS.get(space, 0) >> 56)
    return lambda machine, lanes: write(machine, read(machine) >> np.uint64(56) == number, lanes)


@instruction("activemask")
def active_mask(inst: Instruction) -> Execute:
    """Return the lanes of the warp that are here."""
    write = writer(inst.operands[0])
    return lambda machine, lanes: write(machine, np.repeat(lanes.bits, 32), lanes)
