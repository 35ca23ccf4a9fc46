"""How far is fa_tc from the fastest attention there is?

Varies       length in {512, 1024, 2048, 4096, 8192, 16384}; head_dim in {64, 128}; causal or not
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, float16, N(0, 1)
Measures     J2, relative error; time, TFLOP/s, ratio to cuDNN in the same rounds
Beside       torch's scaled_dot_product_attention with its FlashAttention-2 and cuDNN backends;
             FlashAttention-3 where CUPYATTN_FA3 names its extension
Run          python -m experiments.peers [--quick] [--json FILE] [--head-dims N ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import common
from experiments.common import Cell, Problem
from experiments.others import CUDNN, FLASH_3, flash_attention_3, sdpa

TOKENS, WIDTH = 16_384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128)


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs."""
    if args.quick:
        length = common.quick_length(args, LENGTHS[0])
        return [
            Problem(1, 2, length, d, c, seed=args.seed) for d in HEAD_DIMS for c in (False, True)
        ]
    return [
        Problem(TOKENS // length, WIDTH // head_dim, length, head_dim, causal, seed=args.seed)
        for head_dim in args.head_dims
        for causal in (False, True)
        for length in args.lengths
    ]


def cells(problem: Problem, *, on_device: bool) -> list[Cell]:
    """Return fa_tc, and on a device the other libraries."""
    found = [common.rung("fa_tc", problem)]
    return found + (sdpa(problem) + flash_attention_3(problem) if on_device else [])


def summary(record: Mapping[str, Any]) -> str:
    """Return the ratio of fa_tc to the better of cuDNN and FlashAttention-3, by problem."""
    lines, logs = [], []
    for found in record["problems"]:
        rows = {row["variant"]: row for row in found["rows"]}
        rivals = [rows[n]["seconds"] for n in (CUDNN, FLASH_3) if "seconds" in rows.get(n, {})]
        if rivals and "seconds" in rows["fa_tc"]:
            ratio = min(rivals) / rows["fa_tc"]["seconds"]
            logs.append(math.log(ratio))
            lines.append(f"{found['problem']['name']:<44} {ratio:.3f}")
    if logs:
        lines.append(f"{'geometric mean':<44} {math.exp(sum(logs) / len(logs)):.3f}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print how fa_tc compares."""
    grid = [(p, cells(p, on_device=not args.quick)) for p in problems(args)]
    baseline = CUDNN if any(cell.name == CUDNN for _, some in grid for cell in some) else None
    record = common.run_grid(args, "peers", grid, baseline=baseline)
    print(summary(record))
    return 0 if common.passed(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = common.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    return common.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
