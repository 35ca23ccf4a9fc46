"""Operands of an attention kernel, without the arrays: layouts, quantisation, stacked heads.

Forms with large tiles stack the query heads that share a key head as the rows of one head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.splits import shared_rows
from cupyattn.problem.checks import AttentionSpec
from cupyattn.quant.operand_protocol import Quantized

#: Least number of rows for which stacking query heads pays. Up to 32 rows, the split form reads K
#: and V at the speed of memory.
LEAST_STACKED_ROWS = 64


class Operands(NamedTuple):
    """Layouts of the operands of a kernel.

    Parameters
    ----------
    q, k, v, o : Operand
        The arrays that the kernel reads and writes. If they are codes, V has shape (batch,
        heads_kv, head_dim, keys), and rows of Q and K are padded.
    mask, bias : Operand, optional
        Operands (batch, heads, len_q, len_kv), with stride 0 along broadcast axes.
    kept_blocks : Operand, optional
        The lists of `cupyattn.problem.block_mask.BlockMask.kept_blocks`, if the call has a block
        mask.
    """

    q: Operand
    k: Operand
    v: Operand
    o: Operand
    mask: Operand | None = None
    bias: Operand | None = None
    kept_blocks: Operand | None = None

    @property
    def rows(self) -> dict[str, Operand]:
        """q, k, v and o by name."""
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}


class ValueCodes(NamedTuple):
    """Properties of codes of V.

    Parameters
    ----------
    scale : Operand
        Scales (batch, heads_kv, groups, head_dim), the buffer ``"v_scale"``.
    group : int
        Keys that share the scale of a channel.
    p_type : {"u8", "s8", "e4m3", "16bit"}
        Type of P in the product with V.
    smoothed : bool
        Whether the mean in the buffer ``"v_mean"`` was subtracted from V.
    zero_points : bool
        Whether there is a buffer ``"v_zero"``, with the shape and the strides of the scales.
    """

    scale: Operand
    group: int
    p_type: str
    smoothed: bool
    zero_points: bool = False


class Codes(NamedTuple):
    """Quantisation of the operands of ``fa_int8``.

    Parameters
    ----------
    group_q, group_kv : int
        Rows per scale.
    zero_points : bool
        Whether codes of Q and K have zero points.
    values : ValueCodes, optional
        V is codes as well.
    fused : bool
        Whether the kernel itself makes the codes; q, k and v then have 16 or 32 bits.
    """

    group_q: int
    group_kv: int
    zero_points: bool = False
    values: ValueCodes | None = None
    fused: bool = False

    @classmethod
    def of(cls, z: Quantized) -> Codes:
        """Describe operands that are quantised already, arrays or descriptions of some."""
        values = None
        if z.form != "portable":
            values = ValueCodes(
                _place(z.v_scale), z.group_v, str(z.config.p_type), z.v_mean is not None,
                z.v_zero is not None,
            )  # fmt: skip
        return cls(z.group_q, z.group_kv, z.q_zero is not None, values)

    @property
    def features(self) -> dict[str, Any]:
        """Their fields of `cupyattn.kernels.features.Features`."""
        found = {
            "group_q": self.group_q, "group_kv": self.group_kv, "zero_points": self.zero_points,
        }  # fmt: skip
        if self.values is None:
            return found
        return {**found, "group_v": self.values.group, "p_type": self.values.p_type}

    @property
    def kind(self) -> str:
        """The kind of operands that they make, of `cupyattn.kernels.forms.VALUES`."""
        if self.fused or self.values is None:
            return "fused" if self.fused else "16bit"
        if self.values.p_type == "e4m3":
            return "fp8"
        if self.values.p_type == "16bit":
            return "int8 beside 16bit"
        return "int8" if self.values.group == GROUP_ALL else "int8 by group"


def _place(x: Any) -> Operand:
    return x.place if isinstance(x, Described) else Operand.of(x)


def stacking_pays(call: AttentionSpec) -> bool:
    """Whether enough rows share a key head, and all may attend to nearly all keys."""
    narrow = call.window or (call.causal and call.len_q + call.causal_shift < call.len_kv)
    rows = shared_rows(call.heads, call.heads_kv, call.len_q)
    return query_heads_per_key_head(call) > 1 and rows >= LEAST_STACKED_ROWS and not narrow


def query_heads_per_key_head(call: AttentionSpec) -> int:
    """Return how many query heads share a key head."""
    return call.heads // max(1, call.heads_kv)


def stacked_call(call: AttentionSpec) -> AttentionSpec:
    """Return the call with heads stacked."""
    rows = shared_rows(call.heads, call.heads_kv, call.len_q)
    return replace(call, heads=call.heads_kv, len_q=rows, stack=call.len_q)


def can_be_stacked(operands: Operands) -> bool:
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
    """Return the operands of a call with heads of q and o stacked, if that is possible."""
    group, shape = query_heads_per_key_head(call), stacked_call(call).score_shape
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


def describe_stacking(call: AttentionSpec) -> str:
    """Say how many heads are stacked."""
    count = query_heads_per_key_head(call)
    return f"{count} query heads share each key head, stacked as rows of one"
