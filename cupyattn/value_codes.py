"""How a kernel reads V where that is 8-bit codes: their scales, and the struct that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.checks import check_value_group
from cupyattn.tiles import Tiles

if TYPE_CHECKING:
    from cupyattn.launch import Operand

#: ``struct ValueParams`` of kernels_cu/prims/params.cuh, field by field.
VALUE_PARAMS = np.dtype(
    [
        ("V_scale", "u8"), ("V_mean", "u8"),
        ("V_scale_stride_batch", "i8"), ("V_scale_stride_head", "i8"),
    ],
    align=True,
)  # fmt: skip


@dataclass(frozen=True)
class ValueCodes:
    """How codes of V are to be read.

    Parameters
    ----------
    scale : Operand
        Scales (batch, heads_kv, groups, head_dim), the buffer ``"v_scale"``.
    group : int
        Keys that share the scale of a channel.
    p_type : {"u8", "s8"}
        Codes of P.
    smoothed : bool
        Whether a buffer ``"v_mean"`` was subtracted from V.
    """

    scale: Operand
    group: int
    p_type: str
    smoothed: bool

    def check(self, v_codes: Operand, tiles: Tiles) -> None:
        """Raise unless the kernel can read them in tiles of this size."""
        check_value_group(self.group, tiles)
        if not v_codes.allows(16):
            raise ValueError(
                "v_codes must be contiguous at an address that is a multiple of 16 bytes, got "
                f"16 n + {v_codes.misalignment} and strides {v_codes.strides}"
            )

    @property
    def params(self) -> dict[str, Any]:
        """The fields of VALUE_PARAMS."""
        by_batch, by_head, *_ = self.scale.row_strides
        return {
            "V_scale": "v_scale", "V_mean": "v_mean" if self.smoothed else None,
            "V_scale_stride_batch": by_batch, "V_scale_stride_head": by_head,
        }  # fmt: skip
