"""Attention of torch and JAX behind `cupyattn judge`: their arrays, layouts and arguments."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.interop.callables import LIBRARIES, called
from cupyattn.reference import attention_exact

pytest.importorskip("torch")
SDPA = "torch.nn.functional:scaled_dot_product_attention"


def problem(dtype: str = "float32") -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shapes = (1, 4, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def passes(capsys: pytest.CaptureFixture[str], *arguments: str) -> bool:
    status = cli.main(["judge", *arguments])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("judge: passed" if status == 0 else "judge: FAILED"), last
    return status == 0


def test_torchs_attention_on_a_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes(capsys, SDPA, "--library", "sdpa", "--device", "cpu", "--problems", "6")


@pytest.mark.slow
def test_torchs_attention_passes_on_many_problems(capsys: pytest.CaptureFixture[str]) -> None:
    many = ("--problems", "600", "--seed", "3")
    assert passes(capsys, SDPA, "--library", "sdpa", "--device", "cpu", *many)


@pytest.mark.slow
def test_jaxs_attention_passes(capsys: pytest.CaptureFixture[str]) -> None:
    # Rows without keys are left out: JAX gives them the mean of V.
    limits = ("--options", "scale", "causal", "--problems", "30")
    assert passes(capsys, "jax.nn:dot_product_attention", "--library", "jax", *limits)


def test_a_function_in_the_words_of_flash_attention(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import torch\n"
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def flash(q, k, v, softmax_scale=None, causal=False):\n"
        "    assert q.is_contiguous() and q.dtype in (torch.float16, torch.bfloat16)\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)\n"
        "    if causal:\n"
        "        mask = mask.tril(k.shape[2] - q.shape[2])\n"
        "    o = sdpa(q, k, v, mask, scale=softmax_scale, enable_gqa=True)\n"
        "    return o.transpose(1, 2)\n"
        "def top_left(q, k, v, causal=False):\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    return sdpa(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)\n"
    )
    asked = ("--library", "flash-attn", "--device", "cpu", "--problems", "10")
    assert passes(capsys, "mine.py:flash", *asked)
    assert not passes(capsys, "mine.py:top_left", *asked)
    with pytest.raises(SystemExit):
        runpy.run_path("judged.py")
    assert "OUTSIDE" in capsys.readouterr().out


@pytest.mark.parametrize("library", ["torch", "sdpa", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_come_back_as_numpys(library: str, dtype: str) -> None:
    if library == "jax":
        pytest.importorskip("jax")
    function = SDPA if library != "jax" else "jax.nn:dot_product_attention"
    found = called(function, library).limited(["scale"] if library != "torch" else [])
    import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)

    q, k, v = problem(dtype)
    q = q if library != "torch" else q[:, :2]
    options = found.options({"scale": 0.5, "causal": False}, q.dtype)
    o, lse = found(q, k, v, options)
    exact = attention_exact(q, k, v, scale=options.get("scale"))
    assert isinstance(o, np.ndarray) and o.dtype == q.dtype and lse is None
    assert np.abs(np.float32(o) - exact).max() < (1e-5 if dtype == "float32" else 2e-2)


def test_options_that_do_not_go_together_are_one_at_a_time() -> None:
    found = called(SDPA, "sdpa")
    q, k, _ = problem("float16")
    mask, bias = np.ones((5, 7), bool), np.ones((7,), np.float32)
    drawn = {"scale": None, "causal": True, "causal_align": "bottom-right", "mask": mask}
    asked = found.options(drawn, q.dtype)
    assert asked == {"causal": True, "causal_align": "top-left"}
    asked = found.options({**drawn, "causal": False, "bias": bias}, q.dtype)
    assert "mask" not in asked and asked["bias"].shape == (1, 1, 1, 7)
    assert asked["bias"].dtype == np.float16
    assert found.arguments(asked, True).keys() == {"is_causal", "attn_mask", "enable_gqa"}


def test_every_library_names_options_that_there_are() -> None:
    for library in LIBRARIES.values():
        assert set(library.names) <= set(LIBRARIES["numpy"].names)


# ---- gradients -----------------------------------------------------------------------------------

SKEWED = """
import torch

class Skewed(torch.autograd.Function):
    \"\"\"A gradient of v that loses its last key.\"\"\"

    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[:, :, -1:] = 0
        return grad

def attention(q, k, v, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, Skewed.apply(v), scale=scale, enable_gqa=True)
"""


def test_gradients_of_torchs_attention_pass(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--library", "sdpa", "--device", "cpu", "--problems", "4")
    assert passes(capsys, SDPA, "--gradients", *few)


@pytest.mark.slow
def test_gradients_of_jaxs_attention_pass(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--options", "scale", "causal", "--problems", "4", "--dtypes", "float32", "bfloat16")
    jax = "jax.nn:dot_product_attention"
    assert passes(capsys, jax, "--gradients", "--library", "jax", *limits)


def test_a_wrong_backward_is_found_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    Path("skewed.py").write_text(SKEWED)
    few = ("--library", "torch", "--device", "cpu", "--problems", "10", "--dtypes", "float32")
    assert passes(capsys, "skewed.py:attention", *few)
    assert not passes(capsys, "skewed.py:attention", "--gradients", *few)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path("judged.py")
    assert stopped.value.code == 1 and "dv is OUTSIDE its bound" in capsys.readouterr().out
