"""Time the linear layers of a checkpoint in 16 bits and as INT8. One layer of each shape runs. It
must satisfy its bound before it is timed, and counts as often as the model has its shape. Layers
are chosen by name and size, as convert does before it examines outliers. Without a device, only
memory and errors are printed."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict
from typing import Any

import numpy as np

from cupyattn.checkpoints.benchmark import HEADER, JUDGED_ROWS, TOKENS, benchmark_layers, total
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.cli import flags, output
from cupyattn.measure import device
from cupyattn.quant.blocks import STRATEGIES, Int8Config


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a file, a folder, or an .index.json")
    parser.add_argument(
        "--tokens", type=int, metavar="N",
        help=f"rows that a layer gets ({TOKENS}; {JUDGED_ROWS} without a device)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", default=15, help="samples (15)")
    parser.add_argument(
        "--min-elements", type=int, metavar="N", default=4096,
        help="least number of elements of a weight (4096)",
    )  # fmt: skip
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default="block",
        help="groups that share a scale: blocks or rows (block)",
    )  # fmt: skip
    parser.add_argument(
        "--fp32-pattern", action="append", metavar="PATTERN", dest="fp32_patterns", default=[],
        help="leave out weights with such names, e.g. 'blocks.0.*'",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write what was measured")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "tokens", "rounds")
    config = Int8Config(
        min_elements_for_int8=args.min_elements, strategy=args.strategy,
        fp32_patterns=args.fp32_patterns,
    )  # fmt: skip
    source = open_checkpoint(args.model)
    missing = device.device_missing()
    xp: Any = np
    if missing:
        output.say(f"no times, since there is no device: {missing}")
    else:
        xp = importlib.import_module("cupy")
    tokens = args.tokens or (JUDGED_ROWS if missing else TOKENS)
    parts = benchmark_layers(source, config, xp, tokens=tokens, rounds=args.rounds)
    output.print_table(HEADER, [part.cells for part in parts])
    output.say(total(parts, "these layers"))
    if args.json:
        found = {"environment": device.environment(), "tokens": tokens}
        output.write_json(args.json, {**found, "layers": [asdict(part) for part in parts]})
    return 0 if all(part.ok for part in parts) else 1
