"""Whether two PTX texts compute the same values: equal but for order where order has no effect.

Sums and products are symmetric, and independent instructions may change places. All else must be
equal: branches, stores, barriers, and all instructions that are not known here, in their order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cupyattn.interpret.ptx import (
    Address,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Vector,
    parse,
)

#: Instructions whose results depend on their operands alone.
_PURE = {
    "add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "and", "or", "xor", "not", "shl",
    "shr", "shf", "cvt", "mov", "selp", "setp", "abs", "neg", "lop3", "prmt", "bfe", "bfi", "ex2",
    "lg2", "rcp", "rsqrt", "sqrt", "popc", "clz", "brev", "cvta", "copysign", "tanh", "cos", "sin",
}  # fmt: skip
#: Their first two operands may be exchanged, as may both of a comparison for equality.
_SYMMETRIC = {"add", "mul", "mad", "fma", "min", "max", "and", "or", "xor"}
#: Instructions whose first operand is read and not written.
_NO_RESULT = {
    "st", "red", "bar", "barrier", "fence", "membar", "cp", "bra", "ret", "exit", "trap",
    "stmatrix", "setmaxnreg", "griddepcontrol", "nanosleep", "prefetch",
}  # fmt: skip
#: Special registers that do not change while a kernel runs.
_FIXED = re.compile(r"%(?:n?tid|n?ctaid|laneid|n?warpid|cluster_\w+)\b|WARP_SZ")
_VOLATILE = {"volatile", "relaxed", "acquire"}

#: The branches of a kernel, and in each block values and effects, in order. Numbers stand for
#: values, equal numbers for equal values.
Effects = list[tuple[Any, ...]]


def same_values(ptx: str, other: str) -> bool:
    r"""Return whether two PTX texts certainly compute the same; False if that is not known.

    Examples
    --------
    >>> start = ".version 8.0 .target sm_80 .entry f(.param .u64 y) { .reg .b32 %r<9>;"
    >>> start += ".reg .b64 %d<2>; ld.param.u64 %d1, [y]; mov.u32 %r1, %tid.x;\n"
    >>> stop = "st.global.u32 [%d1], %r4; ret; }"
    >>> one = start + "shl.b32 %r2, %r1, 1; not.b32 %r3, %r1; add.s32 %r4, %r2, %r3;" + stop
    >>> two = start + "not.b32 %r2, %r1; shl.b32 %r3, %r1, 1; add.s32 %r4, %r2, %r3;" + stop
    >>> same_values(one, two), same_values(one, two.replace("add", "sub"))
    (True, False)
    """
    if _declared(ptx) != _declared(other):
        return False
    numbers: dict[Any, int] = {}
    kernels = [parse(text).kernels for text in (ptx, other)]
    found = [{name: _effects(k, numbers) for name, k in of.items()} for of in kernels]
    return found[0] == found[1]


def _declared(ptx: str) -> list[str]:
    """Return all declarations, without registers, lines of the source, and debug sections."""
    lines = ptx.partition(".section")[0].splitlines()
    left_out = re.compile(r"\s*\.(?:reg|loc|file|minnctapersm)\b")
    return [x.strip() for x in lines if x.lstrip().startswith(".") and not left_out.match(x)]


def _parts(operand: Operand) -> Iterator[Operand]:
    if isinstance(operand, Vector):
        for item in operand.items:
            yield from _parts(item)
    elif isinstance(operand, Pair):
        yield from _parts(operand.first)
        yield from _parts(operand.second)
    else:
        yield operand


def _written(instruction: Instruction) -> dict[int, Register]:
    """Return the registers that an instruction writes, by their place among its results."""
    if instruction.opcode in _NO_RESULT or not instruction.operands:
        return {}
    parts = enumerate(_parts(instruction.operands[0]))
    return {place: x for place, x in parts if isinstance(x, Register)}


def _effects(kernel: Kernel, numbers: dict[Any, int]) -> Effects:
    """Return the effects of a kernel; `numbers` are given to values, here and in others."""
    return _Reader(kernel, numbers).effects


class _Reader:
    """Follows the values of a kernel.

    A register that one instruction writes, without a guard, has the value of that instruction
    everywhere. Another one is known by its name, and by how often its block wrote it before.
    """

    def __init__(self, kernel: Kernel, numbers: dict[Any, int]) -> None:
        self._numbers = numbers
        writes = Counter(x.name for one in kernel.instructions for x in _written(one).values())
        guarded = (_written(one) for one in kernel.instructions if one.predicate is not None)
        self._several = {name for name, count in writes.items() if count > 1}
        self._several.update(x.name for written in guarded for x in written.values())
        starts = {one.target for one in kernel.instructions if one.target is not None}
        self._values: dict[str, int] = {}
        self._versions: Counter[str] = Counter()
        self._block = self._epoch = 0
        self.effects: Effects = []
        blocks = {start: number for number, start in enumerate(sorted(starts))}
        for index, one in enumerate(kernel.instructions):
            if index in starts:
                self._begin()
                self.effects.append(("label", blocks[index]))
            self._follow(one, blocks)
            if one.opcode in ("bra", "ret", "exit"):
                self._begin()

    def _begin(self) -> None:
        self._block, self._epoch = self._block + 1, 0
        self._versions.clear()

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _of(self, operand: Operand) -> int:
        """Return the number of an operand's value."""
        if isinstance(operand, Register):
            name = operand.name
            if name in self._several:
                return self._number(("now", name, self._block, self._versions[name]))
            return self._values.get(name, self._number(("later", name)))
        if isinstance(operand, Negated):
            return self._number(("not", self._of(operand.register)))
        if isinstance(operand, Vector):
            return self._number(("vector", *map(self._of, operand.items)))
        if isinstance(operand, Pair):
            return self._number(("pair", self._of(operand.first), self._of(operand.second)))
        if isinstance(operand, Address):
            coordinates = tuple(map(self._of, operand.coordinates))
            return self._number(("at", self._of(operand.base), operand.offset, coordinates))
        return self._number(operand)

    def _follow(self, one: Instruction, blocks: dict[int, int]) -> None:
        results = _written(one)
        sources = list(map(self._of, one.operands[1:] if results else one.operands))
        guard = None if one.predicate is None else (self._of(one.predicate), one.negated)
        kind: tuple[Any, ...] = one.opcode, one.modifiers
        if self._is_pure(one):
            equal = one.opcode == "setp" and one.modifiers[0] in ("eq", "ne")
            if one.opcode in _SYMMETRIC or equal:
                sources[:2] = sorted(sources[:2])
            value: tuple[Any, ...] = (*kind, *sources)
        elif one.opcode == "ld" and _VOLATILE.isdisjoint(one.modifiers):
            value = *kind, *sources, self._block, self._epoch
        else:
            # NOTE: wgmma also reads the registers that it writes, which have several writers.
            held = tuple(self._of(x) for x in results.values() if x.name in self._several)
            target = None if one.target is None else blocks[one.target]
            value = *kind, *sources, guard, target, held, self._block, self._epoch
            self.effects.append(value)
            self._epoch += 1
        for place, register in results.items():
            number = self._number((value, place))
            if register.name in self._several:
                self.effects.append(("set", register.name, number, guard))
                self._versions[register.name] += 1
            else:
                self._values[register.name] = number

    def _is_pure(self, one: Instruction) -> bool:
        fixed = all(_FIXED.match(x.name) for x in one.operands if isinstance(x, Special))
        return one.opcode in _PURE and fixed and "cc" not in one.modifiers  # no carry
