"""Write the transformer of Kandinsky 5 with INT8 weights. Its text and visual blocks are found by
their names, attention's settings (NABLA, STA) read and recorded; of a pipeline's folder nothing but
the transformer is read, so that VAE and text encoders stay as they are."""

from __future__ import annotations

import argparse

from cupyattn.checkpoints import open_kandinsky, optimize_kandinsky
from cupyattn.cli import output
from cupyattn.cli.analyze import add_limits, limits
from cupyattn.cli.convert import add_export, add_writing, report


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--model-path", metavar="PATH", required=True, help="transformer, or folder of a pipeline"
    )
    parser.add_argument("--config-path", metavar="FILE", help="its YAML, or JSON of diffusers")
    parser.add_argument("--output-path", metavar="DIR", required=True, help="a new folder")
    add_export(parser)
    add_writing(parser)
    add_limits(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    source, found = open_kandinsky(args.model_path, args.config_path)
    print(found)
    steps = (1 if args.dry_run else 3) * len(source.tensors)
    with output.progress("converting", steps) as advance:
        _, done = optimize_kandinsky(
            args.model_path, args.output_path, args.config_path, limits(args), export=args.export,
            max_shard_bytes=args.max_shard_bytes, dry_run=args.dry_run, advance=advance,
        )  # fmt: skip
    report(done)
    return 0
