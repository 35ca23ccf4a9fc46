"""fa_int8 that quantises inside its kernel: the bits of the call that does so beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, attention_varlen, explain, plan, quantize
from cupyattn.compiler import modules as kc
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import resolved
from cupyattn.plans.stages import stages
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import Rope
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.quant.config import GRANULARITIES
from tests.kernels.test_kernels_compile import LATE
from tests.support.runs import bits, embedded, normal, packed, rope_tables, run

FUSED = QuantConfig(smooth_k=False, fused=True)
#: Tiles of both, which are the same but that only one of them has its next tile under way.
TILES = lookup("fa_int8").default_tiles(64, "fused")
BEFORE = replace(TILES, num_stages=2)


def both(
    inputs: Any, quant: QuantConfig, tiles: Tiles = TILES, **options: Any
) -> tuple[list[bytes], list[bytes]]:
    """Bits of O and lse, quantised within the kernel and by the passes before it."""
    found = []
    for one, its_tiles in (
        (quant, tiles),
        (replace(quant, fused=False), replace(tiles, num_stages=2)),
    ):
        given = {"variant": "fa_int8", "quant": one, "tiles": its_tiles, "backend": "interpret"}
        call = attention_varlen if "max_len_q" in options else attention
        found.append([bits(x) for x in call(*inputs, return_lse=True, **given, **options)])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("granularities", "dtype", "head_dim", "symmetric"),
    [
        (("thread", "thread"), "float16", 64, True),
        (("token", "block"), "bfloat16", 36, False),
        (("block", "token"), "float32", 40, False),
        (("token", "thread"), "float32", 7, True),
        pytest.param(("block", "block"), "float16", 256, True, marks=pytest.mark.slow),
    ],
)
def test_bits_are_those_of_the_passes_before(granularities, dtype, head_dim, symmetric) -> None:
    q, k, v = normal((1, 2, 40, head_dim), (1, 1, 70, head_dim), dtype)
    one = q.dtype.type(1)
    quant = replace(
        FUSED, granularity_q=granularities[0], granularity_k=granularities[1], symmetric=symmetric
    )
    within, before = both((q + one, k - one, v), quant, Tiles(32, 32, 2, 1), causal=True)
    assert within == before


@pytest.mark.slow
def test_features_change_the_same_scores() -> None:
    q, k, v = (embedded(x) for x in normal((1, 2, 40, 16), (1, 1, 70, 16)))
    rng = np.random.default_rng(0)
    mask = rng.random((1, 2, 40, 70)) < 0.8
    mask[:, :, 5] = False
    blocks = BlockMask(np.array([[[[True, False]], [[True, True]]]]), 64, 64)
    for number, options in enumerate(
        (
            {"window": (9, 30), "softcap": 1.5},
            {"mask": mask, "bias": rng.standard_normal((1, 1, 40, 70)).astype(np.float32)},
            {"block_mask": blocks},
        )
    ):
        tiles = TILES if "block_mask" in options else Tiles(32, 32, 2, 1)
        quant = replace(FUSED, symmetric=bool(number % 2))
        within, before = both((q, k, v), quant, tiles, **options)
        assert within == before, options


def test_rows_that_a_pass_turns_are_rounded_to_their_type_in_between() -> None:
    q, k, v = normal((1, 2, 40, 16), (1, 1, 70, 16))
    tables, tiles = rope_tables(80, 16), Tiles(32, 32, 2, 1)
    within, from_float32 = both((q, k, v), FUSED, tiles, rope=tables, rope_offset_q=3, causal=True)
    turned = Rope.of_arrays(tables, False, 3, 40, 70, 16).turned(q, k)
    same, before = both((*turned, v), FUSED, tiles, causal=True)
    assert within == same == before
    assert from_float32 != before  # the passes before have codes of the rows in float32


def test_packed_sequences() -> None:
    inputs, ends = packed(((5, 9), (0, 7), (35, 70)), 2, 1, 16)
    given = {"max_len_q": 35, "max_len_k": 70, "causal": True}
    quant = replace(FUSED, symmetric=False)
    within, before = both((*inputs, *ends), quant, Tiles(32, 32, 2, 1), **given)
    assert within == before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_reaches_what_shares_its_scale(value) -> None:
    q, k, v = normal((1, 2, 40, 16), (1, 2, 70, 16))
    q[0, 0, 7, 3] = k[0, 1, 69, 5] = value
    for symmetric in (True, False):
        quant = replace(FUSED, symmetric=symmetric)
        within, before = both((q, k, v), quant, Tiles(32, 32, 2, 1), causal=True)
        assert within == before


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (1, 1), (64, 64), (65, 129)])
def test_lengths_around_the_edges_of_tiles(len_q, len_kv) -> None:
    inputs = normal((1, 1, len_q, 16), (1, 1, len_kv, 16))
    within, before = both(inputs, FUSED)
    assert within == before


def test_every_judgement_holds() -> None:
    for dtype, options in (("float16", {"causal": True}), ("float32", {})):
        inputs = normal((1, 2, 40, 16), (1, 1, 90, 16), dtype)
        run("fa_int8@fused", inputs, backend="interpret", **options).check()


def test_one_kernel_and_no_memory_beside_the_result() -> None:
    inputs = normal((1, 2, 20, 16), (1, 1, 70, 16), "float32")
    request = resolved(*inputs, variant="fa_int8", quant=FUSED, backend="interpret")
    (only,) = stages(request).plans
    assert [launch.entry for launch in only.launches] == ["attn_fa_int8_fused"]
    assert not stages(request).workspace
    prepared = plan(*inputs, variant="fa_int8", quant=FUSED, backend="interpret")
    assert prepared.workspace_bytes == 0
    assert bits(prepared(*inputs)) == bits(
        attention(*inputs, variant="fa_int8", quant=FUSED, backend="interpret")
    )
    text = explain(*inputs, variant="fa_int8", quant=FUSED, arch="sm_90a")
    assert "fa_int8 (fused)" in text and "prepare/quantize.cu" not in text


def test_the_mirror_computes_the_same_as_in_two_steps() -> None:
    inputs = normal((1, 2, 40, 16), (1, 1, 70, 16))
    given = {"variant": "fa_int8", "return_lse": True, "backend": "mirror"}
    within = attention(*inputs, quant=FUSED, **given)
    before = attention(*inputs, quant=replace(FUSED, fused=False), tiles=BEFORE, **given)
    assert list(map(bits, within)) == list(map(bits, before))


def test_operands_quantised_beforehand_are_attended_to_as_any(tmp_path: Path) -> None:
    """A QuantizedQKV has its codes: there is nothing left to fuse."""
    q, k, v = normal((1, 2, 20, 64), (1, 2, 70, 64))
    z = quantize(q, k, v, quant=FUSED, tiles=TILES, backend="interpret")
    z.save(tmp_path / "z.npz")
    z = QuantizedQKV.load(tmp_path / "z.npz")
    assert z.form == "portable" and z.config == FUSED
    o = attention(z, tiles=BEFORE, backend="interpret")
    given = {"variant": "fa_int8", "quant": FUSED, "tiles": TILES, "backend": "interpret"}
    assert bits(o) == bits(attention(q, k, v, **given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"fused=True needs quant.smooth_k=False, got True: .* sees no row beyond them"),
        *(
            ({"smooth_k": False, f"granularity_{x}": wide}, f"granularity_{x}=.*got '{wide}'")
            for x in "qk"
            for wide in GRANULARITIES[:2]
        ),
        ({"smooth_k": False, "pv": "int8"}, "quant.pv='16bit', got 'int8'"),
        ({"fused": 1, "smooth_k": False}, "quant.fused must be True or False, got 1"),
    ],
)
def test_what_a_tile_does_not_have_at_hand_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        QuantConfig(**{"fused": True, **given})


def test_given_scales_are_refused() -> None:
    scales = np.ones((1, 1, 5), np.float32), np.ones((1, 1, 5), np.float32)
    with pytest.raises(ValueError, match="scales='dynamic', got 'static'"):
        QuantConfig(fused=True, smooth_k=False, scales=scales)


@pytest.mark.parametrize("tiles", [Tiles(64, 64, 4, 2), Tiles(64, 24, 4, 1)])
def test_tiles_hold_whole_groups_and_are_not_fetched_ahead(tiles) -> None:
    inputs = normal((1, 2, 20, 64), (1, 2, 70, 64))
    with pytest.raises(ValueError, match=r"fused=True needs tiles.num_stages=1, .* got Tiles"):
        attention(*inputs, variant="fa_int8", quant=FUSED, tiles=tiles, backend="interpret")


@pytest.mark.parametrize("head_dim", [*LATE, 128])
def test_default_tiles_spill_nothing_with_zero_points(head_dim) -> None:
    for dtype in ("float16", "float32"):
        inputs = normal((1, 2, 9, head_dim), (1, 2, 9, head_dim), dtype)
        quant = replace(FUSED, symmetric=False)
        request = resolved(*inputs, variant="fa_int8", quant=quant, backend="interpret")
        (launch,) = stages(request).plans[0].launches
        taken = kc.build(launch.module, "sm_80").kernels["attn_fa_int8_fused"]
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), taken
