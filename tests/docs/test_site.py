"""The documentation site: the sources for Sphinx, and a build without warnings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import build_site
from docs.write_api import MODULES, find, public

ROOT = Path(__file__).parents[2]
#: Packages of setup.cfg's extra `docs`, and the frameworks whose modules have pages.
NEEDED = ("sphinx", "myst_parser", "numpydoc", "pydata_sphinx_theme", "torch", "jax", "diffusers")
PAGE_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "sources"
    build_site.assemble(folder)
    return folder


def test_links_of_the_site_lead_to_its_pages(sources: Path) -> None:
    pages = sorted(sources.rglob("*.md"))
    assert len(pages) > 20
    for page in pages:
        prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in PAGE_LINK.findall(re.sub(r"`[^`]*`", "", prose)):
            path = target.partition("#")[0]
            if path and ":" not in path:
                assert (page.parent / path).resolve().is_relative_to(sources), (page.name, target)
                assert (page.parent / path).is_file(), (page.name, target)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[data](../experiments/README.md)", "data (`experiments/README.md`)"),
        ("[`Makefile`](../Makefile)", "`Makefile`"),
        ("[the ladder](../README.md#the-ladder)", "the ladder"),
        ("[API](API.md)", "[API](../reference.md)"),
        ("[bounds](MATH_REFERENCE.md#3-the-theorem)", "[bounds](MATH_REFERENCE.md#3-the-theorem)"),
        ("![picture](house.svg)", "![picture](house.svg)"),
        ("[paper](https://example.org/a)", "[paper](https://example.org/a)"),
    ],
)  # fmt: skip
def test_a_link_out_of_the_docs_becomes_its_text(link: str, expected: str) -> None:
    assert build_site.page(f"See {link}.") == f"See {expected}."
    assert build_site.page(f"```text\n{link}\n```\n") == f"```text\n{link}\n```\n"


def test_each_public_name_has_one_page(sources: Path) -> None:
    listed: list[str] = []
    for module in MODULES:
        text = (sources / "reference" / f"{module}.rst").read_text("utf-8")
        listed += [f"{module}.{name}" for name in re.findall(r"^   (\w+)$", text, re.MULTILINE)]
    homes = [find(*name.rpartition(".")[::2]) for name in listed]
    assert len({(home.home, home.name) for home in homes}) == len(listed)
    names = {(m, n) for m in MODULES for n in public(m) if f"{m}.{n}" not in MODULES}
    assert {(h.home, h.name) for h in homes} == {
        (h.home, h.name) for h in (find(m, n) for m, n in names)
    }


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="make docs installs it"
)
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs.build_site", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "html" / "searchindex.js").stat().st_size > 100_000
    for page in (tmp_path / "html").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*\s(?:src|href)="(https?:[^"]*)"', page.read_text("utf-8")
        )
        assert not loaded, (page.name, loaded)
    proofs = (tmp_path / "html" / "pages" / "MATH_REFERENCE.html").read_text("utf-8")
    assert "_static/mathjax/tex-chtml.js" in proofs
    assert (tmp_path / "html" / "_static" / "mathjax" / "tex-chtml.js").is_file()
