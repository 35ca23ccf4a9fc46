"""Compile without a GPU: the results, the keys of the cache, and the error messages."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from cupyattn.compiler import architectures, devices, nvrtc, target
from cupyattn.compiler import modules as kc
from cupyattn.compiler.includes import headers_reached
from cupyattn.compiler.ptxas import parse_resources, parse_smem_bytes
from cupyattn.errors import KernelCompileError, KernelLaunchError, UnsupportedError

SOURCES = Path(__file__).parents[1] / "prims" / "sources"
ADD = kc.ModuleSpec(SOURCES / "compile_add.cu", (("CFG_COUNT", 64),))


@pytest.fixture
def copied(tmp_path: Path) -> kc.ModuleSpec:
    """A copy of compile_add and its headers that a test may edit."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for path in SOURCES.glob("compile_add*"):
        shutil.copy(path, folder)
    return kc.ModuleSpec(folder / "compile_add.cu", ADD.defines)


def compiled() -> int:
    return kc.cache_info().compiled


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", architectures.ARCHITECTURES)
def test_every_architecture_gives_ptx_and_a_whole_cubin(arch: str) -> None:
    if arch not in target.supported_architectures():
        version = ".".join(map(str, nvrtc.load().version))
        pytest.skip(f"NVRTC {version} does not know {arch}")
    binary = kc.build(ADD, arch)
    assert re.search(rf"^\.target {arch}\b", binary.ptx, re.MULTILINE)
    assert ".visible .entry add(" in binary.ptx
    assert binary.cubin.startswith(b"\x7fELF")
    assert len(binary.cubin) == elf_size(binary.cubin)
    assert binary.arch == arch and binary.nvrtc_version == nvrtc.load().version
    assert binary.smem_bytes == 64 * 4
    assert binary.kernels["add"].registers > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_translating_gives_the_ptx_of_the_binary(cold_cache: Path, arch: str) -> None:
    binary = kc.build(ADD, arch)
    alone = kc.translate(ADD, arch)
    assert (alone.ptx, alone.arch) == (binary.ptx, arch)
    assert alone.smem_bytes == binary.smem_bytes == 64 * 4
    assert not alone.cubin and not alone.kernels
    kc.cache_clear(disk=False)
    start = compiled()
    assert kc.translate(ADD, arch) == alone and kc.build(ADD, arch) == binary  # from their files
    assert compiled() == start


def elf_size(elf: bytes) -> int:
    """Bytes that an ELF64 header promises: where its last table ends."""

    def field(start: int, size: int) -> int:
        return int.from_bytes(elf[start : start + size], "little")

    programs = field(32, 8) + field(54, 2) * field(56, 2)
    sections = field(40, 8) + field(58, 2) * field(60, 2)
    return max(programs, sections)


def test_options_keep_subnormals_and_line_numbers() -> None:
    ptx = kc.build(ADD, "sm_80").ptx
    assert "add.f32" in ptx and ".ftz" not in ptx
    assert "compile_add.cu" in ptx and ".loc" in ptx


def test_resources_tell_spills_and_static_shared_memory() -> None:
    kernels = kc.build(kc.ModuleSpec(SOURCES / "compile_spill.cu"), "sm_80").kernels
    assert set(kernels) == {"spill", "add_static"}
    assert kernels["spill"].registers <= 32
    assert kernels["spill"].spill_stores > 0 and kernels["spill"].spill_loads > 0
    assert kernels["spill"].stack >= kernels["spill"].spill_stores // 2
    assert kernels["add_static"].spill_stores == kernels["add_static"].spill_loads == 0
    assert kernels["add_static"].static_smem == 64 * 4
    assert kernels["spill"].static_smem == 0


def test_spills_of_a_called_function_count_as_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "calls.cu"
    path.write_text(
        "__device__ __noinline__ float pick(const float* x, int n) {\n"
        "  float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i];\n"
        "  float s = 0; for (int i = 0; i < n; ++i) s += a[(int)x[i]]; return s; }\n"
        'extern "C" __global__ void calls(float* x) { x[0] = pick(x, 5); }\n'
    )
    assert kc.build(kc.ModuleSpec(path), "sm_80").kernels["calls"].stack >= 256


