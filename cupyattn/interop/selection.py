"""Select modules of a model by regular expressions that match their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cupyattn.errors import shown
from cupyattn.measure.words import printable

#: One or more regular expressions, of which one must match a name; None if not given.
Patterns: TypeAlias = "str | Sequence[str] | None"


def compiled(name: str, patterns: Patterns) -> tuple[re.Pattern[str], ...]:
    """Compile the caller's regular expressions.

    Parameters
    ----------
    name : str
        The caller's name of the argument, for the message.
    patterns : str or sequence of str, optional

    Raises
    ------
    TypeError
        For anything but text or a sequence of texts.
    ValueError
        For text that is not a regular expression.
    """
    given = (patterns,) if isinstance(patterns, str) else () if patterns is None else patterns
    if not isinstance(given, Iterable) or not all(isinstance(p, str | re.Pattern) for p in given):
        raise TypeError(
            f"{name} must be a regular expression or several, as str, got {shown(patterns)}"
        )
    try:
        return tuple(re.compile(pattern) for pattern in given)
    except re.error as error:
        raise ValueError(
            f"{name} must be a regular expression or several, got {patterns!r:.60}: {error}"
        ) from error


@dataclass(frozen=True)
class Selection:
    """Names that match one of `include` (any name, if there is none) and none of `exclude`.

    Examples
    --------
    >>> chosen = Selection.of("attn", ["attn2", "[.]0[.]"])
    >>> [name for name in ("a.0.attn", "a.1.attn1", "a.1.attn2", "a.1.ff") if name in chosen]
    ['a.1.attn1']
    """

    include: tuple[re.Pattern[str], ...] | None
    exclude: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, include: Patterns, exclude: Patterns) -> Selection:
        """Return the selection for the caller's `include` and `exclude`."""
        wanted = None if include is None else compiled("include", include)
        return cls(wanted, compiled("exclude", exclude))

    def __contains__(self, name: str) -> bool:
        wanted = self.include is None or any(p.search(name) for p in self.include)
        return wanted and not any(p.search(name) for p in self.exclude)

    def check(self, names: Collection[str], kind: str) -> None:
        """Raise if a pattern matches no name; arguments as for `check_found`."""
        check_found("include", self.include or (), names, kind)
        check_found("exclude", self.exclude, names, kind)


def check_found(
    name: str, patterns: Iterable[re.Pattern[str]], names: Collection[str], kind: str
) -> None:
    """Raise if a pattern matches no name, for example because it is misspelt.

    Parameters
    ----------
    name : str
        The argument that has the patterns, for the message.
    patterns : iterable of Pattern
    names : collection of str
        All names.
    kind : str
        Kind of the named objects, for the message.

    Raises
    ------
    ValueError
    """
    for pattern in patterns:
        if not any(map(pattern.search, names)):
            raise ValueError(
                f"{pattern.pattern!r} of {name} is found in the name of no {kind}, there are "
                f"{first_names(names)}: correct it, or leave it out"
            )


def first_names(names: Collection[str]) -> str:
    """Return the first names, for a message.

    Examples
    --------
    >>> first_names(["a", "b", "c", "d"]), first_names([])
    ('a, b, c, ...', 'none')
    """
    return (", ".join(map(printable, [*names][:3])) or "none") + (", ..." if len(names) > 3 else "")
