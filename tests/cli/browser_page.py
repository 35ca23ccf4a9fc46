"""Open a page in the Chromium of Qt WebEngine, and print its layout as JSON.

    python -m tests.cli.browser_page URL SCHEME WIDTH... < PROBE

The probe is JavaScript that returns JSON, or null while the page is not ready.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def probe(url: str, scheme: str, widths: list[int], script: str) -> list[dict[str, Any]]:
    """Return the answer of a script at each width, in pixels, in a light or a dark scheme."""
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

    def take(text: str | None) -> None:
        if text:
            found.append(json.loads(text))
        loop.quit()

    for count, width in enumerate(widths, 1):
        view = QWebEngineView()
        view.resize(width, 800)
        view.show()
        view.loadFinished.connect(lambda _: loop.quit())
        view.load(QUrl(url))
        loop.exec()
        while len(found) < count:
            QTimer.singleShot(500, loop.quit)  # until it is laid out
            loop.exec()
            view.page().runJavaScript(script, take)
            loop.exec()
        view.close()
    app.quit()
    return found


if __name__ == "__main__":
    url, scheme, *widths = sys.argv[1:]
    print(json.dumps(probe(url, scheme, [int(w) for w in widths], sys.stdin.read())), flush=True)
    os._exit(0)  # Chromium's threads have nothing more to say
