"""Does every call give the right value or one clear sentence?

Varies       for attention: rung (also registered ones), dtype, shape, grouped heads, layout,
             lengths of entries; causal, window, softcap, mask, block mask, bias up to finfo.min,
             rope, norm; INT8 options, out, strides and addresses; operands and options of the other
             functions; numerics given to the judge with right outputs
Holds fixed  the seed; small shapes
Measures     errors against float64 written in `experiments._harness.fuzz_scores`; exceptions that
             are not refusals; changed inputs, and changed memory around results
Run          python -m experiments.accuracy.fuzz --json experiments/results/fuzz_mirror.json
             python -m experiments.accuracy.fuzz --backend cuda --json FILE [--minutes 9]
             python -m experiments.accuracy.fuzz --resume FILE          # goes on from a record
             python -m experiments.accuracy.fuzz --case attention:17    # one case again

The seed of a case is made of --seed, function and number. What decides which kernels are compiled
comes from a pool (--pool), so that calls share kernels. On a device child processes run the cases
in batches: a crash is one failed case, and a new child goes on behind it. Exit status 1: a case
failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.cli import output
from experiments._harness import recording
from experiments._harness.fuzz_cases import Case, Setup, Wrong
from experiments._harness.fuzz_functions import FUNCTIONS
from experiments._harness.fuzz_own_rungs import own_rungs

#: Kinds of exceptions that are refusals.
REFUSALS = (ValueError, TypeError, ca.UnsupportedError)
#: Compile-time configurations of attention where nothing is said; of others there are a third.
POOLS = {"mirror": 2000, "interpret": 40, "cuda": 96}
#: Cases of a batch.
BATCH = 100
#: Seconds without an answer after which a child is ended.
PATIENCE = 240.0
#: Settings that determine the cases of a run, and must be the same when it is resumed.
SETTINGS = ("backend", "seed", "calls", "others", "start", "pool", "batch")


@dataclass(frozen=True)
class Outcome:
    """One case: "right", "refused" or "failed", what was said, and the rung."""

    number: int
    kind: str
    said: str
    rung: str


def run_case(name: str, number: int, setup: Setup) -> Outcome:
    """Run one case."""
    case = Case(setup, list(FUNCTIONS).index(name), number, same_kernels=name == "plan")
    kind, said = "right", ""
    try:
        with np.errstate(all="ignore"), own_rungs():
            FUNCTIONS[name](case)
        case.check_inputs()
    except Wrong as error:
        kind, said = "failed", f"wrong: {error}"
    except REFUSALS as error:
        kind, said = _refused(case, error)
    except Exception as error:  # noqa: BLE001 - any other kind is what this looks for
        kind, said = "failed", f"{type(error).__name__}: {error}"
    return Outcome(number, kind, said, case.rung)


def _refused(case: Case, error: Exception) -> tuple[str, str]:
    """Return whether an exception is a refusal in one sentence, by the library itself."""
    tail = traceback.extract_tb(error.__traceback__)[-1].filename
    said, ours = str(error), "cupyattn" in Path(tail).parts and "experiments" not in tail
    try:
        case.check_inputs()
    except Wrong as wrong:
        return "failed", str(wrong)
    good = ours and said and "\n" not in said
    return ("refused" if good else "failed"), f"{type(error).__name__}: {said}"


@dataclass
class Batch:
    """Cases of a function, and the results of the cases that ran."""

    name: str
    start: int
    stop: int
    found: list[Outcome] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The case that runs next."""
        return self.start + len(self.found)


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """Yield all cases of a run, attention first."""
    for name in FUNCTIONS:
        end = args.start + (args.calls if name == "attention" else args.others)
        for start in range(args.start, end, args.batch):
            yield Batch(name, start, min(start + args.batch, end))


class Record:
    """Results of a run so far, written after each batch."""

    def __init__(self, args: argparse.Namespace, stored: dict[str, Any] | None) -> None:
        self.args = args
        self.json: Path | None = args.json
        self.began = time.monotonic()
        stored = stored or {}
        self.seconds = float(stored.get("seconds", 0.0))
        self.done: dict[str, list[list[int]]] = stored.get("done", {})
        self.counts = {n: Counter(c) for n, c in stored.get("counts", {}).items()}
        self.rungs = {n: Counter(c) for n, c in stored.get("rungs", {}).items()}
        self.refusals = Counter(stored.get("refusals", {}))
        self.failed: list[dict[str, str]] = stored.get("failed", [])
        quiet = argparse.Namespace(seed=args.seed, quick=True, json=None)
        self.base = recording.keep(quiet, "fuzz", args.backend, {}) if self.json else {}
        if "command" in stored and self.json:  # a run that goes on is still that run
            self.base["command"] = stored["command"]

    def has(self, batch: Batch) -> bool:
        """Whether a batch is finished."""
        return any(a <= batch.start and batch.stop <= b for a, b in self.done.get(batch.name, ()))

    def add(self, batch: Batch) -> None:
        """Count a finished batch and write the record."""
        counts = self.counts.setdefault(batch.name, Counter())
        for one in batch.found:
            counts[one.kind] += 1
            if one.rung:
                key = f"{batch.name} {one.rung}"
                self.rungs.setdefault(key, Counter())[one.kind] += 1
            if one.kind == "refused":
                self.refusals[" ".join(one.said.split()[:6])] += 1
            if one.kind == "failed":
                self.failed.append({"case": f"{batch.name}:{one.number}", "said": one.said[:600]})
                print(f"{batch.name}:{one.number}: {one.said}"[:300], flush=True)
        spans = sorted([*self.done.get(batch.name, []), [batch.start, batch.stop]])
        merged = spans[:1]
        for a, b in spans[1:]:
            if a == merged[-1][1]:
                merged[-1] = [merged[-1][0], b]
            else:
                merged.append([a, b])
        self.done[batch.name] = merged
        self.write()

    def write(self) -> None:
        """Write the record where the arguments say."""
        if self.json is None:
            return
        spent = self.seconds + time.monotonic() - self.began
        content = {name: getattr(self.args, name) for name in SETTINGS}
        content |= {"jobs": self.args.jobs, "seconds": round(spent, 1)}
        content |= {"complete": all(self.has(b) for b in batches(self.args))}
        content |= {"counts": {n: dict(c) for n, c in self.counts.items()}}
        content |= {"rungs": {n: dict(c) for n, c in sorted(self.rungs.items())}}
        content |= {"refusals": dict(self.refusals.most_common(30)), "failed": self.failed}
        self.json.parent.mkdir(parents=True, exist_ok=True)
        output.write_json(self.json, {**self.base, **content, "done": self.done})


