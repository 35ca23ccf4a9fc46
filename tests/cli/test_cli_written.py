"""Commands print no control characters for terminals, and report a full disk."""

from __future__ import annotations

import ast
import io
import json
import logging
import resource
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.checkpoints import open_checkpoint
from cupyattn.cli import output
from cupyattn.measure import report
from tests.checkpoints.checkpoint_files import write
from tests.cli.test_report import record

#: A colour, a line of its own, and an override of the direction in which text runs.
ODD = "\x1b[31m\nfake: 100 % saved\u202e"
SHOWN = r"\x1b[31m\nfake: 100 % saved\u202e"


def assert_clean(text: str) -> None:
    assert not {c for c in text if c != "\n" and unicodedata.category(c)[0] == "C"}
    assert "\nfake" not in text


def odd_model(folder: Path) -> Path:
    w = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    arrays = {f"blocks.0{ODD}.attn.to_q.weight": w, f"blocks.0{ODD}.bias": w[0]}
    write(folder / "model.safetensors", arrays)
    return folder


# ---- control characters --------------------------------------------------------------------------


def test_names_of_a_model_reach_no_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, found = odd_model(tmp_path / "model"), tmp_path / "found.json"
    written = tmp_path / "written.json"
    assert cli.main(["analyze", str(model), "--tensors", "--json", str(found)]) == 0
    target = tmp_path / "int8\x1b[31m"
    arguments = ["--output", str(target), "--analysis", str(found), "--json", str(written)]
    assert cli.main(["convert", str(model), *arguments]) == 0
    assert cli.main(["convert", str(model), *arguments]) == 2  # it is there already
    assert cli.main(["convert", str(model), "--output", str(target / "a" / "b\x1b")]) == 2
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert_clean(text)
    assert SHOWN in said.out and r"int8\x1b[31m" in said.out
    assert said.err.count("\n") == 2 and r"int8\x1b[31m exists already" in said.err
    for file in (found, written):  # JSON has names as they are, and its own escapes for them
        record = json.loads(file.read_text())
        tensors = record.get("analysis", record)["tensors"]
        assert f"blocks.0{ODD}.attn.to_q.weight" in [t["name"] for t in tensors]
        assert_clean(file.read_text())
    assert f"blocks.0{ODD}.attn.to_q.weight" in open_checkpoint(target).tensors


def test_failures_and_refusals_are_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bad = write(tmp_path / "bad.safetensors", {f"x{ODD}": np.full((2, 2), np.nan, np.float32)})
    assert cli.main(["analyze", str(bad)]) == 1
    assert f"FAILED: x{SHOWN} has 4 elements" in capsys.readouterr().out
    for arguments in (
        ["analyze", str(tmp_path / "no\x1b.safetensors")],
        ["convert", str(bad), "--output", str(tmp_path / "out\u202e")],
    ):
        assert cli.main(arguments) == 2
    with pytest.raises(SystemExit):
        cli.main(["analyze", str(bad), "--frob\x1b[31m"])
    said = capsys.readouterr()
    assert_clean(said.out + said.err)
    model = odd_model(tmp_path / "model")
    (model / "link\x1b.json").symlink_to(bad)
    with caplog.at_level(logging.WARNING, "cupyattn"):
        assert cli.main(["convert", str(model), "--output", str(tmp_path / "out")]) == 0
    assert r"link\x1b.json is not copied" in caplog.messages[0]
    assert_clean("".join(caplog.messages))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_with_rich_gets_escapes_of_rich_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    with output.progress("analyzing", 2) as advance:
        advance(f"x{ODD} [bold]")
        output.print_table(("tensor", "why"), [(f"x{ODD}", "[red]")])
    table, bar = sys.stdout.getvalue(), sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert SHOWN in table and "[red]" in table and "[bold]" in bar and SHOWN in bar
    for text in (table, bar):
        assert "\x1b[31m" not in text and "\u202e" not in text


def test_names_of_records_reach_no_page_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"variant": f"fa{ODD}", "samples": [1e-3] * 15, "judgement": {"j2": 0.25}}]
    problems = [{"problem": {"name": f"p{ODD}"}, "rows": rows}]
    odd = record(command=f"measure{ODD}", problems=problems)
    odd["environment"]["device"]["name"] = "One\ud800"  # half a pair, which no file holds
    assert_clean(report.page([(f"a{ODD}", odd)]))
    folder, page = tmp_path / "records", tmp_path / "page\x1b.html"
    folder.mkdir()
    (folder / "a\x1b[31m.json").write_text(json.dumps(odd))
    assert cli.main(["report", str(folder), "--out", str(page)]) == 0
    assert_clean(page.read_text())
    assert SHOWN in page.read_text() and r"a\x1b[31m" in page.read_text()
    said = capsys.readouterr()
    assert r"page\x1b.html" in said.out
    assert_clean(said.out + said.err)
    assert cli.main(["compare", *[str(folder / "a\x1b[31m.json")] * 2]) == 0
    said = capsys.readouterr()
    assert_clean(said.out + said.err)


def test_commands_print_by_one_function() -> None:
    """It removes control characters; the other two functions print only clean text."""
    folder = Path(output.__file__).parent
    found = {
        path.name: sum(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            for node in ast.walk(ast.parse(path.read_text()))
        )
        for path in folder.glob("*.py")
    }  # fmt: skip
    assert {name: n for name, n in found.items() if n} == {"output.py": 1, "__init__.py": 2}


# ---- a full disk ---------------------------------------------------------------------------------


def on_a_full_disk(*arguments: str) -> int:
    """Run a command that may write files of at most 500 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        return cli.main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("option", ["--json", "--out", "--plot"])
def test_a_full_disk_names_the_file(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--out":
        (tmp_path / "a.json").write_text(json.dumps(record()))
        path, arguments = tmp_path / "page.html", ["report", str(tmp_path / "a.json")]
    else:
        model = odd_model(tmp_path / "model")
        path, arguments = tmp_path / f"x{option}.png", ["analyze", str(model)]
    if option == "--plot":
        pytest.importorskip("matplotlib")
    assert on_a_full_disk(*arguments, option, str(path)) == 2
    assert capsys.readouterr().err == f"cupyattn: {path}: File too large\n"
    assert not path.exists() and not [*tmp_path.glob(".*.tmp")]
