"""Which planted faults do the quick tests notice, and by which test?

Varies       the patches of tests/faults and of experiments/accuracy/planted; the revision
Holds fixed  the size of planted faults, 2^-4; the seed of properties (profile ci)
Measures     the first quick test that fails, among tests that compile or run a file of a patch;
             tests that noticed another fault run first, then the cheapest; the number of tests
             until then, and their CPU seconds
Run          python -m experiments.accuracy.noticed_faults --revision HEAD [--only NAME]
             python -m experiments.accuracy.noticed_faults --compare BEFORE.json AFTER.json

Needs a checkout, and no device. The quick tests of a revision run once, to find the kernels that
each compiles or runs. This takes minutes, and ``--map FILE`` stores the result. For each patch
they then run until one fails. Tests of the patches themselves do not count: they fail since a
patch that is in place already does not apply. Tests of frameworks are left out, because their
threads do not survive a fork. An existing record is resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cupyattn.files import replacing
from cupyattn.measure import device
from experiments._harness import patches, recording

ROOT = recording.ROOT
#: Folders of patches.
FOLDERS = ("tests/faults", "experiments/accuracy/planted")
#: Value of ``SIZE`` in planted faults.
SIZE = "0.0625f"
#: Seconds for the tests of one patch.
TIMEOUT = 600
#: Plugin that runs in pytest. Without NOTICED_PATCHES it writes a line for each test: its name, its
#: CPU seconds and the kernel files that it reaches. Otherwise it collects the tests once. For each
#: patch it runs the patch's tests in a child with the patch in place, until one fails.
PLUGIN = '''
import json, os, signal, time
from pathlib import Path
import pytest
from _pytest.runner import runtestprotocol
from cupyattn.compiler import modules
from experiments._harness import patches
try:
    from cupyattn.compiler import request
except ImportError:  # in revisions before it
    request = modules

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

def write(*line):
    with open(os.environ["NOTICED_LINES"], "a") as out:
        out.write(json.dumps(line) + "\\n")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    files.clear()
    start = seconds()
    result = yield
    write(item.nodeid, round(seconds() - start, 3), sorted(files))
    return result

def pytest_runtestloop(session):
    if "NOTICED_PATCHES" not in os.environ:
        return None
    items = {item.nodeid: item for item in session.items}
    telling = []  # tests that noticed a patch are tried first on the next ones
    for name, hunks, tests in json.loads(Path(os.environ["NOTICED_PATCHES"]).read_text()):
        tests = [*(t for t in telling if t in tests), *(t for t in tests if t not in telling)]
        paths = [modules.KERNELS / file for file, *_ in hunks]
        touched = {path: path.read_text() for path in paths}
        try:
            patches.apply(name, [patches.Hunk(*hunk) for hunk in hunks], modules.KERNELS)
            child = os.fork()
            if child == 0:
                try:
                    run_until_one_fails(name, [items[test] for test in tests if test in items])
                finally:
                    os._exit(0)
            wait(child, name)
            _, test, *_ = json.loads(Path(os.environ["NOTICED_LINES"]).read_text().splitlines()[-1])
            if test is not None and test not in telling:
                telling.insert(0, test)
        finally:
            for path, text in touched.items():
                path.write_text(text)
    return True

def wait(child, name):
    end = time.monotonic() + float(os.environ["NOTICED_TIMEOUT"])
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            write(name, None, "stopped for time", 0, 0.0)
            return
        time.sleep(0.02)

def run_until_one_fails(name, items):
    start = seconds()
    for count, item in enumerate(items, 1):
        for report in runtestprotocol(item, nextitem=None, log=False):
            text = report.longreprtext if report.failed else ""
            told_itself = "no longer applies" in text or "source has moved on" in text
            if report.failed and not told_itself:
                why = text.strip().splitlines()[-1][:200]
                write(name, item.nodeid, why, count, round(seconds() - start, 1))
                return
    write(name, None, "", len(items), round(seconds() - start, 1))
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


def run_tests(
    checkout: Path, planted: list[tuple[Any, ...]] | None, *options: str
) -> Iterator[list[Any]]:
    """Run the quick tests of a checkout with the plugin; yield its lines as they are written."""
    lines = checkout / "noticed.jsonl"
    lines.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "CUPYATTN_TEST_PROFILE": "ci",
        "NOTICED_LINES": str(lines),
        "NOTICED_TIMEOUT": str(TIMEOUT),
    }
    if planted is not None:
        environment["NOTICED_PATCHES"] = str(checkout / "planted.json")
        (checkout / "planted.json").write_text(json.dumps(planted))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "noticing", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, "-m", "not slow", *options], cwd=checkout, env=environment,
        stdout=subprocess.DEVNULL,
    ) as running, lines.open() as file:  # fmt: skip
        ended = False
        while not ended:
            ended = running.poll() is not None
            while line := file.readline():
                yield json.loads(line)
            time.sleep(0.1)


def learn(revision: str, kept: Path | None) -> list[list[Any]]:
    """Return [test, CPU seconds, kernel files] of each quick test of a revision."""
    if kept is not None and kept.exists():
        return [json.loads(line) for line in kept.read_text().splitlines()]
    with extracted(revision) as checkout:
        lines = list(run_tests(checkout, None))
    if kept is not None:
        kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def experiment(args: argparse.Namespace) -> int:
    """Try every patch of a revision."""
    revision = subprocess.run(
        ["git", "rev-parse", args.revision], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    learnt = sorted(learn(revision, args.map), key=lambda line: line[1])
    record: dict[str, Any] = {
        "experiment": "noticed_faults",
        "command": shlex.join(["python", "-m", __spec__.name, "--revision", args.revision]),
        "revision": revision,
        "size": SIZE,
        "quick_tests": len(learnt),
        "environment": device.environment(),
        "patches": {},
    }
    if args.json.exists():
        record["patches"] = json.loads(args.json.read_text())["patches"]
    with extracted(revision) as checkout:
        planted = []
        for name, path in patch_files(checkout).items():
            hunks = hunks_of(path)
            touched = {hunk.file for hunk in hunks}
            tests = [
                line[0] for line in learnt
                if touched & set(line[2]) and not line[0].startswith("tests/interop/")
            ]  # fmt: skip
            if name not in record["patches"] and (args.only or "") in name:
                planted.append((name, [(h.file, h.old, h.new) for h in hunks], tests))
        needed = sorted({test.partition("::")[0] for _, _, tests in planted for test in tests})
        of = {name: len(tests) for name, _, tests in planted}
        for name, test, why, tests, cpu_s in run_tests(checkout, planted, *needed):
            found = {"noticed_by": test, "why": why, "tests": tests, "of": of[name], "cpu_s": cpu_s}
            record["patches"][name] = found
            with replacing(args.json) as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")
            print(f"{name}: {test or 'not noticed'}", flush=True)
    return 0 if all(name in record["patches"] for name in of) else 1


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
