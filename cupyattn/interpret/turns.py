"""Decide which lanes run next without a schedule."""

from __future__ import annotations

from collections.abc import Mapping

#: Segments between two checks of the lanes that have waited longest.
LOOK = 256
#: Checks with the same longest-waiting lanes before all lanes take turns, for as many segments.
PATIENCE = 4


class Turns:
    """Prefers the earliest place, so that lanes which took different paths meet again.

    Lanes that spin for a lock are always earlier than its holder. Lanes that have waited for long
    therefore get turns, too.
    """

    def __init__(self) -> None:
        self._picked = 0
        self._oldest = -1
        self._looks = 0
        self._shared = 0  # segments for which all take turns

    def choose(self, groups: Mapping[int, object]) -> int:
        """Return the place of the next lanes; `groups` has the longest waiting ones first."""
        if self._shared:
            self._shared -= 1
            return _longest_waiting(groups)
        self._picked += 1
        if self._picked % LOOK == 0:
            oldest = _longest_waiting(groups)
            self._looks = self._looks + 1 if oldest == self._oldest else 0
            self._oldest = oldest
            if self._looks == PATIENCE:
                self._looks, self._shared = 0, LOOK
        return min(groups)


def _longest_waiting(groups: Mapping[int, object]) -> int:
    first: int = next(iter(groups))
    return first
