"""How much memory does sampling take, by the arithmetic of attention?

Varies       arithmetic of attention, as in `experiments.dit.quality`
Holds fixed  weights, one batch of images, the first, the middle and the last of 50 steps
Measures     the most bytes that are in use at once on the device, beside the weights
Run          python -m experiments.dit.memory [--images N] [--json FILE]

Counted are the bytes that calls ask CuPy's pool for, not what the pool keeps. ``--quick`` samples
an untrained one on the mirror, where nothing is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from experiments._harness import recording
from experiments.dit import modes
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters
from experiments.dit.sampler import BATCH, STEPS, sample
from experiments.dit.train import WEIGHTS, loaded


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that are in use more than before: now, and at most."""
    import cupy

    found = [0, 0]

    class Count(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "Count"

        def malloc_postprocess(self, **asked: Any) -> None:
            found[0] += asked["mem_size"]
            found[1] = max(found)

        def free_postprocess(self, **freed: Any) -> None:
            found[0] -= freed["mem_size"]

    with Count():
        yield found


def peak_bytes(
    model: Model, weights: Parameters, images: int, at: modes.At, steps: int
) -> int | None:
    """Return how much memory sampling takes beside the weights; None without a device."""

    def run() -> None:
        sample(model, weights, range(images), lambda step: at(step * (steps - 1) // 2), steps=3)

    run()  # what a mode compiles and keeps is there afterwards
    if model.xp is np:
        return None
    with counted() as found:
        run()
    return found[1]


def run(args: argparse.Namespace) -> int:
    """Count, print, record."""
    if args.images < 1:
        raise ValueError(f"--images must be positive, got {args.images}")
    xp, shape, weights = loaded(args, args.seed)
    model = Model(shape, xp)
    calibrations = modes.calibrate(model, weights, STEPS)
    peaks = {}
    with output.progress("sampling", len(modes.NAMES)) as advance:
        for name, at in modes.attentions(model, STEPS, calibrations).items():
            peaks[name] = peak_bytes(model, weights, args.images, at, STEPS)
            advance(name)
    output.print_table(
        ["", "memory"],
        [[n, "-" if x is None else f"{x / 2**20:,.0f} MiB"] for n, x in peaks.items()],
    )
    content = {"images": args.images, "peak_bytes": peaks}
    recording.keep(args, "dit_memory", "mirror" if args.quick else "cuda", content)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--images", type=int, default=BATCH, help="of the batch")
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
