"""Does the host take longer for a call than it did at an earlier revision?

Varies       revision: the current checkout, and the one in FOLDER; public function
Holds fixed  batch 1, 2 heads, length 64, head_dim 64, float16; all processes share one core
Measures     seconds of the host per call, as experiments.speed.host_time; pairs of processes take
             turns with 100 calls of the old revision and 100 of the new one; the median ratio of
             the rounds of each pair, and the median over all pairs
Expect       no ratio above 1.02; turns matter, since a core of a shared host is half as fast in
             one second as in the next
Run          python -m experiments.speed.host_revisions FOLDER REVISION [--pairs N] [--rounds N]
             [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import timing
from experiments._harness import recording

HERE = Path(__file__).resolve().parents[2]
CALLS = HERE / "experiments" / "_harness" / "host_calls.py"
#: The share of the old time that a call may take.
MOST = 1.02


class Revision:
    """A process that times calls of the revision in a folder, one line of answer for each asked.

    Parameters
    ----------
    folder : Path
        Holds the package ``cupyattn``.

    Raises
    ------
    ValueError
        There is no such package.
    RuntimeError
        The process ended. What it wrote to stderr is in that of this process.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "cupyattn" / "__init__.py").is_file():
            raise ValueError(f"{folder} holds no revision: it has no cupyattn/__init__.py")
        self.folder = folder
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, str(CALLS)], env={**os.environ, "PYTHONPATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Revision:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def names(self) -> list[str]:
        """Return the calls that it times, once all of them have run."""
        found: list[str] = json.loads(self._line())
        return found

    def seconds(self, name: str) -> float:
        """Return the seconds of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"the calls of {self.folder} failed: Python's message stands above")


def measured(old: Path, new: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by revision, call and round, of a pair of processes that take turns."""
    with Revision(old) as first, Revision(new) as second:
        pair = {"old": first, "new": second}
        names = first.names()
        second.names()  # the same: now both have run all calls
        times: dict[str, dict[str, list[float]]] = {way: {n: [] for n in names} for way in pair}
        for number in range(rounds):
            turns = ("old", "new") if number % 2 == 0 else ("new", "old")
            for name in names:
                for way in turns:
                    times[way][name].append(pair[way].seconds(name))
    return times


def compare(pairs: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> list[dict[str, Any]]:
    """Return a row for each call: the median seconds of each pair, and the ratios of its rounds."""
    rows = []
    for name in pairs[0]["new"]:
        ratios = [timing.paired_ratio(pair["new"][name], pair["old"][name]) for pair in pairs]
        rows.append({
            "name": name,
            **{way: [statistics.median(pair[way][name]) for pair in pairs] for way in pairs[0]},
            "ratios": [ratio.to_list() for ratio in ratios],
            "ratio": statistics.median(ratio.median for ratio in ratios),
        })  # fmt: skip
    return rows


def run(args: argparse.Namespace) -> int:
    """Run pairs of processes, one after another, print the table and write the record."""
    pairs = []
    for _ in range(args.pairs):
        pairs.append(measured(args.folder.resolve(), HERE, args.rounds))
        rows = compare(pairs)
        content = {"old_revision": args.revision, "rounds": args.rounds, "rows": rows}
        recording.keep(args, "host_revisions", "cuda", content)
    cells = [
        [
            r["name"], *(f"{1e6 * statistics.median(r[way]):.1f}" for way in ("old", "new")),
            f"{r['ratio']:.3f}", ", ".join(f"{median:.3f}" for median, *_ in r["ratios"]),
        ]
        for r in rows
    ]  # fmt: skip
    output.print_table(["call", "old, us", "new, us", "new / old", "of each pair"], cells)
    return 0 if all(row["ratio"] <= MOST for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the earlier revision lies")
    parser.add_argument("revision", help="what it is: a hash of git")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="of processes")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
