"""The compile cache keeps its size: the deleted entries, their order, and concurrent processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.cli import main
from cupyattn.compiler import disk_cache, size_limit
from cupyattn.compiler import modules as kc

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "prims" / "sources"
ADD = kc.ModuleSpec(SOURCES / "compile_add.cu", (("CFG_COUNT", 64),))
OTHER = kc.ModuleSpec(ADD.source, (("CFG_COUNT", 96),))
HOUR = 3600


def key_of(name: str) -> str:
    """A key in the form of kernels' keys, 64 hexadecimal digits, from any name."""
    return hashlib.sha256(name.encode()).hexdigest()


def keys() -> set[str]:
    return {path.stem for path in disk_cache.entries()}


def written(cold_cache: Path, *names: str, size: int = 100) -> None:
    """Write entries of these names, the youngest first."""
    for age, name in enumerate(names):
        disk_cache.write(key_of(name), bytes(size))
        path = cold_cache / f"{key_of(name)}.bin"
        os.utime(path, (10**9 - age, 10**9 - age))


def named(*names: str) -> set[str]:
    return {key_of(name) for name in names}


# ---- which limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("300B", 300), ("2KB", 2000), ("2kib", 2048), (" 1.5 MiB ", 3 * 2**19),
        ("3GB", 3 * 10**9), ("1TiB", 2**40), ("none", None), ("None", None),
    ],
)  # fmt: skip
def test_a_size_is_read(text: str, size: int | None) -> None:
    assert size_limit.parse(text, "--limit") == size


@pytest.mark.parametrize("text", ["0", "0.1", "-1", "1e9", "1G", "GiB", "inf", "nan", "5 apples"])
def test_what_is_no_size_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="^--limit must be a size such as 512MiB or 2GB, or none"):
        size_limit.parse(text, "--limit")


