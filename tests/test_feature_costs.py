"""experiments/feature_costs.py: runs in small, and writes its page from a record alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.request import Options, resolve
from experiments import common, feature_costs
from experiments.common import Problem


def test_it_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    small = ["--quick", "--head-dims", "16", "--rungs", "fa_tc", "fa_int8"]
    assert feature_costs.main([*small, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    (found,) = record["problems"]
    assert record["backend"] == "mirror"
    cells = {(row["rung"], row["feature"]) for row in found["rows"]}
    assert cells == {
        (rung, name) for rung in ("fa_tc", "fa_int8") for name in feature_costs.FEATURES
    }
    assert all(row["ok"] and "seconds" not in row for row in found["rows"])
    assert "rope interleaved" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the record has no times"):
        feature_costs.page(record)


def test_each_feature_is_the_only_one() -> None:
    problem = Problem(1, 2, 64, 16)
    inputs = problem.draw(on_device=False)
    seen = set()
    for feature in feature_costs.FEATURES:
        options = feature_costs.options_of(feature, problem, np)
        operands = feature_costs.operands_of(feature, inputs)
        call = resolve(*operands, Options(**options)).call
        plain = resolve(*inputs, Options()).call
        changed = {n for n, x in vars(call).items() if x != getattr(plain, n)}
        assert changed or feature == feature_costs.PLAIN, feature
        seen.add((tuple(sorted(changed)), call.rope, call.mask, str(options.get("mask"))))
    assert len(seen) == len(feature_costs.FEATURES)


def record_with_times() -> dict[str, Any]:
    rows = []
    for rung, plain in (("fa_tc", 1e-3), ("fa_int8", 2e-3)):
        for i, (name, text) in enumerate(feature_costs.FEATURES.items()):
            form = "sm90" if rung == "fa_tc" and name not in ("mask", "bias") else "portable"
            row = {"rung": rung, "feature": name, "description": text, "form": form, "ok": True,
                   "j2": 0.1, "seconds": plain * (1 + i / 10), "samples": []}  # fmt: skip
            if i:
                row["ratio"] = [1 + i / 10, 1 + i / 10 - 0.01, 1 + i / 10 + 0.02]
            rows.append(row)
    rows[2]["ok"] = False
    device = {"name": "A device", "driver": "1.2", "capability": 90}
    return {
        "backend": "cuda", "rounds": 30,
        "environment": {"device": device, "nvrtc": "13.0", "revision": "0123456789abcdef"},
        "problems": [{"problem": {"name": "B4 H16 4096 hd64 float16 normal"}, "rows": rows}],
    }  # fmt: skip


def test_the_page_is_written_from_the_record(tmp_path: Path) -> None:
    file = tmp_path / "FEATURES.md"
    feature_costs.update_page(record_with_times(), file)
    text = file.read_text()
    assert "A device, driver 1.2, NVRTC 13.0, revision 0123456789." in text
    assert "|  | fa_tc | fa_int8 |" in text and "| plain | 1 ms | 2 ms |" in text
    assert "| lse | x 1.10 [1.09, 1.12] | x 1.10 [1.09, 1.12] |" in text
    assert "| causal | misses its bound | x 1.20" in text
    assert "| mask | x 1.50 [1.49, 1.52] † | x 1.50 [1.49, 1.52] |" in text
    assert text.count("| rope interleaved |") == 2


def test_the_committed_page_is_what_the_committed_record_says() -> None:
    """Neither is there without the other."""
    record = common.RESULTS / "feature_costs.json"
    assert record.exists() == feature_costs.PAGE.exists()
    if record.exists():
        assert feature_costs.PAGE.read_text(encoding="utf-8") == feature_costs.page(
            common.stored("feature_costs")
        )
