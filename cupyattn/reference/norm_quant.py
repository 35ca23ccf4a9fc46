"""Quantise rows before a product: the exact definition, and the mirror of the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.kernels.row_teams import by_lane
from cupyattn.quant.activation import GLU, gate_and_other
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.quant.rotation import group_of, rotated, turned, unit_of
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.act_quant import quantize_rows
from cupyattn.reference.gemm import Float64, activate
from cupyattn.reference.rounding import fma32

Float32 = npt.NDArray[np.float32]


class Vectors(NamedTuple):
    """Vectors over the channels, float32 or None: `scale` and `shift` (groups, channels)."""

    weight: Any = None
    bias: Any = None
    scale: Any = None
    shift: Any = None

    @classmethod
    def of(cls, arrays: Any) -> Vectors:
        """Return the vectors among arrays by name, in float32."""
        given = {name: arrays.get(name) for name in cls._fields}
        return cls(**{n: None if x is None else x.astype(np.float32) for n, x in given.items()})

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(x is not None for x in self)

    def by_row(self, rows: int) -> Vectors:
        """Return them with a row of `scale` and `shift` for each of so many rows."""
        spread = (None if x is None else _repeated(x, rows) for x in self[2:])
        return Vectors(self.weight, self.bias, *spread)


def _repeated(x: Array, rows: int) -> Array:
    return np.repeat(x, rows // max(1, len(x)), axis=0)


def norm_quant_exact(x: Array, steps: RowSteps, vectors: Vectors) -> Float64:
    """Return the numbers behind the codes of `norm_quant_mirror`, in float64.

    Parameters
    ----------
    x : array, (rows, channels)
    steps : RowSteps
    vectors : Vectors
    """
    y = as_float64(x)
    if steps.norm == "layer":
        y = y - y.mean(axis=-1, keepdims=True)
    if steps.norm is not None:
        y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + steps.eps)
    factor, offset = exact_affine(vectors.by_row(len(y)))
    y = activate(y * factor + offset, steps.activation)
    return y if steps.rotate is None else rotated(y)


def exact_affine(vectors: Vectors) -> tuple[Float64, Float64]:
    """Return ``weight (1 + scale)`` and ``bias (1 + scale) + shift`` in float64, of rows."""
    weight, bias, scale, shift = (
        np.float64(otherwise) if x is None else as_float64(x)
        for x, otherwise in zip(vectors, (1, 0, 0, 0), strict=True)
    )
    return np.asarray(weight * (1 + scale)), np.asarray(bias * (1 + scale) + shift)


def norm_quant_mirror(
    x: Array, steps: RowSteps, vectors: Vectors
) -> tuple[npt.NDArray[np.int8], Float32]:
    """Return codes and scales as the kernel makes them.

    Parameters
    ----------
    x : array, (rows, channels)
        Shape (rows, 2 channels) for a gated linear unit.
    steps : RowSteps
    vectors : Vectors

    Returns
    -------
    codes : array, (rows, channels), int8
    scales : array, (rows, 1) or (rows, blocks), float32
        The kernel's bits, but for an activation, which is exact here before it is rounded.

    Notes
    -----
    In float32, each operation is rounded once. There are K channels. N1 is ``m = (Σ x) c``,
    ``d = x - m`` and ``r = 1 / sqrt((Σ d²) c + eps)`` with ``c = 1 / K``. N2 is ``z = d r``,
    ``g = weight (1 + scale)``, ``h = fma(bias, 1 + scale, shift)`` and ``y = fma(g, z, h)``. N3 is
    the activation. N4 is `cupyattn.quant.rotation.turned`, and scales are multiplied by
    ``1 / √group``. R1 is `cupyattn.reference.act_quant.quantize_rows`.

    ``Σ`` adds the runs of a lane in their order, number by number; squares are fused. Then it adds
    neighbours of the result, over all lanes, and neighbours of the sums, with zeros past the row.
    `cupyattn.kernels.row_teams.by_lane` tells which lane has which channels.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = x.astype(np.float32)
        group = 0 if steps.rotate is None else group_of(y.shape[-1])
        if steps.norm is not None:
            y = _normalised(y, steps.norm, np.float32(steps.eps), group)
        if vectors.any:
            y = fma32(y, *_affine(vectors.by_row(len(y))))
        if steps.activation in GLU:
            gates, y = gate_and_other(y, steps.activation)
            y = activate(as_float64(gates), GLU[steps.activation]).astype(np.float32) * y
        elif steps.activation:
            y = activate(as_float64(y), steps.activation).astype(np.float32)
        if steps.rotate is None:
            return quantize_rows(y, BLOCK_SIZE, steps.strategy)
        group = group_of(y.shape[-1])
        codes, scales = quantize_rows(turned(y, group), BLOCK_SIZE, steps.strategy)
        return codes, scales * unit_of(group)


def _normalised(x: Float32, norm: str, eps: np.float32, group: int) -> Float32:
    per_channel = np.float32(1) / np.float32(x.shape[-1])
    if norm == "layer":
        x = x - _row_sum(by_lane(x, group)) * per_channel
    mean = _row_sum(by_lane(x, group), squares=True) * per_channel
    factor = np.float32(1) / np.sqrt(mean + eps)
    return x * np.where(mean < np.inf, factor, np.float32(np.nan))


def _row_sum(x: Float32, *, squares: bool = False) -> Float32:
    """Return the sum of each row, or of its squares, (rows, 1), in the kernel's order.

    x has the shape (rows, runs, lanes, RUN).
    """
    rows, runs, lanes, run = x.shape
    every = lanes * run
    sums = np.zeros((rows, 1 << (every - 1).bit_length()), np.float32)
    own = sums[:, :every]
    for part in x.reshape(rows, runs, every).swapaxes(0, 1):
        own[:] = fma32(part, part, own) if squares else own + part
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums


def _affine(vectors: Vectors) -> tuple[Float32, Float32]:
    weight, bias, scale, shift = (
        np.asarray(otherwise, np.float32) if x is None else x
        for x, otherwise in zip(vectors, (1, 0, 0, 0), strict=True)
    )
    factor = np.float32(1) + scale
    return np.asarray(weight * factor), fma32(bias, factor, shift)