def test_a_report_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(KernelCompileError, match="report of ptxas on k was not understood"):
        parse_resources("ptxas info : Compiling entry function 'k' for 'sm_80'\nnothing else")


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        (".visible .global .align 4 .u32 smem_bytes = 99328;", 99328),
        (".visible .global .align 4 .u32 smem_bytes;", 0),  # an initialiser of 0 is left out
        (".global .align 4 .u32 other_smem_bytes = 7;\n", 0),
        ("", 0),
    ],
)
def test_smem_bytes_is_read_from_the_ptx(ptx: str, expected: int) -> None:
    assert parse_smem_bytes(ptx) == expected


def test_debug_reaches_the_kernel(
    cold_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "debug.cu"
    path.write_text(
        "#ifdef CUPYATTN_DEBUG\n"
        'extern "C" __device__ int smem_bytes = 1;\n'
        "#endif\n"
        'extern "C" __global__ void k() {}\n'
    )
    spec = kc.ModuleSpec(path)
    assert kc.build(spec, "sm_80").smem_bytes == 0
    monkeypatch.setenv("CUPYATTN_DEBUG", "1")
    assert kc.build(spec, "sm_80").smem_bytes == 1


# ---- the cache -----------------------------------------------------------------------------------


def test_an_edited_header_of_a_header_is_compiled_again(
    cold_cache: Path, copied: kc.ModuleSpec
) -> None:
    before = kc.build(copied, "sm_80")
    header = copied.path.with_name("compile_addend.cuh")
    header.write_text(header.read_text().replace("3.0f", "5.0f"))
    after = kc.build(copied, "sm_80")
    assert "0f40400000" in before.ptx and "0f40400000" not in after.ptx  # 3.0
    assert "0f40A00000" in after.ptx and after.cubin != before.cubin  # 5.0


def test_everything_in_the_key_tells_entries_apart(cold_cache: Path, copied: kc.ModuleSpec) -> None:
    start = compiled()
    other = kc.ModuleSpec(copied.source, (("CFG_COUNT", 96),))
    for spec, arch in [(copied, "sm_80"), (copied, "sm_86"), (other, "sm_80")]:
        kc.build(spec, arch)
    assert compiled() == start + 3
    for spec, arch in [(copied, "sm_80"), (copied, "sm_86"), (other, "sm_80")]:
        kc.build(spec, arch)
    assert compiled() == start + 3
    copied.path.write_text(copied.path.read_text() + "\n// edited\n")
    kc.build(copied, "sm_80")
    assert compiled() == start + 4


def test_a_later_process_reads_the_file(cold_cache: Path) -> None:
    first = kc.build(ADD, "sm_80")
    before = kc.cache_info()
    assert before.entries == 1 and before.folder == cold_cache and before.bytes > len(first.cubin)
    kc.cache_clear(disk=False)
    assert kc.build(ADD, "sm_80") == first
    after = kc.cache_info()
    assert (after.compiled, after.disk_hits) == (before.compiled, before.disk_hits + 1)
    assert kc.build(ADD, "sm_80") is kc.build(ADD, "sm_80")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_compiled_again(
    cold_cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    good = kc.build(ADD, "sm_80")
    (entry,) = cold_cache.glob("*.bin")
    content = entry.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    bad = {"truncated": content[:-100], "flipped": flipped, "empty": b"", "foreign": b"\x7fELF" * 9}
    entry.write_bytes(bad[damage])
    kc.cache_clear(disk=False)
    start = compiled()
    with caplog.at_level(logging.WARNING, "cupyattn"):
        assert kc.build(ADD, "sm_80") == good
    assert compiled() == start + 1
    assert "damaged: compiling again" in caplog.text
    assert entry.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # NOTE: a file in the folder's place refuses every user, root included.
    blocker = tmp_path / "not-a-folder"
    blocker.write_text("")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(blocker / "cache"))
    kc.cache_clear(disk=False)
    start = compiled()
    with caplog.at_level(logging.WARNING, "cupyattn"):
        first = kc.build(ADD, "sm_80")
        kc.build(ADD, "sm_86")
    assert caplog.text.count("cannot keep compiled kernels") == 1
    assert kc.build(ADD, "sm_80") is first  # memory answers
    assert compiled() == start + 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_no_error(cold_cache: Path) -> None:
    cold_cache.mkdir(mode=0o500)
    assert kc.build(ADD, "sm_80").kernels
    assert kc.cache_info().entries == 0


def test_clearing_deletes_the_files(cold_cache: Path) -> None:
    kc.build(ADD, "sm_80")
    kc.build(ADD, "sm_86")
    assert kc.cache_clear() == 2
    assert kc.cache_info().entries == 0
    assert list(cold_cache.iterdir()) == []


def test_threads_compile_a_spec_once(cold_cache: Path) -> None:
    start = compiled()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        binaries = list(pool.map(lambda _: kc.build(ADD, "sm_80"), range(32)))
    assert compiled() == start + 1
    assert all(binary is binaries[0] for binary in binaries)


_PROCESS = """
import sys, threading
from pathlib import Path
from cupyattn.compiler import modules as kc
specs = [kc.ModuleSpec(Path(sys.argv[1]), (("CFG_COUNT", n),)) for n in (32, 64, 96)]
threads = [threading.Thread(target=kc.build, args=(s, "sm_80")) for s in specs for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
info = kc.cache_info()
assert info.compiled + info.disk_hits == 3 and info.memory_hits == 9, info
print("good")
"""


def test_processes_and_threads_share_a_cold_cache(cold_cache: Path) -> None:
    """Every process sees whole entries only, and compiles no spec twice."""
    command = [sys.executable, "-c", _PROCESS, str(ADD.path)]
    root = str(Path(kc.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "CUPYATTN_LOG": ""}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, b"good\n"), err.decode()
        assert b"damaged" not in err
    assert len(list(cold_cache.glob("*.bin"))) == 3
    assert list(cold_cache.glob("*.tmp")) == []


# ---- headers -------------------------------------------------------------------------------------


def reached(tmp_path: Path, text: str) -> set[str]:
    toolkit = nvrtc.headers(nvrtc.load())
    found = headers_reached(tmp_path / "source.cu", text, tmp_path / "kernels", toolkit)
    return {os.path.basename(path) for path, _ in found}


def test_includes_are_followed_as_the_compiler_does(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "prims").mkdir(parents=True)
    (tmp_path / "beside.cuh").write_text('#  include   "prims/a.cuh"  // a comment\n')
    (tmp_path / "kernels" / "prims" / "a.cuh").write_text('#include "b.cuh"\n#include "a.cuh"\n')
    (tmp_path / "kernels" / "prims" / "b.cuh").write_text('#include "prims/a.cuh"\n')
    text = '/*\n#include "not_there.cuh"\n*/\n// #include "nor_there.cuh"\n#include "beside.cuh"\n'
    assert reached(tmp_path, text) == {"beside.cuh", "a.cuh", "b.cuh"}
    assert {"cuda_fp16.h", "cuda_fp16.hpp"} <= reached(tmp_path, "#include <cuda_fp16.h>\n")
    assert reached(tmp_path, "#include <the_compiler_has_this_one>\n") == set()


def test_a_missing_header_is_named(cold_cache: Path, copied: kc.ModuleSpec) -> None:
    copied.path.with_name("compile_addend.cuh").unlink()
    with pytest.raises(
        KernelCompileError, match=r'compile_add\.cuh: #include "compile_addend\.cuh"'
    ):
        kc.build(copied, "sm_80")


def test_a_header_that_lies_elsewhere_is_pointed_to(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "prims" / "score").mkdir(parents=True)
    (tmp_path / "kernels" / "prims" / "score" / "a.cuh").write_text("")
    told = r"not found in .*, but there is prims/score/a\.cuh"
    with pytest.raises(KernelCompileError, match=told):
        reached(tmp_path, '#include "prims/a.cuh"\n')


def test_an_include_that_names_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match="#include HEADER names no file"):
        reached(tmp_path, "#define HEADER <cuda_fp16.h>\n#include HEADER\n")


