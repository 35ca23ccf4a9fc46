"""Numbers and tables as text for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns, two spaces apart; the first row is the header.

    Examples
    --------
    >>> print(align([("a", "b"), ("long", "x")]))
    a     b
    long  x
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def printable(text: str) -> str:
    """Return text in which unprintable characters are replaced by Python's escapes.

    Names from files may hold control characters: a terminal would obey them, and some of Unicode's
    turn the text around.

    Examples
    --------
    >>> print(printable("a\\x1b[31m\\u202eb c\\n"))
    a\\x1b[31m\\u202eb c\\n
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )  # fmt: skip


def counted(count: int, one: str) -> str:
    """Return how many of something there are.

    Examples
    --------
    >>> counted(1, "record"), counted(0, "record"), counted(5200, "cell")
    ('1 record', '0 records', '5,200 cells')
    """
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def format_ratio(ratio: float) -> str:
    """Return a share of a bound as text, with a mark if it exceeds 1."""
    return f"{ratio:.3f}" if ratio <= 1 else f"{ratio:.3g} > 1"


def format_share(share: float) -> str:
    """Return a share as a percentage with two digits.

    Examples
    --------
    >>> format_share(0.256), format_share(0.0071)
    ('26 %', '0.71 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def format_rate(rate: float) -> str:
    """Return a rate with three digits, whole and with a comma from a thousand on.

    Examples
    --------
    >>> format_rate(8.614), format_rate(999.7), format_rate(1012.3)
    ('8.61', '1,000', '1,012')
    """
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and its unit.

    Examples
    --------
    >>> format_seconds(1.234e-4), format_seconds(0.5)
    ('123 us', '500 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(count: int) -> str:
    """Return a size with its binary unit.

    Examples
    --------
    >>> format_bytes(512), format_bytes(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, ["KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"
