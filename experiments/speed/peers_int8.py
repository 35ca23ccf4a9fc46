"""How far is fa_int8 from the fastest 8-bit attention there is, and from 16 bits?

Varies       shape: length in {512 ... 16384} at head_dim 64, 128 and 256, causal from 2,048 on;
             length up to 2,048 at head_dim 96; 4,096 queries of 77 keys; shapes of diffusion
             models; with --accuracy the distribution
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, where the shape is not a model's;
             float16, N(0, 1)
Measures     J2 of ours, relative error of all; time with quantising and with codes given; in the
             same rounds, with 95 % intervals, ratios to the fastest 8-bit library with its
             quantising, to cuDNN's FP8 kernel and to fa_tc
Timing       in CUDA graphs, where the host would be slower than the device: below 10^12 operations
Beside       SageAttention 1; SageAttention 2 where CUPYATTN_SAGE2 names its package, as its users
             call it and codes given; FlashAttention-3 and cuDNN with FP8 operands: codes given,
             behind a casting pass of ours (experiments/_harness/cast_fp8.py) and behind torch's
             operators
Expect       balanced with quantising at least 1.0 of the fastest 8-bit library from 4,096 on and
             1.15 of fa_tc from 8,192 on; aggressive at least 1.0 of cuDNN's kernel, 1.05 with
             quantising of the fastest library
Run          python -m experiments.speed.peers_int8 [--quick] [--json FILE] [--accuracy]
             [--cells 128:4096 64:8192c 64:4096x77 ...] [--models NAME ...]
             [--stored [--merge FILE ...]]

A whole run may take longer than a machine is available. ``--cells`` and ``--models`` take parts of
it, ``--json`` writes them elsewhere, and ``--merge`` puts them into the committed record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cupyattn.measure.words import align
from cupyattn.problem import choose
from experiments._harness import merging, recording
from experiments._harness.cells import Cell, Problem, rung
from experiments._harness.others import fastest, format_comparison, ratio
from experiments._harness.others8 import (
    BY_TORCH,
    CUDNN_FP8,
    FLASH_3_FP8,
    GIVEN,
    SAGE,
    SAGE_2,
    eight_bit,
)
from experiments.diffusion.diffusion_shapes import SHAPES
from experiments.tuning.race import parse_cell

CELLS = (
    *(f"128:{length}" for length in (512, 1024, 2048, 4096, 8192, 16_384)),
    *(f"128:{length}c" for length in (2048, 4096, 8192, 16_384)),
    *(f"{d}:{length}" for d in (64, 256) for length in (512, 1024, 2048, 4096, 8192, 16_384)),
    *(f"96:{length}" for length in (512, 1024, 2048)),
    "64:4096x77", "128:4096x77",
)  # fmt: skip
#: Distributions on which errors are compared.
DISTRIBUTIONS = ("normal", "outlier", "key-bias", "value-bias", "tripled")
ACCURACY_LENGTHS = (4096, 16_384)
FULL, BALANCED, AGGRESSIVE = "fa_tc", "fa_int8 balanced", "fa_int8 aggressive"
#: 8-bit P and V as accurate as they come: P by the maximum of its tile, scales of V by tile.
BY_TILE = "fa_int8 by tile"
QUANT = {
    BALANCED: choose.QUANT["balanced"],
    BY_TILE: replace(choose.QUANT["aggressive"], granularity_v="block"),
    AGGRESSIVE: choose.QUANT["aggressive"],
}
#: Problems of fewer operations are timed in CUDA graphs: done within 2 ms, sooner than some
#: library's Python.
GRAPH_OPERATIONS = 1e12
#: Rivals whose times include quantising.
PEERS = (
    SAGE, SAGE_2, FLASH_3_FP8, CUDNN_FP8, f"{FLASH_3_FP8}{BY_TORCH}", f"{CUDNN_FP8}{BY_TORCH}",
)  # fmt: skip
#: Comparisons: the name of a ratio, the names of its numerators, and of its denominator.
COMPARISONS = {
    "balanced / 8-bit": (PEERS, BALANCED),
    "balanced / fa_tc": ((FULL,), BALANCED),
    "balanced kernel / fa_tc": ((FULL,), f"{BALANCED}{GIVEN}"),
    "aggressive kernel / cuDNN FP8": ((f"{CUDNN_FP8}{GIVEN}",), f"{AGGRESSIVE}{GIVEN}"),
    "aggressive / 8-bit": (PEERS, AGGRESSIVE),
    "aggressive / fa_tc": ((FULL,), AGGRESSIVE),
}


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs."""
    if args.accuracy:
        lengths = sorted({recording.quick_length(args, length) for length in ACCURACY_LENGTHS})
        heads = 1 if args.quick else 8
        return [
            Problem(1, heads, length, 128, distribution=name, seed=args.seed)
            for name in DISTRIBUTIONS
            for length in lengths
        ]
    if args.quick:
        return [Problem(1, 1, recording.quick_length(args, 4096), 64, seed=args.seed)]
    models = [
        Problem(batch, heads, len_q, d, seed=args.seed, length_kv=None if kv == len_q else kv)
        for name, batch, heads, len_q, kv, d in SHAPES
        if name in args.models
    ]
    return [parse_cell(text, args.seed) for text in args.cells] + models


