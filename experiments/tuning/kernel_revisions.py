"""Are the attention kernels as fast as in an earlier revision?

Varies       kernels: today's kernels_cu and the one in FOLDER; the problems of peers and peers_int8
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, where the shape is not a model's;
             float16, N(0, 1); codes given; the host's code, so both get the same parameters
Measures     whether the PTX is the same (then nothing is timed); whether the results have the same
             bits; and the ratio of the old time to the new, round by round
Expect       no ratio below 0.99, and the same bits
Run          python -m experiments.tuning.kernel_revisions FOLDER REVISION [--json FILE]
             [--rungs NAME ...] [--only TEXT] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.measure import timing
from experiments._harness import recording
from experiments._harness.cells import Problem
from experiments._harness.others import format_comparison, geometric_mean
from experiments.diffusion.diffusion_shapes import SHAPES
from experiments.speed import peers, peers_int8
from experiments.tuning.same_ptx import digest

ARCH = "sm_90a"
#: The share of the old speed that a call must keep.
LEAST = 0.99
#: Calls of a problem: a rung, and its quantisation.
RUNGS: dict[str, dict[str, Any]] = {
    peers_int8.FULL: {"variant": "fa_tc"},
    **{name: {"variant": "fa_int8", "quant": quant} for name, quant in peers_int8.QUANT.items()},
}


@contextlib.contextmanager
def kernels_in(folder: Path) -> Iterator[None]:
    """Compile and load what lies in another folder than the library's own."""
    own = compiler.KERNELS
    compiler.KERNELS = folder
    compiler.cache_clear(disk=False)
    try:
        yield
    finally:
        compiler.KERNELS = own
        compiler.cache_clear(disk=False)


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the problems of `experiments.speed.peers` and `peers_int8`, each once."""
    names = [name for name, *_ in SHAPES]
    given = argparse.Namespace(
        quick=args.quick, seed=args.seed, head_dims=peers.HEAD_DIMS, lengths=peers.LENGTHS,
        accuracy=False, cells=peers_int8.CELLS, models=names,
    )  # fmt: skip
    found = dict.fromkeys(peers.problems(given) + peers_int8.problems(given))
    some = [problem for problem in found if args.only in problem.name]
    if not some:
        raise ValueError(f"--only {args.only!r}: the name of no problem holds that")
    return some


def modules(problem: Problem, name: str) -> list[ModuleSpec]:
    """Return what a rung compiles for a problem, passes before it too; no number is looked at."""
    shape = problem.batch, problem.heads, problem.length, problem.head_dim
    q, k = (np.empty((*shape[:2], n, shape[3]), "float16") for n in (shape[2], problem.len_kv))
    plans = ca.plan(q, k, k, causal=problem.causal, arch=ARCH, **RUNGS[name]).plans
    return [launch.module for plan in plans for launch in plan.launches]


def digests(
    folder: Path, specs: Sequence[ModuleSpec], threads: int
) -> dict[ModuleSpec, tuple[str, dict[str, int]]]:
    """Return what stands for the PTX of modules that are compiled from a folder, and registers."""

    def compiled(spec: ModuleSpec) -> tuple[str, dict[str, int]]:
        binary = compiler.build(spec, ARCH)
        return digest(binary.ptx), {name: x.registers for name, x in binary.kernels.items()}

    found = {}
    with (
        kernels_in(folder),
        ThreadPoolExecutor(threads) as pool,
        output.progress(f"compiling {folder}", len(specs)) as advance,
    ):
        for spec, one in zip(specs, pool.map(compiled, specs), strict=True):
            found[spec] = one
            advance(str(spec.source))
    return found


def given(name: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a rung is given: the arrays, or codes of them."""
    quant = RUNGS[name].get("quant")
    return tuple(arrays) if quant is None else (ca.quantize(*arrays, quant=quant, arch=ARCH),)


def drawn(problem: Problem) -> list[Any]:
    """Return q, k and v of N(0, 1), drawn on the device: sooner by far than on the host."""
    import cupy

    draw = cupy.random.default_rng(problem.seed).standard_normal
    lengths = problem.length, problem.len_kv, problem.len_kv
    return [
        draw((problem.batch, problem.heads, n, problem.head_dim), "float32").astype("float16")
        for n in lengths
    ]


