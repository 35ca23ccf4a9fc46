"""``cupyattn judge`` draws problems for a function, finds faults, and leaves a reproducer."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

from cupyattn import cli
from cupyattn.testing import load_counterexample

#: A file with a right function, and with one for each fault.
FILE = '''
import ml_dtypes
import numpy as np
from tests.support.plain_attention import attend

STORED = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

def right(q, k, v, *, scale=None, causal=False, softcap=0.0, sinks=None):
    return faulty(q, k, v, scale=scale, causal=causal, softcap=softcap, sinks=sinks)

def faulty(q, k, v, *, scale=None, causal=False, softcap=0.0, sinks=None, **fault):
    options = {"scale": scale, "causal": causal, "softcap": softcap, "sinks": sinks}
    with np.errstate(all="ignore"):
        return attend(q, k, v, **{**options, "p": STORED[q.dtype.name], **fault})

def weights_in_8_bits(q, k, v, *, scale=None, causal=False):
    return faulty(q, k, v, scale=scale, causal=causal, p="e4m3")[0]

def lse_in_float16(q, k, v):
    o, lse = faulty(q, k, v)
    return o, np.float32(np.float16(lse))

def scale_in_bfloat16(q, k, v, *, scale=None):
    return faulty(q, k, v, scale=float(ml_dtypes.bfloat16(scale or q.shape[-1] ** -0.5)))[0]

def last_key_lost(q, k, v):
    return faulty(q, k, v, lost=1)[0]

def causal_off_by_one(q, k, v, *, causal=False):
    return faulty(q, k, v, causal=causal, further=1)[0]

def softcap_forgotten(q, k, v, *, softcap=0.0):
    return faulty(q, k, v)[0]

def sinks_forgotten(q, k, v, *, sinks=None):
    return faulty(q, k, v)[0]

def grouped_heads_mixed_up(q, k, v):
    return faulty(q, k[:, ::-1], v[:, ::-1])[0]

def fails_on_three_keys(q, k, v):
    if k.shape[2] == 3:
        raise RuntimeError("illegal memory access")
    return right(q, k, v)

def refuses_all(q, k, v):
    raise NotImplementedError

def refuses_groups(q, k, v):
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError
    return right(q, k, v)[0]
'''
FAULTS = ("weights_in_8_bits", "lse_in_float16", "scale_in_bfloat16", "last_key_lost",
          "causal_off_by_one", "softcap_forgotten", "sinks_forgotten", "grouped_heads_mixed_up")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    return tmp_path


def judged(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    status = cli.main(["judge", *arguments])
    return status, capsys.readouterr().out.splitlines()


def test_a_right_function_passes(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = judged(capsys, "mine.py:right", "--problems", "15", "--json", "found.json")
    assert status == 0
    assert lines[0] == "mine.py:right as numpy; options drawn: scale, causal, softcap, sinks"
    assert lines[-1].startswith("judge: passed, 45 problems, largest error / bound 0.")
    record = json.loads(Path("found.json").read_text())
    assert record["passed"] and len(record["problems"]) == 45 and record["failure"] is None
    assert not Path("judged.npz").exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_left_small(
    fault: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = judged(
        capsys, f"mine.py:{fault}", "--dtypes", "float32", "--json", "found.json"
    )
    assert status == 1
    assert lines[-1].startswith("judge: FAILED, ") and "outside its bound: q (1, " in lines[-1]
    case = load_counterexample("judged.npz")
    assert max(case.q.size, case.k.size) <= 8
    record = json.loads(Path("found.json").read_text())
    assert not record["passed"] and "OUTSIDE" in record["failure"]["message"]
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path("judged.py")
    assert stopped.value.code == 1 and "OUTSIDE" in capsys.readouterr().out
    assert len(Path("judged.py").read_text().splitlines()) <= 16


def test_the_same_seed_draws_the_same_problems(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("mine.py:right", "--dtypes", "float16", "--problems", "5", "--json", "found.json")
    drawn = []
    for seed in "112":
        assert judged(capsys, *asked, "--seed", seed)[0] == 0
        drawn.append(json.loads(Path("found.json").read_text())["problems"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_reproducer_passes_once_the_fault_is_mended(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("mine.py:last_key_lost", "--dtypes", "float16", "--out-name", "edge")
    assert judged(capsys, *asked)[0] == 1
    file = Path("mine.py")
    file.write_text(FILE.replace("lost=1", "lost=0"))
    os.utime(file, (0, file.stat().st_mtime + 2))  # or Python takes what it compiled this second
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path("edge.py")
    assert stopped.value.code == 0


def test_a_function_that_raises_is_a_failure(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = judged(capsys, "mine.py:fails_on_three_keys", "--dtypes", "float32")
    assert status == 1 and "RuntimeError: illegal memory access" in lines
    assert lines[-1].endswith("the function failed: q (1, 1, 1, 1), k (1, 1, 3, 1), float32")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runpy.run_path("judged.py")


def test_refused_problems_do_not_count(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = judged(capsys, "mine.py:refuses_all", "--problems", "5")
    assert status == 2 and lines[-1].startswith("judge: NOTHING JUDGED")
    few = ("--problems", "20", "--dtypes", "float32", "--json", "found.json")
    assert judged(capsys, "mine.py:refuses_groups", *few)[0] == 0
    record = json.loads(Path("found.json").read_text())
    assert record["refused"] + len(record["problems"]) == 20 and record["refused"] > 0


def test_a_narrower_claim_is_refuted(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("mine.py:right", "--problems", "20", "--dtypes", "bfloat16")
    assert judged(capsys, *few)[0] == 0
    assert judged(capsys, *few, "--p", "fp16")[0] == 1


def test_only_what_is_asked_for_is_drawn(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--options", "causal", "--head-dims", "16", "64", "--multiple", "8", "--square",
              "--no-groups", "--problems", "20", "--dtypes", "float16")  # fmt: skip
    status, lines = judged(capsys, "mine.py:right", *limits, "--json", "found.json")
    assert status == 0 and lines[0].endswith("options drawn: causal")
    for one in json.loads(Path("found.json").read_text())["problems"]:
        sizes = [int(n) for n in one["problem"].replace("(", "").replace(")", "").split(", ")
                 if n.isdigit()]  # fmt: skip
        assert "scale" not in one["problem"] and "softcap" not in one["problem"]
        assert sizes[-1] in (16, 64) and sizes[1] % 8 == 0 and sizes[1] > 0


def test_empty_arrays_are_drawn_if_asked_for(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(
        FILE + "\ndef not_empty(q, k, v):\n    assert q.size\n    return right(q, k, v)\n"
    )
    asked = ("mine.py:not_empty", "--dtypes", "float32", "--problems", "60")
    assert judged(capsys, *asked)[0] == 0
    status, lines = judged(capsys, *asked, "--empty")
    assert status == 1 and "the function failed" in lines[-1]


def test_inputs_are_copies(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        FILE + "\ndef overwrites(q, k, v):\n    o = right(q, k, v)[0]\n    q[...] = 0\n"
        "    return o\n"
    )
    few = ("--problems", "5", "--dtypes", "float32")
    assert judged(capsys, "mine.py:overwrites", *few)[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:", "mine.py cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
        ("\nraise SystemExit(0)", "cannot be imported: line 2 of mine.py raised SystemExit: 0"),
        ("1 / 0", "line 1 of mine.py raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_fails_is_named_in_one_line(
    text: str, message: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(text)
    assert cli.main(["judge", "mine.py:f"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_function_that_ends_the_process_has_failed(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def leaves(q, k, v):\n    raise SystemExit(0)\n")
    status, lines = judged(capsys, "mine.py:leaves", "--dtypes", "float32")
    assert status == 1 and "the function failed" in lines[-1]


def test_a_library_without_its_device_judges_nothing(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(self: object, x: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr("cupyattn.interop.callables.Called._array", no_device)
    assert cli.main(["judge", "mine.py:right"]) == 2
    assert "numpy needs a device for its arrays" in capsys.readouterr().err
    assert not Path("judged.npz").exists()


def test_the_reproducer_does_not_replace_the_judged_file(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["judge", "mine.py:last_key_lost", "--out-name", "mine"]) == 2
    assert "--out-name would replace 'mine.py', which the command" in capsys.readouterr().err
    assert Path("mine.py").read_text() == FILE
