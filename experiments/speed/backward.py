"""How far are the gradients from the fastest there are, and what do equal bits cost?

Varies       length in {1024, 4096, 16384, 32768}; head_dim in {64, 128, 256}; causal or not;
             float16 or bfloat16; with --wan 40 heads of 128 at 7,800 and 17,160; with --grouped
             causal calls, 32 heads of 128 over 8 of K and V, 16 of 256 over 2
Holds fixed  16,384 tokens in all or one sequence, heads x head_dim = 2048, N(0, 1), d_out too
Measures     J2 of one head of one batch entry; time, TFLOP/s (10 head_dim operations a score, as
             the atomic form does); in the same rounds the ratio of the form that calls take to the
             best library; our deterministic form beside our atomic form, and beside the
             deterministic form of FlashAttention-4; with --joules clocks, watts and joules,
             sustained and in turns
Beside       torch's scaled_dot_product_attention with its FlashAttention-2 and cuDNN backends, and
             both forms of FlashAttention-4 where it can be imported; the backward pass alone
Expect       beside the best library, in the geometric mean, 1.10 at head_dim 64, 1.05 at 128 with
             no interval below 1, 1.25 at 256; the deterministic form at 0.95 of the atomic form and
             1.0 of FlashAttention-4's
Run          python -m experiments.speed.backward [--quick] [--json FILE] [--head-dims N ...]
             [--lengths N ...] [--dtypes TYPE ...] [--wan] [--grouped] [--joules] [--seconds 2]
             [--turns 2] [--plot FOLDER] [--stored [--merge FILE ...]]

The record is rewritten after each problem. With --merge problems of other records are added.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.cli import output
from cupyattn.gradients import backward_exact, judge_backward
from cupyattn.measure import device, timing
from cupyattn.measure.rungs import relative_error
from cupyattn.measure.words import format_seconds
from experiments._harness import joules, merging, plots, recording
from experiments._harness.cells import REFUSALS, Problem, reason
from experiments._harness.others import (
    CUDNN,
    FLASH_2,
    FLASH_4,
    fastest,
    flash_attention_4,
    format_comparison,
    ratio,
    refusing,
)
from experiments.speed.peers import HEAD_DIMS, TOKENS, WIDTH, problems

ATOMIC, DETERMINISTIC = "atomic", "deterministic"
FLASH_4_DETERMINISTIC = f"{FLASH_4}, deterministic"
BESIDE_BEST, BESIDE_FLASH_4 = "beside the best library", f"beside {FLASH_4}"
BESIDE_DETERMINISTIC = f"deterministic beside {FLASH_4}'s"
COMPARISONS = (
    BESIDE_BEST, "beside cuDNN", BESIDE_FLASH_4, "deterministic beside atomic", BESIDE_DETERMINISTIC
)  # fmt: skip
LENGTHS, DTYPES = (1024, 4096, 16_384, 32_768), ("float16", "bfloat16")
#: Heads, head_dim, lengths and type of Wan's self-attention.
WAN_HEADS, WAN_DIM, WAN_LENGTHS, WAN_DTYPE = 40, 128, (7800, 17160), "bfloat16"
#: Head_dim, heads and heads of keys, and lengths of calls whose heads share keys.
GROUPED, GROUPED_LENGTHS = ((128, 32, 8), (256, 16, 2)), (4096, 16_384)
#: Relative error that another library's gradients may have, several times that of 16 bits.
TOLERANCE = 0.01
#: Takes d_out, q, k, v, out and lse and returns what runs the backward pass on them.
Prepare = Callable[..., Callable[[], Any]]


def ours(problem: Problem, *, deterministic: bool) -> Prepare:
    """Return one form of `cupyattn.attention_backward`."""
    return lambda *received: (
        lambda: ca.attention_backward(*received, causal=problem.causal, deterministic=deterministic)
    )


def theirs(problem: Problem) -> dict[str, Prepare]:
    """Return torch's backward passes by name; nothing where torch is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}

    def prepare(name: str, backend: Any) -> Prepare:
        def prepared(d_out: Any, q: Any, k: Any, v: Any, *_: Any) -> Callable[[], Any]:
            operands = [torch.from_dlpack(x).detach().requires_grad_() for x in (q, k, v)]
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *operands, is_causal=problem.causal,
                    enable_gqa=problem.heads_kv is not None,
                )
            given = torch.from_dlpack(d_out)

            def backward() -> Any:
                return torch.autograd.grad(out, operands, given, retain_graph=True)

            return refusing(name, backward)

        return refusing(name, prepared)

    found = {
        FLASH_2: prepare(FLASH_2, SDPBackend.FLASH_ATTENTION),
        CUDNN: prepare(CUDNN, SDPBackend.CUDNN_ATTENTION),
    }
    attend = flash_attention_4()
    if attend is not None:
        for name, options in ((FLASH_4, {}), (FLASH_4_DETERMINISTIC, {"deterministic": True})):
            prepared = rows_first(name, attend, torch, causal=problem.causal, **options)
            found[name] = refusing(name, prepared)
    return found


