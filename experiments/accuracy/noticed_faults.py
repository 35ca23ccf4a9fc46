"""Which planted faults do the quick tests notice, and by which test?

Varies       the patches of tests/faults and of experiments/accuracy/planted; the revision
Holds fixed  the size of planted faults, 2^-4; the seed of properties (profile ci)
Measures     the first quick test that fails, cheapest first, of those that compile or run a file of
             the patch; how many were run until then, and their CPU seconds
Run          python -m experiments.accuracy.noticed_faults --revision HEAD [--only NAME] [--jobs N]
             python -m experiments.accuracy.noticed_faults --compare BEFORE.json AFTER.json

Needs a checkout, and no device. The quick tests of a revision are run once to learn which kernels
each of them compiles or runs (minutes; ``--map FILE`` keeps that), then once for each patch until
one fails. Tests of the patches themselves do not count: they fail since a patch that is in place
already does not apply. A record that exists is resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from cupyattn.files import replacing
from cupyattn.measure import device
from experiments._harness import patches, recording

ROOT = recording.ROOT
#: Folders of patches.
FOLDERS = ("tests/faults", "experiments/accuracy/planted")
#: What ``SIZE`` is in planted faults.
SIZE = "0.0625f"
#: Seconds for the tests of one patch.
TIMEOUT = 900
#: What runs in pytest. It writes a line for each test: its name, CPU seconds, kernel files and, if
#: faults are planted, the reason of a failure.
PLUGIN = '''
import json, os
import pytest
from cupyattn.compiler import modules
try:
    from cupyattn.compiler import request
except ImportError:  # in revisions before it
    request = modules

LINES = open(os.environ["NOTICED_LINES"], "a")
STOP = os.environ.get("NOTICED_STOP")
files = set()
reached = request.headers_reached

def seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

def headers_reached(source, text, kernels, toolkit):
    files.add(os.path.relpath(source, kernels))
    for path, content in reached(source, text, kernels, toolkit):
        files.add(os.path.relpath(path, kernels))
        yield path, content

request.headers_reached = headers_reached
failure = []

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    files.clear()
    failure.clear()
    start = seconds()
    result = yield
    line = [item.nodeid, round(seconds() - start, 3), sorted(files), *failure]
    LINES.write(json.dumps(line) + "\\n")
    LINES.flush()
    if failure and STOP:
        item.session.shouldstop = "noticed"
    return result

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        text = report.longreprtext
        if "no longer applies" not in text and "source has moved on" not in text:
            failure.append(text.strip().splitlines()[-1][:200])
    return report
'''


def patch_files(revision: Path) -> dict[str, Path]:
    """Return the patches of a revision by name, with their folder."""
    found = [path for folder in FOLDERS for path in (revision / folder).rglob("*.patch")]
    return {path.relative_to(revision).as_posix(): path for path in sorted(found)}


def hunks_of(path: Path) -> tuple[patches.Hunk, ...]:
    """Return the changes of a patch, whatever stands before them."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("--- a/"))
    hunks = patches.hunks_of(lines[start:])
    return tuple(replace(hunk, new=hunk.new.replace("SIZE", SIZE)) for hunk in hunks)


@contextlib.contextmanager
def extracted(revision: str) -> Iterator[Path]:
    """Extract a revision to a temporary folder and yield it."""
    with tempfile.TemporaryDirectory(prefix="noticed-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        Path(folder, "noticing.py").write_text(PLUGIN)
        yield Path(folder)


def run_tests(checkout: Path, tests: list[str], *options: str, stop: bool) -> list[list[Any]]:
    """Run tests of a checkout with the plugin; return its lines."""
    lines = checkout / "noticed.jsonl"
    lines.write_text("")
    chosen = checkout / "chosen.txt"
    chosen.write_text("\n".join(tests))
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "CUPYATTN_TEST_PROFILE": "ci",
        "NOTICED_LINES": str(lines),
        **({"NOTICED_STOP": "1"} if stop else {}),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "noticing", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, "-m", "not slow", *options, *([f"@{chosen}"] if tests else [])],
        cwd=checkout, env=environment, capture_output=True, timeout=TIMEOUT if stop else None,
    )  # fmt: skip
    return [json.loads(line) for line in lines.read_text().splitlines()]


