"""The race of one launch against two for layers of few rows: in small, and what its tables say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.speed.gemm import Size
from experiments.tuning import int8_layers_few_rows as race


@pytest.mark.frameworks
def test_the_race_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "few.json"
    assert race.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["m"] for row in rows] == list(race.QUICK_ROWS)
    for row in rows:
        size = Size(row["label"], row["m"], row["n"], row["k"])
        fused = race.candidates(size).keys()
        assert row["same bits"].keys() == {race.DEFAULT, race.TWO, *fused}
        assert all(row["same bits"].values()) and bool(fused) == (row["m"] <= 64)
    assert "70 x 160 x 1040" in capsys.readouterr().out
    # What its tables say of times.
    row = rows[0] | {"samples": {
        race.DEFAULT: [2.0] * 15, race.TWO: [3.0] * 15, "16x64 w4 s8 x2": [1.0] * 15,
        race.BF16: [3.0] * 15,
    }}  # fmt: skip
    assert [line[0] for line in race.table(row)[1]][-3:] == [race.DEFAULT, race.TWO, race.BF16]
    (line,) = race.summary([row])[1]
    assert line[:3] == ["small, 1", "fused", "1.500 [1.500, 1.500]"]
    assert line[3].startswith("1.000") and line[4] == "-" and line[-1] == "16x64 w4 s8 x2"


def test_what_is_compiled_beforehand() -> None:
    """Each candidate once, and the launches of both strategies."""
    size = Size("small", 5, 160, 1040)
    entries = [module.source for module, _ in race.launches_of(size, np)]
    fused = [name for name in entries if name.endswith("_fused.cu")]
    assert len(fused) == len(race.candidates(size)) == len(entries) - 4
