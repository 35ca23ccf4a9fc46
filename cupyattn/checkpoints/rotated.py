"""Rotated weights in files: codes of a weight, numbers of codes, and the checks of both."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.bounds.perturbation import half_ulp
from cupyattn.checkpoints.shards import Array
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.blocks import row_strips
from cupyattn.quant.rotation import arranged, gathered, group_of, matrix, rotated, unrotated
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.norm_quant import Vectors, norm_quant_mirror

#: The step that rotates the rows of a weight.
_STEPS = RowSteps(None, "", "hadamard", EPS, "channel")


def rotated_codes(w: Array, rotate: str) -> tuple[Array, Array]:
    """Return codes and scales of a rotated weight, as `cupyattn.Int8Linear.from_weight` does.

    Parameters
    ----------
    w : array, (out, in), float16, bfloat16 or float32
    rotate : str
        As for `cupyattn.quant.rotated`.
    """
    codes, scales = np.empty(w.shape, np.int8), np.empty((len(w), 1), np.float32)
    for rows in row_strips(w.shape):
        part = arranged(w[rows], rotate)
        codes[rows], scales[rows] = norm_quant_mirror(part, _STEPS, Vectors())
    return codes, scales


def check_rotated(w: Array, codes: Array, scales: Array, rotate: str) -> str | None:
    """Describe an error in the codes of a rotated weight, or return None: by products of matrices.

    Parameters
    ----------
    w : array, (out, in)
    codes, scales : array
        Those that were written.
    rotate : str
    """
    group = group_of(w.shape[1])
    by = matrix(np.arange(group)) / math.sqrt(group)
    for rows in row_strips(w.shape):
        lie = arranged(w[rows], rotate)
        exact = gathered(lie).astype(np.float64).reshape(-1, group) @ by
        made = gathered(codes[rows] * scales[rows].astype(np.float64))
        bound = gathered(norm_quant_error(lie, scales[rows], _STEPS, Vectors()))
        if not (np.abs(made - exact.reshape(made.shape)) <= bound).all():
            return "its codes are further off than their bound"
    return None


def unrotated_weight(codes: Array, scales: Array, rotate: str, dtype: str, name: str) -> Array:
    """Return the weight that the codes of a rotated weight stand for.

    Parameters
    ----------
    codes : array, (out, in), int8
    scales : array, (out, 1) or (1, 1), float32
    rotate : str
    dtype : {"float32", "bfloat16", "float16"}
    name : str
        For messages.

    Raises
    ------
    ValueError
        If a number does not fit into `dtype`.
    """
    w, scales = np.empty(codes.shape, STORAGE[dtype]), np.broadcast_to(scales, (len(codes), 1))
    signs = matrix(np.arange(group_of(codes.shape[1]))).astype(np.float64)
    for rows in row_strips(codes.shape):
        numbers = unrotated(codes[rows] * scales[rows].astype(np.float64), rotate, signs)
        with np.errstate(over="ignore"):
            w[rows] = numbers.astype(w.dtype)
        if not np.isfinite(w[rows]).all():
            raise ValueError(f"{name} does not fit into {dtype}")
    return w


def check_unrotated(codes: Array, scales: Array, rotate: str, w: Array) -> str | None:
    """Describe an error of `unrotated_weight`, or return None: it is rotated again, by butterflies.

    Notes
    -----
    A rotated number is off by the roundings of its group, over the root of the group's size.
    """
    group = group_of(codes.shape[1])
    scales = np.broadcast_to(scales, (len(codes), 1))
    for rows in row_strips(codes.shape):
        numbers = w[rows].astype(np.float64)
        sizes = np.abs(numbers)
        rounded = half_ulp(sizes, w.dtype.name) + 2.0**-24 * sizes + 2.0**-150
        allowed = arranged(rounded, rotate)
        groups = gathered(allowed).reshape(-1, group).sum(axis=1, keepdims=True)
        exact = codes[rows] * scales[rows].astype(np.float64)
        away = gathered(np.abs(rotated(numbers, rotate) - exact)).reshape(-1, group)
        if not (away <= groups / math.sqrt(group) + 2.0**-40 * scales[rows].max()).all():
            return "it is not codes * scales, rotated back"
    return None
