"""Prose keeps to the style of the project: a list of what does not yet may only shrink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import style

#: A test of all files at once would take longer than a quick test may.
PARTS = 5
ALLOWED = json.loads(style.COUNTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", range(PARTS))
def test_no_file_breaks_a_rule_more_often_than_the_list_says(part: int) -> None:
    worse = {
        (name, rule): (count, ALLOWED.get(name, {}).get(rule, 0))
        for name, found in style.all_counts(part, PARTS).items()
        for rule, count in found.items()
        if count > ALLOWED.get(name, {}).get(rule, 0)
    }
    assert not worse, f"rewrite what was added (found, allowed): {worse}"


def test_the_list_names_files_that_exist() -> None:
    names = {path.relative_to(style.ROOT).as_posix() for path in style.files()}
    assert ALLOWED.keys() <= names, "run python -m docs.style --update"


LONG = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("page.md", "Read it anew.\n", {"avoided words": 1}),
        ("page.md", f"{LONG}.\n\n```\n{LONG}\n```\n\n| {LONG} |\n", {"long sentences": 1}),
        ("page.md", f"Short. {LONG.capitalize()}.\n", {"long sentences": 1}),
        ("page.md", "Bounds of those that are judged.\n", {"missing nouns": 1}),
        ("page.md", f"[{LONG[:-5]}](a/path of words)\n", {}),
        ("page.md", f"$$a\n{LONG}\n+ b.$$\n", {}),
        ("a.py", 'def f():\n    """Return what is left."""\n', {"missing nouns": 1}),
        ("a.py", f"#: {LONG[:60]}\n#: {LONG[:75]}\nx = 1\n", {"long sentences": 1}),
        ("a.py", 'x = "nobody anew"\n', {}),
        ("a.cu", "// Nobody waits.\nint x; // anew\n", {"avoided words": 2}),
        ("a.cu", "int nobody;\n", {}),
    ],
)
def test_what_is_counted(name: str, text: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert style.counts(tmp_path / name) == expected


def test_a_longer_list_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, listed = tmp_path / "page.md", tmp_path / "counts.json"
    page.write_text("Read it.\n")
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "COUNTS", listed)
    monkeypatch.setattr(style, "files", lambda: [page])
    assert style.main(["--update"]) == 0 and json.loads(listed.read_text()) == {}
    page.write_text("Read it anew.\n")
    assert style.main(["--update"]) == 1 and json.loads(listed.read_text()) == {}
    assert "not written: more avoided words" in capsys.readouterr().out
