"""Which removed synchronisation do our interpreter and a static verifier, SentryWard, notice?

Varies       the barrier, fence or wait that is removed: each that changes the code of a launch
             (kind "barrier" of cupyattn/testing/mutations.py).
Holds fixed  the launches, one small call of every kernel; seconds and memory for a verdict.
Measures     SentryWard's verdict on each launch as it is and, where that is "race_free", on each
             mutant; what the interpreter says of the same call.
Run          python -m experiments.accuracy.static_verifier --update-docs

No device needed; ``pip install -e .[sentryward]`` brings SentryWard (https://sentryward.io). The
record is written after each launch, and the same command goes on where it was stopped. SentryWard
proves a launch free of races in every schedule or shows two accesses. The interpreter runs one
schedule, and follows what orders accesses.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.errors import KernelCompileError
from cupyattn.interpret import executor
from cupyattn.plans.records import Launch, TensorMap
from cupyattn.testing.mutations import Mutant, machine_code, mutants
from experiments._harness import recording, small_attention, small_codes, small_gradients
from experiments._harness import small_layers as layers
from experiments._harness.small_inputs import arrays
from experiments.accuracy.mutation_score import Call, copied_sources, noticed, reached

PAGE = recording.ROOT / "docs" / "TESTING.md"
BEGIN, END = "<!-- static_verifier: begin -->", "<!-- static_verifier: end -->"
NAME = "static_verifier"
#: SentryWard: its schema, its verdict on a launch without races, and its verdicts of a finding.
SCHEMA, RACE_FREE = "spverify.kernel-input/v1", "race_free"
FOUND = ("potential_race", "not_wellsynced", "invalid_lifecycle")
#: Seconds and MiB for a verdict.
SECONDS, MEMORY = 100, 4096
#: Types of scalars, by kind and size of NumPy's.
_TYPES = {
    ("i", 1): "s8", ("i", 4): "s32", ("i", 8): "s64", ("u", 1): "u8", ("b", 1): "u8",
    ("u", 4): "u32", ("u", 8): "u64", ("f", 4): "f32",
}  # fmt: skip


def calls() -> dict[str, Callable[[], str]]:
    """Return one call of every kernel, as small as its tiles let it be."""
    found: dict[str, Callable[[], str]] = {}
    one: dict[str, Any] = {"heads": (1, 1), "batch": 1}
    found["act_quant"] = lambda: layers.codes(ca.act_quant, (4, 130), "float16", "block")
    found["row_quant"] = lambda: layers.codes(ca.act_quant, (4, 1283), "float16", "channel")
    found["weight_quant"] = lambda: layers.weight((33, 70), "bfloat16", 30)
    found["norm_quant"] = lambda: layers.norm((3, 1024), "bfloat16", "", norm="layer")
    turned = {"norm": "layer", "rotate": "hadamard"}
    found["norm_quant, rotated"] = lambda: layers.norm((3, 1536), "float16", "", **turned)
    found["importance"] = lambda: layers.importance((1, 1), (9, 40), 16, 8, None)
    found["compact"] = lambda: layers.kept(33, 7, "float16", 16)
    found["merge"] = lambda: layers.partials("float16", 36, 2)
    few = arrays(3, 601, "float16", 7, 16, **one)
    split = "fa_tc", None, "float16", None
    found["fa_tc, split"] = lambda: small_attention.attend(split, few, {})
    for name, rung in small_attention.RUNGS.items():
        inputs = arrays(20, 40, rung[2], 0, 16, **one)
        found[name] = partial(small_attention.attend, rung, inputs, {})
    plain = ca.QuantConfig()
    found["quantize"] = lambda: small_codes.quantized(plain, (20, 40), "float16", 16, (1, 1))
    found["backward"] = lambda: small_gradients.gradients(
        {}, lengths=(20, 40), head_dim=16, deterministic=True, **one
    )
    found["int8_gemm"] = lambda: layers.product((32, 32, 128), layers.SMALL, None)
    rows = {"strategy": "channel"}
    found["int8_gemm, rows"] = lambda: layers.product((32, 32, 128), layers.SMALL, None, **rows)
    return found


@dataclass(frozen=True)
class Launched:
    """A launch, with its architecture and the bytes of its shared storage."""

    one: Launch
    arch: str
    shared: int


def launches(call: Callable[[], str]) -> list[Launched]:
    """Return the launches of a call."""
    found: list[Launched] = []
    run_launch = executor.run_launch

    def watched(one: Launch, binary: Any, *rest: Any) -> None:
        found.append(Launched(one, binary.arch, binary.smem_bytes if one.dynamic_shared else 0))
        run_launch(one, binary, *rest)

    with mock.patch.object(executor, "run_launch", watched):
        said = call()
    assert not said, said
    return found


def described(launch: Launched, ptx: str) -> dict[str, Any]:
    """Describe a launch as SentryWard's input: numbers by value, pointers to separate arrays."""
    one = launch.one
    match = re.search(rf"\.entry {one.entry}\((.*?)\)", ptx, re.DOTALL)
    assert match is not None
    names = re.findall(r"(\w+)(?:\[\d+\])?,?\s*$", match[1], re.MULTILINE)
    arguments: list[dict[str, Any]] = []
    pointers: list[dict[str, Any]] = []
    for name, param in zip(names, one.params, strict=True):
        if isinstance(param, TensorMap):
            continue  # SentryWard says that it lacks them
        struct, values = param
        for field in struct.names or ():
            dtype, offset = struct.fields[field][:2]  # type: ignore[index]
            value, place = values.get(field, 0), {"parameter": name, "offset": offset}
            if isinstance(value, str):
                pointers.append({**place, "type": "pointer", "space": "global"})
            elif value is None:
                arguments.append({**place, "type": "pointer", "value": None})
            else:
                arguments += _scalars(place, dtype, value)
    return {
        "schema": SCHEMA, "entry": one.entry, "arguments": arguments, "declarations": pointers,
        "launch": {
            "grid_dim": [one.grid, 1, 1], "block_dim": [one.block, 1, 1], "cluster_dim": [1, 1, 1],
            "dynamic_shared_bytes": launch.shared,
        },
    }  # fmt: skip


