"""Rows normalised, modulated, activated and rotated, then INT8 codes: one launch, one read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError, shown
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.norm_quant import VECTORS, plan_norm_quant
from cupyattn.plans.records import Work
from cupyattn.problem.joint_rows import check_below, in_batches, joined
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.row_preparation import EPS, check_eps
from cupyattn.quant.activation import GLU, check_activation, columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, check_strategy, check_values
from cupyattn.quant.rotation import ROTATIONS, check_rotation
from cupyattn.quant.row_steps import NORMS, RowSteps
from cupyattn.reference.norm_quant import Vectors, norm_quant_mirror

Array = Any


def norm_quant(
    x: Array,
    *,
    below: Array | None = None,
    norm: str | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    scale: Array | None = None,
    shift: Array | None = None,
    activation: str | None = None,
    rotate: str | None = None,
    eps: float = EPS,
    strategy: str = "channel",
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Normalise, modulate, activate and rotate rows, and quantise them, in one read of x.

    One launch does the work of a diffusion transformer before a product, and rounds nothing to 16
    bits in between.

    Parameters
    ----------
    x : array, (..., channels), float16, bfloat16 or float32
        NumPy, CuPy, or anything with DLPack; (..., 2 channels) with a gated activation.
    below : array, (rows, channels) or (batch, rows, channels), type of x, optional
        Rows after the rows of x, as if both were concatenated.
    norm : {None, "layer", "rms"}
        Divide each row by its standard deviation, its mean subtracted before; by its root mean
        square; or by nothing.
    weight, bias : array, (channels,), optional
        Weight and bias of the norm; both of one type, any that x may have.
    scale, shift : array, (groups, channels), (channels,), (batch, 1, channels) or as x, optional
        Modulation ``y (1 + scale) + shift``. Both have the same type, any that x may have. Each
        group of consecutive rows shares a row of both: groups must divide the rows.
    activation : str, optional
        "gelu", "gelu_tanh" or "silu", after the modulation. Without norm and modulation also
        "swiglu", "geglu" or "geglu_tanh": the gate is the first half of a row, or the second half
        if the name ends with "_gate_last".
    rotate : {None, "hadamard"}
        Spread outlier channels over groups of 256, 128 or 64, the largest that divides the
        channels. The weight of the product must be `cupyattn.quant.rotated` before it is
        quantised. Only with ``strategy="channel"``.
    eps : float
        Added to the mean square; from 2^-126 to 2^127.
    strategy : {"channel", "block"}
        What shares a scale: a row, or 128 adjacent channels of it.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernel takes rows of at most 32,768 channels.

    Returns
    -------
    codes : array, (..., channels), int8
        -127 to 127. Both of the kind of x.
    scales : array, (..., 1) or (..., blocks), float32
        NaN for a row or block with a number that is not finite, or with a sum beyond the range of
        float32. Its codes are 0.

    Raises
    ------
    TypeError
        For an array of another kind or type.
    ValueError
        For names and shapes that are none of these.
    UnsupportedError
        For options that do not go together, a rotation of channels that 64 does not divide, and
        rows that are too wide for the kernel.

    Notes
    -----
    Everything is computed in float32. The order of sums depends only on the width of the row, so
    host and device give the same bits. Only an activation differs, which devices approximate. The
    bound of the error is docs/MATH_REFERENCE.md [L82].

    Examples
    --------
    >>> x = np.float32([[1.0, 3.0, -1.0, -3.0]])
    >>> codes, scales = norm_quant(x, norm="layer", shift=np.float32([1, 1, 1, 1]))
    >>> codes.tolist(), round(scales.item(), 4)
    ([[78, 127, 30, -19]], 0.0184)
    >>> codes, scales = norm_quant(np.eye(1, 256, dtype=np.float32) * 100, rotate="hadamard")
    >>> np.unique(abs(codes)).tolist(), round(scales.item() * 127, 4)
    ([127], 6.25)
    """
    given = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    given["below"] = below
    arrays = {"x": x, **{name: one for name, one in given.items() if one is not None}}
    settings = NormQuantSettings(norm, activation, rotate, eps, strategy, backend)
    codes, scales = run(NORM_QUANT, settings, arrays, (type(eps),)).values()
    return codes, scales


class NormQuantSettings(NamedTuple):
    """Settings of the pass: arguments of `norm_quant`, except arrays."""

    norm: str | None
    activation: str | None
    rotate: str | None
    eps: float
    strategy: str
    backend: str | None


