"""Convert an INT8 checkpoint to one that every loader reads, with the original names, shapes and
types, and dequantised weights. Reads the output of convert, and similar layouts of other
libraries."""

from __future__ import annotations

import argparse

from cupyattn.checkpoints.conversion import dequantize
from cupyattn.checkpoints.header import FLOATS
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.cli import flags, output
from cupyattn.cli.convert import add_writing, report


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="DIR", help="an INT8 checkpoint")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new or empty folder")
    parser.add_argument(
        "--dtype", choices=FLOATS.values(), help="of the weights (default: as before, or bfloat16)"
    )
    add_writing(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "max_shard_bytes")
    source = open_checkpoint(args.model)
    steps = 0 if args.dry_run else 2 * len(source.tensors)
    with output.progress("dequantizing", steps) as advance:
        done = dequantize(
            source, args.output, dtype=args.dtype, max_shard_bytes=args.max_shard_bytes,
            dry_run=args.dry_run, advance=advance,
        )  # fmt: skip
    report(done, args.json)
    return 0
