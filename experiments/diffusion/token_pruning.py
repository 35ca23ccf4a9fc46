"""How much of the output is lost with the keys that pruning drops, and are they well chosen?

Varies       share of the keys dropped; query rows for the estimate of importance; the operands
Holds fixed  Q, K, V of experiments/data; a block of the trained diffusion transformer at three
             steps (2 heads of 64, length 1024); three layers of a text encoder (12 heads of 32,
             length 512); "precision" mode
Measures     relative L2 error of the pruned output against all keys, beside keys dropped at random
Run          python -m experiments.diffusion.token_pruning [--quick] [--json FILE]

Needs no device, because the loss does not depend on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import as_float64
from cupyattn.cli import output
from cupyattn.diffusion import key_importance
from cupyattn.diffusion.pruning import compact, kept_count
from cupyattn.measure import rungs
from cupyattn.reference.exact import attention_exact
from experiments._harness import captures, recording

BLOCK, STEPS, LAYERS = 4, 50, (0, 2, 5)
RATIOS, ROWS = (0.1, 0.2, 0.4), (8, 32, 128, 512)
RANDOM = "random"


def sources() -> dict[str, tuple[Any, ...]]:
    """Return Q, K and V by what they are of, float16."""
    found = {
        f"transformer, step {step}": captures.captured(BLOCK, step)
        for step in captures.captured_steps(STEPS)
    }
    return found | {f"encoder, layer {n}": captures.recorded(n) for n in LAYERS}


def losses(name: str, operands: Sequence[Any], seed: int) -> Iterator[dict[str, Any]]:
    """Yield the error of every choice of keys."""
    q, k, v = operands
    length = k.shape[2]
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
                "operands": name, "length": length, "ratio": ratio, "rows": rows,
                "error": rungs.relative_error(o, exact),
            }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compute, print the table, write the record."""
    found = []
    for name, operands in sources().items():
        length = recording.quick_length(args, operands[1].shape[2])
        found += losses(name, [x[:, :, :length] for x in operands], args.seed)
    kinds = list(dict.fromkeys(row["rows"] for row in found))
    table = []
    for name in dict.fromkeys(row["operands"] for row in found):
        for ratio in RATIOS:
            mine = [r for r in found if (r["operands"], r["ratio"]) == (name, ratio)]
            errors = {r["rows"]: f"{r['error']:.2g}" for r in mine}
            table.append([name, f"{ratio:.0%}", *(errors.get(kind, "-") for kind in kinds)])
    output.print_table(["operands", "dropped", *(f"{kind} rows" for kind in kinds)], table)
    recording.keep(args, "token_pruning", "mirror", {"rows": found})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return run(recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
