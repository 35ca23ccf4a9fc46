"""``wgmma``: products of a warpgroup in the background.

A product happens when its group is waited for: until then the accumulators hold what they held,
and whoever reads or writes them, changes a fragment of A, or writes to an operand in shared memory
has a hazard.

PTX ISA, "wgmma.fence": a fence stands before the first product of a warpgroup, and between any
access to a register and a product that uses the register as accumulator or as fragment of A.
Products of one shape may follow each other on the same accumulators without a fence. Two reads do
not conflict, so a fragment of A may be read again without a fence, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cupyattn.interpret import tensor_core
from cupyattn.interpret.memory import SHARED_BASE
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Immediate, Instruction, Operand, Register, Vector
from cupyattn.interpret.register_pools import GROUP
from cupyattn.interpret.registers import executing, read, registers_in, written
from cupyattn.interpret.semantics import (
    Read,
    Step,
    instruction,
    reader,
    whole_warp,
)
from cupyattn.interpret.warp import fragment_reader, fragment_writer
from cupyattn.interpret.warpgroup import Wgmma, find_wgmma, operand_addresses

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine


@dataclass(frozen=True)
class Shared:
    """An operand in shared memory: how a descriptor is read, and what it names."""

    descriptor: Read
    rows: int
    depth: int
    type: str
    k_major: bool

    def offsets(self, machine: Machine, bits: int, lane: int) -> Ints:
        """Return where its elements lie in the shared memory of the batch: (rows, depth)."""
        width = tensor_core.ELEMENT_BITS[self.type]
        address = operand_addresses(bits, self.rows, self.depth, width, self.k_major)
        ends = np.array([address.min(), address.max()]) // 16 * 16
        machine.shared.offset(ends, 16, np.array([lane, lane]))
        block = lane // machine.threads
        offsets: Ints = address - SHARED_BASE + block * machine.shared.stride
        return offsets

    def values(self, machine: Machine, offsets: Ints) -> npt.NDArray[np.float64]:
        """Return the numbers that lie there now: (1, rows, depth)."""
        size = tensor_core.ELEMENT_BITS[self.type] // 8
        raw = np.ascontiguousarray(machine.shared.data.view(f"u{size}")[offsets // size])
        values: npt.NDArray[np.float64] = tensor_core.elements(raw.view(np.uint32), self.type)[None]
        return values


@dataclass(frozen=True)
class WarpgroupProduct:
    """One ``wgmma.mma_async`` instruction."""

    product: Wgmma
    accumulators: tuple[int, ...]  # registers
    fragments: tuple[int, ...]  # registers of A, none where A lies in shared memory
    read_c: Callable[[Machine, Ints], npt.NDArray[np.uint32]]
    write_d: Callable[[Machine, npt.NDArray[np.uint32], Lanes], None]
    a: Shared | Callable[[Machine, Ints], npt.NDArray[np.uint32]]
    b: Shared
    accumulate: Read
    sign: int

    @property
    def registers(self) -> tuple[int, ...]:
        """Accumulators and fragments of A."""
        return (*self.accumulators, *self.fragments)

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and depth."""
        return self.product.columns, self.product.depth


@dataclass(eq=False)
class Product:
    """One product of one warpgroup, under way."""

    form: WarpgroupProduct
    first_warp: int  # of the warpgroup, numbered through the batch
    number: int  # of the group of products that it is committed with
    a: Ints | None  # where A lies in shared memory, None for registers
    b: Ints
    counts: bool  # whether D starts from what the accumulators hold
    granules: Ints  # what it reads of shared memory

    def happen(self, machine: Machine, lanes: Lanes) -> None:
        """Compute D."""
        form, warps = self.form, np.arange(GROUP) + self.first_warp
        if isinstance(form.a, Shared) and self.a is not None:
            a = form.a.values(machine, self.a)
        elif isinstance(form.a, Shared):
            raise TypeError("A lies in shared memory, and nobody said where")
        else:
            registers = form.a(machine, warps)
            a = form.product.rows_of_registers(registers.reshape(1, GROUP * WARP, -1))
        b = form.b.values(machine, self.b)
        c = form.read_c(machine, warps).reshape(1, GROUP * WARP, -1)
        d = form.product(a, b, c, self.counts, form.sign)
        form.write_d(machine, d.reshape(GROUP, WARP, -1), lanes)


