"""Two caches of compiled kernels are compared module by module, line information aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyattn.compiler import modules
from cupyattn.compiler.modules import ModuleSpec
from experiments.tuning import same_ptx


def compiled(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill a cache with one small kernel, of this source."""
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
    modules.cache_clear(disk=False)
    modules.build(ModuleSpec("prepare/unpack.cu"), "sm_80", source)
    return folder


def test_comments_and_lines_change_nothing_and_instructions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = modules.read_source(ModuleSpec("prepare/unpack.cu"))
    before = compiled(tmp_path / "before", source, monkeypatch)
    moved = compiled(tmp_path / "moved", "// a line more\n" + source, monkeypatch)
    assert same_ptx.main([str(before), str(moved)]) == 0
    assert "1 modules of 1 sources are the same" in capsys.readouterr().out
    later = source.replace("row0 = blockIdx.x", "row0 = 1 + blockIdx.x")
    other = compiled(tmp_path / "other", later, monkeypatch)
    assert same_ptx.main([str(before), str(other)]) == 1
    assert "another PTX: prepare/unpack.cu for sm_80" in capsys.readouterr().out


def test_caches_with_nothing_to_compare_fail(tmp_path: Path) -> None:
    assert same_ptx.main([str(tmp_path), str(tmp_path)]) == 1
