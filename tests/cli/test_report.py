"""`cupyattn report` writes a complete page that loads nothing and agrees with the records."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cupyattn import cli
from cupyattn.measure import records, report

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
#: Elements without an end.
VOID = {"meta", "rect", "line", "br"}


class Page(HTMLParser):
    """The parts of a page; `open` is empty if every element has ended in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def record(**more: Any) -> dict[str, Any]:
    rows = [
        {"variant": name, "samples": [seconds] * 15, "judgement": {"j2": 0.25}}
        for name, seconds in (("fast", 1e-3), ("slow <b>", 4e-3))
    ]
    environment = {"device": {"name": "One"}, "revision": "abc"}
    return {"environment": environment, "problems": [{"problem": {"name": "p"}, "rows": rows}],
            "command": "measure", **more}  # fmt: skip


def test_bars_are_to_one_scale_and_names_are_text() -> None:
    page = Page(report.page([("first", record())]))
    assert not page.open and page.tags.count("rect") == 2
    widths = [float(v or 0) for k, v in page.attributes if k == "width" and v and v[0].isdigit()]
    assert widths == [50.0, 200.0]
    assert {"slow <b>", "1 ms", "4 ms", "0.250"} <= set(page.words) and "b" not in page.tags
    assert any("device One" in word and "revision abc" in word for word in page.words)


def test_ways_whose_names_have_commas_are_bars_of_one_chart() -> None:
    named = record()
    named["problems"][0]["rows"][1]["variant"] = "torch SDPA, cuDNN"
    page = Page(report.page([("first", named)]))
    assert page.tags.count("table") == page.tags.count("h3") == 1
    assert {"p", "fast", "torch SDPA, cuDNN"} <= set(page.words)


def test_a_bar_of_a_millionth_is_still_to_be_seen() -> None:
    short = record()
    short["problems"][0]["rows"][0]["samples"] = [1e-9] * 15
    page = Page(report.page([("first", short)]))
    widths = [float(v or 0) for k, v in page.attributes if k == "width" and v and v[0].isdigit()]
    assert widths == [0.5, 200.0]


def test_the_page_fits_any_width_and_loads_nothing() -> None:
    """Without a browser: what would break one that is narrow or dark is looked for in the text.

    Of all records that are no longer than half of them are; tests/cli/test_report_browser.py shows
    all.
    """
    files = sorted(RESULTS.glob("*.json"), key=lambda file: file.stat().st_size)
    text = report.page([(f.stem, records.read(f)) for f in files[: len(files) // 2]])
    page = Page(text)
    assert not page.open and "script" not in page.tags and "link" not in page.tags
    assert ("name", "viewport") in page.attributes and "prefers-color-scheme: dark" in text
    links = [v or "" for k, v in page.attributes if k in ("href", "src")]
    ids = {v for k, v in page.attributes if k == "id"}
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)
    assert page.tags.count("table") == text.count('<div class="scroll"><table ')  # wide ones scroll
    assert not any(k == "style" for k, _ in page.attributes) and "min-width: 7rem" in text


def test_numbers_stand_where_nothing_was_timed() -> None:
    found = {"ok": True, "bytes": 123456, "ratio": [1.5, 1.25, 2.0], "others": [1.0, 2.0, 3.0]}
    rows = [{"name": f"row {i}", "error": i / 7, **found} for i in range(report.MOST_ROWS + 3)]
    page = Page(report.page([("found", {"environment": {}, "rows": rows})]))
    assert "row 0" in page.words and f"row {report.MOST_ROWS}" not in page.words
    assert "3 more rows in the record" in page.words and "0.1429" in page.words
    assert "1.5\xa0[1.25,\xa02]" in page.words and "others" not in page.words  # no interval
    assert "123,456" in page.words and "rows" in page.words


def test_numbers_within_a_part_are_called_by_it() -> None:
    rows = [{"variant": n, "kernels": [{"kernel": f"attn_{n}", "passes": 3}]} for n in ("fa", "fb")]
    page = Page(report.page([("found", {"environment": {}, "rows": rows})]))
    assert {"rows", "fa, kernels", "fb, kernels"} <= set(page.words)


def test_files_and_folders_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record()))
    out = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), str(tmp_path / "a.json"), "--out", str(out)]) == 0
    assert Page(out.read_text()).words.count("a") == 4 and "3 records" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "a.json"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(": 1 record\n")


@pytest.mark.slow
def test_without_records_the_ladder_is_run(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["report", "--out", str(out)]) == 0
    assert {"fa_tc", "fa_int8"} <= set(Page(out.read_text()).words)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["none"], "No such file"),
        (["empty"], "has no record"),
        (["bad.json"], "is no JSON"),
        (["empty", "--out", "nowhere/page.html"], "there is no folder"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    given: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    assert cli.main(["report", *given]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.glob("**/*.html"))
