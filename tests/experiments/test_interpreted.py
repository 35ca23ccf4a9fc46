"""CPU seconds of interpreted calls: the experiment runs in small, the page has its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments._harness import recording
from experiments.speed import interpreted


@pytest.mark.slow
def test_the_experiment_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "interpreted.json"
    assert interpreted.main(["--quick", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["variant"] == "fa" and 0 < row["again"] < row["warm"] < row["empty"]


def test_the_page_has_the_record() -> None:
    page = interpreted.PAGE.read_text(encoding="utf-8")
    inside = page.split(interpreted.BEGIN)[1].split(interpreted.END)[0]
    assert inside == f"\n{interpreted.section(recording.stored(interpreted.NAME))}\n", (
        "run python -m experiments.speed.interpreted --stored"
    )
