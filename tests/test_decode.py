"""The experiment on few queries and many keys runs in small, and leaves the tiles as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cupyattn as ca
from experiments import decode


def test_decoding_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    assert decode.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and len(record["problems"]) == 8
    for row in record["problems"]:
        ways = row["ways"]
        assert [*ways] == [decode.SPLIT, decode.PORTABLE] and "seconds" not in row
        assert [facts["form"] for facts in ways.values()] == ["split", "portable"]
        assert all(facts["ok"] and facts["j2"] <= 1 for facts in ways.values())
        assert int(ways[decode.SPLIT]["tiles"].partition("x")[0]) >= row["rows"]
        kv = row["batch"] * row["heads_kv"] * row["len_kv"] * row["head_dim"]
        assert row["kv_bytes"] == 2 * 2 * kv


@pytest.mark.slow
def test_decoding_compares_tiles_of_the_split_form(tmp_path: Path) -> None:
    """Those that hold the rows and those that read K and V several times; then all is as before."""
    own = ca.VARIANTS["fa_tc"]
    file = tmp_path / "decode.json"
    assert decode.main(["--quick", "--tiles", "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["problems"]:
        tried = [name for name in row["ways"] if name not in (decode.SPLIT, decode.PORTABLE)]
        if row["rows"] <= 16:
            assert not tried
        else:
            assert {int(name.partition("x")[0]) for name in tried} >= {16, row["rows"] // 2}
    assert ca.VARIANTS["fa_tc"] is own