def _scalars(place: Mapping[str, Any], dtype: Any, value: Any) -> list[dict[str, Any]]:
    base, shape = dtype.subdtype or (dtype, ())
    numbers = np.broadcast_to(np.asarray(value, base), shape).ravel()
    kind, first = _TYPES[base.kind, base.itemsize], place["offset"]
    return [
        {**place, "offset": first + i * base.itemsize, "type": kind, "value": x.item()}
        for i, x in enumerate(numbers)
    ]


def verdict(executable: str, launch: Launched, ptx: str) -> dict[str, Any]:
    """Return SentryWard's verdict on a launch, its first message, and the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source, asked = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        source.write_text(ptx)
        asked.write_text(json.dumps(described(launch, ptx)))
        command = [executable, str(source), "--input", str(asked), "--timeout", str(SECONDS),
                   "--memory-limit-mib", str(MEMORY)]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(ended.stdout)
    messages = [x.get("message") or x.get("code", "") for x in found["diagnostics"]]
    seconds = round(time.monotonic() - start, 1)
    return {"verdict": found["result"], "message": (messages or [""])[0], "seconds": seconds}


def _code_of(entry: str, ptx: str) -> str:
    """Return the machine code of one kernel of a module."""
    parts = re.split(r"(?=\.entry )", machine_code(ptx))
    return next(part for part in parts if re.match(rf"\.entry {entry}\b", part))


def removals(files: set[str]) -> list[tuple[str, Mutant]]:
    """Return all mutants that remove synchronisation from some files."""
    return [
        (name, one) for name in sorted(files)
        for one in mutants((compiler.KERNELS / name).read_text()) if one.kind == "barrier"
    ]  # fmt: skip


def _mutant(
    executable: str, file: str, fault: Mutant, launch: Launched, call: Call, ask: bool
) -> dict[str, Any] | None:
    """Return what both say of a mutant; None if it has the same code as the source."""
    module, entry = (launch.one.module, launch.arch), launch.one.entry
    before = _code_of(entry, compiler.translate(*module).ptx)
    with copied_sources(file, fault.text):
        try:
            ptx = compiler.translate(*module).ptx
        except KernelCompileError:
            return None
        if _code_of(entry, ptx) == before:
            return None
        said = noticed(call)
        theirs = verdict(executable, launch, ptx) if ask else {}
    place = {"file": file, "line": fault.line, "name": fault.name, "before": fault.before.strip()}
    return {**place, "interpreter": said, "sentryward": theirs}


def experiment(args: Any) -> None:
    """Ask both about every launch and every removal, and write the record after each launch."""
    executable = shutil.which(args.executable)
    if executable is None:
        raise ValueError(f"{args.executable} is no command: pip install -e .[sentryward]")
    content: dict[str, Any] = {
        "sentryward": args.version, "seconds": SECONDS, "memory_mib": MEMORY, "launches": [],
    }  # fmt: skip
    if args.json.exists():  # goes on where it was stopped
        content["launches"] = json.loads(args.json.read_text())["launches"]
    done = {(x["call"], x["entry"]) for x in content["launches"]}
    seen: set[Any] = set()
    for name, run in calls().items():
        for launch in launches(run):
            key = launch.one.module, launch.one.entry
            if key in seen or (name, launch.one.entry) in done:
                continue
            seen.add(key)
            ptx = compiler.translate(launch.one.module, launch.arch).ptx
            whole = verdict(executable, launch, ptx)
            modules = frozenset({(launch.one.module, launch.arch)})
            call = Call(name, run, 0.0, modules, {})
            ask = whole["verdict"] == RACE_FREE
            found = [
                _mutant(executable, file, fault, launch, call, ask)
                for file, fault in removals(reached(launch.one.module))
            ]
            entry = {"call": name, "entry": launch.one.entry, "arch": launch.arch}
            entry |= {"source": str(launch.one.module.source), "whole": whole}
            content["launches"].append({**entry, "removed": [x for x in found if x]})
            print(name, launch.one.entry, whole, flush=True)
            recording.keep(args, NAME, "interpret", content)


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the tables of a record, as the page has them."""
    rows, differ = [], []
    for x in record["launches"]:
        removed = x["removed"]
        ours = sum(bool(one["interpreter"]) for one in removed)
        theirs = [one["sentryward"].get("verdict") for one in removed]
        asked = x["whole"]["verdict"] == RACE_FREE
        found = str(sum(one in FOUND for one in theirs)) if asked else "-"
        said = x["whole"]["verdict"].replace("_", " ")
        said += "" if asked or not x["whole"]["message"] else f": {x['whole']['message']}"
        rows.append([f"`{x['entry']}`", x["arch"], said, f"{x['whole']['seconds']:.0f} s",
                     str(len(removed)), found, str(ours)])  # fmt: skip
        differ += [_difference(x, one) for one in removed if asked and _differs(one)]
    header = ["launch", "for", "SentryWard on it as it is", "took", "removals that change its code",
              "noticed by SentryWard", "noticed by the interpreter"]  # fmt: skip
    environment = record["environment"]
    lines = [
        f"`{recording.command_now(record)}` at revision {environment['revision'][:10]}, SentryWard "
        f"{record['sentryward']}, at most {record['seconds']} s and {record['memory_mib']} MiB for "
        "a verdict.",
        "",
        *recording.markdown(header, rows),
    ]
    if differ:
        header = ["removed", "of", "SentryWard", "interpreter"]
        lines += ["", "Where they differ:", "", *recording.markdown(header, differ)]
    return lines


