"""Which faults in our own sources do the interpreter and the judge notice on small calls?

Varies       the fault: drawn by the seed from all mutants of the files that the calls of
             experiments/_harness/small_calls.py compile (cupyattn/testing/mutations.py).
Holds fixed  the calls, and the seconds for a call.
Measures     the first call that notices a fault, by a finding, a judgement, an error, or because it
             does not end. Calls that run the fault's line come first, the cheapest before others,
             then all other calls whose code it changes.
Run          python -m experiments.accuracy.mutation_score --seed 5 --jobs 2 --update-docs

No device needed. A fault that does not compile, or changes the code of no call, is put aside, and
the next one is drawn. The order of independent instructions and of symmetric operands is no change.
The record is written after each fault, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelCompileError
from cupyattn.interpret import KernelFault
from cupyattn.interpret.observer import Observer, observe
from cupyattn.testing.mutations import KINDS, Mutant, machine_code, mutants
from cupyattn.testing.same_values import same_values
from experiments._harness import recording
from experiments._harness.small_calls import small_calls

if TYPE_CHECKING:
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.program import Program

PAGE = recording.ROOT / "docs" / "TESTING.md"
NAME = "mutation_score"
BEGIN, END = "<!-- mutation_score: begin -->", "<!-- mutation_score: end -->"
#: CPU seconds for a call, beside four times its seconds without a fault, 0.1 to 4.
SECONDS = 5
#: Errors of an environment that changed under a run.
BROKEN = ("ImportError", "ModuleNotFoundError")
#: CPU seconds for a fault, after which no further call begins: it counts as survived. With
#: --again there is no such limit, nor the next one.
SECONDS_OF_FAULT = 40
#: Modules with the fault's file of which none has changed: the fault counts as the same code.
MODULES_OF_FAULT = 50
#: Compiles in a third of the time, with few optimisations.
FAST = "--Ofast-compile=max"
#: Processes that know the sources and the faults of this one.
FORK = multiprocessing.get_context("fork")
#: Result of a fault.
NOT_COMPILED, SAME_CODE, NOTICED, SURVIVED = "does not compile", "same code", "noticed", "survived"
#: Why survivors survive, by file and name: [a reason, a sentence], looked at by hand one by one.
EXPLAINED = recording.ROOT / "experiments" / "accuracy" / "survivors.json"
#: Records of runs with fewer calls.
EARLIER = tuple(
    f"mutation_score_{nth}"
    for nth in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
)
#: Survivors of the record that change a result, after rules and calls that some of them led to.
AGAIN = f"{NAME}_again"
#: Share of all faults that is to be noticed, in percent.
GOAL = 97
#: Reasons.
NO_CHANGE, NO_CASE, NO_RULE, OPEN = (
    "changes no result", "no call has the case", "no rule", "open",
)  # fmt: skip

#: A module and the architecture that it is compiled for.
Module = tuple[ModuleSpec, str]
#: Lines by the name of their file, without folders: bit number n is line n.
Lines = Mapping[str, int]


@dataclass(frozen=True)
class Call:
    """A small call: its CPU seconds, the modules that it compiles, and the lines that it runs."""

    name: str
    run: Callable[[], str]
    seconds: float
    modules: frozenset[Module]
    lines: Lines

    def runs(self, file: str, line: int) -> bool:
        """Return whether an instruction of a line, or inlined into it, is executed."""
        return bool(self.lines.get(file, 0) >> line & 1)


class Executed(Observer):
    """Collects the lines of all instructions that are executed."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._known: dict[Program, set[int]] = {}

    def batch(self, machine: Machine) -> None:
        """Add the lines of the segments that any warp has run."""
        known = self._known.setdefault(machine.program, set())
        for start in machine.counts.keys() - known:
            known.add(start)
            for _, step in machine.program.segments[start].steps:
                if (location := step.instruction.location) is not None:
                    for one in location.chain():
                        name = one.file.rpartition("/")[2]
                        self.lines[name] = self.lines.get(name, 0) | 1 << one.line


@dataclass(frozen=True)
class Baseline:
    """The calls without a fault; of each module a hash of its code, its files and lines.

    `fast_code` is a hash of its code with few optimisations. `thorough`: a fault is given to all
    calls whose code it changes, however long they take.
    """

    calls: tuple[Call, ...]
    code: Mapping[Module, str]
    fast_code: Mapping[Module, str]
    files: Mapping[Module, frozenset[str]]
    lines: Mapping[Module, frozenset[tuple[str, int]]]
    ptx: Mapping[Module, str]
    thorough: bool = False


