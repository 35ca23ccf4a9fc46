"""docs/DESIGN.md is records of one screen; docs/GLOSSARY.md has a line for each term, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = re.sub(
    r"<!-- libraries: begin -->.*?<!-- libraries: end -->\n",
    "",
    (DOCS / "DESIGN.md").read_text(encoding="utf-8"),
    flags=re.DOTALL,
)
RECORDS = re.findall(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
TERMS = re.findall(
    r"^\| (?!term)(?!-)(.*?) \| (.*) \|$",
    (DOCS / "GLOSSARY.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_there_are_few_records_and_the_first_screen_lists_them() -> None:
    numbers = [title.partition(".")[0] for title, _ in RECORDS]
    assert 10 <= len(numbers) <= 15
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert re.findall(r"^\| \[(\d+)\]\(#", TEXT, re.MULTILINE) == numbers


@pytest.mark.parametrize(("title", "body"), RECORDS, ids=[title for title, _ in RECORDS])
def test_a_record_has_its_four_parts_on_one_screen(title: str, body: str) -> None:
    parts = re.findall(r"^\*\*(\w+)\.\*\*", body, re.MULTILINE)
    assert parts == ["Decision", "Alternatives", "Price", "Evidence"]
    assert len(body.strip().splitlines()) <= 40, title


def test_terms_are_in_alphabetical_order_and_have_one_line_each() -> None:
    assert len(TERMS) > 60
    names = [term.strip("*`").casefold() for term, _ in TERMS]
    assert names == sorted(set(names))
    assert not [term for term, meaning in TERMS if len(meaning.split()) > 40]
