"""The fuzzer runs, goes on from its record, and sees planted faults and crashes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from experiments._harness import fuzz_scores
from experiments._harness.fuzz_cases import Case, Setup, Wrong
from experiments.accuracy import fuzz


def test_a_few_calls_are_right() -> None:
    assert fuzz.main(["--calls", "40", "--others", "4"]) == 0
    assert not {"own_fa", "own_fa_tc"} & set(ca.VARIANTS)  # they are registered for a case alone


def test_a_judge_that_alarms_falsely_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = ca.testing.judge

    def wrong(o: Any, *args: Any, **options: Any) -> Any:
        return judge(1.5 * o, *args, **options)

    monkeypatch.setattr(ca.testing, "judge", wrong)
    names = ("judge", "judge of packed sequences")
    for name in names:
        outcomes = [fuzz.run_case(name, number, Setup()) for number in range(6)]
        assert any(one.kind == "failed" and "OUTSIDE" in one.said for one in outcomes)


@pytest.mark.parametrize("name", ["attention", "act_quant"])
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(ca, name)

    def wrong(*args: Any, **options: Any) -> Any:
        o, lse = whole(*args, **options)
        if o.size:
            o[...] = o[::-1] + o.dtype.type(1)
        return o, lse

    monkeypatch.setattr(ca, name, wrong)
    outcomes = [fuzz.run_case(name, number, Setup()).kind for number in range(10)]
    assert "failed" in outcomes


def test_an_exception_of_another_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(ca, "act_quant", broken)
    found = fuzz.run_case("act_quant", 0, Setup())
    assert (found.kind, found.said) == ("failed", "KeyError: 'x'")


def test_a_write_beside_the_result_is_seen() -> None:
    seen = 0
    for number in range(20):
        case = Case(Setup(), 0, number)
        out, _ = case.receiver((1, 1, 3, 8), "float16")
        case.check_inputs()
        if out.base is not None and out.base.dtype == np.float16:
            out.base[..., -1, :] = 1
            seen += 1
            with pytest.raises(Wrong, match="around the result"):
                case.check_inputs()
    assert seen


def test_rows_under_one_large_bias_are_means() -> None:
    scoring = fuzz_scores.Scoring(1.0, bias=np.full((1, 1, 2, 3), np.finfo(np.float32).min))
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 3, 8))
    S, size, _ = scoring.scores(q[:, :, :2], k)
    assert (fuzz_scores.softmax(S)[0] == 1 / 3).all()
    assert (fuzz_scores.row_error(S, size, scoring.alone) == 0).all()


def test_a_run_goes_on_from_its_record(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    sizes = ["--calls", "6", "--others", "2", "--batch", "4", "--json", str(file)]
    assert fuzz.main([*sizes, "--minutes", "1e-9"]) == 0
    assert not file.exists() or not json.loads(file.read_text())["complete"]
    assert fuzz.main(sizes) == 0
    whole = json.loads(file.read_text())
    assert whole["complete"] and sum(whole["counts"]["attention"].values()) == 6
    assert whole["seed"] == 0 and "numpy" in whole["environment"]
    record = dict(whole, done={"attention": [[0, 4]]}, counts={"attention": {"right": 4}})
    file.write_text(json.dumps(record))
    assert fuzz.main(["--resume", str(file)]) == 0
    again = json.loads(file.read_text())
    assert again["complete"] and again["done"] == whole["done"]
    assert {n: sum(c.values()) for n, c in again["counts"].items()} == {
        n: sum(c.values()) for n, c in whole["counts"].items()
    }


class _Crashing(fuzz.Child):
    """A thread in place of a process, which ends at case 5 of attention."""

    def __init__(self, setup: Setup) -> None:
        self.connection, self.other = multiprocessing.Pipe()
        self.process: Any = SimpleNamespace(
            is_alive=lambda: False, join=lambda: None, exitcode=-9
        )  # fmt: skip
        self.batch = None
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, numbers = self.other.recv()
                for number in numbers:
                    if (name, number) == ("attention", 5):
                        self.other.close()
                    self.other.send(fuzz.Outcome(number, "right", "", ""))


def test_a_crash_is_one_failed_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "Child", _Crashing)
    file = tmp_path / "fuzz.json"
    sizes = ["--calls", "12", "--others", "2", "--batch", "4", "--jobs", "2", "--json", str(file)]
    assert fuzz.main(sizes) == 1
    record = json.loads(file.read_text())
    assert record["complete"] and record["counts"]["attention"] == {"right": 11, "failed": 1}
    said = "the process ended (exit status -9)"
    assert record["failed"] == [{"case": "attention:5", "said": said}]


@pytest.mark.slow
def test_child_processes_run_the_cases(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    sizes = ["--calls", "8", "--others", "2", "--batch", "4", "--jobs", "2", "--json", str(file)]
    assert fuzz.main(sizes) == 0
    assert json.loads(file.read_text())["complete"]
