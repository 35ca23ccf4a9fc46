"""Accesses to variables in shared memory: each stays within the variable that its address is of.

A register holds the address of a variable if it was computed from that. This is known before a
kernel runs, so a check of the variable costs as much as one of the whole shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from cupyattn.interpret.ptx import Address, Instruction, Operand, Pair, Register, Symbol, Vector
from cupyattn.interpret.semantics import access_width

#: Instructions with one address, and copies whose first address is in shared memory.
_ACCESSES = {"ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "wmma"}
#: Instructions whose result is an address if an operand is one.
_KEEPS = {"mov", "add", "sub", "mad", "cvta", "cvt", "selp", "and", "or", "xor", "lop3", "shfl"}


class Extent(NamedTuple):
    """The bytes of the variables that an access may be to, as addresses in shared memory.

    Parameters
    ----------
    names : str
        Names of the variables.
    begin, end : int
        The end of dynamic shared memory is not known before a launch: 2^32.
    """

    names: str
    begin: int
    end: int


def plain_name(name: str) -> str:
    """Return the name of a variable without the function and scopes of its C++ symbol.

    Examples
    --------
    >>> plain_name("_ZZ4copyE4tile"), plain_name("global_smem")
    ('tile', 'global_smem')
    """
    match = re.fullmatch(r"_ZZ.*E(\d+)(\D\w*?)(?:_\d+)?", name) if name[:3] == "_ZZ" else None
    return match[2][: int(match[1])] if match else name


def extents_of(
    instructions: tuple[Instruction, ...], variables: dict[str, tuple[int, int]]
) -> dict[int, Extent]:
    """Return the bytes that each access to shared memory may touch, by its index.

    Parameters
    ----------
    instructions : tuple of Instruction
    variables : dict of str to (int, int)
        Address and bytes of each variable in shared memory; 0 bytes for the dynamic one.

    Returns
    -------
    dict of int to Extent
        Without accesses through addresses that are not known to be of a variable. Empty if there
        are fewer than two variables: then nothing lies between their end and that of the memory.
    """
    if len(variables) < 2:
        return {}
    held = _held(instructions, variables)
    found = {}
    for index, instruction in enumerate(instructions):
        if instruction.opcode not in _ACCESSES or "bulk" in instruction.modifiers:
            continue
        touched = access_width(instruction)
        if touched is None or touched[0] not in ("shared", "generic"):
            continue
        place = next((x for x in instruction.operands if isinstance(x, Address)), None)
        names = frozenset() if place is None else _of(place.base, held, variables)
        if names:
            begin = min(variables[name][0] for name in names)
            end = max(sum(variables[name]) if variables[name][1] else 1 << 32 for name in names)
            found[index] = Extent(" or ".join(sorted(map(plain_name, names))), begin, end)
    return found


def _held(
    instructions: tuple[Instruction, ...], variables: dict[str, tuple[int, int]]
) -> dict[str, frozenset[str]]:
    """Return the variables that the address in a register may be of, by the register's name."""
    computed = [
        (target.name, instruction.operands[1:])
        for instruction in instructions
        if instruction.opcode in _KEEPS and instruction.operands
        for target in _registers(instruction.operands[0])
    ]
    held: dict[str, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for name, sources in computed:
            before = held.get(name, frozenset())
            after = before.union(*(_of(x, held, variables) for x in sources))
            if after != before:
                held[name], changed = after, True
    return held


def _registers(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from _registers(item)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)


def _of(
    operand: Operand, held: dict[str, frozenset[str]], variables: dict[str, tuple[int, int]]
) -> frozenset[str]:
    if isinstance(operand, Symbol):
        return frozenset({operand.name} & variables.keys())
    if isinstance(operand, Register):
        return held.get(operand.name, frozenset())
    if isinstance(operand, Vector):
        return frozenset().union(*(_of(x, held, variables) for x in operand.items))
    if isinstance(operand, Address):
        return _of(operand.base, held, variables)
    return frozenset()
