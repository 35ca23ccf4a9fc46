"""MATH_REFERENCE.md: each lemma names code and tests that exist, and each tag has its lemma."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from docs import write_roundings
from experiments._harness import recording
from experiments.accuracy import predicted_codes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "MATH_REFERENCE.md").read_text()
GREEK = set(
    re.findall(
        r"\\\w+",
        r"\alpha\beta\gamma\delta\epsilon\varepsilon\zeta\eta\theta\iota\kappa\lambda\mu\nu\xi\pi"
        r"\rho\sigma\varsigma\tau\upsilon\phi\varphi\chi\psi\omega\Gamma\Delta\Theta\Lambda\Xi\Pi"
        r"\Sigma\Upsilon\Phi\Psi\Omega",
    )
)
TAG = re.compile(r"\[(L\d+)\]")


@cache
def definitions() -> dict[str, list[str]]:
    """Return the text of each function, class and constant of cupyattn, comments above included."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "cupyattn").rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
            else:
                continue
            first = node.lineno - 1
            while first and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            for name in names:
                found.setdefault(name, []).append("\n".join(lines[first : node.end_lineno]))
    return found


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """Return the names of the tests of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef))


def lemmas(page: str) -> dict[str, str]:
    """Return what stands below the heading of each lemma, by its number."""
    parts = re.split(r"^(?=##)", page, flags=re.M)
    return {m[1]: part for part in parts if (m := re.match(r"### (L\d+)\. ", part))}


def problems(page: str) -> list[str]:
    """Return the errors of a page's lemmas, a sentence each."""
    wrong = []
    for tag, text in lemmas(page).items():
        code = re.findall(r"^\*Code:\* \[(.*?)\]\. \*Test:\* (.*)\.$", text, re.M)
        if len(code) != 1:
            wrong.append(f"{tag} has {len(code)} lines of code and tests")
            continue
        if "*Proof.*" not in text or "∎" not in text:
            wrong.append(f"{tag} has no proof")
        names, tests = (re.findall(r"`([^`]+)`", part) for part in code[0])
        texts = {name: definitions().get(name.split(".")[-1], []) for name in names}
        wrong += [f"{tag}: there is no {name}" for name, found in texts.items() if not found]
        if not any(f"[{tag}]" in text for found in texts.values() for text in found):
            wrong.append(f"{tag} stands in none of {names}")
        for test in tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name not in names_of_tests(path):
                wrong.append(f"{tag}: there is no test {test}")
        if not tests:
            wrong.append(f"{tag} has no test")
    return wrong


def test_the_picture_of_roundings_follows_the_table() -> None:
    rounded = write_roundings.rounded()
    assert [*rounded] == [f"R{i}" for i in range(8)] and "(roundings.svg)" in PAGE
    assert rounded["R1"] == [False, False, False, True], "only fa_int8 makes codes"
    assert rounded["R5"] == [False, False, True, True], "P is float32 elsewhere"
    drawn = write_roundings.PICTURE.read_text(encoding="utf-8")
    assert drawn == write_roundings.picture(), "run python -m docs.write_roundings"


def test_lemmas_are_numbered_in_order() -> None:
    numbers = re.findall(r"^### L(\d+)\. ", PAGE, re.M)
    assert [int(x) for x in numbers] == list(range(1, len(numbers) + 1)) and len(numbers) > 60


def test_every_lemma_has_a_proof_code_that_has_its_tag_and_a_test() -> None:
    assert not problems(PAGE)


def test_a_lemma_that_lacks_something_is_noticed() -> None:
    line = "*Code:* [`gamma`]. *Test:* `tests/bounds/test_bounds.py::test_gamma`."
    lemma = f"### L1. Counted roundings\n\nWords. *Proof.* Words. ∎\n\n{line}\n"
    assert line in PAGE and not problems(lemma)
    for old, new in (
        ("gamma`]", "gamna`]"), ("gamma`]", "half_ulp`]"), ("::test_gamma", "::test_gamna"),
        ("test_bounds.py", "test_bound.py"), ("*Proof.*", ""), ("*Test:*", ""), ("L1", "L2"),
    ):  # fmt: skip
        assert old in lemma and problems(lemma.replace(old, new)), old


def test_every_tag_is_a_lemma_and_every_lemma_is_a_tag() -> None:
    folders = ("cupyattn", "kernels_cu", "tests", "experiments")
    paths = [p for f in folders for p in sorted((ROOT / f).rglob("*"))]
    used: set[str] = set()
    for path in paths:
        if path.suffix in (".py", ".cu", ".cuh") and path != Path(__file__):
            used |= set(TAG.findall(path.read_text()))
    assert used == set(lemmas(PAGE))
    assert set(re.findall(r"\bL\d+\b", PAGE)) == used  # what the page itself refers to


def symbols_of(page: str) -> list[str]:
    """Return the symbols of the table, as they stand there."""
    table = page.split("## 1. Symbols")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (\$.*?) \| ", table, re.M)
    parts = [part for cell in cells for part in re.findall(r"\$(.*?)\$", cell)]
    return [symbol for part in parts for symbol in part.split(", ")]


def letters(formula: str) -> set[str]:
    """Return the Greek and single Latin letters of a formula, words in roman type left out."""
    formula = re.sub(r"\\(mathrm|text|begin|end)\{[^{}]*\}|\bR\d+", " ", formula)
    greek = set(re.findall(r"\\(?:var)?[A-Za-z]+", formula)) & GREEK
    return greek | set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", formula)))


def undefined(page: str) -> set[str]:
    """Return letters that formulas of the page have and its table has not."""
    text = page.split("## 2. ")[1].split("## 19. ")[0]
    text = re.sub(r"`[^`]*`", " ", text)
    formulas = re.findall(r"\$\$(.*?)\$\$|\$(.*?)\$", text, re.S)
    used = set().union(*(letters(a or b) for a, b in formulas))
    return used - set().union(*map(letters, symbols_of(page)))


def test_every_symbol_is_defined_once() -> None:
    """No symbol is twice in the table, and every letter of a formula is in it."""
    symbols = symbols_of(PAGE)
    assert len(symbols) > 80 and len(symbols) == len(set(symbols))
    assert undefined(PAGE) == set()
    assert undefined(PAGE.replace("$\\kappa$; $\\pi$; $\\pi_b$", "$B$")) == {"\\kappa", "\\pi"}


def test_sections_that_other_pages_name_are_there() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", PAGE, re.M))
    name = r"MATH_REFERENCE(?:\.md)?[`\])]*(?:\([\w./]*\))?,? (?:§(\d+)|(L\d+))"
    for path in [*ROOT.rglob("*.md"), *(ROOT / "tests").rglob("*.py")]:
        if path.name == "CHANGELOG.md":
            continue
        named = re.findall(name, path.read_text())
        assert {s for s, _ in named if s} <= sections, path.name
        assert {tag for _, tag in named if tag} <= set(lemmas(PAGE)), path.name


def test_the_table_of_predicted_codes_is_that_of_its_record() -> None:
    record = recording.stored("predicted_codes")
    assert record["environment"]["dirty"] is False
    assert predicted_codes.page(record) in PAGE
    assert predicted_codes.right(record["forms"])
