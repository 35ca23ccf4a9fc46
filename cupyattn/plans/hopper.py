"""What keeps a call from the Hopper forms, which the copy engine feeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cupyattn.kernels.backward_tiles import SUMMED
from cupyattn.kernels.ladder import Variant
from cupyattn.problem.call import AttentionSpec

if TYPE_CHECKING:
    from cupyattn.arrays.operand import Operand


def obstacle(
    variant: Variant, call: AttentionSpec, q: Operand, k: Operand, v: Operand, o: Operand
) -> str:
    """Return why the Hopper form does not take a call, as a note for its plan; "" where it does."""
    if 0 in (call.len_kv, k.shape[2]):
        return "portable form: there are no keys for the copy engine"
    given = [name for name in ("softcap", "mask", "bias") if getattr(call, name)]
    blocks = call.block_mask
    given += ["block_mask"] if blocks != (0, 0) and not variant.hopper_block_mask_tiles else []
    if given:
        return f"portable form: the Hopper form takes no {' and no '.join(given)}"
    if blocks != (0, 0) and call.packed is not None:
        return "portable form: the Hopper form takes no block mask of packed sequences"
    if blocks != (0, 0) and variant.block_mask_tiles_for(call.head_dim, blocks, "sm90") is None:
        return (
            "portable form: the Hopper form takes block masks of 128 query rows, got blocks of "
            f"{blocks[0]} x {blocks[1]}"
        )
    return out_of_reach({"q": q, "k": k, "v": v, "o": o})


def out_of_reach(operands: Mapping[str, Operand]) -> str:
    """Return which operand the copy engine cannot take, as a note; "" where it takes them all."""
    for name, x in operands.items():
        strides = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.misalignment or any(s <= 0 or s * x.itemsize % 16 for s in strides):
            return (
                f"portable form: the copy engine needs addresses and positive strides that are "
                f"multiples of 16 bytes, got {name} at 16 n + {x.misalignment} with strides of "
                f"{tuple(s * x.itemsize for s in x.strides[:-1])} bytes"
            )
    return ""


def backward_obstacle(call: AttentionSpec, operands: Mapping[str, Operand]) -> str:
    """Return why the Hopper form of the backward pass does not take a call; "" where it does.

    Parameters
    ----------
    call : AttentionSpec
    operands : mapping of str to Operand
        Those that the copy engine reads, and the gradients, which are written 16 bytes at a time.
    """
    if 0 in (call.len_kv, call.len_q):
        return "portable form: there is nothing for the copy engine"
    given = [name for name in ("softcap", "mask", "bias") if getattr(call, name)]
    if given:
        return f"portable form: the Hopper form takes no {' and no '.join(given)}"
    rows, keys = call.block_mask
    size = 128 if call.head_dim <= SUMMED else 64
    if rows % size or keys % size:
        return (
            f"portable form: the Hopper form takes block masks whose blocks are multiples of "
            f"{size} x {size}, got {rows} x {keys}"
        )
    return out_of_reach(operands)
