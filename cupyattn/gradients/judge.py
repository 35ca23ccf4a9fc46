"""J2 of the backward kernels: gradients as fractions of their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.arrays.interchange import taken
from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.bounds.perturbation import ratio_to_bound, worst_of
from cupyattn.errors import UnsupportedError
from cupyattn.gradients.block_sums import GradientBounds
from cupyattn.gradients.bounds import backward_bound
from cupyattn.gradients.exact import backward_exact
from cupyattn.gradients.foreign import backward_bound_foreign
from cupyattn.gradients.prepared import Back, back_bound, back_exact
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.row_preparation import OPTIONS, Preparation
from cupyattn.problem.settings import Settings


@dataclass(frozen=True)
class GradientShare:
    """The largest error of one gradient as a fraction of its bound.

    Parameters
    ----------
    name : {"dq", "dk", "dv", "dbias", "dq_weight", "dk_weight"}
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
    """Result of `judge_backward` for each gradient."""

    shares: tuple[GradientShare, ...]

    @property
    def ratio(self) -> float:
        """The largest of all."""
        return max((share.ratio for share in self.shares), default=0.0)

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
    """Compare gradients with the exact gradients of the operands that the kernels received (J2).

    P is the softmax of the scores in float64. `lse` only widens the bound, by its own error, and
    not at all in rows where the kernels do not use it.

    With the `numerics` of another library the gradients are compared with the exact gradients, and
    the bound includes the roundings of the library's forward pass.

    Parameters
    ----------
    gradients : (dq, dk, dv, ...)
        What `cupyattn.attention_backward` or another library returned. All arrays: NumPy, CuPy, or
        anything with DLPack.
    d_out, q, k, v, out, lse, d_lse
        Arguments of that call, in layout BHSD. `out` and `lse` are left out beside `numerics`.
    numerics : optional
        What another library rounds, as `cupyattn.testing.numerics` makes it. Then
        `cupyattn.testing.judge_backward` judges packed and padded batches, too.
    **options
        Options of that call: scale, causal, causal_align, window, softcap, mask, bias, block_mask,
        and with `qk_norm` also qk_norm_eps, rope, rope_interleaved and rope_offset_q.

    Returns
    -------
    GradientReport

    Raises
    ------
    TypeError
        If `out` and `lse` are missing, or given beside `numerics`.
    UnsupportedError
        For `numerics` with P in 8 bits, as dS would be.
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
    options["mask"], options["bias"] = taken(mask=options.get("mask"), bias=options.get("bias"))
    received = taken(d_out=d_out, q=q, k=k, v=v, out=out, lse=lse)
    how, prepared = _preparation(received, options), received
    if how is not None:
        if numerics is not None:
            raise UnsupportedError(
                "numerics is for rows as another library received them: normalise and turn q and "
                "k, and judge their gradients"
            )
        prepared = received[:1] + how.stored(*received[1:3]) + received[3:]
    with_bias = len(gradients) == (4 if how is None else 6)
    names = ("dq", "dk", "dv", *["dbias"] * with_bias, *(_WEIGHTS if how else ()))
    gradients = taken(**dict(zip(names, gradients, strict=True)))
    options |= {"d_lse": taken(d_lse=d_lse)[0], "grad_bias": with_bias}
    exact = backward_exact(*prepared[:5], **options)._asdict()
    if numerics is None:
        bound = backward_bound(*prepared, **options)
    else:
        d_out, q, k, v = prepared[:4]
        bound = backward_bound_foreign(d_out, q, k, v, numerics, **options)
    if how is not None:
        _, q, k, *_ = received
        dtypes: Any = tuple(x.dtype.name for x in gradients[-2:])
        errors = bound.total("dq"), bound.total("dk")
        terms = back_bound(how, q, k, exact["dq"], exact["dk"], errors, dtypes)
        bound = replace(bound, **dict(zip(Back._fields, terms, strict=True)))
        exact |= back_exact(how, q, k, exact["dq"], exact["dk"])._asdict()
        # One vector for all heads may have one axis.
        weights = (x.reshape(-1, x.shape[-1]) for x in gradients[-2:])
        gradients = (*gradients[:-2], *weights)
    return report_of(names, gradients, [exact[name] for name in names], bound)


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
        worst, at = worst_of(ratio_to_bound(value, expected, total))
        there = [float(x[at]) if at else 0.0 for x in (value, expected, total)]
        tag = bound.dominant(name, at) if at else ""
        of_gradients.append(GradientShare(name, worst, at, there[0], there[1], there[2], tag))
    return GradientReport(tuple(of_gradients))


#: Gradients of the weights of a norm.
_WEIGHTS = ("dq_weight", "dk_weight")


def _preparation(received: Sequence[Array], options: dict[str, Any]) -> Preparation | None:
    """Remove the options that prepare rows from a call's options; return the preparation."""
    own = Settings().rows({}) | {n: options.pop(n) for n in OPTIONS if n in options}
    if own["qk_norm"] is None:
        if own["rope"] is not None:
            raise ValueError("judge_backward takes rope with qk_norm only: give turned q and k")
        return None
    _, q, k, *_ = received
    sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    found = Preparation.of_arrays(own, sizes)
    if found is not None:
        found.check_differentiable()
    return found
