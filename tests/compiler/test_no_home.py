"""Without a home folder, the cache is in the temporary folder, and never in a folder `~`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cupyattn.compiler import disk_cache

KEY = "0" * 64


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME, and no entry of the user: what `expanduser` then leaves as it is."""
    for name in ("HOME", "XDG_CACHE_HOME", "CUPYATTN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(disk_cache, "_warned", set())
    return tmp_path


@pytest.mark.parametrize("given", [None, "~/kernels"])
def test_the_cache_lies_in_the_temporary_folder(
    given: str | None, homeless: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if given:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", given)
    folder = disk_cache.cache_folder()
    assert folder.parent == homeless / "tmp" and folder.name == f"cupyattn-{os.getuid()}"
    disk_cache.write(KEY, b"a kernel")
    assert disk_cache.read(KEY) == b"a kernel" and disk_cache.cache_folder() == folder
    assert not list((homeless / "here").iterdir())
    (said,) = caplog.messages
    assert "without a home folder" in said and str(folder) in said


def test_a_folder_that_another_may_write_to_is_not_used(
    homeless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk_cache.cache_folder()
    folder.mkdir()
    folder.chmod(0o777)
    disk_cache.write(KEY, b"a kernel")
    assert disk_cache.read(KEY) is None and not list(folder.iterdir())
    assert any("is not used" in one for one in caplog.messages)
