"""The compile cache trusts only files that this user wrote: every other case compiles again."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import files
from cupyattn.cli import main, verify
from cupyattn.compiler import disk_cache
from cupyattn.compiler import modules as kc
from cupyattn.compiler.binary import write_entry
from cupyattn.reference import exact

SOURCES = Path(__file__).parents[1] / "prims" / "sources"
ADD = kc.ModuleSpec(SOURCES / "compile_add.cu", (("CFG_COUNT", 64),))
#: A user that is neither this one nor root.
STRANGER = 54321

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no users by number")


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or a folder be another user's."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


def cached(cold_cache: Path) -> tuple[kc.Binary, Path]:
    """A binary and its entry; this process has forgotten it."""
    binary = kc.build(ADD, "sm_80")
    (entry,) = cold_cache.glob("*.bin")
    kc.cache_clear(disk=False)
    return binary, entry


def assert_compiled_again(binary: kc.Binary, caplog: pytest.LogCaptureFixture, said: str) -> None:
    before = kc.cache_info()
    with caplog.at_level(logging.WARNING, "cupyattn"):
        assert kc.build(ADD, "sm_80") == binary
        kc.cache_clear(disk=False)
    after = kc.cache_info()
    assert (after.compiled, after.disk_hits) == (before.compiled + 1, before.disk_hits)
    assert caplog.text.count(said) == 1, caplog.text


# ---- whose it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_not_used(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    binary, entry = cached(cold_cache)
    content = entry.read_bytes()
    cold_cache.chmod(mode)
    assert_compiled_again(binary, caplog, f"the cache {cold_cache} is not used: other users may")
    assert entry.read_bytes() == content
    kc.build(ADD, "sm_86")
    assert len(list(cold_cache.iterdir())) == 1, "nothing is written there"
    assert caplog.text.count("is not used") == 1, "said once"


def test_a_folder_of_another_user_is_not_used(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary, _ = cached(cold_cache)
    give_away(cold_cache, monkeypatch)
    assert_compiled_again(binary, caplog, f"the cache {cold_cache} is not used: user ")


def test_a_folder_behind_the_link_of_another_user_is_not_used(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_cache.mkdir()
    link = cold_cache.with_name("link")
    link.symlink_to(cold_cache, target_is_directory=True)
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(link))
    binary, _ = cached(cold_cache)
    start = kc.cache_info().disk_hits
    assert kc.build(ADD, "sm_80") == binary
    assert kc.cache_info().disk_hits == start + 1, "the user's own link is followed"
    kc.cache_clear(disk=False)
    give_away(link, monkeypatch)
    assert_compiled_again(binary, caplog, f"the cache {link} is not used: user ")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
def test_an_entry_of_another_user_is_not_used(
    cold_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binary, entry = cached(cold_cache)
    os.chown(entry, STRANGER, -1)
    assert_compiled_again(binary, caplog, f"is not used: user {STRANGER} owns it, this is user 0")
    assert entry.stat().st_uid == os.getuid(), "it has been replaced"


def test_an_entry_that_others_may_write_to_is_not_used(
    cold_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binary, entry = cached(cold_cache)
    entry.chmod(0o666)
    assert_compiled_again(binary, caplog, "other users may write to it (mode 0666, chmod go-w ends")
    assert stat.S_IMODE(entry.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_a_loose_umask_makes_no_cache_that_is_then_refused(cold_cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        binary, _ = cached(cold_cache)
        hits = kc.cache_info().disk_hits
        assert kc.build(ADD, "sm_80") == binary
        assert kc.cache_info().disk_hits == hits + 1
        q = np.ones((1, 1, 2, 8), np.float16)
        verify.cached_exact(q, q, q)
        assert verify.reference_info()[0] == 1
    finally:
        os.umask(before)
    assert disk_cache.why_unused(cold_cache / "reference") is None


def test_root_is_trusted_by_every_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a cache that was filled when a container was built, for all of its users."""
    as_root = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: STRANGER)
    assert files.writable_by_others(as_root) is None
    other = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, 99, 0, 0, 0, 0, 0))
    assert files.writable_by_others(other) == f"user 99 owns it, this is user {STRANGER}"
    monkeypatch.delattr(os, "getuid")
    assert files.writable_by_others(other) is None


