"""Code that all experiments share: the command line, the record and its tables.

Device, clocks, versions, revision, seed and tiles go into the JSON. ``--quick`` runs the grid in
small on the mirror, without a device and without times.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, words
from experiments._harness.cells import REFUSALS, Cell, Problem, measure_problem

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
#: Fewer rounds than this are good for a look, not for a figure that is kept.
LEAST_ROUNDS = 15


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every experiment."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--quick", action="store_true", help="small shapes on the mirror: no device, no times"
    )
    result.add_argument("--rounds", type=int, default=2 * LEAST_ROUNDS, help="timed samples")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--json", metavar="FILE", type=Path, help="where to write the record")
    return result


def add_stored_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that reads the committed record."""
    parser.add_argument("--stored", action="store_true", help="measure nothing: from the record")


def link(name: str, up: str = "../") -> str:
    """Return a link to a committed record; `up` leads from the page to the repository."""
    return f"[{name}.json]({up}experiments/results/{name}.json)"


def add_page_arguments(parser: argparse.ArgumentParser, *, merge: bool = False) -> None:
    """Add what makes a part of a page from a record, or with `merge` from several."""
    add_stored_argument(parser)
    parser.add_argument("--update-docs", action="store_true", help="rewrite its part of the page")
    if merge:
        add_merge_argument(parser)


def add_merge_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that merges other records into the committed record first."""
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE", help="with --stored: first"
    )


def _lasting(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that a result depends on: not where it was written."""
    kept = list(arguments)
    for option in ("--json", "--plot", "--folder", "--jobs", "--baseline"):
        while option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return kept


def check_rounds(args: argparse.Namespace) -> None:
    """Raise ValueError for too few rounds to be kept."""
    if not args.quick and args.rounds < LEAST_ROUNDS:
        raise ValueError(f"--rounds must be at least {LEAST_ROUNDS}, got {args.rounds}")


def run_grid(
    args: argparse.Namespace,
    name: str,
    grid: Sequence[tuple[Problem, Sequence[Cell]]],
    *,
    baseline: str | None = None,
    extra: Mapping[str, Any] | None = None,
    conclude: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
    in_graphs: Callable[[Problem], bool] = lambda _: False,
) -> dict[str, Any]:
    """Measure a grid of problems, print a table for each, write the record after each.

    Parameters
    ----------
    args : argparse.Namespace
        Of `parser`. Without ``--json`` the record goes to experiments/results/NAME.json, or nowhere
        with ``--quick``.
    name : str
        Of the experiment.
    grid : sequence of (Problem, cells)
        One or more.
    baseline : str, optional
        As for `measure_problem`.
    extra : mapping, optional
        More for the record.
    conclude : callable, optional
        Given the problems of the record, returns what follows from them, for the record too.
    in_graphs : callable
        As for `measure_problem`, of each problem.

    Returns
    -------
    dict
        The record.
    """
    check_rounds(args)
    problems: list[dict[str, Any]] = []
    for problem, cells in grid:
        found = measure_problem(
            problem, cells, rounds=args.rounds, on_device=not args.quick, baseline=baseline,
            in_graphs=in_graphs(problem),
        )  # fmt: skip
        problems.append(found)
        print(f"\n{problem.name}: {found['judged_rows']} rows of every head judged")
        output.print_table(*table(found, baseline))
        content = {
            "rounds": 0 if args.quick else args.rounds,
            **(extra or {}),
            **(conclude(problems) if conclude else {}),
            "problems": problems,
        }
        record = keep(args, name, "mirror" if args.quick else "cuda", content)
    return record


