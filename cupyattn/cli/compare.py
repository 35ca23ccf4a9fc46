"""Two records of one experiment side by side: the time of each cell in both, how many times as fast
the second is with its 95 % interval, and what differs between their devices, libraries and
revisions. The runs did not take turns, so drift between them is not in the interval."""

from __future__ import annotations

import argparse
from pathlib import Path

from cupyattn.cli import output
from cupyattn.measure import records
from cupyattn.measure.words import format_seconds


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="A.json", type=Path, help="the record to compare with")
    parser.add_argument("second", metavar="B.json", type=Path, help="the record that is compared")
    parser.add_argument(
        "--margin", type=float, metavar="X", default=0.02,
        help="speeds this near are the same (default 0.02)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the comparison")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if not 0 <= args.margin < 1:
        raise ValueError(f"--margin must be at least 0 and below 1, got {args.margin}")
    first, second = (records.read(path) for path in (args.first, args.second))
    found = records.compare(first, second, args.margin)
    differing = records.differences(first, second)
    output.print_table(
        ["cell", "A", "B", "speed of B", "95 %", "B is"],
        [
            [
                one.name, format_seconds(one.first), format_seconds(one.second),
                f"{one.speed.median:.3f}", f"{one.speed.low:.3f} .. {one.speed.high:.3f}",
                one.verdict,
            ]
            for one in found
        ],
    )  # fmt: skip
    mean, counts = records.summary(found)
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"\n{len(found)} cells: {said}; geometric mean of the speeds {mean:.3f}")
    for name, one, other in (("A", first, second), ("B", second, first)):
        alone = len(records.cells(one).keys() - records.cells(other).keys())
        if alone:
            print(f"{alone} cells are in {name} alone")
    if differing:
        print("\nWhat differs:")
        output.print_table(["", "A", "B"], [[key, *both] for key, both in differing.items()])
        if "device" in differing:
            print("\nThe devices differ: the speeds compare them, not the code.")
    else:
        print("\nDevice, libraries and revision are the same.")
    if args.json:
        output.write_json(
            args.json,
            {
                "first": str(args.first), "second": str(args.second), "margin": args.margin,
                "geometric_mean": mean, "cells": [one.to_dict() for one in found],
                "differences": differing,
            },
        )  # fmt: skip
    return 0
