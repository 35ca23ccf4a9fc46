"""The calls of attention that were made last, ready to run again: found by their keys."""

from __future__ import annotations

from typing import Any

#: Calls that are kept ready to be found by what they depend on.
MAX_RECENT = 512
_recent: dict[Any, Any] = {}


def recall(key: Any) -> Any:
    """Return the `cupyattn.ops.prepared.Prepared` that was remembered under a key, or None."""
    return _recent.get(key)


def remember(key: Any, prepared: Any) -> None:
    """Keep a prepared call ready for `recall`; the oldest make room."""
    while len(_recent) >= MAX_RECENT:
        _recent.pop(next(iter(_recent)), None)
    _recent[key] = prepared
