"""How much does each idea of the ladder gain, and how far is it from other libraries?

Varies       the rung; head_dim in {64, 128, 256}; causal or not
Holds fixed  batch 4, 16 heads, length 4096, float16, N(0, 1), each rung's own tiles
Measures     J2, J3, relative error; time, TFLOP/s, share of the ceiling, ratio to
             FlashAttention-2
Beside       torch's scaled_dot_product_attention with its FlashAttention-2 and cuDNN backends,
             where torch can be imported, in the same interleaved rounds
Run          python -m experiments.speed.ladder [--quick] [--json FILE] [--plot FILE]
             [--update-docs] [--stored] [--merge FILE ...]

``--merge`` puts what a run that was cut off lacks into its record, from another, which says when
that was measured.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupyattn as ca
from cupyattn.cli import plot
from cupyattn.compiler import devices
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.measure import device, words
from cupyattn.problem import choose
from experiments._harness import merging, recording
from experiments._harness.cells import Cell, Problem, rung
from experiments._harness.others import FLASH_2, sdpa
from experiments._harness.recording import ROOT

HEAD_DIMS = (64, 128, 256)
PAGE = ROOT / "docs" / "LADDER.md"
BEGIN, END = "<!-- ladder: begin -->", "<!-- ladder: end -->"
#: The problem whose full table is in docs/LADDER.md.
SHOWN = {"head_dim": 128, "causal": False}


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs."""
    batch, heads = (1, 2) if args.quick else (4, 16)
    length = recording.quick_length(args, 4096)
    return [
        Problem(batch, heads, length, head_dim, causal, seed=args.seed)
        for head_dim in args.head_dims
        for causal in (False, True)
    ]


def cells(problem: Problem, *, on_device: bool) -> list[Cell]:
    """Return every rung, and on a device the other libraries."""
    found = [rung(name, problem) for name in ca.VARIANTS]
    if on_device:
        portable = portable_forms()
        found += [rung(name, problem, arch=arch) for name, arch in portable.items()]
        found.append(rung("fa_int8", problem, codes_given=True))
        for name, quant in choose.QUANT.items() if portable else ():
            found.append(
                rung(
                    "fa_int8", problem, codes_given=True, arch=portable["fa_int8"], quant=quant,
                    name=f"fa_int8 {name}",
                )
            )  # fmt: skip
        found += sdpa(problem)
    return found


def portable_forms() -> dict[str, str]:
    """Return the rungs that run in a form for this device alone, and what keeps them from it."""
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    if capability != HOPPER_CAPABILITY:
        return {}
    arch = devices.device_architecture(capability)
    return {name: arch for name, variant in ca.VARIANTS.items() if "sm90" in variant.forms}


def run(args: argparse.Namespace) -> int:
    """Run the experiment, then draw and write what was asked for."""
    grid = [(p, cells(p, on_device=not args.quick)) for p in problems(args)]
    baseline = FLASH_2 if any(cell.name == FLASH_2 for _, some in grid for cell in some) else None
    record = recording.run_grid(args, "ladder", grid, baseline=baseline)
    if args.plot:
        draw(record, args.plot)
    if args.update_docs:
        update_docs(record)
    return 0 if recording.passed(record) else 1


def called(name: str) -> str:
    """Return what pages call a row: one that was told an older architecture ran portable.

    Examples
    --------
    >>> called("fa_int8, sm_90"), called("fa_int8, codes given")
    ('fa_int8, portable form', 'fa_int8, codes given')
    """
    return re.sub(r"\bsm_\d+\b", "portable form", name)


def draw(record: Mapping[str, Any], path: str) -> None:
    """Draw a record, one row of panels for each problem."""
    device = record["environment"]["device"]
    on = f", {device['name']}" if device else ""
    found = [
        (
            f"{p['problem']['name']}{on}",
            [row | {"variant": called(row["variant"])} for row in p["rows"]],
        )
        for p in record["problems"]
    ]
    plot.draw_ladder(found, path)


# ---- docs/LADDER.md ------------------------------------------------------------------------------


