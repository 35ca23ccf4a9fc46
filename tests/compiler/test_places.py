"""Equal sources in two checkouts share compiled kernels, and each finds its own files in them."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cupyattn.compiler import modules as kc
from cupyattn.compiler import places
from cupyattn.errors import KernelCompileError

PRIMS = Path(__file__).parents[1] / "prims" / "sources"
KERNEL = 'extern "C" __global__ void store(int* x) { *x = value(); }\n'


def checkout(folder: Path) -> kc.ModuleSpec:
    """A source with a header of its own in a folder of that name."""
    folder.mkdir(parents=True)
    for path in PRIMS.glob("compile_add*"):
        shutil.copy(path, folder)
    return kc.ModuleSpec(folder / "compile_add.cu", (("CFG_COUNT", 64),))


def files_of(binary: kc.Binary) -> set[str]:
    """Files that the PTX names."""
    return set(re.findall(r'\.file\s+\d+\s+"([^"]*)"', binary.ptx))


def key_of(spec: kc.ModuleSpec) -> str:
    """Key of its machine code."""
    return kc._request(spec, "sm_80", "sm_80", None).key


@pytest.mark.parametrize("compile_one", [kc.build, kc.translate], ids=["machine code", "PTX"])
def test_two_checkouts_share_an_entry(
    tmp_path: Path, cold_cache: Path, compile_one: Callable[[kc.ModuleSpec, str], kc.Binary]
) -> None:
    one, other = checkout(tmp_path / "one"), checkout(tmp_path / "deeper" / "other")
    before = kc.cache_info().compiled
    first = compile_one(one, "sm_80")
    for forget in (False, True):  # the other's own paths, from memory and from the file
        if forget:
            kc.cache_clear(disk=False)
        second = compile_one(other, "sm_80")
        assert kc.cache_info().compiled == before + 1
        assert len(list(cold_cache.glob("*.bin"))) == 1
        for spec, binary in ((one, first), (other, second)):
            assert str(spec.path) in files_of(binary)
            assert places.PLACEHOLDER not in binary.ptx + binary.log
        assert first.kernels == second.kernels and len(first.cubin) == len(second.cubin)


def test_machine_code_names_the_files_of_its_reader(tmp_path: Path, cold_cache: Path) -> None:
    one, other = checkout(tmp_path / "one"), checkout(tmp_path / "other")
    first, second = kc.build(one, "sm_80").cubin, kc.build(other, "sm_80").cubin
    assert str(one.path.parent).encode() + b"/" in first
    assert str(other.path.parent).encode() + b"/" in second
    assert b"/other/" not in first and b"/one/" not in second
    assert b"/cupyattn---" not in first + second


def test_a_checkout_deeper_than_a_link_keeps_the_placeholder_in_machine_code(
    tmp_path: Path, cold_cache: Path
) -> None:
    spec = checkout(tmp_path / ("d" * 120) / ("e" * 120))
    binary = kc.build(spec, "sm_80")
    assert places.PLACEHOLDER.encode() in binary.cubin
    assert str(spec.path) in files_of(binary)


def test_an_edited_source_or_header_is_another_entry(tmp_path: Path, cold_cache: Path) -> None:
    one, other = checkout(tmp_path / "one"), checkout(tmp_path / "other")
    keys = {key_of(spec) for spec in (one, other)}
    assert len(keys) == 1
    header = other.path.with_name("compile_addend.cuh")
    header.write_text(header.read_text() + "\n")
    keys.add(key_of(other))
    assert len(keys) == 2


def test_the_same_text_found_elsewhere_is_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header beside the source precedes the library's header, even with the same text."""
    header = "__device__ int value() { return 1; }\n"
    keys = set()
    for place in ("kernels/prims", "source/prims"):
        root = tmp_path / place.partition("/")[0] / "root"
        for folder in ("kernels/prims", "source"):
            (root / folder).mkdir(parents=True)
        (root / "kernels" / "prims" / "one.cuh").write_text(header)
        (root / place).mkdir(exist_ok=True)
        (root / place / "one.cuh").write_text(header)
        source = root / "source" / "store.cu"
        source.write_text('#include "prims/one.cuh"\n' + KERNEL)
        monkeypatch.setattr(kc, "KERNELS", root / "kernels")
        keys.add(key_of(kc.ModuleSpec(source)))
    assert len(keys) == 2


@pytest.mark.parametrize("place", ["source", "header", "debug", "long"])
def test_where_paths_are_data_each_checkout_has_its_own_entry(
    place: str, tmp_path: Path, cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``__FILE__`` becomes numbers in PTX, which nothing replaces."""
    if place == "debug":
        monkeypatch.setenv("CUPYATTN_DEBUG", "1")
    if place == "long":  # no link of the right length fits
        long = tmp_path / ("t" * 200)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
    keys = set()
    for name in ("one", "other"):
        spec = checkout(tmp_path / name)
        if place in ("source", "header"):
            edited = spec.path if place == "source" else spec.path.with_name("compile_addend.cuh")
            here = "__device__ const char* here() { return __FILE__; }\n"
            edited.write_text(f"{edited.read_text()}\n{here}")
        keys.add(key_of(spec))
        assert str(spec.path) in files_of(kc.translate(spec, "sm_80"))
    assert len(keys) == 2


def test_errors_name_the_file_that_was_given(tmp_path: Path, cold_cache: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void k() { no_such_name; }\n')
    with pytest.raises(KernelCompileError) as raised:
        kc.build(kc.ModuleSpec(path), "sm_80")
    assert f"{path}(1)" in str(raised.value) and "cupyattn-" not in str(raised.value)


def test_no_links_are_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with places.Places("/a", "/b", "/c").linked() as folder:
        assert len(folder) == places.LENGTH
        assert (Path(folder) / "source").readlink() == Path("/b")
    assert list(tmp_path.iterdir()) == []
