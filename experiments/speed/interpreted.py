"""How many CPU seconds does a call in the interpreter take?

Varies       variant; portable or for Hopper; an empty or a warm cache of kernels.
Holds fixed  one head, length 256, head_dim 64, float16.
Measures     `time.process_time` of two calls in a fresh process, after its imports; the record
             has medians of five processes.
Expect       fa_int8: 1.2 s with an empty cache, 0.5 s with a warm one, 0.25 s again. For Hopper
             fa_tc: 0.5 s and 0.1 s again.
Run          python -m experiments.speed.interpreted [--quick] [--json FILE] [--rounds N]
             [--update-docs] [--stored]

No device is needed. ``--rounds`` is the number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from experiments._harness import recording

NAME = "interpreted"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "INTERPRETER.md"
BEGIN, END = "<!-- seconds: begin -->", "<!-- seconds: end -->"
#: Variant and architecture. Without an architecture the portable form runs.
CALLS = (
    ("fa", None), ("fa_tc", None), ("fa_tc", "sm_90a"), ("fa_int8", None), ("fa_int8", "sm_90a"),
)  # fmt: skip
LENGTH = 256
HEADER = ["variant", "form", "first call, nothing compiled", "first call", "again"]
_CODE = """
import json, sys, time
import numpy as np
import cupyattn as ca
variant, arch, length = json.loads(sys.argv[1])
draws = np.random.default_rng(0)
q, k, v = (draws.standard_normal((1, 1, length, 64)).astype(np.float16) for _ in range(3))
found = []
for _ in range(2):
    begin = time.process_time()
    ca.attention(q, k, v, variant=variant, arch=arch, backend="interpret")
    found.append(time.process_time() - begin)
print(json.dumps(found))
"""


def seconds(variant: str, arch: str | None, length: int, cache: Path) -> list[float]:
    """Return the CPU seconds of two calls in a fresh process."""
    environment = {**os.environ, "CUPYATTN_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Python compiles modules once, as for users
    done = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps([variant, arch, length])], env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[float] = json.loads(done.stdout)
    return found


def measured(variant: str, arch: str | None, length: int, processes: int) -> dict[str, Any]:
    """Return the row of a variant: seconds by process, and their medians."""
    samples: dict[str, list[float]] = {"empty": [], "warm": [], "again": []}
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            first, _ = seconds(variant, arch, length, Path(folder))
            warm, again = seconds(variant, arch, length, Path(folder))
        for name, took in zip(samples, (first, warm, again), strict=True):
            samples[name].append(took)
    medians = {name: statistics.median(some) for name, some in samples.items()}
    return {"variant": variant, "arch": arch, "samples": samples, **medians}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row."""
    took = (f"{row[name]:.2f} s" for name in ("empty", "warm", "again"))
    return [row["variant"], row["arch"] or "portable", *took]


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/INTERPRETER.md says was measured."""
    return "\n".join([
        f"CPU seconds of one head of {record['length']} rows and keys, head_dim 64, medians of "
        f"{record['processes']} processes "
        f"({recording.link(NAME)}):",
        "",
        *recording.markdown(HEADER, [cells(row) for row in record["rows"]]),
    ])  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every variant, keep the record, print a table."""
    calls, length = (CALLS[:1], 16) if args.quick else (CALLS, LENGTH)
    processes = 1 if args.quick else args.rounds
    rows = [measured(variant, arch, length, processes) for variant, arch in calls]
    content = {"length": length, "processes": processes, "rows": rows}
    record = recording.keep(args, NAME, "interpret", content)
    output.print_table(HEADER, [cells(row) for row in rows])
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, section(record))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.set_defaults(rounds=5)
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        recording.replace_between(PAGE, BEGIN, END, section(recording.stored(NAME)))
        return 0
    return recording.guarded(run, args)


if __name__ == "__main__":
    sys.exit(main())
