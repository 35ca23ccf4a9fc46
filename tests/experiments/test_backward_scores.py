"""A bias and masks in the backward pass beside other libraries: runs in small, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.speed import backward_scores


def test_it_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "backward_scores.json"
    asked = ["--cells", "64:1024:float16", "--features", "bias", "--json", str(file)]
    assert backward_scores.main(["--quick", *asked]) == 0
    found = json.loads(file.read_text())["cells"]
    assert [one["feature"] for one in found] == ["bias"]
    assert all(row["ok"] for one in found for row in one["rows"])
    assert "beside the fastest library" in capsys.readouterr().out


def test_a_result_is_held_to_its_bound_and_anothers_to_its_error() -> None:
    """Options with heads are cut to the head that is judged."""
    options = {"bias": np.zeros((1, 2, 3, 3), np.float16), "mask": np.ones((3, 3), bool)}
    own = backward_scores.of_one_head(options)
    assert own["bias"].shape == (1, 1, 3, 3) and own["mask"].shape == (3, 3)
    x = np.ones((1, 2, 3, 8), np.float16)
    given = (x, x, x, x, x, np.full((1, 2, 3), np.log(3) + 8**0.5, np.float32))
    right = [np.zeros_like(x), np.zeros_like(x), x]
    for name in ("taken", "cuDNN"):
        assert backward_scores.judge(name, right, given, options)["ok"]
        wrong = [*right[:2], 2 * x]
        assert not backward_scores.judge(name, wrong, given, options)["ok"]
