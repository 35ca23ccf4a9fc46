"""`register` compiles a kernel, and calls on NumPy arrays run it: never the mirror in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler import nvrtc
from cupyattn.errors import KernelCompileError, UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.ops.attention import resolved
from cupyattn.problem import attention as problem_attention
from cupyattn.testing import judge
from tests.support.own_kernels import renamed

MINE = ca.Variant("mine", "an idea", "float32", {256: ca.Tiles(16, 16, 4)}, dtypes=("float16",))


@pytest.fixture(autouse=True)
def own_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))


def inputs() -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng(0).standard_normal((3, 1, 1, 20, 16)).astype(np.float16))


def doubled(folder: Path) -> Path:
    """A kernel that stores twice the output."""
    path, stored = renamed(folder), "* smem.alpha[row]);  // R7"
    text = path.read_text()
    assert stored in text
    path.write_text(text.replace(stored, f"* 2 {stored}"))
    return path


def test_the_judge_is_given_what_the_source_computes(tmp_path: Path) -> None:
    ca.register(MINE, doubled(tmp_path))
    q, k, v = inputs()
    report = judge(ca.attention(q, k, v, variant="mine"), q, k, v, variant="mine")
    assert not report.passed and report.ran == "interpreter"
    assert "interpreter" in str(report)
    by_name = ca.attention(q, k, v, variant="mine", backend="mirror")
    report = judge(by_name, q, k, v, variant="mine")
    assert report.passed and report.ran == "mirror"


def test_a_report_says_nothing_of_arrays_from_elsewhere() -> None:
    q, k, v = inputs()
    o = ca.attention(q, k, v, variant="fa")
    assert judge(o, q, k, v, variant="fa").ran == "mirror"
    assert judge(o.copy(), q, k, v, variant="fa").ran == ""
    interpreted = ca.attention(q, k, v, variant="fa", backend="interpret", out=np.empty_like(q))
    assert judge(interpreted, q, k, v, variant="fa").ran == "interpreter"
    both = np.empty((2, *q.shape), q.dtype)  # each part has its own record
    ca.attention(q, k, v, variant="fa", backend="interpret", out=both[0])
    ca.attention(q, k, v, variant="fa", out=both[1])
    ran = [judge(o, q, k, v, variant="fa").ran for o in both]
    assert ran == ["interpreter", "mirror"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("this is not C++", r"\.cu\(1\): error: "),
        ('extern "C" __global__ void attn_other() {}', r"attn_mine\(\.\.\.\), got attn_other"),
    ],
    ids=["no C++", "another entry point"],
)
def test_what_cannot_run_is_not_registered(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "attn_mine.cu"
    path.write_text(text)
    with pytest.raises(KernelCompileError, match=said):
        ca.register(MINE, path)
    assert "mine" not in ladder.VARIANTS
    kept = ca.register(MINE, renamed(tmp_path))
    path = tmp_path / "broken.cu"
    path.write_text(text)
    with pytest.raises(KernelCompileError, match=said):
        ca.register(MINE, path, replace=True)
    assert ladder.VARIANTS["mine"] is kept


def test_without_nvrtc_one_sentence_says_that_nothing_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise UnsupportedError("there is no NVRTC")

    monkeypatch.setattr(nvrtc, "load", missing)
    ca.register(MINE, renamed(tmp_path))
    said = ["mine is registered, but nothing was compiled: there is no NVRTC"]
    assert caplog.messages == said
    with pytest.raises(UnsupportedError, match="there is no NVRTC"):
        ca.attention(*inputs(), variant="mine")


def test_replace_and_unregister(tmp_path: Path) -> None:
    first = ca.register(MINE, doubled(tmp_path))
    q, k, v = inputs()
    before = ca.attention(q, k, v, variant="mine")
    with pytest.raises(ValueError, match="add replace=True, or call cupyattn.unregister"):
        ca.register(MINE, first.source)
    second = ca.register(MINE, renamed(tmp_path), replace=True)
    assert ladder.lookup("mine") is second
    assert np.abs(before - 2.0 * ca.attention(q, k, v, variant="mine")).max() < 1e-2
    assert ca.unregister("mine") is second and "mine" not in ladder.VARIANTS
    with pytest.raises(ValueError, match="variant must be one of"):
        ca.unregister("mine")
    for change in (
        lambda: ca.unregister("fa"),
        lambda: ca.register(replace(MINE, name="fa"), second.source, replace=True),
    ):
        with pytest.raises(ValueError, match="'fa' is a rung of the library"):
            change()


def test_names_and_head_sizes_that_are_none(tmp_path: Path) -> None:
    source = doubled(tmp_path)
    with pytest.raises(ValueError, match="'auto' means that a call chooses its rung"):
        ca.register(replace(ladder.VARIANTS["fa"], name="auto"), source=source)
    for head_dim in ("x", 0, True):
        with pytest.raises(ValueError, match="head_dim must be a positive int, got"):
            ca.register(
                replace(ladder.VARIANTS["fa"], name="own"), source=source, head_dim=head_dim
            )
    assert "auto" not in ladder.VARIANTS and "own" not in ladder.VARIANTS


def test_a_long_run_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca.register(MINE, renamed(tmp_path))
    x = np.broadcast_to(np.float16(1), (1, 2, 2048, 64))
    said = resolved(x, x, x, variant="mine").long_run
    assert "about 107 s" in said and "backend='mirror'" in said
    assert not resolved(x, x, x, variant="mine", backend="interpret").long_run
    assert not resolved(x, x, x, variant="fa").long_run
    assert not resolved(*inputs(), variant="mine").long_run
    monkeypatch.setattr(problem_attention, "LONG", 0.0)
    ca.attention(*inputs(), variant="mine")
    assert [one[:29] for one in caplog.messages] == ["mine runs in the interpreter,"]
