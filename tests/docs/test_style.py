"""Prose keeps to the style of the project; the list of exceptions may only shrink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import style

#: A test of all files at once would take longer than a quick test may.
PARTS = 8
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
        ("a.py", f"x = 1  # {LONG[:60]}\ny = 1  # {LONG[:75]}\n", {}),
        ("a.py", f"x = 1  # {LONG[:60]}\n# {LONG[:75]}\n", {"long sentences": 1}),
        ("a.py", f'"""Sum:\n\n.. math:: {LONG}\n"""\n', {}),
        ("a.py", f'"""Sum::\n\n    {LONG}\n\nEnd.\n"""\n', {}),
        ("a.py", f'"""Sum::\n\n{LONG}\n"""\n', {"long sentences": 1}),
        ("a.py", f'"""It.\n\nVaries  {LONG[:60]};\n  {LONG[:75]}\nRun  {LONG}\n"""\n', {}),
        ("a.py", f'"""It.\n\nVaries  it\nBeside  {LONG}; it\n"""\n', {"long sentences": 1}),
        ("a.py", '"""Which keys count."""\n', {"fragments": 1}),
        ("a.py", '"""Which keys count? Run it."""\n', {}),
        ("a.py", "#: Of a row.\nx = 1\n#: How to run it.\ny = 1\n", {"fragments": 1}),
        ("a.py", 'x = "nobody anew"\n', {}),
        ("a.cu", "// Nobody waits.\nint x; // anew\n", {"avoided words": 2}),
        ("a.cu", "int nobody;\n", {}),
        ("a.cu", f"// With\n//   {LONG}\n// it ends.\n", {}),
        ("a.cu", f"// Idea         {LONG[:70]}\n// Kept simple  {LONG[:70]}\n", {}),
        ("a.cu", f"// Idea         {LONG}\n// Rounding     {LONG}\n", {"long sentences": 1}),
    ],
)
def test_what_is_counted(name: str, text: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert style.counts(tmp_path / name) == expected


def test_pages_written_by_hand_have_at_most_so_many_words() -> None:
    pages = style.page_words()
    assert {"README.md", "docs/MATH_REFERENCE.md", "docs/TUTORIAL.md", "kernels_cu/README.md"} <= (
        pages.keys()
    )
    assert sum(pages.values()) <= style.PAGE_WORDS, sorted(pages.items(), key=lambda item: -item[1])


def test_words_between_marks_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "hand.md": "# Two words\n\n```py\nx = 1\n```\n\n| a | b |\n",
        "marked.md": "One\n<!-- a: begin -->\n2 3\n<!-- a: end -->\n<!-- diff x -->4<!-- end -->",
        "written.md": "# Title\n\nWritten by `python -m docs.write_it` from records.\n",
        "code.py": '"""Words."""\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "files", lambda: sorted(tmp_path.iterdir()))
    assert style.page_words() == {"hand.md": 13, "marked.md": 1}


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
