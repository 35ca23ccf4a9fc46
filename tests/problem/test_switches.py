"""Environment variables: values that turn a switch on, and the requested log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn.switches import is_on

ROOT = Path(__file__).resolve().parents[2]
LIMITS = (ROOT / "docs" / "LIMITS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("yes", True), ("0", False), ("", False), (None, False)]
)
def test_a_switch_is_on_unless_it_says_0(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUPYATTN_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("CUPYATTN_SWITCH", value)
    assert is_on("CUPYATTN_SWITCH") is on


def imported(level: str) -> subprocess.CompletedProcess[str]:
    """Import the package in a process of its own, and say two things to its logger."""
    script = (
        "import logging, cupyattn; log = logging.getLogger('cupyattn'); "
        "log.info('told'); log.debug('not told')"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "CUPYATTN_LOG": level},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_log_is_written_from_the_level_that_is_asked_for_on() -> None:
    lines = imported("INFO").stderr.splitlines()
    assert len(lines) == 1 and lines[0].endswith("cupyattn INFO: told")


def test_without_the_variable_nothing_is_written() -> None:
    done = imported("")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_word_is_one_sentence() -> None:
    sentence = "ValueError: CUPYATTN_LOG must be one of debug, info, warning, error, got 'loud'"
    assert imported("loud").stderr.splitlines()[-1] == sentence


def test_the_readme_names_every_variable() -> None:
    """All that users set: not the revision of device runs, nor what `mutate` gives a command."""
    sources = [path.read_text() for path in (ROOT / "cupyattn").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\"(CUPYATTN_[A-Z_]+)\"", text)}
    named = set(re.findall(r"^\| `(CUPYATTN_\w+?)(?:=\w+)?`", LIMITS, re.MULTILINE))
    assert read - {"CUPYATTN_REVISION", "CUPYATTN_MUTANT"} == named
