"""Run one rung, or any kernel in a file, in the interpreter: the kernels themselves, compiled and
executed on NumPy, with no device. Prints findings (exit status 1 if there are any), J2 and J3, and
the costs: warp instructions, bytes by memory, bank conflicts by source line. A file needs a
description of its launch, unless it is a .cu with the arguments of a rung. `cupyattn docs
interpreter` shows how to debug with it, `cupyattn docs your_kernel` how to launch your kernel."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn import interpret
from cupyattn.cli import flags, inputs, output, own_kernel, own_launch
from cupyattn.cli.launch_file import LaunchFile
from cupyattn.files import check_folder, replacing
from cupyattn.interpret.findings import KINDS, Finding, KernelFault, describe
from cupyattn.interpret.members import element_at, members_of
from cupyattn.interpret.observer import Observer
from cupyattn.interpret.profile import Profile
from cupyattn.interpret.stops import Break, Stop
from cupyattn.interpret.trace import Trace
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import Variant
from cupyattn.measure import device, rungs
from cupyattn.measure import words as measure_words
from cupyattn.ops.attention import attention, resolved
from cupyattn.ops.explain import explain, plans
from cupyattn.ops.quantize import quantize

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.observer import Started
    from cupyattn.interpret.program import Program

#: Default shape.
SHAPE = {"batch": 1, "heads": 1, "len": 64, "head_dim": 64}
#: Options that apply to a kernel in a file.
FILE_OPTIONS = (
    "--launch", "--save", "--arch", "--trace", "--trace-of", "--trace-lines", "--break", "--stops",
    "--json",
)  # fmt: skip
#: Number of source lines in the table of shared memory; ``--json`` has all lines.
LINES = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "variant", metavar="VARIANT|FILE",
        help=f"one of {', '.join(ladder.VARIANTS)}, or a .cu, .ptx or .fatbin file",
    )  # fmt: skip
    described = own_launch.add_arguments(parser)
    described.add_argument(
        "--save", metavar="FILE", help="write all its arrays to this .npz at the end"
    )
    own_kernel.add_arguments(parser)
    parser.add_argument(
        "--arch", metavar="NAME", help="architecture to compile for (default sm_80)"
    )
    watch = parser.add_argument_group("watch")
    watch.add_argument("--trace", metavar="FILE", help="write the instructions of one warp")
    watch.add_argument(
        "--trace-of", metavar="BLOCK:WARP:LANE", default="0:0:0", help="whose (default 0:0:0)"
    )
    watch.add_argument(
        "--trace-lines", type=int, default=100_000, metavar="N", help="at most (default 100000)"
    )
    watch.add_argument(
        "--break", dest="stop_at", metavar="FILE:LINE",
        help="show registers and shared memory whenever lanes have run that line",
    )  # fmt: skip
    watch.add_argument("--stops", type=int, default=1, metavar="N", help="to show (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write all counts")
    inputs.add_arguments(parser, "normal, 1 head, length 64, head_dim 64")


#: Flags with their defaults, and the flag without which they have no effect.
_OF_WATCHERS = (
    ("trace_of", "0:0:0", "trace"), ("trace_lines", 100_000, "trace"), ("stops", 1, "stop_at"),
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "trace_lines", "stops")
    for flag, plain, of in _OF_WATCHERS:
        if getattr(args, flag) != plain and not getattr(args, of):
            name, needs = flag.replace("_", "-"), of.replace("stop_at", "break")
            raise ValueError(f"--{name} changes nothing without --{needs}: leave it out")
    for written in ("save", "trace"):  # before the work for them
        if getattr(args, written):
            check_folder(f"--{written}", getattr(args, written))
    description = own_launch.description_of(args, FILE_OPTIONS)
    if description is not None:
        profile, where, observers = _observers(args)
        given = own_launch.read(description, args.arch)
        with _watched(args, given.entry, observers):
            return run_described(Path(args.variant), given, profile, where, args.save, args.json)
    if args.save:
        raise ValueError(
            f"--save is for a kernel in a file with a description, got {args.variant}: leave it out"
        )
    with own_kernel.variant_of(args) as variant:
        return _run(args, variant)


def _run(args: argparse.Namespace, variant: Variant) -> int:
    """Run a rung."""
    profile, where, observers = _observers(args)
    given = _input(args)
    q, k, v = given.q, given.k, given.v
    options = inputs.call_options(args)
    asked = {"variant": variant.name, "arch": args.arch, "backend": "interpret"}
    asked |= {"return_lse": True, **options}
    output.say(f"{given.name}: {q.shape} over {k.shape}, {q.dtype}\n{explain(q, k, v, **asked)}")
    record: dict[str, Any] = {"variant": variant.name, "input": given.name}
    if args.json:
        record["environment"] = device.environment()
    try:
        with _watched(args, variant.name, observers):
            z = quantize(q, k, v, backend="interpret") if variant.family == "int8" else None
            operands = (q, k, v) if z is None else (z,)
            o, lse = attention(*operands, **asked)
    except KernelFault as fault:
        _print_finding(fault.finding, where)
        if args.json:
            output.write_json(args.json, {**record, "finding": str(fault.finding)})
        return 1
    plan = plans(resolved(q, k, v, **asked))[-1]
    judged = rungs.judge(
        o, q, k, v, variant=variant.name, lse=lse, quantized=z, tiles=plan.tiles, form=plan.form,
        **options,
    )  # fmt: skip
    words = f"J2 {measure_words.format_ratio(judged.j2)}"
    if judged.j3 is not None:
        words += f", J3 {measure_words.format_ratio(judged.j3)}"
    output.say(f"\n{words}, relative error {judged.relative_error:.2e}")
    failed = "FAILED: no findings, but the result misses its bound."
    output.say("No findings." if judged.ok else failed)
    print_profile(profile)
    if args.json:
        record |= {"j2": judged.j2, "j3": judged.j3, "kernels": profile.to_dict()}
        output.write_json(args.json, record)
    return 0 if judged.ok else 1


def _observers(args: argparse.Namespace) -> tuple[Profile, Where, list[Observer]]:
    """Return the profile, the observer that names addresses, and all requested observers."""
    profile, where = Profile(), Where()
    observers: list[Observer] = [profile, where]
    if args.trace:
        block, warp, lane = _numbers(args.trace_of)
        observers.append(
            Trace(args.trace, block=block, warp=warp, lane=lane, limit=args.trace_lines)
        )
    if args.stop_at:
        observers.append(Break(*_place(args.stop_at), _Stops(args.stops)))
    return profile, where, observers


@contextlib.contextmanager
def _watched(args: argparse.Namespace, name: str, observers: list[Observer]) -> Iterator[None]:
    """Attach observers, and show progress."""
    with (
        # NOTE: a progress bar redrawn between the lines of a stop would garble them.
        contextlib.nullcontext() if args.stop_at else output.progress(name) as advance,
        interpret.observe(*observers, *([_Progress(advance)] if advance else [])),
    ):
        yield


def run_described(
    path: Path, given: LaunchFile, profile: Profile, where: Where, save: str | None,
    json: str | None,
) -> int:  # fmt: skip
    """Run a kernel in a file according to its description, under the attached observers.

    Parameters
    ----------
    path : Path
    given : LaunchFile
    profile : Profile
    where : Where
        Two of the observers.
    save, json : str or None
        Files for the arrays, and for all counts.

    Returns
    -------
    int
        Exit status.
    """
    output.say(f"{path}: {given.entry}, grid {given.grid}, block {given.block}")
    record: dict[str, Any] = {"file": str(path), "entry": given.entry}
    try:
        own_launch.run_interpreted(path, given)
    except KernelFault as fault:
        _print_finding(fault.finding, where)
        if json:
            output.write_json(json, {**record, "finding": str(fault.finding)})
        return 1
    if save:
        with replacing(save if save.endswith(".npz") else f"{save}.npz") as file:
            np.savez(file, **given.arrays)  # type: ignore[arg-type]
    output.say("\nNo findings.")
    passed = True
    if given.judged is not None:
        report = own_launch.judge_arrays(given.arrays, given.judged)
        output.say(str(report))
        passed = report.passed
        record["j2"] = report.ratio
    print_profile(profile)
    if json:
        output.write_json(json, {**record, "kernels": profile.to_dict()})
    return 0 if passed else 1


def _input(args: argparse.Namespace) -> inputs.Input:
    if not (args.qkv or args.layer):
        for name, size in SHAPE.items():
            if getattr(args, name) is None:
                setattr(args, name, size)
    return inputs.choose(args, large=False)


def _numbers(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f"--trace-of takes BLOCK:WARP:LANE, for example 0:3:0, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3])


def _place(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.+):(\d+)", text)
    if match is None:
        raise ValueError(f"--break takes FILE:LINE, for example attn_fa.cu:83, got {text!r}")
    return match[1], int(match[2])


# ---- while it runs -------------------------------------------------------------------------------


class _Progress(Observer):
    """Prints the progress of a kernel from time to time."""

    def __init__(self, advance: Callable[[str], None]) -> None:
        self._advance = advance
        self._said = time.monotonic()

    def batch(self, machine: Machine) -> None:
        self._say(machine)

    def after(self, machine: Machine, lanes: Lanes) -> None:
        if time.monotonic() - self._said > 0.2:
            self._say(machine)

    def _say(self, machine: Machine) -> None:
        self._said = time.monotonic()
        self._advance(
            f"{machine.program.kernel.name}, {machine.clocks.now:,} steps, blocks "
            f"{machine.first_block} to {machine.first_block + machine.blocks - 1} of {machine.grid}"
        )


class Where(Observer):
    """Records the running kernel, to find the name of the memory at a finding's address."""

    def launch(self, one: Started, program: Program, arch: str) -> None:
        self._launch, self._program, self._arch = one, program, arch

    def element(self, address: int) -> str:
        """Return the member of shared memory that contains a byte, or ""."""
        members = members_of(self._launch, self._program, self._arch)
        return element_at(members, address - self._program.shared_bytes)