def page_table(record: Mapping[str, Any]) -> str:
    """Return the page's text between its markers."""
    shown = next(
        (p for p in record["problems"] if SHOWN.items() <= p["problem"].items()),
        record["problems"][0],
    )
    lines = [_provenance(record, shown), "", *_full_table(shown)]
    if record["backend"] == "cuda":
        but = merging.of_another_revision(record)
        lines += ["", f"TFLOP/s of every shape, same run{but}:", "", *_speed_table(record)]
    return "\n".join(lines)


def _provenance(record: Mapping[str, Any], shown: Mapping[str, Any]) -> str:
    environment, problem = record["environment"], shown["problem"]
    where = "the mirror (NumPy, no device: errors only, no times)"
    if record["backend"] == "cuda":
        found = environment["device"]
        torch = f", torch {environment['torch']}" if "torch" in environment else ""
        where = (
            f"{found['name']}, driver {found['driver']}, NVRTC {environment['nvrtc']}, "
            f"CuPy {environment['cupy']}{torch}"
        )
    mask = "causal" if problem["causal"] else "not causal"
    return (
        f"Batch {problem['batch']}, {problem['heads']} heads, length {problem['length']}, "
        f"head_dim {problem['head_dim']}, {problem['dtype']}, {problem['distribution']}, {mask}. "
        f"On {where}; `{recording.command_now(record)}`, revision "
        f"{environment.get('revision', 'unknown')[:10]}."
    )


def _full_table(shown: Mapping[str, Any]) -> list[str]:
    timed = any("seconds" in row for row in shown["rows"])
    header = ["rung", "the one idea", "form", "J2", "J3", "rel. error"]
    header += ["time", "TFLOP/s", "ceiling"] if timed else []
    rows = []
    for row in shown["rows"]:
        judged = row["judgement"]
        known = ca.VARIANTS.get(row["variant"])
        cells = [
            called(row["variant"]) if known is None else f"`{row['variant']}`",
            known.idea if known else "",
            row.get("form", ""),
        ]
        if judged is None:
            rows.append([*cells, "not supported", *[""] * (len(header) - 4)])
            continue
        cells += [
            words.format_ratio(float(judged["j2"])),
            "" if judged["j3"] is None else words.format_ratio(float(judged["j3"])),
            f"{float(judged['relative_error']):.1e}",
        ]
        if timed and "seconds" in row:
            share = "" if row["share"] is None else words.format_share(row["share"])
            rate = words.format_rate(row["tflops"])
            cells += [words.format_seconds(row["seconds"]), rate, share]
        elif timed:
            cells += ["not timed", "", ""]
        rows.append(cells)
    return recording.markdown(header, rows)


def _speed_table(record: Mapping[str, Any]) -> list[str]:
    names = [row["variant"] for row in record["problems"][0]["rows"]]
    header = [""]
    columns = []
    for found in record["problems"]:
        problem = found["problem"]
        header.append(f"hd{problem['head_dim']}{' causal' if problem['causal'] else ''}")
        columns.append({row["variant"]: row.get("tflops") for row in found["rows"]})
    rows = []
    for name in names:
        rates = ["" if c.get(name) is None else words.format_rate(c[name]) for c in columns]
        rows.append([called(name), *rates])
    return recording.markdown(header, rows)


def update_docs(record: Mapping[str, Any], path: Path = PAGE) -> None:
    """Replace the table of the page by that of a record."""
    recording.replace_between(path, BEGIN, END, page_table(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--plot", metavar="FILE", help="draw the record (.png, .svg or .pdf)")
    parser.add_argument(
        "--update-docs",
        action="store_true",
        help="rewrite the table of docs/LADDER.md; alone, from experiments/results/ladder.json",
    )
    recording.add_stored_argument(parser)
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE",
        help="with --stored: records of what that one lacks, put into it first",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.stored or (args.update_docs and not args.quick and device.device_missing()):
        record = merging.record_with("ladder", args.merge, merging.with_missing)
        if args.plot:
            draw(record, args.plot)
        if args.update_docs:
            update_docs(record)
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
