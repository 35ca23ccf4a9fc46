"""The documentation site in a real browser, on phones and a desk: ``make test-browser``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import build_site
from tests.docs.test_site import NEEDED

PHONE, DESK = 360, 1280

#: Waits until formulas are set and results of a search are there.
PROBE = """
(() => {
  const all = q => [...document.querySelectorAll(q)];
  const width = document.documentElement.clientWidth;
  const formulas = all('.math').length, set = all('mjx-container').length;
  if (set < formulas) return null;
  const search = document.querySelector('#search-results');
  if (search && !search.querySelector('li')) return null;
  return JSON.stringify({
    width: window.innerWidth,
    scrolled: document.documentElement.scrollWidth - width,
    formulas: set,
    unread: all('[data-mjx-error]').length,
    pictures: all('img').filter(i => i.complete && !i.naturalWidth).length,
    results: all('#search-results li a').map(a => a.textContent),
    paper: getComputedStyle(document.body).backgroundColor,
  });
})()
"""

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("PySide6", *NEEDED)),
    reason="no browser, or no Sphinx: make test-browser installs both",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build_site.main([str(folder)]) == 0
    return folder / "html"


def seen(site: Path, page: str, scheme: str) -> list[dict[str, Any]]:
    """Return what the probe finds in a page, on a phone and on a desk."""
    path, _, query = page.partition("?")
    url = (site / path).as_uri() + (f"?{query}" if query else "")
    command = [sys.executable, "-m", "tests.cli.browser_page", url, scheme, f"{PHONE}", f"{DESK}"]
    done = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    windows: list[dict[str, Any]] = json.loads(done.stdout)
    assert [w["width"] for w in windows] == [PHONE, DESK]
    return windows


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page",
    ["index", "start", "pages/INTEROP", "pages/PERFORMANCE", "reference/names/cupyattn.attention"],
)
def test_pages_fit_phones_and_desks(site: Path, page: str, scheme: str) -> None:
    for one in seen(site, f"{page}.html", scheme):
        assert one["scrolled"] == 0 and one["pictures"] == 0, one
        dark, light = one["paper"] == "rgb(20, 24, 30)", one["paper"] == "rgb(255, 255, 255)"
        assert dark if scheme == "dark" else light, one


def test_formulas_are_set(site: Path) -> None:
    for one in seen(site, "pages/MATH_REFERENCE.html", "light"):
        assert one["formulas"] > 500 and one["unread"] == 0 and one["scrolled"] == 0, one


def test_search_finds_a_function_and_an_error(site: Path) -> None:
    for one in seen(site, "search.html?q=int8_gemm", "light"):
        assert any("int8_gemm" in result for result in one["results"]), one
