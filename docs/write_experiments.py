"""Write the tables of experiments/README.md: which question each file answers, by its docstring.

    python -m docs.write_experiments
"""

from __future__ import annotations

import ast
from pathlib import Path

from experiments._harness import recording
from experiments._harness.recording import RESULTS, ROOT

PAGE = ROOT / "experiments" / "README.md"
#: Folders whose files answer a question each, and the folder of the code that they share.
FOLDERS = ("speed", "accuracy", "diffusion", "tuning")
SHARED = "_harness"


def first_sentence(path: Path) -> str:
    """Return the first paragraph of a module's docstring, for a cell of a table."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def table(folder: str) -> str:
    """Return the table of a folder: file, question and, if it keeps one, its record."""
    rows = []
    for path in sorted((ROOT / "experiments" / folder).glob("*.py")):
        if path.stem == "__init__":
            continue
        row = [f"`{path.name}`", first_sentence(path)]
        if folder != SHARED:
            record = RESULTS / f"{path.stem}.json"
            row.append(f"[record](results/{record.name})" if record.exists() else "")
        rows.append(row)
    header = ["file", "contents"] if folder == SHARED else ["file", "question", "kept"]
    return "\n".join(recording.markdown(header, rows))


def tables() -> dict[tuple[str, str], str]:
    """Return each table by the marks that it stands between."""
    found = {name: table(name) for name in (*FOLDERS, SHARED)}
    return {(f"<!-- {n}: begin -->", f"<!-- {n}: end -->"): text for n, text in found.items()}


if __name__ == "__main__":
    for (begin, end), text in tables().items():
        recording.replace_between(PAGE, begin, end, text)
