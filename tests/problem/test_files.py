"""Files are there whole or not at all, and belong to the user as any other file does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from cupyattn import quantize
from cupyattn.cli import output
from cupyattn.compiler import disk_cache
from cupyattn.diffusion import storage
from cupyattn.files import replacing


def save_operands(path: Path) -> None:
    x = np.ones((1, 1, 2, 8), np.float16)
    quantize(x, x, x).save(path)


def save_binary(path: Path) -> None:
    disk_cache.write("0" * 64, b"content")
    (entry,) = disk_cache.entries()
    os.replace(entry, path)


WRITERS = {
    "JSON": lambda path: output.write_json(path, {"x": 1}),
    "calibration": lambda path: storage.write(path, {"x": np.ones(2, np.float32)}, {}),
    "operands": save_operands,
    "binary": save_binary,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_are_those_of_any_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, umask: int
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        WRITERS[writer](tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


def test_nothing_is_seen_before_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("old", [None, "old"])
def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "x"
    if old is not None:
        path.write_text(old)
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replacing(path) as one:
        with replacing(path) as other:
            one.write(b"one")
            other.write(b"other")
        assert path.read_text() == "other"
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["x"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), replacing(tmp_path / "nowhere" / "x"):
        pass


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Nor is a device, as where ``--json /dev/null`` is given by root."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        refused = pytest.raises(OSError, match="is no regular file: name one to write to")
        with refused, replacing(tmp_path / name) as file:
            file.write(b"x")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"] and (tmp_path / "pipe").is_fifo()
