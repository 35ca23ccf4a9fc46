"""Does fine-tuning lose anything where the forward pass is INT8 and the backward pass 16-bit?

Varies       forward pass of attention: fa_tc, fa_int8; backward pass in 16 bits in both
Holds fixed  the trained weights at the start, batches, learning rate; all else in 16 bits
Measures     loss of every step; loss on held-out batches afterwards, each by its own forward pass,
             and the INT8 one over the other, in pairs of batches
Run          python -m experiments.dit.fine_tune [--steps N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from experiments._harness import recording
from experiments.dit import metrics
from experiments.dit.attention import Kernels
from experiments.dit.checkpoint import State
from experiments.dit.train import (
    STEPS_OF_A_FIGURE,
    WEIGHTS,
    Settings,
    Trainer,
    curve,
    draw,
    loaded,
    train,
)

#: Rungs of the forward pass.
RUNGS = {"16-bit": "fa_tc", "INT8": "fa_int8"}
#: Batches that no training has seen: their steps come after all others.
HELD_OUT, HELD_OUT_FROM = 32, 10**9


def tuned(
    settings: Settings, weights: Any, xp: Any, variant: str, batches: int, advance: Any
) -> tuple[list[float], list[float]]:
    """Fine-tune with a rung; return its losses, and the losses of held-out batches afterwards.

    Parameters
    ----------
    settings : Settings
    weights : array, float32, (count,)
    xp : module
    variant : str
    batches : int
        Held out.
    advance : callable
        Told of every step.
    """
    trainer = Trainer(settings, xp, Kernels(variant))
    state = State.start(weights)
    train(trainer, state, lambda: False, lambda state: None, advance)
    held_out = (draw(settings, HELD_OUT_FROM + i) for i in range(batches))
    return state.losses, [float(trainer.loss(state.weights, batch)[0]) for batch in held_out]


def run(args: argparse.Namespace) -> int:
    """Fine-tune both, print what came of it, write the record."""
    if args.steps < 1:
        raise ValueError(f"--steps must be positive, got {args.steps}")
    xp, shape, weights = loaded(args, args.seed)
    settings = Settings(shape, args.seed + 1, args.batch, args.steps, args.rate)
    if args.quick:
        settings = replace(settings, batch=min(args.batch, 8))
    losses, held_out = {}, {}
    with output.progress("fine-tuning", args.steps * len(RUNGS)) as advance:
        for name, variant in RUNGS.items():
            losses[name], held_out[name] = tuned(
                settings, weights.flat.astype("float32"), xp, variant,
                4 if args.quick else HELD_OUT, advance,
            )  # fmt: skip
    ratio = np.array(held_out["INT8"]) / np.array(held_out["16-bit"]) - 1
    over = metrics.mean_interval(ratio)
    output.print_table(
        ["forward pass", "loss at first", "at last", "held out"],
        [
            [name, f"{x[0]:.4f}", f"{np.mean(x[-STEPS_OF_A_FIGURE:]):.4f}",
             f"{np.mean(held_out[name]):.5f}"]
            for name, x in losses.items()
        ],
    )  # fmt: skip
    print(f"INT8 over 16-bit: {over[0]:+.4%} [{over[1]:+.4%}, {over[2]:+.4%}]")
    content = {
        "settings": settings.to_dict(), "steps_of_a_figure": STEPS_OF_A_FIGURE,
        "losses": {name: curve(x) for name, x in losses.items()}, "held out": held_out,
        "held-out loss over 16-bit": over,
    }  # fmt: skip
    recording.keep(args, "dit_fine_tune", "mirror" if args.quick else "cuda", content)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
