"""A small network that tells the photographs apart; its features are what distances are taken in.

It is trained here, on crops of the same photographs, in about a thousand steps. A Frechet distance
in its features is not the FID, which has another network and other weights. It compares the modes
of one experiment with each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace
from experiments.dit import data, layers
from experiments.dit.optim import AdamW
from experiments.dit.parameters import Parameters

Array = Any


@dataclass(frozen=True)
class Stages:
    """Sizes of the network: in each stage patches become one token, and that a linear layer's.

    Parameters
    ----------
    size : int
        Rows and columns of an image.
    stages : tuple of (int, int)
        Patch and width of each.
    classes : int
    """

    size: int = 64
    stages: tuple[tuple[int, int], ...] = ((4, 64), (2, 96), (2, 64))
    classes: int = len(data.NAMES)

    @property
    def features(self) -> int:
        """Width of the last stage."""
        return self.stages[-1][1]

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name."""
        found: dict[str, tuple[int, ...]] = {}
        channels = 3
        for i, (patch, width) in enumerate(self.stages):
            found |= {f"{i}.weight": (patch**2 * channels, width), f"{i}.bias": (width,)}
            channels = width
        return found | {"out.weight": (channels, self.classes), "out.bias": (self.classes,)}


class FeatureNet:
    """The network.

    Parameters
    ----------
    sizes : Stages
    weights : Parameters
        float32 or float64.
    """

    def __init__(self, sizes: Stages, weights: Parameters) -> None:
        self.sizes, self.weights = sizes, weights

    def forward(self, images: Array) -> tuple[Array, Array, Any]:
        """Return logits, features and the tape.

        Parameters
        ----------
        images : array, (batch, size, size, 3)
            -1 to 1.

        Returns
        -------
        logits : array, (batch, classes)
        features : array, (batch, features)
        tape : object
            For `backward`.
        """
        x, tape = images.astype(self.weights.flat.dtype, copy=False), []
        for i, (patch, _) in enumerate(self.sizes.stages):
            x, applied = self._apply(f"{i}", layers.merge_patches(x, patch))
            x, active = layers.gelu(x)
            tape.append((applied, active))
        features = x.mean(axis=(1, 2))
        logits, last = self._apply("out", features)
        return logits, features, (tape, x.shape, last)

    def backward(self, d_logits: Array, tape: Any, gradients: Parameters) -> None:
        """Write the gradients of all weights."""
        stages, shape, last = tape
        back = functools.partial(layers.linear_backward_into, gradients)
        d = back("out", d_logits, last) / (shape[1] * shape[2])
        d = d[:, None, None] + array_namespace(d).zeros(shape, d.dtype)
        for i, (applied, active) in reversed(list(enumerate(stages))):
            d = back(f"{i}", layers.gelu_backward(d, active), applied)
            d = layers.split_patches(d, self.sizes.stages[i][0])

    def _apply(self, name: str, x: Array) -> tuple[Array, Any]:
        return layers.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


def cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Return the mean cross-entropy, and its gradient with respect to the logits."""
    xp = array_namespace(logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_sum = xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    chosen = (labels[:, None] == xp.arange(logits.shape[1])).astype(logits.dtype)
    loss = float((chosen * (log_sum - shifted)).sum()) / len(logits)
    return loss, (xp.exp(shifted - log_sum) - chosen) / len(logits)


def train(
    sizes: Stages,
    xp: Any,
    *,
    steps: int = 1000,
    batch: int = 256,
    advance: Callable[[str], None] = lambda done: None,
) -> tuple[FeatureNet, float]:
    """Train the network; return it, and the share of its last hundred batches that it told right.

    Parameters
    ----------
    sizes : Stages
    xp : module
        NumPy or CuPy.
    steps, batch : int
    advance : callable
        Told of every step.
    """
    rng = np.random.default_rng(0xFEA7)
    weights = Parameters(
        sizes.parameters, np.zeros(sum(map(math.prod, sizes.parameters.values())), np.float32)
    )
    for name, x in weights.items():
        if name.endswith("weight"):
            x[...] = rng.standard_normal(x.shape) / math.sqrt(x.shape[0])
    weights = weights.like(xp.asarray(weights.flat))
    gradients, optimiser = weights.like(xp.zeros_like(weights.flat)), AdamW(3e-3, steps, 20)
    moments = xp.zeros_like(weights.flat), xp.zeros_like(weights.flat)
    average, all_decay = weights.flat.copy(), xp.ones_like(weights.flat)
    network, told = FeatureNet(sizes, weights), []
    for step in range(steps):
        images, labels = (xp.asarray(x) for x in data.crops(rng, batch, sizes.size))
        logits, _, tape = network.forward(images)
        loss, d_logits = cross_entropy(logits, labels)
        network.backward(d_logits, tape, gradients)
        optimiser.update(step, weights.flat, gradients.flat, moments, average, all_decay)
        told.append(float((logits.argmax(axis=-1) == labels).mean()))
        advance(f"cross-entropy {loss:.3f}")
    return FeatureNet(sizes, weights.like(average)), float(np.mean(told[-100:]))


def features_of(network: FeatureNet, images: np.ndarray, batch: int = 256) -> np.ndarray:
    """Return the features of images of -1 to 1, which are on the host, there."""
    xp = array_namespace(network.weights.flat)
    parts = (xp.asarray(images[i : i + batch]) for i in range(0, len(images), batch))
    return np.concatenate([on_host(network.forward(part)[1]) for part in parts])