# ---- errors --------------------------------------------------------------------------------------


def test_a_broken_contract_shows_its_sentence() -> None:
    with pytest.raises(KernelCompileError) as caught:
        kc.build(kc.ModuleSpec(ADD.source, (("CFG_COUNT", 33),)), "sm_86")
    headline = str(caught.value).splitlines()[0]
    assert "COUNT must be a multiple of 32: a warp adds whole rows" in headline
    assert "compile_add.cu(5)" in headline
    assert "sm_86" in headline and "NVRTC" in headline
    assert "CFG_COUNT=33" in str(caught.value)
    assert "-ftz=false" in str(caught.value)


def test_a_syntax_error_is_named_with_file_and_line(copied: kc.ModuleSpec) -> None:
    header = copied.path.with_name("compile_addend.cuh")
    header.write_text("#pragma once\n#define ADDEND nonsense\n")
    with pytest.raises(KernelCompileError, match=r"compile_add\.cu\(\d+\): error: .*nonsense"):
        kc.build(copied, "sm_80")


def test_what_ptxas_refuses_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "huge.cu"
    path.write_text(
        'extern "C" __global__ void huge(float* x) { __shared__ float s[100000];\n'
        " s[threadIdx.x] = x[0]; __syncthreads(); x[0] = s[threadIdx.x + 1]; }\n"
    )
    with pytest.raises(KernelCompileError, match="too much shared data"):
        kc.build(kc.ModuleSpec(path), "sm_80")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match=r"absent\.cu"):
        kc.build(kc.ModuleSpec(tmp_path / "absent.cu"), "sm_80")


