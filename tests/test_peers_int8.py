"""fa_int8 beside other 8-bit kernels: what the experiment does without a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import others8, peers_int8


def test_8_bit_peers_run_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers_int8.json"
    assert peers_int8.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    ((found,), (compared,)) = record["problems"], record["compared"]
    assert record["backend"] == "mirror" and all(row["ok"] for row in found["rows"])
    ours = {f"{name}{given}" for name in peers_int8.QUANT for given in ("", others8.GIVEN)}
    assert set(compared["errors"]) == {peers_int8.FULL, *ours}
    errors = [compared["errors"][name] for name in (peers_int8.FULL, *peers_int8.QUANT)]
    assert errors == sorted(errors)  # 16 bits, balanced, aggressive
    assert all(one["ratio"] is None for one in compared["ratios"].values())
    capsys.readouterr()
    assert peers_int8.main(["--quick", "--accuracy"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in peers_int8.DISTRIBUTIONS)
