"""Names of modules, functions and files that pages and kernels' headers mention: each exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels_cu/**/*.md"),
    *ROOT.glob("kernels_cu/**/*.cu"), *ROOT.glob("kernels_cu/**/*.cuh"),
]  # fmt: skip
#: Pages that tell of what was: names there may be of another time.
PAST = {"CHANGELOG.md"}


def exists(name: str) -> bool:
    """Whether a dotted name is a module of ours, or lies in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            found = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


def test_a_name_that_is_none_is_noticed() -> None:
    assert exists("cupyattn.reference.attention_mirror") and exists("cupyattn.Tiles.num_threads")
    assert not exists("cupyattn.reference.nothing") and not exists("cupyattn.nothing.attention")


def test_named_modules_and_functions_exist() -> None:
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page.name not in PAST
        for name in re.findall(r"(?<![\w/.\[])cupyattn(?:\.[A-Za-z_]\w*)+", page.read_text())
        if not re.search(r"\.(interop|torch|jax)\b", name) and not exists(name)
    }
    assert not missing


def test_named_files_exist() -> None:
    folders = "cupyattn|tests|experiments|kernels_cu|docs|examples"
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page.name not in PAST
        for name in re.findall(rf"`((?:{folders})/[\w/.]+\.\w+)`", page.read_text())
        if not (ROOT / name).exists()
    }
    assert not missing
