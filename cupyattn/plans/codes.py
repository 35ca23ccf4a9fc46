"""Structs and fields by which a kernel reads codes, their scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.problem.operands import ValueCodes


@dataclass(frozen=True)
class ZeroPoints:
    """Operands for the zero points of Q and K, the buffers ``"q_zero"`` and ``"k_zero"``.

    These have the shapes and strides of the scales.

    Parameters
    ----------
    q_code_sum, k_code_sum : Operand
        Sums of the codes of each row, (batch, heads, length), the buffers of these names; of packed
        sequences as `cupyattn.plans.quantize.plan_quantize` fills them.
    """

    q_code_sum: Operand
    k_code_sum: Operand


@dataclass(frozen=True)
class Scales:
    """Scales, means and zero points of the codes of Q and K.

    Parameters
    ----------
    q_scale, k_scale : Operand
        Scales (batch or 1, heads or 1, groups), the buffers ``"q_scale"`` and ``"k_scale"``.
    smoothed : bool
        Whether the mean in the buffer ``"k_mean"`` was subtracted from the keys.
    zeros : ZeroPoints, optional
        Given if the codes have zero points.
    numbers : Operand, optional
        The numbers that the codes of Q are made from, the buffer ``"q"``, if only the attention
        kernel reads these codes.
    """

    q_scale: Operand
    k_scale: Operand
    smoothed: bool
    zeros: ZeroPoints | None = None
    numbers: Operand | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The fields of QUANT_PARAMS."""
        found: dict[str, Any] = {"K_mean": "k_mean" if self.smoothed else None}
        for name, scale in (("q", self.q_scale), ("k", self.k_scale)):
            sums = None if self.zeros is None else getattr(self.zeros, f"{name}_code_sum")
            by_batch, by_head = scale.row_strides
            sum_by_batch, sum_by_head = (0, 0) if sums is None else sums.row_strides
            fields = {
                "scale": f"{name}_scale", "scale_stride_batch": by_batch,
                "scale_stride_head": by_head, "zero": None if sums is None else f"{name}_zero",
                "code_sum": None if sums is None else f"{name}_code_sum",
                "sum_stride_batch": sum_by_batch, "sum_stride_head": sum_by_head,
            }  # fmt: skip
            found |= {f"{name.upper()}_{field}": value for field, value in fields.items()}
        return found


def value_box(v_codes: Operand, head_dim: int) -> tuple[str, str, Operand, int]:
    """Return the copies of codes of V: buffer, dtype, operand, channels of one copy.

    A copy has as many channels as the Hopper form has columns of O, its ``O_COLS``.
    """
    return "v_codes", "int8", v_codes, 64 if head_dim <= 64 else -(-head_dim // 32) * 32


def value_params(values: ValueCodes) -> dict[str, Any]:
    """Return the fields of VALUE_PARAMS."""
    by_batch, by_head, *_ = values.scale.row_strides
    return {
        "V_scale": "v_scale", "V_mean": "v_mean" if values.smoothed else None,
        "V_scale_stride_batch": by_batch, "V_scale_stride_head": by_head,
        "V_zero": "v_zero" if values.zero_points else None,
    }  # fmt: skip
