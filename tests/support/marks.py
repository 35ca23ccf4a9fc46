"""Cases of parametrised tests, some of them slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(cases: Iterable[Any]) -> list[Any]:
    """Return the cases, each marked as slow."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_unless(quick: Callable[[int, Any], object], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, slow all but those for which `quick`, of number and case, is true."""
    mark = pytest.mark.slow
    return [x if quick(n, x) else pytest.param(x, marks=mark) for n, x in enumerate(cases)]


def slow_rows(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of a test of several parameters, each marked as slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
