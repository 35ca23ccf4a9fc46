"""Run every rung and every choice of INT8 arithmetic, one at a time, on one input. It prints J2
and J3 (errors as shares of their bounds) and the relative error against float64. On a device it
also prints the time relative to fa_int8's default in the same rounds. The input is your file
(--qkv), random, or the included real data. NAME selects a part: rungs, granularity, offsets, pv,
bits, codes or diffusion."""

from __future__ import annotations

import argparse

from cupyattn.cli import flags, inputs, output
from cupyattn.diffusion import ablation
from cupyattn.measure import device


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "parts", nargs="*", metavar="NAME", help=f"{', '.join(ablation.PARTS)} (default: all)"
    )
    inputs.add_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=15, help="timed samples of each choice (15)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "rounds")
    for part in args.parts:
        if part not in ablation.PARTS:
            raise ValueError(f"NAME must be one of {', '.join(ablation.PARTS)}, got {part!r}")
    missing = device.device_missing()
    case = inputs.choose(args, large=not missing)
    if missing:
        output.say(f"No device was found: {missing}. The choices run on the mirror, without times.")
    else:
        case = case.on_device()
    points = len(ablation.points(args.parts or ablation.PARTS, case.q, case.k))
    with output.progress(case.name, points * (1 if missing else 1 + args.rounds)) as advance:
        found = ablation.ablate(
            case.q, case.k, case.v, args.parts, seed=args.seed, rounds=args.rounds,
            advance=advance, **inputs.call_options(args),
        )  # fmt: skip
    call = found.call
    output.say(
        f"\n{case.name}: batch {call.batch}, heads {call.heads}, length {call.len_q}"
        f"{'' if call.len_q == call.len_kv else f' x {call.len_kv}'}, head_dim {call.head_dim}, "
        f"{call.dtype}{', causal' if call.causal else ''}"
    )
    output.print_table(found.header, found.cells)
    output.say(f"\n{ablation.LEGEND}")
    if not found.ok:
        output.say("FAILED: a choice misses its bound (J2 or J3 > 1).")
    if args.json:
        record = found.to_dict()
        output.write_json(
            args.json,
            {
                "experiment": "ablate", "command": " ".join(["cupyattn", *args.arguments]),
                "backend": found.backend, "environment": device.environment(),
                "problems": [{**record, "problem": {"name": case.name, **record["problem"]}}],
            },
        )  # fmt: skip
    return 0 if found.ok else 1
