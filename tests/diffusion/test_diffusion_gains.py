"""experiments/diffusion/diffusion_gains.py: runs in small, and stops in time on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion import pruning
from cupyattn.measure import device
from experiments._harness import recording
from experiments.diffusion import diffusion_gains


def test_gains_for_diffusion_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "diffusion_gains.json"
    assert diffusion_gains.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    once = len(diffusion_gains.ONE_MODE)
    assert len(rows) == 2 * len(diffusion_gains.WAYS) - once and all(row["ok"] for row in rows)
    assert {row["mode"] for row in rows} == set(diffusion_gains.MODES)
    lost = [row["error against all keys"] for row in rows if "pruned" in row["way"]]
    assert len(lost) == 2 and all(0 < x < 1 for x in lost)
    (scratch,) = (row["scratch_bytes"] for row in rows if "long" in row["way"])
    assert 0 < scratch < 10 * 300 * 128 * 2
    timed = {
        "speed_ratio": [4.0, 3.9, 4.1], "density": 0.2, "of 1 / density": [0.8, 0.7, 0.9],
        "seconds": {"way": 2e-3}, "against": "x",
    }  # fmt: skip
    assert diffusion_gains._gain(timed) == ["2 ms", "x", "4.00 [3.90, 4.10]", "80%"]


def test_codes_of_kept_keys_are_those_that_a_layer_attends_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 16)).astype(np.float16) for n in (20, 70, 70))
    where: dict[str, Any] = {"backend": "interpret", "arch": "sm_90a"}
    attend = ca.Int8Attention(2, 16, 50, enable_pruning=True, **where)
    o, kept = attend(q, k, v, 0, mode="balanced", return_mask=True)
    quant = attend.quant_config(q, k, 0)
    z = diffusion_gains.kept_codes((q, k, v), 56, quant, **where)
    assert ca.attention(z, **where).tobytes() == o.tobytes()
    few = (x[kept].reshape(1, 2, 56, 16) for x in (k, v))
    assert diffusion_gains.holds_bound(o, (q, *few), "balanced", quantized=z) <= 1


def test_gains_for_diffusion_stop_in_time_and_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device: times and inputs are planted, the loop is the one that runs."""
    monkeypatch.setattr(device, "device_missing", lambda: "")
    monkeypatch.setattr(device, "environment", dict)
    monkeypatch.setattr(diffusion_gains, "inputs", lambda *_, **__: ())
    seen = []

    def measured(qkv: Any, shape: Any, name: str, mode: str, *_: Any, **__: Any) -> Any:
        seen.append((*shape, name, mode))
        ratio = {"seconds": {"way": 1.0}, "against": "x", "speed_ratio": [1.0, 1.0, 1.0]}
        titles = dict(zip(("batch", "heads", "length", "way", "mode"), seen[-1], strict=True))
        return {**titles, **ratio, "ok": True}

    clock = iter(range(1000))
    monkeypatch.setattr(diffusion_gains, "measured", measured)
    monkeypatch.setattr(diffusion_gains.time, "monotonic", lambda: next(clock))
    file = tmp_path / "gains.json"
    assert diffusion_gains.main(["--seconds", "5", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert len(record["rows"]) == len(seen) == 5
    every = {(*shape, name) for shape, names in diffusion_gains.CELLS for name in names}
    assert {tuple(x[:4]) for x in (*record["missing"], *map(list, seen))} == every


def test_ways_are_chosen_by_how_they_begin(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "gains.json"
    assert diffusion_gains.main(["--quick", "--only", "norm", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["way"].startswith("norm and rope")
    with pytest.raises(SystemExit):
        diffusion_gains.main(["--only", "nothing"])
    assert "--only must be how one of calibrated scales, " in capsys.readouterr().err


def test_the_page_says_what_the_record_says() -> None:
    page = diffusion_gains.PAGE.read_text(encoding="utf-8")
    said = page.partition(diffusion_gains.BEGIN)[2].partition(diffusion_gains.END)[0]
    assert said.strip() == diffusion_gains.section(recording.stored("diffusion_gains"))


def test_rows_measured_again_stand_in_place_of_the_old_and_say_so() -> None:
    place = {"batch": 1, "heads": 2, "length": 3, "mode": "balanced"}
    record = {
        "rows": [place | {"way": "a", "ok": True}, place | {"way": "b", "ok": True}],
        "command": "all",
    }
    part = {
        "rows": [place | {"way": "b", "ok": False}, place | {"way": "c", "ok": True}],
        "command": "--only b", "environment": {"revision": "0123456789abc"},
    }  # fmt: skip
    found = diffusion_gains.merged(record, part)
    assert found["command"] == "all"
    assert [(r["way"], r["ok"], r.get("command")) for r in found["rows"]] == [
        ("a", True, None), ("b", False, "--only b"), ("c", True, "--only b"),
    ]  # fmt: skip
    assert diffusion_gains.apart(found["rows"]) == "; b at 0123456789; c at 0123456789"


def test_a_record_of_something_else_is_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was written")

    monkeypatch.setattr(diffusion_gains.output, "write_json", refuse)
    monkeypatch.setattr(diffusion_gains, "update_page", refuse)
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text('{"experiment": "ladder", "environment": {}}', encoding="utf-8")
    broken.write_text("no", encoding="utf-8")
    for file, why in ((other, "a record of 'ladder'"), (broken, "is no JSON"), (tmp_path, "")):
        assert diffusion_gains.main(["--merge", str(file)]) != 0
        error = capsys.readouterr().err
        assert why in error and "Traceback" not in error and str(file) in error
