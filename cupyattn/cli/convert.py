"""Write a model whose large linear layers have INT8 weights, in safetensors that other libraries
read. OUTPUT is a new or empty folder. The model appears in it only when it is complete and has been
read back. Until then the files are in OUTPUT.partial, and the same command continues after an
interruption."""

from __future__ import annotations

import argparse

from cupyattn.checkpoints.activations import read_activations
from cupyattn.checkpoints.analysis import Analysis, analyze
from cupyattn.checkpoints.conversion import Conversion, convert
from cupyattn.checkpoints.layout import SCALE_NAMES
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.checkpoints.writer import MAX_SHARD_BYTES
from cupyattn.cli import flags, output
from cupyattn.cli.analyze import add_limits, limits


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a file, a folder, or an .index.json")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new or empty folder")
    parser.add_argument(
        "--analysis", metavar="FILE",
        help="of the same model, from analyze --output: saves one pass over the weights",
    )  # fmt: skip
    parser.add_argument(
        "--activations", metavar="FILE",
        help="as for analyze: without --strategy, scales of channels are used, with rotation if "
        "needed, unless a layer has much larger errors with them",
    )  # fmt: skip
    add_export(parser)
    add_writing(parser)
    add_limits(parser)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a layout."""
    parser.add_argument(
        "--export", choices=SCALE_NAMES, default="compressed-tensors", help="whose names and config"
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Add the options that convert and dequantize share."""
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, metavar="N",
        help="largest sum of tensors in a file (5000000000)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the planned files")
    parser.add_argument("--json", metavar="FILE", help="write the list of files, with reasons")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "max_shard_bytes")
    known = Analysis.load(args.analysis) if args.analysis else None
    config = limits(args, known.config if known else None)
    source = open_checkpoint(args.model)
    steps = (0 if known else 1) + (0 if args.dry_run else 2)
    with output.progress("converting", steps * len(source.tensors)) as advance:
        if args.activations:
            if known:
                raise ValueError(
                    "--analysis and --activations exclude each other: give --activations to "
                    "analyze, or leave --analysis out"
                )
            samples = read_activations(args.activations, source)
            known = analyze(source, config, activations=samples, advance=advance)
        done = convert(
            source, args.output, config, analysis=known, export=args.export,
            max_shard_bytes=args.max_shard_bytes, dry_run=args.dry_run, advance=advance,
        )  # fmt: skip
    report(done, args.json)
    return 0


def report(done: Conversion, json_file: str | None) -> None:
    """Print the written files, or the complete plan; write everything to a file if one is named."""
    if done.analysis is not None:
        if not done.written:
            output.print_table(done.analysis.header, done.analysis.cells())
            output.say()
        output.say(done.analysis.summary())
    output.say(done.summary())
    if json_file:
        output.write_json(json_file, done.to_dict())
