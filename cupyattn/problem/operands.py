"""Operands of an attention kernel, without the arrays: where they lie, how they are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.quant.operand_protocol import Quantized


class Operands(NamedTuple):
    """Where the operands of a kernel lie.

    Parameters
    ----------
    q, k, v, o : Operand
        Those that the kernel reads and writes, codes where it takes codes: of V by channel,
        (batch, heads_kv, head_dim, keys), of Q and K with padded rows.
    mask, bias : Operand, optional
        Of shape (batch, heads, len_q, len_kv), where the call has them; stride 0 where they are
        broadcast.
    kept_blocks : Operand, optional
        What `cupyattn.problem.block_mask.BlockMask.kept_blocks` makes, where the call has a block
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


@dataclass(frozen=True)
class ValueCodes:
    """How codes of V are to be read.

    Parameters
    ----------
    scale : Operand
        Scales (batch, heads_kv, groups, head_dim), the buffer ``"v_scale"``.
    group : int
        Keys that share the scale of a channel.
    p_type : {"u8", "s8", "e4m3"}
        Codes of P.
    smoothed : bool
        Whether a buffer ``"v_mean"`` was subtracted from V.
    zero_points : bool
        Whether there is a buffer ``"v_zero"``, with the shape and the strides of the scales.
    """

    scale: Operand
    group: int
    p_type: str
    smoothed: bool
    zero_points: bool = False


@dataclass(frozen=True)
class Codes:
    """How the operands of ``fa_int8`` are quantised.

    Parameters
    ----------
    group_q, group_kv : int
        Rows per scale.
    zero_points : bool
        Whether codes of Q and K have zero points.
    values : ValueCodes, optional
        V is codes as well.
    fused : bool
        The kernel makes the codes by itself: q, k and v are arrays of 16 or 32 bits.
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
        return "int8" if self.values.group == GROUP_ALL else "int8 by group"


def _place(x: Any) -> Operand:
    return x.place if isinstance(x, Described) else Operand.of(x)
