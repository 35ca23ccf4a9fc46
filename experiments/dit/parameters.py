"""Parameters of a network by name, in one vector, which optimisers, checkpoints and casts see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Array = Any


class Parameters(Mapping[str, Array]):
    """Arrays by name, views of one vector.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        In the order in which they lie in the vector.
    flat : array, (count,)
        The vector; NumPy or CuPy.

    Raises
    ------
    ValueError
        If the vector is not as long as all of them together.

    Examples
    --------
    >>> import numpy as np
    >>> found = Parameters({"weight": (2, 3), "bias": (3,)}, np.arange(9.0))
    >>> found["bias"][...] = 1
    >>> found["weight"].shape, found.flat[5:].tolist()
    ((2, 3), [5.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], flat: Array) -> None:
        count = sum(map(math.prod, shapes.values()))
        if flat.shape != (count,):
            raise ValueError(f"parameters of {count} numbers were given {flat.shape}")
        self.shapes, self.flat = dict(shapes), flat
        self._views, end = {}, 0
        for name, shape in self.shapes.items():
            begin, end = end, end + math.prod(shape)
            self._views[name] = flat[begin:end].reshape(shape)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def like(self, flat: Array) -> Parameters:
        """Return parameters of the same names in another vector."""
        return Parameters(self.shapes, flat)