def cells(problem: Problem, *, on_device: bool) -> list[Cell]:
    """Return our rungs, and on a device the other libraries."""
    found = [rung(FULL, problem, name=FULL)]
    for name, quant in QUANT.items():
        for given in (False, True):
            found.append(
                rung(
                    "fa_int8", problem, codes_given=given, quant=quant, name=name
                )
            )  # fmt: skip
    return found + (eight_bit(problem) if on_device else [])


def compared(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare on each problem of a record what `COMPARISONS` names.

    Returns
    -------
    list of dict
        JSON-ready: problem, relative errors by row, and by comparison the rival and the ratio
        (median, low, high; above 1 ours is faster; None where either has no time).
    """
    result = []
    for one in found:
        rows = {row["variant"]: row for row in one["rows"]}
        ratios = {}
        for name, (rivals, ours) in COMPARISONS.items():
            rival = fastest(rows, rivals)
            value = ratio(rival, rows.get(ours))
            ratios[name] = {"rival": rival["variant"] if rival else None, "ratio": value}
        errors = {
            name: row["judgement"]["relative_error"]
            for name, row in rows.items()
            if row["judgement"] is not None
        }
        result.append({"problem": one["problem"]["name"], "ratios": ratios, "errors": errors})
    return result


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """Return as a table what `compared` found."""
    rows = [["speed, 95 %", *COMPARISONS]]
    for one in found:
        values = [one["ratios"][name]["ratio"] for name in COMPARISONS]
        if any(values):
            rows.append([one["problem"], *map(format_comparison, values)])
    return align(rows) if len(rows) > 1 else ""


def errors(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the relative errors of every row as a table."""
    names = list(dict.fromkeys(name for one in found for name in one["errors"]))
    rows = [["relative error", *names]]
    for one in found:
        known = one["errors"]
        rows.append([one["problem"], *(f"{known[n]:.1e}" if n in known else "-" for n in names)])
    return align(rows)


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print what follows from it."""
    grid = [(p, cells(p, on_device=not args.quick)) for p in problems(args)]
    record = recording.run_grid(
        args, "accuracy_int8" if args.accuracy else "peers_int8", grid, baseline=FULL,
        conclude=lambda found: {"compared": compared(found)},
        in_graphs=lambda problem: problem.operations < GRAPH_OPERATIONS,
    )  # fmt: skip
    print(f"\n{summary(record['compared'])}\n\n{errors(record['compared'])}")
    return 0 if recording.passed(record) else 1


def merged(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the problems of another that it lacks, compared again."""
    whole = merging.with_missing(record, part)
    return {**whole, "compared": compared(whole["problems"])}


def again(args: argparse.Namespace) -> int:
    """Report on the committed record; those in files are put into it first."""
    name = "accuracy_int8" if args.accuracy else "peers_int8"
    record = merging.record_with(name, args.merge, merged)
    print(f"{summary(record['compared'])}\n\n{errors(record['compared'])}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument(
        "--cells", nargs="+", default=list(CELLS), metavar="HEAD_DIM:LENGTH[c|xKEYS]"
    )
    parser.add_argument(
        "--models", nargs="*", default=[name for name, *_ in SHAPES], metavar="NAME",
        help="shapes of diffusion models",
    )  # fmt: skip
    parser.add_argument(
        "--accuracy", action="store_true", help="errors over distributions, one batch of 8 heads"
    )
    recording.add_stored_argument(parser)
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE",
        help="with --stored: records of what that one lacks, put into it first",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return recording.guarded(again, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
