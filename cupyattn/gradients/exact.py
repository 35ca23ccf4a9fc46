"""The gradients of attention by their definition, in float64."""

# ruff: noqa: E741  (O is the paper's letter)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace, as_float64
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.problem.backward_form import check_backward_shapes
from cupyattn.problem.checks import check_scale
from cupyattn.problem.settings import MaskedOptions, Unpack, takes_options
from cupyattn.reference.exact import ScoreBlock, blocks_of, softmax_exact

#: A row is coarse if its log-sum-exp is at least this far from zero: COARSE_LSE of
#: kernels_cu/prims/score/gradient.cuh.
COARSE_LSE = 1024.0


def coarse_rows(lse: Array) -> Array:
    """Return whether a float32 log-sum-exp is too coarse to give P; neither -inf nor NaN is."""
    xp = array_namespace(lse)
    size = xp.abs(as_float64(lse))
    return (size >= COARSE_LSE) & (size < np.inf)


class Gradients(NamedTuple):
    """Gradients of a number that depends on O and lse, with respect to Q, K and V."""

    dq: Array
    dk: Array
    dv: Array


class GradientsWithBias(NamedTuple):
    """Gradients with respect to Q, K, V and the bias; the last sums axes that broadcast."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array


class GradientsWithNorm(NamedTuple):
    """Gradients with respect to Q, K, V and the weights of `qk_norm`."""

    dq: Array
    dk: Array
    dv: Array
    dq_weight: Array
    dk_weight: Array


class GradientsWithBiasAndNorm(NamedTuple):
    """Gradients with respect to Q, K, V, the bias and the weights of `qk_norm`."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array
    dq_weight: Array
    dk_weight: Array


AnyGradients = Gradients | GradientsWithBias | GradientsWithNorm | GradientsWithBiasAndNorm
#: Records of gradients, by their fields in addition to dq, dk and dv.
_KINDS: tuple[type[Any], ...] = (
    Gradients, GradientsWithBias, GradientsWithNorm, GradientsWithBiasAndNorm,
)  # fmt: skip


def gradients_of(found: Mapping[str, Array]) -> AnyGradients:
    """Return gradients by name as the tuple that has these names."""
    kind = next(kind for kind in _KINDS if set(kind._fields) == set(found))
    made: AnyGradients = kind(**found)
    return made


@dataclass(frozen=True)
class GradientBlock:
    """Some of the scores of one problem, and the intermediate results of their backward pass.

    Arrays are as in `cupyattn.reference.ScoreBlock`, whose `index` they have.

    Parameters
    ----------
    scores : ScoreBlock
    d_out, out : (batch, heads_kv, group, rows, head_dim) array, float64
        O as the forward pass left it, if it was given.
    lse : (batch, heads_kv, group, rows) array, float64
        The same.
    P, dP : (batch, heads_kv, group, rows, len_kv) array, float64
    softmax, softmax_lse
        P and lse computed from the scores of this block alone, even if lse was given.
    delta : (batch, heads_kv, group, rows) array, float64
        The sum of dO times O, less the gradient with respect to lse.
    slope : (batch, heads_kv, group, rows, len_kv) array or float
        The derivative of a score by scale q.k.
    """

    scores: ScoreBlock
    d_out: Array
    out: Array
    lse: Array
    P: Array
    softmax: Array
    softmax_lse: Array
    dP: Array
    delta: Array
    slope: Array | float

    @property
    def of_bias(self) -> Array:
        """The gradient with respect to a bias of every score."""
        return self.P * (self.dP - self.delta[..., None])

    @property
    def dS(self) -> Array:
        """The gradient with respect to scale q.k."""
        return self.of_bias * self.slope


class BiasSums:
    """Sums over the axes along which a bias broadcasts, of scores that come block by block.

    Parameters
    ----------
    problem : BackwardProblem
    dtype : numpy.dtype
        Type of the sums.
    """

    def __init__(self, problem: BackwardProblem, dtype: Any = np.float64) -> None:
        q, k = problem.q, problem.k
        self._shape = problem.of_bias or ()
        four = (1,) * (4 - len(self._shape)) + self._shape
        heads_kv, (batches, heads, rows, keys) = k.shape[1], four
        self._group = q.shape[1] // heads_kv if heads_kv else 0
        grouped = (heads_kv, self._group) if heads == q.shape[1] else (1, 1)
        xp = array_namespace(q)
        self._sums = xp.zeros((batches, *grouped, rows, keys), dtype)
        self._dtype = dtype

    def add(self, index: tuple[Any, ...], x: Array) -> None:
        """Add (batch, heads_kv, group, rows, keys) numbers at the places `index` of the scores."""
        places, axes = [], []
        for axis, length in enumerate(self._sums.shape):
            places.append(slice(None) if length == 1 or axis >= len(index) else index[axis])
            axes += [axis] if length == 1 else []
        self._sums[tuple(places)] += x.sum(axis=tuple(axes), keepdims=True, dtype=self._dtype)

    @property
    def total(self) -> Array:
        """The sums, of the shape of the bias."""
        return merge_heads(self._sums).reshape(self._shape)


