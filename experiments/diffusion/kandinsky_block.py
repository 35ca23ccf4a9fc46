"""What does a block of Kandinsky 5 take in 16 bits, and what as INT8?

Varies       Lite and Pro: their sizes
Holds fixed  N(0, 0.02) weights, N(0, 1) tokens, bfloat16, dense attention
Measures     the output of `cupyattn kandinsky --benchmark` for each part of the first visual block;
             it has time in turns, memory, error against float64, and whether the part holds its
             bound
Beside       cuBLAS and the fastest rung in bfloat16
Run          python -m experiments.diffusion.kandinsky_block [--tokens N] [--quick] [--json FILE]
             [--update-docs]

``--update-docs`` writes the table of docs/CHECKPOINTS.md: from the record alone with ``--stored``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.checkpoints import open_kandinsky
from cupyattn.checkpoints.benchmark import HEADER, TEXT_TOKENS, TOKENS, Part, benchmark_block, total
from cupyattn.cli import output
from experiments._harness import recording
from experiments.diffusion import checkpoints

BEGIN, END = "<!-- block: begin -->", "<!-- block: end -->"
#: model_dim, ff_dim, time_dim, head_dim.
SIZES = {"Lite": checkpoints.SIZES, "Pro": (4096, 16_384, 1024, 128)}
QUICK_SIZES = {"small": checkpoints.SMALL_SIZES}
QUICK_TOKENS = 150


def measure(
    name: str, sizes: tuple[int, int, int, int], args: argparse.Namespace
) -> dict[str, Any]:
    """Make a model of one block of each kind, and let the benchmark run on it."""
    tensors = dict(checkpoints.block("text", 0, sizes)) | dict(
        checkpoints.block("visual", 0, sizes)
    )
    xp: Any = np
    if not args.quick:
        import cupy as xp
    tokens = min(args.tokens, QUICK_TOKENS) if args.quick else args.tokens
    with tempfile.TemporaryDirectory(prefix="kandinsky-") as folder:
        checkpoints.make(Path(folder) / "model", tensors, args.seed)
        source, model = open_kandinsky(Path(folder) / "model")
        parts = benchmark_block(
            source, model, xp, tokens=tokens, rounds=args.rounds, seed=args.seed
        )
    return {
        "name": name, "sizes": sizes, "tokens": tokens, "text_tokens": TEXT_TOKENS,
        "parts": [asdict(part) for part in parts],
    }  # fmt: skip


def parts_of(row: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a block as `benchmark_block` does, of a row of the record."""
    return [Part(**part) for part in row["parts"]]


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/CHECKPOINTS.md says was measured."""
    environment = record["environment"]
    lines = []
    for row in record["rows"]:
        parts = parts_of(row)
        lines += [
            f"One visual block of the sizes of Kandinsky 5 {row['name']}, {row['tokens']:,} "
            f"tokens, {row['text_tokens']} of text; `{recording.command_now(record)}` on "
            f"{environment['device']['name']}, revision {environment['revision'][:10]}:",
            "",
            *recording.markdown(HEADER, [part.cells for part in parts]),
            "",
            f"{total(parts)[0].upper()}{total(parts)[1:]}.",
            "",
        ]
    return "\n".join(lines[:-1])


def update_page(record: Mapping[str, Any], path: Path = checkpoints.PAGE) -> None:
    """Write what was measured between the marks of docs/CHECKPOINTS.md."""
    recording.replace_between(path, BEGIN, END, section(record))


def run(args: argparse.Namespace) -> int:
    """Measure every size, print the tables, write the record."""
    recording.check_rounds(args)
    rows = []
    for name, sizes in (QUICK_SIZES if args.quick else SIZES).items():
        rows.append(measure(name, sizes, args))
        parts = parts_of(rows[-1])
        print(f"Kandinsky 5 {name}, {rows[-1]['tokens']:,} tokens")
        output.print_table(HEADER, [part.cells for part in parts])
        print(f"{total(parts)}\n")
    backend = "mirror" if args.quick else "cuda"
    record = recording.keep(args, "kandinsky_block", backend, {"rows": rows})
    if args.update_docs and not args.quick:
        update_page(record)
    return 0 if all(part.ok for row in rows for part in parts_of(row)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="of the video")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        update_page(recording.stored("kandinsky_block"))
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
