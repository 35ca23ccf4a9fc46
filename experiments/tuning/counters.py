"""How many passes of shared memory do bank conflicts cost, and how many bytes does a call move?

Varies       every rung, fa_tc and fa_int8 in their portable and their Hopper form
Holds fixed  head_dim 128, float16, N(0, 1); length 4,096 and 16 heads on a device, 128 and one head
             in the interpreter
Measures     J2; passes of shared memory and conflicts among them, as the interpreter counts them in
             the PTX and Nsight Compute on the device; bytes of DRAM and of L2 beside the least that
             a call can move: Q, K, V once, O once; the busiest pipes
Run          python -m experiments.tuning.counters [--quick] [--json FILE]

On a device this runs itself under ``ncu --clock-control none``, one call of each rung with cold
caches. Counters that this ncu or device does not have are left out. Neither the interpreter nor the
load-store unit counts accesses of wgmma and of the bulk copy engine to shared memory. Both use the
hardware's swizzle.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cupyattn as ca
from cupyattn import interpret
from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure.words import format_bytes, format_ratio, format_share
from experiments._harness import recording
from experiments._harness.cells import Problem, judge_problem, rung

#: Rung and the architecture that it runs as.
WAYS = (
    ("unfused", "sm_90"), ("fa", "sm_90"), ("fa_warps", "sm_90"), ("fa_tc", "sm_90"),
    ("fa_tc", "sm_90a"), ("fa_int8", "sm_90"), ("fa_int8", "sm_90a"),
)  # fmt: skip
HEADS, HEAD_DIM, LENGTH, INTERPRETED_LENGTH = 16, 128, 4096, 128
#: Name of a kernel before each call, which marks the kernels after it as the call's.
MARK = "next_cell"
PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
)
ALL_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu.sum"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = "lts__t_bytes.sum"
BUSY = (
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
METRICS = ("gpu__time_duration.sum", PASSES, *CONFLICTS, ALL_CONFLICTS, *DRAM, L2, *BUSY)
#: One call of each rung with all its replays takes less than this.
NCU_SECONDS = 120


def called(variant: str, arch: str) -> str:
    """Return the name of a way.

    Examples
    --------
    >>> called("fa_tc", "sm_90a"), called("fa", "sm_90")
    ('fa_tc, sm_90a', 'fa, sm_90')
    """
    return f"{variant}, {arch}"


def least_bytes(problem: Problem) -> int:
    """Return the bytes that a call must move: Q, K and V in, O out, in 16 bits.

    Examples
    --------
    >>> least_bytes(Problem(1, 2, 64, 16))
    16384
    """
    rows = 2 * problem.length + 2 * problem.len_kv
    return 2 * problem.batch * problem.heads * rows * problem.head_dim


def interpreted(variant: str, arch: str, seed: int) -> dict[str, dict[str, int]]:
    """Return what the interpreter counts of each kernel of a call."""
    problem = Problem(1, 1, INTERPRETED_LENGTH, HEAD_DIM, seed=seed)
    profile = interpret.Profile()
    with interpret.observe(profile):
        ca.attention(
            *problem.draw(on_device=False), variant=variant, backend="interpret", arch=arch
        )
    found = {}
    for name, kernel in profile.kernels.items():
        accesses = kernel.accesses.values()
        found[name] = {
            "passes": sum(access.passes for access in accesses),
            "conflicts": sum(access.excess for access in accesses),
            "instructions": kernel.instructions.total(),
            "global_bytes": sum(n for (space, _), n in kernel.traffic.items() if space == "global"),
        }
    return found


# ---- under Nsight Compute ------------------------------------------------------------------------


def call_each(problem: Problem) -> None:
    """Call every way once, a kernel named MARK before each: what ncu watches."""
    import cupy

    mark = cupy.RawKernel(f'extern "C" __global__ void {MARK}() {{}}', MARK)
    inputs = problem.draw(on_device=True)
    for variant, arch in WAYS:
        mark((1,), (1,), ())
        ca.attention(*inputs, variant=variant, arch=arch)
        cupy.cuda.Device().synchronize()


def watched(seed: int) -> list[list[dict[str, Any]]]:
    """Run this module under ncu and return the counters of each way's kernels.

    Raises
    ------
    UnsupportedError
        Where ncu is missing or cannot read the counters.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedError("Nsight Compute (ncu) is not on the PATH: it reads the counters")
    metrics = available(_told([ncu, "--query-metrics"]))
    with tempfile.TemporaryDirectory(prefix="cupyattn-ncu-") as folder:
        log = Path(folder) / "ncu.csv"
        _told([
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
            "--metrics", ",".join(metrics), "--log-file", os.fspath(log), sys.executable, "-m",
            "experiments.tuning.counters", "--inside", "--seed", str(seed),
        ])  # fmt: skip
        return by_cell(parsed(log.read_text(encoding="utf-8").splitlines()))


