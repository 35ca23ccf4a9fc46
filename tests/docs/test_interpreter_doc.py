"""docs/INTERPRETER.md: its commands and code print what it says, its tables are complete."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path

import pytest

from cupyattn import cli
from cupyattn.compiler import modules as kc
from cupyattn.interpret.findings import KINDS
from tests.faults.fault_patches import FAULTS

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "INTERPRETER.md").read_text(encoding="utf-8")
BUG = DOC.split("## A bug in twenty lines\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def agree(wanted: str, printed: str) -> bool:
    """Compare text in which ``...`` stands for anything."""
    return doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS)


def test_the_bug_is_found_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (console,), (code,), (output,) = (blocks(BUG, name) for name in ("console", "python", ""))
    assert len([line for line in (console + code).splitlines() if line]) <= 30
    _, patch, run = re.split(r"^\$ ", console, flags=re.MULTILINE)
    (name,) = re.findall(r"tests/faults/(\w+)\.patch", patch)
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    assert patch.endswith(f"patching file {fault.hunks[0].file}\n")
    monkeypatch.setattr(kc, "KERNELS", fault.plant(tmp_path))

    command, _, wanted = run.partition("\n")
    program, *arguments = shlex.split(command)
    assert program == "cupyattn" and cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert agree(wanted, printed), printed

    exec(code, {})
    printed = capsys.readouterr().out
    assert agree(output, printed), printed


def test_the_code_of_a_schedule_runs() -> None:
    first, *_, scheduled = blocks(DOC, "python")
    exec(first + "from cupyattn import interpret\n" + scheduled, {})


def test_the_code_of_a_profile_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *_, watched, _ = blocks(DOC, "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(first + "from cupyattn import interpret\n" + watched, {})
    assert "attn_fa: 1 launch, 2 blocks" in printed.getvalue()
    assert "SharedAccess(line='attn_fa.cu:" in printed.getvalue()
    assert (tmp_path / "fa.txt").read_text().startswith("# attn_fa<<<2, 128>>> for sm_80: block 0")


def test_every_kind_of_finding_is_listed() -> None:
    rows = re.findall(
        r"^\| ([\w -]+) \| ", DOC.split("## Findings")[1].split("\n## ")[0], re.M
    )
    assert rows == ["kind", *KINDS]


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", DOC):
        assert (ROOT / "docs" / link).exists(), link