def test_the_environment_comes_before_the_folder_and_that_before_the_default(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert size_limit.current() == size_limit.Limit(2**30, "default")
    size_limit.store(5000)
    assert size_limit.current() == size_limit.Limit(5000, "cupyattn cache --limit")
    size_limit.store(None)
    assert size_limit.current().bytes is None
    monkeypatch.setenv("CUPYATTN_CACHE_SIZE", "7KB")
    assert size_limit.current() == size_limit.Limit(7000, "CUPYATTN_CACHE_SIZE")
    monkeypatch.delenv("CUPYATTN_CACHE_SIZE")
    size_limit.forget()
    assert size_limit.current().source == "default"


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff\xfe", b"0"])
def test_a_damaged_limit_is_the_default_and_said_once(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    size_limit.store(1)
    (cold_cache / "size_limit").write_bytes(content)
    with caplog.at_level(logging.WARNING, "cupyattn"):
        assert size_limit.current().bytes == size_limit.current().bytes == size_limit.DEFAULT
    assert caplog.text.count("the cache keeps to its default size") == 1


def test_a_wrong_variable_is_told_before_anything_is_compiled(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_SIZE", "much")
    monkeypatch.setattr(kc, "_compile", None)
    with pytest.raises(ValueError, match="CUPYATTN_CACHE_SIZE must be a size .* got 'much'"):
        kc.build(ADD, "sm_80")


# ---- what is deleted -----------------------------------------------------------------------------

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "read"]),
        st.integers(0, 5),  # which key
        st.integers(1, 900),  # bytes
        st.sampled_from([1, 60, HOUR // 2, 2 * HOUR]),  # seconds until the next
    ),
    max_size=40,
)


@given(steps=_STEPS, limit=st.integers(300, 2500))
def test_the_least_recently_used_go_first(
    steps: list[tuple[str, int, int, int]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against a model: a dictionary of (last use, bytes) by key, use being marked once an hour."""
    model: dict[str, tuple[int, int]] = {}
    now = 10**9
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(disk_cache.time, "time", lambda: float(now))
        for action, number, size, pause in steps:
            now += pause
            key = key_of(str(number))
            if action == "read":
                assert (disk_cache.read(key) is None) == (key not in model)
                if key in model and now - model[key][0] > HOUR:
                    model[key] = now, model[key][1]
            else:
                disk_cache.write(key, bytes(size))
                path = disk_cache.cache_folder() / f"{key}.bin"
                os.utime(path, (now, now))
                model[key] = now, path.stat().st_size
                size_limit.trim(limit, newest=key)
                for old in sorted(model, key=lambda name: model[name][0]):
                    if sum(held for _, held in model.values()) > limit and old != key:
                        del model[old]
            assert keys() == set(model)


def test_a_folder_with_room_is_listed_once(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings: list[Path] = []
    listed = size_limit._listed

    def counted(folder: Path) -> Any:
        listings.append(folder)
        return listed(folder)

    monkeypatch.setattr(size_limit, "_listed", counted)
    for number in range(20):
        disk_cache.write(key_of(str(number)), bytes(100))
        size_limit.wrote(10**6, key_of(str(number)))
    assert len(listings) == 1 and len(keys()) == 20
    size_limit.wrote(10**6 + 1, key_of("0"))
    assert len(listings) == 2, "room for another limit is not known"


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), max_size=40),
    limit=st.integers(1000, 20_000),
)
def test_processes_that_write_in_turns_keep_to_the_limit(
    sizes: list[tuple[int, int]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each knows of its own writes alone; an entry that was just written may be one too many."""
    rooms: dict[int, dict[Path, tuple[int | None, float]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for number, (process, size) in enumerate(sizes):
            patch.setattr(size_limit, "_room", rooms.setdefault(process, {}))
            key = key_of(str(number))
            disk_cache.write(key, bytes(size))
            size_limit.wrote(limit, key)
            held = [path.stat().st_size for path in disk_cache.cache_folder().glob("*.bin")]
            assert sum(held) <= limit or len(held) == 1


def test_use_is_marked_once_an_hour(cold_cache: Path) -> None:
    written(cold_cache, "one")
    path = cold_cache / f"{key_of('one')}.bin"
    now = time.time()
    for age, marked in ((HOUR / 2, False), (2 * HOUR, True), (-2 * HOUR, True)):
        os.utime(path, (now - age, now - age))
        before = path.stat().st_mtime
        assert disk_cache.read(key_of("one")) == bytes(100)
        after = path.stat().st_mtime
        assert (after != before) == marked and (not marked or abs(after - now) < 60)


def test_a_folder_that_refuses_the_mark_still_answers(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(cold_cache, "one")
    refused = []

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(disk_cache.os, "utime", refuse)
    assert disk_cache.read(key_of("one")) == bytes(100) and len(refused) == 1


def test_an_entry_used_or_replaced_since_it_was_listed_stays(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(cold_cache, "newest", "replaced", "used", "old")
    listed = size_limit._listed(cold_cache)
    disk_cache.read(key_of("used"))
    disk_cache.write(key_of("replaced"), bytes(100))
    monkeypatch.setattr(size_limit, "_listed", lambda folder: listed)
    assert size_limit.trim(1, newest=key_of("newest"))[0] == 1
    assert keys() == named("newest", "replaced", "used")


def test_what_another_process_has_deleted_counts(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(cold_cache, "young", "old")
    listed = size_limit._listed(cold_cache)
    (cold_cache / f"{key_of('old')}.bin").unlink()
    monkeypatch.setattr(size_limit, "_listed", lambda folder: listed)
    assert size_limit.trim(listed[0][0].size) == (0, 0)
    assert keys() == named("young")


def test_files_of_a_process_that_died_are_deleted(cold_cache: Path) -> None:
    written(cold_cache, "one")
    dead, alive = (cold_cache / f".{key_of(name)}.bin.0123abcd.tmp" for name in ("dead", "alive"))
    for path in (dead, alive):
        path.write_bytes(b"half")
    os.utime(dead, (time.time() - 2 * HOUR,) * 2)
    assert size_limit.trim(None) == (0, 0)
    assert alive.exists() and not dead.exists() and keys() == named("one")


def test_other_files_of_the_folder_neither_count_nor_go(cold_cache: Path) -> None:
    """A user may have chosen a folder that holds more than kernels."""
    written(cold_cache, "young", "old", size=1000)
    others = [
        cold_cache / name
        for name in ("weights.bin", ".weights.bin.0123.tmp", f"{key_of('x')}.bin.tmp", "x.tmp",
                     f"{key_of('y').upper()}.bin")
    ]  # fmt: skip
    for path in others:
        path.write_bytes(bytes(9000))
        os.utime(path, (0, 0))
    assert size_limit.trim(2500) == (0, 0)
    assert size_limit.trim(1500)[0] == 1 and keys() == named("young")
    assert kc.cache_clear() == 1 and all(path.exists() for path in others)


def test_nothing_is_deleted_from_a_folder_that_is_not_used(cold_cache: Path) -> None:
    written(cold_cache, "one")
    cold_cache.chmod(0o777)
    assert size_limit.trim(1) == (0, 0) and keys() == named("one")


def test_a_folder_that_is_not_there_or_no_folder_has_nothing_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file", "file/below"):
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / name))
        assert size_limit.trim(1) == (0, 0)


# ---- kernels -------------------------------------------------------------------------------------


def test_a_kernel_in_memory_outlives_its_file_and_asks_no_disk(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_SIZE", "1KiB")
    first = kc.build(ADD, "sm_80")
    assert len(keys()) == 1, "the newest entry stays, however large it is"
    (kept,) = keys()
    second = kc.build(OTHER, "sm_80")
    assert len(keys()) == 1 and kept not in keys()
    for name in ("read", "write"):
        monkeypatch.setattr(disk_cache, name, None)
    for name in ("current", "trim"):
        monkeypatch.setattr(size_limit, name, None)
    assert kc.build(ADD, "sm_80") is first and kc.build(OTHER, "sm_80") is second


_BUILDS = """
import logging, os, sys
from pathlib import Path
from cupyattn.compiler import modules as kc
logging.basicConfig(level=logging.WARNING)
for turn in range(2):
    for count in (32, 64, 96, 128):
        binary = kc.build(kc.ModuleSpec(Path(sys.argv[1]), (("CFG_COUNT", count),)), "sm_80")
        assert binary.smem_bytes == 4 * count and binary.cubin.startswith(b"\\x7fELF")
    kc.cache_clear(disk=False)
print("good")
"""

_TRAFFIC = """
import logging, random, sys
from cupyattn.compiler import disk_cache, size_limit
logging.basicConfig(level=logging.WARNING)
answered, draw = 0, random.Random(int(sys.argv[1]))
for _ in range(200):
    number = draw.randrange(12)
    key, payload = f"{number:064x}", bytes([number]) * (5000 * (number + 1))
    found = disk_cache.read(key)
    if found is None:
        disk_cache.write(key, payload)
        size_limit.trim(150_000, newest=key)
    else:
        answered += 1
        assert found == payload, key
assert answered > 10, answered
print("good")
"""


def together(cold_cache: Path, script: str, arguments: list[str], **environment: str) -> None:
    """Run a script in several processes at the same time; each must say that all was good."""
    given = {**os.environ, "CUPYATTN_CACHE_DIR": str(cold_cache), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, argument], env=given | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for argument in arguments
    ]  # fmt: skip
    for process in running:
        said, errors = process.communicate(timeout=120)
        assert (said, errors) == ("good\n", "")


def test_processes_compile_while_others_delete_what_they_read(cold_cache: Path) -> None:
    """No failure and no warning: an entry that is gone is compiled again."""
    together(cold_cache, _BUILDS, [str(ADD.path)] * 2, CUPYATTN_CACHE_SIZE="20KiB")
    sizes = [path.stat().st_size for path in disk_cache.entries()]
    assert 0 < sum(sizes) <= max(20 * 1024, *sizes)


def test_entries_are_whole_or_gone_under_heavy_traffic(cold_cache: Path) -> None:
    """Twelve entries of 390 kB in 150 kB: three processes read, write and delete all the time."""
    together(cold_cache, _TRAFFIC, ["1", "2", "3"])
    assert 0 < sum(path.stat().st_size for path in disk_cache.entries()) <= 150_000
    assert {path.suffix for path in cold_cache.iterdir()} == {".bin"}, "nothing unfinished is left"


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_shows_sets_and_keeps_to_the_limit(
    cold_cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    written(cold_cache, "young", "old", size=1000)
    said = tmp_path / "said.json"
    assert main(["cache", "--json", str(said)]) == 0
    assert "2 kernels, 2.1 KiB; 1.0 GiB at most (default)" in capsys.readouterr().out
    assert json.loads(said.read_text())["limit_bytes"] == 2**30
    assert main(["cache", "--limit", "2KiB"]) == 0
    printed = capsys.readouterr().out
    assert "deleted 1 kernel, 1.0 KiB" in printed and keys() == named("young")
    assert "1 kernel, 1.0 KiB; 2.0 KiB at most (cupyattn cache --limit)" in printed
    assert main(["cache", "--limit", "none"]) == 0
    assert "no limit (cupyattn cache --limit)" in capsys.readouterr().out
    assert main(["cache", "--limit", "default"]) == 0
    assert "1.0 GiB at most (default)" in capsys.readouterr().out
    assert main(["cache", "--limit", "0"]) == 2
    assert "--limit must be a size such as" in capsys.readouterr().err
    monkeypatch.setenv("CUPYATTN_CACHE_SIZE", "3MiB")
    assert main(["cache", "--limit", "2KiB"]) == 2
    assert "--limit has no effect beside CUPYATTN_CACHE_SIZE=3MiB" in capsys.readouterr().err
    assert main(["cache"]) == 0
    assert "3.0 MiB at most (CUPYATTN_CACHE_SIZE)" in capsys.readouterr().out


def test_what_another_process_deletes_is_not_counted(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(cold_cache, "one", "two")
    gone = [*disk_cache.entries(), cold_cache / f"{key_of('deleted')}.bin"]
    monkeypatch.setattr(disk_cache, "entries", lambda: gone)
    info = kc.cache_info()
    assert (info.entries, info.bytes) == (2, sum(path.stat().st_size for path in gone[:2]))