def gradient_blocks(problem: BackwardProblem) -> Iterator[GradientBlock]:
    """Yield all scores with their intermediate results, in float64, a bounded number at a time."""
    (d_out, q, k, v, out, lse), options = problem.arrays, problem.options
    xp = array_namespace(q, k, v, d_out)
    heads_kv = k.shape[1]
    d_out = split_heads(d_out, heads_kv)
    given_out = None if out is None else split_heads(out, heads_kv)
    given_lse = None if lse is None else split_heads(lse, heads_kv)
    of_lse = None if problem.d_lse is None else split_heads(problem.d_lse, heads_kv)
    for block in blocks_of(q, k, v, problem.scale, options, None):
        dO = as_float64(d_out[block.index])
        softmax, softmax_lse = softmax_exact(block.S)
        P, row_lse = softmax, softmax_lse
        if given_lse is not None:
            row_lse = as_float64(given_lse[block.index])
            attends = block.admitted & (row_lse != NEG_INF)[..., None]
            exponent = xp.where(attends, block.S, 0.0) - xp.where(attends, row_lse[..., None], 0.0)
            with np.errstate(over="ignore"):
                P = xp.where(attends, xp.exp(exponent), 0.0)
            if problem.all_keys:
                P = xp.where(coarse_rows(row_lse)[..., None], softmax, P)
        O = P @ block.v if given_out is None else as_float64(given_out[block.index])
        slope: Array | float = 1.0
        if options["softcap"]:
            slope = xp.where(block.admitted, 1.0 - (block.unbiased / options["softcap"]) ** 2, 1.0)
        delta = (dO * O).sum(axis=-1)
        if of_lse is not None:  # -inf does not depend on anything
            delta = delta - xp.where(row_lse == NEG_INF, 0.0, as_float64(of_lse[block.index]))
        yield GradientBlock(
            block, dO, O, row_lse, P, softmax, softmax_lse, dO @ block.v.swapaxes(-1, -2),
            delta, slope,
        )  # fmt: skip


@takes_options
def backward_exact(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    d_lse: Array | None = None,
    grad_bias: bool = False,
    all_keys: bool = True,
    **options: Unpack[MaskedOptions],
) -> Gradients | GradientsWithBias:
    r"""Gradients of attention, in float64 [L43].

    Parameters
    ----------
    d_out : (batch, heads, len_q, head_dim) array
        The gradient with respect to O.
    q, k, v, scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `cupyattn.reference.attention_exact`.
    out : (batch, heads, len_q, head_dim) array, optional
        O as a forward pass left it; exact where omitted.
    lse : (batch, heads, len_q) array, optional
        The log-sum-exp. With both the result is what the backward kernels compute from the operands
        that they receive, without their own rounding.
    d_lse : (batch, heads, len_q) array, optional
        The gradient with respect to the log-sum-exp; zero where omitted, and where lse is -inf.
    grad_bias : bool
        Whether to return `GradientsWithBias`.
    all_keys : bool
        Whether the rows attend to no keys but these. If so, P of a row whose lse is at least
        `COARSE_LSE` from zero is the softmax of its scores, and lse is not used.

    Returns
    -------
    Gradients
        dq, shaped as q, dk and dv, shaped as k, in float64. They are 0 for rows that attend to no
        key and keys to which no row attends.

    Raises
    ------
    TypeError, ValueError
        As `cupyattn.reference.attention_exact`, and for d_out, out or lse of other shapes.

    Notes
    -----
    .. math:: P_{ij} = e^{S_{ij} - lse_i},\quad \Delta_i = \sum_d dO_{id} O_{id},\quad
              dS_{ij} = P_{ij} (dO_i \cdot V_j - \Delta_i + d\mathit{lse}_i),

    .. math:: dV_j = \sum_i P_{ij} dO_i,\quad dQ_i = \sigma \sum_j dS_{ij} K_j,\quad
              dK_j = \sigma \sum_i dS_{ij} Q_i,

    sums over i running over all query heads that share the key head. With a softcap c, dS is
    multiplied by the slope :math:`1 - \tanh^2(\sigma q \cdot k / c)` of the score. Operands must be
    finite, masked ones too.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> d_out, q, k, v = rng.standard_normal((4, 1, 1, 3, 2))
    >>> dq, dk, dv = backward_exact(d_out, q, k, v)
    >>> bool(np.allclose(dv.sum(axis=2), d_out.sum(axis=2)))  # every row of P sums to one
    True
    """
    d_out, q, k, v, out, lse, d_lse = operands(
        d_out=d_out, q=q, k=k, v=v, out=out, lse=lse, d_lse=d_lse
    )
    problem = BackwardProblem.of(
        "backward_exact", (d_out, out, lse, d_lse), q, k, v, options, all_keys, grad_bias
    )
    return exact_gradients(problem)


def exact_gradients(problem: BackwardProblem) -> Gradients | GradientsWithBias:
    """Return the result of `backward_exact` for the arguments that `problem` holds."""
    d_out, q, k, v, *_ = problem.arrays
    xp = array_namespace(d_out, q, k, v)
    check_backward_shapes(*problem.arrays, d_lse=problem.d_lse)
    sigma, heads_kv = check_scale(problem.scale, q.shape[-1]), k.shape[1]
    dq = xp.zeros(split_heads(q, heads_kv).shape)
    dk, dv = xp.zeros(k.shape), xp.zeros(v.shape)
    sums = None if problem.of_bias is None else BiasSums(problem)
    for block in gradient_blocks(problem):
        index, dS = block.scores.index, block.dS
        dq[index] = sigma * (dS @ block.scores.k)
        dk[index[:2]] += sigma * over_rows(dS, block.scores.q)
        dv[index[:2]] += over_rows(block.P, block.d_out)
        if sums is not None:
            sums.add(index, block.of_bias)
    found = Gradients(merge_heads(dq), dk, dv)
    return found if sums is None else GradientsWithBias(*found, sums.total)


def over_rows(x: Array, y: Array) -> Array:
    """Return the products x^T y of some rows, summed over the group: (..., len_kv, head_dim).

    x: (batch, heads_kv, group, rows, len_kv), y: (batch, heads_kv, group, rows, head_dim).
    """
    return (x.swapaxes(-1, -2) @ y).sum(axis=2)
