"""How much time and memory do 512 heads take at once, from arrays and from given codes?

Varies       length, 512 to 16,384; fa_tc; fa_int8 balanced and aggressive, from arrays and from
             codes. If torch is installed, its cuDNN runs beside them.
Holds fixed  batch 16, 32 heads, head_dim 128, float16, N(0, 1).
Measures     J2 of some rows; time and TFLOP/s. Of each call the bytes of its operands, and the
             largest number of bytes in use beside them, as asked of CuPy's pool.
Expect       Times grow with the square of the length. Codes halve the bytes of Q and K, and in
             mode "aggressive" the bytes of V.
Run          python -m experiments.speed.large_batches [--quick] [--lengths N N] [--json FILE]

Given codes stand for projections that hand over codes, so that no Q, K or V in 16 bits exists. The
record is written after each length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyattn.cli import output
from cupyattn.measure.words import format_bytes, format_ratio, format_seconds
from cupyattn.problem import choose
from experiments._harness import recording
from experiments._harness.cells import Cell, Problem, measure_problem, rung
from experiments._harness.others import CUDNN, sdpa
from experiments.dit.memory import counted
from experiments.speed.decode import draw

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
BATCH, HEADS, HEAD_DIM = 16, 32, 128
FULL, MODES = "fa_tc", ("balanced", "aggressive")
#: Batch entries that are judged at a time: 16 would need 190 GiB at 16,384 tokens.
ENTRIES = 2


def cells_of(problem: Problem) -> list[Cell]:
    """Return the cells of our own rungs."""
    found = [rung(FULL, problem)]
    for mode in MODES:
        for given in (False, True):
            found.append(
                rung(
                    "fa_int8", problem, quant=choose.QUANT[mode], codes_given=given,
                    name=f"fa_int8 {mode}",
                )
            )  # fmt: skip
    return found


def memory(cell: Cell, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Return the bytes of a cell's operands, and the largest number in use during its call."""
    operands = cell.prepare(*inputs)
    cell.run(*operands)  # compiles, and allocates the workspace that stays
    with counted() as found:
        o = cell.run(*operands)
    held = sum(int(x.nbytes) for x in operands)
    return {"operand_bytes": held, "call_bytes": found[1], "output_bytes": int(o.nbytes)}


def run(args: argparse.Namespace) -> int:
    """Measure every length, keep the record, print one table."""
    recording.check_rounds(args)
    problems: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    on_device = not args.quick
    for length in args.lengths[:1] if args.quick else args.lengths:
        sizes = (1, 1, 128) if args.quick else (BATCH, HEADS, length)
        problem = Problem(*sizes, HEAD_DIM, seed=args.seed)
        batch, heads, length = sizes
        drawn = batch, heads, heads, length, length, HEAD_DIM
        inputs = draw(drawn, args.seed, on_device=on_device)
        ours = cells_of(problem)
        rivals = [cell for cell in sdpa(problem) if cell.name == CUDNN] if on_device else []
        found = measure_problem(
            problem, [*ours, *rivals], rounds=args.rounds, on_device=on_device, baseline=FULL,
            inputs=inputs, entries=ENTRIES,
        )  # fmt: skip
        for row, cell in zip(found["rows"], ours, strict=False):
            if on_device and row["judgement"] is not None:
                row |= memory(cell, inputs)
        problems.append(found)
        del inputs
        backend = "cuda" if on_device else "mirror"
        record = recording.keep(
            args, "large_batches", backend, {"rounds": args.rounds, "problems": problems}
        )
    output.print_table(
        ["length", "", "J2", "time", "TFLOP/s", "operands", "beside them"],
        [line(found, row) for found in problems for row in found["rows"]],
    )
    return 0 if recording.passed(record) else 1


def line(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one row of the table."""
    judged = row["judgement"]

    def told(name: str, format_one: Callable[[Any], str]) -> str:
        return format_one(row[name]) if row.get(name) is not None else "-"

    return [
        f"{found['problem']['length']:,}", row["variant"],
        "-" if judged is None else format_ratio(judged["j2"]), told("seconds", format_seconds),
        told("tflops", "{:.4g}".format), told("operand_bytes", format_bytes),
        told("call_bytes", format_bytes),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
