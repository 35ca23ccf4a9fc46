"""Open a page in Chromium, as Qt WebEngine brings it, and print as JSON how it lies in its window.

    python -m tests.cli.browser_page PAGE SCHEME WIDTH...
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: What a page comes to in a window: elements outside those that scroll by themselves must not reach
#: past its edge, and every bar must be there to be seen.
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


def probe(page: str, scheme: str, widths: list[int]) -> list[dict[str, Any]]:
    """Return what `PROBE` finds at each width, in pixels, in a light or a dark scheme."""
    dark = {"dark": 0, "light": 1}[scheme]  # blink::mojom::PreferredColorScheme
    os.environ |= {
        "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1",
        "QTWEBENGINE_CHROMIUM_FLAGS": f"--disable-gpu --blink-settings=preferredColorScheme={dark}",
    }  # fmt: skip
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    app = QApplication([])
    found: list[dict[str, Any]] = []
    loop = QEventLoop()
    for width in widths:
        view = QWebEngineView()
        view.resize(width, 800)
        view.show()
        view.loadFinished.connect(lambda _: loop.quit())
        view.load(QUrl.fromLocalFile(os.path.abspath(page)))
        loop.exec()
        QTimer.singleShot(500, loop.quit)  # until it is laid out
        loop.exec()

        def take(text: str) -> None:
            found.append(json.loads(text))
            loop.quit()

        view.page().runJavaScript(PROBE, take)
        loop.exec()
        view.close()
    app.quit()
    return found


if __name__ == "__main__":
    page, scheme, *widths = sys.argv[1:]
    print(json.dumps(probe(page, scheme, [int(w) for w in widths])), flush=True)
    os._exit(0)  # Chromium's threads have nothing more to say
