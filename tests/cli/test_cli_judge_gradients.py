"""``cupyattn judge --gradients``: functions that return gradients, and the files of a failure."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from cupyattn import cli

FILE = '''
import numpy as np

def attention(d_out, q, k, v, *, scale=None, causal=False, causal_align="bottom-right", fault=""):
    dtype, group, len_q, len_kv = q.dtype, q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scale = np.float32(scale or q.shape[-1] ** -0.5)
    d_out, q, k, v = (np.float32(x) for x in (d_out, q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = q @ k.swapaxes(2, 3) * scale
    shift = len_kv - len_q if causal_align == "bottom-right" else 0
    if causal:
        s = np.where(np.arange(len_kv) <= np.arange(len_q)[:, None] + shift, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-1e30)
    p = np.exp(s - top)
    p = p / np.maximum(p.sum(axis=-1, keepdims=True), np.float32(1e-30))
    dp = d_out @ v.swapaxes(2, 3)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = p * (dp - (0 if fault == "delta" else delta)) * scale
    dq, dk, dv = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ d_out
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return [x.astype(dtype) for x in (dq, dk, 2 * dv if fault == "twice" else dv)]

def delta_left_out(d_out, q, k, v):
    return attention(d_out, q, k, v, fault="delta")

def twice(d_out, q, k, v):
    return attention(d_out, q, k, v, fault="twice")

def two(d_out, q, k, v):
    return attention(d_out, q, k, v)[:2]
'''


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)


def judged(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    status = cli.main(["judge", "--gradients", *arguments])
    return status, capsys.readouterr().out.splitlines()


def test_a_right_function_passes(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = judged(
        capsys, "mine.py:attention", "--problems", "8", "--json", "found.json"
    )
    assert status == 0, lines
    assert lines[0].startswith("gradients of mine.py:attention as numpy; options drawn: scale, ca")
    assert lines[-1].startswith("judge: passed, 24 problems, largest error / bound 0.")
    record = json.loads(Path("found.json").read_text())
    assert record["passed"] and record["gradients"] and len(record["problems"]) == 24


@pytest.mark.parametrize("fault", ["delta_left_out", "twice"])
def test_a_fault_is_found_and_left_small(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = judged(capsys, f"mine.py:{fault}", "--dtypes", "float16", "--problems", "30")
    assert status == 1 and "outside its bound: q (1, " in lines[-1]
    assert any("is OUTSIDE its bound" in line for line in lines)
    assert len(Path("judged.py").read_text().splitlines()) <= 18
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path("judged.py")
    assert stopped.value.code == 1 and "OUTSIDE" in capsys.readouterr().out


def test_three_arrays_must_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = judged(capsys, "mine.py:two", "--dtypes", "float32", "--problems", "2")
    assert status == 1 and "the function failed" in lines[-1]
    assert "ValueError: the function must return dq, dk and dv, got list" in lines
