"""Run every rung on one input. It prints errors as shares of their bounds: J2 of the kernel, J3 of
quantisation. It also prints the relative L2 error against float64, and memory. On a device it also
prints time, TFLOP/s and share of the ceiling. Without a device it prints the errors of the mirror.
The kernels then run once in the interpreter, at a small size, to judge results and count
instructions and bytes."""

from __future__ import annotations

import argparse
from typing import Any

from cupyattn.cli import flags, inputs, output
from cupyattn.cli.inputs import Input
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels import ladder
from cupyattn.measure import device, rungs
from cupyattn.measure.rungs import Ladder


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="rungs (default: all)")
    inputs.add_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=15, help="timed samples of each rung (15)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    parser.add_argument("--plot", metavar="FILE", help="draw the table (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    missing = device.device_missing()
    without = device.compiler_missing() if missing else ""
    if args.plot:
        from cupyattn.cli import plot

        plot.check(args.plot)
    flags.check_whole(args, "rounds")
    chosen = [inputs.choose(args, large=not missing)]
    if inputs.is_default(args) and not missing:
        chosen.append(inputs.random(args, large=True))
    if missing:
        output.say(f"No device was found: {missing}.")
        output.say(
            "The rungs run on the mirror: NumPy, with the kernels' blocks and rounding points, so "
            "errors and bounds have the same meaning as on a device. Nothing is timed."
        )
        if without:
            output.say(f"The kernels are not interpreted: {without}.")
    else:
        facts = device.environment()["device"]
        output.say(f"{facts['name']}, compute capability {facts['capability'] / 10}")
    tables: list[tuple[Input, Ladder]] = []
    for case in chosen:
        case = case if missing else case.on_device()
        try:
            table = _measure(args, case, interpret=bool(missing) and not without)
        except KernelFault as fault:
            output.say(f"FINDING: {fault}")
            return 1
        tables.append((case, table))
        output.say(f"\n{describe(case, table)}")
        output.print_table(table.header, table.cells)
    output.say(f"\n{tables[0][1].legend}")
    ok = all(table.ok for _, table in tables)
    output.say(
        "Every rung holds its bounds." if ok else "FAILED: a rung misses its bound (J2 or J3 > 1)."
    )
    if args.json:
        records = [to_record(case, table) for case, table in tables]
        output.write_json(args.json, {"environment": device.environment(), "ladders": records})
    if args.plot:
        plot.draw_ladder([(describe(x, t), t.to_dict()["rungs"]) for x, t in tables], args.plot)
    return 0 if ok else 1


def _measure(args: argparse.Namespace, case: Input, *, interpret: bool) -> Ladder:
    names = args.variants or list(ladder.VARIANTS)
    on_device = type(case.q).__module__.startswith("cupy")
    steps = len(names) * (1 + interpret + (args.rounds if on_device else 0))
    with output.progress(case.name, steps) as advance:
        return rungs.ladder(
            case.q, case.k, case.v, variants=names, seed=args.seed, rounds=args.rounds,
            interpret=interpret, advance=advance, **inputs.call_options(args),
        )  # fmt: skip


def describe(case: Input, table: Ladder) -> str:
    """Return one line that describes the computation."""
    call = table.call
    heads = f"{call.heads}" if call.heads == call.heads_kv else f"{call.heads}/{call.heads_kv}"
    length = f"{call.len_q}" if call.len_q == call.len_kv else f"{call.len_q} x {call.len_kv}"
    rows = "all" if table.judged_rows == call.len_q else str(table.judged_rows)
    return (
        f"{case.name}: batch {call.batch}, heads {heads}, length {length}, head_dim "
        f"{call.head_dim}, {call.dtype}{', causal' if call.causal else ''}; "
        f"{rows} rows per head judged"
    )


def to_record(case: Input, table: Ladder) -> dict[str, Any]:
    """Return a JSON-ready record of one table."""
    return {"input": case.name, **table.to_dict()}