def rows_first(name: str, attend: Callable[..., Any], torch: Any, **options: bool) -> Prepare:
    """Return the backward pass of a function of layout BSHD, whose rows are copied beforehand."""

    def prepared(d_out: Any, q: Any, k: Any, v: Any, *_: Any) -> Callable[[], Any]:
        given, *rows = (
            torch.from_dlpack(x).detach().transpose(1, 2).contiguous() for x in (d_out, q, k, v)
        )
        operands = [x.requires_grad_() for x in rows]
        out = attend(*operands, **options)
        out = out[0] if isinstance(out, tuple) else out

        def backward() -> Any:
            found = torch.autograd.grad(out, operands, given, retain_graph=True)
            return [x.transpose(1, 2) for x in found]

        return refusing(name, backward)

    return prepared


def received(problem: Problem, *, on_device: bool) -> tuple[Any, ...]:
    """Return d_out, q, k, v and what the forward pass of fa_tc made of them."""
    q, k, v = problem.draw(on_device=on_device)
    xp = array_namespace(q)
    rng = np.random.default_rng(problem.seed + 1)
    d_out = xp.asarray(rng.standard_normal(q.shape, np.float32).astype(problem.dtype))
    out, lse = ca.attention(q, k, v, variant="fa_tc", causal=problem.causal, return_lse=True)
    return d_out, q, k, v, out, lse


