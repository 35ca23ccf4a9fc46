"""Write the transformer of Kandinsky 5 with INT8 weights. Its text and visual blocks are found by
their names, and its attention settings (NABLA, STA) are recorded. Only the transformer of a
pipeline's folder is read, so VAE and text encoders stay unchanged."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from cupyattn.checkpoints.benchmark import HEADER, TOKENS, benchmark_block, total
from cupyattn.checkpoints.kandinsky import KandinskyModel, open_kandinsky, optimize_kandinsky
from cupyattn.checkpoints.shards import Source
from cupyattn.cli import flags, output
from cupyattn.cli.analyze import add_limits, limits
from cupyattn.cli.convert import add_export, add_writing, report
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--model-path", metavar="PATH", required=True, help="transformer, or folder of a pipeline"
    )
    parser.add_argument("--config-path", metavar="FILE", help="its YAML, or JSON of diffusers")
    parser.add_argument(
        "--output-path", metavar="DIR", required=True, help="a new or empty folder"
    )
    parser.add_argument(
        "--benchmark", action="store_true",
        help="then time the products of one visual block in 16 bits and as INT8, on a device",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"of the video ({TOKENS})"
    )
    add_export(parser)
    add_writing(parser)
    add_limits(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.benchmark and (missing := device.device_missing()):
        raise UnsupportedError(f"--benchmark needs a CUDA device ({missing}): leave it out")
    flags.check_whole(args, "tokens", "max_shard_bytes")
    config = limits(args)
    source, found = open_kandinsky(args.model_path, args.config_path)
    output.say(found)
    steps = (1 if args.dry_run else 3) * len(source.tensors)
    with output.progress("converting", steps) as advance:
        _, done = optimize_kandinsky(
            args.model_path, args.output_path, args.config_path, config, export=args.export,
            max_shard_bytes=args.max_shard_bytes, dry_run=args.dry_run, advance=advance,
        )  # fmt: skip
    report(done, args.json)
    if not args.benchmark or done.analysis is None:
        return 0
    return _benchmark(source, found, args, done.analysis.config.strategy)


def _benchmark(
    source: Source, found: KandinskyModel, args: argparse.Namespace, strategy: str
) -> int:
    """Print times and errors of a block and add them to the record; fail if a bound is missed."""
    import cupy

    parts = benchmark_block(source, found, cupy, tokens=args.tokens, strategy=strategy)
    output.say()
    output.print_table(HEADER, [part.cells for part in parts])
    output.say(total(parts))
    if args.json:
        record = json.loads(Path(args.json).read_text(encoding="utf-8"))
        output.write_json(args.json, {**record, "benchmark": [asdict(part) for part in parts]})
    return 0 if all(part.ok for part in parts) else 1
