"""The experiment on few queries and many keys runs in small, and leaves the tiles as they were."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.measure import timing
from experiments.speed import decode


def test_decoding_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    assert decode.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and len(record["problems"]) == 8
    for row in record["problems"]:
        ways = row["ways"]
        assert [*ways] == [decode.TAKEN, decode.PORTABLE] and "seconds" not in row
        assert [facts["form"] for facts in ways.values()] == ["split", "portable"]
        assert all(facts["ok"] and facts["j2"] <= 1 for facts in ways.values())
        assert int(ways[decode.TAKEN]["tiles"].partition("x")[0]) >= min(row["rows"], 16)
        kv = row["batch"] * row["heads_kv"] * row["len_kv"] * row["head_dim"]
        assert row["kv_bytes"] == 2 * 2 * kv


@pytest.mark.slow
def test_decoding_compares_tiles_of_the_split_form(tmp_path: Path) -> None:
    """Tiles that hold the rows, and tiles that read K and V several times; the rest stays."""
    own = ca.VARIANTS["fa_tc"]
    file = tmp_path / "decode.json"
    assert decode.main(["--quick", "--tiles", "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["problems"]:
        tried = [name for name in row["ways"] if name not in (decode.TAKEN, decode.PORTABLE)]
        if row["rows"] <= 16:
            assert not tried
        else:
            own_rows = int(row["ways"][decode.TAKEN]["tiles"].partition("x")[0])
            of_tiles = {own_rows, *(int(name.partition("x")[0]) for name in tried)}
            assert of_tiles >= {16, row["rows"] // 2, row["rows"]}
    assert ca.VARIANTS["fa_tc"] is own


def test_shares_are_of_the_faster_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's time is the sum of its calls; a copy reads and writes what fa_tc reads."""
    q, k, v = (np.zeros((1, 1, n, 8), np.float16) for n in (1, 600, 600))
    cupy = types.ModuleType("cupy")
    freed: list[bool] = []
    pool = types.SimpleNamespace(free_all_blocks=lambda: freed.append(True))
    cupy.get_default_memory_pool = lambda: pool  # type: ignore[attr-defined]
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
        Stream=lambda non_blocking: contextlib.nullcontext(),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)] * 3)
    monkeypatch.setattr(timing, "captured", lambda call, count: count)
    seconds = {decode.COPY: 4.0, decode.PLAIN_COPY: 3.0, decode.TAKEN: 2.0}

    def times(calls: dict[str, object], rounds: int) -> dict[str, list[float]]:
        found = {name: [seconds[name]] * rounds for name in calls}
        graphs = {name: count for name, count in calls.items() if isinstance(count, int)}
        assert graphs == {decode.COPY: 9, decode.TAKEN: 9}  # three times all inputs, 8 at least
        return found | {name: [9 * x for x in found[name]] for name in graphs}

    monkeypatch.setattr(timing, "time_interleaved", times)
    monkeypatch.setattr(decode.device, "clocks", dict)
    calls = {decode.COPY: decode.copies(k, v), decode.TAKEN: lambda q, k, v: None}
    row = decode.timed(calls, (q, k, v), rounds=15)
    assert row["copy"] == decode.PLAIN_COPY and row["seconds"] == seconds and freed
    assert row["share of copy"] == {decode.TAKEN: [0.75] * 3}
