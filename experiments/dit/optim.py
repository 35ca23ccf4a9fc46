"""AdamW with a warm-up and a decay, an average of the weights, and the scale of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.kinds import array_namespace

Array = Any


@dataclass(frozen=True)
class AdamW:
    """Settings of an update.

    Parameters
    ----------
    rate : float
        Learning rate at its highest.
    steps : int
        Of the whole training: the rate falls along a cosine to a twentieth of its highest.
    warmup : int
        Steps over which it rises.
    betas : (float, float)
    decay : float
        Weight decay, of matrices alone.
    clip : float
        Longest gradient.
    average : float
        Share that the average keeps in a step; less at the start.
    """

    rate: float = 1e-3
    steps: int = 10_000
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.01
    clip: float = 1.0
    average: float = 0.999

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, which counts from 0.

        Examples
        --------
        >>> opt = AdamW(rate=1.0, steps=11, warmup=2)
        >>> [round(opt.rate_at(step), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.525, 0.05]
        """
        rising = min(1.0, (step + 1) / self.warmup)
        share = min(1.0, max(0, step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.rate * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))

    def update(
        self,
        step: int,
        weights: Array,
        gradient: Array,
        moments: tuple[Array, Array],
        average: Array,
        matrices: Array,
    ) -> None:
        """Change weights, moments and average in place.

        Parameters
        ----------
        step : int
            From 0.
        weights, gradient : array, (count,)
        moments : (array, array)
            Of first and second order.
        average : array, (count,)
        matrices : array, (count,)
            1 where weights decay, else 0.
        """
        first, second = moments
        rate, (beta_1, beta_2) = self.rate_at(step), self.betas
        first += (1 - beta_1) * (gradient - first)
        second += (1 - beta_2) * (gradient * gradient - second)
        root = array_namespace(weights).sqrt(second / (1 - beta_2 ** (step + 1)))
        weights -= (rate / (1 - beta_1 ** (step + 1))) * (first / (root + 1e-8))
        weights -= (rate * self.decay) * (matrices * weights)
        keep = min(self.average, (1 + step) / (10 + step))
        average += (1 - keep) * (weights - average)

    def clipped(self, norm: float) -> float:
        """Return what a gradient of this length is multiplied by."""
        return min(1.0, self.clip / (norm + 1e-12))


@dataclass
class LossScale:
    """Factor of the loss, found by trying, with which float16 can represent its gradients.

    Parameters
    ----------
    value : float
        A power of two.
    good : int
        Steps since it changed.
    """

    value: float = 2.0**12
    good: int = 0
    #: Good steps after which it doubles.
    PATIENCE = 500

    def judge(self, norm: float) -> bool:
        """Return whether gradients of this length are finite, and adapt; if not, leave them out.

        Raises
        ------
        FloatingPointError
            If no scale helps: weights or data are not finite.
        """
        if math.isfinite(norm):
            self.good += 1
            if self.good >= self.PATIENCE:
                self.value, self.good = min(2 * self.value, 2.0**20), 0
            return True
        self.value, self.good = self.value / 2, 0
        if self.value < 2.0**-10:
            raise FloatingPointError(
                "gradients stay infinite or NaN whatever the loss is multiplied by: start anew "
                "from an earlier checkpoint, with a lower learning rate"
            )
        return False
