"""Libraries beside modules of our own: what the page says is the record's, and the script runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments._harness import recording
from experiments.speed import libraries


def test_the_page_is_written_from_the_record() -> None:
    said = libraries.PAGE.read_text(encoding="utf-8").partition(libraries.BEGIN)[2]
    expected = libraries.section(recording.stored("libraries"))
    assert said.partition(libraries.END)[0].strip() == expected, (
        "run python -m experiments.speed.libraries --stored"
    )


def test_lines_of_code_are_counted_without_text() -> None:
    source = '"""Text.\n\nMore."""\n\n# a comment\ndef f():\n    """Text."""\n    return 1  # one\n'
    assert libraries._code_lines(source) == 2


@pytest.mark.slow
def test_libraries_are_measured_in_small(tmp_path: Path) -> None:
    """Whatever is installed: what needs a library that is not is left out."""
    file = tmp_path / "libraries.json"
    assert libraries.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert {"import cupyattn", "NVML", "NVRTC"} <= {row["part"] for row in record["rows"]}
    assert all(row["samples"][0] > 0 for row in [*record["rows"], *record["trims"]])
    assert [row["part"] for row in record["lines"]] == ["NVML", "NVRTC", "XLA's calls", "NCCL"]
