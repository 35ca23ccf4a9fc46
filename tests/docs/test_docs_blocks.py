"""Blocks of code in docs/*.md run and print the shown output; commands and links exist.

The convention: blocks marked ``python`` are run one after the other, in the names that those
before have left. A block without a mark that follows is what is printed, and an exception that ends
a block is its last line; ``...`` stands for anything. Pages with tests of their own, which look at
more than what is printed, are left to these. Commands of ours run as well, unless the reader has to
put in a name.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from cupyattn import cli
from tests.support.marks import slow_unless

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Pages whose blocks another test runs: the text by which it says so.
ELSEWHERE = {
    "ARRAYS": "docs/test_readme.py",
    "CALIBRATION": "interop/test_interop_diffusers_features.py",
    "CHECKPOINTS": "docs/test_checkpoint_doc.py",
    "DIFFUSION": "docs/test_diffusion_doc.py",
    "DISTRIBUTED": "docs/test_distributed_doc.py",
    "INTEROP": "interop/test_interop_torch_linear.py",
    "INTERPRETER": "docs/test_interpreter_doc.py",
    "OWN_KERNEL": "docs/test_readme.py",
    "PIPELINES": "interop/test_pipelines_page.py",
    "YOUR_KERNEL": "docs/test_your_kernel_doc.py",
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    line: int
    language: str
    body: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start(2)), match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def run(code: Block, page: Path, names: dict[str, object]) -> str:
    """Return the output of a block; an exception that ends it is the last line."""
    printed = io.StringIO()
    # Empty lines before it: a traceback that comes through names the line of the page.
    compiled = compile("\n" * code.line + code.body, str(page), "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(compiled, names)
        except Exception as error:  # noqa: BLE001  whatever it is, the page must say so
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def check_page(page: Path) -> int:
    """Run the blocks of a page; how many there were."""
    found = blocks(page)
    names: dict[str, object] = {}
    for block, after in itertools.pairwise([*found, Block(0, "end", "")]):
        if block.language != "python":
            continue
        printed = run(block, page, names)
        wanted = after.body if after.language == "" else ""
        assert doctest.OutputChecker().check_output(wanted, printed, FLAGS), (
            f"{page.name}:{block.line + 1} prints\n{printed}\nin place of\n{wanted}"
        )
    return sum(block.language == "python" for block in found)


@pytest.mark.parametrize(
    "page",
    slow_unless(lambda _, page: page.stem != "TROUBLESHOOTING", PAGES),
    ids=lambda page: page.stem,
)
def test_the_blocks_print_what_stands_under_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.stem in ELSEWHERE:
        assert f"{page.stem}.md" in (ROOT / "tests" / ELSEWHERE[page.stem]).read_text()
        return
    monkeypatch.chdir(tmp_path)
    check_page(page)


def test_a_block_that_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("```python\nx = 2\n```\n\ntext\n\n```python\nprint(x)\n```\n\n```\n2\n```\n")
    assert check_page(page) == 2
    page.write_text("```python\nprint(2)\n```\n\n```\n3\n```\n")
    with pytest.raises(AssertionError, match=r"PAGE\.md:2 prints\s+2\s+in place of"):
        check_page(page)
    page.write_text("```python\nraise ValueError(2)\n```\n")
    with pytest.raises(AssertionError, match="ValueError: 2"):
        check_page(page)


def commands(page: Path) -> list[list[str]]:
    """The words of every line of a page's blocks marked ``sh``."""
    bodies = [block.body for block in blocks(page) if block.language == "sh"]
    lines = "".join(bodies).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def is_whole(words: list[str]) -> bool:
    """Whether a command names nothing that the reader has to put in, which is in capitals."""
    return not any(re.fullmatch("[A-Z][A-Z0-9]+", word) for word in words)


RUNNABLE = sorted(
    {
        tuple(words[1:])
        for page in [*PAGES, ROOT / "README.md"]
        for words in commands(page)
        if words[0] == "cupyattn" and is_whole(words)
    }
)


@pytest.mark.parametrize(
    "words",
    [
        # What it does with a part of its input is among the quick tests of tests/cli.
        pytest.param(words, marks=[pytest.mark.slow] if words == ("ladder",) else [])
        for words in RUNNABLE
    ],
    ids=" ".join,
)
def test_commands_of_the_pages_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(words)) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        if words[:1] == ["cupyattn"]:
            cli.parser().parse_args(words[1:])
        elif words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}[: ]", makefile, re.MULTILINE), words
        elif words[:2] == ["python", "-m"] and not words[2].startswith("cupyattn"):
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), words


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_formulas_are_whole() -> None:
    """A backslash that a string took for the start of a control character has left that behind."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = re.search(r"[\x00-\x09\x0b-\x1f]|\n(?:ho|ceil|floor|abla)\b", text)
        assert found is None, f"{page.name}: {found}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = re.findall(r"^\| \[\w+\]\((\w+\.md)\) \|", index.read_text("utf-8"), re.MULTILINE)
    assert sorted([*listed, index.name]) == [page.name for page in PAGES]


def test_troubleshooting_has_a_run_or_a_command_for_every_symptom() -> None:
    text = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    symptoms = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(symptoms) >= 20
    for symptom in symptoms:
        title = symptom.splitlines()[0]
        assert re.search(r"^```(python|sh)$|`cupyattn \w+", symptom, re.MULTILINE), title
