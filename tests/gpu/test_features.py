"""Window, softcap, mask and bias on the device: every pair of them within its bound, and relations.

`tests/kernels/test_features.py` tests the mirror and the interpreter, and explains each test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, QuantConfig, attention, plan, unfused
from cupyattn.arrays.kinds import as_float64
from cupyattn.compiler import modules as kc
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.reference.exact import attention_exact
from tests.gpu.support import arch_of, moved, on_device, prebuild, run
from tests.kernels import feature_cases
from tests.kernels.feature_cases import admitted, options_of
from tests.support.runs import (
    ADDED,
    CELLS,
    PLAIN,
    RUNGS,
    Guarded,
    Run,
    asked_for,
    assert_same,
    bits,
    normal,
    on_host,
    variant_of,
)

cupy = pytest.importorskip("cupy")

PORTABLE = [(rung, dtype) for rung, dtype in CELLS if not rung.endswith("@sm90")]
#: Several tiles of every rung, and tails.
SHAPE = (2, 4, 150, 333)
HEAD_DIM = 64


def inputs_of(dtype: str = "float16", shape: Any = SHAPE) -> tuple[Any, Any, Any]:
    batch, heads, len_q, len_kv = shape
    kv = (batch, heads // 2, len_kv, HEAD_DIM)
    return on_device(*normal((batch, heads, len_q, HEAD_DIM), kv, dtype))


def specs() -> Iterator[kc.ModuleSpec]:
    """Yield what the calls below compile."""
    hopper = int(cupy.cuda.Device().compute_capability) == 90
    for rung, dtype in CELLS:
        if rung.endswith("@sm90") and not hopper:
            continue
        inputs = inputs_of(dtype, (1, 2, 8, 8))
        for number, cell in enumerate(feature_cases.CELLS):
            options = moved(options_of(cell, (1, 2, 8, 8), number))
            asked = dict(**asked_for(rung), return_lse=True, arch=arch_of(rung), **options)
            for made in explain.plans(resolved(*inputs, **asked)):
                yield from (one.module for one in made.launches)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(specs())


@pytest.mark.parametrize(("rung", "dtype"), CELLS)
def test_every_pair_is_within_its_bound(rung: str, dtype: str) -> None:
    inputs = inputs_of(dtype)
    for number, cell in enumerate(feature_cases.CELLS):
        options = moved(options_of(cell, SHAPE, number))
        before = [bits(options[name]) for name in ADDED if name in options]
        run(rung, inputs, **options).check()
        assert [bits(options[name]) for name in ADDED if name in options] == before


@pytest.mark.parametrize(("rung", "dtype"), CELLS)
def test_lengths(rung: str, dtype: str) -> None:
    for seed, (len_q, len_kv) in enumerate([(1, 1), (1, 77), (64, 33), (129, 128), (300, 5)]):
        shape = (1, 2, len_q, len_kv)
        for cell in feature_cases.CELLS[seed::5]:
            run(rung, inputs_of(dtype, shape), **moved(options_of(cell, shape, seed))).check()


@pytest.mark.parametrize("low", [-1e4, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize(("rung", "dtype"), CELLS)
def test_masks_by_a_very_negative_bias(rung: str, dtype: str, low: float) -> None:
    bias = np.zeros(SHAPE[2:], np.float32)
    bias[:, :260] = bias[7] = low
    one = run(rung, inputs_of(dtype), bias=cupy.asarray(bias))
    one.check()
    assert np.isfinite(as_float64(on_host(one.o))).all()


def assert_same_weights(left: Run, right: Run) -> None:
    """Alike to the bit, but for lse where codes of P are in units of 2^M.

    M ends where the last step leaves it. Of two calls one may have steps without keys for a row,
    over which M falls: M + log2(l), of which either is below 32, is rounded elsewhere then.
    """
    if left.form != "pv8_whole":
        return assert_same(left, right)
    assert bits(left.o) == bits(right.o)
    np.testing.assert_allclose(on_host(left.lse), on_host(right.lse), rtol=0, atol=64 * 2.0**-24)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if not rung.endswith("@sm90")])
def test_what_masks_is_a_mask(rung: str) -> None:
    """A window; a bias of -inf; a mask of True masks nothing."""
    inputs = inputs_of()
    for options in ({"window": (70, 3)}, {"window": (100, -1), "causal": True}):
        mask = cupy.asarray(admitted((1, 1, *SHAPE[2:]), options))
        assert_same_weights(run(rung, inputs, **options), run(rung, inputs, mask=mask))
    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 1, 333)) < 0.6, rng.standard_normal((150, 333)).astype("f4")
    masked = np.where(mask, bias, np.float32(-np.inf))
    both = moved({"mask": mask, "bias": bias})
    assert_same(run(rung, inputs, **both), run(rung, inputs, bias=cupy.asarray(masked)))
    whole = cupy.ones((1, 1, 1, 1), bool)
    assert_same(run(rung, inputs, mask=whole), run(rung, inputs))


@pytest.mark.parametrize("rung", PLAIN)
def test_a_nan_in_a_masked_key_has_no_influence(rung: str) -> None:
    q, k, v = inputs_of()
    spoilt = k.copy()
    spoilt[:, :, 5::40] = np.nan
    keep = cupy.ones(333, bool)
    keep[5::40] = False
    bias = cupy.where(keep, np.float32(0.25), np.float32(-np.inf))
    for options in ({"mask": keep}, {"bias": bias}, {"mask": keep, "softcap": 2.0}):
        assert_same(run(rung, (q, spoilt, v), **options), run(rung, (q, k, v), **options))


@pytest.mark.parametrize("rung", PLAIN)
def test_what_lies_outside_mask_and_bias_is_not_read(rung: str) -> None:
    """Mask and bias are views amid NaN and of a mask that would admit everything."""
    q, k, v = inputs_of()
    rng = np.random.default_rng(0)
    bias, mask = rng.standard_normal(SHAPE).astype("f4"), rng.random(SHAPE) < 0.7
    guarded = Guarded.empty(SHAPE, "float32", xp=cupy)
    guarded.array[...] = cupy.asarray(bias)
    wide = cupy.ones((*SHAPE[:3], SHAPE[3] + 9), bool)
    wide[..., 4:-5] = cupy.asarray(mask)
    alone = run(rung, (q, k, v), **moved({"mask": mask, "bias": bias}))
    alone.check()
    assert_same(run(rung, (q, k, v), mask=wide[..., 4:-5], bias=guarded.array), alone)


@pytest.mark.parametrize("rung", RUNGS)
def test_calls_of_late_see_the_mask_that_they_are_given(rung: str) -> None:
    """A second call of one form is run from what was prepared for the first."""
    inputs = inputs_of(shape=(1, 2, 40, 70))
    rng = np.random.default_rng(0)
    options = {**asked_for(rung), "arch": arch_of(rung)}
    found = []
    for _ in range(3):
        mask = cupy.asarray(rng.random((40, 70)) < 0.5)
        found.append(attention(*inputs, mask=mask, **options))
        prepared = plan(*inputs, mask=mask, **options)
        assert bits(prepared(*inputs)) == bits(found[-1])
        assert bits(prepared(*inputs, mask=mask)) == bits(found[-1])
    assert len({bits(o) for o in found}) == 3


@pytest.mark.parametrize(("rung", "dtype"), PORTABLE)
def test_a_block_mask_is_a_mask(rung: str, dtype: str) -> None:
    """To the bit, on the same tiles; NaN in dropped keys and values has no influence."""
    q, k, v = inputs_of(dtype)
    kept = np.random.default_rng(2).random((2, 4, 3, 6)) < 0.5
    kept[0, :, 1] = False  # rows that attend to nothing
    kept[:, :, :, 2] = False
    spoilt = [x.copy() for x in (k, v)]
    for x in spoilt:
        x[:, :, 128:192] = np.nan
    mask = BlockMask(kept, 64, 64)
    tiles = variant_of(rung).tiles_for(HEAD_DIM, block_mask=mask.blocks)
    for options in ({}, {"causal": True, "window": (200, -1)}):
        masked = run(rung, (q, k, v), block_mask=mask, **options)
        masked.check()
        dense = cupy.asarray(mask.to_dense(*SHAPE[2:]))
        assert_same_weights(masked, run(rung, (q, k, v), mask=dense, tiles=tiles, **options))
        if rung in PLAIN:
            assert_same(masked, run(rung, (q, *spoilt), block_mask=mask, **options))
        on_its_device = BlockMask(cupy.asarray(kept), 64, 64)
        assert_same(masked, run(rung, (q, k, v), block_mask=on_its_device, **options))


#: Options for the Hopper forms in which no key influences others.
WITHOUT_MEANS = {
    "fa_tc@sm90": {},
    "fa_int8@sm90": {"quant": QuantConfig(smooth_k=False)},
    **{
        rung: {"quant": QuantConfig(pv=pv, granularity_v="channel", smooth_k=False, smooth_v=False)}
        for rung, pv in (("fa_int8@sm90_pv8", "int8"), ("fa_int8@sm90_fp8", "fp8"))
    },
    "fa_int8@sm90_pv8_by_tile": {"quant": QuantConfig(pv="int8", smooth_k=False, smooth_v=False)},
}


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [(rung, dtype) for rung in WITHOUT_MEANS for dtype in variant_of(rung).dtypes],
)
@pytest.mark.parametrize("block_kv", [64, 128])
def test_a_block_mask_in_the_hopper_form(block_kv: int, rung: str, dtype: str) -> None:
    """NaN in dropped keys and values has no influence, and calls of late see their own mask.

    8-bit values share a scale with keys that are kept: other numbers there, within it.
    """
    q, k, v = inputs_of(dtype)
    v[:, :, block_kv : 2 * block_kv] = 0
    rng, blocks = np.random.default_rng(3), (2, 4, 2, -(-SHAPE[3] // block_kv))
    spoilt = [x.copy() for x in (k, v)]
    codes_of_v = rung.endswith(("pv8", "whole", "fp8", "by_tile"))
    for x, value in zip(spoilt, (np.nan, 0.5 if codes_of_v else np.nan), strict=True):
        x[:, :, block_kv : 2 * block_kv] = value
    quant = WITHOUT_MEANS[rung]
    for options in (quant, {"causal": True, "window": (200, -1), **quant}):
        kept = rng.random(blocks) < 0.5
        kept[0, :, 1] = False  # rows that attend to nothing
        kept[..., 1] = False
        for mask in (BlockMask(kept, 128, block_kv), BlockMask(cupy.asarray(kept), 128, block_kv)):
            masked = run(rung, (q, k, v), block_mask=mask, **options)
            assert masked.form == rung.partition("@")[2]
            masked.check()
            assert not on_host(masked.o)[0, :, 128:].any()
            assert_same(masked, run(rung, (q, *spoilt), block_mask=mask, **options))
            asked = {"variant": variant_of(rung).name, "arch": "sm_90a", "block_mask": mask}
            prepared = plan(q, k, v, **asked, **options)
            assert bits(prepared(q, k, v)) == bits(masked.o)


def test_calls_of_late_see_the_block_mask_that_they_are_given() -> None:
    q, k, v = inputs_of(shape=(1, 2, 130, 200))
    rng = np.random.default_rng(0)
    for _ in range(3):
        mask = BlockMask(rng.random((1, 2, 3, 4)) < 0.5, 64, 64)
        dense = cupy.asarray(mask.to_dense(130, 200))
        tiles = variant_of("fa_tc").tiles_for(HEAD_DIM, block_mask=mask.blocks)
        wanted = attention(q, k, v, variant="fa_tc", mask=dense, tiles=tiles)
        assert bits(attention(q, k, v, variant="fa_tc", block_mask=mask)) == bits(wanted)
        assert bits(plan(q, k, v, variant="fa_tc", block_mask=mask)(q, k, v)) == bits(wanted)


def test_the_steps_of_the_unfused_rung_take_them() -> None:
    q, k, v = inputs_of()
    host = options_of(feature_cases.CELLS[1], SHAPE, 1)
    o = unfused.weighted_sum(unfused.softmax(unfused.scores(q, k, **moved(host))), v)
    expected = attention_exact(*map(on_host, (q, k, v)), **host)
    np.testing.assert_allclose(as_float64(on_host(o)), expected, rtol=2e-3, atol=2e-3)
