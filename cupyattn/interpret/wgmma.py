"""Execute ``wgmma``: asynchronous products of a warpgroup.

A product is computed when a thread waits for its group. Until then its accumulators keep their old
values. To read or write them, to change a fragment of A, or to write to an operand in shared memory
is a hazard.

PTX ISA, "wgmma.fence": a fence must precede the first product of a warpgroup. A fence must also
separate an access to a register from a product that uses it as accumulator or as fragment of A.
Products of one shape may follow each other on the same accumulators without a fence. Two reads do
not conflict, so a fragment of A may be read again without a fence, too.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyattn.interpret import tensor_core
from cupyattn.interpret.memory import SHARED_BASE
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Immediate, Instruction, Operand, Register, Vector
from cupyattn.interpret.register_pools import GROUP
from cupyattn.interpret.registers import Indices, executing, registers_in
from cupyattn.interpret.semantics import (
    Read,
    Step,
    instruction,
    reader,
    whole_warp,
)
from cupyattn.interpret.warp import fragment_reader, fragment_writer
from cupyattn.interpret.warpgroup import (
    Wgmma,
    find_wgmma,
    operand_addresses,
    operand_granules,
)

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine


class Shared(NamedTuple):
    """An operand in shared memory: the reader of its descriptor, and its layout."""

    descriptor: Read
    rows: int
    depth: int
    type: str
    k_major: bool

    def place(self, machine: Machine, lane: int) -> tuple[Ints, Ints]:
        """Return its place in the batch's shared memory, from the descriptor of a lane.

        Returns
        -------
        numpy.ndarray, (rows, depth)
            Byte offset of each element.
        numpy.ndarray
            The granules that hold them, each once.
        """
        shared = machine.shared
        bits, size = machine.value(self.descriptor, lane), shared.granule_bytes
        named = bits, self.rows, self.depth, tensor_core.ELEMENT_BITS[self.type], self.k_major
        granules = operand_granules(*named, size)
        ends = granules[[0, -1]] * size // 16 * 16
        shared.offset(ends, 16, np.array([lane, lane]))
        start = lane // machine.threads * shared.stride - SHARED_BASE
        return operand_addresses(*named) + start, granules + start // size

    def values(self, machine: Machine, offsets: Ints) -> npt.NDArray[np.float64]:
        """Return its current numbers for some products: (products, rows, depth), as `offsets`."""
        size = tensor_core.ELEMENT_BITS[self.type] // 8
        raw = np.ascontiguousarray(machine.shared.data.view(f"u{size}")[offsets // size])
        values: npt.NDArray[np.float64] = tensor_core.elements(raw.view(np.uint32), self.type)
        return values


@dataclass(frozen=True, eq=False)
class WarpgroupProduct:
    """One ``wgmma.mma_async`` instruction."""

    product: Wgmma
    accumulators: tuple[int, ...]  # registers
    fragments: tuple[int, ...]  # registers of A, none if A is in shared memory
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


class Product(NamedTuple):
    """One product of one warpgroup, under way."""

    form: WarpgroupProduct
    first_warp: int  # of the warpgroup, numbered through the batch
    number: int  # of the group of products that it is committed with
    a: Ints | None  # place of A in shared memory, None for registers
    b: Ints
    counts: bool  # whether D adds to the accumulators
    granules: list[Ints]  # places in shared memory that it reads, operand by operand


def _compute(machine: Machine, products: Sequence[Product], lanes: Lanes) -> None:
    """Compute D of products, an instruction for all of its warpgroups at once.

    D stays here while the next products of the same warpgroups accumulate in the same registers.
    """
    turns: dict[tuple[int, WarpgroupProduct], list[Product]] = {}
    counts: Counter[int] = Counter()
    for product in products:
        turns.setdefault((counts[product.first_warp], product.form), []).append(product)
        counts[product.first_warp] += 1
    held: _Held | None = None
    for turn in sorted(turns, key=operator.itemgetter(0)):
        some, form = sorted(turns[turn], key=lambda x: x.first_warp), turn[1]
        firsts = [x.first_warp for x in some]
        if held is None or not held.accumulates(form, firsts):
            if held is not None:
                held.write(machine, lanes)
            warps = np.add.outer(firsts, np.arange(GROUP)).ravel()
            c = form.read_c(machine, warps).reshape(len(some), GROUP * WARP, -1)
            held = _Held(form, firsts, warps, c)
        held.d = form.product(
            _rows(machine, form, some, held.warps),
            form.b.values(machine, np.stack([x.b for x in some])),
            held.d,
            np.array([x.counts for x in some]),
            form.sign,
        )
    if held is not None:
        held.write(machine, lanes)


def _rows(
    machine: Machine, form: WarpgroupProduct, products: list[Product], warps: Ints
) -> npt.NDArray[np.float64]:
    """Return A of the products of one instruction: (products, 64, depth)."""
    if isinstance(form.a, Shared):
        return form.a.values(machine, np.stack([x.a for x in products if x.a is not None]))
    registers = form.a(machine, warps).reshape(len(products), GROUP * WARP, -1)
    rows: npt.NDArray[np.float64] = form.product.rows_of_registers(registers)
    return rows


@dataclass(eq=False)
class _Held:
    """D of some warpgroups before it is written to registers."""

    form: WarpgroupProduct
    firsts: list[int]  # first warp of each warpgroup, rising
    warps: Ints
    d: npt.NDArray[np.uint32]  # [warpgroup, lane, register]

    def accumulates(self, form: WarpgroupProduct, firsts: list[int]) -> bool:
        """Return whether the next product adds to the same registers of the same warpgroups."""
        return form.accumulators == self.form.accumulators and firsts == self.firsts

    def write(self, machine: Machine, lanes: Lanes) -> None:
        """Write D to the registers, which its lanes alone hold."""
        mask = np.zeros(machine.size, np.bool_)
        mask.reshape(-1, WARP)[self.warps] = True
        d = self.d.reshape(len(self.warps), WARP, -1)
        self.form.write_d(machine, d, lanes.where(mask))


class _Form:
    """A machine's record of an instruction: its number, and rows of the tables of registers."""

    def __init__(self, number: int, product: WarpgroupProduct, rows: Mapping[int, int]) -> None:
        self.number, self.product = number, product
        self.registers = product.registers
        self.rows = np.array([rows[index] for index in self.registers])
        self._others: dict[int, frozenset[int]] = {}

    def conflicts(self, before: _Form) -> frozenset[int]:
        """Return the registers whose use by an earlier product requires a check.

        There is none if both read them, or if both accumulate in them and have one shape.
        """
        found = self._others.get(before.number)
        if found is None:
            own, others = set(self.product.accumulators), set(before.product.accumulators)
            alike = own & others if self.product.shape == before.product.shape else set()
            shared = set(self.registers) & set(before.registers)
            found = self._others[before.number] = frozenset(shared & (own | others) - alike)
        return found


