"""`cupyattn report` and `cupyattn compare` of odd records: one line, or a page and a table."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyattn import cli
from cupyattn.measure import records

ROW = {"variant": "fa", "samples": [1e-3, 2e-3, 3e-3], "judgement": {"j2": 0.5}}


def record(**more: Any) -> dict[str, Any]:
    environment = {"device": {"name": "One"}, "revision": "abc", "numpy": "2"}
    rows = [ROW, {"variant": "x", "seconds": 1e-3, "seconds_interval": [9e-4, 2e-3]}]
    return {"experiment": "x", "environment": environment, "command": "measure",
            "problems": [{"problem": {"name": "p"}, "left_out": ["a"], "rows": rows}],
            "found": [{"share": [1.5, 1.0, 2.0], "count": 3}]} | more  # fmt: skip


def answers(paths: list[Path], out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run both commands on each file; return what each said on standard error."""
    said = []
    good = out.with_suffix(".json")
    good.write_text(json.dumps(record()))
    for path in paths:
        for arguments in (
            ["report", str(path), "--out", str(out)],
            ["compare", str(path), str(path)], ["compare", str(good), str(path)],
        ):  # fmt: skip
            status = cli.main(arguments)
            error = capsys.readouterr().err
            assert status in (0, 2) and error.count("\n") == (status == 2), (path, error)
            said.append(error)
    return said


ODD: dict[str, Any] = {
    "an empty file": b"", "binary": bytes(range(256)), "half": b'{"environment": {',
    "a list": b"[]", "a number": b"3", "text": b'"x"', "null": b"null",
    "UTF-16": '{"environment": {}}'.encode("utf-16"),
    "nested": b"[" * 100_000, "nested objects": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "nested in a record": b'{"environment": {}, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "a long number": b'{"environment": {}, "rows": [{"seconds": ' + b"9" * 5000 + b"}]}",
    "an environment of another kind": record(environment=[1]),
    "a device of another kind": record(environment={"device": "One"}),
    "a revision of another kind": record(environment={"revision": 3}),
    "a command of another kind": record(command={"a": 1}),
    "NaN": record(rows=[{"seconds": float("nan")}]),
    "infinity": record(rows=[{"samples": [float("inf")]}]),
    "zero": record(rows=[{"samples": [0.0]}]),
    "a negative time": record(rows=[{"seconds": -1.0}]),
    "a huge time": record(rows=[{"seconds": 10**400}]),
    "a tiny time": record(rows=[{"samples": [1e-320]}]),
    "an interval of three": record(rows=[{"seconds": 1.0, "seconds_interval": [1, 2, 3]}]),
    "an interval of text": record(rows=[{"seconds": 1.0, "seconds_interval": "ab"}]),
    "an interval that is turned": record(rows=[{"seconds": 1.0, "seconds_interval": [2, 0.5]}]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_records_are_refused_in_a_line(tmp_path: Path, name: str, capsys) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "odd.json"
    odd = ODD[name]
    path.write_bytes(odd if isinstance(odd, bytes) else json.dumps(odd).encode())
    for error in answers([path], tmp_path / "page.html", capsys):
        assert "odd.json is no " in error
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket"])
def test_what_is_no_file_is_refused_in_a_line(
    tmp_path: Path, kind: str, monkeypatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "folder" / "x.json"
    path.parent.mkdir()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    assert cli.main(["compare", str(path), str(path)]) == 2
    assert f"is {kind}, a regular file is needed" in capsys.readouterr().err
    assert cli.main(["report", str(path.parent), "--out", str(tmp_path / "page.html")]) == 2
    assert f"is {kind}, a regular file is needed" in capsys.readouterr().err


def test_parts_that_are_no_times_are_passed_over(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """They are results of another kind, or say nothing."""
    path = tmp_path / "x.json"
    for odd in (
        {"samples": "fast"}, {"samples": [[1.0]]}, {"seconds": "inf"}, {"seconds": True},
        {"judgement": 3}, {"left_out": [3, None]}, {"problem": 3, "batch": [1]}, {"name": {}},
        {"seconds": 1.0, "judgement": [1]}, {"samples": {"a": [1.0], "b": 3}},
    ):  # fmt: skip
        path.write_text(json.dumps(record(rows=[odd])))
        assert not any(answers([path], tmp_path / "page.html", capsys)[:2])


def test_cells_of_one_name_are_numbered_quickly() -> None:
    found = records.cells({"rows": [ROW] * 3_000})
    assert len(found) == 3_000 and "fa #3000" in found


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**30, 10**400, 0.0, -1.0, 1e308, 1e-320, float("nan"), float("inf"), "",
    "x", "\ud800", [], {}, [[]], [1.0], [1.0, "x"], [float("nan")] * 3, {"a": 1}, {"name": 3},
    {"seconds": 1.0}, {"samples": [1.0]}, {"samples": {"a": [1.0]}}, [1.0, 0.5, 2.0],
)  # fmt: skip


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a record with each of its keys."""
    if isinstance(node, (dict, list)):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from places(node[key])


@pytest.mark.slow
def test_records_with_parts_exchanged_are_answered(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Each part of a record in turn is left out, and becomes three of the values."""
    path = tmp_path / "x.json"
    count = sum(1 for _ in places(record()))
    rng = random.Random(0)
    for number in range(count):
        for value in ("left out", *rng.sample(VALUES, 3)):
            odd = copy.deepcopy(record())
            node, key = list(places(odd))[number]
            if value == "left out":
                del node[key]
            else:
                node[key] = value
            path.write_text(json.dumps(odd))
            answers([path], tmp_path / "page.html", capsys)
