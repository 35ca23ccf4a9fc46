"""What do Q K^T, the softmax and P V each cost in fa_tc, told by leaving them out?

Varies       the parts that are left out: any of the three, two of them, all; the Hopper form and
             the portable one; length 4,096, causal or not, and 16,384
Holds fixed  16,384 tokens in all, 16 heads of head_dim 128, float16, N(0, 1)
Measures     J2 of the whole; time, and in the same rounds the ratio to the whole; registers, spills
Expect       less than the sum of the parts for the whole: they overlap, the more so on Hopper
Run          python -m experiments.tuning.breakdown [--quick] [--cells 128:4096 ...]
             [--forms sm90 portable] [--json FILE]

Parts are left out by the patches in experiments/tuning/left_out, which must apply exactly once.
Copies of Q, K and V to shared memory, barriers and the store of O stay in every cell. With all
three parts left out, these remain. The rest computes no attention, so only the whole is judged. A
part alone is its time beside the copies; what a part saves is the time that the whole loses without
it. The record is written again after each problem.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cupyattn import errors
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.kernels import ladder
from cupyattn.measure import device, timing, words
from experiments._harness import patches, recording
from experiments._harness.cells import Cell, Problem, judge_problem, rotating
from experiments.tuning import race

FOLDER = Path(__file__).parent / "left_out"
PARTS = ("scores", "softmax", "output")
#: Names of the parts in the table.
NAMES = {"scores": "Q K^T", "softmax": "softmax", "output": "P V"}
#: Every set of parts that may be left out, none first.
LEFT_OUT = tuple(
    parts for count in range(len(PARTS) + 1) for parts in itertools.combinations(PARTS, count)
)
CELLS = ("128:4096", "128:4096c", "128:16384")
#: More spilled than by the whole, and a time would be that of the spills.
MOST_SPILLED = 8
FORMS = {
    "sm90": race.HOPPER,
    "portable": race.Form(ladder.lookup("fa_tc"), "sm_90"),
}
#: Tiles of a form, where its own have no registers for scores that stay from step to step.
TILES = {"sm90": "", "portable": "@128x32w4s2"}


def called(parts: Sequence[str]) -> str:
    """Return the name of a candidate.

    Examples
    --------
    >>> called(()), called(("scores", "output"))
    ('whole', 'without-scores-output')
    """
    return "-".join(("without", *parts)) if parts else "whole"


def hunks_of(form: str, part: str) -> tuple[patches.Hunk, ...]:
    """Return the hunks that leave a part out of a form."""
    lines = (FOLDER / f"{form}_{part}.patch").read_text(encoding="utf-8").splitlines(keepends=True)
    return patches.hunks_of(lines[1:])  # the first names the parts that are left out


def changes(form: str, parts: Sequence[str], folder: Path) -> Path:
    """Return a folder that holds a form's source without some parts."""
    source = FORMS[form].source
    changed = folder / f"{form}-{called(parts)}"
    (changed / source).parent.mkdir(parents=True)
    (changed / source).write_bytes((compiler.KERNELS / source).read_bytes())
    for part in parts:
        patches.apply(f"{form}_{part}", hunks_of(form, part), changed)
    return changed


def candidates(form: str, folder: Path) -> list[race.Candidate]:
    """Return the whole form and all that is left of it."""
    found = []
    for parts in LEFT_OUT:
        changed = changes(form, parts, folder / "changes")
        text = f"{called(parts)}={changed}" if parts else called(parts)
        found.append(race.parse_candidate(text + TILES[form], folder / form, FORMS[form]))
    return found


def compiled(form: str, problem: Problem, folder: Path, threads: int) -> list[Cell]:
    """Return the cells of a form on a problem.

    Raises
    ------
    KernelCompileError
        If one does not compile.
    """
    with ThreadPoolExecutor(threads) as pool:
        cells = list(pool.map(lambda c: race.compiled(c, problem), candidates(form, folder)))
    for cell, parts in zip(cells, LEFT_OUT, strict=True):
        if isinstance(cell, str):
            raise errors.KernelCompileError(f"{form} {called(parts)}: {cell}")
    return [cell for cell in cells if isinstance(cell, Cell)]


def timed(cells: Sequence[Cell], inputs: tuple[Any, ...], rounds: int) -> list[dict[str, Any]]:
    """Return times of the cells, in turns, and their ratios to the first."""
    sets = timing.rotated(inputs)
    calls = {cell.name: rotating(cell.run, sets) for cell in cells}
    samples = timing.time_interleaved(calls, rounds=rounds)
    whole = samples[cells[0].name]
    clocks = device.clocks()
    return [
        {
            "seconds": timing.median(x).median,
            "samples": x,
            "of_whole": timing.paired_ratio(x, whole).to_list(),
            "clocks": clocks,
        }
        for x in samples.values()
    ]


