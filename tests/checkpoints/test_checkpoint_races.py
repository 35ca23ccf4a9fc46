"""Folders that are shared or hostile: several conversions at once, pipes, sockets, links."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import Analysis, convert, dequantize, open_checkpoint, open_kandinsky
from tests.checkpoints.checkpoint_files import SMALL, content, source

writer = sys.modules["cupyattn.checkpoints.writer"]
ROOT = Path(__file__).parents[2]
#: Waits for a moment that all processes know, converts, and says how it went in one line.
RACER = """
import sys, time
from cupyattn import Int8Config
from cupyattn.checkpoints import analyze, convert
path, out, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
config = Int8Config(min_elements_for_int8=100)
known = analyze(path, config)
time.sleep(max(0.0, start - time.time()))
try:
    convert(path, out, analysis=known, max_shard_bytes=20_000)
    print("won")
except (FileExistsError, BlockingIOError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("attempt", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_of_several_conversions_one_wins(tmp_path: Path, attempt: int) -> None:
    path, out = source(tmp_path / "model"), tmp_path / "out"
    convert(path, tmp_path / "whole", SMALL, max_shard_bytes=20_000)
    start = time.time() + 2 + attempt
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path), str(out), str(start + 0.004 * i * attempt)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(3)
    ]  # fmt: skip
    found = [racer.communicate(timeout=120) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers), found
    said = sorted(text.strip() for text, _ in found)
    assert said.count("won") == 1, found
    for line in said:
        assert line == "won" or "another process" in line or "exists already" in line
    assert content(out) == content(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_a_lock_that_was_removed_while_it_was_opened(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The winner ends between the moments when the loser opens the lock and when it holds it."""
    path, out = source(tmp_path / "model"), tmp_path / "out"
    flock, calls = writer.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            convert(path, out, SMALL)  # a whole conversion, which removes the lock
        flock(descriptor, operation)

    monkeypatch.setattr(writer.fcntl, "flock", late)
    with pytest.raises(FileExistsError, match="another process has written .*out meanwhile"):
        convert(path, out, SMALL)
    monkeypatch.undo()
    convert(path, tmp_path / "whole", SMALL)
    assert content(out) == content(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to("there")
    convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "there" / "config.json").exists()


# ---- what is no regular file ---------------------------------------------------------------------


def irregular(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the names of sockets must be short
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
@pytest.mark.parametrize(
    "name",
    [
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json", "config.json", "alone.safetensors",
        "analysis.json", "model.yaml",
    ],
)  # fmt: skip
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    path = source(tmp_path / "model")
    irregular(path / name, kind)
    with pytest.raises(
        (OSError, ValueError), match=f"is {kind}, a regular|no file in|link out of the folder"
    ):
        if name == "analysis.json":
            Analysis.load(path / name)
        elif name == "model.yaml":
            open_kandinsky(path, path / name)
        elif name == "alone.safetensors":
            open_checkpoint(path / name)
        else:
            convert(path, tmp_path / "out", SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("kind", ["a pipe", "a socket"])
def test_small_files_that_are_no_files_stay_behind(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = source(tmp_path / "model")
    irregular(path / "notes.txt", kind)
    done = convert(path, tmp_path / "out", SMALL)
    assert done.left_out == {"notes.txt": "it is no regular file"}
    assert not (tmp_path / "out" / "notes.txt").exists() and "notes.txt" in caplog.text


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["absolute", "relative", "through a folder", "a whole folder"])
def test_links_out_of_the_folder_are_not_copied(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, secret = source(tmp_path / "model"), tmp_path / "secret" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    (path / "inner.txt").write_text("inner")
    (path / "inside.txt").symlink_to("inner.txt")
    link = path / "tokens.json"
    if how == "through a folder":
        (path / "folder").symlink_to(secret.parent)
        link.symlink_to("folder/key")
    else:
        to = {"absolute": str(secret), "relative": "../secret/key", "a whole folder": "../secret"}
        link.symlink_to(to[how])
    for work, given, out in ((convert, path, "int8"), (convert, path, "dry")):
        done = work(given, tmp_path / out, SMALL, dry_run=out == "dry")
        said = done.left_out["tokens.json"]
        assert said == f"it is a link out of the folder, to {os.path.realpath(link)}"
        assert done.to_dict()["left_out"] == done.left_out
    assert f"tokens.json is not copied: {said}" in caplog.text
    found = content(tmp_path / "int8")
    assert "tokens.json" not in found and {"inner.txt", "inside.txt", "LICENSE"} <= set(found)
    (tmp_path / "int8" / "mine").symlink_to(secret)
    assert set(dequantize(tmp_path / "int8", tmp_path / "back").left_out) == {"mine"}
    assert "mine" not in content(tmp_path / "back")


def test_a_configuration_that_is_a_link_out_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source(tmp_path / "model")
    (tmp_path / "credentials").write_text(json.dumps({"password": "secret"}))
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("../credentials")
    assert cli.main(["convert", str(path), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "config.json is a link out of the folder" in error and error.count("\n") == 1
    assert "secret" not in error and not (tmp_path / "out").exists()


def test_a_snapshot_of_a_cache_has_its_files_in_blobs(tmp_path: Path) -> None:
    """All files of a snapshot in Hugging Face's cache are links to the model's blobs."""
    snapshot = source(tmp_path / "models--x" / "snapshots" / "0123")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    done = convert(snapshot, tmp_path / "int8", SMALL)
    assert not done.left_out and {"config.json", "LICENSE"} <= set(content(tmp_path / "int8"))
    assert not (tmp_path / "int8" / "LICENSE").is_symlink()
    assert ca.checkpoints.open_checkpoint(tmp_path / "int8").tensors
