"""What tests with torch begin with, if they ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workers share the cores; threads of torch's would wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeded() -> None:
    """Parameters of new modules are the same in every run."""
    pytest.importorskip("torch").manual_seed(0)
