"""Features that change a score beside its scale: ``kernels_cu/prims/score/score.cuh`` in Python.

`Scoring` holds window, softcap, mask, bias and block mask of one call. Both the definition in
float64 and the mirror in float32 use it. Each caps and adds in its precision, and masks by
selection here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.groups import split_heads
from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace
from cupyattn.problem.checks import (
    check_bias,
    check_block_mask,
    check_limits,
    check_mask,
    check_softcap,
)
from cupyattn.problem.settings import PLACES

#: Whole axes (batch, heads_kv, group) of scores.
EVERYWHERE = (slice(None), slice(None), slice(None))


@dataclass(frozen=True)
class Scoring:
    """Features of one call.

    Parameters
    ----------
    first, last : int or None
        Row i attends key j only where ``i + first <= j <= i + last``; None: no such limit.
    softcap : float
        ``s -> softcap * tanh(s / softcap)``; 0: none.
    mask, bias : (batch, heads_kv, group, len_q, len_kv) array or None
        Views of the caller's arrays; stride 0 where they were broadcast.
    kept : (batch, heads_kv, group, q_blocks, kv_blocks) array or None
        The same for the block mask.
    blocks : (int, int)
        Rows and keys of a block of it.
    """

    first: int | None
    last: int | None
    softcap: float
    mask: Array | None
    bias: Array | None
    kept: Array | None = None
    blocks: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, q: Array, k: Array, options: Mapping[str, Any]) -> Scoring:
        """Check the options of a call on arrays (batch, heads, len, head_dim).

        They equal `cupyattn.problem.settings.Settings.scores`.
        """
        shape = (*q.shape[:3], k.shape[2])
        block_mask = options["block_mask"]
        mask, bias = operands(mask=options["mask"], bias=options["bias"])
        xp = array_namespace(q, *(x for x in (mask, bias) if x is not None))
        if mask is not None:
            check_mask(mask, shape)
        if bias is not None:
            check_bias(bias, shape)
        mask, bias = (
            None if x is None else split_heads(xp.broadcast_to(x, shape), k.shape[1])
            for x in (mask, bias)
        )
        places = (options[name] for name in PLACES)
        limits = check_limits(*places, *shape[2:])
        softcap = check_softcap(options["softcap"])
        check_block_mask(block_mask, shape)
        if block_mask is None:
            return cls(*limits, softcap, mask, bias)
        blocks = block_mask.beside(q)
        kept = split_heads(xp.broadcast_to(blocks, (*shape[:2], *blocks.shape[2:])), k.shape[1])
        return cls(*limits, softcap, mask, bias, kept, block_mask.blocks)

    def bias_at(self, at: tuple[slice, ...], rows: Any, keys: slice) -> Array:
        """Return the bias of some scores, ``(..., rows, keys)``; `at` selects heads."""
        if self.bias is None:
            raise ValueError("there is no bias")
        return self.bias[at][..., rows, keys]

    def block_of(self, places: Any, axis: int) -> Any:
        """Return the block of the block mask that rows (axis 0) or keys (1) are in, 1-D or a slice.

        Not where there is no block mask.
        """
        xp = array_namespace(self.kept)
        places = xp.arange(places.start, places.stop) if isinstance(places, slice) else places
        return places // self.blocks[axis]

    def kept_at(self, at: tuple[slice, ...], rows: Any) -> Array:
        """Return which blocks of keys some rows attend to, ``(..., rows, kv_blocks)``."""
        if self.kept is None:
            raise ValueError("there is no block mask")
        return self.kept[at][..., self.block_of(rows, 0), :]

    def select(self, S: Array, at: tuple[slice, ...], rows: Any, keys: slice) -> Array:
        """Return S with -inf where a row does not attend to a key, whatever stands there.

        Parameters
        ----------
        S : (..., rows, keys) array
        at : tuple of slice
            Which batch entries, key heads and query heads of the group S belongs to.
        rows : 1-D integer array or slice
        keys : slice
        """
        xp = array_namespace(S)
        if self.kept is not None:
            keys_of = self.block_of(keys, 1)
            S = xp.where(self.kept_at(at, rows)[..., keys_of], S, S.dtype.type(NEG_INF))
        if self.first is not None or self.last is not None:
            row = xp.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            ahead = xp.arange(keys.start, keys.stop) - row[:, None]
            if self.last is not None:
                S = xp.where(ahead <= self.last, S, S.dtype.type(NEG_INF))
            if self.first is not None:
                S = xp.where(ahead >= self.first, S, S.dtype.type(NEG_INF))
        if self.mask is not None:
            S = xp.where(self.mask[at][..., rows, keys], S, S.dtype.type(NEG_INF))
        if self.bias is not None:
            S = xp.where(self.bias_at(at, rows, keys) != NEG_INF, S, S.dtype.type(NEG_INF))
        return S