def race(
    problem: Problem, names: Sequence[str], folders: Mapping[str, Path], rounds: int
) -> list[dict[str, Any]]:
    """Time what rungs run with the kernels of either folder, in turns."""
    sets = timing.rotated(drawn(problem))
    operands = {name: [given(name, arrays) for arrays in sets] for name in names}
    calls, results = {}, {}
    for name in names:
        for way, folder in folders.items():
            with kernels_in(folder):
                call = ca.plan(
                    *operands[name][0], variant=RUNGS[name]["variant"], causal=problem.causal,
                    arch=ARCH,
                )  # fmt: skip
            calls[f"{name}, {way}"] = _rotating(call, operands[name])
            results[f"{name}, {way}"] = call(*operands[name][0]).view("uint16")
    samples = timing.time_interleaved(calls, rounds=rounds)
    rows = [
        {
            "problem": problem.name, "rung": name,
            "same_bits": bool((results[f"{name}, old"] == results[f"{name}, new"]).all()),
            "samples": {way: samples[f"{name}, {way}"] for way in folders},
            "ratio": timing.paired_ratio(
                samples[f"{name}, old"], samples[f"{name}, new"]
            ).to_list(),
        }
        for name in names
    ]  # fmt: skip
    for row in rows:
        bits = "" if row["same_bits"] else ", other bits"
        print(
            f"{row['problem']}: {row['rung']} {format_comparison(row['ratio'])}{bits}", flush=True
        )
    return rows


def _rotating(call: Any, operands: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
    return lambda i: call(*operands[i % len(operands)])


def report(record: Mapping[str, Any]) -> bool:
    """Print what came of it; return whether nothing became slower or has other bits."""
    rows = record["rows"]
    same, all_of = record["calls"]["same_ptx"], record["calls"]["all"]
    print(f"\n{same} of {all_of} calls have the same PTX")
    slower = [row for row in rows if row["ratio"][0] < LEAST]
    if rows:
        means = geometric_mean([row["ratio"][0] for row in rows])
        print(f"{len(rows)} timed: geometric mean {means:.3f}, {len(slower)} below {LEAST}")
    return not slower and all(row["same_bits"] for row in rows)


def run(args: argparse.Namespace) -> int:
    """Compile both revisions, time what differs, print the table and write the record."""
    folders = {"old": args.folder.resolve(), "new": compiler.KERNELS}
    if not (folders["old"] / "prims").is_dir():
        raise ValueError(f"{args.folder} is no folder of kernels: it has no prims/")
    taken = {(p, name): modules(p, name) for p in problems(args) for name in args.rungs}
    specs = list(dict.fromkeys(spec for some in taken.values() for spec in some))
    found = {way: digests(folder, specs, args.threads) for way, folder in folders.items()}
    changed = {spec for spec in specs if found["old"][spec][0] != found["new"][spec][0]}
    for spec in sorted(changed, key=str):
        before, after = (found[way][spec][1] for way in folders)
        if before != after:
            print(f"{spec}: registers {before} to {after}")
    other = {key for key, some in taken.items() if changed & {*some}}
    content: dict[str, Any] = {
        "old_revision": args.revision, "rounds": 0 if args.quick else args.rounds, "rows": [],
        "calls": {"all": len(taken), "same_ptx": len(taken) - len(other)},
    }  # fmt: skip
    for problem in () if args.quick else dict.fromkeys(p for p, _ in other):
        names = [name for name in args.rungs if (problem, name) in other]
        content["rows"] += race(problem, names, folders, args.rounds)
        recording.keep(args, "kernel_revisions", "cuda", content)  # results so far, if time ends
    record = recording.keep(args, "kernel_revisions", "mirror" if args.quick else "cuda", content)
    return 0 if report(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("folder", type=Path, help="kernels_cu of the earlier revision")
    parser.add_argument("revision", help="what it is: a hash of git")
    parser.add_argument(
        "--rungs", nargs="+", default=list(RUNGS), choices=list(RUNGS), metavar="NAME"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name holds it")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compilations at once")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
