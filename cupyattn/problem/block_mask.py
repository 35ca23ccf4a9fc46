"""`BlockMask`: which blocks of keys a block of query rows attends to, so that cost follows them."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.errors import shown
from cupyattn.kernels.limits import check_length
from cupyattn.problem.checks import check_limits

#: Sizes of the blocks: multiples of the tiles that the kernels take for a block mask
#: (`cupyattn.kernels.ladder.Variant.tiles_for`).
BLOCK_SIZES = (64, 128)


class Blocks(NamedTuple):
    """Description of a block mask without its values: size and number of its blocks.

    Parameters
    ----------
    blocks : (int, int)
        Rows and keys of a block.
    shape : (batch or 1, heads or 1, q_blocks, kv_blocks)
    """

    blocks: tuple[int, int]
    shape: tuple[int, ...]

    def check_lengths(self, len_q: int, len_kv: int) -> None:
        """Raise ValueError unless the number of blocks fits these lengths."""
        rows, keys = self.blocks
        wanted = -(-len_q // rows), -(-len_kv // keys)
        if self.shape[2:] != wanted:
            raise ValueError(
                f"a block mask of blocks {rows} x {keys} for len_q={len_q} and len_kv={len_kv} "
                f"must have {wanted[0]} x {wanted[1]} blocks, got mask.shape={self.shape}"
            )

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless it fits scores of a shape (batch, heads, len_q, len_kv)."""
        self.check_lengths(*shape[2:])
        if any(n not in (1, want) for n, want in zip(self.shape, shape[:2], strict=False)):
            raise ValueError(
                "a block mask must have batch or 1 and heads or 1 in front, for "
                f"(batch, heads) = {tuple(shape[:2])} got mask.shape={self.shape}"
            )


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask of whole blocks of scores. Kernels neither load nor multiply the keys it drops.

    Parameters
    ----------
    mask : array, bool, (batch or 1, heads or 1, q_blocks, kv_blocks)
        NumPy, CuPy, or anything with DLPack; copied. True: query rows
        ``[i * block_q, (i + 1) * block_q)`` attend to keys
        ``[j * block_kv, (j + 1) * block_kv)``, the last blocks as far as the lengths reach.
    block_q, block_kv : {64, 128}
        Rows and keys of a block.

    Raises
    ------
    TypeError
        If `mask` is no boolean array.
    ValueError
        If it has not four axes, or a block another size.

    Notes
    -----
    A NumPy mask goes with NumPy and CuPy operands, a CuPy mask with CuPy operands. Kernels read a
    list made from it: for each block of rows, the number of kept blocks of keys and their indices.
    The first call on a device makes this list, waits for it, and stores it for later calls.

    Examples
    --------
    >>> mask = BlockMask(np.tri(4, dtype=bool)[None, None], 64, 64)
    >>> mask.density
    0.625
    >>> mask.to_dense(200, 256).shape
    (1, 1, 200, 256)
    """

    mask: Array
    block_q: int
    block_kv: int
    _kept: dict[Any, Array] = field(default_factory=dict, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        given, _ = take("mask", self.mask)
        if given.dtype != np.bool_:
            raise TypeError(f"a block mask must be bool, got mask.dtype={given.dtype}")
        if given.ndim != 4:
            raise ValueError(
                "a block mask must have four axes (batch or 1, heads or 1, q_blocks, kv_blocks), "
                f"got mask.shape={given.shape}"
            )
        _check_sizes(self.block_q, self.block_kv)
        xp = array_namespace(given)
        mask = xp.array(given, order="C", copy=True)
        if xp is np:
            mask.flags.writeable = False
        object.__setattr__(self, "mask", mask)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle only the blocks; the lists that kernels read are made again."""
        return BlockMask, (self.mask, self.block_q, self.block_kv)

    @classmethod
    def from_dense(cls, mask: Array, block_q: int = 64, block_kv: int = 64) -> BlockMask:
        """Keep the blocks in which any element of a mask of scores is True.

        Parameters
        ----------
        mask : array, bool, (..., len_q, len_kv)
            Two to four axes; the axes before the lengths are batch or 1 and heads or 1. To mask
            single scores as well, give this mask to the call as `mask`, too.
        block_q, block_kv : {64, 128}

        Examples
        --------
        >>> BlockMask.from_dense(np.eye(200, dtype=bool)).mask[0, 0].sum()
        np.int64(4)
        """
        mask, _ = take("mask", mask)
        xp = array_namespace(mask)
        if mask.dtype != np.bool_:
            raise TypeError(f"mask must be bool (True: attend), got mask.dtype={mask.dtype}")
        if not 2 <= mask.ndim <= 4:
            raise ValueError(f"mask must have two to four axes, got mask.shape={mask.shape}")
        _check_sizes(block_q, block_kv)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        *outer, len_q, len_kv = mask.shape
        q_blocks, kv_blocks = -(-len_q // block_q), -(-len_kv // block_kv)
        padded = xp.zeros((*outer, q_blocks * block_q, kv_blocks * block_kv), bool)
        padded[..., :len_q, :len_kv] = mask
        blocks = padded.reshape(*outer, q_blocks, block_q, kv_blocks, block_kv)
        return cls(blocks.any(axis=(3, 5)), block_q, block_kv)

    @classmethod
    def from_window(
        cls,
        len_q: int,
        len_kv: int,
        window: tuple[int, int],
        *,
        causal: bool = False,
        causal_align: str = "bottom-right",
        block_q: int = 64,
        block_kv: int = 64,
    ) -> BlockMask:
        """Keep the blocks that a window reaches; a NumPy mask.

        Parameters
        ----------
        len_q, len_kv : int
        window, causal, causal_align
            As for `cupyattn.attention`. To attend to no more than the window, give it to the call
            as well.
        block_q, block_kv : {64, 128}

        Raises
        ------
        TypeError, ValueError
            For invalid lengths, windows or blocks.

        Examples
        --------
        >>> BlockMask.from_window(256, 256, (64, 0)).mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        """
        len_q, len_kv = check_length("len_q", len_q), check_length("len_kv", len_kv)
        _check_sizes(block_q, block_kv)
        first, last = check_limits(causal, causal_align, window, len_q, len_kv)
        q0 = np.arange(0, len_q, block_q)[:, None]
        kv0 = np.arange(0, len_kv, block_kv)
        # The differences key - row of a block are all numbers from least to most.
        least = kv0 - (np.minimum(q0 + block_q, len_q) - 1)
        most = np.minimum(kv0 + block_kv, len_kv) - 1 - q0
        mask = np.ones(least.shape, bool)
        if first is not None:
            mask &= most >= first
        if last is not None:
            mask &= least <= last
        return cls(mask[None, None], block_q, block_kv)

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and keys of a block."""
        return self.block_q, self.block_kv

    @functools.cached_property
    def transposed(self) -> BlockMask:
        """The same with rows and keys exchanged."""
        return BlockMask(self.mask.swapaxes(2, 3), self.block_kv, self.block_q)

    @property
    def density(self) -> float:
        """Share of the blocks that are kept; 1 if there are no blocks (waits for the device)."""
        return float(self.mask.mean()) if self.mask.size else 1.0

    def to_dense(self, len_q: int, len_kv: int) -> Array:
        """Return it as a mask of scores, (batch or 1, heads or 1, len_q, len_kv)."""
        self.form.check_lengths(len_q, len_kv)
        rows = self.mask.repeat(self.block_q, axis=2)[:, :, :len_q]
        return rows.repeat(self.block_kv, axis=3)[..., :len_kv]

    def corner(self, entry: int, len_q: int, len_kv: int) -> BlockMask:
        """Return the blocks at the top left, for one batch entry of smaller lengths.

        Examples
        --------
        >>> BlockMask.from_window(256, 256, (64, 0)).corner(0, 100, 200).mask[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0]])
        """
        at = slice(entry, entry + 1) if self.mask.shape[0] > 1 else slice(None)
        q_blocks, kv_blocks = -(-len_q // self.block_q), -(-len_kv // self.block_kv)
        return BlockMask(self.mask[at, :, :q_blocks, :kv_blocks], self.block_q, self.block_kv)

    @property
    def form(self) -> Blocks:
        """Its description without values."""
        return Blocks(self.blocks, tuple(self.mask.shape))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless it fits scores of a shape (batch, heads, len_q, len_kv)."""
        self.form.check(shape)

    @classmethod
    def of_kept(cls, kept: np.ndarray, blocks: tuple[int, int]) -> BlockMask:
        """Return the mask of blocks from the lists of `kept_blocks`.

        Examples
        --------
        >>> mask = BlockMask(np.tri(3, dtype=bool)[None, None], 64, 64)
        >>> same = BlockMask.of_kept(mask.kept_blocks(np.zeros(1)), (64, 64))
        >>> bool((same.mask == mask.mask).all())
        True
        """
        counts, numbers = kept[..., :1], kept[..., 1:]
        mask = np.zeros(numbers.shape, np.bool_)
        place = np.arange(numbers.shape[3])
        np.put_along_axis(mask, numbers % max(numbers.shape[3], 1), place < counts, axis=3)
        return cls(mask, *blocks)

    def beside(self, array: Array) -> Array:
        """Return the mask in the namespace of an operand, on its device.

        Raises
        ------
        TypeError
            If the mask is CuPy's and the operand NumPy's.
        """
        xp = array_namespace(array)
        if array_namespace(self.mask) is np:
            return xp.asarray(self.mask)
        if xp is np:
            raise TypeError(
                "a block mask of a CuPy array goes with CuPy operands, got NumPy's: make it of "
                "mask.get(), a NumPy array, which goes with both"
            )
        return self.mask

    def kept_blocks(self, array: Array) -> Array:
        """Return the lists that kernels read, on the device of an operand.

        Parameters
        ----------
        array : array or Described
            An operand of the call, NumPy or CuPy; described, so are the lists.

        Returns
        -------
        array, int32, (batch or 1, heads or 1, q_blocks, 1 + kv_blocks)
            For each block of rows the number n of kept blocks of keys, and their n indices in
            rising order. Later elements are undefined.
        """
        if isinstance(array, Described):
            *shape, blocks = self.mask.shape
            lists = (*shape, 1 + blocks)
            return Described.contiguous("kept_blocks", lists, np.int32, array.device)
        on_host = isinstance(array, np.ndarray)
        place = "host" if on_host else int(array.device.id)
        with self._lock:
            if place not in self._kept:
                with contextlib.nullcontext() if on_host else array.device:
                    self._kept[place] = _lists(self.beside(array))
                    if not on_host:  # other streams may read them from now on
                        array.device.synchronize()
            return self._kept[place]


def _lists(mask: Array) -> Array:
    xp = array_namespace(mask)
    numbers = xp.arange(mask.shape[3], dtype=np.int32)
    dropped_last = xp.where(mask, numbers, numbers + np.int32(mask.shape[3]))
    counts = mask.sum(axis=3, keepdims=True, dtype=np.int32)
    return xp.concatenate([counts, xp.sort(dropped_last, axis=3)], axis=3)


def _check_sizes(block_q: Any, block_kv: Any) -> None:
    """Raise ValueError unless blocks have sizes that the kernels take."""
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if not isinstance(size, (int, np.integer)) or size not in BLOCK_SIZES:
            raise ValueError(f"{name} must be 64 or 128, got {shown(size)}")
