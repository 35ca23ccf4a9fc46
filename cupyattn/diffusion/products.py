"""Matrix products of arrays of either library, accumulated in float32."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.kinds import Array


def product(a: Array, b: Array) -> Array:
    """Return a @ b, summed in float32.

    Parameters
    ----------
    a, b : array
        NumPy or CuPy, of one type.

    Returns
    -------
    array
        float16 where both are CuPy's float16, which tensor cores take; otherwise float32.
    """
    # NOTE: NumPy has no fast product of 16-bit numbers, and cuBLAS under CuPy none of bfloat16.
    if isinstance(a, np.ndarray) or a.dtype != np.float16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return a @ b
