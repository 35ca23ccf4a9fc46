"""How a kernel reads codes: the structs of their scales and zero points, and what fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.kernels.limits import GROUP_ALL, check_value_group
from cupyattn.kernels.tiles import Tiles

if TYPE_CHECKING:
    from cupyattn.arrays.operand import Operand
    from cupyattn.kernels.ladder import Variant

#: Keys that share a scale in the Hopper forms, or a multiple of them.
HOPPER_SCALE_KEYS = 16

#: Keys that share a scale of a channel of V there, or a multiple of them: those of a step.
HOPPER_VALUE_KEYS = 128

#: ``struct ValueParams`` of kernels_cu/prims/params.cuh, field by field.
VALUE_PARAMS = np.dtype(
    [
        ("V_scale", "u8"), ("V_mean", "u8"),
        ("V_scale_stride_batch", "i8"), ("V_scale_stride_head", "i8"), ("V_zero", "u8"),
    ],
    align=True,
)  # fmt: skip


@dataclass(frozen=True)
class ZeroPoints:
    """What goes with the zero points of Q and K, the buffers ``"q_zero"`` and ``"k_zero"``.

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
class FusedCodes:
    """Codes that the form ``"fused"`` makes of Q and K by itself.

    Parameters
    ----------
    group_q, group_kv : int
        Rows per scale.
    zero_points : bool
    """

    group_q: int
    group_kv: int
    zero_points: bool

    def check(self, tiles: Tiles) -> None:
        """Raise ValueError unless the kernel can make them in tiles of this size."""
        whole = not tiles.block_q % self.group_q and not tiles.block_kv % self.group_kv
        if tiles.num_stages != 1 or not whole:
            raise ValueError(
                f"fused=True needs tiles.num_stages=1, and tiles.block_q and tiles.block_kv of "
                f"whole groups of {self.group_q} rows and {self.group_kv} keys, got {tiles}"
            )

    @property
    def features(self) -> dict[str, Any]:
        """Their fields of `cupyattn.kernels.features.Features`."""
        return {
            "group_q": self.group_q, "group_kv": self.group_kv, "zero_points": self.zero_points,
        }  # fmt: skip


def quant_params(
    q_scale: Operand, k_scale: Operand, smoothed: bool, zeros: ZeroPoints | None
) -> dict[str, Any]:
    """Return the fields of QUANT_PARAMS.

    Parameters
    ----------
    q_scale, k_scale : Operand
        Scales (batch or 1, heads or 1, groups), the buffers ``"q_scale"`` and ``"k_scale"``.
    smoothed : bool
        Whether a buffer ``"k_mean"`` was subtracted from the keys.
    zeros : ZeroPoints or None
    """
    found: dict[str, Any] = {"K_mean": "k_mean" if smoothed else None}
    for name, scale in (("q", q_scale), ("k", k_scale)):
        sums = None if zeros is None else getattr(zeros, f"{name}_code_sum")
        by_batch, by_head = scale.row_strides
        sum_by_batch, sum_by_head = (0, 0) if sums is None else sums.row_strides
        fields = {
            "scale": f"{name}_scale", "scale_stride_batch": by_batch, "scale_stride_head": by_head,
            "zero": None if sums is None else f"{name}_zero",
            "code_sum": None if sums is None else f"{name}_code_sum",
            "sum_stride_batch": sum_by_batch, "sum_stride_head": sum_by_head,
        }  # fmt: skip
        found |= {f"{name.upper()}_{field}": value for field, value in fields.items()}
    return found


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

    def check(self, v_codes: Operand, tiles: Tiles) -> None:
        """Raise unless the kernel can read them in tiles of this size."""
        check_value_group(self.group, tiles)
        if 0 not in v_codes.shape and not v_codes.allows(16):
            raise ValueError(
                "v_codes must be contiguous at an address that is a multiple of 16 bytes, got "
                f"16 n + {v_codes.misalignment} and strides {v_codes.strides}"
            )

    @property
    def hopper_form(self) -> str:
        """The Hopper form for such codes, as far as there is one."""
        if self.p_type == "e4m3":
            return "sm90_fp8"
        return "sm90_pv8" if self.group == GROUP_ALL else "sm90_pv8_by_tile"

    def box(self, v_codes: Operand, head_dim: int) -> tuple[str, str, Operand, int]:
        """Return what the copy engine moves: buffer, dtype, operand and channels at a time.

        As many channels as the Hopper form has columns of O, its ``O_COLS``.
        """
        return "v_codes", "int8", v_codes, 64 if head_dim <= 64 else -(-head_dim // 32) * 32

    @property
    def params(self) -> dict[str, Any]:
        """The fields of VALUE_PARAMS."""
        by_batch, by_head, *_ = self.scale.row_strides
        return {
            "V_scale": "v_scale", "V_mean": "v_mean" if self.smoothed else None,
            "V_scale_stride_batch": by_batch, "V_scale_stride_head": by_head,
            "V_zero": "v_zero" if self.zero_points else None,
        }  # fmt: skip


def hopper_obstacle(
    variant: Variant,
    head_dim: int,
    group_kv: int,
    zeros: ZeroPoints | None,
    values: ValueCodes | None,
    tiles: Tiles | None,
) -> str:
    """Return why the Hopper forms do not take these codes, as a note for a plan; "" where they do.

    Parameters
    ----------
    variant : Variant
    head_dim : int
    group_kv : int
        Keys that share a scale.
    zeros, values, tiles
        As for `cupyattn.plans.attention_int8.plan_int8`.
    """
    found, step = "", HOPPER_VALUE_KEYS if tiles is None else tiles.block_kv
    if zeros is not None and values is not None and values.p_type != "e4m3":
        found = "takes no zero points with P and V as INT8 codes"
    elif group_kv % HOPPER_SCALE_KEYS:
        found = f"has one scale for {HOPPER_SCALE_KEYS} keys, or for a multiple, got {group_kv}"
    elif values is not None and values.p_type == "s8":
        found = "takes P in u8, or in e4m3 with pv='fp8', got p_type 's8'"
    elif values is not None and values.group != GROUP_ALL and values.p_type == "e4m3":
        found = (
            "for P and V in e4m3 takes one scale for a channel of V (granularity_v='channel'), got "
            f"one for every {values.group} keys"
        )
    elif values is not None and values.group != GROUP_ALL and values.group % step:
        found = (
            f"has one scale of V for {step} keys, for a multiple or for all, got one for "
            f"{values.group}: quantise V for it, with arch='sm_90a'"
        )
    elif values is not None and values.group != GROUP_ALL and not values.scale.allows(4):
        found = (
            "reads scales of V 16 bytes at a time, got "
            f"16 n + {values.scale.misalignment} and strides {values.scale.strides}"
        )
    elif values is not None and head_dim > (
        largest := variant.largest_head_dim(values.hopper_form)
    ):
        found = f"for P and V in {values.p_type} takes head_dim up to {largest}, got {head_dim}"
    return f"portable form: the Hopper form {found}" if found else ""
