"""docs/YOUR_KERNEL.md: its commands find what it says, its code runs, its tables are complete."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn import cli
from cupyattn.cli import launch_file
from cupyattn.testing.mutations import KINDS, mutants

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "YOUR_KERNEL.md").read_text(encoding="utf-8")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


CONSOLE = blocks("console")


def run(command: str) -> None:
    """Run a line of the page: a command of ours in this process, others by the shell."""
    first, *words = command.split()
    if first == "cupyattn":
        cli.main(words)
    else:
        subprocess.run(command, shell=True, check=True)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that are started find `cupyattn`: this checkout."""
    command = tmp_path / "bin" / "cupyattn"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cupyattn "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("index", range(len(CONSOLE)))
def test_a_command_prints_what_the_page_says(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples" / "your_kernel", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    lines = CONSOLE[index].splitlines(keepends=True)
    for command in (line[2:] for line in lines if line.startswith("$ ")):
        run(command)
    wanted = "".join(line for line in lines if not line.startswith("$ "))
    printed = capsys.readouterr().out
    checker = doctest.OutputChecker()
    assert checker.check_output(f"{wanted.rstrip()}...", printed, FLAGS), printed[:1500]


def test_there_are_nine() -> None:
    assert len(CONSOLE) == 9


def test_the_page_says_how_many_mutants_the_example_has() -> None:
    source = (ROOT / "examples" / "your_kernel" / "attention.cu").read_text(encoding="utf-8")
    assert f"the example has {len(list(mutants(source)))} mutants" in DOC
    assert all(f"| `{kind}` | {words} |" in DOC for kind, words in KINDS.items())


def test_the_code_runs() -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(code, names)
    assert (names["y"] == 2 * names["x"]).all()  # type: ignore[operator,attr-defined]


def test_the_tables_name_every_field() -> None:
    named = set(re.findall(r"`\[*(\w+)", DOC))
    for fields in (
        launch_file.TOP, launch_file.ARRAY, launch_file.OF, launch_file.SCALAR, launch_file.NULL,
        launch_file.TENSORS, launch_file.NUMERICS, launch_file.OPTIONS, launch_file.FILLS,
    ):  # fmt: skip
        assert set(fields) <= named, set(fields) - named
