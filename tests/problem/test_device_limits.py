"""Tiles larger than any device are refused where there is none: mirror, interpreter, `explain`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.architectures import CAPABILITIES, shared_memory_of
from cupyattn.compiler.contracts import least_shared_bytes
from cupyattn.errors import KernelLaunchError
from cupyattn.kernels import ladder
from cupyattn.measure import device
from cupyattn.ops.attention import ATTENTION, resolved
from tests.support.own_kernels import renamed

LARGE = ca.Tiles(128, 128, 4)


def x(head_dim: int = 256) -> np.ndarray:
    return np.ones((1, 1, 8, head_dim), np.float16)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_every_backend_refuses(backend: str) -> None:
    said = "at least 460288 bytes of shared memory, sm_80 allows 166912"
    given = {"variant": "fa", "tiles": LARGE, "backend": backend}
    for call in (ca.attention, ca.plan, ca.explain, ca.kernel_form):
        with pytest.raises(KernelLaunchError, match=said):
            call(x(), x(), x(), **given)
    assert ca.attention(x(16), x(16), x(16), **given).shape == (1, 1, 8, 16)


def test_the_limits_are_those_of_the_architecture_that_is_named() -> None:
    tiles = ca.Tiles(128, 64, 4)  # 183,808 bytes at head_dim 192
    given = {"variant": "fa", "tiles": tiles}
    o = ca.attention(x(192), x(192), x(192), arch="sm_90", **given)
    assert np.array_equal(o, x(192))
    for arch, limit in (("sm_80", 166912), ("sm_86", 101376), ("sm_120", 101376)):
        with pytest.raises(KernelLaunchError, match=f"{arch} allows {limit}"):
            ca.attention(x(192), x(192), x(192), arch=arch, **given)
    said = ca.explain(x(64), x(64), x(64), variant="fa")
    assert "within the limits of sm_80" in said
    assert {shared_memory_of(f"sm_{n}") for n in CAPABILITIES} == {101376, 166912, 232448}


def test_the_interpreter_holds_the_exact_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If only the compiler knows the size, the launch compares it with the limit."""
    monkeypatch.setattr("cupyattn.interpret.executor.shared_memory_of", lambda arch: 4096)
    with pytest.raises(KernelLaunchError, match="bytes of shared memory per block, sm_80 allows"):
        ca.attention(x(16), x(16), x(16), variant="fa", backend="interpret")


@pytest.mark.parametrize("variant", ["fa", "fa_warps", "fa_tc", "fa_int8"])
@pytest.mark.parametrize("arch", [None, "sm_90a"])
def test_what_a_source_says_is_what_the_compiler_counts(variant: str, arch: str | None) -> None:
    """But for padding, and for the small fields of types of its own."""
    launch = ATTENTION.plan(resolved(x(64), x(64), x(64), variant=variant, arch=arch)).plans[-1]
    (one,) = launch.launches
    counted = compiler.translate(one.module, arch or one.module.least_arch).smem_bytes
    assert 0.95 * counted < least_shared_bytes(one.module) <= counted


@pytest.mark.skipif(not device.device_missing(), reason="there is a device")
def test_verify_refuses_tiles_that_no_device_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    path = str(renamed(tmp_path))
    given = ("--distribution", "normal", "--dtype", "float16", "--dtypes", "float16")
    assert cli.main(["verify", path, *given, "--tiles", "128", "128", "4"]) == 2
    out = capsys.readouterr()
    assert "holds" not in out.out
    assert "at head_dim 256" in out.err and "460288 bytes" in out.err
    assert "sm_80 allows 166912" in out.err
