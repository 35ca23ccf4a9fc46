"""Does fa_tc keep up with the fastest attention on the shapes of diffusion models?

Varies       the shape: self-attention of image and video models, and cross-attention to a text
Holds fixed  not causal, float16, N(0, 1)
Measures     J2, relative error; time, TFLOP/s; in the same rounds the ratio to cuDNN and, with its
             95 % interval, to the faster of cuDNN and FlashAttention-3
Beside       the libraries of peers.py
Expect       at least 1.00 of the faster rival, at head_dim 40, 72 and 96 more: there others pad
Run          python -m experiments.diffusion.diffusion_shapes [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments._harness import recording
from experiments._harness.cells import Problem
from experiments.speed import peers

#: (name, batch, heads, queries, keys, head_dim)
SHAPES = (
    ("batch 16", 16, 32, 4096, 4096, 128),
    ("Flux", 1, 24, 4608, 4608, 128),
    ("SDXL", 2, 10, 4096, 4096, 64),
    ("Stable Diffusion 1.5", 2, 8, 4096, 4096, 40),
    ("text cross-attention", 2, 24, 4096, 77, 64),
    ("CogVideoX", 1, 48, 17_776, 17_776, 64),
    ("Wan 2.1 14B", 1, 40, 32_760, 32_760, 128),
    ("HunyuanVideo", 1, 24, 118_800, 118_800, 128),
    ("short", 1, 32, 1024, 1024, 128),
    ("head_dim 96", 1, 24, 8192, 8192, 96),
    ("head_dim 72", 1, 16, 16_384, 16_384, 72),
)


def problems(args: argparse.Namespace) -> dict[Problem, list[str]]:
    """Return the inputs, each with the shapes that it represents; quick inputs may represent
    several."""
    found: dict[Problem, list[str]] = {}
    for label, batch, heads, len_q, len_kv, head_dim in SHAPES:
        if args.quick:
            batch, heads = 1, 2
        len_q, len_kv = recording.quick_length(args, len_q), recording.quick_length(args, len_kv)
        length_kv = None if len_kv == len_q else len_kv
        problem = Problem(batch, heads, len_q, head_dim, seed=args.seed, length_kv=length_kv)
        found.setdefault(problem, []).append(label)
    return found


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print how fa_tc compares."""
    found = problems(args)
    labels = {problem.name: ", ".join(some) for problem, some in found.items()}
    record = peers.measure(args, "diffusion_shapes", list(found), extra={"models": labels})
    print(f"\n{peers.summary(record['against_rival'], lambda name: f'{labels[name]}: {name}')}")
    return 0 if recording.passed(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
