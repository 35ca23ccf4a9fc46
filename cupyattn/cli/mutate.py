"""Plant small faults in a CUDA source or in PTX, and run your test on each: which faults does it
notice? Give the test after --. {} stands for the path of the mutant, which is also in the
environment variable CUPYATTN_MUTANT. A command that ends with a status other than 0 has noticed
the fault. Mutants with unchanged machine code are not run. The record is written after each
mutant, so the same command continues after an interruption. Exit status 1 if a mutant survived."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupyattn.cli import flags, output
from cupyattn.cli.mutant_runs import (
    NOT_COMPILED,
    NOTICED,
    SAME_CODE,
    SURVIVED,
    UNUSABLE,
    Copy,
    copied,
    lines_given,
    tried,
)
from cupyattn.measure import device
from cupyattn.testing.mutations import KINDS, Mutant, mutants

#: Time limit of a mutant, as a multiple of a run on the source, and its minimum in seconds.
RUNS_OF_THE_SOURCE, LEAST_SECONDS = 10.0, 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a .cu or a .ptx file")
    parser.add_argument("run", nargs="+", metavar="COMMAND", help="after --: your test of it")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="of faults (all)")
    parser.add_argument("--lines", metavar="FIRST-LAST", help="of the source (all)")
    parser.add_argument("--sample", type=int, metavar="N", help="mutants, drawn by --seed (all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of that draw (0)")
    parser.add_argument("--timeout", type=float, metavar="S",
                        help="seconds for a mutant (10 runs of the source)")  # fmt: skip
    parser.add_argument("--arch", default="sm_80", metavar="NAME",
                        help="architecture whose machine code is compared (sm_80)")  # fmt: skip
    parser.add_argument("--define", action="append", default=[], metavar="NAME=NUMBER",
                        help="macro for compiling, to compare machine code")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="the record (FILE.mutants.json)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "sample")
    flags.check_whole(args, "seed", least=0)
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be more than 0 seconds, got {args.timeout:g}")
    source = Path(args.file)
    if source.suffix not in (".cu", ".ptx"):
        raise ValueError(f"give a .cu or a .ptx file, got {args.file}")
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {source}: {error}") from None
    drawn = _drawn(args, text)
    record_path = Path(args.json or f"{source.name}.mutants.json")
    record = _record(record_path, args, text)
    done = record["mutants"]
    with copied(source, _defines(args.define), args.arch) as copy:
        timeout = args.timeout or _time_limit(copy, text, args.run)
        original = copy.code(text)
        if original is None:
            output.say(f"{source} does not compile alone for {args.arch}: every mutant is run.")
        left = [one for one in drawn if one.name not in done]
        if len(left) < len(drawn):
            output.say(f"{len(drawn) - len(left)} mutants are in {record_path} already.")
        with output.progress("mutants", len(left)) as advance:
            for one in left:
                done[one.name] = tried(copy, one, original, args.run, timeout)
                output.write_json(record_path, record)
                advance(f"{one.name} {done[one.name]['became']}")
    found = {one.name: done[one.name] for one in drawn}
    _print(found)
    survived = sum(one["became"] == SURVIVED for one in found.values())
    return 1 if survived else 0


def _drawn(args: argparse.Namespace, text: str) -> list[Mutant]:
    """Return the requested mutants, in the order of their lines."""
    lines = None if args.lines is None else lines_given(args.lines)
    found = [
        one for one in mutants(text, ptx=args.file.endswith(".ptx"))
        if (args.kinds is None or one.kind in args.kinds) and (lines is None or one.line in lines)
    ]  # fmt: skip
    if not found:
        raise ValueError(
            f"{args.file} has no place for such a fault: give more --kinds or --lines"
        )
    if args.sample is not None and args.sample < len(found):
        found = random.Random(args.seed).sample(found, args.sample)
    return sorted(found, key=lambda one: (one.line, one.name))


def _time_limit(copy: Copy, text: str, command: list[str]) -> float:
    """Check that the command passes only a usable source; return the seconds for a mutant."""
    ended = copy.run(text, command, None)
    if ended.status != 0:
        raise ValueError(
            f"the command must end with status 0 on the source as it is, got {ended.status}: "
            f"{ended.last_line}"
        )
    if copy.run(UNUSABLE, command, None).status == 0:
        raise ValueError(
            "the command ends with status 0 even if the source does not compile, so it reads "
            "another file: put {} in its place, or read the path from CUPYATTN_MUTANT"
        )
    return max(LEAST_SECONDS, RUNS_OF_THE_SOURCE * ended.seconds)


def _defines(given: list[str]) -> dict[str, int]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value.lstrip("-").isdigit():
            raise ValueError(f"--define takes NAME=NUMBER, such as TILE=64, got {text!r}")
        found[name] = int(value)
    return found


def _record(path: Path, args: argparse.Namespace, text: str) -> dict[str, Any]:
    """Return the record of this source and command, from the file if it exists, or an empty one."""
    of = {
        "source_sha256": hashlib.sha256(text.encode()).hexdigest(), "command": shlex.join(args.run),
        "arch": args.arch, "defines": args.define,
    }  # fmt: skip
    empty = {"file": args.file, **of, "environment": device.environment(), "mutants": {}}
    if not path.exists():
        return empty
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record ({error}): delete it, or give --json") from None
    for name, value in of.items():
        if kept.get(name) != value:
            raise ValueError(
                f"{path} is a record of another source or command (its {name} differs): delete "
                "it, or give another --json"
            )
    return kept


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the number of noticed mutants of each kind, the survivors, and the score."""
    states = (NOT_COMPILED, SAME_CODE, NOTICED, SURVIVED)
    kinds = [kind for kind in KINDS if any(one["kind"] == kind for one in found.values())]
    rows = []
    for kind in kinds:
        became = [one["became"] for one in found.values() if one["kind"] == kind]
        rows.append((kind, str(len(became)), *(str(became.count(state)) for state in states)))
    output.print_table(("kind", "mutants", *states), rows)
    for name, one in found.items():
        if one["became"] == SURVIVED:
            output.say(f"\nSURVIVED: {name}: {KINDS[one['kind']]}")
            output.say(f"  - {one['before']}\n  + {one['after']}")
    counts = {state: sum(one["became"] == state for one in found.values()) for state in states}
    run = counts[NOTICED] + counts[SURVIVED]
    share = f"{100 * counts[NOTICED] / run:.1f} %" if run else "none run"
    output.say(
        f"\nmutate: {counts[NOTICED]} of {run} mutants noticed ({share}), {counts[SURVIVED]} "
        f"survived; {counts[SAME_CODE]} have the same code, {counts[NOT_COMPILED]} do not compile"
    )
