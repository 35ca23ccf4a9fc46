"""Shared code of the parts of docs/PERFORMANCE.md: rows of records, and numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def rows_of(found: Record) -> dict[str, Record]:
    """Return the rows of one problem by name."""
    return {row["variant"]: row for row in found["rows"]}


def rate(row: Record | None) -> str:
    """Return TFLOP/s of a row; a dash where it has none."""
    return f"{row['tflops']:,.0f}" if row and "tflops" in row else "-"


def interval(value: Sequence[float]) -> str:
    """Return a ratio with its interval.

    Examples
    --------
    >>> interval([1.5, 1.25, 1.75])
    '1.50 [1.25, 1.75]'
    """
    return "{:.2f} [{:.2f}, {:.2f}]".format(*value)


def range_of(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the least and the most of some numbers.

    Examples
    --------
    >>> range_of([1.5, 1.0]), range_of([2.0])
    ('1.00 to 1.50', '2.00')
    """
    least, most = (form.format(x) for x in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
