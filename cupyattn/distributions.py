"""Random inputs with the features of real activations: outliers, biased channels, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import FINITE_MAX, STORAGE

Float64 = npt.NDArray[np.float64]
Triple = tuple[Float64, Float64, Float64]

#: FlashAttention-3's outliers: this share of the entries gets N(0, 100) added.
OUTLIER_SHARE, OUTLIER_STD = 1e-3, 10.0
#: Standard deviation, over channels, of the means of K and V.
CHANNEL_BIAS = 2.0
#: Queries of "peaky" score 10^0 to 10^4 with the key that they copy, at the default scale.
PEAK_EXPONENTS = (0.0, 4.0)
#: Margin, at the default scale, by which the first key of "sink" beats the others.
SINK_MARGIN = 12.0


def _normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Q, K and V all N(0, 1)."""
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v


def _outlier(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """N(0, 1) plus N(0, 100) on 0.1 % of the entries, as FlashAttention-3 tests FP8 with."""
    q, k, v = (
        rng.standard_normal(shape)
        + OUTLIER_STD * rng.standard_normal(shape) * (rng.random(shape) < OUTLIER_SHARE)
        for shape in shapes
    )
    return q, k, v


def _channel_bias(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Channels of K and V have means of a couple of sigma, as keys of diffusion models have."""
    q, k, v = _normal(rng, *shapes)
    channels = (*k.shape[:2], 1, k.shape[3])
    k += CHANNEL_BIAS * rng.standard_normal(channels)
    v += CHANNEL_BIAS * rng.standard_normal(channels)
    return q, k, v


def _key_bias(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Channels of K have means of a couple of sigma; V is N(0, 1)."""
    q, k, v = _normal(rng, *shapes)
    k += CHANNEL_BIAS * rng.standard_normal((*k.shape[:2], 1, k.shape[3]))
    return q, k, v


def _value_bias(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Channels of V have means of a couple of sigma, which are nearly all of a long mean."""
    q, k, v = _normal(rng, *shapes)
    v += CHANNEL_BIAS * rng.standard_normal((*v.shape[:2], 1, v.shape[3]))
    return q, k, v


def _tripled(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Q and K are N(0, 9): scores spread nine times as far as they do of N(0, 1)."""
    q, k, v = _normal(rng, *shapes)
    return 3 * q, 3 * k, v


def _peaky(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """Query i is key i mod len_kv, scaled to score 1 to 10^4: few keys matter to a row."""
    q, k, v = _normal(rng, *shapes)
    heads, len_q, head_dim = q.shape[1:]
    if k.shape[2] and k.shape[1]:
        copied = np.repeat(k, heads // k.shape[1], axis=1)[:, :, np.arange(len_q) % k.shape[2]]
        peak = 10 ** rng.uniform(*PEAK_EXPONENTS, size=(*q.shape[:3], 1))
        # A short key is not compensated in full, because longer keys would then score far above
        # 10^4.
        norm = np.maximum(np.sum(copied**2, axis=-1, keepdims=True), 0.5 * head_dim)
        q = copied * peak * head_dim**0.5 / norm
    return q, k, v


def _sink(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """All queries lean towards the first key, which takes most of the attention; its V is small."""
    q, k, v = _normal(rng, *shapes)
    head_dim = k.shape[3]
    direction = rng.choice([-1.0, 1.0], size=(*k.shape[:2], head_dim))
    # The sink scores head_dim^-1/2 sum(direction q): its mean becomes SINK_MARGIN.
    q += np.repeat(direction, q.shape[1] // max(1, k.shape[1]), axis=1)[:, :, None] * (
        SINK_MARGIN * head_dim**-0.5
    )
    k[:, :, :1] = direction[:, :, None]
    v[:, :, :1] *= 0.1
    return q, k, v


def _constant(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Triple:
    """All ones: every probability is 1 / len_kv and the output is all ones."""
    q, k, v = (np.ones(shape) for shape in shapes)
    return q, k, v


_MAKERS: dict[str, Callable[..., Triple]] = {
    "normal": _normal,
    "outlier": _outlier,
    "channel-bias": _channel_bias,
    "key-bias": _key_bias,
    "value-bias": _value_bias,
    "tripled": _tripled,
    "peaky": _peaky,
    "sink": _sink,
    "constant": _constant,
}

#: Names of the distributions that `make` draws.
NAMES = tuple(_MAKERS)


def make(
    name: str,
    batch: int,
    heads: int,
    len_q: int,
    len_kv: int,
    head_dim: int,
    dtype: str = "float16",
    seed: int = 0,
    heads_kv: int | None = None,
) -> tuple[Any, Any, Any]:
    """Draw Q, K and V.

    Parameters
    ----------
    name : str
        One of `NAMES`, as below.
    batch, heads, len_q, len_kv, head_dim : int
        Sizes.
    dtype : {"float16", "bfloat16", "float32"}
    seed : int
        The same seed gives the same numbers; another dtype rounds the same draw.
    heads_kv : int, optional
        Heads of K and V, a divisor of `heads`; by default `heads`.

    Returns
    -------
    q : (batch, heads, len_q, head_dim) array
    k, v : (batch, heads_kv, len_kv, head_dim) array
        NumPy arrays, clipped to the finite range of `dtype`.

    Raises
    ------
    ValueError
        For an unknown name or dtype, or a heads_kv that does not divide heads.

    Notes
    -----
    - normal: N(0, 1).
    - outlier: N(0, 1), and N(0, 100) added to 0.1 % of the entries, the recipe of FlashAttention-3
      (Shah et al. 2024, section 4.3).
    - channel-bias: K and V with means of N(0, 4) in every channel; smoothing takes them away.
    - key-bias, value-bias: such means in K alone, in V alone.
    - tripled: Q and K times three.
    - peaky: each query is a scaled copy of a key, with scores up to 10^4.
    - sink: the first key takes nearly all of every row.
    - constant: ones.

    Examples
    --------
    >>> q, k, v = make("outlier", 1, 4, 16, 32, 64, heads_kv=2)
    >>> q.shape, k.shape, v.dtype.name
    ((1, 4, 16, 64), (1, 2, 32, 64), 'float16')
    """
    if name not in _MAKERS:
        raise ValueError(f"distribution must be one of {', '.join(NAMES)}, got {name!r}")
    if dtype not in STORAGE:
        raise ValueError(f"dtype must be one of {', '.join(STORAGE)}, got {dtype!r}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    heads_kv = heads if heads_kv is None else heads_kv
    if heads and (heads_kv == 0 or heads % heads_kv):
        raise ValueError(f"heads_kv must divide heads, got {heads=} {heads_kv=}")
    shape_kv = (batch, heads_kv, len_kv, head_dim)
    drawn = _MAKERS[name](
        np.random.default_rng(seed), (batch, heads, len_q, head_dim), shape_kv, shape_kv
    )
    largest = FINITE_MAX[dtype]
    q, k, v = (np.clip(x, -largest, largest).astype(STORAGE[dtype]) for x in drawn)
    return q, k, v
