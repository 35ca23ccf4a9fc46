"""Draw docs/house.svg: the packages of cupyattn, and which imports which.

The picture is made from the imports in the sources, so it cannot differ from them.

    python -m docs.write_house
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cupyattn
from cupyattn.files import replacing
from cupyattn.measure.words import counted

PACKAGE = Path(cupyattn.__file__).parent
PICTURE = Path(__file__).with_name("house.svg")
#: The packages from the ground up; tests/test_structure.py holds the imports to this order.
ORDER = (
    "arrays", "kernels", "quant", "compiler", "problem", "reference", "plans", "bounds", "runtime",
    "gradients", "interpret", "ops", "testing", "measure", "checkpoints", "distributed",
    "diffusion", "interop", "cli",
)  # fmt: skip
_ROW, _LEFT, _WIDTH, _HEIGHT, _LANE = 34, 20, 150, 24, 9


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once, for the picture and for the tests of the tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the packages of cupyattn that a file imports, those for type checkers aside."""
    tree = tree_of(path)
    typed = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typed or not isinstance(node, ast.ImportFrom):
            continue
        parts = (node.module or "").split(".")
        if parts[0] == "cupyattn":
            yield from [parts[1]] if len(parts) > 1 else (alias.name for alias in node.names)


def arrows() -> Counter[tuple[str, str]]:
    """Return how many files of one package import another, by (importing, imported)."""
    found: Counter[tuple[str, str]] = Counter()
    for package in ORDER:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            used = {name for name in imports(path) if name in ORDER and name != package}
            found.update((package, name) for name in used)
    return found


def picture() -> str:
    """Return the drawing: one box a package, one curve from each to every package it imports."""
    place = {name: _ROW * number + 20 for number, name in enumerate(ORDER)}
    right = _LEFT + _WIDTH
    body = []
    for (low, high), files in sorted(arrows().items()):
        y0, y1 = place[low] + _HEIGHT / 2, place[high] + _HEIGHT / 2
        reach = right + 30 + _LANE * abs(ORDER.index(low) - ORDER.index(high)) * 1.6
        body.append(
            f'<path d="M{right} {y0} C{reach:.0f} {y0} {reach:.0f} {y1} {right + 6} {y1}" '
            f'stroke-width="{0.6 + 0.25 * files**0.5:.2f}" marker-end="url(#head)">'
            f"<title>{low} imports {high} in {counted(files, 'file')}</title></path>"
        )
    for name, y in place.items():
        count = len(list((PACKAGE / name).rglob("*.py")))
        body.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="{_LEFT + 8}" y="{y + 16}">{name}</text>'
            f'<text class="count" x="{right - 8}" y="{y + 16}">{count}</text>'
        )
    height = _ROW * len(ORDER) + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 {height}" role="img">',
            "<title>Packages of cupyattn, and what each imports: all arrows point up</title>",
            "<style>rect{fill:#eef3f8;stroke:#4a6785}text{font:13px sans-serif;fill:#1b2a38}"
            ".count{text-anchor:end;fill:#6b7f92}path{fill:none;stroke:#4a6785;opacity:.45}"
            "@media(prefers-color-scheme:dark){rect{fill:#22303d;stroke:#8fb0d0}"
            "text{fill:#e6eef5}path{stroke:#8fb0d0}}</style>",
            '<defs><marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" '
            'style="fill:#4a6785;stroke:none"/></marker></defs>',
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    with replacing(PICTURE) as file:
        file.write(picture().encode("utf-8"))
