"""Factors of channels that move outliers of activations into the weight: SmoothQuant.

With factors f of the channels, ``x W^T = (x f) (W / f)^T``. A channel whose activations are large
and whose weights are not gets a small factor, so rows of x have less of a range. Factors are powers
of two: both products are exact, and the pass that makes codes of x multiplies at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.limits import is_real

#: Powers of factors, at most.
MOST_POWER = 60
#: Share of the range of x that the weight takes over: SmoothQuant's α.
STRENGTH = 0.5


def smoothing_factors(
    x: Array, weights: Array | Sequence[Array], strength: float = STRENGTH
) -> npt.NDArray[np.float32]:
    """Return factors that smooth a layer, or several layers of one input.

    Parameters
    ----------
    x : array, (..., in)
        Samples of the input, of NumPy, finite.
    weights : array, (out, in), or a sequence of these
    strength : float
        From 0, which leaves the activations as they are, to 1, which gives all channels one range.

    Returns
    -------
    array, (in,), float32
        Powers of two, `smooth` of `cupyattn.Int8Linear`; 1 in the median channel.

    Raises
    ------
    ValueError
        For another `strength`, and for arrays that do not fit or are not finite.

    Notes
    -----
    ``1 / f = max|x|^α / max|W|^(1 - α)`` by channel, rounded to a power of two and divided by the
    median: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
    Language Models, ICML 2023, equation 4. A channel in which x or W is 0 has the factor 1.

    Examples
    --------
    >>> x = np.ones((3, 8)); x[:, 2] = 64.0
    >>> smoothing_factors(x, np.ones((5, 8))).tolist()
    [1.0, 1.0, 0.125, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if not is_real(strength) or not 0 <= strength <= 1:
        raise ValueError(f"strength must be from 0 to 1, got {shown(strength)}")
    given: list[Array] = [*weights] if isinstance(weights, list | tuple) else [weights]
    several = [operands(weights=w)[0] for w in given]
    (x,) = operands(x=x)
    if not x.ndim:
        raise ValueError("x must be (..., in), got shape ()")
    if not several or any(w.ndim != 2 or w.shape[1] != x.shape[-1] for w in several):
        shapes = ", ".join(str(tuple(w.shape)) for w in several) or "none"
        raise ValueError(f"weights must be (out, {x.shape[-1]}), as x has channels, got {shapes}")
    if not x.shape[-1]:
        return np.ones(0, np.float32)
    rows = as_float64(x).reshape(-1, x.shape[-1])
    tops = [np.abs(rows).max(axis=0, initial=0.0)]
    tops.append(np.max([np.abs(as_float64(w)).max(axis=0, initial=0.0) for w in several], axis=0))
    if not all(np.isfinite(top).all() for top in tops):
        raise ValueError("x and weights must be finite: record other samples")
    used = (tops[0] > 0) & (tops[1] > 0)
    if not used.any():
        return np.ones(x.shape[-1], np.float32)
    powers = np.zeros(x.shape[-1])
    logs = [np.log2(top[used]) for top in tops]
    own = (1 - strength) * logs[1] - strength * logs[0]
    powers[used] = np.round(own - np.median(own))
    found: npt.NDArray[np.float64] = np.exp2(np.clip(powers, -MOST_POWER, MOST_POWER))
    return found.astype(np.float32)


def check_smooth(smooth: Array, channels: int, strategy: str) -> None:
    """Raise unless an array, or anything with its shape and type, may be factors of channels.

    Raises
    ------
    TypeError, ValueError
        For another type or shape.
    UnsupportedError
        Beside scales of blocks.
    """
    if strategy == "block":
        raise UnsupportedError(
            "smooth goes with strategy='channel', got strategy='block': blocks hold outliers apart"
        )
    if str(smooth.dtype).removeprefix("torch.") != "float32":
        raise TypeError(f"smooth must be float32, got {smooth.dtype}")
    if tuple(smooth.shape) != (channels,):
        raise ValueError(f"smooth must be ({channels},), a factor for each channel, got "
                         f"{tuple(smooth.shape)}")  # fmt: skip


def check_powers(smooth: npt.NDArray[np.float32]) -> None:
    """Raise ValueError unless factors are powers of two, so that they round nothing."""
    mantissas, powers = np.frexp(smooth)
    if not ((mantissas == 0.5) & (np.abs(powers - 1) <= MOST_POWER)).all():
        raise ValueError(
            f"smooth must be powers of two from 2^-{MOST_POWER} to 2^{MOST_POWER}: "
            "cupyattn.quant.smoothing_factors makes them"
        )
