"""Query heads that share a key head, stacked as the rows of one in the Hopper form, whose tiles are
large."""

from __future__ import annotations

from dataclasses import replace

from cupyattn.arrays.operand import Operand
from cupyattn.kernels.splits import shared_rows
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.operands import Operands

#: Rows from which on it pays: up to 32 the split form reads K and V as fast as memory gives them.
LEAST_ROWS = 64


def pays(call: AttentionSpec) -> bool:
    """Whether enough rows share a key head, and all may attend to nearly all keys."""
    narrow = call.window or (call.causal and call.len_q + call.causal_shift < call.len_kv)
    rows = shared_rows(call.heads, call.heads_kv, call.len_q)
    return heads_of_one(call) > 1 and rows >= LEAST_ROWS and not narrow


def heads_of_one(call: AttentionSpec) -> int:
    """Return how many query heads share a key head."""
    return call.heads // max(1, call.heads_kv)


def stacked_call(call: AttentionSpec) -> AttentionSpec:
    """Return the call with heads stacked."""
    rows = shared_rows(call.heads, call.heads_kv, call.len_q)
    return replace(call, heads=call.heads_kv, len_q=rows, stack=call.len_q)


def possible(operands: Operands) -> bool:
    """Whether rows of a head are as far apart as the last of one head and the first of the next.

    So they are in layout BHSD as they are made, and in any layout where a head has one row. Mask
    and bias have to be of keys: the same for all heads and rows.
    """
    scores = (x for x in (operands.mask, operands.bias) if x is not None)
    of_keys = all(x.steps[1:3] == (0, 0) and x.steps[3] for x in scores)
    return of_keys and all(
        x.shape[2] == 1 or x.strides[1] == x.shape[2] * x.strides[2]
        for x in (operands.q, operands.o)
    )


def stacked_operands(call: AttentionSpec, operands: Operands) -> Operands:
    """Return the operands of a call with heads of q and o stacked, where that is possible."""
    group, shape = heads_of_one(call), stacked_call(call).score_shape
    scores: dict[str, Operand] = {}
    for name in ("mask", "bias"):
        x: Operand | None = getattr(operands, name)
        if x is not None:  # the same for all rows that are stacked
            steps = (x.strides[0], 0, 0, x.strides[3])
            scores[name] = replace(x, shape=shape, strides=steps)
    return operands._replace(
        q=_stacked(operands.q, group), o=_stacked(operands.o, group), **scores
    )


def _stacked(x: Operand, group: int) -> Operand:
    batch, heads, rows, head_dim = x.shape
    of_batch, of_head, of_row, of_element = x.strides
    strides = (of_batch, of_head * group, of_head if rows == 1 else of_row, of_element)
    return replace(x, shape=(batch, heads // group, rows * group, head_dim), strides=strides)


def describe(call: AttentionSpec) -> str:
    """Say how many heads are stacked."""
    return f"{heads_of_one(call)} query heads share each key head, stacked as rows of one"
