"""The lanes that execute an instruction together."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.ordering import WARP, Bools, Ints

Values = npt.NDArray[Any]


class Lanes:
    """Some lanes of the batch, for which an instruction is executed.

    Parameters
    ----------
    mask : numpy.ndarray of bool
        For every lane of the batch.
    alive : numpy.ndarray of bool
        Lanes that have not exited.
    """

    def __init__(self, mask: Bools, alive: Bools) -> None:
        self.mask = mask
        self._alive = alive

    @cached_property
    def index(self) -> Ints:
        """The numbers of the lanes, rising."""
        return np.flatnonzero(self.mask)

    @cached_property
    def full(self) -> bool:
        """Whether no living lane is missing."""
        return bool((self.mask >= self._alive).all())

    @cached_property
    def warps(self) -> Ints:
        """Warps (numbered through the batch) of which at least one lane is here."""
        return np.flatnonzero(self.mask.reshape(-1, WARP).any(axis=1))

    @cached_property
    def bits(self) -> npt.NDArray[np.uint32]:
        """For every warp of the batch, its lanes here as the bits of a mask."""
        packed = np.packbits(self.mask.reshape(-1, WARP), axis=1, bitorder="little")
        return packed.view(np.uint32).ravel()

    def __bool__(self) -> bool:
        return bool(self.mask.any())

    def where(self, condition: Values) -> Lanes:
        """Return the lanes for which a condition holds."""
        return Lanes(self.mask & condition, self._alive)