def baseline(kept: Path | None = None, jobs: int = 1) -> Baseline:
    """Run every call once; raise AssertionError if one is wrong without a fault.

    `kept` is a file in which calls of the same sources stand already, or are written.
    """
    found: dict[str, tuple[float, frozenset[Module], Lines]] = {}
    calls, stamp = small_calls(), _stamp()
    if kept is not None and kept.exists():
        old_stamp, old = pickle.loads(kept.read_bytes())
        found = {name: one for name, one in old.items() if old_stamp == stamp and name in calls}
    left = [name for name in calls if name not in found]
    for number, (name, one) in enumerate(
        zip(left, _in_turn(_unharmed, left, calls, jobs), strict=True), start=1
    ):
        found[name] = one
        if kept is not None and (number % 20 == 0 or number == len(left)):
            kept.write_bytes(pickle.dumps((stamp, found)))
    modules = {one for _, modules, _ in found.values() for one in modules}
    files = {module: frozenset(reached(module[0])) for module in modules}
    of_calls = tuple(Call(name, run, *found[name]) for name, run in calls.items())
    kernels = compiler.KERNELS
    code, lines, ptx = (OnDemand(kernels, make) for make in (code_of, lines_of, ptx_of))
    return Baseline(of_calls, code, OnDemand(kernels, fast_code), files, lines, ptx)


class OnDemand(dict[Module, Any]):
    """Maps modules to facts about their code without a fault, each made when it is asked for."""

    def __init__(self, kernels: Path, make: Callable[[Module], Any]) -> None:
        super().__init__()
        self._kernels, self._make = kernels, make

    def __missing__(self, module: Module) -> Any:
        compiler.cache_clear(disk=False)
        with mock.patch.object(compiler, "KERNELS", self._kernels):
            self[module] = self._make(module)
        compiler.cache_clear(disk=False)
        return self[module]


def _stamp() -> str:
    """Return a hash of all sources that a call depends on."""
    folders = compiler.KERNELS, recording.ROOT / "cupyattn", recording.ROOT / "experiments/_harness"
    files = [x for folder in folders for x in folder.rglob("*.*")]
    found = sorted(x for x in files if x.suffix in (".cu", ".cuh", ".py"))
    return hashlib.sha256(b"".join(x.read_bytes() for x in found)).hexdigest()


def ptx_of(module: Module) -> str:
    """Return the PTX of a module."""
    return compiler.translate(*module).ptx


def lines_of(module: Module) -> frozenset[tuple[str, int]]:
    """Return the lines that a module has code of."""
    return lines_with_code(ptx_of(module))


def code_of(module: Module) -> str:
    """Return a hash of the machine code of a module: processes that hold less fork faster."""
    return hashlib.sha256(machine_code(compiler.translate(*module).ptx).encode()).hexdigest()


def _unharmed(
    name: str, calls: Mapping[str, Callable[[], str]]
) -> tuple[float, frozenset[Module], Lines]:
    """Run a call without a fault; return its CPU seconds, its modules, and the lines it runs."""
    translate, seen, executed = compiler.translate, set(), Executed()

    def watched(spec: ModuleSpec, arch: str, source: str | None = None) -> Any:
        seen.add((spec, arch))
        return translate(spec, arch, source)

    start = time.process_time()
    with mock.patch.object(compiler, "translate", watched), observe(executed):
        said = calls[name]()
    assert not said, f"{name} is wrong without a fault: {said}"
    return time.process_time() - start, frozenset(seen), executed.lines


def fast_code(module: Module) -> str:
    """Return a hash of the machine code of a module with few optimisations; "" if it has none.

    A separate process compiles it: NVRTC keeps the option, and would compile worse code for all
    later modules of this one.
    """
    if os.getpid() not in _FAST_COMPILERS:
        here, there = FORK.Pipe()
        FORK.Process(target=_compile_fast, args=(here, there), daemon=True).start()
        there.close()
        _FAST_COMPILERS[os.getpid()] = here
    pipe = _FAST_COMPILERS[os.getpid()]
    pipe.send((module, compiler.KERNELS))
    return str(pipe.recv())


