"""The race of tiles for products of few rows: a run at a small size, and its tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.tuning import gemm_few_rows


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_few_rows_race_in_small(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "few.json"
    assert gemm_few_rows.main(["--quick", "--strategy", strategy, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    rows = record["rows"]
    assert record["experiment"] == "gemm_few_rows" + "_channel" * (strategy == "channel")
    for row, m in zip(rows, gemm_few_rows.QUICK_ROWS, strict=True):
        assert row["m"] == m and row["shares"].keys() == gemm_few_rows.candidates(m).keys()
        assert 0.2 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    assert re.search("20 x 160 x 1024 +portable ", capsys.readouterr().out)
    # What its tables say of times.
    row = rows[0] | {"samples": {"default": [2.0] * 15, "torch FP16": [3.0] * 15}}
    best = "sm90 64x64 w8 s12, 4 blocks"
    row["samples"][best] = [1.0] * 15
    assert [line[0] for line in gemm_few_rows.table(row)[1]][-2:] == [best, "default"]
    assert gemm_few_rows.summary([row])[1] == [
        ["1 x 160 x 1024", "portable", "1.500 [1.500, 1.500]", "0.500 [0.500, 0.500]", best]
    ]


def test_more_rows_race_hopper_tiles_alone() -> None:
    few, many = gemm_few_rows.candidates(64), gemm_few_rows.candidates(512)
    assert any(name.startswith("portable") for name in few)
    assert {name.split()[0] for name in many} == {"default", "sm90"}
    assert "sm90 128x256 w12 s4, 2 blocks" in many.keys() - few.keys()
    tiles = [options["tiles"] for options in many.values() if options]
    assert len(tiles) == len(set(tiles)) and set(gemm_few_rows.HOPPER_TILES) <= set(tiles)
