"""Products of INT8 codes as they are compiled: tiles spill nothing, and blocks fit on devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from cupyattn.compiler import architectures, devices, target
from cupyattn.compiler import modules as kc
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.gemm_form import HOPPER_TILES, PORTABLE_TILES
from cupyattn.quant.blocks import STRATEGIES
from tests.quant.gemm_cases import planned

#: What follows a product, as options of `planned`, with the rows of b.
AFTER: dict[str, dict[str, Any]] = {
    "bias": {"n": 4096, "bias": "bfloat16", "activation": "gelu"},
    "outliers": {"n": 4096, "outliers": "bfloat16"},
    "gate": {"n": 4096, "bias": "bfloat16", "activation": "gelu", "gates": 2},
    "glu": {"n": 8192, "bias": "bfloat16", "activation": "geglu"},
    "straddling glu": {"n": 8128, "bias": "bfloat16", "activation": "geglu"},
}
THREE = GemmTiles(block_m=192, block_n=128, num_warps=16, num_stages=2)
#: Bytes that scales and bias of both halves spill where blocks share the last tiles, once a tile.
SPILLED_IN_TAILS = 12

EVERY = [*((t, "sm_90a") for t in HOPPER_TILES), *((t, "sm_80") for t in PORTABLE_TILES)]
#: Further tiles and architectures, of products with scales of blocks.
FURTHER = [
    (THREE, "sm_90a"), *((t, "sm_90") for t in PORTABLE_TILES),
    *((PORTABLE_TILES[0], arch) for arch in architectures.ARCHITECTURES),
]  # fmt: skip


def is_taken(tiles: GemmTiles, arch: str, after: str, strategy: str) -> bool:
    """Whether a product is compiled with these tiles."""
    if after == "outliers":
        return strategy == "block"
    if after == "gate":
        return tiles not in HOPPER_TILES[4:]
    # See test_tiles_of_256_columns_are_not_chosen_for_three_scales.
    return after != "straddling glu" or strategy == "channel" or tiles.block_n <= 128


def cases() -> Iterator[Any]:
    every = [*itertools.product(EVERY, AFTER, STRATEGIES)]
    further = itertools.product(FURTHER, ("bias", "outliers"), ("block",))
    for (tiles, arch), after, strategy in dict.fromkeys((*every, *further)):
        if is_taken(tiles, arch, after, strategy):
            plain = (tiles, arch) == (PORTABLE_TILES[0], "sm_80") and after in ("bias", "outliers")
            quick = plain or tiles == HOPPER_TILES[0]
            name = f"{tiles.block_m}x{tiles.block_n}-{tiles.cluster}-{arch}-{after}-{strategy}"
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(tiles, arch, after, strategy, id=name, marks=marks)


@pytest.mark.parametrize(("tiles", "arch", "after", "strategy"), [*cases()])
def test_default_tiles_spill_nothing(
    tiles: GemmTiles, arch: str, after: str, strategy: str
) -> None:
    if arch not in target.supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    how = {} if tiles in PORTABLE_TILES else {"arch": arch}
    plan = planned(4096, k=4096, tiles=tiles, strategy=strategy, **AFTER[after], **how)
    (one,) = plan.launches
    binary = kc.build(one.module, arch)
    (taken,) = binary.kernels.values()
    in_tails = "glu" in after and strategy == "channel" and tiles.tail_splits > 1
    assert max(taken.spill_stores, taken.spill_loads) <= in_tails * SPILLED_IN_TAILS
    assert taken.stack <= 16 * in_tails
    assert "C75" not in binary.log  # ptxas would say that products are serialised
    room = 227 if how else 99
    devices.check_shared_memory(binary.smem_bytes, room * 1024, str(one.module))