class _NormQuant(Operation):
    """The pass in front of a product as an operation."""

    name = "norm_quant"

    def resolve(self, settings: NormQuantSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check the rows and the vectors over their channels."""
        x = arrays["x"]
        check_together(**arrays)
        backend = choose(settings.backend, x.device >= 0)
        steps = checked_steps(settings, arrays)
        channels = columns_of(x.shape[-1], steps.activation)
        parts = {name: arrays[name].with_whole_rows() for name in PARTS if name in arrays}
        operands = {"x": parts["x"].rows()}
        if "below" in parts:
            operands = {name: in_batches(one) for name, one in parts.items()}
        x = joined(x, arrays.get("below"))
        for name in arrays.keys() - parts.keys():
            vector = arrays[name].with_whole_rows()
            operands[name] = vector if name in VECTORS[:2] else vector.rows()
        blocks = 1 if steps.strategy == "channel" else -(-channels // BLOCK_SIZE)
        results = {
            "codes": Result((*x.shape[:-1], channels), np.dtype(np.int8)),
            "scales": Result((*x.shape[:-1], blocks), STORAGE["float32"]),
        }
        return Problem(
            what=self.name, backend=backend, operands=operands, results=results, settled=steps
        )

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        of, steps = problem.operands, problem.settled
        vectors = tuple(of[name].place if name in of else None for name in VECTORS)
        types = (next((of[n].dtype.name for n in pair if n in of), "") for pair in _PAIRS)
        x, below = of["x"], of["below"].place if "below" in of else None
        return Work.of(
            plan_norm_quant(x.place, x.dtype.name, vectors, tuple(types), steps, below=below)
        )

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return codes and scales from NumPy."""
        x = arrays["x"]
        if "below" in arrays:
            x = np.concatenate((x, arrays["below"]), axis=1).reshape(-1, x.shape[-1])
        codes, scales = norm_quant_mirror(x, problem.settled, Vectors.of(arrays))
        shapes = {name: result.shape for name, result in problem.results.items()}
        return {
            "codes": codes.reshape(shapes["codes"]), "scales": scales.reshape(shapes["scales"])
        }  # fmt: skip


NORM_QUANT = _NormQuant()

#: The arrays of rows. The second is optional: rows after the rows of the first.
PARTS = ("x", "below")
#: Vectors that have one type.
_PAIRS = VECTORS[:2], VECTORS[2:]


def checked_steps(settings: NormQuantSettings, arrays: Mapping[str, Described]) -> RowSteps:
    """Return the operations on a row; raise the errors of `norm_quant` for a call."""
    x, below = arrays["x"], arrays.get("below")
    check_values("x", x, least_axes=1)
    if below is not None:
        check_below("x", x, "below", below)
    steps = _steps_of(settings, x, arrays.keys() - {*PARTS})
    _check_vectors({**arrays, "x": joined(x, below)}, columns_of(x.shape[-1], steps.activation))
    return steps


def _steps_of(settings: NormQuantSettings, x: Described, vectors: set[str]) -> RowSteps:
    """Return the operations on a row; raise for options without effect."""
    for name, allowed in (("norm", NORMS), ("rotate", ROTATIONS)):
        if getattr(settings, name) not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ValueError(f"{name} must be {names}, got {shown(getattr(settings, name))}")
    check_strategy(settings.strategy)
    activation = settings.activation or ""
    if activation:
        check_activation(activation, x.shape[-1], "x", "channels")
    if activation in GLU and (settings.norm is not None or vectors):
        raise UnsupportedError(
            f"activation={activation!r} takes rows as they are, without norm, weight, bias, scale "
            f"and shift: use {GLU[activation]!r}, or normalise before the product in front"
        )
    check_rotation(settings.rotate, columns_of(x.shape[-1], activation), settings.strategy)
    if not x.shape[-1]:
        raise ValueError(f"x must have channels, got shape {tuple(x.shape)}")
    check_eps("eps", settings.eps)
    eps = float(np.float32(settings.eps))
    return RowSteps(settings.norm, activation, settings.rotate, eps, settings.strategy)


def _check_vectors(arrays: Mapping[str, Described], channels: int) -> None:
    """Raise unless vectors over the channels have types and shapes that fit the rows."""
    x = arrays["x"]
    rows = math.prod(x.shape[:-1])
    for pair in _PAIRS:
        given = {name: arrays[name] for name in pair if name in arrays}
        for name, vector in given.items():
            check_values(name, vector, least_axes=1)
        if len({one.dtype for one in given.values()}) > 1:
            raise TypeError(
                f"{pair[0]} and {pair[1]} must have one type, got "
                f"{' and '.join(str(one.dtype) for one in given.values())}"
            )
    for name in VECTORS[:2]:
        if name in arrays and tuple(arrays[name].shape) != (channels,):
            raise ValueError(
                f"{name} must have shape ({channels},), one number for each channel, got "
                f"{tuple(arrays[name].shape)}"
            )
    for name in VECTORS[2:]:
        if name not in arrays:
            continue
        shape = tuple(arrays[name].shape)
        groups = math.prod(shape[:-1])
        nested = len(shape) <= 2 or are_of_groups(shape, tuple(x.shape))
        if shape[-1] != channels or not nested or (rows % groups if groups else rows):
            raise ValueError(
                f"{name} must be ({channels},), (groups, {channels}) with groups that divide the "
                f"{rows} rows, or as x with axes of 1 before the last, got {shape}"
            )
    scale, shift = (arrays.get(name) for name in VECTORS[2:])
    if scale is not None and shift is not None:
        counts = [math.prod(one.shape[:-1]) for one in (scale, shift)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"scale and shift must have as many rows, got {tuple(scale.shape)} and "
                f"{tuple(shift.shape)}"
            )


def are_of_groups(shape: tuple[int, ...], like: tuple[int, ...]) -> bool:
    """Whether factors that broadcast to rows have a row for each group of consecutive rows."""
    leading = (*(1,) * (len(like) - len(shape)), *shape[:-1])
    while leading and leading[-1] == 1:
        leading = leading[:-1]
    return len(shape) <= len(like) and leading == like[: len(leading)]
