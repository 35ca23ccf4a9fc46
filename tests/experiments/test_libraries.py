"""Libraries compared with our modules: the page agrees with the record, and the script runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("missing", ["", "CuPy sees no CUDA device"])
def test_calls_that_need_a_device_are_timed_on_one(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"ours": int, "theirs": int}
    for name in ("nvrtc_calls", "jax_calls", "nccl_calls"):
        monkeypatch.setattr(libraries, name, lambda: ways)
    monkeypatch.setattr(libraries, "nvml_calls", lambda pci_bus_id: ways)
    monkeypatch.setattr(libraries, "missing", lambda modules: False)
    monkeypatch.setattr(libraries.device, "device_missing", lambda: missing)
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(pci_bus_id=""), nccl=SimpleNamespace(available=True)
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    timed = {row["part"] for row in libraries.calls(1)}
    everywhere = {"NVRTC", "XLA's calls"}
    assert timed == (everywhere if missing else everywhere | {"NVML", "NCCL"})


@pytest.mark.slow
def test_libraries_are_measured_in_small(tmp_path: Path) -> None:
    """Whatever is installed: what needs a library that is not is left out."""
    file = tmp_path / "libraries.json"
    assert libraries.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert {"import cupyattn", "NVML", "NVRTC"} <= {row["part"] for row in record["rows"]}
    assert all(row["samples"][0] > 0 for row in [*record["rows"], *record["trims"]])
    assert [row["part"] for row in record["lines"]] == ["NVML", "NVRTC", "XLA's calls", "NCCL"]
