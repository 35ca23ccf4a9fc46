"""Setup of every test on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def first_device() -> None:
    """The first device is the current one.

    JAX, which tests/gpu/test_interop_jax.py wakes where it is installed, makes its last one so.
    """
    import cupy

    cupy.cuda.Device(0).use()


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Let the device add equally precisely in every order."""
    torch = pytest.importorskip("torch")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
