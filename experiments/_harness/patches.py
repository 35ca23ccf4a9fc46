"""Patches of the kernels' sources: unified diffs whose lines must be there exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hunk:
    """Neighbouring lines of one file, before and after."""

    file: str
    old: str
    new: str


def hunks_of(diff: Iterable[str]) -> tuple[Hunk, ...]:
    """Return the hunks of a unified diff, given by its lines.

    Examples
    --------
    >>> hunks_of(["--- a/x\\n", "+++ b/x\\n", "@@ -1,2 +1,2 @@\\n", " a\\n", "-b\\n", "+c\\n"])
    (Hunk(file='x', old='a\\nb\\n', new='a\\nc\\n'),)
    """
    hunks: list[Hunk] = []
    file = ""
    for line in diff:
        if line.startswith("--- a/"):
            file = line[len("--- a/") :].strip()
        elif line.startswith("@@"):
            hunks.append(Hunk(file, "", ""))
        elif not line.startswith("+++ "):
            hunk, text = hunks[-1], line[1:]
            old = hunk.old + text * (line[0] in " -")
            new = hunk.new + text * (line[0] in " +")
            hunks[-1] = Hunk(file, old, new)
    return tuple(hunks)


def apply(name: str, hunks: Iterable[Hunk], folder: Path) -> None:
    """Change the files of a copy of the kernels.

    Raises
    ------
    LookupError
        If the lines to change are not there exactly once: the sources have moved on.
    """
    for hunk in hunks:
        path = folder / hunk.file
        text = path.read_text(encoding="utf-8")
        if text.count(hunk.old) != 1:
            raise LookupError(
                f"{name}.patch no longer applies to {hunk.file}: "
                f"its lines were found {text.count(hunk.old)} times"
            )
        path.write_text(text.replace(hunk.old, hunk.new), encoding="utf-8")
