"""Random lanes of tests of one instruction. Hypothesis draws one number at a time, which takes
longer than the test itself."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import settings

#: Number of lanes, as Hypothesis would draw: a dozen in each example.
LANES = 12 * settings.default.max_examples


def generator(name: str) -> np.random.Generator:
    """Return the same random numbers for the same name."""
    return np.random.default_rng(zlib.crc32(name.encode()))
