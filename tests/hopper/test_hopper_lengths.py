"""Padded batches with lengths of their entries in the Hopper forms, in the interpreter.

The copy engine brings the padding along with the last rows of an entry: it is NaN, and must change
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, QuantConfig, Tiles, explain
from tests.support.padded import assert_as_alone, padded, run_padded
from tests.support.runs import Arrays, asked_for, hopper_blocks

RUNGS = ("fa_tc@sm90", "fa_int8@sm90", "fa_int8@sm90_pv8", "fa_int8@sm90_fp8")
BY_TILE = "fa_int8@sm90_pv8_by_tile"
#: Two computing warpgroups, the fewest keys a step.
TILES = Tiles(128, 64, 12, 2)
HOPPER: dict[str, Any] = {"arch": "sm_90a", "tiles": TILES, "backend": "interpret"}
#: A tile of padding alone, tails of both, more than there are, no keys, no queries.
LENGTHS, SIZES = ((37, 70), (140, 5), (0, 60), (3, -1), (130, 99)), (140, 70)
SCORED: dict[str, Any] = {"softcap": 3.0, "causal": True}


def with_keys(one: Arrays) -> dict[str, Any]:
    """Return what takes an entry to the form of the batch, which none without keys has."""
    return {} if one[1].size else {"arch": None, "tiles": None}


def as_alone(rung: str, head_dim: int = 32, dtype: str = "float16", **options: Any) -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1, head_dim, dtype)
    assert_as_alone(inputs, lengths, {**asked_for(rung), **HOPPER, **options}, with_keys)


@pytest.mark.parametrize(
    ("rung", "options"),
    [
        ("fa_tc@sm90", {}),
        pytest.param("fa_tc@sm90", {"causal": True}, marks=pytest.mark.slow),
        pytest.param("fa_tc@sm90", {"window": (20, 9), "head_dim": 72}, marks=pytest.mark.slow),
        pytest.param("fa_tc@sm90", {"head_dim": 192, "causal": True}, marks=pytest.mark.slow),
        *(
            pytest.param(rung, {"causal": causal}, marks=pytest.mark.slow)
            for rung in (*RUNGS[1:], BY_TILE)
            for causal in (False, True)
        ),
        pytest.param("fa_int8@sm90", {"dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param(
            "fa_int8@sm90", {"quant": QuantConfig("head", "head", symmetric=False)},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_entry_is_as_if_alone(rung: str, options: dict[str, Any]) -> None:
    as_alone(rung, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mask", "key mask and bias"])
@pytest.mark.parametrize("rung", [*RUNGS, BY_TILE])
def test_masks_and_biases_keep_their_places(rung: str, name: str) -> None:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((len(LENGTHS), 2, SIZES[0], 72)).astype(np.float16)
    of_keys = (len(LENGTHS), 1, 1, SIZES[1])
    given = {
        "mask": {"mask": rng.random((len(LENGTHS), 2, *SIZES)) < 0.7},
        "key mask and bias": {"mask": rng.random(of_keys) < 0.7, "bias": wide[..., : SIZES[1]]},
    }[name]
    as_alone(rung, **given, **SCORED)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [*RUNGS, BY_TILE])
def test_within_the_bound(rung: str) -> None:
    """One block also meets every phase of its barriers; the tiles are the rung's own."""
    lengths = ((5, 38), (200, 200), (64, 90), (0, 7))
    inputs, given = padded(lengths, (200, 200), 1, 1, 32, "bfloat16")
    with hopper_blocks(1):
        for one in run_padded(
            rung, inputs, given, arch="sm_90a", backend="interpret", causal=True
        ):
            assert one.form == rung.partition("@")[2]
            one.check()


def test_a_block_mask_goes_to_the_portable_form() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1, 64)
    kept = BlockMask(np.ones((1, 1, 2, 1), bool), 128, 128)
    options = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret", "block_mask": kept}
    text = explain(*inputs, **options, **lengths)
    assert "takes no block mask of entries with lengths of their own" in text
