"""Which faults in our own sources do the interpreter and the judge notice on small calls?

Varies       the fault: drawn by the seed from all mutants of the files that the calls of
             experiments/_harness/small_calls.py compile (cupyattn/testing/mutations.py).
Holds fixed  the calls, and the seconds for a call.
Measures     the first call that notices a fault, by a finding, a judgement, an error, or because it
             does not end. Calls with code of the fault's line come first, then the cheapest.
Run          python -m experiments.accuracy.mutation_score --seed 1 --update-docs

No device needed. A fault that does not compile, or changes the code of no call, is put aside, and
the next one is drawn. The record is written after each fault, and the same command goes on where
it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelCompileError
from cupyattn.interpret import KernelFault
from cupyattn.testing.mutations import KINDS, Mutant, machine_code, mutants
from experiments._harness import recording
from experiments._harness.small_calls import small_calls

PAGE = recording.ROOT / "docs" / "TESTING.md"
BEGIN, END = "<!-- mutation_score: begin -->", "<!-- mutation_score: end -->"
#: Seconds for a call, which takes less than one without a fault.
SECONDS = 30.0
#: What became of a fault.
NOT_COMPILED, SAME_CODE, NOTICED, SURVIVED = "does not compile", "same code", "noticed", "survived"
#: Why survivors survive, by file and name: [a reason, a sentence], looked at by hand one by one.
EXPLAINED = recording.ROOT / "experiments" / "accuracy" / "survivors.json"
#: Reasons.
NO_CHANGE, NO_CASE, OPEN = "changes no result", "no call has the case", "open"

#: A module and the architecture that it is compiled for.
Module = tuple[ModuleSpec, str]


@dataclass(frozen=True)
class Call:
    """A small call: its CPU seconds, the modules that it compiles, and the files in these."""

    name: str
    run: Callable[[], str]
    seconds: float
    modules: frozenset[Module]


@dataclass(frozen=True)
class Baseline:
    """The calls without a fault; of each module its machine code, files, and lines with code."""

    calls: tuple[Call, ...]
    code: Mapping[Module, str]
    files: Mapping[Module, frozenset[str]]
    lines: Mapping[Module, frozenset[tuple[str, int]]]


def baseline() -> Baseline:
    """Run every call once; raise AssertionError if one is wrong without a fault."""
    translate, seen = compiler.translate, set()

    def watched(spec: ModuleSpec, arch: str, source: str | None = None) -> Any:
        seen.add((spec, arch))
        return translate(spec, arch, source)

    calls: list[Call] = []
    code, lines = {}, {}
    for name, run in small_calls().items():
        seen.clear()
        start = time.process_time()
        with mock.patch.object(compiler, "translate", watched):
            said = run()
        assert not said, f"{name} is wrong without a fault: {said}"
        calls.append(Call(name, run, time.process_time() - start, frozenset(seen)))
    for module in {one for call in calls for one in call.modules}:
        ptx = translate(*module).ptx
        code[module], lines[module] = machine_code(ptx), lines_with_code(ptx)
    files = {module: frozenset(reached(module[0])) for module in code}
    return Baseline(tuple(calls), code, files, lines)


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


def became(file: str, fault: Mutant, known: Baseline) -> dict[str, Any]:
    """Return what became of a fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(compiler.KERNELS, Path(folder) / "kernels"))
        (copy / file).write_text(fault.text)
        compiler.cache_clear(disk=False)
        try:
            with mock.patch.object(compiler, "KERNELS", copy):
                return _tried(file, fault.line, known)
        finally:
            compiler.cache_clear(disk=False)


def _tried(file: str, line: int, known: Baseline) -> dict[str, Any]:
    """Compile and run call after call until one notices the fault that is in place."""
    changed: dict[Module, bool] = {}

    def is_changed(module: Module) -> bool:
        if module not in changed:
            changed[module] = machine_code(compiler.translate(*module).ptx) != known.code[module]
        return changed[module]

    def order(call: Call) -> tuple[bool, float]:
        of_line = any((Path(file).name, line) in known.lines[one] for one in call.modules)
        return not of_line, call.seconds

    start, ran = time.monotonic(), 0
    for call in sorted(known.calls, key=order):
        touched = [one for one in call.modules if file in known.files[one]]
        try:
            if not any(is_changed(one) for one in touched):
                continue
        except KernelCompileError:
            return {"became": NOT_COMPILED}
        ran += 1
        if why := _noticed(call):
            seconds = round(time.monotonic() - start, 1)
            by = {"by": call.name, "why": why}
            return {"became": NOTICED, **by, "calls": ran, "took": seconds}
    seconds = round(time.monotonic() - start, 1)
    return {"became": SURVIVED if ran else SAME_CODE, "calls": ran, "took": seconds}


