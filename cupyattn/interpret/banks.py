"""Count the passes of shared memory for one access of a warp.

Shared memory has 32 banks, and word i (of 4 bytes) is in bank ``i % 32``. In one pass each bank
serves one word to all lanes that access it. Lanes of a warp are served together up to 128 bytes.
These are 32 lanes with up to 4 bytes each, half a warp with 8 bytes, or a quarter with 16. The
source is the CUDA C++ Programming Guide, shared memory from compute capability 5.0 on. If lanes
access k words of one bank together, there is a conflict, which takes k passes. A row of an
``ldmatrix`` tile is an access of 16 bytes by the lane that names it.
"""

from __future__ import annotations

import numpy as np

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.ordering import WARP, Ints

BANKS, WORD_BYTES = 32, 4


def passes(address: Ints, width: int, lanes: Ints) -> tuple[int, int]:
    """Return the passes that an access takes, and the fewest that one of its width can take.

    Parameters
    ----------
    address : numpy.ndarray of int
        Byte address of each lane's access.
    width : int
        Bytes of each: 1, 2, 4, 8 or 16.
    lanes : numpy.ndarray of int
        Numbers of the lanes; every 32 are a warp.

    Returns
    -------
    passes, fewest : int
        Summed over warps.

    Examples
    --------
    >>> lanes = np.arange(32)
    >>> [passes(4 * stride * lanes, 4, lanes)[0] for stride in (0, 1, 2, 32, 33)]
    [1, 1, 2, 32, 1]
    >>> passes(16 * lanes, 16, lanes)
    (4, 4)
    """
    together = min(WARP, WARP * WORD_BYTES // max(width, WORD_BYTES))
    words = address[:, None] // WORD_BYTES + np.arange(max(width // WORD_BYTES, 1))
    # Lanes that read the same word are served together: one entry for each group of lanes and word.
    wanted = distinct((lanes[:, None] // together << 32) + words)
    groups, group = np.unique(wanted >> 32, return_inverse=True)
    load = np.bincount(group * BANKS + wanted % BANKS, minlength=len(groups) * BANKS)
    return int(load.reshape(-1, BANKS).max(axis=1).sum()), len(groups)
