"""Both branches of guided sampling in one launch: conditional and unconditional queries.

Where the branches share keys and values, their queries become neighbouring heads that share a key
head: grouped heads, which every rung has. Each query head is computed by itself, with scales of its
own, so that the result is that of two calls.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import is_cupy, operand
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.errors import UnsupportedError
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import is_of_token

#: Conditional and unconditional.
BRANCHES = 2


def stack_queries(q_cond: Array, q_uncond: Array) -> Array:
    """Put the queries of both branches side by side.

    Parameters
    ----------
    q_cond, q_uncond : array, (batch, heads, len_q, head_dim)

    Returns
    -------
    array, (batch, 2 heads, len_q, head_dim)
        Head 2 h is head h of the conditional branch, and 2 h + 1 is head h of the other.

    Raises
    ------
    ValueError, TypeError
        If they differ in shape or type.
    """
    _check_alike(q_cond, q_uncond)
    batch, heads, *rest = q_cond.shape
    return _side_by_side(q_cond, q_uncond, 2).reshape(batch, BRANCHES * heads, *rest)


def join_batches(cond: Array, uncond: Array) -> Array:
    """Return two arrays of one shape one behind the other along the batch.

    Raises
    ------
    ValueError, TypeError
        If they differ in shape or type.
    """
    _check_alike(cond, uncond)
    return _side_by_side(cond, uncond, 0).reshape(-1, *cond.shape[1:])


def _side_by_side(cond: Array, uncond: Array, axis: int) -> Array:
    """Return both along a new axis."""
    # NOTE: two plain copies. CuPy's concatenate may bring a list of addresses from the host.
    cond, uncond = operand("cond", cond), operand("uncond", uncond)
    xp, shape = array_namespace(cond, uncond), list(cond.shape)
    shape.insert(axis, BRANCHES)
    both = xp.empty(shape, cond.dtype)
    places = xp.moveaxis(both, axis, 0)
    places[0], places[1] = cond, uncond
    return both


def _check_alike(q_cond: Array, q_uncond: Array) -> None:
    if q_cond.shape != q_uncond.shape or q_cond.dtype != q_uncond.dtype:
        raise ValueError(
            "q_cond and q_uncond must have one shape and dtype, got "
            f"{q_cond.shape} {q_cond.dtype} and {q_uncond.shape} {q_uncond.dtype}"
        )


def split_branches(o: Array) -> tuple[Array, Array]:
    """Return views of the two branches in a result for `stack_queries`."""
    return o[:, ::BRANCHES], o[:, 1::BRANCHES]


def repeat_heads(array: Array, axis: int) -> Array:
    """Give every head of an array twice, for its two branches; one for all heads stays one."""
    return array if array.shape[axis] == 1 else array.repeat(BRANCHES, axis=axis)


def repeat_weights(weight: Array, head_dim: int) -> Array:
    """Return weights of a norm of queries for both branches, stacked as heads.

    Raises
    ------
    UnsupportedError
        For weights that normalise all heads of a token together: a branch has half of the heads.
    """
    if is_of_token(weight, head_dim):
        raise UnsupportedError(
            "queries of both branches share keys as heads of one call, so qk_norm takes weights "
            f"(head_dim,) or (heads, head_dim), got {tuple(weight.shape)}: give k and v of both "
            "branches, or normalise q and k before the call"
        )
    return repeat_heads(weight, 0) if weight.ndim == 2 else weight


@functools.lru_cache(maxsize=16)
def for_both_branches(block_mask: BlockMask) -> BlockMask:
    """Return a block mask of the stacked heads, the same for the same mask."""
    if block_mask.mask.shape[1] == 1:
        return block_mask
    return BlockMask(repeat_heads(block_mask.mask, 1), *block_mask.blocks)


def guided(o_cond: Array, o_uncond: Array, guidance_scale: float) -> Any:
    """Return ``o_uncond + guidance_scale (o_cond - o_uncond)``, an array expression.

    Parameters
    ----------
    o_cond, o_uncond : array
        Outputs of both branches, of any library.
    guidance_scale : float

    Notes
    -----
    Classifier-free guidance combines the two *noise predictions*, outputs of the whole network.
    This combines outputs of one attention layer, which is another method; it is here to be read.
    """
    o_cond, o_uncond = (
        operand(name, o) if isinstance(o, np.ndarray) or is_cupy(o) else o
        for name, o in (("o_cond", o_cond), ("o_uncond", o_uncond))
    )
    return o_uncond + guidance_scale * (o_cond - o_uncond)
