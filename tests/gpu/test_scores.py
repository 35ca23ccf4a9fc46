"""Softcap, bias and masks in the Hopper form of fa_tc, on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask
from tests.faults.fault_patches import put_a_line_in_place
from tests.gpu.support import arch_of, moved, on_device, run
from tests.hopper.test_hopper_scores import BFLOAT16, MISTAKES, bias_of, key_mask
from tests.hopper.test_hopper_scores import arrays as small_arrays
from tests.support.runs import Run, bits, normal, on_host

cupy = pytest.importorskip("cupy")

RUNG = "fa_tc@sm90"
#: Several tiles for every block, and tails.
HEADS, LEN_Q, LEN_KV = 24, 400, 520


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    arch_of(RUNG)


def judged(inputs: Any, **options: Any) -> Run:
    one = run(RUNG, inputs, **moved(options))
    assert one.form == "sm90"
    one.check()
    return one


def row_mask(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mask = rng.random((1, HEADS // 2 if seed % 2 else 1, LEN_Q, LEN_KV)) < 0.5
    mask[..., :192, :256] = True
    mask[..., :192, 256:450] = False
    mask[..., 192:, 100:300] = False
    mask[..., 5, :] = False
    mask[..., 300, :] = False
    mask[..., 300, 500] = True
    return mask if seed % 2 == 0 else mask.repeat(2, axis=1)


def of(name: str, seed: int) -> dict[str, Any]:
    """Options by the words of a name."""
    keys = np.random.default_rng(seed).random((2, 1, 1, LEN_KV)) < 0.7
    keys[..., 200:400] = False
    keys[1] = False
    keys[1, ..., LEN_KV - 1] = True
    dtype = BFLOAT16 if seed % 2 else np.float16
    blocks = np.random.default_rng(seed).random((1, HEADS, -(-LEN_Q // 128), -(-LEN_KV // 128)))
    words: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 2.0}, "cap": {"softcap": 40.0}, "rows": {"mask": row_mask(seed)},
        "keys": {"mask": keys}, "bias": {"bias": bias_of(1, HEADS, LEN_Q, LEN_KV, dtype=dtype)},
        "own": {"bias": bias_of(2, 1, LEN_Q, LEN_KV, dtype=dtype)},
        "keybias": {"bias": bias_of(2, 1, 1, LEN_KV, dtype=dtype)},
        "rowbias": {"bias": bias_of(HEADS, LEN_Q, 1)}, "causal": {"causal": True},
        "window": {"window": (150, 60)},
        "blocks": {"block_mask": BlockMask(blocks < 0.6, 128, 128)},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for word in name.split():
        found |= words[word]
    return found


CELLS = [
    "softcap", "cap causal", "rows", "rows causal", "rows window", "keys", "keys causal", "bias",
    "bias causal", "own", "keybias", "keybias keys", "rowbias", "rows bias", "keys bias softcap",
    "cap rows bias causal", "softcap keybias window", "rows blocks", "keys blocks causal",
    "bias blocks",
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CELLS)
def test_the_judgements_hold(name: str, head_dim: int) -> None:
    seed = CELLS.index(name)
    dtype = "bfloat16" if (seed + head_dim // 64) % 2 else "float16"
    kv = (2, HEADS // 2, LEN_KV, head_dim)
    inputs = on_device(*normal((2, HEADS, LEN_Q, head_dim), kv, dtype, seed))
    options = of(name, seed)
    one = judged(inputs, **options)
    if "mask" in options and options["mask"].shape[2] > 1:
        assert (on_host(one.o)[:, :, 5] == 0).all()
        assert (on_host(one.lse)[:, :, 5] == -np.inf).all()
    other = run(RUNG, inputs, **moved(options))
    assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@pytest.mark.parametrize("head_dim", [32, 96, 160, 192, 256])
@pytest.mark.parametrize("name", ["softcap", "rows", "bias", "keys cap causal"])
def test_other_head_sizes(name: str, head_dim: int) -> None:
    kv = (2, HEADS // 2, LEN_KV, head_dim)
    judged(on_device(*normal((2, HEADS, LEN_Q, head_dim), kv, "bfloat16")), **of(name, 3))


def test_nan_under_mask_and_bias_changes_no_bit() -> None:
    kv = (2, HEADS // 2, LEN_KV, 64)
    q, k, v = normal((2, HEADS, LEN_Q, 64), kv)
    mask = key_mask()
    mask = np.pad(mask, [(0, 0)] * 3 + [(0, LEN_KV - mask.shape[-1])], constant_values=True)
    bias = np.where(mask, np.float16(0.25), np.float16(-np.inf)).repeat(LEN_Q, axis=2)
    spoilt = np.where(mask[..., 0, :, None], k, np.float16(np.nan))
    for options in ({"mask": mask}, {"bias": bias}):
        one = judged(on_device(q, k, v), **options)
        other = run(RUNG, on_device(q, spoilt, v), **moved(options))
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@pytest.mark.usefixtures("planted_kernels")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_leaves_the_bound(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, instead, options = MISTAKES[name]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    assert not run(RUNG, on_device(*small_arrays()), **moved(options)).judge().passed
