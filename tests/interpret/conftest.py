"""Fixtures for tests of single instructions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """Instructions are meant to run so: overflow and NaN are results."""
    with np.errstate(all="ignore"):
        yield
