"""Run the code cells of examples/ladder.ipynb in order, and store what they print.

The notebook is written by hand, in Jupyter or as text. Jupyter is not needed to run it here: cells
are plain Python, and print their results.

    python -m docs.write_notebook
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from cupyattn.files import replacing

NOTEBOOK = Path(__file__).parents[1] / "examples" / "ladder.ipynb"


def stored() -> dict[str, Any]:
    """Return the notebook."""
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    return notebook


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """Return what each code cell prints, if all run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
        texts.append(output.getvalue())
    return texts


def renewed(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook with what its cells print now."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(
        zip(code, printed(notebook["cells"]), strict=True), start=1
    ):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"] = [stream] if lines else []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    new = renewed(stored())
    with replacing(NOTEBOOK) as file:
        file.write(new.encode("utf-8"))
