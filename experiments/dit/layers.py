"""Layers of the transformer, each beside its backward pass, for NumPy and CuPy arrays.

A forward pass returns its result and the data that the backward pass needs. The backward pass takes
the gradient of the result and returns gradients of the arguments. Matrix products are of the type
that the weights come in, float16 on a device; everything else is in the type of its arguments,
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import array_namespace

Array = Any
Saved = Any

#: Addend of the mean square, in both kinds of norm.
EPS = 1e-6
_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


def product(a: Array, b: Array) -> Array:
    """Return ``a b``; of float16 with sums in float32, rounded once, as cuBLAS does it."""
    if isinstance(a, np.ndarray) and a.dtype == np.float16:
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    return a @ b


def column_sums(rows: Array) -> Array:
    """Return the sums of all rows, in two steps, the first of which occupies a whole device.

    Examples
    --------
    >>> column_sums(np.arange(12).reshape(6, 2)).tolist()
    [30, 36]
    """
    count, columns = rows.shape
    parts = math.gcd(count, 256)
    return rows.reshape(parts, count // parts, columns).sum(axis=1).sum(axis=0)


def linear(x: Array, weight: Array, bias: Array) -> tuple[Array, Saved]:
    """Return ``x W + b``.

    Parameters
    ----------
    x : array, (..., in)
    weight : array, (in, out)
        Its type is that of the product.
    bias : array, (out,)
        Its type is that of the result.
    """
    rows = x.reshape(-1, weight.shape[0]).astype(weight.dtype, copy=False)
    y = product(rows, weight).astype(bias.dtype, copy=False)
    y += bias
    return y.reshape(*x.shape[:-1], weight.shape[1]), (rows, weight)


def linear_backward(d_y: Array, saved: Saved) -> tuple[Array, Array, Array]:
    """Return the gradients of x, W and b."""
    rows, weight = saved
    d_rows = d_y.reshape(-1, weight.shape[1])
    rounded = d_rows.astype(weight.dtype, copy=False)
    d_x = product(rounded, weight.T).astype(d_y.dtype, copy=False)
    d_weight = product(rows.T, rounded).astype(d_y.dtype, copy=False)
    return d_x.reshape(*d_y.shape[:-1], weight.shape[0]), d_weight, column_sums(d_rows)


def linear_backward_into(
    gradients: Mapping[str, Array], name: str, d_y: Array, saved: Saved
) -> Array:
    """Write the gradients of the layer of a name, and return that of its input."""
    d_x, d_weight, d_bias = linear_backward(d_y, saved)
    gradients[f"{name}.weight"][...] = d_weight
    gradients[f"{name}.bias"][...] = d_bias
    return d_x


def layer_norm(x: Array) -> tuple[Array, Saved]:
    """Return x with mean 0 and variance 1 along its last axis; it learns nothing."""
    y = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / array_namespace(x).sqrt((y * y).mean(axis=-1, keepdims=True) + EPS)
    y *= inverse
    return y, (y, inverse)


def layer_norm_backward(d_y: Array, saved: Saved) -> Array:
    """Return the gradient of x."""
    y, inverse = saved
    along = (d_y * y).mean(axis=-1, keepdims=True)
    d_x = d_y - y * along
    d_x -= d_y.mean(axis=-1, keepdims=True)
    d_x *= inverse
    return d_x


def rms_norm(x: Array, weight: Array) -> tuple[Array, Saved]:
    """Return x over its root mean square along the last axis, times a weight for each column."""
    inverse = 1 / array_namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)
    unit = x * inverse
    return unit * weight, (unit, inverse, weight)


def rms_norm_backward(d_y: Array, saved: Saved) -> tuple[Array, Array]:
    """Return the gradients of x and of the weight."""
    unit, inverse, weight = saved
    d_weight = column_sums((d_y * unit).reshape(-1, weight.size))
    d_unit = d_y * weight
    d_unit -= unit * (d_unit * unit).mean(axis=-1, keepdims=True)
    d_unit *= inverse
    return d_unit, d_weight


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn pairs of columns, one of each half, by the angles of their positions (RoPE).

    Parameters
    ----------
    x : array, (batch, len, heads, head_dim)
    cos, sin : array, (len, head_dim / 2)

    Notes
    -----
    The backward pass turns the other way: ``rotate(d_y, cos, -sin)``.
    """
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    y = array_namespace(x).empty_like(x)
    y[..., :half] = left * cos - right * sin
    y[..., half:] = right * cos + left * sin
    return y


def gelu(x: Array) -> tuple[Array, Saved]:
    """Return ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``."""
    t = array_namespace(x).tanh(_ROOT * (x + _CUBE * x * x * x))
    return 0.5 * x * (1 + t), (x, t)


def gelu_backward(d_y: Array, saved: Saved) -> Array:
    """Return the gradient of x."""
    x, t = saved
    slope = _ROOT * (1 + 3 * _CUBE * x * x)
    return d_y * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


def silu(x: Array) -> tuple[Array, Saved]:
    """Return ``x / (1 + exp(-x))``."""
    gate = 1 / (1 + array_namespace(x).exp(-x))
    return x * gate, (x, gate)


def silu_backward(d_y: Array, saved: Saved) -> Array:
    """Return the gradient of x."""
    x, gate = saved
    return d_y * gate * (1 + x * (1 - gate))


def modulate(x: Array, shift: Array, scale: Array) -> tuple[Array, Saved]:
    """Return ``x (1 + scale) + shift``, a shift and a scale for each image (adaLN).

    Parameters
    ----------
    x : array, (batch, len, width)
    shift, scale : array, (batch, width)
    """
    gain = 1 + scale[:, None]
    return x * gain + shift[:, None], (x, gain)


def modulate_backward(d_y: Array, saved: Saved) -> tuple[Array, Array, Array]:
    """Return the gradients of x, shift and scale."""
    x, gain = saved
    return d_y * gain, d_y.sum(axis=1), (d_y * x).sum(axis=1)


def gated(x: Array, gate: Array, branch: Array) -> tuple[Array, Saved]:
    """Return ``x + gate branch``: the residual connection.

    Parameters
    ----------
    x, branch : array, (batch, len, width)
    gate : array, (batch, width)
    """
    gate = gate[:, None]
    return x + gate * branch, (gate, branch)


def gated_backward(d_y: Array, saved: Saved) -> tuple[Array, Array]:
    """Return the gradients of gate and branch; that of x is `d_y`."""
    gate, branch = saved
    return (d_y * branch).sum(axis=1), d_y * gate


def merge_patches(x: Array, patch: int) -> Array:
    """Return (batch, rows, columns, c) with each patch's pixels as one: (..., patch^2 c)."""
    batch, rows, columns, channels = x.shape
    parts = x.reshape(batch, rows // patch, patch, columns // patch, patch, channels)
    return parts.swapaxes(2, 3).reshape(batch, rows // patch, columns // patch, -1)


def split_patches(x: Array, patch: int) -> Array:
    """Undo `merge_patches`; each is the backward pass of the other."""
    batch, rows, columns, merged = x.shape
    parts = x.reshape(batch, rows, columns, patch, patch, merged // patch**2)
    return parts.swapaxes(2, 3).reshape(batch, rows * patch, columns * patch, -1)
