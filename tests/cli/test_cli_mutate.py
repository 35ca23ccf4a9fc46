"""``cupyattn mutate``: the faults that a command notices by its status, and resumed records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyattn import cli
from cupyattn.cli import mutant_runs

SOURCE = """__global__ void scale(float* x, int n) {
  const int i = threadIdx.x;
  const int unused = n - 1;
  if (i < n) x[i] = x[i] * 3.0f;
}
"""
#: A test that reads the path that it is given, or the variable, and notices a missing factor.
TEST = """
import os, sys
path = sys.argv[1] if len(sys.argv) > 1 else os.environ["CUPYATTN_MUTANT"]
text = open(path).read()
assert os.path.exists(os.path.join(os.path.dirname(path), "beside.txt"))
print("looked at", os.path.basename(path))
sys.exit("3.0f" not in text or "#error" in text)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("scale.cu", SOURCE), ("look.py", TEST), ("beside.txt", "")):
        Path(name).write_text(text)
    return tmp_path


def mutated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    status = cli.main(["mutate", *arguments])
    printed = capsys.readouterr()
    return status, printed.out.splitlines(), printed.err


def kept(name: str = "scale.cu.mutants.json") -> Any:
    return json.loads(Path(name).read_text())["mutants"]


LOOK = ("--", sys.executable, "look.py", "{}")


def test_mutants_are_noticed_survive_or_are_put_aside(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines, _ = mutated(capsys, "scale.cu", "--kinds", "edge", "scale", *LOOK)
    became = {one["after"]: one["became"] for one in kept().values()}
    assert status == 1
    assert became == {
        "const int unused = n;": "same code",
        "if (i <= n) x[i] = x[i] * 3.0f;": "survived",
        "if (i < n) x[i] = x[i];": "noticed",
        "if (i < n) x[i] = x[i] * 6.0f;": "noticed",
    }
    (survivor,) = (line for line in lines if line.startswith("SURVIVED"))
    assert survivor.startswith("SURVIVED: edge-4-9")
    assert lines[-1] == "mutate: 2 of 3 mutants noticed (66.7 %), 1 survived; 1 have the same " \
        "code, 0 do not compile"  # fmt: skip
    assert Path("scale.cu").read_text() == SOURCE


def test_the_variable_names_the_mutant(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = mutated(capsys, "scale.cu", "--kinds", "scale", *LOOK[:-1])
    assert status == 0
    assert {one["why"] for one in kept().values()} == {"looked at scale.cu"}


def test_a_command_that_reads_another_file_is_refused(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = mutated(capsys, "scale.cu", *LOOK[:-1], "scale.cu")
    assert status == 2 and "put {} in its place, or read the path from CUPYATTN_MUTANT" in error


def test_a_command_that_fails_without_a_fault_is_refused(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = mutated(capsys, "scale.cu", "--", sys.executable, "-c", "exit(3)")
    assert status == 2 and "must end with status 0 on the source as it is, got 3" in error


def test_a_run_that_was_stopped_goes_on(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mutant_runs.tried
    done: list[str] = []

    def stops(copy: Any, mutant: Any, *others: Any) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(mutant.name)
        return whole(copy, mutant, *others)

    asked = ("scale.cu", "--kinds", "scale", "edge", *LOOK)
    monkeypatch.setattr("cupyattn.cli.mutate.tried", stops)
    assert mutated(capsys, *asked)[0] == 130 and list(kept()) == done
    done.clear()
    monkeypatch.setattr(
        "cupyattn.cli.mutate.tried", lambda *a: (done.append(a[1].name), whole(*a))[1]
    )
    status, lines, _ = mutated(capsys, *asked)
    assert status == 1 and len(done) == 2 and len(kept()) == 4
    assert lines[0] == "2 mutants are in scale.cu.mutants.json already."
    Path("scale.cu").write_text(SOURCE + "\n")
    status, _, error = mutated(capsys, *asked)
    assert status == 2 and "of another source or command (its source_sha256 differs)" in error


def test_a_mutant_that_does_not_end_is_noticed(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("look.py").write_text(TEST.replace("sys.exit(", "while '6.0f' in text: pass\nsys.exit("))
    status, _, _ = mutated(capsys, "scale.cu", "--kinds", "scale", "--timeout", "0.5", *LOOK)
    assert status == 0
    assert {one["why"] for one in kept().values()} == {"stopped after 0.5 s", "looked at scale.cu"}


def test_some_of_them_by_a_seed_and_by_lines(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for seed in "001":
        drawn = ("--sample", "2", "--seed", seed, "--json", f"{seed}.json")
        mutated(capsys, "scale.cu", *drawn, *LOOK)
        found.append(list(kept(f"{seed}.json")))
    assert found[0] == found[1] != found[2] and len(found[0]) == 2
    mutated(capsys, "scale.cu", "--lines", "3-3", "--json", "line.json", *LOOK)
    assert {one["line"] for one in kept("line.json").values()} == {3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scale.py", *LOOK), "give a .cu or a .ptx file, got scale.py"),
        (("scale.cu", "--lines", "x", *LOOK), "--lines takes FIRST-LAST"),
        (("scale.cu", "--lines", "99", *LOOK), "has no place for such a fault"),
        (("scale.cu", "--kinds", "barrier", *LOOK), "has no place for such a fault"),
        (("scale.cu", "--define", "A", *LOOK), "--define takes NAME=NUMBER"),
        (("scale.cu", "--json", "text.json", *LOOK), "text.json is no record"),
        (("scale.cu", "--json", "list.json", *LOOK), "list.json is no record"),
        (("scale.cu", "--json", "deep.json", *LOOK), "deep.json is no record"),
        (("bytes.cu", *LOOK), "cannot read bytes.cu"),
        (("missing.cu", *LOOK), "missing.cu"),
        (("scale.cu", "--", "no-such-command"), "no-such-command"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"text": "x", "list": "[]", "deep": "[" * 99_999}.items():
        Path(f"{name}.json").write_text(content)
    Path("bytes.cu").write_bytes(b"\xff")
    status, _, error = mutated(capsys, *arguments)
    assert status == 2 and message in error and len(error.splitlines()) == 1
