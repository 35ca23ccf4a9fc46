"""``cupyattn verify`` for a kernel in a file with a description of its launch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyattn import distributions
from cupyattn.cli import device_launch, output, own_launch
from cupyattn.interpret.findings import KernelFault
from cupyattn.measure import device
from cupyattn.measure import words as measure_words


def run(args: argparse.Namespace, description: Path) -> int:
    """Judge the kernel on every distribution of q, k and v; return the exit status."""
    path, missing = Path(args.variant), device.device_missing()
    given = own_launch.read(description)
    judged = own_launch.judged_table(description, given)
    q, k = (given.arrays[judged[name]] for name in "qk")
    where = f"in the interpreter, as {missing}"
    output.say(
        f"{path}: {given.entry}, q {q.shape}, k {k.shape}, {q.dtype}, "
        f"{where if missing else 'on the device'}.\n"
    )
    names = [args.distribution] if args.distribution else list(distributions.NAMES)
    cells = []
    with output.progress("verifying", len(names)) as advance:
        for name in names:
            cells.append(_cell(path, description, judged, name, args.seed, bool(missing)))
            advance(name)
    rows = [
        (c["distribution"], _format(c["j2"]), _format(c["lse"]), c["at"], _verdict(c))
        for c in cells
    ]
    output.print_table(("distribution", "J2", "of lse", "largest at", "verdict"), rows)
    failed = [cell for cell in cells if not cell["ok"]]
    for cell in failed:
        output.say(f"\nFAILED: {cell['distribution']}: {cell['finding'] or cell['report']}")
    if args.json:
        record = {"environment": device.environment(), "seed": args.seed, "cells": cells}
        output.write_json(args.json, {"file": str(path), "entry": given.entry, **record})
    output.say(
        f"\nverify: {f'FAILED, {len(failed)} of ' if failed else 'passed, '}"
        f"{measure_words.counted(len(cells), 'distribution')}, {_largest(cells)}"
    )
    return 1 if failed else 0


def _cell(
    path: Path, description: Path, judged: dict[str, Any], name: str, seed: int, interpreted: bool
) -> dict[str, Any]:
    """Run the kernel on one distribution, and return the record of the run."""
    given = own_launch.read(description)  # outputs as they are before the launch
    own_launch.draw(given, judged, name, seed)
    cell = {"distribution": name, "ok": False, "j2": None, "lse": None, "at": "", "finding": ""}
    cell["report"] = ""
    arrays: dict[str, Any] = given.arrays
    try:
        if interpreted:
            own_launch.run_interpreted(path, given)
        else:
            launch = device_launch.DeviceLaunch(path, given)
            launch()
            arrays = launch.arrays
    except KernelFault as fault:
        return {**cell, "finding": str(fault.finding)}
    report = own_launch.judge_arrays(arrays, judged)
    found = {"ok": report.passed, "j2": report.ratio, "lse": report.lse_ratio}
    return {**cell, **found, "at": str(report.index), "report": str(report)}


def _format(ratio: float | None) -> str:
    return "-" if ratio is None else measure_words.format_ratio(ratio)


def _verdict(cell: dict[str, Any]) -> str:
    if cell["finding"]:
        return "FINDING"
    return "holds" if cell["ok"] else "FAILED"


def _largest(cells: list[dict[str, Any]]) -> str:
    """Return the largest ratio of error to bound, in words."""
    ratios = [x for cell in cells for x in (cell["j2"], cell["lse"]) if x is not None]
    return f"largest error / bound {max(ratios):.3g}" if ratios else "no output to judge"