class _Stops:
    """Prints stops, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def __call__(self, stop: Stop) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        output.say(f"\n{stop}")
        for text in stop.instructions:
            output.say(f"  {text}")
        header = ("registers", "type", "first lane", "min", "max")
        rows = [
            (name, str(x.dtype), _number(x[0]), *_range(x)) for name, x in stop.registers.items()
        ]
        output.print_table(header, rows)
        if stop.shared:
            shared = [
                (name, f"{x.dtype} {x.shape[1:]}", _number(x.flat[0]), *_range(x))
                for name, x in stop.shared.items()
            ]
            output.print_table(("shared", "type", "first", "min", "max"), shared)


def _number(x: Any) -> str:
    return f"{float(x):.6g}" if x.dtype.kind not in "iub" else str(x)


def _range(x: Any) -> tuple[str, str]:
    """Return the extremes of an array as text."""
    if x.dtype == np.bool_:
        return str(x.all()), str(x.any())
    return _number(x.min()), _number(x.max())


# ---- afterwards ----------------------------------------------------------------------------------


def _print_finding(finding: Finding, where: Where) -> None:
    output.say(f"\nFINDING: {finding.kind}: {finding.message}")
    facts = {"meaning": KINDS[finding.kind], "kernel": finding.kernel}
    if finding.location is not None:
        facts["line"] = describe(finding.location)
    facts["instruction"] = finding.instruction
    others = f" and {finding.lanes - 1} more" if finding.lanes > 1 else ""
    facts["who"] = f"block {finding.block}, warp {finding.warp}, lane {finding.lane}{others}"
    if finding.address is not None:
        element = where.element(finding.address) if "shared memory" in finding.message else ""
        facts["address"] = f"byte {finding.address}{f', {element}' if element else ''}"
    output.print_facts(facts)


def print_profile(profile: Profile) -> None:
    """Print the costs of a run."""
    kernels = list(profile.kernels.values())
    output.say()
    by_kernel = [k.kinds for k in kernels]
    rows = [(kind, *(f"{b[kind]:,}" for b in by_kernel)) for kind, _ in profile.kinds.most_common()]
    rows.append(("all", *(f"{b.total():,}" for b in by_kernel)))
    output.print_table(("warp instructions", *(k.kernel for k in kernels)), rows)
    output.say()
    moves = sorted(profile.traffic)
    output.print_table(
        ("bytes", *(k.kernel for k in kernels)),
        [(" ".join(move), *(f"{k.traffic[move]:,}" for k in kernels)) for move in moves],
    )
    accesses = profile.accesses
    if not accesses:
        return
    output.say()
    total = sum(access.passes for access in accesses)
    output.say(f"Shared memory: {total:,} passes, {profile.excess:,} of them for bank conflicts")
    output.print_table(
        ("line", "within", "", "accesses", "passes", "excess"),
        [
            (a.line, a.inner, a.opcode, f"{a.accesses:,}", f"{a.passes:,}", f"{a.excess:,}")
            for a in accesses[:LINES]
        ],
    )