def one_head(arrays: Sequence[Any], xp: Any) -> list[Any]:
    """Return the first head of the first batch entry of arrays, of whatever library, contiguous.

    Query heads that share the first key head stay together.
    """
    taken = [x if isinstance(x, xp.ndarray) else xp.from_dlpack(x) for x in arrays]
    fewest = min(x.shape[1] for x in taken)
    return [xp.ascontiguousarray(x[:1, : x.shape[1] // fewest]) for x in taken]


def exact_of(problem: Problem, given: Sequence[Any]) -> Any:
    """Return the exact gradients of one head."""
    head = one_head(given, array_namespace(given[1]))
    return backward_exact(*head[:4], causal=problem.causal)


def judge(
    problem: Problem, name: str, found: Sequence[Any], given: Sequence[Any], exact: Any = None
) -> dict[str, Any]:
    """Hold one head of a result to its bound (J2); another library's to a relative error.

    What a library's own forward pass left to it is not known, and so there is no bound. `exact`
    are the exact gradients, computed where omitted.
    """
    xp = array_namespace(given[1])
    mine = one_head(found, xp)
    if name in (ATOMIC, DETERMINISTIC):
        worst = judge_backward(mine, *one_head(given, xp), causal=problem.causal).ratio
    else:
        exact = exact_of(problem, given) if exact is None else exact
        errors = (relative_error(as_float64(x), y) for x, y in zip(mine, exact, strict=True))
        worst = max(errors) / TOLERANCE
    return {"j2": worst, "ok": worst <= 1}


def measure(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Judge every pass on one problem, and on a device time the passes that hold their bound."""
    on_device = not args.quick
    given = received(problem, on_device=on_device)
    ways = {ATOMIC: ours(problem, deterministic=False)}
    ways[DETERMINISTIC] = ours(problem, deterministic=True)
    ways |= theirs(problem) if on_device else {}
    taken = ca.explain_backward(*given, causal=problem.causal).partition(":")[0]
    taken = ATOMIC if taken.endswith(ATOMIC) else DETERMINISTIC
    operations = problem.operations * 5 // 2
    exact = exact_of(problem, given) if on_device else None
    rows = []
    for name, prepare in ways.items():
        row: dict[str, Any] = {"variant": name, "peer": name not in (ATOMIC, DETERMINISTIC)}
        try:
            row |= judge(problem, name, prepare(*given)(), given, exact)
        except REFUSALS as error:
            row |= {"unsupported": reason(error), "ok": row["peer"]}
        rows.append(row)
    if on_device:
        sets = timing.rotated(given)
        fit = [row for row in rows if row["ok"] and "unsupported" not in row]
        calls = {}
        for row in fit:
            runs = [ways[row["variant"]](*arrays) for arrays in sets]
            calls[row["variant"]] = lambda i, runs=runs: runs[i % len(runs)]()
        samples = timing.time_interleaved(calls, rounds=args.rounds)
        for row in fit:
            row["samples"] = samples[row["variant"]]
            row["seconds"] = timing.median(row["samples"]).median
            row["tflops"] = operations / row["seconds"] / 1e12
        if args.joules:
            typical = {row["variant"]: row["seconds"] for row in fit}
            counted = joules.on_device(calls, typical, args.seconds, args.turns, operations)
            for row in fit:
                row["energy"] = counted[row["variant"]]
    return {
        "problem": vars(problem) | {"name": problem.name}, "operations": operations, "rows": rows,
        "taken": taken, **compared(rows, taken),
        **({"clocks": device.clocks()} if on_device else {}),
    }  # fmt: skip


def compared(rows: Sequence[Mapping[str, Any]], taken: str) -> dict[str, Any]:
    """Return how fast the form that is taken is beside others, and the deterministic beside it."""
    by_name = {row["variant"]: row for row in rows}
    deterministic = by_name.get(DETERMINISTIC)
    best = fastest(by_name, (FLASH_2, CUDNN, FLASH_4))
    return {
        BESIDE_BEST: ratio(best, by_name.get(taken)),
        "beside cuDNN": ratio(by_name.get(CUDNN), by_name.get(taken)),
        BESIDE_FLASH_4: ratio(by_name.get(FLASH_4), by_name.get(taken)),
        "deterministic beside cuDNN": ratio(by_name.get(CUDNN), deterministic),
        "deterministic beside atomic": ratio(by_name.get(ATOMIC), deterministic),
        BESIDE_DETERMINISTIC: ratio(by_name.get(FLASH_4_DETERMINISTIC), deterministic),
    }


def report(record: Mapping[str, Any], folder: Path | None) -> None:
    """Print the table of a record, and draw it if that was asked for."""
    header = ["", "J2", "time", "TFLOP/s", "J a call", "W", "SM MHz", *COMPARISONS]
    rows = []
    for found in record["problems"]:
        rows.append([found["problem"]["name"], *[""] * 6])
        rows[-1] += [format_comparison(found.get(x)) for x in COMPARISONS]
        for row in found["rows"]:
            judged = f"{row['j2']:.3f}" if "j2" in row else "not supported"
            timed = ["-", "-"]
            if "seconds" in row:
                timed = [format_seconds(row["seconds"]), f"{row['tflops']:.4g}"]
            taken = " (taken)" if row["variant"] == found["taken"] else ""
            rows.append([f"  {row['variant']}{taken}", judged, *timed, *of_energy(row)])
            rows[-1] += [""] * len(COMPARISONS)
    output.print_table(header, rows)
    if folder:
        drawn = {**record, "problems": [one for one in record["problems"] if is_drawn(one)]}
        for file in plots.draw_by_length(drawn, folder, "backward", plots.BACKWARD_LINES):
            print(f"wrote {file}")


def is_drawn(found: Mapping[str, Any]) -> bool:
    """Whether a problem is a point of the plots by length: float16, and as many heads as usual."""
    one = found["problem"]
    usual = one["heads"] * one["head_dim"] == WIDTH and one.get("heads_kv") is None
    return bool(usual and one["dtype"] == DTYPES[0])


def of_energy(row: Mapping[str, Any]) -> list[str]:
    """Return joules of a call, watts and clock of a row, where they were counted."""
    if "energy" not in row:
        return ["-"] * 3
    one = row["energy"]
    clock = f"{one['clocks'].get('sm_clock_mhz', 0):.0f}"
    return [f"{one['joules_per_call']:.4g}", f"{one['watts']:.0f}", clock]


def all_problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs of the arguments."""
    found = [replace(one, dtype=dtype) for dtype in args.dtypes for one in problems(args)]
    if args.wan:
        for length in (recording.quick_length(args, n) for n in WAN_LENGTHS):
            heads = 1 if args.quick else WAN_HEADS
            found.append(Problem(1, heads, length, WAN_DIM, dtype=WAN_DTYPE, seed=args.seed))
    if args.grouped:
        for head_dim, heads, heads_kv in GROUPED:
            for n in GROUPED_LENGTHS:
                length = recording.quick_length(args, n)
                batch = 1 if args.quick else TOKENS // n
                found.append(
                    Problem(batch, heads, length, head_dim, causal=True, dtype=WAN_DTYPE,
                            seed=args.seed, heads_kv=heads_kv)
                )  # fmt: skip
    return found


def run(args: argparse.Namespace) -> int:
    """Run the experiment, print the table, write the record."""
    recording.check_rounds(args)
    joules.check_seconds(args.seconds)
    if args.plot:
        plots.check(args.plot)
    found: list[dict[str, Any]] = []
    content = {"rounds": 0 if args.quick else args.rounds, "problems": found}
    record: dict[str, Any] = {}
    for problem in all_problems(args):
        found.append(measure(problem, args))
        record = recording.keep(args, "backward", "mirror" if args.quick else "cuda", content)
    report(record, args.plot)
    return 0 if all(r["ok"] for one in found for r in one["rows"] if not r["peer"]) else 1


def again(args: argparse.Namespace) -> int:
    """Report on the committed record, with the problems of other files that it lacks."""
    record = merging.record_with("backward", args.merge, merging.with_missing)
    report(record, args.plot)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES, metavar="TYPE")
    parser.add_argument("--wan", action="store_true", help="the shapes of Wan, too")
    parser.add_argument("--grouped", action="store_true", help="heads that share keys, too")
    parser.add_argument("--joules", action="store_true", help="count the energy of each pass")
    parser.add_argument(
        "--seconds", type=float, default=joules.LEAST_SECONDS, help="of each window of --joules"
    )
    parser.add_argument("--turns", type=int, default=2, help="windows of each pass")
    parser.add_argument(
        "--plot", metavar="FOLDER", type=Path, help="draw backward_hdN.svg for every head_dim"
    )
    recording.add_stored_argument(parser)
    recording.add_merge_argument(parser)
    args = parser.parse_args(argv)
    return recording.guarded(again, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