#: The pipe to the process that compiles with few optimisations, of each process.
_FAST_COMPILERS: dict[int, Any] = {}


def _compile_fast(parents: Any, pipe: Any) -> None:
    parents.close()
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_fast_code(*pipe.recv()))


def _fast_code(module: Module, kernels: Path) -> str:
    compiler.cache_clear(disk=False)
    options = (*compiler.OPTIONS, FAST)
    with (
        mock.patch.object(compiler, "KERNELS", kernels),
        mock.patch.object(compiler, "OPTIONS", options),
    ):
        try:
            return code_of(module)
        except KernelCompileError:
            return ""


def lines_with_code(ptx: str) -> frozenset[tuple[str, int]]:
    r"""Return the lines that PTX has instructions of: name of the file, without folders, and line.

    Examples
    --------
    >>> lines_with_code('.file 1 "/a/b.cu"\n.loc 1 7 3\nret;')
    frozenset({('b.cu', 7)})
    """
    names = {n: Path(name).name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    found = re.findall(r"\.loc\s+(\d+)\s+(\d+)", ptx)
    return frozenset((names.get(number, ""), int(line)) for number, line in found)


def reached(spec: ModuleSpec) -> set[str]:
    """Return the files of the kernels' folder that a module is made of, by their includes."""
    found: set[str] = set()
    waiting = [str(spec.source)]
    while waiting:
        name = waiting.pop()
        path = compiler.KERNELS / name
        if name in found or not path.is_file():
            continue
        found.add(name)
        waiting += re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE)
    return found


def drawn(files: set[str], seed: int) -> list[tuple[str, Mutant]]:
    """Return all mutants of some files in the order in which they are taken."""
    found = [(name, one) for name in sorted(files)
             for one in mutants((compiler.KERNELS / name).read_text())]  # fmt: skip
    random.Random(seed).shuffle(found)
    return found


def became(planted: tuple[str, Mutant], known: Baseline) -> dict[str, Any]:
    """Return what became of a fault in a file."""
    file, fault = planted
    with copied_sources(file, fault.text):
        return _tried(file, fault.line, known)


