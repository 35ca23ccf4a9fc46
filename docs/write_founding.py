"""Write the tables of docs/FOUNDING_NOTES.md.

    python -m docs.write_founding
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from docs import founding_names
from docs.founding_claims import PROMISES
from docs.founding_names import ENDS, NO_CODE, SUCCESSOR, TYPED, Row
from docs.performance_claims import CLAIMS, REFUTED
from docs.write_performance import records
from experiments._harness import recording

PAGE = Path(__file__).with_name("FOUNDING_NOTES.md")
#: The code of the notes as it stands there.
BLOCKS = Path(__file__).parents[1] / "tests" / "docs" / "founding_blocks.md"


def names(rows: Iterable[Row]) -> str:
    """Return the table of some names."""
    header = ["in the notes", "verdict", "here", "remark"]
    return "\n".join(recording.markdown(header, [list(row) for row in rows]))


def snippets() -> str:
    """Return the table of the notes' Python code: what of it runs, and what ends with a line."""
    text = BLOCKS.read_text(encoding="utf-8")
    titles = re.findall(r"^## ([^\n]*)\n\n```python$", text, re.MULTILINE)
    rows = []
    for title in titles:
        if title not in NO_CODE:
            instead = ENDS[title][1] if title in ENDS else ""
            rows.append([title, SUCCESSOR if instead else TYPED, instead])
    return "\n".join(recording.markdown(["code on", "verdict", "give instead"], rows))


def figures() -> str:
    """Return the table of the notes' figures, each with the record and its revision."""
    rows = []
    for claim in CLAIMS:
        found = records(claim.needs)
        if found is None:
            continue
        links = [
            f"[{name}](../experiments/results/{name}.json) at "
            f"{(record['environment'].get('revision') or 'unknown')[:10]}"
            for name, record in zip(claim.needs, found, strict=True)
        ]
        record = ", ".join(links) or claim.source or "none"
        verdict = f"{claim.verdict} by" if claim.verdict == REFUTED else claim.verdict
        rows.append([claim.part, claim.says, verdict, record])
    return "\n".join(recording.markdown(["of the notes", "they say", "verdict", "record"], rows))


def promises() -> str:
    """Return the table of promises that are no figures."""
    header = ["of the notes", "they say", "verdict", "here"]
    return "\n".join(recording.markdown(header, [list(one) for one in PROMISES]))


def tables() -> dict[tuple[str, str], str]:
    """Return each table by the marks that it stands between."""
    found = {
        "modules": names(founding_names.MODULES),
        "names": names(founding_names.NAMES),
        "commands": names(founding_names.COMMANDS),
        "snippets": snippets(),
        "figures": figures(),
        "promises": promises(),
    }
    return {(f"<!-- {n}: begin -->", f"<!-- {n}: end -->"): table for n, table in found.items()}


if __name__ == "__main__":
    for (begin, end), table in tables().items():
        recording.replace_between(PAGE, begin, end, table)