def parts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what follows from the times of one problem and form, as shares of the whole.

    Returns
    -------
    dict
        ``copies``: what is left with all parts left out. ``alone``: each part by itself, beside the
        copies. ``saved``: what the whole loses without the part. ``overlap``: how much longer the
        parts would take one after the other than the whole does beside its copies.

    Examples
    --------
    >>> times = {(): 10.0, PARTS: 2.0, PARTS[1:]: 6.0, PARTS[::2]: 5.0, PARTS[:2]: 7.0}
    >>> times |= {(part,): 8.0 for part in PARTS}
    >>> found = parts_of([{"left_out": list(p), "seconds": s} for p, s in times.items()])
    >>> found["alone"]
    {'scores': 0.4, 'softmax': 0.3, 'output': 0.5}
    >>> found["copies"], found["saved"]["softmax"], found["overlap"]
    (0.2, 0.2, 1.5)
    """
    seconds = {tuple(row["left_out"]): row["seconds"] for row in rows}
    whole, copies = seconds[()], seconds[PARTS]
    alone = {
        part: seconds[tuple(p for p in PARTS if p != part)] - copies for part in PARTS
    }  # fmt: skip
    return {
        "copies": copies / whole,
        "alone": {part: alone[part] / whole for part in PARTS},
        "saved": {part: (whole - seconds[(part,)]) / whole for part in PARTS},
        "overlap": sum(alone.values()) / (whole - copies),
    }


def measured(form: str, problem: Problem, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Judge the whole of a form on a problem and time all that is left of it."""
    cells = compiled(form, problem, folder, args.threads)
    inputs = problem.draw(on_device=not args.quick)
    found = judge_problem(problem, cells[:1], inputs)
    whole = found["rows"][0]
    rows: list[dict[str, Any]] = [
        {"variant": cell.name, "left_out": list(parts), **cell.facts}
        for cell, parts in zip(cells, LEFT_OUT, strict=True)
    ]
    found = {**found, "form": form, "judgement": whole["judgement"], "ok": whole["ok"]}
    spilled = [row["spill_bytes"] - rows[0]["spill_bytes"] for row in rows]
    if max(spilled) > MOST_SPILLED:
        worst = rows[spilled.index(max(spilled))]
        raise errors.KernelCompileError(
            f"{form} {worst['variant']} spills {worst['spill_bytes']} bytes at {problem.name}: its "
            "time would be that of the spills"
        )
    if found["ok"] and not args.quick:
        for row, more in zip(rows, timed(cells, inputs, args.rounds), strict=True):
            row |= more
        found["parts"] = parts_of(rows)
    return found | {"rows": rows}


def run(args: argparse.Namespace) -> int:
    """Measure every form and problem, keep the record, print a table for each."""
    recording.check_rounds(args)
    backend = "mirror" if args.quick else "cuda"
    problems = [race.parse_cell(text, args.seed) for text in args.cells]
    if args.quick:
        problems = [
            replace(p, batch=1, heads=1, length=recording.quick_length(args, p.length))
            for p in problems
        ]
    found: list[dict[str, Any]] = []
    content = {"rounds": 0 if args.quick else args.rounds, "problems": found}
    for number, (form, problem) in enumerate(itertools.product(args.forms, problems)):
        with tempfile.TemporaryDirectory(prefix="cupyattn-breakdown-") as folder:
            found.append(measured(form, problem, Path(folder) / str(number), args))
        print_table(found[-1])
        recording.keep(args, "breakdown", backend, content)
    return 0 if all(x["ok"] for x in found) else 1


def print_table(found: Mapping[str, Any]) -> None:
    """Print the remaining parts and their time, then the parts."""
    print(f"\n{found['problem']['name']}, {found['form']}: J2 {found['judgement']['j2']:.2g}")
    rows = []
    for row in found["rows"]:
        rows.append([
            row["variant"], str(row["registers"]), str(row["spill_bytes"]),
            words.format_seconds(row["seconds"]) if "seconds" in row else "-",
            "{:.3f} [{:.3f}, {:.3f}]".format(*row["of_whole"]) if "of_whole" in row else "-",
        ])  # fmt: skip
    output.print_table(["", "registers", "spilled", "time", "of the whole"], rows)
    if "parts" in found:
        parts = found["parts"]
        print(f"copies {parts['copies']:.3f} of the whole, overlap {parts['overlap']:.2f}")
        for part in PARTS:
            alone, saved = parts["alone"][part], parts["saved"][part]
            print(f"{NAMES[part]}: {alone:.3f} alone, {saved:.3f} saved without it")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), metavar="CELL")
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=list(FORMS))
    parser.add_argument("--threads", type=int, default=8, help="compilations at a time")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
