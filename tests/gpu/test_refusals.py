"""Arguments that name nothing are refused on arrays of a device too; kept keys come back there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion import key_importance
from cupyattn.kernels.tiles import GemmTiles, Tiles
from tests.gpu.support import on_device

cupy = pytest.importorskip("cupy")


def operands() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return on_device(*rng.standard_normal((3, 2, 2, 80, 64)).astype(np.float16))


@pytest.mark.parametrize("arch", ["sm_9000", "foo", 90])
def test_architectures_that_do_not_exist(arch: Any) -> None:
    q, k, v = operands()
    codes = (*ca.act_quant(q[0, 0]), *ca.weight_quant(k[0, 0]))
    for call in (
        lambda: ca.attention(q, k, v, arch=arch),
        lambda: ca.plan(q, k, v, arch=arch),
        lambda: ca.quantize(q, k, v, arch=arch),
        lambda: ca.int8_gemm(*codes, arch=arch),
        lambda: key_importance(q, k, arch=arch),
    ):
        for _ in range(2):  # a call that was refused is not remembered
            with pytest.raises(ValueError, match=f"^arch must be sm_80, .*, got {arch!r}$"):
                call()


@pytest.mark.parametrize(
    ("variant", "tiles", "sentence"),
    [
        ("fa_tc", Tiles(17, 32, 3, 2), "block_q / num_warps must be a multiple of 16"),
        ("fa_warps", Tiles(32, 48, 4), "block_kv must be a multiple of 32"),
        ("fa_int8", Tiles(48, 64, 4, 2), "block_q / num_warps must be a multiple of 16"),
    ],
)
def test_tiles_that_a_kernel_does_not_take(variant: str, tiles: Tiles, sentence: str) -> None:
    for call in (ca.attention, ca.plan, ca.explain):
        with pytest.raises(ValueError, match=f"^{variant} .portable. does not take .*{sentence}"):
            call(*operands(), variant=variant, tiles=tiles)


def test_tiles_of_a_product() -> None:
    q, k, _ = operands()
    codes = (*ca.act_quant(q[0, 0]), *ca.weight_quant(k[0, 0]))
    with pytest.raises(ValueError, match="a warp must have a multiple of 16 columns"):
        ca.int8_gemm(*codes, tiles=GemmTiles(32, 8, 1, 2))


@pytest.mark.parametrize("timestep", [0, 25, 49])
def test_pruning_asked_for_in_a_call_returns_the_kept_keys(timestep: int) -> None:
    q, k, v = operands()
    attend = ca.Int8Attention(2, 64, 50)
    for _ in range(3):  # the second call is the prepared one
        o, kept = attend(q, k, v, timestep, enable_pruning=True, pruning_ratio=0.25)
        assert isinstance(o, cupy.ndarray) and isinstance(kept, cupy.ndarray)
        assert o.shape == q.shape and kept.shape == (2, 2, 80)
        assert bool((kept.sum(axis=2) == 60).all())
    alone = attend(q, k, v, timestep, enable_pruning=True, pruning_ratio=0.25, return_mask=False)
    assert isinstance(alone, cupy.ndarray) and bool((alone == o).all())
    always = ca.Int8Attention(2, 64, 50, enable_pruning=True, pruning_ratio=0.25)
    assert isinstance(always(q, k, v, timestep), cupy.ndarray)
