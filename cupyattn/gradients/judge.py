"""J2 of the backward kernels: gradients as fractions of their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import taken
from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.gradients.bounds import GradientBounds, backward_bound
from cupyattn.gradients.exact import Gradients, GradientsWithBias, backward_exact
from cupyattn.gradients.foreign import backward_bound_foreign
from cupyattn.kernels.numerics import Numerics


@dataclass(frozen=True)
class GradientShare:
    """The largest error of one gradient as a fraction of its bound.

    Parameters
    ----------
    name : {"dq", "dk", "dv", "dbias"}
    ratio : float
        It must not exceed 1.
    index : tuple of int
        Where: (batch, head, row, channel).
    value, expected, bound : float
        There.
    tag : str
        There: the rounding point with the largest share of the bound.
    """

    name: str
    ratio: float
    index: tuple[int, ...]
    value: float
    expected: float
    bound: float
    tag: str

    def __str__(self) -> str:
        where = "within" if self.ratio <= 1 else "OUTSIDE"
        return (
            f"{self.name} is {where} its bound, error / bound = {self.ratio:.3g} at {self.index}: "
            f"value {self.value:.9g}, expected {self.expected:.9g}, bound {self.bound:.3g} "
            f"(mostly {self.tag})"
        )


@dataclass(frozen=True)
class GradientReport:
    """What `judge_backward` found of each gradient."""

    shares: tuple[GradientShare, ...]

    @property
    def ratio(self) -> float:
        """The largest of all."""
        return max(share.ratio for share in self.shares)

    @property
    def passed(self) -> bool:
        """Whether no ratio exceeds 1."""
        return self.ratio <= 1.0

    def __str__(self) -> str:
        return "\n".join(map(str, self.shares))


def judge_backward(
    gradients: Sequence[Array],
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    d_lse: Array | None = None,
    numerics: Numerics | None = None,
    **options: Any,
) -> GradientReport:
    """Compare gradients with those of the operands that the kernels received (J2).

    P is the softmax of the scores in float64. `lse` only widens the bound, by its own error, and
    not at all in rows where the kernels do not use it.

    With the `numerics` of another library the gradients are compared with the exact gradients, and
    the bound includes the roundings of the library's forward pass.

    Parameters
    ----------
    gradients : (dq, dk, dv) or (dq, dk, dv, dbias)
        What `cupyattn.attention_backward` returned, or another library. All arrays: NumPy, CuPy, or
        anything with DLPack.
    d_out, q, k, v, out, lse, d_lse
        What it was given, layout BHSD. `out` and `lse` are left out beside `numerics`.
    numerics : optional
        What another library rounds, as `cupyattn.testing.numerics` makes it. Then
        `cupyattn.testing.judge_backward` judges packed and padded batches, too.
    **options
        As for that call: scale, causal, causal_align, window, softcap, mask, bias, block_mask.

    Returns
    -------
    GradientReport

    Raises
    ------
    TypeError
        If `out` and `lse` are missing, or given beside `numerics`.
    UnsupportedError
        For `numerics` with 8-bit operands.
    ValueError
        For gradients of other shapes than q, k and v have.

    Examples
    --------
    >>> from cupyattn.gradients import backward_mirror
    >>> x = np.ones((1, 1, 4, 8), np.float16)
    >>> lse = np.full((1, 1, 4), 8**0.5 + np.log(4), np.float32)
    >>> judge_backward(backward_mirror(x, x, x, x, x, lse), x, x, x, x, x, lse).passed
    True
    """
    given = [x is not None for x in (out, lse)]
    if given != [numerics is None] * 2:
        raise TypeError(
            "judge_backward needs out and lse of this library's forward pass, or for gradients of "
            "another library numerics=cupyattn.testing.numerics('fp16 P') in place of both"
        )
    with_bias = len(gradients) == len(GradientsWithBias._fields)
    names = (GradientsWithBias if with_bias else Gradients)._fields
    gradients = taken(**dict(zip(names, gradients, strict=True)))
    d_out, q, k, v, out, lse = taken(d_out=d_out, q=q, k=k, v=v, out=out, lse=lse)
    options["mask"], options["bias"] = taken(mask=options.get("mask"), bias=options.get("bias"))
    options |= {"d_lse": taken(d_lse=d_lse)[0], "grad_bias": with_bias}
    exact = backward_exact(d_out, q, k, v, out, **options)
    if numerics is None:
        bound = backward_bound(d_out, q, k, v, out, lse, **options)
    else:
        bound = backward_bound_foreign(d_out, q, k, v, numerics, **options)
    return report_of(names, gradients, exact, bound)


def report_of(
    names: Sequence[str], gradients: Sequence[Array], exact: Sequence[Array], bound: GradientBounds
) -> GradientReport:
    """Compare gradients with exact ones, as fractions of their bounds.

    Raises
    ------
    ValueError
        For a gradient of another shape.
    """
    of_gradients = []
    for name, found, expected in zip(names, gradients, exact, strict=True):
        if found.shape != expected.shape:
            raise ValueError(f"{name} must have shape {expected.shape}, got {found.shape}")
        value, total = as_float64(found), bound.total(name)
        ratio = ratio_to_bound(value, expected, total)
        at: tuple[int, ...] = ()
        if ratio.size:
            at = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
        worst, *there = (float(x[at]) if at else 0.0 for x in (ratio, value, expected, total))
        tag = bound.dominant(name, at) if at else ""
        of_gradients.append(GradientShare(name, worst, at, there[0], there[1], there[2], tag))
    return GradientReport(tuple(of_gradients))
