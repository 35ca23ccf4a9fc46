"""Block masks: their definition, their effect in kernels, and dropped blocks that cost nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import (
    BlockMask,
    Tiles,
    attention,
    explain,
    interpret,
    plan,
    quantize,
    unfused,  # fmt: skip
)
from cupyattn.arrays.kinds import as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.distributions import make
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops.attention import resolved
from cupyattn.problem.checks import check_limits
from cupyattn.quant import QuantConfig
from cupyattn.reference.exact import attention_exact
from cupyattn.testing import verdict
from tests.support import runs
from tests.support.planned import plan_attention
from tests.support.runs import bits

#: Every rung with every storage type that it takes, in its portable form.
RUNGS = [(name, dtype) for name, variant in VARIANTS.items() for dtype in variant.dtypes]
PLAIN = [name for name, variant in VARIANTS.items() if variant.family != "int8"]
BACKENDS = ("mirror", "interpret")
#: Two blocks of rows, three of keys, both with tails; grouped heads.
SHAPE = (2, 2, 100, 150)
HEAD_DIM = 24


def arrays(dtype: str = "float16", shape: Any = SHAPE) -> tuple[Any, Any, Any]:
    batch, heads, len_q, len_kv = shape
    return make("normal", batch, heads, len_q, len_kv, HEAD_DIM, dtype, 0, max(1, heads // 2))


def blocks(name: str) -> Any:
    """(batch or 1, heads or 1, 2, 3) blocks."""
    mask = np.zeros((1, 1, 2, 3), bool)
    if name == "all":
        mask[...] = True
    elif name == "one":
        mask[..., 1, 2] = True  # the other block of rows attends to nothing
    elif name == "by head":
        mask = np.array([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 0]]], bool)[None]
    elif name == "by batch":
        mask = np.array([[[0, 1, 1], [1, 0, 1]], [[1, 0, 0], [0, 0, 1]]], bool)[:, None]
    return mask


def same(rung: str, inputs: Any, block_mask: BlockMask, backend: str, **options: Any) -> None:
    """A block mask is the dense mask that it stands for, to the bit, on the same tiles."""
    masked = runs.run(rung, inputs, backend=backend, block_mask=block_mask, **options)
    masked.check()
    dense = block_mask.to_dense(inputs[0].shape[2], inputs[1].shape[2])
    tiles = VARIANTS[rung].tiles_for(HEAD_DIM, block_mask=block_mask.blocks)
    by_key = runs.run(rung, inputs, backend=backend, mask=dense, tiles=tiles, **options)
    assert bits(masked.o) == bits(by_key.o) and bits(masked.lse) == bits(by_key.lse)
    rows = np.broadcast_to(dense.any(axis=-1), masked.lse.shape)
    assert (masked.o[~rows] == 0).all() and (masked.lse[~rows] == -np.inf).all()


# ---- the object ----------------------------------------------------------------------------------


@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(-1, 200), st.integers(-1, 200),
    st.booleans(), st.sampled_from([64, 128]), st.sampled_from([64, 128]),
)  # fmt: skip
def test_a_window_keeps_the_blocks_that_it_reaches(
    len_q: int, len_kv: int, left: int, right: int, causal: bool, block_q: int, block_kv: int
) -> None:
    first, last = check_limits(causal, "bottom-right", (left, right), len_q, len_kv)
    ahead = np.arange(len_kv) - np.arange(len_q)[:, None]
    dense = np.ones((len_q, len_kv), bool)
    dense &= True if first is None else ahead >= first
    dense &= True if last is None else ahead <= last
    mask = BlockMask.from_window(
        len_q, len_kv, (left, right), causal=causal, block_q=block_q, block_kv=block_kv
    )
    np.testing.assert_array_equal(mask.mask, BlockMask.from_dense(dense, block_q, block_kv).mask)
    assert (mask.to_dense(len_q, len_kv)[0, 0] | ~dense).all()


def test_from_dense_and_back() -> None:
    mask = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.5
    block_mask = BlockMask(mask, 128, 64)
    assert block_mask.density == mask.mean() and block_mask.blocks == (128, 64)
    dense = block_mask.to_dense(3 * 128 + 1, 5 * 64)
    assert dense.shape == (2, 3, 385, 320)
    np.testing.assert_array_equal(BlockMask.from_dense(dense, 128, 64).mask, mask)
    one = np.zeros((200, 70), bool)
    one[130, 69] = True
    np.testing.assert_array_equal(
        BlockMask.from_dense(one).mask[0, 0], [[0, 0], [0, 0], [0, 1], [0, 0]]
    )


def test_what_the_kernels_read() -> None:
    mask = BlockMask(np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]], bool)[None, None], 64, 64)
    kept = mask.kept_blocks(np.zeros(1))
    assert kept.dtype == np.int32 and kept.flags.c_contiguous and kept.shape == (1, 1, 3, 5)
    found = [row[1 : 1 + row[0]].tolist() for row in kept[0, 0]]
    assert found == [[0, 2, 3], [], [2]]
    assert mask.kept_blocks(np.ones(2, np.float16)) is kept, "made once"


def test_it_keeps_its_own_copy() -> None:
    mine = np.ones((1, 1, 2, 3), bool)
    mask = BlockMask(mine, 64, 64)
    mine[...] = False
    assert mask.density == 1.0
    with pytest.raises(ValueError, match="read-only"):
        mask.mask[...] = False


class OnDevice(np.ndarray):
    """Stands for a CuPy array: it says that it is one, and comes to the host by get()."""

    __module__ = "cupy"

    def get(self) -> np.ndarray:
        return self.view(np.ndarray)


def on_device(mask: BlockMask) -> BlockMask:
    object.__setattr__(mask, "mask", mask.mask.view(OnDevice))
    return mask


def test_a_mask_on_a_device_and_operands_on_the_host_are_one_sentence() -> None:
    pytest.importorskip("cupy")
    q, k, v = arrays()
    mask = on_device(BlockMask(np.ones((1, 1, 2, 3), bool), 64, 64))
    o = attention(q, k, v, variant="fa", block_mask=BlockMask(mask.mask.get(), 64, 64))
    for call in (
        lambda: attention(q, k, v, variant="fa", block_mask=mask),
        lambda: verdict.judge(o, q, k, v, variant="fa", block_mask=mask),
    ):
        with pytest.raises(TypeError, match=r"goes with CuPy operands, got NumPy's: .* mask.get()"):
            call()


def test_a_judgement_on_the_host_takes_the_mask_there() -> None:
    pytest.importorskip("cupy")
    inputs = arrays()
    kept = np.random.default_rng(0).random((2, 2, 2, 3)) < 0.5
    found = runs.run("fa", inputs, block_mask=BlockMask(kept, 64, 64))
    options = {"block_mask": on_device(BlockMask(kept, 64, 64))}
    assert replace(found, options=options).check() == found.check()


@pytest.mark.parametrize(
    ("make_it", "error", "sentence"),
    [
        (lambda: BlockMask([[True]], 64, 64), TypeError, "got list"),
        (lambda: BlockMask(np.ones((1, 1, 2, 3)), 64, 64), TypeError, "got mask.dtype=float64"),
        (
            lambda: BlockMask(np.ones((2, 3), bool), 64, 64), ValueError,
            "must have four axes (batch or 1, heads or 1, q_blocks, kv_blocks), got "
            "mask.shape=(2, 3)",
        ),
        (
            lambda: BlockMask(np.ones((1, 1, 2, 3), bool), 64, 32), ValueError,
            "block_kv must be 64 or 128, got 32",
        ),
        (
            lambda: BlockMask(np.ones((1, 1, 2, 3), bool), 64.0, 64), ValueError,
            "block_q must be 64 or 128, got 64.0",
        ),
        (
            lambda: BlockMask(np.ones((1, 1, 2, 3), bool), 64, 64).to_dense(100, 200), ValueError,
            "for len_q=100 and len_kv=200 must have 2 x 4 blocks, got mask.shape=(1, 1, 2, 3)",
        ),
        (lambda: BlockMask.from_dense(np.ones(3, bool)), ValueError, "got mask.shape=(3,)"),
        (lambda: BlockMask.from_dense(np.ones((3, 3))), TypeError, "got mask.dtype=float64"),
    ],
)  # fmt: skip
def test_what_is_no_block_mask_is_one_sentence(
    make_it: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        make_it()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"block_mask": np.ones((1, 1, 2, 3), bool)}, TypeError,
            "block_mask must be a cupyattn.BlockMask or None",
        ),
        (
            {"block_mask": BlockMask(np.ones((1, 1, 2, 2), bool), 64, 64)}, ValueError,
            "len_q=100 and len_kv=150 must have 2 x 3 blocks, got mask.shape=(1, 1, 2, 2)",
        ),
        (
            {"block_mask": BlockMask(np.ones((3, 1, 2, 3), bool), 64, 64)}, ValueError,
            "for (batch, heads) = (2, 2) got mask.shape=(3, 1, 2, 3)",
        ),
        (
            {"block_mask": BlockMask(np.ones((1, 1, 2, 3), bool), 64, 64),
             "tiles": Tiles(128, 48, 4, 2)}, ValueError,
            "tiles.block_q=128 and tiles.block_kv=48 must divide the blocks of the block mask, "
            "64 x 64",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_call_is_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain, plan):
        with pytest.raises(error, match=re.escape(sentence)):
            call(*arrays(), variant="fa_tc", **options)


# ---- what the kernels make of it -----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rung", "dtype"), runs.cells_in_turn(0, RUNGS))
def test_a_block_mask_is_a_mask(rung: str, dtype: str, backend: str) -> None:
    name, batch = ("by batch", 2) if dtype == "float16" else ("by head", 1)
    same(rung, arrays(dtype, (batch, *SHAPE[1:])), BlockMask(blocks(name), 64, 64), backend)


@pytest.mark.parametrize("name", ["all", "none", "one"])
@pytest.mark.parametrize(("rung", "backend"), runs.on_both(2))
def test_all_none_and_one_block(rung: str, name: str, backend: str) -> None:
    inputs, mask = arrays(shape=(1, 2, 100, 150)), BlockMask(blocks(name), 64, 64)
    same(rung, inputs, mask, backend)
    if name == "all":
        tiles = VARIANTS[rung].tiles_for(HEAD_DIM, block_mask=(64, 64))
        masked = runs.run(rung, inputs, backend=backend, block_mask=mask)
        plain = runs.run(rung, inputs, backend=backend, tiles=tiles)
        assert bits(masked.o) == bits(plain.o) and bits(masked.lse) == bits(plain.lse)


#: Options combined with a block mask, by name.
OTHERS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (70, 0)},
    "window-causal_align": {"window": (3, 9), "causal_align": "top-left"},
    "causal-window": {"causal": True, "window": (20, -1)},
    "softcap-bias": {"softcap": 1.5, "bias": np.arange(150, dtype=np.float32) / 50},
}


@pytest.mark.parametrize(
    ("rung", "others", "backend"),
    [
        pytest.param(
            rung, name, backend,
            marks=[pytest.mark.slow] if backend == "interpret" and (i + 2 * j) % 9 else [],
        )
        for i, rung in enumerate(VARIANTS)
        for j, name in enumerate(OTHERS)
        for backend in BACKENDS
    ],
)  # fmt: skip
def test_it_combines_with_what_else_there_is(rung: str, others: str, backend: str) -> None:
    same(rung, arrays(shape=(1, 2, 100, 150)), BlockMask(blocks("by head"), 64, 64), backend,
         **OTHERS[others])  # fmt: skip


#: Blocks of other sizes: block_q, block_kv, len_q, len_kv, options.
SIZES: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
    (128, 64, 130, 65, {}),
    (64, 128, 1, 400, {"window": (150, 40)}),
    (128, 128, 40, 257, {"causal": True, "window": (200, -1)}),
)


@pytest.mark.parametrize(
    ("rung", "block_q", "block_kv", "len_q", "len_kv", "options"),
    [
        pytest.param(rung, *sizes, marks=[pytest.mark.slow] if (i - j) % 3 else [])
        for i, rung in enumerate(VARIANTS)
        for j, sizes in enumerate(SIZES)
    ],
)
def test_blocks_of_other_sizes(
    rung: str, block_q: int, block_kv: int, len_q: int, len_kv: int, options: dict[str, Any]
) -> None:
    """Steps also begin in the middle of a block."""
    mask = np.ones((1, 1, -(-len_q // block_q), -(-len_kv // block_kv)), bool)
    mask[..., -1, 0] = False
    inputs = arrays(shape=(1, 1, len_q, len_kv))
    same(rung, inputs, BlockMask(mask, block_q, block_kv), "interpret", **options)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("left", [0, 63, 64, 127, 128, 200, 383])
def test_every_limit_of_a_list_is_found(left: int, align: str) -> None:
    """The search for the first and the last step, around the ends of the blocks in the list."""
    mask = BlockMask(np.array([1, 0, 1, 1, 0, 1], bool)[None, None, None], 64, 64)
    inputs = arrays(shape=(1, 1, 1, 6 * 64))
    same("fa_tc", inputs, mask, "interpret", window=(left, left % 3 * 64), causal_align=align)


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(0, PLAIN))
def test_dropped_keys_and_values_are_not_read(rung: str, backend: str) -> None:
    """NaN in them changes no bit, not even NaN in a value."""
    q, k, v = arrays(shape=(1, 2, 100, 150))
    mask = BlockMask(np.array([[1, 0, 1], [1, 0, 0]], bool)[None, None], 64, 64)
    k_nan, v_nan = k.copy(), v.copy()
    k_nan[:, :, 64:128] = v_nan[:, :, 64:128] = np.nan
    clean, dirty = (
        runs.run(rung, x, backend=backend, block_mask=mask) for x in ((q, k, v), (q, k_nan, v_nan))
    )
    assert bits(clean.o) == bits(dirty.o) and bits(clean.lse) == bits(dirty.lse)
    v_nan[:, :, 128:] = np.nan  # which the first block of rows attends to
    dirty = runs.run(rung, (q, k_nan, v_nan), backend=backend, block_mask=mask)
    assert np.isnan(as_float64(dirty.o[:, :, :64])).all()
    assert bits(dirty.o[:, :, 64:]) == bits(clean.o[:, :, 64:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_fa_int8_does_not_read_dropped_codes_and_values(backend: str) -> None:
    q, k, v = arrays(shape=(1, 2, 100, 150))
    mask = BlockMask(np.array([[1, 0, 1], [1, 0, 0]], bool)[None, None], 64, 64)
    z = quantize(q, k, v, quant=QuantConfig(granularity_k="token", smooth_k=False))
    v_nan, scale_nan = v.copy(), z.k_scale.copy()
    v_nan[:, :, 64:128] = scale_nan[..., 64:128] = np.nan
    dirty = replace(z, v=v_nan, k_scale=scale_nan)
    clean, found = (attention(x, block_mask=mask, backend=backend) for x in (z, dirty))
    assert bits(clean) == bits(found)


@pytest.mark.slow
@pytest.mark.parametrize("rung", runs.in_turn(1))
def test_bytes_follow_the_blocks_kept(rung: str) -> None:
    """K and V of every block kept, for each tile of rows; beside them the lists, by every lane."""
    inputs = arrays(shape=(1, 1, 64, 4 * 64))
    operands = inputs if rung != "fa_int8" else (quantize(*inputs),)

    def loaded(kept: int) -> int:
        mask = BlockMask((np.arange(4) >= 4 - kept)[None, None, None], 64, 64)
        profile = interpret.attention(*operands, variant=rung, block_mask=mask)[2]
        if rung == "unfused":  # every tile of scores looks its place up, which every lane reads
            assert kept or profile.kernels["attn_unfused_scores"].traffic["global", "load"] < 2**14
            return profile.kernels["attn_unfused_weighted_sum"].traffic["global", "load"]
        return sum(x.traffic["global", "load"] for x in profile.kernels.values())

    nothing, half, everything = loaded(0), loaded(2), loaded(4)
    row_tiles = 64 // VARIANTS[rung].tiles_for(HEAD_DIM, block_mask=(64, 64)).block_q
    key_bytes = HEAD_DIM * (3 if rung == "fa_int8" else 4)
    if rung == "unfused":  # V, and P of 64 rows, which comes back from memory
        key_bytes = HEAD_DIM * 2 + 4 * 64 // row_tiles
    kept_bytes = 4 * 64 * key_bytes * row_tiles
    assert kept_bytes <= everything - nothing <= 1.6 * kept_bytes
    assert abs(everything - 2 * half + nothing) < 0.1 * kept_bytes


def test_the_definition() -> None:
    q, k, v = arrays()
    mask = BlockMask(blocks("by head"), 64, 64)
    dense = mask.to_dense(100, 150)
    found = attention_exact(q, k, v, block_mask=mask, causal=True, return_lse=True)
    wanted = attention_exact(q, k, v, mask=dense, causal=True, return_lse=True)
    rows = np.array([99, 0, 64])
    some = attention_exact(q, k, v, block_mask=mask, causal=True, rows=rows)
    for left, right in zip((*found, some), (*wanted, wanted[0][:, :, rows]), strict=True):
        # In float64, but the order of a sum is that of the machine's BLAS and of its shapes.
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-13)


def test_scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = arrays()
    mask = BlockMask(blocks("by batch"), 64, 64)
    mirrored = unfused.scores(q, k, block_mask=mask)
    dense = np.broadcast_to(mask.to_dense(100, 150), mirrored.shape)
    np.testing.assert_array_equal(mirrored > -np.inf, dense)
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    found = unfused.scores(q, k, block_mask=mask)
    np.testing.assert_array_equal(found > -np.inf, dense)
    head_dim = q.shape[-1]
    q, k = np.abs(q, dtype=np.float64), np.abs(k, dtype=np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    magnitude = q @ k.swapaxes(-1, -2) / np.sqrt(head_dim)
    bound = 2 * (head_dim + 2) * 2.0**-24 * magnitude  # of two sums in float32, in any order [L1]
    assert (np.abs(found[dense] - mirrored[dense]) <= bound[dense]).all()


# ---- calls ---------------------------------------------------------------------------------------


def test_tiles_divide_the_blocks() -> None:
    for variant in VARIANTS.values():
        for head_dim in (1, 64, 65, 128, 129, 256):
            for block in ((64, 64), (128, 64), (64, 128)):
                tiles = variant.tiles_for(head_dim, block_mask=block)
                assert block[0] % tiles.block_q == 0 == block[1] % tiles.block_kv
            assert variant.tiles_for(head_dim) == variant.default_tiles(head_dim)


def test_explain_says_what_is_kept_and_why_not_the_hopper_form() -> None:
    inputs = make("normal", 1, 2, 128, 192, 128, "float16")
    text = explain(*inputs, block_mask=BlockMask(blocks("one"), 64, 64), arch="sm_90a")
    assert "scores: block mask of 64 x 64 blocks, 16.7% of them kept" in text
    assert "tiles     block_q=64, block_kv=64" in text and "block_mask=(64, 64)" in text
    assert "takes block masks of 128 query rows, got blocks of 64 x 64" in text


def test_it_is_compiled_in_only_where_there_is_one() -> None:
    inputs = arrays()
    operands = [Operand.of(x) for x in (*inputs, inputs[0])]

    def macros(**options: Any) -> tuple[int, int]:
        request = resolved(*inputs, **options)
        kept = request.operands.get("kept_blocks")
        added = {} if kept is None else {"kept_blocks": kept.place}
        made = plan_attention(VARIANTS["fa"], request.call, *operands, added=added)
        defines = dict(made.launches[0].module.defines)
        return defines["CFG_BLOCK_MASK_Q"], defines["CFG_BLOCK_MASK_KV"]

    assert macros() == (0, 0)
    mask = BlockMask(np.ones((1, 1, 1, 3), bool), 128, 64)
    assert macros(block_mask=mask) == (128, 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rung", ["fa", "fa_int8"])
def test_a_prepared_call_keeps_its_block_mask(rung: str, backend: str) -> None:
    inputs, mask = arrays(), BlockMask(blocks("by head"), 64, 64)
    prepared = plan(*inputs, variant=rung, block_mask=mask, backend=backend)
    expected = attention(*inputs, variant=rung, block_mask=mask, backend=backend)
    np.testing.assert_array_equal(prepared(*inputs), expected)


def test_layouts_and_empty_lengths() -> None:
    q, k, v = arrays()
    mask = BlockMask(blocks("by head"), 64, 64)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    o = attention(*turned, block_mask=mask, layout="BSHD")
    np.testing.assert_array_equal(o.swapaxes(1, 2), attention(q, k, v, block_mask=mask))
    for backend in BACKENDS:
        nothing = BlockMask(np.ones((1, 1, 2, 0), bool), 64, 64)
        o = attention(q, k[:, :, :0], v[:, :, :0], block_mask=nothing, backend=backend)
        assert o.shape == q.shape and (o == 0).all()
        empty = attention(
            q[:, :, :0], k, v, block_mask=BlockMask(np.ones((1, 1, 0, 3), bool), 64, 64),
            backend=backend,
        )  # fmt: skip
        assert empty.shape == (2, 2, 0, HEAD_DIM)
