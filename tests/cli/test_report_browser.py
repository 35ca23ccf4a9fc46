"""The report in a real browser, at the widths of phones and of a desk: ``make test-browser``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn.measure import records, report

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
PHONES, DESK = (360, 412), 1280

#: Only elements that scroll may reach past the edge, and every bar must be visible.
PROBE = """
(() => {
  const box = e => e.getBoundingClientRect();
  const all = q => [...document.querySelectorAll(q)];
  const width = document.documentElement.clientWidth;
  return JSON.stringify({
    width: window.innerWidth,
    scrolled: document.documentElement.scrollWidth - width,
    outside: all('body *').filter(e => !e.closest('.scroll') && box(e).right > width + 1)
      .map(e => e.outerHTML.slice(0, 80)),
    tables: all('table').length,
    bars: all('rect').length,
    hidden: all('rect').filter(e => box(e).width <= 0 || box(e).height <= 0).length,
    narrowest: Math.min(...all('td.bar').map(e => box(e).width)),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    broken: all('nav a').filter(a => !document.getElementById(a.hash.slice(1))).length,
  });
})()
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None, reason="no browser: make test-browser installs one"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_fits_phones_and_desks(scheme: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = [(f.stem, records.read(f)) for f in sorted(RESULTS.glob("*.json"))]
    page.write_text(report.page(found))
    widths = map(str, (*PHONES, DESK))
    command = [sys.executable, "-m", "tests.cli.browser_page", page.as_uri(), scheme, *widths]
    done = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    windows = json.loads(done.stdout)
    assert [w["width"] for w in windows] == [*PHONES, DESK]
    for one in windows:
        assert one["scrolled"] == 0 and one["outside"] == [] and one["broken"] == 0, one
        assert one["tables"] > 100 and one["bars"] > 100 and one["hidden"] == 0, one
        assert one["narrowest"] >= 100, one
        dark = one["paper"] == "rgb(22, 24, 27)" and one["ink"] == "rgb(232, 232, 232)"
        light = one["paper"] == "rgb(255, 255, 255)" and one["ink"] == "rgb(27, 27, 27)"
        assert dark if scheme == "dark" else light, one
