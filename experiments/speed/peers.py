"""How far is fa_tc from the fastest attention there is?

Varies       length in {512, 1024, 2048, 4096, 8192, 16384}; head_dim in {64, 128, 256}; causal or
             not
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, float16, N(0, 1)
Measures     J2, relative error; time, TFLOP/s; in the same rounds the ratio to cuDNN and, with its
             95 % interval, to the faster of cuDNN and FlashAttention-3
Beside       torch's scaled_dot_product_attention with its FlashAttention-2 and cuDNN backends;
             FlashAttention-3 where CUPYATTN_FA3 names its extension
Expect       a geometric mean of at least 1.05 of the faster rival, and no cell lost; a cell is lost
             if its whole interval is below 0.98
Run          python -m experiments.speed.peers [--quick] [--json FILE] [--head-dims N ...]
             [--plot FOLDER] [--stored]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.measure.words import align
from experiments._harness import plots, recording
from experiments._harness.cells import Cell, Problem, rung
from experiments._harness.others import (
    CUDNN,
    RIVALS,
    fastest,
    flash_attention_3,
    format_comparison,
    geometric_mean,
    ratio,
    sdpa,
)  # fmt: skip

TOKENS, WIDTH = 16_384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128, 256)
#: A cell is lost where its ratio is below this to the upper end of its interval.
LOST = 0.98


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs."""
    if args.quick:
        length = recording.quick_length(args, LENGTHS[0])
        return [
            Problem(1, 2, length, d, c, seed=args.seed)
            for d in args.head_dims
            for c in (False, True)
        ]
    return [
        Problem(
            max(1, TOKENS // length), WIDTH // head_dim, length, head_dim, causal, seed=args.seed
        )
        for head_dim in args.head_dims
        for causal in (False, True)
        for length in args.lengths
    ]


def cells(problem: Problem, *, on_device: bool) -> list[Cell]:
    """Return fa_tc, and on a device the other libraries."""
    found = [rung("fa_tc", problem)]
    return found + (sdpa(problem) + flash_attention_3(problem) if on_device else [])


def measure(
    args: argparse.Namespace,
    name: str,
    some: Sequence[Problem],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run fa_tc and the other libraries on problems, as `recording.run_grid` does.

    Returns
    -------
    dict
        The record; ``"against_rival"`` holds what `compared` finds.
    """
    grid = [(p, cells(p, on_device=not args.quick)) for p in some]
    baseline = CUDNN if any(cell.name == CUDNN for _, found in grid for cell in found) else None
    return recording.run_grid(
        args, name, grid, baseline=baseline, extra=extra,
        conclude=lambda found: {"against_rival": compared(found)},
    )  # fmt: skip


def compared(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare fa_tc with its faster rival on each problem of a record.

    Parameters
    ----------
    found : sequence of mapping
        The problems of a record, with the samples of every row.

    Returns
    -------
    dict
        JSON-ready. ``"cells"``: problem, head_dim, rival, ratio (median, low, high; above 1 fa_tc
        is faster; None where either has no time) and whether the cell is lost.
        ``"geometric_mean"``: of the ratios that there are, by head_dim and of all.
    """
    result = []
    for one in found:
        rows = {row["variant"]: row for row in one["rows"]}
        rival = fastest(rows, RIVALS)
        value = ratio(rival, rows["fa_tc"])
        result.append({
            "problem": one["problem"]["name"],
            "head_dim": one["problem"]["head_dim"],
            "rival": None if rival is None else rival["variant"],
            "ratio": value,
            "lost": value is not None and value[2] < LOST,
        })  # fmt: skip
    groups: dict[str, list[float]] = {}
    for cell in result:
        if cell["ratio"] is not None:
            groups.setdefault(f"head_dim {cell['head_dim']}", []).append(cell["ratio"][0])
    if groups:
        groups["all"] = [x for some in groups.values() for x in some]
    means = {name: geometric_mean(some) for name, some in groups.items()}
    return {"lost_below": LOST, "cells": result, "geometric_mean": means}


def summary(comparison: Mapping[str, Any], title: Callable[[str], str] = str) -> str:
    """Return as a table what `compared` found; nothing where nothing was timed.

    Parameters
    ----------
    comparison : mapping
    title : callable
        Returns what a problem is called in the table, given its name.
    """
    means = comparison["geometric_mean"]
    if not means:
        return ""
    rows = [["speed beside the faster rival", "rival", "ratio, 95 %", ""]]
    for cell in comparison["cells"]:
        remark = "lost" if cell["lost"] else "" if cell["ratio"] else "not timed"
        rival = cell["rival"] or "-"
        rows.append([title(cell["problem"]), rival, format_comparison(cell["ratio"]), remark])
    for name, value in means.items():
        rows.append([f"geometric mean, {name}", "", f"{value:.3f}", ""])
    found = [cell for cell in comparison["cells"] if cell["ratio"] is not None]
    lost = sum(cell["lost"] for cell in found)
    return f"{align(rows)}\n{lost} of {len(found)} cells lost (interval below {LOST})"


def report(args: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Print how fa_tc compares, and draw the record if that was asked for."""
    print(f"\n{summary(compared(record['problems']))}")
    if args.plot:
        for file in plots.draw_by_length(record, args.plot):
            print(f"wrote {file}")


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print how fa_tc compares."""
    if args.plot:
        plots.check(args.plot)
    record = measure(args, "peers", problems(args))
    report(args, record)
    return 0 if recording.passed(record) else 1


def again(args: argparse.Namespace) -> int:
    """Report on the committed record."""
    report(args, recording.stored("peers"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    parser.add_argument(
        "--plot", metavar="FOLDER", type=Path, help="draw peers_hdN.svg for every head_dim"
    )
    recording.add_stored_argument(parser)
    args = parser.parse_args(argv)
    return recording.guarded(again, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