def test_the_command_says_that_the_cache_is_not_used(
    cold_cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cold_cache.mkdir()
    assert main(["cache", "--json", str(tmp_path / "x.json")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(cold_cache)
    cold_cache.chmod(0o777)
    assert main(["cache", "--json", str(tmp_path / "x.json")]) == 0
    why = "other users may write to it (mode 0777, chmod go-w ends that)"
    assert capsys.readouterr().out.splitlines()[0] == f"{cold_cache} is not used: {why}"
    assert json.loads((tmp_path / "x.json").read_text())["not_used"] == why


# ---- what it is ----------------------------------------------------------------------------------


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a path to a socket has at most about 100 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def as_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], None]] = {
    "is a pipe": as_pipe,
    "is a socket": as_socket,
    "is a symbolic link": as_link,
    "is a folder": Path.mkdir,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_opened(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    binary, entry = cached(cold_cache)
    entry.unlink()
    KINDS[kind](entry)
    assert kc.cache_info().entries == 0
    assert_compiled_again(binary, caplog, f"{kind}, a regular file is needed")


@pytest.mark.parametrize("kind", KINDS)
def test_nor_is_a_reference(cold_cache: Path, kind: str) -> None:
    q = np.random.default_rng(0).standard_normal((1, 1, 4, 8)).astype(np.float16)
    expected = exact.attention_exact(q, q, q)
    verify.cached_exact(q, q, q)
    (path,) = (cold_cache / "reference").glob("*.npz")
    path.unlink()
    KINDS[kind](path)
    np.testing.assert_array_equal(verify.cached_exact(q, q, q)[0], expected)


@pytest.mark.parametrize("follow", [False, True])
def test_a_regular_file_is_opened(tmp_path: Path, follow: bool) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    with files.open_regular(tmp_path / "x", follow_links=follow) as file:
        assert file.read() == b"content" and not os.get_inheritable(file.fileno())
    if follow:
        with files.open_regular(tmp_path / "link") as file:
            assert file.read() == b"content"
    else:
        with pytest.raises(OSError, match="link' is a symbolic link, a regular file is needed"):
            files.open_regular(tmp_path / "link", follow_links=False)
    with pytest.raises(FileNotFoundError):
        files.open_regular(tmp_path / "absent", follow_links=follow)


# ---- rubbish under a valid checksum --------------------------------------------------------------


def rubbish(binary: kc.Binary) -> dict[str, bytes]:
    """Payloads that were not compiled here, by their fault."""

    def payload(**changes: Any) -> bytes:
        changed = replace(binary, **changes)
        write_entry("rubbish", changed)
        found = disk_cache.read("rubbish")
        assert found is not None
        (disk_cache.cache_folder() / "rubbish.bin").unlink()
        return found

    head, _, cubin = payload().partition(b"\n")
    facts = json.loads(head)
    return {
        "empty": b"",
        "random": np.random.default_rng(0).bytes(5000),
        "no JSON": b"{" + cubin,
        "deep": b"[" * 100_000,
        "a list": b"[]\n" + cubin,
        "an unknown field": json.dumps({**facts, "x": 1}).encode() + b"\n" + cubin,
        "a field less": json.dumps({n: x for n, x in facts.items() if n != "ptx"}).encode(),
        "PTX of another type": json.dumps({**facts, "ptx": 5}).encode() + b"\n" + cubin,
        "no PTX": payload(ptx=""),
        "another architecture": payload(arch="sm_90"),
        "another compiler": payload(nvrtc_version=(1, 0)),
        "no machine code": payload(cubin=b""),
        "no ELF file": payload(cubin=b"rubbish" * 99),
        "no entry point": payload(cubin=binary.cubin[:4] + bytes(len(binary.cubin))),
        "no report": payload(log=""),
        "half a report": payload(log=binary.log.replace("registers", "gold")),
        "other resources": payload(kernels={}),
        "more shared memory": payload(smem_bytes=10**9),
    }


def test_a_valid_checksum_over_rubbish_is_compiled_again(
    cold_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binary, entry = cached(cold_cache)
    for kind, payload in rubbish(binary).items():
        disk_cache.write(entry.stem, payload)
        caplog.clear()
        assert disk_cache.read(entry.stem) == payload, kind
        assert_compiled_again(binary, caplog, "is no kernel")
    hits = kc.cache_info().disk_hits
    assert kc.build(ADD, "sm_80") == binary and kc.cache_info().disk_hits == hits + 1


def test_an_entry_under_another_name_is_compiled_again(
    cold_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may rename entries could give one kernel in place of another."""
    binary, entry = cached(cold_cache)
    kc.build(kc.ModuleSpec(ADD.source, (("CFG_COUNT", 96),)), "sm_80")
    (other,) = set(cold_cache.glob("*.bin")) - {entry}
    os.replace(other, entry)
    kc.cache_clear(disk=False)
    assert_compiled_again(binary, caplog, "is damaged: compiling again")


def test_what_the_device_refuses_is_compiled_once_more(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ELF file that looks right, and that the driver does not load."""
    binary, entry = cached(cold_cache)
    bad = replace(binary, cubin=binary.cubin[:64] + b"compile_add" + bytes(500) + binary.cubin[64:])
    write_entry(entry.stem, bad)
    loaded: list[kc.Binary] = []

    def load_module(found: kc.Binary) -> str:
        loaded.append(found)
        if found.cubin != binary.cubin:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        return "module"

    monkeypatch.setattr(kc, "_load_module", load_module)
    with caplog.at_level(logging.WARNING, "cupyattn"):
        assert kc._loaded(ADD, "sm_80", kc.build(ADD, "sm_80")) == "module"  # type: ignore[comparison-overlap]
    assert [x.cubin for x in loaded] == [bad.cubin, binary.cubin]
    assert "CUDA_ERROR_INVALID_IMAGE): compiled again" in caplog.text
    kc.cache_clear(disk=False)
    assert kc.build(ADD, "sm_80") == binary, "the entry has been replaced"


def test_what_the_compiler_made_and_the_device_refuses_is_an_error(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[kc.Binary] = []

    def load_module(found: kc.Binary) -> None:
        loaded.append(found)
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(kc, "_load_module", load_module)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        kc._loaded(ADD, "sm_80", kc.build(ADD, "sm_80"))
    assert len(loaded) == 1
