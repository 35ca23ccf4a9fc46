"""Write the tables of docs/FOUNDING_NOTES.md.

    python -m docs.write_founding
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from docs import founding_names
from docs.founding_names import Row
from experiments._harness import recording

PAGE = Path(__file__).with_name("FOUNDING_NOTES.md")


def names(rows: Iterable[Row]) -> str:
    """Return the table of some names."""
    header = ["in the notes", "verdict", "here", "remark"]
    return "\n".join(recording.markdown(header, [list(row) for row in rows]))


def tables() -> dict[tuple[str, str], str]:
    """Return each table by the marks that it stands between."""
    found = {
        "modules": names(founding_names.MODULES),
        "names": names(founding_names.NAMES),
        "commands": names(founding_names.COMMANDS),
    }
    return {(f"<!-- {n}: begin -->", f"<!-- {n}: end -->"): table for n, table in found.items()}


if __name__ == "__main__":
    for (begin, end), table in tables().items():
        recording.replace_between(PAGE, begin, end, table)