def keep(
    args: argparse.Namespace, name: str, backend: str, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of an experiment, written where the arguments say.

    A quick run is kept only where ``--json`` names a file.
    """
    record = {
        "experiment": name,
        "command": shlex.join(["python", "-m", _module(name), *_lasting(sys.argv[1:])]),
        "backend": backend,
        "seed": args.seed,
        "environment": device.environment(),
        **content,
    }
    target = args.json or (None if args.quick else RESULTS / f"{name}.json")
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        output.write_json(target, record)
        print(f"\nwrote {target}")
    return record


def _module(name: str) -> str:
    """Return the module that makes a record of this name: the one that is run, if one is.

    Examples
    --------
    >>> _module("gemm"), _module("dit_train")
    ('experiments.speed.gemm', 'experiments.dit.train')
    """
    run = getattr(sys.modules["__main__"], "__spec__", None)
    if run is not None and run.name.startswith("experiments."):
        return str(run.name)
    return module_now(f"experiments.{name.removeprefix('dit_')}")


def module_now(name: str) -> str:
    """Return the module of an experiment, found by the last part of its name.

    A name that no module has comes back unchanged.

    Examples
    --------
    >>> module_now("experiments.gemm"), module_now("experiments.gone")
    ('experiments.speed.gemm', 'experiments.gone')
    """
    files = list((ROOT / "experiments").rglob(f"{name.rpartition('.')[2]}.py"))
    if len(files) != 1:
        return name
    return ".".join(files[0].relative_to(ROOT).with_suffix("").parts)


def command_now(record: Mapping[str, Any]) -> str:
    """Return the command of a record as pages show it: with the module where it stands now.

    A record keeps the command that was run at its revision; the module may have moved since.

    Examples
    --------
    >>> command_now({"command": "python -m experiments.gemm --tails"})
    'python -m experiments.speed.gemm --tails'
    """
    return re.sub(r"\bexperiments\.[\w.]+", lambda found: module_now(found[0]), record["command"])


def stored(name: str) -> dict[str, Any]:
    """Return the committed record of an experiment."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table as a document has it."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a document.

    Raises
    ------
    ValueError
        If the marks are not there, once each and in this order.
    """
    whole = path.read_text(encoding="utf-8")
    before, first, rest = whole.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last) or begin in after or end in before:
        raise ValueError(f"{path} must hold {begin!r} and {end!r} once each, in this order")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def table(found: Mapping[str, Any], baseline: str | None) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one problem's table."""
    timed = any("seconds" in row for row in found["rows"])
    header = ["", "J2", "J3", "rel. error"]
    if timed:
        header += ["time", "95 %", "TFLOP/s", "ceiling"]
        header += [f"x {baseline}", "95 %"] if baseline else []
    return header, [_cells(row, timed, baseline) for row in found["rows"]]


def _cells(row: Mapping[str, Any], timed: bool, baseline: str | None) -> list[str]:
    judged = row["judgement"]
    if judged is None:
        return [row["variant"], "not supported", *[""] * (2 + (4 + 2 * bool(baseline)) * timed)]
    cells = [
        row["variant"],
        words.format_ratio(judged["j2"]),
        "-" if judged["j3"] is None else words.format_ratio(judged["j3"]),
        f"{judged['relative_error']:.2e}",
    ]
    if not timed:
        return cells
    if "seconds" not in row:
        why = "no CUDA graph" if judged["j2"] <= 1 else "missed its bound"
        return [*cells, f"{why}: not timed", *[""] * (3 + 2 * bool(baseline))]
    low, high = row["seconds_interval"]
    share = "-" if row["share"] is None else words.format_share(row["share"])
    cells += [
        words.format_seconds(row["seconds"]),
        f"{words.format_seconds(low)} .. {words.format_seconds(high)}",
        f"{row['tflops']:.4g}",
        share,
    ]
    if baseline:
        ratio = row.get("speed_ratio")
        cells += ["-", "-"] if ratio is None else [
            f"{ratio[0]:.2f}", f"{ratio[1]:.2f} .. {ratio[2]:.2f}"
        ]  # fmt: skip
    return cells


def main(experiment: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run an experiment, on a device unless it is a quick run; errors as in `guarded`."""

    def on_device(args: argparse.Namespace) -> int:
        if not args.quick and (missing := device.device_missing()):
            raise UnsupportedError(f"this needs a CUDA device ({missing}); --quick runs without")
        return experiment(args)

    return guarded(on_device, args)


def guarded(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Return what `work` returns; a user's mistake is one line and exit status 2."""
    try:
        return work(args)
    except (ValueError, TypeError, OSError, FloatingPointError, *REFUSALS) as error:
        print(f"{' '.join(str(error).split())}", file=sys.stderr)
        return 2


def passed(record: Mapping[str, Any]) -> bool:
    """Whether every rung that ran holds its bounds; other libraries are reported, not judged."""
    rows = (row for found in record["problems"] for row in found["rows"])
    return all(row["ok"] for row in rows if row["judgement"] is not None and not row["peer"])


def quick_length(args: argparse.Namespace, length: int) -> int:
    """Return a length, or one that NumPy does in no time."""
    return min(length, 192) if args.quick else length
