"""docs/SYMBOLS.md: each symbol is one of the proofs, and each name is defined where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.test_math_reference import PAGE as PROOFS
from tests.docs.test_math_reference import symbols_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SYMBOLS.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \$(.*?)\$ \| (.*?) \| `(.*?)` \| `(.*?)` \|$", PAGE, re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Return the names that a source declares or assigns, without names that it only uses."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        code = re.sub(r"//.*", "", text)
        # A type or a comma, the name, and what may follow it in a declaration.
        declared = r"(?:(?:float|void|int|bool|double|T|Array)\b[\s*]*|,\s*)(\w+)\s*(?=[,;=\[){])"
        return set(re.findall(declared, code)) | set(re.findall(r"#define (\w+)", code))
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[2]}")
def test_a_symbol_of_the_proofs_has_the_name(row: tuple[str, str, str, str]) -> None:
    symbol, _, name, file = row
    assert [one for one in symbols_of(PROOFS) if one == symbol] == [symbol]
    assert name in defined(ROOT / file), f"{file} does not define {name}"


def test_every_row_was_read_and_has_its_own_symbol() -> None:
    lines = re.findall(r"^\| \$", PAGE, re.MULTILINE)
    symbols = [symbol for symbol, *_ in ROWS]
    assert len(ROWS) == len(lines) > 40 and len(symbols) == len(set(symbols))


def test_a_name_that_is_only_used_is_not_defined_there() -> None:
    assert "has_keys" not in defined(ROOT / "kernels_cu" / "attn_fa.cu")
    assert "UNIT_ROUNDOFF" not in defined(ROOT / "cupyattn" / "bounds" / "scores.py")


def test_pages_lead_to_it() -> None:
    for page in ("GLOSSARY.md", "MATH_REFERENCE.md", "README.md", "site/explanation.md"):
        assert "SYMBOLS.md)" in (ROOT / "docs" / page).read_text(encoding="utf-8"), page
