"""Sampling: Euler's steps along the velocity from noise to an image.

Image i starts from noise of seed i, independent of the other images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from experiments.dit.attention import Attention
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters

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
        found.append(on_host(sample(model, weights, some, attention_at, steps=steps)))
        advance(f"{first + len(some)} images")
    return np.concatenate(found)
