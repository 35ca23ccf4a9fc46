"""Which calls the Hopper forms take, whose operands the copy engine moves, and why not others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cupyattn.arrays.operand import Operand
from cupyattn.kernels.backward_tiles import SUMMED
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.operands import Codes, Operands

#: Keys that share a scale in the Hopper forms, or a multiple of them.
HOPPER_SCALE_KEYS = 16

#: Keys that share a scale of a channel of V there, or a multiple of them: those of a step.
HOPPER_VALUE_KEYS = 128


class Support(NamedTuple):
    """Whether a form takes a call, and if not, why not."""

    supported: bool
    reason: str = ""

    @property
    def note(self) -> str:
        """What a plan of the portable form says about it; "" where the form takes the call."""
        return "" if self.supported else f"portable form: {self.reason}"


SUPPORTED = Support(True)


def call_support(variant: Variant, call: AttentionSpec, operands: Operands) -> Support:
    """Say whether the Hopper forms of a variant take a call, whatever its codes."""
    if 0 in (call.len_kv, operands.k.shape[2]):
        return Support(False, "there are no keys for the copy engine")
    blocks = call.block_mask
    taken = blocks == (0, 0) or bool(variant.hopper_block_mask_tiles)
    changes = _no_changes(call, () if taken else ("block_mask",))
    if not changes.supported:
        return changes
    if blocks != (0, 0) and call.packed is not None:
        return Support(False, "the Hopper form takes no block mask of packed sequences")
    if blocks != (0, 0) and variant.block_mask_tiles_for(call.head_dim, blocks, "sm90") is None:
        return Support(
            False,
            "the Hopper form takes block masks of 128 query rows, got blocks of "
            f"{blocks[0]} x {blocks[1]}",
        )
    return reach(operands.rows)


def _no_changes(call: AttentionSpec, further: tuple[str, ...] = ()) -> Support:
    """Say whether nothing changes the scores of a call that no Hopper form takes."""
    given = [*(name for name in ("softcap", "mask", "bias") if getattr(call, name)), *further]
    if given:
        return Support(False, f"the Hopper form takes no {' and no '.join(given)}")
    return SUPPORTED


def reach(operands: Mapping[str, Operand]) -> Support:
    """Say whether the copy engine can move all operands."""
    for name, x in operands.items():
        strides = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.misalignment or any(s <= 0 or s * x.itemsize % 16 for s in strides):
            return Support(
                False,
                "the copy engine needs addresses and positive strides that are "
                f"multiples of 16 bytes, got {name} at 16 n + {x.misalignment} with strides of "
                f"{tuple(s * x.itemsize for s in x.strides[:-1])} bytes",
            )
    return SUPPORTED


def codes_support(variant: Variant, head_dim: int, codes: Codes, tiles: Tiles | None) -> Support:
    """Say whether the Hopper forms take codes.

    Parameters
    ----------
    variant : Variant
    head_dim : int
    codes : Codes
    tiles : Tiles, optional
        The caller's.
    """
    found, values = "", codes.values
    step = HOPPER_VALUE_KEYS if tiles is None else tiles.block_kv
    if codes.zero_points and values is not None and values.p_type != "e4m3":
        found = "takes no zero points with P and V as INT8 codes"
    elif codes.group_kv % HOPPER_SCALE_KEYS:
        found = (
            f"has one scale for {HOPPER_SCALE_KEYS} keys, or for a multiple, got {codes.group_kv}"
        )
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
    return Support(False, f"the Hopper form {found}") if found else SUPPORTED


def backward_support(call: AttentionSpec, operands: Mapping[str, Operand]) -> Support:
    """Say whether the Hopper form of the backward pass takes a call.

    Parameters
    ----------
    call : AttentionSpec
    operands : mapping of str to Operand
        Those that the copy engine reads, and the gradients, which are written 16 bytes at a time.
    """
    if 0 in (call.len_kv, call.len_q):
        return Support(False, "there is nothing for the copy engine")
    changes = _no_changes(call)
    if not changes.supported:
        return changes
    rows, keys = call.block_mask
    size = 128 if call.head_dim <= SUMMED else 64
    if rows % size or keys % size:
        return Support(
            False,
            "the Hopper form takes block masks whose blocks are multiples of "
            f"{size} x {size}, got {rows} x {keys}",
        )
    return reach(operands)