def serve(connection: Any, setup: Setup) -> None:
    """Run the cases that a parent asks for, until one may have spoilt the device's context."""
    while True:
        try:
            name, numbers = connection.recv()
        except EOFError:
            return
        for number in numbers:
            outcome = run_case(name, number, setup)
            connection.send(outcome)
            if outcome.kind == "failed" and ("CUDA" in outcome.said or "cuda" in outcome.said):
                connection.close()
                return


class Child:
    """A process that runs batches."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, setup), daemon=True)
        self.process.start()
        other.close()
        self.batch: Batch | None = None
        self.heard = time.monotonic()

    def give(self, batch: Batch) -> None:
        """Have a batch run from its next case on."""
        self.batch, self.heard = batch, time.monotonic()
        self.connection.send((batch.name, range(batch.next, batch.stop)))

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def run_in_children(todo: Iterator[Batch], record: Record, setup: Setup, jobs: int) -> None:
    """Run batches in child processes; a process that ends, or hangs, is a failed case."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    rest: list[Batch] = []
    children: list[Child] = []

    def start_next(child: Child | None = None) -> None:
        batch = rest.pop() if rest else next(todo, None)
        if batch is None:
            if child is not None:
                child.end()
                children.remove(child)
            return
        if child is not None:
            try:
                child.give(batch)
            except OSError:  # it ended behind its last case
                child.end()
                children.remove(child)
                child = None
        if child is None:
            child = Child(setup)
            children.append(child)
            child.give(batch)

    for _ in range(jobs):
        start_next()
    while children:
        ready = wait([c.connection for c in children], timeout=5)
        for child in list(children):
            batch = child.batch
            assert batch is not None
            lost = ""
            if child.connection in ready:
                child.heard = time.monotonic()
                try:
                    while batch.next < batch.stop and child.connection.poll():
                        batch.found.append(child.connection.recv())
                except (EOFError, ConnectionResetError):
                    lost = "the process ended"
            elif time.monotonic() - child.heard > PATIENCE:
                lost = f"no answer within {PATIENCE:.0f} s"
            if lost:
                spoilt = bool(batch.found) and "cuda" in batch.found[-1].said.lower()
                child.end()
                children.remove(child)
                if not spoilt:
                    said = f"{lost} (exit status {child.process.exitcode})"
                    batch.found.append(Outcome(batch.next, "failed", said, ""))
                if batch.next < batch.stop:
                    rest.append(batch)
                else:
                    record.add(batch)
                start_next()
            elif batch.next == batch.stop:
                record.add(batch)
                start_next(child)


def _stored(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the record to go on from, its settings taken over."""
    if args.resume is None:
        return None
    stored: dict[str, Any] = json.loads(args.resume.read_text(encoding="utf-8"))
    for name in SETTINGS:
        setattr(args, name, stored[name])
    args.json = args.json or args.resume
    return stored


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="mirror", choices=tuple(POOLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=10000, help="of attention")
    parser.add_argument("--others", type=int, default=2000, help="of each other function")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--pool", type=int, help="compile-time configurations")
    parser.add_argument("--batch", type=int, default=BATCH, help="cases between two records")
    parser.add_argument("--jobs", type=int, help="child processes; 0: run in this one")
    parser.add_argument("--minutes", type=float, help="start no batch later than this")
    parser.add_argument("--case", help="FUNCTION:NUMBER, to run again")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a record to go on from")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    args = parser.parse_args(arguments)
    if args.jobs is None:
        args.jobs = min(12, os.cpu_count() or 1) if args.backend == "cuda" else 0
    args.pool = args.pool or POOLS[args.backend]
    record = Record(args, _stored(args))
    setup = Setup(args.seed, args.backend, args.pool)
    if args.case:
        name, _, number = args.case.partition(":")
        outcome = run_case(name, int(number), setup)
        print(f"{args.case}: {outcome.kind} {outcome.rung} {outcome.said}")
        return int(outcome.kind == "failed")
    began = time.monotonic()

    def todo() -> Iterator[Batch]:
        name = ""
        for batch in batches(args):
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                return
            if batch.name != name:
                name = batch.name
                print(f"{name} from {time.monotonic() - began:.0f} s on", flush=True)
            if not record.has(batch):
                yield batch

    if args.jobs:
        run_in_children(todo(), record, setup, args.jobs)
    else:
        for batch in todo():
            numbers = range(batch.start, batch.stop)
            batch.found.extend(run_case(batch.name, number, setup) for number in numbers)
            record.add(batch)
    for name, counts in record.counts.items():
        print(name, dict(counts))
    for name, counts in sorted(record.rungs.items()):
        print(f"    {name} {dict(counts)}")
    if not all(record.has(batch) for batch in batches(args)):
        print("stopped early: --resume goes on")
    return int(bool(record.failed))


if __name__ == "__main__":
    sys.exit(main())