def _noticed(call: Call) -> str:
    """Return what a call notices, from a child process; "" if it notices nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(_said(call)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    end, ended = time.monotonic() + SECONDS, False
    while not ended and time.monotonic() < end:
        ended = os.waitpid(child, os.WNOHANG) != (0, 0)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        text = file.read().decode()
    if text:
        return str(json.loads(text))
    return "the process ended" if ended else f"does not end in {SECONDS:g} s"


def _said(call: Call) -> str:
    try:
        return call.run()[:200]
    except KernelFault as fault:
        return f"finding: {fault.finding.kind}"
    except Exception as error:  # noqa: BLE001 - a fault may raise whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def experiment(args: Any) -> int:
    """Draw faults until enough change the code of some call."""
    target = args.json or recording.RESULTS / "mutation_score.json"
    known = baseline()
    files = {name for one in known.files.values() for name in one}
    order = drawn(files, args.seed)
    if args.again is not None:
        old = json.loads(args.again.read_text())["faults"]
        names = {(x["file"], x["name"]) for x in old if x["became"] == SURVIVED}
        order = [(file, one) for file, one in order if (file, one.name) in names]
    sources = "".join((compiler.KERNELS / name).read_text() for name in sorted(files))
    content: dict[str, Any] = {
        "files": sorted(files), "calls": [call.name for call in known.calls],
        "mutants": len(order), "asked": args.faults, "faults": [],
        "sources_sha256": hashlib.sha256(sources.encode()).hexdigest(),
    }  # fmt: skip
    if target.exists():
        kept = json.loads(target.read_text())
        same = ("sources_sha256", "calls", "seed")
        if any(kept[name] != {**content, "seed": args.seed}[name] for name in same):
            raise ValueError(f"{target} is of other sources, calls or another seed: move it away")
        content["faults"] = kept["faults"]
    faults = content["faults"]
    counted = sum(one["became"] in (NOTICED, SURVIVED) for one in faults)
    for file, fault in order[len(faults) :]:
        if counted >= args.faults:
            break
        found = became(file, fault, known)
        place = {"file": file, "name": fault.name, "kind": fault.kind, "line": fault.line}
        text = {"before": fault.before.strip(), "after": fault.after.strip()}
        faults.append({**place, **text, **found})
        counted += found["became"] in (NOTICED, SURVIVED)
        print(counted, file, fault.name, found["became"], found.get("why", ""), flush=True)
        args.json = target
        with open(os.devnull, "w") as quiet, mock.patch.object(sys, "stdout", quiet):
            recording.keep(args, "mutation_score", "interpret", content)
    return 0


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
    first = recording.stored("mutation_score_first")
    noticed, survived = (
        sum(x["became"] == state for x in first["faults"]) for state in (NOTICED, SURVIVED)
    )
    lines += [
        "",
        f"The first run (seed {first['seed']}, revision {first['environment']['revision'][:10]}) "
        f"noticed {noticed} of {noticed + survived}: its calls had one block of queries and one "
        "batch entry. The calls above were written after it.",
    ]
    why = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    cells, reasons = [], []
    for x in (x for x in record["faults"] if x["became"] == SURVIVED):
        reason, sentence = why.get(f"{x['file']} {x['name']}", [OPEN, ""])
        reasons.append(reason)
        place, before, after = f"{x['file']}:{x['line']}", _cell(x["before"]), _cell(x["after"])
        cells.append([f"`{place}`", f"`{before}`", f"`{after}`", reason, sentence])
    count = {reason: reasons.count(reason) for reason in (NO_CHANGE, NO_CASE, OPEN)}
    noticed = sum(x["became"] == NOTICED for x in record["faults"])
    rest = noticed + count[NO_CASE] + count[OPEN]
    lines += [
        "",
        f"Of the {len(cells)} survivors, {count[NO_CHANGE]} change no result. Without these, "
        f"{noticed} of {rest} are noticed ({100 * noticed / max(1, rest):.1f} %). For "
        f"{count[NO_CASE]} no call has the case, and {count[OPEN]} are open.",
        "",
        *recording.markdown(["survivor", "before", "after", "reason", "because"], cells),
    ]
    return lines


def _cell(text: str) -> str:
    """Return code as a cell of a table has it."""
    first = text.splitlines()[0] if text else " "
    return first.partition("//")[0].strip().replace("|", "\\|") or ";"


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--faults", type=int, default=300, metavar="N", help="to run (300)")
    again = "run the survivors of this record, give --json, too"
    parser.add_argument("--again", type=Path, metavar="FILE", help=again)
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    status = 0 if args.stored else experiment(args)
    record = json.loads((args.json or recording.RESULTS / "mutation_score.json").read_text())
    lines = table(record)
    output.say("\n".join(lines))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, "\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
