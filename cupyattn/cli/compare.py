"""Compare two records of one experiment. It prints the time of each cell in both, and the speed of
the second relative to the first with its 95 % interval. It also prints differences of devices,
libraries and revisions. The runs did not take turns, so the interval does not include drift
between them. If the records have no times, their errors are compared: J2, J3 and the relative
error."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import record_errors, records
from cupyattn.measure.words import counted, format_seconds

Record = Mapping[str, Any]


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
    differing = records.differences(first, second)
    timed = bool(records.cells(first) or records.cells(second))
    compared = _compare_times if timed else _compare_errors
    result = compared(first, second, args.margin)
    if differing:
        output.say("\nWhat differs:")
        output.print_table(["", "A", "B"], [[key, *both] for key, both in differing.items()])
        if "device" in differing:
            what = "speeds" if timed else "errors"
            output.say(f"\nThe devices differ: the {what} compare them, not the code alone.")
    else:
        output.say("\nDevice, libraries and revision are the same.")
    if args.json:
        output.write_json(
            args.json,
            {
                "first": str(args.first), "second": str(args.second), "margin": args.margin,
                **result, "differences": differing,
            },
        )  # fmt: skip
    return 0


def _compare_times(first: Record, second: Record, margin: float) -> dict[str, Any]:
    """Print times side by side; return their entries for the record of the comparison."""
    found = records.compare(first, second, margin)
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
    output.say(f"\n{_counted(counts)}; geometric mean of the speeds {mean:.3f}")
    _print_alone(records.cells(first).keys(), records.cells(second).keys())
    return {"geometric_mean": mean, "cells": [one.to_dict() for one in found]}


def _compare_errors(first: Record, second: Record, margin: float) -> dict[str, Any]:
    """Print errors side by side; return their entries for the record of the comparison."""
    records.check_same_experiment(first, second)
    found = record_errors.compare(first, second, margin)
    if not found:
        has = [next(iter(record_errors.judged(one)), "none") for one in (first, second)]
        raise ValueError(
            "the records have no timed cell in common and no judged one, whose first are "
            f"{has[0]!r:.60} and {has[1]!r:.60}: write both with --json of one command, on one "
            "input"
        )
    output.say("The records hold no times: errors are compared.\n")
    header = ["cell", "J2 of A", "of B", "J3 of A", "of B", "rel. error of A", "of B", "B is"]
    forms = {"j2": "{:.3f}", "j3": "{:.3f}", "relative_error": "{:.2e}"}
    output.print_table(
        header,
        [
            [
                one.name,
                *(
                    form.format(side[key]) if key in side else ""
                    for key, form in forms.items()
                    for side in (one.first, one.second)
                ),
                one.verdict,
            ]
            for one in found
        ],
    )
    counts = {name: sum(one.verdict == name for one in found) for name in record_errors.VERDICTS}
    output.say(f"\n{_counted(counts)}")
    _print_alone(record_errors.judged(first).keys(), record_errors.judged(second).keys())
    return {"cells": [one.to_dict() for one in found]}


def _counted(counts: Mapping[str, int]) -> str:
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{counted(sum(counts.values()), 'cell')}: {said}"


def _print_alone(first: Set[str], second: Set[str]) -> None:
    for name, count in (("A", len(first - second)), ("B", len(second - first))):
        if count:
            output.say(f"{counted(count, 'cell')} in {name} alone")
