"""Rules for a mapped axis of `jax.vmap` and `torch.func.vmap`."""

from __future__ import annotations

from cupyattn.problem.block_mask import BlockMask
from cupyattn.quant.config import QuantConfig


def joins_the_batch(quant: QuantConfig | None, block_mask: BlockMask | None) -> bool:
    """Return whether one call on a larger batch equals a call for each entry of a mapped axis.

    Scales of a whole tensor, given scales, and block masks with a batch axis depend on the batch.
    """
    if block_mask is not None and block_mask.mask.shape[0] > 1:
        return False
    if quant is None:
        return True
    granularities = quant.granularity_q, quant.granularity_k, quant.granularity_v
    return quant.scales == "dynamic" and "tensor" not in granularities