@pytest.mark.parametrize("arch", ["sm_75x", "compute_80", "90"])
def test_a_malformed_architecture_is_a_value_error(arch: str) -> None:
    with pytest.raises(ValueError, match=f"^arch must be sm_80, .*got '{arch}'"):
        kc.build(ADD, arch)


def test_an_architecture_that_this_nvrtc_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvrtc.load().__dict__, "capabilities", (80, 86, 90))
    with pytest.raises(UnsupportedError, match=r"does not know sm_100, only sm_80, sm_86, sm_90: "):
        kc.build(ADD, "sm_100")


def test_an_architecture_that_a_newer_nvrtc_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got 'sm_130'"):
        architectures.capability_of("sm_130")
    monkeypatch.setitem(nvrtc.load().__dict__, "capabilities", (80, 86, 90, 130))
    assert architectures.capability_of("sm_130") == 130


def test_an_older_nvrtc_only_lists_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvrtc.load().__dict__, "capabilities", (70, 80, 86, 90))
    assert target.supported_architectures() == ("sm_80", "sm_86", "sm_90", "sm_90a")


def test_a_given_nvrtc_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPYATTN_NVRTC", str(tmp_path / "libnvrtc.so"))
    with pytest.raises(UnsupportedError, match=r"libnvrtc\.so is not a usable NVRTC.*pip install"):
        nvrtc.load()


def test_no_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_loaded", {})
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libno-such-nvrtc.so", "libnor.so"]))
    message = r'not found: pip install -e "\.\[cuda13\]"'
    with pytest.raises(UnsupportedError, match=message) as caught:
        nvrtc.load()
    assert str(caught.value).count("pip install") == 1 and "libno-such" in str(caught.value)


def test_a_second_nvrtc_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = nvrtc.load()
    if usual.folder is None:
        pytest.skip("NVRTC was found by the system's loader, its path is not known")
    monkeypatch.setenv("CUPYATTN_NVRTC", usual.path)
    named = nvrtc.load()
    assert named is not usual and named.version == usual.version
    assert kc.build(ADD, "sm_80").kernels


def test_a_second_nvrtc_named_first_is_not_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that the process has loaded does not count as the environment's."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    second = str(tmp_path / "libnvrtc.so.13")
    monkeypatch.setattr(nvrtc, "_loaded", {second: SimpleNamespace(path=second)})
    monkeypatch.setattr(
        pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=second)
    )
    assert second not in list(nvrtc._candidates())


# ---- devices, without one ------------------------------------------------------------------------


def test_shared_memory_over_the_limit_names_numbers_and_tiles() -> None:
    devices.check_shared_memory(101376, 101376, "attn_fa.cu [CFG_BLOCK_KV=64]")
    with pytest.raises(KernelLaunchError) as caught:
        devices.check_shared_memory(101377, 101376, "attn_fa.cu [CFG_BLOCK_KV=64]")
    message = str(caught.value)
    assert "101377 bytes" in message and "101376" in message and "CFG_BLOCK_KV=64" in message
    order = [
        message.index(tile) for tile in ("tiles.block_kv", "tiles.num_stages", "tiles.block_q")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("capability", "hopper", "expected"),
    [(80, False, "sm_80"), (86, False, "sm_86"), (90, False, "sm_90"), (90, True, "sm_90a")],
)
def test_a_device_gets_its_own_architecture(capability: int, hopper: bool, expected: str) -> None:
    assert devices.device_architecture(capability, hopper) == expected


def test_a_device_newer_than_nvrtc_gets_the_newest_of_its_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(nvrtc.load().__dict__, "capabilities", (80, 90, 100))
    assert devices.device_architecture(87) == "sm_80"
    assert devices.device_architecture(103) == "sm_100"
    with pytest.raises(UnsupportedError, match=r"does not know compute capability 12\.0"):
        devices.device_architecture(120)


