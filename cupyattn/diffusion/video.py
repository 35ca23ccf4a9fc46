"""Block masks for the tokens of a video: blocks with strong attention, and near blocks.

Tokens come in blocks that are compact in space, 64 tokens of a frame for example, in the order of
`block_order`. A block of queries keeps the blocks of keys with most of its attention, estimated
from means of blocks. It also keeps the blocks of a window around it in time, height and width. The
first is the choice of NABLA (Kandinsky 5), the second that of sliding tile attention (STA).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operand
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.diffusion.products import product
from cupyattn.diffusion.ranking import sorted_rows
from cupyattn.errors import shown
from cupyattn.problem.block_mask import BLOCK_SIZES, BlockMask

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class VideoMask:
    """Makes the block mask of a call from its queries and keys.

    Parameters
    ----------
    grid : (int, int, int)
        Blocks of tokens in time, height and width, in that order along the length.
    window : (int, int, int)
        Blocks of the window in each direction, the block itself in its middle; even numbers reach
        as far as the odd ones after them. (0, 0, 0): no window.
    mass : float
        Attention that the kept blocks of a row hold together, 0 to 1, as far as the means of blocks
        say. 0: the window alone.
    block_size : {64, 128}
        Tokens of a block.

    Raises
    ------
    ValueError
        For numbers that mean nothing.

    Notes
    -----
    With ``mass > 0`` on CuPy arrays the mask is made on the device, anew for every call; what the
    kernels read of it waits for the device (`cupyattn.BlockMask`).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 2, 8 * 64, 16)).astype(np.float16)
    >>> VideoMask((2, 2, 2), (1, 3, 1), mass=0.0)(q, k).mask[0, 0, 0].astype(int)
    array([1, 0, 1, 0, 0, 0, 0, 0])
    >>> VideoMask((2, 2, 2), (1, 1, 1), mass=0.5)(q, k).mask.shape
    (1, 2, 8, 8)
    """

    grid: tuple[int, int, int]
    window: tuple[int, int, int] = (11, 3, 3)
    mass: float = 0.9
    block_size: int = 64

    def __post_init__(self) -> None:
        _check_triple("grid", self.grid, 1)
        _check_triple("window", self.window, 0)
        if not 0 <= self.mass <= 1:
            raise ValueError(f"mass must be 0 to 1, got {self.mass!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be 64 or 128, got {self.block_size!r}")
        if self.mass == 0 and 0 in self.window:
            raise ValueError("a mask of mass=0 needs a window of at least 1 in every direction")

    def __call__(self, q: Array, k: Array) -> BlockMask:
        """Make the mask of a call.

        Parameters
        ----------
        q : array, (batch, heads, len, head_dim)
        k : array, (batch, heads_kv, len, head_dim)

        Returns
        -------
        BlockMask
            One mask for each (batch, head) if ``mass > 0``, otherwise one for all.

        Raises
        ------
        ValueError
            If the lengths differ from the grid.
        """
        q, k = operand("q", q), operand("k", k)
        xp = array_namespace(q, k)
        tokens = math.prod(self.grid) * self.block_size
        if not q.shape[2] == k.shape[2] == tokens:
            raise ValueError(
                f"a grid of {self.grid} blocks of {self.block_size} tokens has {tokens}, "
                f"got q.shape={q.shape} k.shape={k.shape}"
            )
        window = _window_mask(self.grid, self.window, self.block_size)
        if self.mass == 0:
            return window
        strong = top_cdf(block_probabilities(q, k, self.block_size), self.mass)
        return BlockMask(xp.asarray(window.mask) | strong, self.block_size, self.block_size)


@functools.lru_cache(maxsize=16)
def _window_mask(
    grid: tuple[int, int, int], window: tuple[int, int, int], block_size: int
) -> BlockMask:
    """Return the same window for all heads: a `BlockMask` stores the arrays for kernels."""
    return BlockMask(window_3d(grid, window)[None, None], block_size, block_size)


def window_3d(grid: Sequence[int], window: Sequence[int]) -> Bools:
    """Return which blocks lie in a window around which.

    Parameters
    ----------
    grid : (int, int, int)
        Blocks in time, height and width.
    window : (int, int, int)
        Blocks of the window, which are at most ``window // 2`` away in every direction. 0 in one
        of them: none.

    Returns
    -------
    array, bool, (blocks, blocks)

    Examples
    --------
    >>> window_3d((1, 1, 4), (1, 1, 3)).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    """
    blocks = math.prod(grid)
    near = np.full((blocks, blocks), 0 not in window)
    places = np.unravel_index(np.arange(blocks), tuple(grid))
    for place, width in zip(places, window, strict=True):
        near &= np.abs(place[:, None] - place) <= width // 2
    return near


def block_probabilities(q: Array, k: Array, block_size: int) -> Array:
    """Return softmax of the scores between means of blocks, float32.

    Parameters
    ----------
    q : array, (batch, heads, len, head_dim)
        Length a multiple of `block_size`.
    k : array, (batch, heads_kv, len, head_dim)
    block_size : int
        Rows of a block, and keys of one.

    Returns
    -------
    array, float32, (batch, heads, q_blocks, kv_blocks)
    """
    q, k = operand("q", q), operand("k", k)
    xp = array_namespace(q, k)

    def means(x: Array) -> Array:
        batch, heads, length, head_dim = x.shape
        shape = batch, heads, length // block_size, block_size, head_dim
        x = x if x.dtype == np.float16 else x.astype(np.float32)
        return x.reshape(shape).mean(axis=3, dtype=np.float32)

    rows = means(q) * np.float32(q.shape[3] ** -0.5)
    keys = means(k).repeat(q.shape[1] // k.shape[1], axis=1)
    scores = product(rows, keys.swapaxes(2, 3))
    weights = xp.exp(scores - scores.max(axis=3, keepdims=True))
    share: Array = weights / weights.sum(axis=3, keepdims=True)
    return share


def top_cdf(probabilities: Array, mass: float) -> Array:
    """Keep the largest of every row, as few as reach a mass together, and equals of the least one.

    Parameters
    ----------
    probabilities : array, (..., n)
        Rows that sum to 1, taken to float32.
    mass : float
        Above 0, at most 1.

    Returns
    -------
    array, bool, (..., n)

    Examples
    --------
    >>> top_cdf(np.array([0.1, 0.6, 0.3]), 0.7)
    array([False,  True,  True])
    """
    probabilities = operand("probabilities", probabilities)
    xp = array_namespace(probabilities)
    values = probabilities.astype(np.float32)
    ranked = sorted_rows(values)[..., ::-1]
    reached = ranked.cumsum(axis=-1) - ranked >= mass
    least = xp.where(reached, np.float32(np.inf), ranked).min(axis=-1, keepdims=True)
    kept: Array = values >= least
    return kept


def block_order(
    frames: int, height: int, width: int, patch: tuple[int, int, int] = (1, 8, 8)
) -> npt.NDArray[np.int64]:
    """Return the order of tokens in which every block is a patch of the video.

    Parameters
    ----------
    frames, height, width : int
        Tokens of the video, multiples of the patch.
    patch : (int, int, int)
        Tokens of a block in time, height and width, ``block_size`` together.

    Returns
    -------
    array, int64, (frames * height * width,)
        ``x[:, :, order]`` puts tokens, which lie by frame, row and column, in order of blocks;
        ``np.argsort(order)`` is the way back.

    Raises
    ------
    ValueError
        If patches do not divide the video.

    Examples
    --------
    >>> block_order(1, 2, 4, (1, 2, 2))
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    sizes = frames, height, width
    _check_triple("patch", patch, 1)
    _check_triple("(frames, height, width)", sizes, 1)
    if any(n % p for n, p in zip(sizes, patch, strict=True)):
        raise ValueError(f"patches of {patch} tokens do not divide a video of {sizes}")
    index = np.arange(math.prod(sizes))
    t, h, w = (n // p for n, p in zip(sizes, patch, strict=True))
    blocks = index.reshape(t, patch[0], h, patch[1], w, patch[2]).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(blocks).reshape(-1)


def _check_triple(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, (tuple, list)) and len(value) == 3
    if not (whole and all(isinstance(n, (int, np.integer)) and n >= least for n in value)):
        raise ValueError(f"{name} must be three whole numbers from {least} up, got {shown(value)}")
