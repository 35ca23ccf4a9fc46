"""What every test on a device begins with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def first_device() -> None:
    """The first device is the current one.

    JAX, which tests/gpu/test_interop_jax.py wakes where it is installed, makes its last one so.
    """
    import cupy

    cupy.cuda.Device(0).use()
