"""Thirty kinds of fault, laid on the output of a kernel.

A fault is a difference in float64, at a place that its generator draws. It is added to the numbers
that a kernel stored, and their sum is stored again. So the errors of the kernel stay in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import array_namespace

Array = Any
Generator = np.random.Generator

#: Neighbouring keys of a group or tile that a fault is laid on, at most.
GROUP = 64


@dataclass(frozen=True, eq=False)
class Ground:
    """An output, and exact attention of the operands that its kernel multiplied.

    Parameters
    ----------
    q, k, v : (batch, heads, len, head_dim) array
        Float64, without the mean of K, as many heads of each.
    scale : float
    admitted : (len_q, len_kv) array, bool
    v_mean : (batch, heads, 1, head_dim) array
        The mean that the kernel adds to its output: 0 where it adds none.
    o, lse : array
        Of the kernel, float64.
    dtype : {"float16", "bfloat16", "float32"}
        Of that O.
    """

    q: Array
    k: Array
    v: Array
    scale: float
    admitted: Array
    v_mean: Array
    o: Array
    lse: Array
    dtype: str

    @cached_property
    def scores(self) -> Array:
        """Scores of all pairs of a query and a key, -inf where a key is masked."""
        xp = array_namespace(self.q)
        scores = self.scale * (self.q @ self.k.swapaxes(-1, -2))
        return xp.where(self.admitted, scores, -xp.inf)

    @cached_property
    def weights(self) -> Array:
        """Softmax of `scores`."""
        xp = array_namespace(self.q)
        weights = xp.exp(self.scores - self.scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    @cached_property
    def exact(self) -> Array:
        """Attention by its definition."""
        return self.weights @ self.v

    @property
    def size(self) -> Array:
        """Root mean square of each row of O."""
        return array_namespace(self.o).sqrt((self.o * self.o).mean(axis=-1, keepdims=True))

    def rescored(self, change: Array) -> Difference:
        """Return the change of O and lse if scores have `change` added to them."""
        xp = array_namespace(self.q)
        return self.reweighted(xp.exp(xp.where(self.admitted, change, 0.0)))

    def reweighted(self, factor: Array, in_l: Array | None = None) -> Difference:
        """Return the change if weights have one factor in O and another in l.

        lse is that of l.
        """
        xp = array_namespace(self.q)
        of_o = self.weights * factor
        total = (of_o if in_l is None else self.weights * in_l).sum(axis=-1)
        return of_o @ self.v / total[..., None] - self.exact, xp.log(total)

    def stored(self, difference: Array) -> Array:
        """Return O with a difference, rounded to its type, in float64."""
        return rounded(self.o + difference, self.dtype)


#: Change of O, and of lse or not.
Difference = tuple[Array, Array | None]
#: Returns the difference that a fault of a size makes.
Fault = Callable[[Ground, float, Generator], Difference]


def rounded(x: Array, dtype: str) -> Array:
    """Round float64 to a storage type, by way of float32, to nearest with ties to even.

    Examples
    --------
    >>> x = np.array([1 + 2.0**-9, 1 + 3 * 2.0**-9])
    >>> rounded(x, "bfloat16").tolist(), rounded(x, "float16").tolist()
    ([1.0, 1.0078125], [1.001953125, 1.005859375])
    """
    xp = array_namespace(x)
    y = x.astype(xp.float32)
    if dtype == "bfloat16":
        bits = y.view(xp.uint32)
        bits = bits + xp.uint32(0x7FFF) + ((bits >> xp.uint32(16)) & xp.uint32(1))
        y = (bits & xp.uint32(0xFFFF0000)).view(xp.float32)
    elif dtype == "float16":
        y = y.astype(xp.float16)
    return y.astype(xp.float64)


def _chosen(like: Array, at: tuple[Any, ...], value: float) -> Array:
    """Return zeros like an array, with one value at a place."""
    found = array_namespace(like).zeros_like(like)
    found[at] = value
    return found


def _drawn(like: Array, values: np.ndarray) -> Array:
    """Return numbers of a host's generator where an array lies."""
    return array_namespace(like).asarray(values)


