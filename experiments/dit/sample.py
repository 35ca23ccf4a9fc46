"""Sample images from the trained weights.

    python -m experiments.dit.sample [--plot FILE.png] [--images N] [--steps N] [--variant RUNG]

Euler's steps along the velocity from noise to an image; image i starts from noise of its own seed,
whatever else is sampled. ``--quick`` samples from weights that were not trained, on the mirror.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from experiments import common
from experiments.dit import checkpoint, data, pictures
from experiments.dit.attention import Attention, Kernels
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters
from experiments.dit.train import QUICK, WEIGHTS, array_module

#: Steps of a sampler, as in the founding notes.
STEPS = 50
#: Images that go through the network together.
BATCH = 64
Array = Any


def levels(steps: int) -> np.ndarray:
    """Return the noise levels of the steps and the one after the last: 1 to 0 at even distances.

    Examples
    --------
    >>> levels(4).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return np.linspace(1.0, 0.0, steps + 1)


def noise(seeds: Sequence[int], size: int) -> np.ndarray:
    """Draw the noise that images start from, float32, (count, size, size, 3)."""
    rngs = (np.random.default_rng([0x5EED, seed]) for seed in seeds)
    return np.stack([rng.standard_normal((size, size, 3), np.float32) for rng in rngs])


def labels_of(seeds: Sequence[int], classes: int) -> np.ndarray:
    """Return a label for each seed: all in turn."""
    return np.asarray(seeds) % classes


def sample(
    model: Model,
    weights: Parameters,
    seeds: Sequence[int],
    attention_at: Callable[[int], Attention],
    *,
    steps: int = STEPS,
    seen: Callable[[int, Array], None] = lambda step, x: None,
) -> Array:
    """Sample one batch of images.

    Parameters
    ----------
    model : Model
    weights : Parameters
        float16.
    seeds : sequence of int
        One for each image.
    attention_at : callable
        Returns the attention of a step.
    steps : int
    seen : callable
        Called with each step's number and the images as they are after it.

    Returns
    -------
    array, float32, (count, size, size, 3)
    """
    xp, shape = model.xp, model.shape
    parameters = weights.like(weights.flat.astype(model.wide))
    x = xp.asarray(noise(seeds, shape.size))
    labels = xp.asarray(labels_of(seeds, shape.classes))
    sigmas = levels(steps)
    for step in range(steps):
        sigma, after = float(sigmas[step]), float(sigmas[step + 1])
        level = xp.full(len(x), sigma, x.dtype)
        velocity, _ = model.forward(
            parameters, weights, x, level, labels, attention_at(step), keep=False
        )
        x = x + (after - sigma) * velocity
        seen(step, x)
    return x


def sample_all(
    model: Model,
    weights: Parameters,
    seeds: Sequence[int],
    attention_at: Callable[[int], Attention],
    *,
    steps: int = STEPS,
    advance: Callable[[str], None] = lambda done: None,
) -> np.ndarray:
    """Sample any number of images, `BATCH` at a time; return them on the host."""
    found = []
    for first in range(0, len(seeds), BATCH):
        some = seeds[first : first + BATCH]
        images = sample(model, weights, some, attention_at, steps=steps)
        found.append(images.get() if hasattr(images, "get") else images)
        advance(f"{first + len(some)} images")
    return np.concatenate(found)


def run(args: argparse.Namespace) -> int:
    """Sample, and write the grid."""
    if args.images < 1 or args.steps < 1:
        raise ValueError(f"--images and --steps must be positive, got {args.images}, {args.steps}")
    xp = array_module(quick=args.quick)
    if args.quick:
        shape, weights = QUICK, checkpoint.untrained(QUICK, 0, xp)
    else:
        shape, weights = checkpoint.load_weights(args.weights, xp)
    attention = Kernels(args.variant)
    seeds = range(args.seed, args.seed + args.images)
    with output.progress("sampling", -(-args.images // BATCH)) as advance:
        images = sample_all(
            Model(shape, xp), weights, seeds, lambda step: attention, steps=args.steps,
            advance=advance,
        )  # fmt: skip
    pictures.write_png(args.plot, pictures.grid(data.as_pixels(images), shape.classes))
    print(f"wrote {args.plot}: {len(images)} images, columns " + ", ".join(data.NAMES))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, default=Path("dit_samples.png"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0, help="of the first image")
    parser.add_argument("--variant", default="fa_tc", help="rung of attention")
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    parser.add_argument("--quick", action="store_true", help="untrained and tiny, without a device")
    return common.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
