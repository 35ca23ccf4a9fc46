"""Predict the effect of INT8 on a model: role, outliers and error of each weight, its recommended
type with the reason, and the saved memory. Reads safetensors (a file, a folder, an index) one
tensor at a time. Pickled files are read by torch's weights-only loader, which runs no code."""

from __future__ import annotations

import argparse
import dataclasses

from cupyattn.checkpoints.activations import read_activations
from cupyattn.checkpoints.analysis import analyze
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.cli import output
from cupyattn.files import check_folder
from cupyattn.measure.words import printable
from cupyattn.quant.blocks import AUTO, FALLBACK_DTYPES, STRATEGIES, Int8Config
from cupyattn.quant.rotation import ROTATIONS

#: Value of the option for no rotation.
_NOT_ROTATED = "none"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a file, a folder, or an .index.json")
    parser.add_argument(
        "--output",
        "--json",
        metavar="FILE",
        help="write everything as JSON, for convert --analysis",
    )
    parser.add_argument(
        "--activations", metavar="FILE",
        help="a recording, or safetensors of the layers' inputs, by name: compares scales by "
        "their errors",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw histograms (.png, .svg or .pdf)")
    parser.add_argument("--tensors", action="store_true", help="a row for each tensor")
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that `limits` reads."""
    rules = parser.add_argument_group("which linear layers become INT8")
    rules.add_argument(
        "--max-outliers", type=float, metavar="FRACTION",
        help="largest share of outliers, from 0 to 1 (0.01)",
    )  # fmt: skip
    rules.add_argument(
        "--min-elements", type=int, metavar="N", help="least number of elements of a weight (4096)"
    )
    rules.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="least signal to quantisation noise (20)"
    )
    rules.add_argument(
        "--block-size", type=int, metavar="N", help="rows and columns that share a scale: 128"
    )
    rules.add_argument(
        "--strategy", choices=(AUTO, *STRATEGIES),
        help="groups that share a scale: blocks or rows (auto: by activations or family, or "
        "else block)",
    )
    rules.add_argument(
        "--rotate", choices=(AUTO, _NOT_ROTATED, *ROTATIONS[1:]),
        help="rotate weights with scales of rows, against outlier channels (auto: if activations "
        "need it)",
    )  # fmt: skip
    rules.add_argument(
        "--fallback-dtype", choices=FALLBACK_DTYPES, help="of other float32 weights (bf16)"
    )
    rules.add_argument(
        "--fp32-pattern", action="append", metavar="PATTERN", dest="fp32_patterns",
        help="leave weights with such names unchanged, e.g. 'blocks.0.*'",
    )  # fmt: skip


def limits(args: argparse.Namespace, config: Int8Config | None = None) -> Int8Config:
    """Return a configuration, by default the standard one, with the changes of the options."""
    given = {
        "max_outlier_ratio": args.max_outliers,
        "min_elements_for_int8": args.min_elements,
        "min_sqnr_db": args.min_sqnr,
        "block_size": args.block_size,
        "strategy": args.strategy,
        "fallback_dtype": args.fallback_dtype,
        "fp32_patterns": args.fp32_patterns,
    }
    known = dataclasses.asdict(config or Int8Config())
    known |= {name: x for name, x in given.items() if x is not None}
    if args.rotate is not None:
        known["rotate"] = None if args.rotate == _NOT_ROTATED else args.rotate
    return Int8Config(**known)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.output:
        check_folder("--output", args.output)
    if args.plot:
        from cupyattn.cli import plot

        plot.check(args.plot)
    config = limits(args)
    source = open_checkpoint(args.model)
    samples = read_activations(args.activations, source) if args.activations else {}
    with output.progress("analyzing", len(source.tensors)) as advance:
        found = analyze(source, config, activations=samples, advance=advance)
    output.print_table(found.header, found.cells(every=args.tensors))
    output.say(f"\n{found.summary()}")
    if args.output:
        output.write_json(args.output, found.to_dict())
    if args.plot:
        plot.draw_analysis(found, args.plot)
    for t in found.nonfinite:
        name = printable(t.name)
        output.say(f"FAILED: {name} has {t.nonfinite} elements that are NaN or infinite")
    return 1 if found.nonfinite else 0