class Warpgroups:
    """The products of a batch that nobody has waited for, and the registers that they hold."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        warps = machine.size // WARP
        self._warps = machine.threads // WARP  # of a block
        self._committed = np.zeros(warps, np.int64)  # by the first warp of a warpgroup
        self._under_way: list[Product] = []
        self._fenced = np.zeros(warps, np.int64)  # time of each warp's last fence, 0: none yet
        self._held: dict[int, npt.NDArray[np.int16]] = {}  # register: products, for each lane
        # Times by register, for each lane: of its last change by a thread, and of its last read.
        self._changed: dict[int, npt.NDArray[np.int64]] = {}
        self._read: dict[int, npt.NDArray[np.int64]] = {}
        # The last product that used a register, by register and first warp, and its time.
        self._last_use: dict[tuple[int, int], tuple[WarpgroupProduct, int]] = {}

    def fence(self, lanes: Lanes) -> None:
        """Order the registers of warps before their next products."""
        self._fenced[lanes.warps] = self._machine.clocks.now

    def commit(self, lanes: Lanes) -> None:
        """Close the open group of each warpgroup."""
        self._committed[self._first_warps(lanes)] += 1

    def touch(self, used: tuple[int, ...], changed: tuple[int, ...], lanes: Lanes) -> None:
        """Report a register that a product holds; note which are read and which are changed."""
        machine = self._machine
        for index in used if self._under_way else ():
            held = self._held.get(index)
            if held is not None and (bad := lanes.mask & (held > 0)).any():
                name = machine.program.kernel.registers[index].name
                message = f"{name} is used while a wgmma that holds it is not waited for"
                machine.report("in flight", message, machine.lane, bad)
        for index in used:
            times = self._changed if index in changed else self._read
            of_lanes = times.setdefault(index, np.zeros(machine.size, np.int64))
            of_lanes[lanes.index] = machine.clocks.now

    def start(self, form: WarpgroupProduct, lanes: Lanes) -> None:
        """Begin the products of an instruction."""
        machine, shared = self._machine, self._machine.shared
        for warp in self._first_warps(lanes).tolist():
            self._check_fence(form, warp)
            lane = warp * WARP
            for index in form.registers:
                held = self._held.setdefault(index, np.zeros(machine.size, np.int16))
                held[lane : lane + GROUP * WARP] += 1
            a = None
            if isinstance(form.a, Shared):
                a = form.a.offsets(machine, machine.value(form.a.descriptor, lane), lane)
            b = form.b.offsets(machine, machine.value(form.b.descriptor, lane), lane)
            counts = bool(machine.value(form.accumulate, lane))
            places = np.concatenate([x.ravel() for x in (a, b) if x is not None])
            granules = np.unique(places // shared.granule_bytes)
            number = int(self._committed[warp])
            self._under_way.append(Product(form, warp, number, a, b, counts, granules))
            who = np.full(len(granules), lane)
            shared.shadow.before_read(granules, who, machine.clocks, machine.report)
            shared.shadow.before_proxy(granules, who, machine.clocks, machine.report)
            shared.shadow.lend(granules)
            width = tensor_core.ELEMENT_BITS[form.b.type] // 8
            size = sum(x.size for x in (a, b) if x is not None) * width
            machine.traffic["shared", "load"] += size

    def _check_fence(self, form: WarpgroupProduct, warp: int) -> None:
        """Report a product without the ``wgmma.fence`` that its registers need."""
        machine = self._machine
        own = np.arange(warp * WARP, (warp + GROUP) * WARP)
        fenced = np.repeat(self._fenced[warp : warp + GROUP], WARP)
        for index in form.registers:
            changed = self._changed.get(index)
            if changed is not None and (late := changed[own] > fenced).any():
                name = self._name(index)
                message = f"no wgmma.fence stands between a change of {name} and its product"
                machine.report("race", message, own, late)
        for index in form.accumulators:
            read = self._read.get(index)
            if read is not None and (late := read[own] > fenced).any():
                message = (
                    f"no wgmma.fence stands between a read of {self._name(index)} and the product "
                    "that writes it"
                )
                machine.report("race", message, own, late)
        if (late := fenced == 0).any():
            message = "no wgmma.fence stands before the first wgmma of a warpgroup"
            machine.report("race", message, own, late)
        for index in form.registers:
            self._check_last_use(form, index, own, fenced)
            self._last_use[index, warp] = form, machine.clocks.now

    def _check_last_use(self, form: WarpgroupProduct, index: int, own: Ints, fenced: Ints) -> None:
        """Report a register that the product uses in another way than the one before."""
        machine, warp = self._machine, int(own[0]) // WARP
        if (index, warp) not in self._last_use:
            return
        before, time = self._last_use[index, warp]
        accumulates, accumulated = index in form.accumulators, index in before.accumulators
        if not accumulates and not accumulated:
            return
        held = self._held[index][own] > 0
        if (accumulates != accumulated) and held.any():
            use, other = "reads", "accumulates in"
            if accumulates:
                use, other = "accumulates in", "reads"
            message = f"a wgmma {use} {self._name(index)} while one that {other} it is under way"
            machine.report("in flight", message, own, held)
        if accumulates and accumulated and form.shape == before.shape:
            return
        if (late := fenced < time).any():
            message = (
                f"no wgmma.fence stands between two wgmma that use {self._name(index)} and are not "
                "of one shape with the same accumulators"
            )
            machine.report("race", message, own, late)

    def _name(self, index: int) -> str:
        return self._machine.program.kernel.registers[index].name

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Let all but the last `pending` groups of each warpgroup happen."""
        machine = self._machine
        warps, left = set(self._first_warps(lanes).tolist()), []
        for product in self._under_way:
            warp = product.first_warp
            if warp not in warps or product.number >= self._committed[warp] - pending:
                left.append(product)
                continue
            own = slice(warp * WARP, (warp + GROUP) * WARP)
            mask = np.zeros(machine.size, np.bool_)
            mask[own] = True
            product.happen(machine, lanes.where(mask))
            for index in product.form.registers:
                self._held[index][own] -= 1
            # One lane speaks for each warp: all of them wait here.
            speakers = machine.lane[own][::WARP]
            machine.shared.shadow.give_back(product.granules, speakers, machine.clocks)
        self._under_way = left

    def _first_warps(self, lanes: Lanes) -> Ints:
        """Return the first warp of each warpgroup here; report one of which warps are missing."""
        warps = lanes.warps
        first = warps - warps % self._warps % GROUP
        firsts: Ints
        firsts, count = np.unique(first, return_counts=True)
        if (count < GROUP).any():
            mask = np.zeros(self._machine.size, np.bool_)
            mask.reshape(-1, WARP)[warps[np.isin(first, firsts[count < GROUP])]] = True
            message = "an instruction of a warpgroup, and not all of its warps are here"
            self._machine.report("divergence", message, self._machine.lane, mask)
        return firsts


