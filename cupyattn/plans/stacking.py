"""Query heads that share a key head, stacked as the rows of one in the Hopper form, whose tiles are
large."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cupyattn.kernels.splits import shared_rows
from cupyattn.problem.call import AttentionSpec

if TYPE_CHECKING:
    from cupyattn.arrays.operand import Operand

#: Rows from which on it pays: up to 32 the split form reads K and V as fast as memory gives them.
LEAST_ROWS = 64


def stacked(
    call: AttentionSpec, q: Operand, o: Operand
) -> tuple[AttentionSpec, Operand, Operand] | None:
    """Return the call, q and o with heads stacked; None where they cannot be, or need not.

    Rows of a head must be as far apart as the last of one head and the first of the next: in layout
    BHSD as they are made, in any layout where a head has one row.
    """
    group = call.heads // max(1, call.heads_kv)
    rows = shared_rows(call.heads, call.heads_kv, call.len_q)
    narrow = call.window or (call.causal and call.len_q + call.causal_shift < call.len_kv)
    if group == 1 or rows < LEAST_ROWS or narrow:
        return None
    q_rows, o_rows = _stacked(q, group), _stacked(o, group)
    if q_rows is None or o_rows is None:
        return None
    return replace(call, heads=call.heads_kv, len_q=rows, stack=call.len_q), q_rows, o_rows


def _stacked(x: Operand, group: int) -> Operand | None:
    batch, heads, rows, head_dim = x.shape
    of_batch, of_head, of_row, of_element = x.strides
    if rows == 1:
        of_row = of_head
    elif of_head != rows * of_row:
        return None
    strides = (of_batch, of_head * group, of_row, of_element)
    return replace(x, shape=(batch, heads // group, rows * group, head_dim), strides=strides)


def describe(call: AttentionSpec) -> str:
    """Say how many heads are stacked."""
    return f"{call.heads // call.heads_kv} query heads share each key head, stacked as rows of one"
