"""Kernels in files, not registered: ``verify`` and ``profile`` launch them on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupyattn import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_kernel" / "attention.cu"


def test_the_example_is_verified_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(EXAMPLE)]) == 0
    printed = capsys.readouterr().out
    assert "on the device" in printed and "verify: passed, 9 distributions" in printed
    times = tmp_path / "times.json"
    assert cli.main(["profile", str(EXAMPLE), "--json", str(times)]) == 0
    record = json.loads(times.read_text())
    assert len(record["seconds"]) == 3 and all(1e-6 < s < 1e-2 for s in record["seconds"])
    assert record["j2"] <= 1 and "TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".cu", ".ptx"])
def test_a_fault_is_not_timed(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupyattn.compiler import modules as compiler

    file = tmp_path / "attention.cu"
    text = EXAMPLE.read_text()
    assert "min(TILE, length - start)" in text
    file.write_text(text.replace("min(TILE, length - start)", "min(TILE, length - 1 - start)"))
    (tmp_path / "attention.toml").write_text(EXAMPLE.with_suffix(".toml").read_text())
    if suffix == ".ptx":
        ptx = compiler.translate(compiler.ModuleSpec(file), "sm_80").ptx
        file = file.with_suffix(suffix)
        file.write_text(ptx)
    assert cli.main(["profile", str(file)]) == 1
    assert "it is not timed" in capsys.readouterr().out
    assert cli.main(["verify", str(file), "--distribution", "normal"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out