def try_patch(checkout: Path, path: Path, learnt: list[list[Any]]) -> dict[str, Any]:
    """Plant one patch and return what noticed it."""
    hunks = hunks_of(path)
    kernels, touched = checkout / "kernels_cu", {hunk.file for hunk in hunks}
    chosen = sorted((line for line in learnt if touched & set(line[2])), key=lambda line: line[1])
    before = {file: (kernels / file).read_text() for file in touched}
    try:
        patches.apply(path.stem, hunks, kernels)
        run = run_tests(checkout, [line[0] for line in chosen], stop=True)
    except subprocess.TimeoutExpired:
        return {"noticed_by": None, "why": f"none within {TIMEOUT} s", "tests": len(chosen)}
    finally:
        for file, text in before.items():
            (kernels / file).write_text(text)
    noticed = next((line for line in run if len(line) > 3), None)
    return {
        "noticed_by": noticed[0] if noticed else None,
        "why": noticed[3] if noticed else "",
        "tests": len(run),
        "of": len(chosen),
        "cpu_s": round(sum(line[1] for line in run), 1),
    }


def learn(revision: str, kept: Path | None) -> list[list[Any]]:
    """Return [test, CPU seconds, kernel files] of each quick test of a revision."""
    if kept is not None and kept.exists():
        return [json.loads(line) for line in kept.read_text().splitlines()]
    with extracted(revision) as checkout:
        lines = run_tests(checkout, [], stop=False)
    if kept is not None:
        kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def experiment(args: argparse.Namespace) -> int:
    """Try every patch of a revision."""
    revision = subprocess.run(
        ["git", "rev-parse", args.revision], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    learnt = learn(revision, args.map)
    record: dict[str, Any] = {
        "question": "which planted faults do the quick tests notice?",
        "revision": revision,
        "size": SIZE,
        "quick_tests": len(learnt),
        "environment": device.environment(),
        "patches": {},
    }
    if args.json.exists():
        record["patches"] = json.loads(args.json.read_text())["patches"]
    with contextlib.ExitStack() as stack:
        checkouts: Queue[Path] = Queue()
        for _ in range(args.jobs):
            checkouts.put(stack.enter_context(extracted(revision)))
        found = patch_files(checkouts.queue[0])
        names = [n for n in found if n not in record["patches"] and (args.only or "") in n]

        def one(name: str) -> None:
            checkout = checkouts.get()
            try:
                record["patches"][name] = try_patch(checkout, checkout / name, learnt)
            finally:
                checkouts.put(checkout)
            with replacing(args.json) as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")
            print(f"{name}: {record['patches'][name]['noticed_by'] or 'not noticed'}", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, names))
    return 0


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the table of two records, and the sums."""
    rows = []
    for name in sorted({**before["patches"], **after["patches"]}):
        cells = [record["patches"].get(name) for record in (before, after)]
        rows.append([Path(name).stem, *(_cell(cell) for cell in cells)])
    sums = [
        f"{sum(bool(cell['noticed_by']) for cell in record['patches'].values())} of "
        f"{len(record['patches'])}"
        for record in (before, after)
    ]
    header = ["patch", f"at {before['revision'][:8]}", f"at {after['revision'][:8]}"]
    return recording.markdown(header, [*rows, ["**noticed**", *sums]])


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return f"`{cell['noticed_by'].rpartition('/')[2]}`" if cell["noticed_by"] else "no"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--revision", default="HEAD", help="commit whose tests are run")
    parser.add_argument("--map", type=Path, metavar="FILE", help="keeps which test runs what")
    parser.add_argument("--only", metavar="TEXT", help="patches whose path has this text")
    parser.add_argument("--jobs", type=int, default=1, help="patches at a time")
    parser.add_argument(
        "--json", type=Path, default=recording.RESULTS / "noticed_faults.json", metavar="FILE"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        print("\n".join(compare(*(json.loads(path.read_text()) for path in args.compare))))
        return 0
    return experiment(args)


if __name__ == "__main__":
    raise SystemExit(main())
