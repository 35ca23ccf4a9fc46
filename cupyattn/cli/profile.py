"""Run one rung for a profiler, on a device. It must satisfy its bound first. Then it runs --warmup
times, and --runs times more; with --nvtx, each of these is in the NVTX range "cupyattn profile".
Data are constant unless --random (normal), --distribution or --qkv says otherwise. A file is a .cu
with the arguments of a rung, or any kernel with a description of its launch (`cupyattn docs
your_kernel`). The latter runs on the arrays of the description. Without a device the interpreter
counts its instructions, bytes and bank conflicts. With --ncu, --sanitizer or --gdb, the command of
one of NVIDIA's tools is printed and run. With --dry-run it is only printed, which needs no
device."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import device_launch, flags, inputs, output, own_kernel, own_launch
from cupyattn.cli.interpret import Where, run_described
from cupyattn.compiler import modules as compiler
from cupyattn.errors import UnsupportedError
from cupyattn.interpret.observer import observe
from cupyattn.interpret.profile import Profile
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import Variant
from cupyattn.measure import device, energy, nvml, rungs, timing, words
from cupyattn.ops.attention import attention
from cupyattn.ops.explain import explain, kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.problem.settings import check_attention

NVTX_RANGE = "cupyattn profile"
#: Least seconds over which energy is counted.
ENERGY_SECONDS = 3.0
#: Options that apply to a kernel with a description of its launch.
DESCRIBED_OPTIONS = (
    "--launch", "--warmup", "--runs", "--energy", "--nvtx", "--json", "--ncu", "--sanitizer",
    "--gdb", "--dry-run",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "variant", metavar="VARIANT|FILE",
        help=f"one of {', '.join(ladder.VARIANTS)}, or a .cu, .ptx or .fatbin file",
    )  # fmt: skip
    own_launch.add_arguments(parser)
    own_kernel.add_arguments(parser)
    parser.add_argument(
        "--warmup", type=int, metavar="N", default=2, help="runs before the counted ones (2)"
    )
    parser.add_argument("--runs", type=int, metavar="N", default=3, help="runs that count (3)")
    parser.add_argument("--random", action="store_true", help="normal data in place of constant")
    parser.add_argument("--energy", action="store_true", help="joules per call, by NVML's counter")
    parser.add_argument("--nvtx", action="store_true", help="an NVTX range around each counted run")
    under = parser.add_mutually_exclusive_group()
    for flag, (tool, _) in TOOLS.items():
        under.add_argument(
            f"--{flag}", action="store_true",
            help=f"print the command that runs this under {tool}, and run it if it is installed",
        )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="only print that command; needs no device"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    inputs.add_arguments(parser, "constant, batch 4, 16 heads, length 4096, head_dim 128")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    description = own_launch.description_of(args, DESCRIBED_OPTIONS)
    if not own_kernel.is_file(args.variant) and description is None:
        own_kernel.refuse_options(args)
        ladder.lookup(args.variant)
    flags.check_whole(args, "runs")
    flags.check_whole(args, "warmup", least=0)
    inputs.check_numbers(args)
    tools = [flag for flag in TOOLS if getattr(args, flag)]
    if args.dry_run and not tools:
        flags_of = ", ".join(f"--{flag}" for flag in TOOLS)
        raise ValueError(f"--dry-run is for the command of a tool: give one of {flags_of} too")
    missing = device.device_missing()
    if missing and not args.dry_run and (tools or description is None):
        raise UnsupportedError(
            f"profile needs a CUDA device: {missing}; cupyattn interpret {args.variant} counts "
            "instructions, bytes and bank conflicts without one"
        )
    if tools:
        return _under(tools[0], args)
    if description is not None:
        return _run_described(args, description, missing)
    with own_kernel.variant_of(args) as variant:
        return _run(args, variant)


def _run(args: argparse.Namespace, variant: Variant) -> int:
    """Judge and time a rung on the device."""
    given = chosen(args).on_device()
    options = inputs.call_options(args)
    q, k, v = given.q, given.k, given.v
    call = check_attention(q, k, v, **options)
    z = quantize(q, k, v) if variant.family == "int8" else None
    operands = (q, k, v) if z is None else (z,)
    output.say(f"{given.name}\n{explain(*operands, variant=variant.name, **options)}\n")

    o, lse = attention(*operands, variant=variant.name, return_lse=True, **options)
    judged = rungs.judge(
        o, q, k, v, variant=variant.name, lse=lse, quantized=z,
        rows=rungs.judged_rows(call, args.seed), **options,
        **kernel_form(*operands, variant=variant.name, **options),
    )  # fmt: skip
    del o, lse
    output.say(f"J2 {words.format_ratio(judged.j2)}, relative error {judged.relative_error:.2e}")
    if not judged.j2 <= 1:
        output.say("FAILED: the rung misses its bound, so it is not timed")
        return 1

    sets = timing.rotated(operands if z is None else (q, k, v))
    if z is not None:
        sets = [(z,)]
        output.say("codes and scales are given, so the time does not include quantising")

    def once(i: int) -> Any:
        return attention(*sets[i % len(sets)], variant=variant.name, **options)

    operations = 4 * call.head_dim * call.batch * call.heads * rungs.admitted_pairs(call)
    record: dict[str, Any] = {"variant": variant.name, "input": given.name, "j2": judged.j2}
    return _measure(args, once, operations, record)


def _run_described(args: argparse.Namespace, description: Path, missing: str) -> int:
    """Judge and time a kernel in a file on the device, or count in the interpreter."""
    path, given = Path(args.variant), own_launch.read(description)
    if missing:
        output.say(f"Not timed, as {missing}: counted instead.\n")
        profile, where = Profile(), Where()
        with observe(profile, where):
            return run_described(path, given, profile, where, None, args.json)
    launch = device_launch.DeviceLaunch(path, given)
    launch()
    output.say(f"{path}: {given.entry}, grid {given.grid}, block {given.block}")
    record: dict[str, Any] = {"file": str(path), "entry": given.entry}
    operations = None
    if given.judged is not None:
        report = own_launch.judge_arrays(launch.arrays, given.judged)
        output.say(str(report))
        if not report.passed:
            output.say("FAILED: the kernel misses its bound, so it is not timed")
            return 1
        record["j2"] = report.ratio
        operations = own_launch.operations(launch.arrays, given.judged)
    output.say("Every run has the same arrays, which stay in the L2 cache if they fit.")
    return _measure(args, lambda _: launch(), operations, record)


def _measure(
    args: argparse.Namespace, once: Callable[[int], Any], operations: int | None,
    record: dict[str, Any],
) -> int:  # fmt: skip
    """Time a call that has been judged, and print and write what was measured."""
    seconds = _times(once, args.warmup, args.runs, nvtx=args.nvtx)
    for i, s in enumerate(seconds):
        rate = ""
        if operations is not None:
            rate = f", {words.format_rate(operations / s / 1e12)} TFLOP/s"
        output.say(f"run {i + 1}: {words.format_seconds(s)}{rate}")
    record |= {"operations": operations, "seconds": seconds, "clocks": device.clocks()}
    if args.energy:
        joules = _joules(once, seconds[-1])
        record["joules"] = joules
        output.say(
            "energy: n/a (NVML is missing or hides its counter)"
            if joules is None
            else f"energy: {joules:.4g} J per call, idle power included"
        )
    if args.json:
        output.write_json(args.json, {"environment": device.environment(), **record})
    return 0


def chosen(args: argparse.Namespace) -> inputs.Input:
    """Return the input chosen by the options: a file's arrays, or data of a shape.

    Raises
    ------
    ValueError
        For options that exclude each other.
    """
    if args.random and args.distribution not in (None, "normal"):
        raise ValueError(f"--random means normal data, got --distribution {args.distribution} too")
    if args.qkv or args.layer:
        if args.random:
            raise ValueError("--qkv and --layer name a file's arrays: give no --random too")
        return inputs.choose(args, large=True)
    if args.distribution is None:
        args.distribution = "normal" if args.random else "constant"
    return inputs.random(args, large=True)


def _times(once: Callable[[int], Any], warmup: int, runs: int, *, nvtx: bool) -> list[float]:
    import cupy
    from cupyx import profiler

    for i in range(warmup):
        once(i)
    cupy.cuda.get_current_stream().synchronize()
    seconds = []
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for i in range(runs):
        with profiler.time_range(NVTX_RANGE) if nvtx else contextlib.nullcontext():
            begin.record()
            once(warmup + i)
            end.record()
            end.synchronize()
        seconds.append(float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3)
    return seconds


def _joules(once: Callable[[int], Any], seconds: float) -> float | None:
    """Return joules per call over a window of ENERGY_SECONDS; None without an energy counter."""
    import cupy

    with nvml.monitor(cupy.cuda.Device().pci_bus_id) as monitor:
        if monitor is None:
            return None
        try:
            counted = energy.window(energy.repeated(once, seconds), monitor, ENERGY_SECONDS)
        except nvml.NvmlError:
            return None
    return counted.joules_per_call


def ncu_command(arguments: Sequence[str], variant: str) -> list[str]:
    """Return the Nsight Compute command that profiles ``cupyattn profile ARGUMENTS``.

    It profiles only the NVTX range, does not change clocks, and includes the ``.cu`` sources in the
    report, because kernels are compiled with line information.
    """
    return [
        "ncu", "--nvtx", "--nvtx-include", f"{NVTX_RANGE}/", "--set", "full",
        "--clock-control", "none", "--import-source", "yes",
        "--source-folders", os.fspath(compiler.KERNELS), "--force-overwrite",
        "--export", f"cupyattn_{variant}", *_profile(arguments), "--nvtx",
    ]  # fmt: skip


def sanitizer_command(arguments: Sequence[str], variant: str) -> list[str]:
    """Return the compute-sanitizer command that checks memory in ``cupyattn profile ARGUMENTS``."""
    return ["compute-sanitizer", "--tool", "memcheck", *_profile(arguments)]


def gdb_command(arguments: Sequence[str], variant: str) -> list[str]:
    """Return the command that starts cuda-gdb on ``cupyattn profile ARGUMENTS``."""
    return ["cuda-gdb", "--args", *_profile(arguments)]


def _profile(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cupyattn", "profile", *arguments]


#: Tools by their flags: the program's name, and the function that makes its command.
TOOLS: dict[str, tuple[str, Callable[[Sequence[str], str], list[str]]]] = {
    "ncu": ("ncu", ncu_command),
    "sanitizer": ("compute-sanitizer", sanitizer_command),
    "gdb": ("cuda-gdb", gdb_command),
}


def _under(flag: str, args: argparse.Namespace) -> int:
    """Print the command of a tool, and run it if it is installed and no dry run is requested."""
    tool, command_of = TOOLS[flag]
    left_out = (f"--{flag}", "--dry-run", "--nvtx", "--energy")
    stem = Path(args.variant).stem
    command = command_of([a for a in args.arguments[1:] if a not in left_out], stem)
    output.say(shlex.join(command), flush=True)
    if flag == "ncu":
        report = f"cupyattn_{stem}"
        output.say(
            f"then, as text and CSV: ncu --import {report}.ncu-rep > {report}.txt; "
            f"ncu --import {report}.ncu-rep --csv > {report}.csv",
            flush=True,
        )
    if args.dry_run:
        return 0
    if shutil.which(tool) is None:
        output.say(f"{tool} is not on the PATH: run this line where it is installed")
        return 0
    return subprocess.run(command, check=False).returncode
