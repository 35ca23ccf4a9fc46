"""fa_int8 beside other 8-bit kernels: what the experiment does without a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import device, timing
from experiments import graphs, others8, peers_int8, recording
from experiments.cells import Problem, judge_cell, rung, time_cells
from experiments.diffusion_shapes import SHAPES


def test_8_bit_peers_run_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers_int8.json"
    assert peers_int8.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    ((found,), (compared,)) = record["problems"], record["compared"]
    assert record["backend"] == "mirror" and all(row["ok"] for row in found["rows"])
    ours = {f"{name}{given}" for name in peers_int8.QUANT for given in ("", others8.GIVEN)}
    assert set(compared["errors"]) == {peers_int8.FULL, *ours}
    errors = [compared["errors"][name] for name in (peers_int8.FULL, *peers_int8.QUANT)]
    assert errors == sorted(errors)  # 16 bits, balanced, by tile, aggressive
    assert all(one["ratio"] is None for one in compared["ratios"].values())
    capsys.readouterr()
    assert peers_int8.main(["--quick", "--accuracy"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in peers_int8.DISTRIBUTIONS)


def test_every_shape_of_a_model_takes_part_and_short_calls_in_graphs() -> None:
    """What is done within two milliseconds, at a rate that fa_tc has there, is short."""
    args = recording.parser("").parse_args([])
    args.accuracy, args.cells, args.models = (
        False,
        ["128:4096", "128:8192"],
        [n for n, *_ in SHAPES],
    )
    found = peers_int8.problems(args)
    assert len(found) == 2 + len(SHAPES)
    short = {p.name for p in found if p.operations < peers_int8.GRAPH_OPERATIONS}
    assert {"B2 H10 4096 hd64 float16 normal", "B2 H24 4096x77 hd64 float16 normal"} < short
    assert found[0].name in short and found[1].name not in short


def test_parts_of_a_record_are_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part's problems are compared with the others', and say of which run they are."""
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    files = [tmp_path / name for name in ("peers_int8.json", "part.json")]
    for file, seed in zip(files, "12", strict=True):
        assert peers_int8.main(["--quick", "--seed", seed, "--json", str(file)]) == 0
    part = json.loads(files[1].read_text())
    part["problems"][0]["problem"] |= {"name": "a model", "head_dim": 40}
    files[1].write_text(json.dumps(part))
    assert peers_int8.main(["--stored", "--merge", str(files[1])]) == 0
    record = json.loads(files[0].read_text())
    assert [p["problem"]["name"] for p in record["problems"]][0] == "a model"
    assert [one["problem"] for one in record["compared"]][0] == "a model"
    assert ["command" in p for p in record["problems"]] == [True, False]
    assert "a model" in capsys.readouterr().out


# ---- in CUDA graphs ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What a stand-in of a stream holds while it is captured; calls put their work there."""
    cupy = pytest.importorskip("cupy")
    work: list[Callable[[], None]] = []

    def captured(call: Callable[[int], object], count: int) -> Callable[[int], object]:
        for i in range(count):
            call(i)
        held = list(work)
        return lambda _: [one() for one in held]

    nothing = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: nothing)
    monkeypatch.setattr(graphs, "as_bytes", lambda result: result)
    monkeypatch.setattr(graphs, "numbers", np.copy)
    monkeypatch.setitem(graphs.sys.modules, "torch", None)
    return work


def test_a_graph_is_held_to_what_the_calls_compute(launched: list[Callable[[], None]]) -> None:
    """What ran while it was captured, and is not in it, must not be timed."""
    out = np.zeros(3)
    held = [False]

    def in_order(i: int) -> Any:
        work = lambda: np.copyto(out, i + 1.0)  # noqa: E731
        work()
        if held[0]:
            launched.append(work)
        return out

    held[0] = True
    graph = graphs.recorded(in_order, 2)
    out.fill(0)
    graph(0)
    assert (out == 2).all()
    held[0] = False
    launched.clear()
    with pytest.raises(RuntimeError, match="does not compute what the call does"):
        graphs.recorded(in_order, 2)


def test_times_of_graphs_are_those_of_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be captured has none, and its row says why."""
    problem = Problem(1, 1, 40, 16)
    inputs = problem.draw(on_device=False)
    cells = [rung("fa", problem), rung("fa_tc", problem)]
    rows = [judge_cell(problem, cell, inputs) for cell in cells]

    def recorded(call: Callable[[int], Any], count: int) -> Callable[[int], object]:
        assert count == 3
        if len(seen) == 1:
            raise RuntimeError("it waits\nfor the device")
        seen.append(call)
        return call

    seen: list[Any] = []
    monkeypatch.setattr(graphs, "recorded", recorded)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)] * 3)
    monkeypatch.setattr(
        timing, "time_interleaved", lambda calls, **_: {name: [3e-3] * 15 for name in calls}
    )
    monkeypatch.setattr(device, "clocks", lambda *_: {})
    monkeypatch.setattr(device, "device_ceiling", lambda family: 1e12)
    time_cells(problem, cells, rows, inputs, 15, "fa", in_graphs=True)
    assert rows[0]["seconds"] == pytest.approx(1e-3) and rows[0]["samples"] == [1e-3] * 15
    assert "seconds" not in rows[1] and "fa_tc: no CUDA graph: it waits for the device" in (
        capsys.readouterr().err
    )
    _, printed = recording.table({"rows": rows}, "fa")
    assert "no CUDA graph: not timed" in printed[1]
