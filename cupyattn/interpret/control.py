"""Control flow of lanes: branches, ends, barriers, and instructions that only take time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.interpret.barriers import Vote
from cupyattn.interpret.cluster import cluster_barrier
from cupyattn.interpret.ptx import Immediate, Instruction, Negated
from cupyattn.interpret.register_pools import GROUP
from cupyattn.interpret.semantics import (
    Execute,
    Step,
    instruction,
    reader,
    whole_warp,
    writer,
)

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine


@instruction("bra")
def branch(inst: Instruction) -> Step | None:
    """Divide the lanes by the guard."""
    target = inst.target
    if target is None or inst.modifiers not in ((), ("uni",)):
        return None
    if inst.predicate is None:
        return Step(inst, lambda machine, lanes: machine.go(target, lanes), leaves=True)
    condition = reader(Negated(inst.predicate) if inst.negated else inst.predicate, "pred")

    def execute(machine: Machine, lanes: Lanes) -> None:
        taken = lanes.mask & condition(machine)
        if not taken.any():
            machine.go(machine.place + 1, lanes)
        elif (taken == lanes.mask).all():
            machine.go(target, lanes)
        else:
            machine.go(target, taken)
            machine.go(machine.place + 1, lanes.mask & ~taken)

    return Step(inst, execute, leaves=True)


@instruction("ret", "exit")
def end(inst: Instruction) -> Step | None:
    """Let lanes exit."""
    if inst.modifiers not in ((), ("uni",)):
        return None
    return Step(inst, lambda machine, lanes: machine.exit(lanes), leaves=True)


@instruction("trap")
def trap(inst: Instruction) -> Execute:
    """Report a trap."""

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.report("trap", "the kernel stopped itself", machine.lane, lanes.mask)

    return execute


@instruction("prefetch", "prefetchu", "applypriority", "pmevent")
def nothing(inst: Instruction) -> Execute:
    """Do nothing."""
    return lambda machine, lanes: None


@instruction("griddepcontrol")
def grid_dependency(inst: Instruction) -> Execute | None:
    """Wait for the previous launch, which has ended here; let the next one begin.

    Reads before the wait are still checked (`Launch.awaits`).
    """
    if inst.modifiers == ("wait",):
        return lambda machine, lanes: machine.memory.wait(lanes.index)
    return (lambda machine, lanes: None) if inst.modifiers == ("launch_dependents",) else None


@instruction("nanosleep")
def nanosleep(inst: Instruction) -> Step:
    """Let all other lanes run first, because these lanes may wait for them."""
    return Step(inst, lambda machine, lanes: machine.rest(lanes), leaves=True)


@instruction("membar", "fence")
def fence(inst: Instruction) -> Execute | None:
    """Order the accesses of one thread, and make them visible to the asynchronous proxy.

    A fence alone does not order two threads: it does so with relaxed accesses.
    """
    across = not {"cta"} & set(inst.modifiers)
    if inst.modifiers[:1] == ("mbarrier_init",):
        return lambda machine, lanes: machine.mbarriers.show(lanes)
    if inst.modifiers[:2] == ("proxy", "async"):

        def show(machine: Machine, lanes: Lanes) -> None:
            machine.mbarriers.show(lanes)
            machine.shared.show(lanes.index)

        return show if inst.modifiers[2:] in ((), ("shared::cta",)) else None
    if inst.modifiers[:1] == ("proxy",):
        return None

    def order(machine: Machine, lanes: Lanes) -> None:
        machine.mbarriers.fence_time[lanes.index] = machine.clocks.now
        if across:
            machine.clocks.between.fence(machine.clocks, lanes.index)

    return order


@instruction("setmaxnreg")
def set_registers(inst: Instruction) -> Step | None:
    """Request or release registers."""
    first = inst.operands[0]
    action, *rest = inst.modifiers
    if action not in ("inc", "dec") or rest != ["sync", "aligned", "u32"]:
        return None
    if not isinstance(first, Immediate):
        return None
    more, count = action == "inc", first.bits

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.met(lanes)
        machine.register_pools.change(count, lanes, more=more)

    return Step(inst, execute, together=whole_warp, warps=GROUP, leaves=True)


@instruction("bar", "barrier")
def barrier(inst: Instruction) -> Step | None:
    """Wait for the threads of the block, of the warp, or of the cluster."""
    if "cluster" in inst.modifiers:
        return cluster_barrier(inst)
    modifiers = tuple(m for m in inst.modifiers if m not in ("cta", "aligned"))
    if modifiers == ("warp", "sync"):
        mask = reader(inst.operands[0], "u32")
        return Step(inst, lambda machine, lanes: machine.met(lanes), together=mask)
    operands, vote = list(inst.operands), None
    if modifiers in (("red", "popc", "u32"), ("red", "and", "pred"), ("red", "or", "pred")):
        predicate = reader(operands.pop(), "pred")
        vote = Vote(modifiers[1], writer(operands.pop(0)))
    elif modifiers not in (("sync",), ("arrive",)):
        return None
    aligned = inst.opcode == "bar" or "aligned" in inst.modifiers
    number = reader(operands[0], "u32")
    count = reader(operands[1], "u32") if len(operands) > 1 else None
    wait = modifiers != ("arrive",)

    def execute(machine: Machine, lanes: Lanes) -> None:
        numbers = machine.each(number(machine))
        counts = None if count is None else machine.each(count(machine))
        if vote is not None:
            machine.barriers.vote(vote, machine.each(predicate(machine)), lanes)
        machine.barriers.meet(numbers, counts, lanes, wait=wait, aligned=aligned)

    return Step(inst, execute, together=whole_warp if aligned else None, leaves=True)
