"""Compilations that begin before their kernels are needed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupyattn.compiler import ahead
from cupyattn.compiler.modules import ModuleSpec, build, cache_clear, cache_info, is_compiled
from cupyattn.errors import KernelCompileError
from cupyattn.runtime import ready


def test_what_was_begun_is_compiled_once(cold_cache: Path, tmp_path: Path) -> None:
    specs = []
    for number in range(3):
        path = tmp_path / f"kernel_{number}.cu"
        path.write_text(f'extern "C" __global__ void store(int* x) {{ *x = {number}; }}')
        specs.append(ModuleSpec(path))
    before = cache_info().compiled
    ahead.begin((spec, "sm_80") for spec in specs)
    for number, spec in enumerate(specs):
        assert f", {number};" in build(spec, "sm_80").ptx
    assert cache_info().compiled == before + len(specs)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2)])
def test_a_call_begins_what_it_would_have_to_compile(
    kept: tuple[int, ...], cold_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached kernels are read in the call's own thread."""
    (path := tmp_path / "kernel.cu").write_text(
        'extern "C" __global__ void store(int* x) { *x = N; }'
    )
    specs = [ModuleSpec(path, (("N", number),)) for number in range(3)]
    for number in kept:
        build(specs[number], "sm_80")
    cache_clear(disk=False)  # another process
    assert [is_compiled(spec, "sm_80") for spec in specs] == [n in kept for n in range(3)]
    begun: list[ModuleSpec] = []
    monkeypatch.setattr(ahead, "begin", lambda jobs: begun.extend(one for one, _ in jobs))
    monkeypatch.setattr(ready.compiler, "is_loaded", lambda spec, arch=None: False)
    device = SimpleNamespace(compute_capability="80")
    cuda = SimpleNamespace(Device=lambda: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    launches = [SimpleNamespace(module=spec) for spec in specs]
    ready.compile_side_by_side(SimpleNamespace(plans=[SimpleNamespace(launches=launches)]), None)
    assert begun == ([] if len(kept) == 3 else specs)


def test_what_does_not_compile_is_told_by_who_needs_it(cold_cache: Path, tmp_path: Path) -> None:
    (path := tmp_path / "kernel.cu").write_text("no kernel at all")
    ahead.begin([(ModuleSpec(path), "sm_80"), (ModuleSpec(tmp_path / "missing.cu"), "sm_80")])
    with pytest.raises(KernelCompileError, match="no kernel|error"):
        build(ModuleSpec(path), "sm_80")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_compiles(cold_cache: Path, tmp_path: Path) -> None:
    """It would wait for ever for locks that threads of its parent hold."""
    (path := tmp_path / "kernel.cu").write_text(
        '#include <cuda_fp16.h>\nextern "C" __global__ void store(int* x) { *x = N; }'
    )
    specs = [ModuleSpec(path, (("N", number),)) for number in range(9)]
    ahead.begin((spec, "sm_80") for spec in specs[1:])
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        build(specs[0], "sm_80")
        os._exit(0)
    end, ended = time.monotonic() + 60, (0, 0)
    while ended[0] == 0 and time.monotonic() < end:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert ", 8;" in build(specs[8], "sm_80").ptx  # dropped or not, who needs it gets it
