"""Output of commands: help, progress, tables of plans, errors side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.cli import output
from cupyattn.measure import record_errors
from tests.checkpoints.checkpoint_files import write


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith("usage: cupyattn ")
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", captured.out, re.MULTILINE)


# ---- progress ------------------------------------------------------------------------------------


def test_the_ladder_says_on_a_pipe_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    arguments = ["--len", "8", "--heads", "1", "--head-dim", "8", "--rounds", "1"]
    assert cli.main(["ladder", *arguments, "--variants", "fa", "fa_tc"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert re.fullmatch(r"normal, seed 0: step 1 of \d, fa judged, \d+ s", lines[0])
    assert len(lines) == int(lines[0].partition(" of ")[2][0]) and "step" not in captured.out


def test_lines_of_progress_keep_their_distance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("reading") as advance:
        for name in "abcd":
            advance(name)
    assert capsys.readouterr().err == "reading: step 2, b, 6 s\nreading: step 4, d, 12 s\n"


# ---- files ---------------------------------------------------------------------------------------


def saved(path: Path, dtype: Any = np.float64, prefix: str = "") -> str:
    rng = np.random.default_rng(0)
    arrays = {f"{prefix}{n}": rng.standard_normal((1, 1, 8, 8)).astype(dtype) for n in "qkv"}
    np.savez(path, **arrays)
    return str(path)


def test_a_file_in_float64_says_how_to_convert_it_and_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ladder", "--rounds", "1", "--variants", "fa", "--qkv", saved(tmp_path / "x.npz")]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "q of" in line and "is float64" in line
    found = re.search("add (--dtype float16)", line)
    assert found is not None
    assert cli.main([*command, *found[1].split()]) == 0
    assert "head_dim 8, float16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "more", "message"),
    [
        ({"a": np.ones(3)}, [], "only a: save them as numpy.savez('qkv.npz', q=q, k=k, v=v)"),
        ({n: np.ones((1, 1, 2, 4), np.float16) for n in "qkv"}, ["--layer", "b"],
         "have no prefix: leave --layer out"),
        ({n: np.ones((1, 1, 2, 4), np.int8) for n in "qkv"}, [], "is int8"),
        ({n: np.ones((1, 1, 2, 4), np.complex64) for n in "qkv"}, [], "save real numbers"),
        ({n: np.ones((1, 1, 2, 4), np.complex64) for n in "qkv"}, ["--dtype", "float16"],
         "save real numbers"),
        ({n: np.ones((1, 1, 2, 4), bool) for n in "qkv"}, ["--dtype", "float16"], "got bool"),
        ({n: np.array(["x"]) for n in "qkv"}, [], "must be (batch, heads, len, head_dim)"),
        ({n: np.ones((1, 0, 2, 4), np.float16) for n in "qkv"}, [], "holds nothing"),
        ({n: np.full((1, 1, 2, 4), np.nan, np.float16) for n in "qkv"}, [],
         "q of {} holds a NaN or an infinity"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_says_what_to_do(
    arrays: dict[str, Any], more: list[str], message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    np.savez(tmp_path / "x.npz", **arrays)
    assert cli.main(["ladder", "--qkv", str(tmp_path / "x.npz"), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(tmp_path / "x.npz") in line and "x.npz" in line


def test_an_empty_name_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable of the shell gives an empty name."""
    assert cli.main(["ladder", "--qkv", ""]) == 2
    said = "--qkv must name a .npz or .safetensors file, got an empty name"
    assert said in capsys.readouterr().err


# ---- records without times -----------------------------------------------------------------------


def judged(path: Path, scale: float, name: str = "p", **more: Any) -> str:
    rungs = [
        {"variant": variant, "seconds": None,
         "judgement": {"j2": 0.5, "j3": j3, "relative_error": scale * 1e-3}}
        for variant, j3 in (("fa", None), ("fa_int8", 0.25))
    ]  # fmt: skip
    record = {"environment": {}, "ladders": [{"input": name, "rungs": rungs}]} | more
    path.write_text(json.dumps(record))
    return str(path)


