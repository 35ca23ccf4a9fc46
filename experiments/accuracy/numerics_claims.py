"""How sharp is the bound on ordinary data, and how much do INT8 codes lose?

Varies       rung and dtype of the bound; granularity of the codes, with and without outliers
Holds fixed  head_dim 64; bounds: N(0, 1), 2 heads, length 256; codes: 8 heads, 1024 rows
Measures     median over rows of rms(J2 bound) / rms(output); relative L2 error of the codes and of
             the scores that they make
Run          python -m experiments.accuracy.numerics_claims [--quick] [--json FILE]

Needs no device: bounds and quantisers are NumPy. docs/MATH_REFERENCE.md quotes the record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import as_float64
from cupyattn.cli import output
from cupyattn.measure import rungs
from experiments._harness import recording

RUNGS = (("fa", "float16"), ("fa_tc", "float16"), ("fa_tc", "bfloat16"))


def sharpness(variant: str, dtype: str, length: int, seed: int) -> float:
    """Return the median over rows of rms(bound) / rms(output)."""
    q, k, v = distributions.make("normal", 1, 2, length, length, 64, dtype, seed)
    report = ca.testing.judge(
        ca.attention(q, k, v, variant=variant), q, k, v, variant=variant, seed=seed
    )
    return report.tightness


def lost_by_codes(granularity: str, distribution: str, length: int, seed: int) -> dict[str, float]:
    """Return the relative L2 error of the codes of Q and K, and that of their scores."""
    q, k, v = distributions.make(distribution, 1, 8, length, length, 64, "float32", seed)
    quant = ca.QuantConfig(granularity_q=granularity, granularity_k=granularity, smooth_k=False)
    q_hat, k_hat, _ = ca.quantize(q, k, v, quant=quant).dequantize("float64")
    q, k = as_float64(q), as_float64(k)
    scores, scores_hat = (a @ b.swapaxes(-1, -2) for a, b in ((q, k), (q_hat, k_hat)))
    codes, codes_hat = np.concatenate([q, k]), np.concatenate([q_hat, k_hat])
    return {
        "codes": rungs.relative_error(codes_hat, codes),
        "scores": rungs.relative_error(scores_hat, scores),
    }


def run(args: argparse.Namespace) -> int:
    """Compute both tables, print them and write the record."""
    rows = recording.quick_length(args, 1024)
    bounds = [
        {"variant": name, "dtype": dtype, "bound_over_rms": sharpness(name, dtype, 256, args.seed)}
        for name, dtype in RUNGS
    ]
    codes = [
        {"granularity": g, "distribution": d, **lost_by_codes(g, d, rows, args.seed)}
        for d in ("normal", "outlier")
        for g in ("tensor", "token")
    ]
    for table in (bounds, codes):
        cells = [[f"{x:.3g}" if isinstance(x, float) else x for x in r.values()] for r in table]
        output.print_table(list(table[0]), cells)
    recording.keep(args, "numerics_claims", "mirror", {"bounds": bounds, "codes": codes})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return run(recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
