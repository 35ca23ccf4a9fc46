"""Fixtures that several modules of these tests ask for by `pytestmark`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch have one thread: workers share the cores, and threads would wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeded() -> None:
    """Parameters of new modules are the same in every run."""
    pytest.importorskip("torch").manual_seed(0)