@pytest.mark.parametrize(
    ("capability", "hopper", "message"),
    [
        (75, False, r"compute capability 7\.5 is not supported, 8\.0 and newer are"),
        (80, True, r"Hopper form runs on compute capability 9\.0 alone, this device has 8\.0"),
        (100, True, r"Hopper form runs on compute capability 9\.0 alone, this device has 10\.0"),
    ],
)
def test_devices_that_cannot(capability: int, hopper: bool, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        devices.device_architecture(capability, hopper)


@pytest.mark.parametrize("arch", ["sm_90", "sm_89", "sm_90a"])
def test_machine_code_of_another_generation_is_refused(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"machine code for {arch} does not run on"):
        devices.check_runs_on(arch, 86)
    devices.check_runs_on("sm_80", 86)


def test_sources_under_sm90_are_hopper_forms() -> None:
    assert kc.ModuleSpec("sm90/attn_fa_tc.cu").hopper
    assert not kc.ModuleSpec("attn_fa_tc.cu").hopper


class PretendKernel:
    max_dynamic_shared_size_bytes = 0


class PretendModule:
    """Stands in for CuPy's module, which opens its file when a kernel is requested."""

    made = 0

    def __init__(self, *, path: str) -> None:
        type(self).made += 1
        self.path = Path(path)

    def get_function(self, name: str) -> PretendKernel:
        assert self.path.read_bytes().startswith(b"\x7fELF")
        return PretendKernel()


@pytest.fixture
def pretend(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> type[PretendModule]:
    """Stand in for CuPy with a device of compute capability 8.6."""

    class Device:
        id = 0
        compute_capability = "86"
        attributes: ClassVar = {"MaxSharedMemoryPerBlockOptin": 101376}

    class Made(PretendModule):
        made = 0

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device), RawModule=Made)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return Made


def test_load_allows_shared_memory_and_loads_once(pretend: type[PretendModule]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: kc.load(ADD), range(16)))
    assert pretend.made == 1 and all(module is modules[0] for module in modules)
    assert modules[0].binary.arch == "sm_86"
    assert modules[0].kernel("add").max_dynamic_shared_size_bytes == 256
    with pytest.raises(ValueError, match="entry must be one of add, got 'subtract'"):
        modules[0].kernel("subtract")
    assert kc.load(ADD, "sm_80").binary.arch == "sm_80"


def test_load_refuses_before_it_loads(pretend: type[PretendModule]) -> None:
    with pytest.raises(KernelLaunchError, match=r"needs 524288 bytes .* allows 101376"):
        kc.load(kc.ModuleSpec(ADD.source, (("CFG_COUNT", 131072),)))
    with pytest.raises(UnsupportedError, match=r"sm_90 does not run on compute capability 8\.6"):
        kc.load(ADD, "sm_90")
    assert pretend.made == 0


# ---- devices, with one ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_load_runs_the_kernel_and_is_kept() -> None:
    import cupy

    module = kc.load(ADD)
    assert kc.load(ADD) is module
    x = cupy.arange(64, dtype=cupy.float32)
    y = cupy.empty_like(x)
    module.kernel("add")((1,), (64,), (x, y), shared_mem=module.binary.smem_bytes)
    assert (y == cupy.roll(x, -1) + 3).all()
    with pytest.raises(ValueError, match="entry must be one of add, got 'subtract'"):
        module.kernel("subtract")


@pytest.mark.gpu
def test_load_allows_large_shared_memory_and_refuses_too_much() -> None:
    import cupy

    count = 20000  # 80,000 bytes: above the 48 KB that need no permission
    module = kc.load(kc.ModuleSpec(ADD.source, (("CFG_COUNT", count),)))
    x = cupy.zeros(count, dtype=cupy.float32)
    module.kernel("add")((1,), (32,), (x, x), shared_mem=module.binary.smem_bytes)
    cupy.cuda.Device().synchronize()
    with pytest.raises(KernelLaunchError, match="reduce tiles.block_kv"):
        kc.load(kc.ModuleSpec(ADD.source, (("CFG_COUNT", 32 * 4096),)))


@pytest.mark.gpu
def test_threads_load_a_module_once() -> None:
    spec = kc.ModuleSpec(ADD.source, (("CFG_COUNT", 128),))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        modules = set(pool.map(lambda _: id(kc.load(spec)), range(16)))
    assert len(modules) == 1