def _told(command: Sequence[str]) -> str:
    """Return what a command prints."""
    done = subprocess.run(
        command, cwd=recording.ROOT, capture_output=True, text=True, timeout=NCU_SECONDS,
        check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise UnsupportedError(f"{Path(command[0]).name} failed: {' '.join(last)}")
    return done.stdout


def available(query: str) -> list[str]:
    """Return the METRICS whose names ncu lists.

    Examples
    --------
    >>> available("dram__bytes_read   Counter  byte  # of bytes read from DRAM")
    ['dram__bytes_read.sum']
    """
    names = {line.split()[0] for line in query.splitlines() if line.strip()}
    return [metric for metric in METRICS if metric.partition(".")[0] in names]


def parsed(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return one record for each kernel of ncu's raw page: its name and its counters.

    Examples
    --------
    >>> page = ['==PROF== Connected', '"ID","Kernel Name","dram__bytes_read.sum"', '"","","byte"',
    ...         '"0","attn_fa(AttnParams)","1,024"']
    >>> parsed(page)
    [{'kernel': 'attn_fa', 'dram__bytes_read.sum': 1024.0}]
    """
    table = csv.reader(line for line in lines if line.startswith('"'))
    header, _, *rows = table
    found = []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        record: dict[str, Any] = {"kernel": cells["Kernel Name"].partition("(")[0]}
        for metric in METRICS:
            text = cells.get(metric, "").replace(",", "")
            if text.replace(".", "", 1).isdigit():  # else n/a
                record[metric] = float(text)
        found.append(record)
    return found


def by_cell(kernels: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the kernels after each mark.

    Examples
    --------
    >>> by_cell([{"kernel": x} for x in ("fill", MARK, "a", MARK, "b", "c")])
    [[{'kernel': 'a'}], [{'kernel': 'b'}, {'kernel': 'c'}]]
    """
    cells: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if kernel["kernel"] == MARK:
            cells.append([])
        elif cells:
            cells[-1].append(kernel)
    return cells


# ---- the record ----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Count in the interpreter, then on the device; keep the record and print the table."""
    length, heads = (recording.quick_length(args, LENGTH), 1 if args.quick else HEADS)
    problem = Problem(1, heads, length, HEAD_DIM, seed=args.seed)
    if args.inside:
        call_each(problem)
        return 0
    cells = [
        rung(variant, problem, name=called(variant, arch))
        if args.quick  # on the mirror, which has no architecture
        else rung(variant, problem, arch=arch)
        for variant, arch in WAYS
    ]
    content = judge_problem(problem, cells, problem.draw(on_device=not args.quick))
    content["least_bytes"] = least_bytes(problem)
    for row, (variant, arch) in zip(content["rows"], WAYS, strict=True):
        row["interpreter"] = interpreted(variant, arch, args.seed)
    content = {"interpreted_length": INTERPRETED_LENGTH, "problems": [content]}
    backend = "mirror" if args.quick else "cuda"
    if not args.quick:
        recording.keep(args, "counters", backend, content)  # should ncu fail
        found = watched(args.seed)
        for row, kernels in zip(content["problems"][0]["rows"], found, strict=True):
            row["device"] = kernels
    record = recording.keep(args, "counters", backend, content)
    output.print_table(
        ["", "J2", "kernel", "passes", "conflicts", "device passes", "conflicts", "DRAM", "least"],
        [line for found in record["problems"] for line in table(found)],
    )
    return 0 if recording.passed(record) else 1


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return one line for each kernel of each rung."""
    lines = []
    for row in found["rows"]:
        device = {kernel["kernel"]: kernel for kernel in row.get("device", ())}
        for name in dict.fromkeys([*row["interpreter"], *device]):
            counted, read = row["interpreter"].get(name), device.get(name, {})
            moved = [read[metric] for metric in DRAM if metric in read]
            lines.append([
                called(row["rung"], row["form"]), format_ratio(row["judgement"]["j2"]), name,
                *((f"{counted['passes']:,}", share_of(counted["conflicts"], counted["passes"]))
                  if counted else ("-", "-")),
                f"{read[PASSES]:,.0f}" if PASSES in read else "-",
                share_of(sum(read.get(x, 0.0) for x in CONFLICTS), read.get(PASSES, 0.0)),
                format_bytes(int(sum(moved))) if moved else "-",
                format_bytes(found["least_bytes"]),
            ])  # fmt: skip
    return lines


def share_of(conflicts: float, passes: float) -> str:
    """Return which share of the passes are conflicts.

    Examples
    --------
    >>> share_of(1, 4), share_of(0, 0)
    ('25 %', '-')
    """
    return format_share(conflicts / passes) if passes else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--inside", action="store_true", help="what ncu runs: one call of each")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