@pytest.mark.parametrize(
    ("scale", "verdict"), [(1.0, "same"), (0.5, "more exact"), (2.0, "less exact"), (1.015, "same")]
)
def test_records_without_times_are_compared_by_their_errors(
    scale: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = judged(tmp_path / "a.json", 1.0), judged(tmp_path / "b.json", scale)
    file = tmp_path / "out.json"
    assert cli.main(["compare", first, second, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "The records hold no times: errors are compared." in printed
    assert f"2 cells: 2 {verdict}" in printed
    cells = {cell["name"]: cell for cell in json.loads(file.read_text())["cells"]}
    assert list(cells) == ["p, fa", "p, fa_int8"] and cells["p, fa"]["verdict"] == verdict
    assert "j3" not in cells["p, fa"]["first"] and cells["p, fa_int8"]["second"]["j3"] == 0.25


def test_lists_of_one_are_no_plural(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that counts its list does so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    row = {"variant": "fa", "seconds": 1.0}
    for name, rows in (("one", [row]), ("two", [row, {"variant": "fa_tc", "seconds": 2.0}])):
        Path(f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}))
    model = str(write(tmp_path / "m.safetensors", {"a.weight": np.ones((128, 128), np.float32)}))
    small = ["--len", "8", "--heads", "1", "--head-dim", "8"]
    for words in (
        ["compare", "one.json", "two.json"], ["report", "one.json", "--out", "one.html"],
        ["analyze", model], ["convert", model, "--output", "out"],
        ["cache", "--warm", "fa:hd64:fp16", "--arch", "sm_80"], ["cache", "--clear"], ["info"],
        ["interpret", "fa", *small], ["plan", "--devices", "1"],
    ):  # fmt: skip
        assert cli.main(words) == 0
    printed = capsys.readouterr().out
    for one in ("1 cell:", "1 cell in B alone", "1 record\n", "1 tensor,", "1 kernel for sm_80"):
        assert one in printed, one
    assert "1 cell<" in Path("one.html").read_text()
    assert not re.findall(r"(?<![\d.,])\b1 [a-z]+s\b", printed)
    report = ca.testing.judge(x := np.ones((1, 1, 1, 8), np.float16), x, x, x, variant="fa")
    assert "1 row of every head judged" in str(report)


def test_errors_of_two_inputs_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = judged(tmp_path / "a.json", 1.0), judged(tmp_path / "b.json", 1.0, "other")
    assert cli.main(["compare", *pair]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'p, fa' and 'other, fa'" in line and "on one input" in line
    pair = judged(tmp_path / "a.json", 1.0), judged(tmp_path / "b.json", 1.0, experiment="x")
    assert cli.main(["compare", *pair]) == 2
    assert "of two experiments" in capsys.readouterr().err


def test_what_is_no_error_is_passed_over() -> None:
    odd = [{"variant": "a", "judgement": {"j2": x}} for x in (None, True, "1", -1.0, float("nan"))]
    assert record_errors.judged({"rungs": [*odd, {"variant": "a", "judgement": 3}]}) == {}
    twice = [{"variant": "a", "dtype": "float16", "judgement": {"j2": x}} for x in (0.1, 0.2)]
    found = record_errors.judged({"cells": twice})
    assert found == {"a, float16": {"j2": 0.1}, "a, float16 #2": {"j2": 0.2}}


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_is_a_table_of_what_differs_from_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    q = np.ones((1, 2, 40, 24), np.float16)
    text = ca.explain(q, q, q, variant="fa_int8", causal=True)
    assert "Features(" not in text and "=False" not in text and "=''" not in text
    plan = text.splitlines()[-4:]
    assert [line.split()[0] for line in plan] == ["tiles", "features", "launch", "workspace"]
    assert len({re.match(r" +\w+ +", line).end() for line in plan}) == 1  # type: ignore[union-attr]
    assert "causal=True" in plan[1] and "group_q=2" in plan[1]
    assert cli.main(["plan", "--variant", "fa", "--len", "128", "--heads", "2"]) == 0
    *_, head, _, _, _, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["memory", "bytes"]
    assert total.split() == ["total", f"{4 * 2 * 128 * 128 * 2 + 4 * 2 * 128:,}", "257.0", "KiB"]