@instruction("wgmma")
def warpgroup(inst: Instruction) -> Step | None:
    """Everything that begins with ``wgmma``."""
    kind = inst.modifiers[0]
    if inst.modifiers[1:3] != ("sync", "aligned"):
        return None

    def fence(machine: Machine, lanes: Lanes) -> None:
        machine.met(lanes)
        machine.warpgroups.fence(lanes)

    def commit(machine: Machine, lanes: Lanes) -> None:
        machine.met(lanes)
        machine.warpgroups.commit(lanes)

    if kind == "fence":
        return Step(inst, fence, together=whole_warp, warps=GROUP)
    if kind == "commit_group":
        return Step(inst, commit, together=whole_warp, warps=GROUP)
    if kind == "wait_group" and isinstance(inst.operands[0], Immediate):
        pending = inst.operands[0].bits

        def wait(machine: Machine, lanes: Lanes) -> None:
            machine.warpgroups.wait(lanes, pending)
            machine.met(lanes)

        return Step(inst, wait, together=whole_warp, warps=GROUP)
    if kind == "mma_async":
        product = find_wgmma(inst.modifiers)
        return None if product is None else _multiply(inst, product)
    return None


def _multiply(inst: Instruction, product: Wgmma) -> Step | None:
    target, a, b, accumulate, *rest = inst.operands
    if not all(isinstance(x, Immediate) for x in rest):
        return None
    numbers = [x.bits for x in rest if isinstance(x, Immediate)]
    in_registers = isinstance(a, Vector)
    integers, sixteen = product.a_type in ("s8", "u8"), product.a_type in ("f16", "bf16")
    signs = [] if integers else numbers[:2]
    transposed = numbers[len(signs) :]
    if len(transposed) != ((1 if in_registers else 2) if sixteen else 0):
        return None
    k_major = [not x for x in transposed] or [True, True]

    def shared(operand: Operand, rows: int, kind: str, along_k: bool) -> Shared:
        return Shared(reader(operand, "b64"), rows, product.depth, kind, along_k)

    form = WarpgroupProduct(
        product,
        tuple(_indices(registers_in(target))),
        tuple(_indices(registers_in(a))) if in_registers else (),
        fragment_reader(target),
        fragment_writer(target),
        fragment_reader(a) if in_registers else shared(a, 64, product.a_type, k_major[0]),
        shared(b, product.columns, product.b_type, k_major[-1]),
        reader(accumulate, "pred"),
        math.prod(signs),
    )

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.met(lanes)
        machine.warpgroups.start(form, lanes)

    return Step(inst, execute, together=whole_warp, warps=GROUP)


# ---- registers that products hold ----------------------------------------------------------------


def _indices(registers: Iterable[Register]) -> Iterator[int]:
    return (register.index for register in registers)


def registers_of(instructions: Sequence[Instruction]) -> set[int]:
    """Return the accumulators and fragments of all products of a kernel."""
    products = (x for x in instructions if x.name.startswith("wgmma.mma_async"))
    return {
        index
        for x in products
        for operand in x.operands[:2]
        if isinstance(operand, Vector)
        for index in _indices(registers_in(operand))
    }


def watched(step: Step, held: set[int]) -> Step:
    """Return a step that minds the products which may hold its registers."""
    inst = step.instruction
    if not held or inst.opcode == "wgmma":
        return step
    changed = tuple(i for i in _indices(written(inst)) if i in held)
    used = tuple(dict.fromkeys((*changed, *(i for i in _indices(read(inst)) if i in held))))
    if not used:
        return step

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.warpgroups.touch(used, changed, executing(machine, inst, lanes))
        step.execute(machine, lanes)

    return replace(step, execute=execute)
