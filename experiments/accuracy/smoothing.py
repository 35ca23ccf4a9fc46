"""Does SmoothQuant help where scales of channels err, in place of a rotation or in front of one?

Varies       what channels of the activations are outliers, and of the weight; the number of
             channels, of which 256, 128 or 64 are rotated together
Holds fixed  64 rows, 128 output channels, N(0, 1) but for outliers; factors of channels as
             `cupyattn.quant.smoothing_factors` makes them
Measures     the relative L2 error of a product with scales of channels: as it is, rotated,
             smoothed, and smoothed then rotated. Each as a multiple of the error of blocks
Expect       where channels err more than 1.15 times as much as blocks, a rotation errs at most 1.3
             times as much, but for the widest rows. Smoothed first it errs less than half as much
             where outliers are large
Run          python -m experiments.accuracy.smoothing [--quick] [--json FILE]    # no device
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import cupyattn as ca
from cupyattn.checkpoints.choosing import LIMIT, ROTATED_LIMIT
from cupyattn.cli import output
from cupyattn.quant import smoothing_factors
from experiments._harness import recording

Floats = npt.NDArray[np.float32]
ROWS, OUT = 64, 128
#: Ways in which a layer takes its input: whether it is smoothed, and options of the layer.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "block": (False, {"strategy": "block"}),
    "channel": (False, {"strategy": "channel"}),
    "rotated": (False, {"strategy": "channel", "rotate": "hadamard"}),
    "smoothed": (True, {"strategy": "channel"}),
    "smoothed, rotated": (True, {"strategy": "channel", "rotate": "hadamard"}),
}


@dataclass(frozen=True)
class Case:
    """Activations and weight: outlier channels, and how large they are."""

    name: str
    channels: int = 3072
    outliers: int = 0
    factor: float = 1.0
    spread: float = 0.0
    head: int = 0
    offset: float = 0.0
    of_weight: float = 1.0

    def draw(self, seed: int) -> tuple[Floats, Floats]:
        """Draw x and w."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((ROWS, self.channels))
        w = rng.standard_normal((OUT, self.channels))
        x *= np.exp(self.spread * rng.standard_normal(self.channels))
        chosen = rng.choice(self.channels, self.outliers, replace=False)
        x[:, chosen] = x[:, chosen] * self.factor + self.offset
        w[:, chosen] *= self.of_weight
        x[:, : self.head] *= 10
        return x.astype(np.float32), w.astype(np.float32)


CASES = (
    Case("none"),
    Case("0.5 % x 30", outliers=15, factor=30),
    Case("one x 30", outliers=1, factor=30),
    Case("one x 1,000", outliers=1, factor=1000),
    Case("three x 1,000", outliers=3, factor=1000),
    Case("5 % x 10", outliers=150, factor=10),
    Case("one constant, 300", outliers=1, offset=300),
    Case("a head x 10", head=128),
    Case("half a row x 10", head=1536),
    Case("lognormal, 1", spread=1),
    Case("lognormal, 2", spread=2),
    Case("also of the weight", outliers=8, factor=30, of_weight=30),
    Case("one x 1,000, groups of 128", 3200, 1, 1000),
    Case("one x 1,000, groups of 64", 1600, 1, 1000),
    Case("one x 1,000, the widest", 32_768, 1, 1000),
    Case("one x 1,000, wide, groups of 64", 16_192, 1, 1000),
)
QUICK_CASES = (Case("none", 512), Case("three x 100", 512, 3, 100))


def errors(case: Case, seed: int) -> dict[str, float]:
    """Return the relative L2 error of a product by how the layer takes its input."""
    x, w = case.draw(seed)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    found = {}
    for name, (smooth, options) in WAYS.items():
        s = smoothing_factors(x, w) if smooth else None
        y = ca.Int8Linear.from_weight(w, smooth=s, **options)(x)
        found[name] = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    return found


def run(args: argparse.Namespace) -> int:
    """Measure every case, print the table, write the record."""
    rows = []
    for case in QUICK_CASES if args.quick else CASES:
        found = errors(case, args.seed)
        of_block = {name: one / found["block"] for name, one in found.items() if name != "block"}
        rotates = of_block["channel"] > LIMIT
        left = rotates and of_block["rotated"] > ROTATED_LIMIT
        rows.append({
            "case": case.name, "channels": case.channels, "block": found["block"],
            "of block": of_block, "left for a third step": left,
        })  # fmt: skip
    output.print_table(*table(rows))
    recording.keep(args, "smoothing", "mirror", {"rows": rows})
    return 0


def table(rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    ways = [name for name in WAYS if name != "block"]
    lines = [
        [r["case"], str(r["channels"]), f"{100 * r['block']:.2f} %",
         *(f"x {r['of block'][way]:.2f}" for way in ways),
         "left" if r["left for a third step"] else "-"]
        for r in rows
    ]  # fmt: skip
    return ["outlier channels", "channels", "block", *ways, "by the rule"], lines


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.guarded(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