@contextlib.contextmanager
def copied_sources(file: str, text: str) -> Iterator[None]:
    """Let kernels be compiled from a copy of their folder in which one file has another text."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(compiler.KERNELS, Path(folder) / "kernels"))
        (copy / file).write_text(text)
        compiler.cache_clear(disk=False)
        try:
            with mock.patch.object(compiler, "KERNELS", copy):
                yield
        finally:
            compiler.cache_clear(disk=False)


def _tried(file: str, line: int, known: Baseline) -> dict[str, Any]:
    """Compile and run call after call until one notices the fault that is in place."""
    place = Path(file).name, line
    changed: dict[Module, bool] = {}

    def is_changed(module: Module) -> bool:
        if file not in known.files[module]:
            return False
        if module not in changed:
            # Code of the line has changed, most often. Programs that are equal with few
            # optimisations are equal with all.
            may = all(changed.values()) and place in known.lines[module]
            may = may or fast_code(module) != (known.fast_code[module] or None)
            changed[module] = may and code_of(module) != known.code[module]
        return changed[module]

    start, spent, ran = time.monotonic(), _cpu_seconds(), 0
    for call in sorted(known.calls, key=lambda call: (not call.runs(*place), call.seconds)):
        seconds = _cpu_seconds() - spent
        enough = seconds > SECONDS_OF_FAULT if ran else len(changed) >= MODULES_OF_FAULT
        if enough and not known.thorough:
            break
        try:
            if not any(map(is_changed, call.modules)):
                continue
        except KernelCompileError:
            return {"became": NOT_COMPILED}
        ran += 1
        if why := noticed(call):
            seconds = round(time.monotonic() - start, 1)
            by = {"by": call.name, "why": why}
            return {"became": NOTICED, **by, "calls": ran, "took": seconds}
    differs = [module for module, its in changed.items() if its]
    same = all(same_values(ptx_of(module), known.ptx[module]) for module in differs)
    seconds = round(time.monotonic() - start, 1)
    return {"became": SAME_CODE if same else SURVIVED, "calls": ran, "took": seconds}


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in both)


def noticed(call: Call) -> str:
    """Return what a call notices, from a child process; "" if it notices nothing."""
    limit = SECONDS + int(4 * call.seconds)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            os.write(writing, json.dumps(_said(call)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(child, 0)
    if text:
        said = str(json.loads(text))
        if said.startswith(BROKEN):  # no fault in a kernel takes a module away
            raise RuntimeError(said)
        return said
    late = f"does not end in {limit} CPU seconds"
    return late if os.WIFSIGNALED(status) else "the process ended"


def _said(call: Call) -> str:
    try:
        return call.run()[:200]
    except KernelFault as fault:
        return f"finding: {fault.finding.kind}"
    except Exception as error:  # noqa: BLE001 - a fault may raise whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def experiment(args: Any) -> int:
    """Draw faults until enough change the code of some call."""
    target = args.json or recording.RESULTS / f"{NAME}.json"
    known = baseline(args.baseline, args.jobs)
    files = {name for one in known.files.values() for name in one}
    order = drawn(files, args.seed)
    if args.again is not None:
        old = json.loads(args.again.read_text())["faults"]
        why = json.loads(EXPLAINED.read_text(encoding="utf-8"))
        names = of_consequence(old, why)
        order = [(file, one) for file, one in order if f"{file} {one.name}" in names]
        known = replace(known, thorough=True)
    sources = "".join((compiler.KERNELS / name).read_text() for name in sorted(files))
    content: dict[str, Any] = {
        "files": sorted(files), "calls": sorted(call.name for call in known.calls),
        "mutants": len(order), "asked": args.faults, "faults": [],
        "sources_sha256": hashlib.sha256(sources.encode()).hexdigest(),
    }  # fmt: skip
    if target.exists():
        kept = json.loads(target.read_text())
        kept["calls"].sort()
        same = ("sources_sha256", "calls", "seed")
        if any(kept[name] != {**content, "seed": args.seed}[name] for name in same):
            raise ValueError(f"{target} is of other sources, calls or another seed: move it away")
        content["faults"] = kept["faults"]
    faults = content["faults"]
    counted = sum(one["became"] in (NOTICED, SURVIVED) for one in faults)
    left = order[len(faults) :] if counted < args.faults else []
    for (file, fault), found in zip(left, _in_turn(became, left, known, args.jobs), strict=True):
        place = {"file": file, "name": fault.name, "kind": fault.kind, "line": fault.line}
        text = {"before": fault.before.strip(), "after": fault.after.strip()}
        faults.append({**place, **text, **found})
        counted += found["became"] in (NOTICED, SURVIVED)
        print(counted, file, fault.name, found["became"], found.get("why", ""), flush=True)
        args.json = target
        with open(os.devnull, "w") as quiet, mock.patch.object(sys, "stdout", quiet):
            recording.keep(args, NAME, "interpret", content)
        if counted >= args.faults:
            break
    return 0


#: State of the processes that share work: the function, the items, and shared data.
_SHARED: list[Any] = []


def _in_turn(do: Callable[..., Any], items: Sequence[Any], shared: Any, jobs: int) -> Iterator[Any]:
    """Yield what `do` makes of each item and what all share, in their order."""
    _SHARED[:] = do, items, shared
    if jobs == 1:
        yield from map(_done, range(len(items)))
        return
    with ProcessPoolExecutor(jobs, mp_context=FORK) as pool:
        yield from pool.map(_done, range(len(items)))


def _done(number: int) -> Any:
    do, items, shared = _SHARED
    return do(items[number], shared)


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the table of a record, and a list of its survivors, as the page has them."""
    states = (NOTICED, SURVIVED, SAME_CODE, NOT_COMPILED)
    rows = []
    for kind in (*KINDS, "all"):
        those = [x["became"] for x in record["faults"] if kind in (x["kind"], "all")]
        counts = [those.count(state) for state in states]
        run = counts[0] + counts[1]
        share = f"{100 * counts[0] / run:.1f} %" if run else "-"
        rows.append([kind, *map(str, counts[:2]), share, *map(str, counts[2:])])
    header = ["kind", "noticed", "survived", "share noticed", "put aside: same code",
              "put aside: does not compile"]  # fmt: skip
    environment = record["environment"]
    lines = [
        f"`{recording.command_now(record)}` at revision {environment['revision'][:10]}: "
        f"{len(record['files'])} files have {record['mutants']:,} mutants, of which seed "
        f"{record['seed']} drew these; {len(record['calls'])} small calls.",
        "",
        *recording.markdown(header, rows),
    ]
    runs = []
    for x in (*map(recording.stored, EARLIER), record):
        noticed, survived = (
            sum(one["became"] == state for one in x["faults"]) for state in (NOTICED, SURVIVED)
        )
        runs.append([str(x["seed"]), x["environment"]["revision"][:10], str(len(x["files"])),
                     str(len(x["calls"])), f"{noticed} of {noticed + survived}"])  # fmt: skip
    lines += [
        "",
        "Each run had calls that were written after the one before:",
        "",
        *recording.markdown(["seed", "revision", "files", "calls", "noticed"], runs),
    ]
    return [*lines, "", *_survivors(record)]


