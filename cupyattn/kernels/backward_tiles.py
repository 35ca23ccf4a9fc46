"""Tile sizes of the backward kernels, chosen among tiles that do not spill and fit in 99 KB."""

from __future__ import annotations

from cupyattn.kernels.tiles import Tiles

#: Tiles by largest head_dim. The first pair is for ``backward_keys.cu``: keys of a block, query
#: rows of a step. The second is for ``backward_queries.cu``: query rows of a block, keys of a step.
#: No sweep chose them.
_TILES = {
    64: (Tiles(64, 128, 8, 2), Tiles(128, 32, 4, 2)),
    128: (Tiles(32, 64, 4, 2), Tiles(128, 16, 4, 2)),
    256: (Tiles(16, 64, 8, 2), Tiles(64, 16, 4, 2)),
}

#: Tiles of ``backward_bias.cu``, by largest head_dim; they divide the blocks of block masks.
_BIAS_TILES = {128: Tiles(64, 64, 4), 256: Tiles(64, 32, 4)}

#: Tiles of the Hopper kernels: of one kernel up to head_dim 128, of two past it.
HOPPER_TILES = {
    64: Tiles(128, 128, 12, 2),
    128: Tiles(64, 128, 12, 2),
    256: Tiles(64, 64, 12, 2),
}
#: The largest head_dim for which the Hopper form can add up dQ in memory.
SUMMED = 128
#: Tiles of ``backward_keys_pair.cu`` past that: the keys are of two blocks, half of them each.
PAIR_TILES = Tiles(64, 128, 12, 2)
#: Up to so many keys, blocks that add to dQ in turn are faster than atomic additions. The numbers
#: are of head_dim up to 64, up to 128, and of pairs past it. Up to 64, a causal mask doubles the
#: limit; past 64 only calls with such a mask take turns. Where heads share keys under it, blocks
#: wait at each head, and additions are faster.
#: Records: experiments/results/backward.json and backward_designs_lean.json.
IN_ORDER_KEYS, IN_ORDER_KEYS_PAST_64, IN_ORDER_KEYS_OF_PAIRS = 1024, 4095, 4096
#: Up to head_dim 64, persistent thread blocks take the blocks of keys of plain calls, if these step
#: over few rows. This many is the most, which a causal mask doubles. Their additions are faster
#: than turns from so many keys on. Fewer were not timed.
#: Records: experiments/results/backward_designs_persistent.json and ``_lengths``.
PERSISTENT_ROWS, LEAST_PERSISTENT_KEYS = 4096, 512

#: Tiles of the portable kernels for block masks: they divide blocks of 64 rows or keys.
_BLOCK_MASK_TILES = {
    64: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: (Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    256: (Tiles(16, 64, 8, 2), Tiles(64, 16, 4, 2)),
}


def backward_tiles(head_dim: int, block_mask: tuple[int, int] = (0, 0)) -> tuple[Tiles, Tiles]:
    """Return the tiles of the kernel that keeps keys and of the kernel that keeps query rows.

    Parameters
    ----------
    head_dim : int
    block_mask : (int, int)
        Rows and keys of a block of the call's block mask; (0, 0) without one.

    Examples
    --------
    >>> backward_tiles(72)[0].block_kv, backward_tiles(40)[0].block_kv
    (64, 128)
    """
    table = _TILES if block_mask == (0, 0) else _BLOCK_MASK_TILES
    return next(tiles for limit, tiles in table.items() if head_dim <= limit)


def bias_tiles(head_dim: int) -> Tiles:
    """Return the tiles of the kernel that makes the gradient of a bias.

    Examples
    --------
    >>> bias_tiles(160).block_kv
    32
    """
    return next(tiles for limit, tiles in _BIAS_TILES.items() if head_dim <= limit)


def hopper_backward_tiles(head_dim: int) -> Tiles:
    """Return the tiles of the Hopper form.

    Examples
    --------
    >>> hopper_backward_tiles(72).block_q
    64
    """
    return next(tiles for limit, tiles in HOPPER_TILES.items() if head_dim <= limit)
