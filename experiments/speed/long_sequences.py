"""Does a call keep its speed up to a million tokens, and its memory to the stated bytes?

Varies       length, from 1,024 to 1,048,576; fa_tc and fa_int8, torch's cuDNN beside where it is
             there
Holds fixed  head_dim 128, float16, N(0, 1), batch 1; 16 heads to 65,536 tokens, 4 to
             131,072, then 1
Measures     J2 of some rows; time and TFLOP/s; bytes that the memory pool takes for a call, O among
             them, beside the workspace that `cupyattn.plan` states and O
Run          python -m experiments.speed.long_sequences [--quick] [--lengths N N] [--json FILE]

Calls of half a second or more are timed LONG_ROUNDS times, each a mean over its own length. The
record is rewritten after each length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.measure.words import format_bytes, format_ratio, format_seconds
from experiments._harness import recording
from experiments._harness.cells import Problem, measure_problem, rung
from experiments._harness.others import CUDNN, sdpa
from experiments.speed.decode import draw

LENGTHS = (1024, 4096, 16_384, 65_536, 118_800, 131_072, 262_144, 524_288, 1_048_576)
#: Longest length: the heads that it and shorter ones have.
HEADS = {65_536: 16, 131_072: 4, 1_048_576: 1}
HEAD_DIM = 128
VARIANTS = ("fa_tc", "fa_int8")
#: Length from which a call takes about half a second and more.
LONG, LONG_ROUNDS = 2**20, 5


def problem_of(length: int, args: argparse.Namespace) -> Problem:
    """Return the problem of a length."""
    heads = next((n for longest, n in HEADS.items() if length <= longest), 1)
    if args.quick:
        return Problem(1, 1, recording.quick_length(args, length), HEAD_DIM, seed=args.seed)
    return Problem(1, heads, length, HEAD_DIM, seed=args.seed)


def stated(variant: str, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Return what a plan says that a call takes: workspace, and O."""
    call = ca.plan(*inputs, variant=variant)
    return {"workspace_bytes": int(call.workspace_bytes), "output_bytes": int(inputs[0].nbytes)}


def pool_bytes(variant: str, inputs: tuple[Any, ...]) -> int:
    """Return by how much the memory pool grows over a call."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    o = ca.attention(*inputs, variant=variant)
    cupy.cuda.Device().synchronize()
    taken = int(pool.total_bytes() - before)
    del o
    pool.free_all_blocks()
    return taken


def run(args: argparse.Namespace) -> int:
    """Measure every length, keep the record, print one table."""
    recording.check_rounds(args)
    lengths = args.lengths[:1] if args.quick else args.lengths
    backend = "mirror" if args.quick else "cuda"
    problems: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for length in lengths:
        problem = problem_of(length, args)
        sizes = 1, problem.heads, problem.heads, problem.length, problem.len_kv, HEAD_DIM
        inputs = draw(sizes, args.seed, on_device=not args.quick)
        rivals = [] if args.quick else [cell for cell in sdpa(problem) if cell.name == CUDNN]
        cells = [*(rung(variant, problem) for variant in VARIANTS), *rivals]
        rounds = LONG_ROUNDS if length >= LONG else args.rounds
        found = measure_problem(
            problem, cells, rounds=rounds, on_device=not args.quick, baseline=CUDNN, inputs=inputs
        )
        found["rounds"] = 0 if args.quick else rounds
        for row in found["rows"]:
            if not row["peer"] and not args.quick:
                row |= stated(row["rung"], inputs)
                row["pool_bytes"] = pool_bytes(row["rung"], inputs)
        problems.append(found)
        del inputs
        record = recording.keep(args, "long_sequences", backend, {"problems": problems})
    output.print_table(
        ["length", "heads", "", "J2", "time", "TFLOP/s", "pool", "stated"],
        [line(found, row) for found in problems for row in found["rows"]],
    )
    return 0 if recording.passed(record) else 1


def line(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one row of the table."""
    problem, judged = found["problem"], row["judgement"]
    return [
        f"{problem['length']:,}", str(problem["heads"]), row["variant"],
        "-" if judged is None else format_ratio(judged["j2"]),
        format_seconds(row["seconds"]) if "seconds" in row else "-",
        f"{row['tflops']:.4g}" if "tflops" in row else "-",
        format_bytes(row["pool_bytes"]) if "pool_bytes" in row else "-",
        format_bytes(row["workspace_bytes"] + row["output_bytes"]) if "pool_bytes" in row else "-",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