class Warpgroups:
    """The products of a batch that are still in flight, and the registers that they use.

    Tables have a row for each register that a product of the kernel holds.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        warps = machine.size // WARP
        self._warps = machine.threads // WARP  # of a block
        self._committed = np.zeros(warps, np.int64)  # by the first warp of a warpgroup
        self._under_way: list[Product] = []
        self._fenced = np.zeros(warps, np.int64)  # time of each warp's last fence, 0: none yet
        rows = len(machine.program.held)
        self._held = np.zeros((rows, machine.size), np.int16)  # products, for each lane
        # Times for each lane: of the last change by a thread, and of the last read.
        self._changed = np.zeros((rows, machine.size), np.int64)
        self._read = np.zeros((rows, machine.size), np.int64)
        # By warp: the latest of these times.
        self._touched = np.zeros(warps, np.int64)
        # By first warp: the number of the last form that used a register, -1 for none, and when.
        self._last_form = np.full((rows, warps), -1)
        self._last_use = np.zeros((rows, warps), np.int64)
        self._forms: dict[WarpgroupProduct, _Form] = {}
        self._numbered: list[_Form] = []

    def fence(self, lanes: Lanes) -> None:
        """Order the registers of warps before their next products."""
        self._fenced[lanes.warps] = self._machine.clocks.now

    def commit(self, lanes: Lanes) -> None:
        """Close each warpgroup's open group of products."""
        self._committed[self._first_warps(lanes)] += 1

    def touch(self, used: tuple[int, ...], changed: tuple[int, ...], lanes: Lanes) -> None:
        """Report a register that a product holds; record which registers are read and changed."""
        machine, rows = self._machine, self._machine.program.held
        for index in used if self._under_way else ():
            if (bad := lanes.mask & (self._held[rows[index]] > 0)).any():
                message = (
                    f"{self._name(index)} is used while a wgmma that holds it is not waited for"
                )
                machine.report("in flight", message, machine.lane, bad)
        self._touched[lanes.warps] = machine.clocks.now
        for index in used:
            times = self._changed if index in changed else self._read
            times[rows[index]][lanes.index] = machine.clocks.now

    def start(self, product: WarpgroupProduct, lanes: Lanes) -> None:
        """Begin the products of an instruction."""
        machine, shared = self._machine, self._machine.shared
        form = self._forms.get(product)
        if form is None:
            form = _Form(len(self._forms), product, machine.program.held)
            self._forms[product] = form
            self._numbered.append(form)
        for warp in self._first_warps(lanes).tolist():
            lane = warp * WARP
            counts = bool(machine.value(product.accumulate, lane))
            if counts:
                self._check_values(form, warp)
            self._check_fence(form, warp)
            self._held[form.rows, lane : lane + GROUP * WARP] += 1
            a, granules = None, []
            if isinstance(product.a, Shared):
                a, of_a = product.a.place(machine, lane)
                granules.append(of_a)
            b, of_b = product.b.place(machine, lane)
            granules.append(of_b)
            number = int(self._committed[warp])
            self._under_way.append(Product(product, warp, number, a, b, counts, granules))
            for some in granules:
                who = np.full(len(some), lane)
                shared.shadow.before_read(some, who, machine.clocks, machine.report)
                shared.shadow.before_proxy(some, who, machine.clocks, machine.report)
                shared.shadow.lend(some)
            width = tensor_core.ELEMENT_BITS[product.b.type] // 8
            size = sum(x.size for x in (a, b) if x is not None) * width
            machine.traffic["shared", "load"] += size

    def _check_values(self, form: _Form, warp: int) -> None:
        """Report accumulators that a product adds to and that have no value."""
        rows = form.rows[: len(form.product.accumulators)]
        none = self._last_form[rows, warp] < 0
        if none.any():
            own = self._machine.lane[warp * WARP : (warp + GROUP) * WARP]
            bad = none[:, None] & (self._changed[rows][:, own] == 0)
            if bad.any():
                row = int(bad.any(axis=1).argmax())
                name = self._name(form.registers[row])
                message = f"a wgmma adds to register {name}, and this lane has not written it"
                self._machine.report("never written", message, own, bad[row])

    def _check_fence(self, form: _Form, warp: int) -> None:
        """Report a product without the ``wgmma.fence`` that its registers need."""
        machine, warps = self._machine, slice(warp, warp + GROUP)
        own = machine.lane[warp * WARP : (warp + GROUP) * WARP]
        fenced = np.repeat(self._fenced[warps], WARP)
        if (self._touched[warps] > self._fenced[warps]).any():
            self._check_touched(form, own, fenced)
        if (none := fenced == 0).any():
            message = "no wgmma.fence stands before the first wgmma of a warpgroup"
            machine.report("race", message, own, none)
        last = self._last_form[form.rows, warp]
        for number in set(last[last >= 0].tolist()):
            before = self._numbered[number]
            conflicts = form.conflicts(before)
            for row in np.flatnonzero(last == number).tolist() if conflicts else ():
                if form.registers[row] in conflicts:
                    self._check_last_use(form, before, row, own, fenced)
        self._last_form[form.rows, warp] = form.number
        self._last_use[form.rows, warp] = machine.clocks.now

    def _check_touched(self, form: _Form, own: Ints, fenced: Ints) -> None:
        """Report a register that the lanes changed or read after their last fence."""
        machine, lanes = self._machine, slice(own[0], own[-1] + 1)
        late = self._changed[form.rows, lanes] > fenced
        if late.any():
            row = int(late.any(axis=1).argmax())
            name = self._name(form.registers[row])
            message = f"no wgmma.fence stands between a change of {name} and its product"
            machine.report("race", message, own, late[row])
        accumulators = form.product.accumulators
        late = self._read[form.rows[: len(accumulators)], lanes] > fenced
        if late.any():
            row = int(late.any(axis=1).argmax())
            message = (
                f"no wgmma.fence stands between a read of {self._name(accumulators[row])} and the "
                "product that writes it"
            )
            machine.report("race", message, own, late[row])

    def _check_last_use(
        self, form: _Form, before: _Form, row: int, own: Ints, fenced: Ints
    ) -> None:
        """Report a register that the product uses differently from the product before."""
        machine, index = self._machine, form.registers[row]
        accumulates = index in form.product.accumulators
        accumulated = index in before.product.accumulators
        held = self._held[form.rows[row], own] > 0
        if (accumulates != accumulated) and held.any():
            use, other = "reads", "accumulates in"
            if accumulates:
                use, other = "accumulates in", "reads"
            message = f"a wgmma {use} {self._name(index)} while one that {other} it is under way"
            machine.report("in flight", message, own, held)
        time = self._last_use[form.rows[row], int(own[0]) // WARP]
        if (late := fenced < time).any():
            message = (
                f"no wgmma.fence stands between two wgmma that use {self._name(index)} and are not "
                "of one shape with the same accumulators"
            )
            machine.report("race", message, own, late)

    def _name(self, index: int) -> str:
        return self._machine.program.kernel.registers[index].name

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Compute all but the last `pending` groups of each warpgroup."""
        machine, shadow = self._machine, self._machine.shared.shadow
        warps = set(self._first_warps(lanes).tolist())
        done: list[Product] = []
        left: list[Product] = []
        for product in self._under_way:
            warp = product.first_warp
            ended = warp in warps and product.number < self._committed[warp] - pending
            (done if ended else left).append(product)
        _compute(machine, done, lanes)
        for product in done:
            own = slice(product.first_warp * WARP, (product.first_warp + GROUP) * WARP)
            self._held[self._forms[product.form].rows, own] -= 1
            # One lane represents each warp, because all of its lanes wait here.
            speakers = machine.lane[own][::WARP]
            for granules in product.granules:
                shadow.give_back(granules, speakers, machine.clocks)
        self._under_way = left

    def _first_warps(self, lanes: Lanes) -> Ints:
        """Return the first warps of the current warpgroups; report one with missing warps."""
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
    """Build the instructions that begin with ``wgmma``."""
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


def registers_of(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return the accumulators and fragments of all products of a kernel, and number them."""
    products = (x for x in instructions if x.opcode == "wgmma" and x.modifiers[0] == "mma_async")
    found = {
        index: None
        for x in products
        for operand in x.operands[:2]
        if isinstance(operand, Vector)
        for index in _indices(registers_in(operand))
    }
    return {index: row for row, index in enumerate(found)}


def watched(step: Step, names: Indices, held: Mapping[int, int]) -> Step:
    """Return a step that first checks its registers against the products that may hold them."""
    inst, (results, sources) = step.instruction, names
    if inst.opcode == "wgmma" or held.keys().isdisjoint((*results, *sources)):
        return step
    changed = tuple(index for index in results if index in held)
    used = tuple(dict.fromkeys((*changed, *(index for index in sources if index in held))))

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.warpgroups.touch(used, changed, executing(machine, inst, lanes))
        step.execute(machine, lanes)

    return step._replace(execute=execute)
