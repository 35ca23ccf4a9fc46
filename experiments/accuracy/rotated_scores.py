"""What does a rotation of Q and K win over smoothing and fine scales, before INT8 codes of both?

Varies       `QuantConfig.rotate`; the inputs; whether 2 rows and 16 keys or whole tiles share a
             scale; 8 bits or 4
Holds fixed  4 heads of 1,024 rows with head_dim 128, N(0, 1) but for outliers; for the transformer
             2 heads with head_dim 64. Keys are smoothed, P and V have 16 bits
Measures     the relative L2 error of attention to float32, as it is and rotated; the largest
             channel of K over the median one
Expect       nothing of normal data. With one channel 30 times as large less than a third of the
             error, and in between on blocks of the transformer
Run          python -m experiments.accuracy.rotated_scores [--quick] [--json FILE]    # no device
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.cli import output
from experiments._harness import captures, recording

CHANNEL, LARGE, HEADS, LENGTH, HEAD_DIM = 5, 30.0, 4, 1024, 128
BLOCKS, STEPS = (1, 4), 50
CONFIGS: dict[str, dict[str, Any]] = {
    "2 rows, 16 keys": {},
    "tiles": {"granularity_q": "block", "granularity_k": "block"},
    "4 bits": {"qk_bits": 4},
}


def problems(seed: int, *, quick: bool) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """Yield the name of each input, and q, k and v in float16."""
    length = 48 if quick else LENGTH
    sizes = 1, HEADS, length, length, HEAD_DIM
    q, k, v = distributions.make("normal", *sizes, seed=seed)
    yield "normal", (q, k, v)
    k = k.copy()
    k[..., CHANNEL] *= np.float16(LARGE)
    yield "a channel of K x 30", (q, k, v)
    if quick:
        return
    q = q.copy()
    q[..., CHANNEL] /= np.float16(LARGE)
    yield "the same, of Q / 30", (q, k, v)
    yield "0.1 % of numbers + N(0, 100)", distributions.make("outlier", *sizes, seed=seed)
    for block in BLOCKS:
        for step in captures.captured_steps(STEPS):
            q, k, v = captures.captured(block, step)
            first = (x[:, :, :length] for x in (q, k, v))
            yield f"transformer, block {block}, step {step}", tuple(first)


def errors(q: Any, k: Any, v: Any) -> dict[str, dict[str, float]]:
    """Return the relative L2 error by configuration: as it is, and rotated."""
    exact = ca.attention(*(x.astype(np.float32) for x in (q, k, v)), variant="fa")
    found: dict[str, dict[str, float]] = {}
    for name, fields in CONFIGS.items():
        found[name] = {}
        for way, rotate in (("as it is", None), ("rotated", "hadamard")):
            quant = ca.QuantConfig(**fields, rotate=rotate)
            o = ca.attention(q, k, v, variant="fa_int8", quant=quant)
            found[name][way] = float(np.linalg.norm(o - exact) / np.linalg.norm(exact))
    return found


def largest_channel(k: Any) -> float:
    """Return the largest channel of smoothed keys over the median one, by root mean square."""
    k = k.astype(np.float64)
    rms = np.sqrt(((k - k.mean(axis=2, keepdims=True)) ** 2).mean(axis=2))
    return float((rms.max(axis=-1) / np.median(rms, axis=-1)).max())


def run(args: argparse.Namespace) -> int:
    """Measure every input, print the table, write the record."""
    rows = []
    for name, inputs in problems(args.seed, quick=args.quick):
        rows.append({
            "input": name, "head_dim": inputs[0].shape[-1],
            "largest channel of K": largest_channel(inputs[1]), "errors": errors(*inputs),
        })  # fmt: skip
    output.print_table(*table(rows))
    recording.keep(args, "rotated_scores", "mirror", {"rows": rows})
    return 0


def table(rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    lines = []
    for row in rows:
        cells = [
            f"{100 * x['as it is']:.2f} % x {x['rotated'] / x['as it is']:.2f}"
            for x in row["errors"].values()
        ]
        lines.append([row["input"], f"{row['largest channel of K']:.1f}", *cells])
    return ["input", "largest channel", *CONFIGS], lines


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.guarded(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
