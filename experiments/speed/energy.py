"""How much energy does a call take, and how many operations does a watt pay for?

Varies       every rung at head_dim 128 and length 4,096; fa_tc and fa_int8 at 16,384, too; torch's
             cuDNN and FlashAttention-2 beside, where they are there; the device at rest
Holds fixed  16,384 tokens in all, 16 heads, float16, N(0, 1)
Measures     J2; joules per call by NVML's counter, idle power included and taken off; watts;
             GFLOP/s per watt; the SM clock in the middle of a window;
             --backward: the same of both forms of gradients, torch's backends and FlashAttention-4,
             at head_dim 64, 128, 256 and Wan's shapes
Run          python -m experiments.speed.energy [--quick] [--seconds 2] [--json FILE]
             [--backward] [--turns 3] [--only TEXT]

A window lasts at least --seconds, which must be 2 or more, and begins and ends where the counter is
renewed. There is one window a cell and one at rest before them. The record is rewritten after each,
so an interrupted run keeps its results. Calls of fa_int8 include quantising.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, energy, nvml, timing, words
from experiments._harness import joules, recording
from experiments._harness.cells import Cell, Problem, judge_problem, rotating, rung
from experiments._harness.others import sdpa
from experiments.speed import backward
from experiments.speed.peers import HEAD_DIMS, TOKENS, WIDTH

HEADS, HEAD_DIM = 16, 128
#: Length: the rungs that run there.
LENGTHS = {4096: tuple(ca.VARIANTS), 16384: ("fa_tc", "fa_int8")}


def grid(args: argparse.Namespace) -> list[tuple[Problem, list[Cell]]]:
    """Return the problems and what runs on each."""
    found = []
    for length, rungs in LENGTHS.items():
        short = recording.quick_length(args, length)
        batch, heads = (1, 1) if args.quick else (TOKENS // length, HEADS)
        problem = Problem(batch, heads, short, HEAD_DIM, seed=args.seed)
        others = [] if args.quick else sdpa(problem)
        found.append((problem, [*(rung(name, problem) for name in rungs), *others]))
    return found


def counted(problem: Problem, cell: Cell, inputs: Any, seconds: float) -> dict[str, Any]:
    """Return what a device uses for a cell, over one window."""
    import cupy

    sets = [cell.prepare(*operands) for operands in timing.rotated(inputs)]
    call = rotating(cell.run, sets)
    (samples,) = timing.time_interleaved({cell.name: call}, rounds=3).values()
    typical = timing.median(samples).median
    with nvml.monitor(cupy.cuda.Device().pci_bus_id) as monitor:
        if monitor is None:
            raise UnsupportedError("NVML is missing: nobody counts the energy of this device")
        window = energy.window(energy.repeated(call, typical), monitor, seconds)
    return asdict(window) | {
        "watts": window.watts,
        "joules_per_call": window.joules_per_call,
        "seconds_per_call": window.seconds / window.calls,
        "gflops_per_watt": problem.operations / window.joules_per_call / 1e9,
        "clocks": device.clocks(),
    }


def at_rest(seconds: float) -> dict[str, Any]:
    """Return what the device uses with a context and nothing to do."""
    import cupy

    cupy.cuda.Device().synchronize()
    with nvml.monitor(cupy.cuda.Device().pci_bus_id) as monitor:
        if monitor is None:
            raise UnsupportedError("NVML is missing: nobody counts the energy of this device")
        window = energy.window(energy.idle, monitor, seconds)
    return asdict(window) | {"watts": window.watts, "clocks": device.clocks()}


def above_idle(row: Mapping[str, Any], idle_watts: float) -> float:
    """Return the joules of a call that the device at rest would not have used.

    Examples
    --------
    >>> above_idle({"watts": 500.0, "seconds_per_call": 0.01}, 100.0)
    4.0
    """
    return float((row["watts"] - idle_watts) * row["seconds_per_call"])


def run(args: argparse.Namespace) -> int:
    """Judge every cell, count its energy, keep the record and print the table."""
    joules.check_seconds(args.seconds)
    if args.backward:
        return run_backward(args)
    content: dict[str, Any] = {"window_seconds": args.seconds, "problems": []}
    if not args.quick:
        content["idle"] = at_rest(args.seconds)
    for problem, cells in grid(args):
        inputs = problem.draw(on_device=not args.quick)
        found = judge_problem(problem, cells, inputs)
        content["problems"].append(found)
        for cell, row in zip(cells, found["rows"], strict=True):
            if not args.quick and row["judgement"] is not None and row["judgement"]["j2"] <= 1:
                row |= counted(problem, cell, inputs, args.seconds)
                row["joules_above_idle"] = above_idle(row, content["idle"]["watts"])
            record = recording.keep(args, "energy", "mirror" if args.quick else "cuda", content)
    for found in record["problems"]:
        print(f"\n{found['problem']['name']}")
        output.print_table(
            ["", "J2", "J a call", "above idle", "W", "GFLOP/s per W", "SM MHz"],
            [line(row) for row in found["rows"]],
        )
    return 0 if recording.passed(record) else 1


def backward_problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs of the gradients: one long sequence by head_dim, and Wan's."""
    length = recording.quick_length(args, TOKENS)
    width = 256 if args.quick else WIDTH
    found = [
        Problem(1, width // head_dim, length, head_dim, causal, "bfloat16", seed=args.seed)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
    ]
    for wan in (recording.quick_length(args, n) for n in backward.WAN_LENGTHS):
        heads = 1 if args.quick else backward.WAN_HEADS
        found.append(Problem(1, heads, wan, backward.WAN_DIM, dtype="bfloat16", seed=args.seed))
    return found


def run_backward(args: argparse.Namespace) -> int:
    """Count the energy of backward passes in turns; keep the record after each problem."""
    content: dict[str, Any] = {
        "window_seconds": args.seconds, "turns": args.turns, "rounds": args.rounds, "problems": []
    }  # fmt: skip
    if not args.quick:
        content["idle"] = at_rest(args.seconds)
    args.joules = True
    record: dict[str, Any] = {"problems": []}
    for problem in backward_problems(args):
        if args.only not in problem.name:
            continue
        content["problems"].append(backward.measure(problem, args))
        where = "mirror" if args.quick else "cuda"
        record = recording.keep(args, "energy_backward", where, content)
    backward.report(record, None)
    rows = (row for found in record["problems"] for row in found["rows"])
    return 0 if all(row["ok"] for row in rows if not row["peer"]) else 1


def line(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one row of the table."""
    j2 = "-" if row["judgement"] is None else words.format_ratio(row["judgement"]["j2"])
    if "watts" not in row:
        return [row["variant"], j2, *["-"] * 5]
    return [
        row["variant"], j2, f"{row['joules_per_call']:.4g}", f"{row['joules_above_idle']:.4g}",
        f"{row['watts']:.0f}", f"{row['gflops_per_watt']:.0f}",
        f"{row['clocks'].get('sm_clock_mhz', 0):.0f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=joules.LEAST_SECONDS, help="of each window"
    )
    parser.add_argument("--backward", action="store_true", help="of the gradients")
    parser.add_argument("--turns", type=int, default=3, help="windows of each backward pass")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="gradients of problems whose name holds it"
    )
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
