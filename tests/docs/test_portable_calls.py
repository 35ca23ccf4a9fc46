"""Calls that leave the Hopper forms: each row of the table does, and no reason is missing."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from cupyattn.problem import support
from experiments._harness.portable_calls import CALLS, PortableCall, outcome, section

PAGE = (Path(__file__).parents[2] / "docs" / "FEATURES.md").read_text()
#: Beginnings of reasons that no call of the library ends with on Hopper.
ELSEWHERE = {
    " needs arch=": "no device of that kind, or operands that no one has",
    " takes head_dim up to ": "all rungs take 256, but for FP8, which says it in its own words",
    "takes no tiles of the caller's": "of the split form, which is portable and made for few rows",
    "takes no ": "options: the Hopper forms of a rung take all between them",
    "takes 1 to ": "of the split form",
    "copies a bias whose": "which is copied into rows that it can move",
    "reads scales of V 16": "of codes that a caller made by hand and put at an odd address",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.variant}: {call.condition}")
def test_a_row_of_the_table_ends_in_a_portable_form(call: PortableCall) -> None:
    form, note = outcome(call)
    assert "sm90" not in form and note.startswith("portable form: ")


def test_the_page_has_the_table() -> None:
    assert "\n".join(section()) in PAGE


def test_every_reason_of_the_code_has_a_row() -> None:
    """A condition that is added to the choice of forms is added to the table, too."""
    notes = [outcome(call)[1] for call in CALLS]
    missing = {
        text
        for text in reasons_of_the_code()
        if not any(text in note for note in notes) and not text.startswith(tuple(ELSEWHERE))
    }
    assert not missing


def reasons_of_the_code() -> set[str]:
    """Return the longest piece of each text that says why a form does not take a call."""
    found = set()
    for function in ("_of_codes", "_of_values", "_of_options", "_of_scores", "_of_sizes", "takes",
                     "reach"):  # fmt: skip
        tree = ast.parse(inspect.getsource(getattr(support, function)))
        tree.body[0].body = tree.body[0].body[1:]  # type: ignore[attr-defined]  # no docstring
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [x.value for x in node.values if isinstance(x, ast.Constant)]
                pieces = [str(part) for part in parts if len(str(part)) > 8]
                found |= set(pieces[:1])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if node.value.startswith(("takes", "has", "there")) else set()
    return found