def _differs(one: Mapping[str, Any]) -> bool:
    return bool((one["sentryward"]["verdict"] in FOUND) != bool(one["interpreter"]))


def _difference(launch: Mapping[str, Any], one: Mapping[str, Any]) -> list[str]:
    before = one["before"].splitlines()[0].partition("//")[0].strip()
    said = one["sentryward"]["verdict"].replace("_", " ")
    place = f"`{one['file']}:{one['line']}` `{before}`".replace("|", "\\|")
    return [place, f"`{launch['entry']}`", said, one["interpreter"] or "nothing"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--executable", default="sentryward", metavar="FILE", help="its command")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    target = args.json or recording.RESULTS / f"{NAME}.json"
    if not args.stored:
        args.json, args.version = target, _version(args.executable)
        experiment(args)
    lines = table(json.loads(target.read_text()))
    output.say("\n".join(lines))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, "\n".join(lines))
    return 0


def _version(executable: str) -> str:
    """Return the version that is installed beside a command."""
    found = shutil.which(executable)
    beside = [] if found is None else Path(found).parents[1].glob("lib/*/site-packages")
    for one in metadata.distributions(path=[str(x) for x in beside]):
        if one.metadata["Name"] == "sentryward":
            return one.version
    return "of an unknown version"


if __name__ == "__main__":
    raise SystemExit(main())