def _survivors(record: Mapping[str, Any]) -> list[str]:
    """Return how many faults of a record are noticed, and a table of the others."""
    why = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    cells, reasons = [], []
    for x in (x for x in record["faults"] if x["became"] == SURVIVED):
        reason, sentence = why.get(f"{x['file']} {x['name']}", [OPEN, ""])
        reasons.append(reason)
        place, before, after = f"{x['file']}:{x['line']}", _cell(x["before"]), _cell(x["after"])
        cells.append([f"`{place}`", f"`{before}`", f"`{after}`", reason, sentence])
    count = {reason: reasons.count(reason) for reason in (NO_CHANGE, NO_CASE, NO_RULE, OPEN)}
    noticed = sum(x["became"] == NOTICED for x in record["faults"])
    rest = noticed + len(cells) - count[NO_CHANGE]
    share = 100 * noticed / max(1, noticed + len(cells))
    return [
        f"{noticed} of {noticed + len(cells)} faults are noticed ({share:.1f} %). The goal of "
        f"{GOAL} % is {'reached' if share >= GOAL else 'missed'}. Of the {len(cells)} survivors, "
        f"{count[NO_CHANGE]} change no result. Without these, {noticed} of {rest} are noticed "
        f"({100 * noticed / max(1, rest):.1f} %). For {count[NO_CASE]} no call had the "
        f"case, for {count[NO_RULE]} the interpreter had no rule; {count[OPEN]} are open.",
        *_again(record, rest),
        "",
        *recording.markdown(["survivor", "before", "after", "reason", "because"], cells),
    ]


def of_consequence(
    faults: Sequence[Mapping[str, Any]], why: Mapping[str, Sequence[str]]
) -> set[str]:
    """Return file and name of each survivor of which `why` does not say that it changes nothing."""
    names = {f"{x['file']} {x['name']}" for x in faults if x["became"] == SURVIVED}
    return {name for name in names if why.get(name, [OPEN])[0] != NO_CHANGE}


def _again(record: Mapping[str, Any], rest: int) -> list[str]:
    """Return what became of the survivors when they were run again; `rest` change results."""
    again = _stored(AGAIN)
    if again is None or again["seed"] != record["seed"]:
        return []
    later = sum(x["became"] == NOTICED for x in again["faults"])
    all_noticed = later + sum(x["became"] == NOTICED for x in record["faults"])
    return [
        "",
        f"After this run, rules and calls were added that its survivors had led to. Then "
        f"{later} of the {len(again['faults'])} that change a result are noticed (revision "
        f"{again['environment']['revision'][:10]}), together {all_noticed} of {rest} "
        f"({100 * all_noticed / max(1, rest):.1f} %). This second share is of faults that were "
        f"known; only the first says how many faults of a new draw would be noticed.",
    ]


def _stored(name: str) -> dict[str, Any] | None:
    """Return a record that there may be."""
    return recording.stored(name) if (recording.RESULTS / f"{name}.json").exists() else None


def _cell(text: str) -> str:
    """Return code as a cell of a table has it."""
    first = text.splitlines()[0] if text else " "
    return first.partition("//")[0].strip().replace("|", "\\|") or ";"


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--faults", type=int, default=300, metavar="N", help="to run (300)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    kept = "keep what calls take and compile there, and read it if no source differs"
    parser.add_argument("--baseline", type=Path, metavar="FILE", help=kept)
    again = "run the survivors of this record that change a result, give --json, too"
    parser.add_argument("--again", type=Path, metavar="FILE", help=again)
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    status = 0 if args.stored else experiment(args)
    record = json.loads((args.json or recording.RESULTS / f"{NAME}.json").read_text())
    lines = table(record)
    output.say("\n".join(lines))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, "\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
