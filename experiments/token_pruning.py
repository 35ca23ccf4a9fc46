"""How much of the output is lost with the keys that pruning drops, and are they well chosen?

Varies       share of the keys dropped; query rows that importance is estimated from; layer
Holds fixed  Q, K, V of experiments/data (12 heads, length 512, head_dim 32), "precision" mode
Measures     relative L2 error of the pruned output against all keys, beside keys dropped at random
Run          python -m experiments.token_pruning [--quick] [--json FILE]

Needs no device: what is lost does not depend on where it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn import measure
from cupyattn.cli import output
from cupyattn.diffusion import key_importance
from cupyattn.diffusion.pruning import compact, kept_count
from cupyattn.reference import attention_exact
from cupyattn.rounding import as_float64
from experiments import common

LAYERS, RATIOS, ROWS = (0, 2, 5), (0.1, 0.2, 0.4), (8, 32, 128, 512)
RANDOM = "random"


def operands(layer: int, length: int) -> tuple[Any, ...]:
    """Return Q, K and V of one layer, float16."""
    return tuple(x[:, :, :length] for x in common.recorded(layer))


def losses(layer: int, length: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the error of every choice of keys."""
    q, k, v = operands(layer, length)
    exact = attention_exact(*map(as_float64, (q, k, v)))
    rng = np.random.default_rng(seed)
    choices: dict[Any, Any] = {
        rows: key_importance(q, k, rows=rows) for rows in ROWS if rows <= length
    }
    choices[RANDOM] = rng.random(k.shape[:3], np.float32)
    for ratio in RATIOS:
        for rows, importance in choices.items():
            few = compact(k, v, importance, kept_count(length, ratio))[:2]
            o = attention_exact(*map(as_float64, (q, *few)))
            yield {
                "layer": layer, "ratio": ratio, "rows": rows,
                "error": measure.relative_error(o, exact),
            }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compute, print the table, write the record."""
    length = common.quick_length(args, 512)
    found = [row for layer in LAYERS for row in losses(layer, length, args.seed)]
    kinds = list(dict.fromkeys(row["rows"] for row in found))
    table = []
    for layer in LAYERS:
        for ratio in RATIOS:
            mine = [r for r in found if (r["layer"], r["ratio"]) == (layer, ratio)]
            table.append([str(layer), f"{ratio:.0%}", *(f"{r['error']:.2g}" for r in mine)])
    output.print_table(["layer", "dropped", *(f"{kind} rows" for kind in kinds)], table)
    common.keep(args, "token_pruning", "mirror", {"length": length, "rows": found})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return run(common.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
