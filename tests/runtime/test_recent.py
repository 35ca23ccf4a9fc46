"""The calls that were made last are kept, the oldest make room, and threads may share them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from cupyattn.runtime.recent import Recent
from tests.support.ranks import in_threads


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_the_oldest_call_makes_room() -> None:
    recent = Recent(2)
    keys = [recent.find(("attention", number), ())[0] for number in range(3)]
    for number, key in enumerate(keys):
        recent.remember(key, number)
    assert [recent.find(("attention", number), ())[1] for number in range(3)] == [None, 1, 2]


@pytest.mark.usefixtures("hasty")
def test_threads_make_room_for_one_another() -> None:
    recent, failures = Recent(4), []

    def remember(thread: int) -> None:
        try:
            for number in range(4000):
                recent.remember((thread, number), number)
        except RuntimeError as error:
            failures.append(error)

    in_threads(remember, 6)
    assert not failures and len(recent) == 4
