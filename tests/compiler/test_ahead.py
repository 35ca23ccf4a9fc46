"""Compilations that are begun before anybody needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyattn.compiler import ahead
from cupyattn.compiler.modules import ModuleSpec, build, cache_info
from cupyattn.errors import KernelCompileError


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


def test_what_does_not_compile_is_told_by_who_needs_it(cold_cache: Path, tmp_path: Path) -> None:
    (path := tmp_path / "kernel.cu").write_text("no kernel at all")
    ahead.begin([(ModuleSpec(path), "sm_80"), (ModuleSpec(tmp_path / "missing.cu"), "sm_80")])
    with pytest.raises(KernelCompileError, match="no kernel|error"):
        build(ModuleSpec(path), "sm_80")
