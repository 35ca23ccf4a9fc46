"""Compare images: PSNR, SSIM, the Frechet distance of features, intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.measure import pictures

Float64 = npt.NDArray[np.float64]

#: Resamples of a bootstrap.
RESAMPLES = 2000


def psnr(a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """Return the peak signal-to-noise ratio of each image, in dB.

    Parameters
    ----------
    a, b : array, (count, rows, columns, channels)
        0 to 1.

    Returns
    -------
    array, (count,)
        Infinite for equal images.

    Examples
    --------
    >>> psnr(np.zeros((1, 2, 2, 3)), np.full((1, 2, 2, 3), 0.1)).round(6).tolist()
    [20.0]
    """
    return _each(pictures.psnr, a, b)


def ssim(a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    """Return the structural similarity of each image, the mean over channels and Gaussian windows.

    Parameters
    ----------
    a, b : array, (count, rows, columns, channels)
        0 to 1.

    Returns
    -------
    array, (count,)
        At most 1, which equal images have.
    """
    return _each(pictures.ssim, a, b)


def _each(metric: Callable[..., float], a: npt.ArrayLike, b: npt.ArrayLike) -> Float64:
    pairs = zip(np.asarray(a), np.asarray(b), strict=True)
    return np.array([metric(x, y, peak=1.0) for x, y in pairs])


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of features.

    Parameters
    ----------
    mean : array, (features,)
    covariance : array, (features, features)
    """

    mean: Float64
    covariance: Float64

    @classmethod
    def of(cls, features: npt.ArrayLike) -> Moments:
        """Return features (count, features), with more rows than columns, for a full rank."""
        x = np.asarray(features, np.float64)
        return cls(x.mean(axis=0), np.cov(x, rowvar=False))


def frechet(a: Moments, b: Moments) -> float:
    """Return the Frechet distance of two normal distributions, squared as is the custom.

    Notes
    -----
    ``|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))`` (Dowson and Landau 1982). The trace of the
    root is that of the symmetric ``(R C_b R)^(1/2)`` with ``R R = C_a``.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((100, 3))
    >>> round(frechet(Moments.of(x), Moments.of(x + [2, 0, 0])), 9)
    4.0
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    shared = np.linalg.eigvalsh(root @ b.covariance @ root)
    spread = np.trace(a.covariance) + np.trace(b.covariance)
    spread -= 2 * np.sqrt(np.maximum(shared, 0)).sum()
    return float(((a.mean - b.mean) ** 2).sum() + spread)


class ToReal:
    """Frechet distances to real images, each feature in units of its spread among these.

    Parameters
    ----------
    real : array, (count, features)

    Examples
    --------
    >>> real = np.random.default_rng(0).standard_normal((500, 3))
    >>> found = ToReal(real)(real + [2, 0, 0], [np.arange(500)])
    >>> round(float(found[0] * real[:, 0].var()), 6)
    4.0
    """

    def __init__(self, real: npt.ArrayLike) -> None:
        x = np.asarray(real, np.float64)
        spread = x.std(axis=0)
        self._unit = np.where(spread == 0, 1.0, spread)
        self._real = Moments.of(x / self._unit)

    def __call__(self, features: npt.ArrayLike, resamples: Iterable[Any]) -> Float64:
        """Return a distance for each selection of the rows of (count, features)."""
        x = np.asarray(features, np.float64) / self._unit
        return np.array([frechet(Moments.of(x[rows]), self._real) for rows in resamples])


def draws(count: int, resamples: int = RESAMPLES) -> npt.NDArray[np.intp]:
    """Return which samples each resample of a bootstrap takes, (resamples, count)."""
    return np.random.default_rng(0).integers(0, count, (resamples, count))


def mean_interval(samples: npt.ArrayLike) -> list[float]:
    """Return the mean of samples and its 95 % bootstrap interval, of percentiles.

    Examples
    --------
    >>> mean_interval([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    values = np.asarray(samples, np.float64)
    found = values[draws(values.size)].mean(axis=1)
    return [float(values.mean()), *map(float, np.percentile(found, [2.5, 97.5]))]


def deviation_interval(value: float, resampled: npt.ArrayLike) -> list[float]:
    """Return a statistic and its 95 % interval by the standard deviation of its resamples.

    Parameters
    ----------
    value : float
        Of all samples.
    resampled : array
        Of each resample. A distance of few samples is too large, and one of a resample more so:
        percentiles would not hold the value itself.

    Examples
    --------
    >>> [round(x, 2) for x in deviation_interval(1.0, [2.0, 4.0])]
    [1.0, -0.96, 2.96]
    """
    width = 1.96 * float(np.std(resampled))
    return [value, value - width, value + width]
