"""Does the host take longer for a call than it did at an earlier revision?

Varies       revision: the one beside which this stands, and the one in FOLDER; public function
Holds fixed  batch 1, 2 heads, length 64, head_dim 64, float16; one core for each process
Measures     seconds of the host per call, as experiments.speed.host_time: of each process the
             median of 15 samples of 100 calls, of all processes of a revision the least, for one
             process may run 1.6 times as fast as the next
Run          python -m experiments.speed.host_revisions FOLDER REVISION [--processes N] [--json F]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from experiments._harness import recording

HERE = Path(__file__).resolve().parents[2]
#: The share of the old time that a call may take.
MOST = 1.02


def measured(folder: Path) -> dict[str, float]:
    """Return the seconds of each call in a process that runs the revision in a folder."""
    if not (folder / "cupyattn" / "__init__.py").is_file():
        raise ValueError(f"{folder} holds no revision: it has no cupyattn/__init__.py")
    done = subprocess.run(
        [sys.executable, str(HERE / "experiments" / "_harness" / "host_calls.py")],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the calls of {folder} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    old: Mapping[str, Sequence[float]], new: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Return a row for each call: seconds of every process, and the ratio of the least."""
    return [
        {"name": name, "old": [*old[name]], "new": [*new[name]],
         "ratio": min(new[name]) / min(old[name])}
        for name in new
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run processes of either revision in turn, print the table and write the record."""
    folders = {"old": args.folder.resolve(), "new": HERE}
    times: dict[str, dict[str, list[float]]] = {way: {} for way in folders}
    for _ in range(args.processes):
        for way, folder in folders.items():
            for name, seconds in measured(folder).items():
                times[way].setdefault(name, []).append(seconds)
    rows = compare(**times)
    cells = [
        [r["name"], *(f"{1e6 * min(r[way]):.1f}" for way in folders), f"{r['ratio']:.3f}"]
        for r in rows
    ]
    output.print_table(["call", "old, us", "new, us", "new / old"], cells)
    content = {"old_revision": args.revision, "processes": args.processes, "rows": rows}
    recording.keep(args, "host_revisions", "cuda", content)
    return 0 if all(row["ratio"] <= MOST for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the earlier revision lies")
    parser.add_argument("revision", help="what it is: a hash of git")
    parser.add_argument("--processes", type=int, default=6, metavar="N", help="of each revision")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
