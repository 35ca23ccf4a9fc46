"""Softcap, bias and masks in the Hopper forms of fa_int8, on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.kernels.ladder import lookup
from tests.faults.fault_patches import put_a_line_in_place
from tests.gpu.support import arch_of, moved, on_device, run
from tests.gpu.test_scores import HEADS, LEN_KV, LEN_Q, of
from tests.hopper.test_hopper_int8_scores import (
    MISTAKES,
    RUNGS,
    arrays,
    masked_operands,
    quant_of,
)
from tests.support.runs import bits, normal, on_host

pytest.importorskip("cupy")

CELLS = [
    "softcap", "rows causal", "keys", "bias causal", "keybias keys window", "cap rows bias causal",
    "rowbias blocks",
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    arch_of("fa_tc@sm90")


def takes(rung: str, head_dim: int) -> bool:
    variant, _, form = rung.partition("@")
    return head_dim <= lookup(variant).forms[form].tiles.largest_head_dim


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", CELLS)
def test_the_judgements_hold(name: str, head_dim: int, rung: str) -> None:
    """Twice with the same bits: blocks take tiles as they come, and share places in memory."""
    if not takes(rung, head_dim):
        pytest.skip("the form takes smaller heads")
    seed = CELLS.index(name)
    kv = (2, HEADS // 2, LEN_KV, head_dim)
    dtype = "bfloat16" if seed % 2 else "float16"
    inputs = on_device(*normal((2, HEADS, LEN_Q, head_dim), kv, dtype, seed))
    options = of(name, seed)
    one, other = (run(rung, inputs, **moved(options)) for _ in range(2))
    assert one.form == rung.partition("@")[2]
    assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)
    one.check()
    if "mask" in options and options["mask"].shape[2] > 1:
        assert (on_host(one.o)[:, :, 5] == 0).all()


@pytest.mark.parametrize("rung", [RUNGS[0], RUNGS[3]])
def test_zero_points_and_the_steps_of_a_mask(rung: str) -> None:
    q, k, v = normal((2, HEADS, LEN_Q, 64), (2, HEADS // 2, LEN_KV, 64))
    quant = quant_of(rung, symmetric=False)
    run(rung, on_device(q + 2, k + 3, v), quant=quant, **moved(of("rows", 0))).check()


@pytest.mark.parametrize("rung", RUNGS)
def test_keys_that_share_a_scale_that_is_nan(rung: str) -> None:
    q, k, v = normal((2, HEADS, LEN_Q, 64), (2, HEADS // 2, LEN_KV, 64))
    spoilt = k.copy()
    spoilt[:, :, 32:48] = np.nan
    bias = np.zeros((1, 1, LEN_Q, LEN_KV), np.float16)
    bias[..., 32:48] = -np.inf
    quant = quant_of(rung, smooth_k=False)
    for options in ({"bias": bias}, {"mask": bias == 0}):
        one, other = (
            run(rung, on_device(q, x, v), quant=quant, **moved(options)) for x in (k, spoilt)
        )
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@pytest.mark.usefixtures("planted_kernels")
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_mistake_leaves_the_bound(
    rung: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, instead, options = MISTAKES[name]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    assert not run(rung, on_device(*arrays()), **moved(options)).judge().passed


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (128, "bfloat16")])
@pytest.mark.parametrize("kind", ["rows", "causal", "huge"])
def test_weights_are_cut_as_scores_are_masked(kind: str, head_dim: int, dtype: str) -> None:
    """A kernel without lse cuts weights out of packed pairs, one with lse masks scores."""
    inputs, options = masked_operands(kind, head_dim, dtype)
    z = ca.quantize(*on_device(*inputs), quant=quant_of(RUNGS[0]))
    asked = {"variant": "fa_int8", **moved(options)}
    masked, cut = ca.attention(z, return_lse=True, **asked)[0], ca.attention(z, **asked)
    assert bits(masked[:, :, 16:]) == bits(cut[:, :, 16:])
    assert (on_host(cut)[:, :, 5] == 0).all()