def _group(ground: Ground, rng: Generator) -> slice:
    """Draw a group of neighbouring keys."""
    groups = max(1, ground.k.shape[2] // GROUP)
    first = GROUP * int(rng.integers(groups))
    return slice(first, first + GROUP)


def _row(ground: Ground, rng: Generator) -> tuple[int, int, int]:
    """Draw a row of O: batch entry, head and query."""
    batch, heads, len_q, _ = ground.o.shape
    return int(rng.integers(batch)), int(rng.integers(heads)), int(rng.integers(len_q))


def _on_weights(ground: Ground) -> Array:
    return array_namespace(ground.q).ones_like(ground.weights)


# ---- O -------------------------------------------------------------------------------------------


def _scaled(ground: Ground, size: float, rng: Generator) -> Difference:
    return size * ground.o, None


def _row_scaled(ground: Ground, size: float, rng: Generator) -> Difference:
    return ground.o * _chosen(ground.o, _row(ground, rng), size), None


def _head_scaled(ground: Ground, size: float, rng: Generator) -> Difference:
    return ground.o * _chosen(ground.o, _row(ground, rng)[:2], size), None


def _channel_scaled(ground: Ground, size: float, rng: Generator) -> Difference:
    channel = int(rng.integers(ground.o.shape[-1]))
    return ground.o * _chosen(ground.o, (..., channel), size), None


def _element_scaled(ground: Ground, size: float, rng: Generator) -> Difference:
    channel = int(rng.integers(ground.o.shape[-1]))
    return ground.o * _chosen(ground.o, (*_row(ground, rng), channel), size), None


def _noise_added(ground: Ground, size: float, rng: Generator) -> Difference:
    return size * ground.size * _drawn(ground.o, rng.standard_normal(ground.o.shape)), None


def _fewer_bits(ground: Ground, size: float, rng: Generator) -> Difference:
    xp = array_namespace(ground.o)
    mantissa, exponent = xp.frexp(ground.o)
    step = 4.0 * size  # of a mantissa in [1/2, 1): an error of at most `size` of the number
    return xp.ldexp(xp.rint(mantissa / step) * step, exponent) - ground.o, None


def _truncated(ground: Ground, size: float, rng: Generator) -> Difference:
    """Move numbers that were rounded away from zero to their neighbours: 10 * size of all."""
    xp = array_namespace(ground.o)
    bits = {"float16": 10, "bfloat16": 7, "float32": 23}[ground.dtype]
    _, exponent = xp.frexp(ground.o)
    step = xp.ldexp(xp.sign(ground.o), exponent - 1 - bits)
    away = xp.abs(ground.o) > xp.abs(ground.exact)
    some = _drawn(ground.o, rng.random(ground.o.shape) < 10 * size)
    return xp.where(away & some, -step, 0.0), None


def _rows_mixed(ground: Ground, size: float, rng: Generator) -> Difference:
    return size * (array_namespace(ground.o).roll(ground.o, 1, axis=2) - ground.o), None


def _channels_mixed(ground: Ground, size: float, rng: Generator) -> Difference:
    return size * (array_namespace(ground.o).roll(ground.o, 1, axis=3) - ground.o), None


def _mean_lost(ground: Ground, size: float, rng: Generator) -> Difference:
    mean = ground.v.mean(axis=2, keepdims=True)
    return -size * mean + 0.0 * ground.o, None


# ---- scores --------------------------------------------------------------------------------------


def _softmax_scale(ground: Ground, size: float, rng: Generator) -> Difference:
    return ground.rescored(size * ground.scores)


def _scale_of_keys(ground: Ground, size: float, rng: Generator) -> Difference:
    change = _chosen(ground.weights, (..., _group(ground, rng)), size)
    return ground.rescored(change * ground.scores)


def _scale_of_a_key(ground: Ground, size: float, rng: Generator) -> Difference:
    change = _chosen(ground.weights, (..., int(rng.integers(ground.k.shape[2]))), size)
    return ground.rescored(change * ground.scores)


def _scale_of_a_row(ground: Ground, size: float, rng: Generator) -> Difference:
    return ground.rescored(_chosen(ground.weights, _row(ground, rng), size) * ground.scores)


def _scores_in_steps(ground: Ground, size: float, rng: Generator) -> Difference:
    xp = array_namespace(ground.o)
    scores = xp.where(ground.admitted, ground.scores, 0.0)
    return ground.rescored(size * xp.rint(scores / size) - scores)


def _scores_with_noise(ground: Ground, size: float, rng: Generator) -> Difference:
    noise = rng.standard_normal(ground.weights.shape)
    return ground.rescored(size * _drawn(ground.o, noise))


def _channel_of_scores(ground: Ground, size: float, rng: Generator) -> Difference:
    at = (..., slice(channel := int(rng.integers(ground.q.shape[-1])), channel + 1))
    return ground.rescored(-size * ground.scale * (ground.q[at] @ ground.k[at].swapaxes(-1, -2)))


# ---- weights -------------------------------------------------------------------------------------


def _key_loses(ground: Ground, size: float, rng: Generator) -> Difference:
    key = int(rng.integers(ground.k.shape[2]))
    return ground.reweighted(1.0 - _chosen(ground.weights, (..., key), size))


def _key_of_a_row_loses(ground: Ground, size: float, rng: Generator) -> Difference:
    """The key is drawn among the keys that the row sees."""
    batch, head, row = _row(ground, rng)
    seen = int(ground.admitted[row].sum())
    at = batch, head, row, int(rng.integers(seen))
    return ground.reweighted(1.0 - _chosen(ground.weights, at, size))


def _key_past_the_edge(ground: Ground, size: float, rng: Generator) -> Difference:
    """The key behind the last one that a row sees has a share of the weight that it would have."""
    xp = array_namespace(ground.o)
    past = ~ground.admitted & xp.roll(ground.admitted, 1, axis=-1)
    past[:, 0] = False
    scores = ground.scale * (ground.q @ ground.k.swapaxes(-1, -2))
    top = ground.scores.max(axis=-1, keepdims=True)
    before = xp.exp(ground.scores - top).sum(axis=-1, keepdims=True)
    more = xp.where(past, size * xp.exp(scores - top) / before, 0.0)
    total = 1.0 + more.sum(axis=-1)
    return (ground.exact + more @ ground.v) / total[..., None] - ground.exact, xp.log(total)


def _last_key_loses(ground: Ground, size: float, rng: Generator) -> Difference:
    xp = array_namespace(ground.o)
    admitted = xp.concatenate([ground.admitted, xp.zeros_like(ground.admitted[:, :1])], axis=1)
    last = admitted[:, :-1] & ~admitted[:, 1:]
    return ground.reweighted(1.0 - size * last)


def _keys_in_l_alone(ground: Ground, size: float, rng: Generator) -> Difference:
    """l has a group of keys more than once."""
    more = _chosen(ground.weights, (..., _group(ground, rng)), size)
    return ground.reweighted(_on_weights(ground), 1.0 + more)


def _earlier_keys_in_o(ground: Ground, size: float, rng: Generator) -> Difference:
    """A rescale of O alone goes wrong: what was added before it weighs too much."""
    more = _chosen(ground.weights, (..., slice(0, ground.k.shape[2] // 2)), size)
    return ground.reweighted(1.0 + more, _on_weights(ground))


def _earlier_keys(ground: Ground, size: float, rng: Generator) -> Difference:
    more = _chosen(ground.weights, (..., slice(0, ground.k.shape[2] // 2)), size)
    return ground.reweighted(1.0 + more)


def _small_weights(ground: Ground, size: float, rng: Generator) -> Difference:
    """Weights below a share of the largest are lost in O, as where P underflows."""
    large = ground.weights >= size * ground.weights.max(axis=-1, keepdims=True)
    return ground.reweighted(1.0 * large, _on_weights(ground))


def _weights_truncated(ground: Ground, size: float, rng: Generator) -> Difference:
    """Every weight loses a part of itself in O, up to `size`."""
    lost = size * _drawn(ground.o, rng.random(ground.weights.shape))
    return ground.reweighted(1.0 - lost, _on_weights(ground))


# ---- values --------------------------------------------------------------------------------------


def _scale_of_values(ground: Ground, size: float, rng: Generator) -> Difference:
    keys = _group(ground, rng)
    part = ground.v[:, :, keys] - ground.v_mean
    return size * (ground.weights[..., keys] @ part), None


def _values_mixed(ground: Ground, size: float, rng: Generator) -> Difference:
    """Two neighbouring keys exchange a share of their values."""
    key = int(rng.integers(ground.k.shape[2] - 1))
    gap = ground.v[:, :, key + 1] - ground.v[:, :, key]
    weight = ground.weights[..., key] - ground.weights[..., key + 1]
    return size * weight[..., None] * gap[:, :, None], None


# ---- lse -----------------------------------------------------------------------------------------


def _lse_shifted(ground: Ground, size: float, rng: Generator) -> Difference:
    xp = array_namespace(ground.o)
    return xp.zeros_like(ground.o), size + xp.zeros_like(ground.lse)


FAULTS: dict[str, Fault] = {
    "O scaled": _scaled,
    "O of one row scaled": _row_scaled,
    "O of one head scaled": _head_scaled,
    "O of one channel scaled": _channel_scaled,
    "O of one element scaled": _element_scaled,
    "noise added to O": _noise_added,
    "O stored in fewer bits": _fewer_bits,
    "stores truncated, of 10 times this share": _truncated,
    "rows mixed": _rows_mixed,
    "channels mixed": _channels_mixed,
    "mean of V lost": _mean_lost,
    "softmax scale": _softmax_scale,
    "scale of a group of keys": _scale_of_keys,
    "scale of one key": _scale_of_a_key,
    "scale of one query": _scale_of_a_row,
    "scores in steps": _scores_in_steps,
    "noise in scores": _scores_with_noise,
    "one channel of Q K lost": _channel_of_scores,
    "one key loses weight": _key_loses,
    "one key of one row loses weight": _key_of_a_row_loses,
    "key past the causal edge": _key_past_the_edge,
    "last key of each row loses weight": _last_key_loses,
    "a group of keys in l alone": _keys_in_l_alone,
    "earlier keys in O alone": _earlier_keys_in_o,
    "earlier keys in O and l": _earlier_keys,
    "small weights lost": _small_weights,
    "weights truncated": _weights_truncated,
    "scale of a group of values": _scale_of_values,
    "values of two keys mixed": _values_mixed,
    "lse shifted": _lse_shifted,
}

#: Faults for which only a causal call has a place.
CAUSAL_ALONE = ("key past the causal edge",)
