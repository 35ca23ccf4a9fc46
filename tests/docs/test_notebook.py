"""examples/ladder.ipynb runs without Jupyter, prints what it stores, and its answers are right."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from cupyattn.kernels.ladder import VARIANTS
from docs import style, write_notebook

CELLS = write_notebook.stored()["cells"]


def texts(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def test_it_prints_what_it_stores() -> None:
    now = write_notebook.renewed(write_notebook.stored())
    stored = write_notebook.NOTEBOOK.read_text("utf-8")
    assert now == stored, "run python -m docs.write_notebook"


def test_a_blank_is_not_yet_right_and_each_answer_is() -> None:
    printed = "".join(
        "".join(output["text"]) for cell in CELLS for output in cell.get("outputs", [])
    )
    found = re.findall(r"^Exercise (\d): (.*)$", printed, re.MULTILINE)
    assert found == [(str(n), said) for n in range(1, 7) for said in ("not yet", "right")]
    assert sum("# yours" in text for text in texts("code")) == 6
    assert sum(text.startswith("**Answer.**") for text in texts("markdown")) == 6


def test_it_climbs_all_rungs_and_a_wrong_cell_is_named() -> None:
    titles = re.findall(r"^## \d\. `(\w+)`", "\n".join(texts("markdown")), re.MULTILINE)
    assert titles == list(VARIANTS)
    broken = [{"cell_type": "markdown", "source": []}, {"cell_type": "code", "source": ["1 / 0"]}]
    with pytest.raises(ZeroDivisionError) as caught:
        write_notebook.printed(broken)
    assert str(caught.traceback[-1].path).endswith("ladder.ipynb, cell 1")


def test_its_prose_keeps_to_the_style(tmp_path: Path) -> None:
    page = tmp_path / "notebook.md"
    page.write_text("\n\n".join(texts("markdown")), "utf-8")
    assert style.counts(page) == {}


def test_it_has_the_format_of_a_notebook() -> None:
    notebook = write_notebook.stored()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in CELLS]
    assert len(set(names)) == len(names)
    for cell in CELLS:
        needed = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            needed |= {"execution_count", "outputs"}
        assert cell.keys() == needed
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(notebook)
