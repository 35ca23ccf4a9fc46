"""Packed sequences of different lengths, on the mirror and in the interpreter.

These tests need no bound: every sequence equals `attention` on it alone, bit for bit.
"""

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
    QuantConfig,
    attention,
    attention_varlen,
    explain,
    plan,
    quantize,
)  # fmt: skip
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import KernelFault
from cupyattn.ops.attention import resolved
from cupyattn.problem.checks import check_limits, check_packed
from cupyattn.quant.config import GRANULARITIES, GROUP_ALL
from cupyattn.quant.packed import packed_groups
from cupyattn.quant.quantizers import VALUES_PAD, group_count
from tests.kernels.feature_cases import admitted
from tests.plans.test_launch import call_of
from tests.support import runs
from tests.support.marks import slow
from tests.support.runs import (
    GUARD,
    Arrays,
    Guarded,
    asked_for,
    bits,
    of_sequence,
    packed,
    rope_tables,
    sequences,
)  # fmt: skip

RUNGS = ("unfused", "fa", "fa_warps", "fa_tc", "fa_int8")
#: Every rung with every storage type that it takes, in its portable form.
CELLS = [(rung, dtype) for rung, dtype in runs.CELLS if rung in RUNGS]
#: Empty ones in front, in the middle and at the end; no keys; no queries; tails and several tiles.
LENGTHS = ((0, 0), (5, 38), (3, 0), (0, 9), (0, 0), (40, 33), (0, 0))
#: Options whose places depend on the lengths of a sequence, and options that do not.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "causal_align": "top-left", "scale": 0.2},
    {"window": (9, 3)},
    {"window": (4, -1), "causal_align": "top-left", "softcap": 2.0},
    {"window": (2**40, 5)},
)


#: Lengths that meet several blocks of a block mask, and a shorter sequence before a longer one.
BLOCKS = ((5, 38), (3, 0), (0, 9), (70, 33), (67, 140))
#: Features whose arrays every sequence has a part of.
FEATURES = ("rope", "rope interleaved", "mask", "key mask", "bias", "block mask")


def added(feature: str, heads: int, head_dim: int, lengths: Any = BLOCKS) -> dict[str, Any]:
    """Return options of a call on sequences of these lengths; "all": of all features at once."""
    rng = np.random.default_rng(0)
    batch, (len_q, len_kv) = len(lengths), np.max(lengths, axis=0).tolist()
    tables = rope_tables(max(len_q + 3, len_kv), head_dim)
    bias = rng.standard_normal((batch, heads, len_q, len_kv))
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    blocks = rng.random((batch, heads, -(-len_q // 64), -(-len_kv // 64))) < 0.7
    found: dict[str, dict[str, Any]] = {
        "rope": {"rope": tables, "rope_offset_q": 3, "causal": True},
        "rope interleaved": {"rope": tables, "rope_interleaved": True},
        "mask": {"mask": rng.random((batch, 1, len_q, len_kv)) < 0.7, "window": (30, 9)},
        "key mask": {"mask": rng.random(len_kv) < 0.7, "causal": True},
        "bias": {"bias": bias.astype(np.float32), "softcap": 3.0},
        "block mask": {"block_mask": BlockMask(blocks, 64, 64), "causal": True},
    }
    if feature != "all":
        return found[feature]
    every = ("rope", "mask", "bias", "block mask")
    return {name: x for one in every for name, x in found[one].items()}


def varlen(rung: str, inputs: Arrays, ends: Any, **options: Any) -> Any:
    asked = {**asked_for(rung), "return_lse": True, **options}
    return attention_varlen(*inputs, *ends, **asked)


def assert_as_alone(rung: str, inputs: Arrays, ends: Any, **options: Any) -> None:
    o, lse = varlen(rung, inputs, ends, **options)
    assert o.shape == inputs[0].shape and lse.shape == (o.shape[1], o.shape[0])
    for number, (rows, one) in enumerate(sequences(inputs, ends)):
        if rows.start == rows.stop:
            continue
        asked = {**asked_for(rung), "return_lse": True, **of_sequence(options, number, one)}
        expected, expected_lse = attention(*one, **asked)
        assert bits(o[rows].swapaxes(0, 1)) == bits(expected), (rows, options)
        assert bits(lse[:, rows]) == bits(expected_lse), (rows, options)


# ---- each sequence is as if alone ----------------------------------------------------------------


@pytest.mark.parametrize(("rung", "dtype"), runs.cells_in_turn(0, CELLS))
@pytest.mark.parametrize("turn", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_kernels_take_every_sequence_for_itself(rung: str, dtype: str, turn: int) -> None:
    """Features rotate over storage types, so that each rung meets all of them, with the slow."""
    seed = runs.variant_of(rung).dtypes.index(dtype) + 3 * turn
    inputs, ends = packed(LENGTHS, 4, 2, head_dim=32, dtype=dtype, seed=seed)
    assert_as_alone(rung, inputs, ends, backend="interpret", **OPTIONS[seed])


@pytest.mark.parametrize("rung", RUNGS)
def test_the_mirror_takes_every_sequence_for_itself(rung: str) -> None:
    for options in OPTIONS:
        inputs, ends = packed(LENGTHS, 4, 2, head_dim=24)
        assert_as_alone(rung, inputs, ends, backend="mirror", **options)


@pytest.mark.parametrize("rung", [*RUNGS, "fa_int8@pv8"])
@pytest.mark.parametrize("feature", [*FEATURES, "all"])
def test_the_mirror_takes_of_masks_and_positions_what_is_of_a_sequence(
    rung: str, feature: str
) -> None:
    inputs, ends = packed(BLOCKS, 4, 2, head_dim=24)
    assert_as_alone(rung, inputs, ends, backend="mirror", **added(feature, 4, 24))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rung", [*("unfused", "fa", "fa_tc", "fa_int8@pv8"), *slow(("fa_warps", "fa_int8"))]
)
def test_the_kernels_take_of_masks_and_positions_what_is_of_a_sequence(rung: str) -> None:
    """All at once, so that a place that one of them mistakes is still seen by the others."""
    inputs, ends = packed(BLOCKS, 2, 1, head_dim=16)
    assert_as_alone(rung, inputs, ends, backend="interpret", **added("all", 2, 16))


@pytest.mark.parametrize("rung", [*RUNGS, "fa_int8@pv8"])
def test_masks_and_positions_are_within_the_bound(rung: str) -> None:
    inputs, ends = packed(BLOCKS, 2, 1, head_dim=16)
    for feature in (*FEATURES, "all"):
        for one in runs.run_packed(rung, inputs, ends, **added(feature, 2, 16)):
            one.check()


def test_the_bound_notices_the_mask_of_another_sequence() -> None:
    inputs, ends = packed(((40, 70), (40, 70)), 2, 1, head_dim=16)
    kept = np.random.default_rng(0).random((2, 1, 40, 70)) < 0.5
    blocks = np.array([[[[True, False]]], [[[False, True]]]])
    for name, array in (("mask", kept), ("bias", kept.astype(np.float32)), ("block_mask", blocks)):
        right, wrong = (
            {name: BlockMask(x, 64, 64) if name == "block_mask" else x}
            for x in (array, array[::-1])
        )
        for number, one in enumerate(runs.run_packed("fa_tc", inputs, ends, **right)):
            assert one.judge().passed
            mistaken = {**one.options, **of_sequence(wrong, number, one.inputs)}
            assert replace(one, options=mistaken).judge().ratio > 1, name


@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_means_and_scales_are_those_of_a_sequence(granularity: str) -> None:
    """Groups of rows that fit in a block, and groups that span several."""
    quant = QuantConfig(granularity_q=granularity, granularity_k=granularity)
    inputs, ends = packed(((5, 38), (0, 9), (83, 133)), 4, 2, head_dim=32)
    assert_as_alone("fa_int8", inputs, ends, backend="interpret", causal=True, quant=quant)


@pytest.mark.parametrize(
    ("backend", "pv"), [("mirror", "16bit"), ("mirror", "int8"), ("interpret", "16bit")]
)
def test_given_scales_are_those_of_the_entries_of_a_batch(backend: str, pv: str) -> None:
    inputs, ends = packed(((5, 38), (0, 0), (20, 33)), 2, 1, 16)
    of_heads = np.float32([[[0.02], [0.03]], [[9], [9]], [[0.025], [0.01]]])
    # The mirror shows both kinds of scales, and the interpreter one.
    kinds = ((of_heads, of_heads[:, :1]), (0.02, of_heads[:1, :1]))
    for scales in kinds[: 2 if backend == "mirror" else 1]:
        granularity = "head" if scales[0] is of_heads else "tensor"
        quant = QuantConfig(granularity, "head", scales=scales, pv=pv)
        assert_as_alone("fa_int8", inputs, ends, backend=backend, quant=quant)


@given(
    st.lists(st.integers(0, 200), max_size=9),
    st.sampled_from([1, 2, 16, 64, VALUES_PAD, GROUP_ALL]),
)
def test_scales_of_sequences_do_not_overlap(lengths: list[int], group: int) -> None:
    """By the formula of prims/io/varlen.cuh they follow one another, and all have room.

    So do codes of V, of which every VALUES_PAD keys are a group.
    """
    end = first = 0
    for i, length in enumerate(lengths):
        assert first // group + i >= end
        end = first // group + i + group_count(length, group) * (length > 0)
        first += length
    assert end <= packed_groups(first, len(lengths), group)


@pytest.mark.parametrize("rung", runs.in_turn(0, RUNGS))
def test_within_the_bound(rung: str) -> None:
    inputs, ends = packed(LENGTHS, 2, 1, head_dim=32)
    for one in runs.run_packed(rung, inputs, ends, backend="interpret", causal=True):
        one.check()


@pytest.mark.parametrize("rung", runs.in_turn(1, RUNGS))
def test_neighbours_have_no_influence(rung: str) -> None:
    """Rows before and after a sequence are NaN, and so is everything beside the packed rows."""
    (q, k, v), ends = packed(((3, 2), (37, 41), (4, 5)), 2, 1, head_dim=32)
    rows, keys = slice(3, 40), slice(2, 43)
    spoilt = []
    for x, own in ((q, rows), (k, keys), (v, keys)):
        wide = np.full((x.shape[0], 3, 48), np.nan, x.dtype)
        wide[own, : x.shape[1], 8:40] = x[own]
        spoilt.append(wide[:, : x.shape[1], 8:40])
    options = {"causal": True, "window": (20, 0), "backend": "interpret"}
    o, lse = varlen(rung, (q, k, v), ends, **options)
    amid, amid_lse = varlen(rung, tuple(spoilt), ends, **options)
    assert bits(amid[rows]) == bits(o[rows]) and bits(amid_lse[:, rows]) == bits(lse[:, rows])
    assert np.isnan(amid[2]).all() and np.isnan(amid[40:]).all()


@pytest.mark.parametrize("rung", runs.in_turn(2, RUNGS))
def test_results_are_written_in_full_and_nothing_beside_them(rung: str) -> None:
    inputs, ends = packed(LENGTHS, 2, 1, head_dim=32)
    out = Guarded.empty(inputs[0].shape, "float16")
    options = {"causal": True, "backend": "interpret"}
    o, _ = varlen(rung, inputs, ends, out=out.array, **options)
    assert o is out.array
    out.check()
    wide = np.full((*o.shape[:2], 48), np.nan, np.float16)
    for pad in (8, 1):  # of another width of access
        view = wide[::-1, :, pad : pad + 32]
        varlen(rung, inputs, ends, out=view, **options)
        assert bits(view) == bits(o)


@pytest.mark.frameworks
def test_every_kind_of_array_that_holds_the_offsets() -> None:
    torch = pytest.importorskip("torch")
    (q, k, v), (ends_q, ends_k) = packed(LENGTHS, 4, 2, head_dim=8)
    expected = attention_varlen(q, k, v, ends_q, ends_k)
    turned = np.repeat(ends_q.astype(np.int64), 2)[::2]  # strided
    for ends in ((ends_q.astype(np.int64), ends_k), (turned, torch.from_numpy(ends_k))):
        assert bits(attention_varlen(q, k, v, *ends)) == bits(expected)
    found = attention_varlen(*map(torch.from_numpy, (q, k, v)), ends_q, ends_k)
    assert isinstance(found, torch.Tensor) and bits(found.numpy()) == bits(expected)


@given(
    st.tuples(*[st.integers(0, 12)] * 4), st.integers(-1, 14), st.integers(-1, 14), st.booleans(),
    st.sampled_from(["bottom-right", "top-left"]),
)  # fmt: skip
def test_limits_of_a_sequence_are_those_of_its_lengths(
    lengths: tuple[int, int, int, int], left: int, right: int, causal: bool, align: str
) -> None:
    """The kernel derives them from the limits of the longest lengths (prims/io/varlen.cuh)."""
    (len_q, longest_q), (len_kv, longest_kv) = sorted(lengths[:2]), sorted(lengths[2:])
    options = {"causal": causal, "causal_align": align, "window": (left, right)}
    first, last = check_limits(causal, align, (left, right), longest_q, longest_kv)
    call = call_of(
        len_q=longest_q, len_kv=longest_kv, causal=last is not None, window=first is not None
    )
    call = check_packed(call, (longest_q, longest_kv), **options)
    assert call.packed is not None
    shift = len_kv - len_q if call.packed.bottom_right else 0
    key, row = np.arange(len_kv), np.arange(len_q)[:, None]
    found = np.ones((len_q, len_kv), bool)
    if call.causal:
        found &= key <= row + min(shift + call.causal_shift, len_kv)
    if call.window:
        found &= key >= row + max(shift + call.window_shift, -len_q)
    np.testing.assert_array_equal(found, admitted((1, 1, len_q, len_kv), options)[0, 0])


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_to_do(rung: str, backend: str) -> None:
    for lengths in ((), ((0, 0),), ((0, 7), (0, 0)), ((3, 0), (2, 0))):
        inputs, ends = packed(lengths or ((0, 0),), 4, 2, head_dim=32)
        ends = ends if lengths else tuple(x[:1] for x in ends)
        o, lse = varlen(rung, inputs, ends, backend=backend)
        assert o.shape == inputs[0].shape and o.dtype == np.float16
        assert lse.shape == (4, len(o)) and (o == 0).all() and (lse == -np.inf).all()


def test_the_plan_follows_the_longest_lengths() -> None:
    inputs, (ends_q, ends_k) = packed(((3, 40), (65, 7)), 4, 2)
    options: dict[str, Any] = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    prepared = plan(*inputs, variant="unfused", backend="interpret", **options)
    assert prepared.workspace_bytes == 4 * 2 * 4 * 65 * 40
    fused = plan(*inputs, variant="fa", backend="interpret", **options)
    (launch,) = fused.plans[0].launches
    assert launch.grid == 3 * 4 * 2 and fused.plans[0].features.varlen
    wider = plan(*inputs, variant="fa", backend="interpret", max_len_q=97, **options)
    assert wider.plans[0].launches[0].grid == 4 * 4 * 2


def test_explain_says_the_form_and_where_keys_are_cut_off() -> None:
    inputs, (ends_q, ends_k) = packed(((3, 40), (65, 7)), 4, 2)
    said = explain(
        *inputs, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, variant="fa_tc", arch="sm_90a",
        causal=True,
    )  # fmt: skip
    assert "fa_tc (sm90)" in said and "varlen=True" in said
    assert "row i attends key j of its sequence where j <= i + len_kv - len_q +0" in said


def test_a_prepared_call_takes_other_sequences_up_to_its_limits() -> None:
    inputs, ends = packed(LENGTHS, 4, 2, head_dim=16)
    other = tuple(np.sort(rng_of(x).integers(0, x[-1] + 1, len(x))).astype(np.int32) for x in ends)
    for x, y in zip(other, ends, strict=True):
        x[0], x[-1] = 0, y[-1]
    for backend in ("mirror", "interpret"):
        options: dict[str, Any] = {"variant": "fa", "backend": backend, "causal": True}
        named = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
        longest = {"max_len_q": 80, "max_len_k": 112}
        prepared = plan(*inputs, return_lse=True, **named, **longest, **options)
        for others in (ends, other):
            given = {} if others is ends else {"cu_seqlens_q": other[0], "cu_seqlens_k": other[1]}
            o, lse = prepared(*inputs, **given)
            expected, expected_lse = varlen("fa", inputs, others, backend=backend, causal=True)
            assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)
        tight = plan(*inputs, **named, **options)
        with pytest.raises(ValueError, match=r"max_len_q=40 is less than the longest sequence"):
            tight(*inputs, cu_seqlens_q=np.repeat(ends[0][[0, -1]], 4))


def rng_of(x: np.ndarray) -> np.random.Generator:
    return np.random.default_rng(int(x[-1]))


# ---- what is refused -----------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused() -> None:
    (q, k, v), ends = packed(((3, 4), (2, 5)), 2, 1, head_dim=8)
    z = quantize(*(np.ones((1, 1, 4, 8), np.float16),) * 3)
    with pytest.raises(ValueError, match="this QuantizedQKV holds no packed sequences"):
        attention_varlen(z, None, None, *ends)
    with pytest.raises(TypeError, match="go with cu_seqlens_q and cu_seqlens_k"):
        resolved(q[None], k[None], v[None], max_len_q=5)
    with pytest.raises(ValueError, match="quant is for fa_int8"):
        attention_varlen(q, k, v, *ends, variant="fa", quant=QuantConfig())
    given = QuantConfig("tensor", "token", scales=(0.1, np.ones((1, 1, 9), np.float32)))
    for call in (attention_varlen, quantize):
        asked = {"quant": given, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))}
        with pytest.raises(UnsupportedError, match="are supported for granularity 'tensor' and"):
            call(q, k, v, **asked, **({"variant": "fa_int8"} if call is attention_varlen else {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.ones((1, 5, 2, 8), np.float16)}, "q must have three axes (total, heads, head_d"),
        ({"out": np.ones((5, 16), np.float16)}, "out must have three axes (total, heads, head_d"),
        ({"out": np.ones((4, 2, 8), np.float16)}, "out must have shape (5, 2, 8)"),
        ({"cu_seqlens_q": np.array([0, 3, 4])}, "cu_seqlens_q must rise from 0 to 5, the rows"),
        ({"cu_seqlens_q": np.array([1, 3, 5])}, "cu_seqlens_q must rise from 0 to 5"),
        ({"cu_seqlens_q": np.array([0, 6, 5])}, "cu_seqlens_q must rise from 0 to 5"),
        ({"cu_seqlens_k": np.array([0, 4, 10])}, "got [ 0  4 10]"),
        ({"cu_seqlens_k": np.array([0, 9])}, "must be of one length, got {'cu_seqlens_q': 2, 'cu"),
        ({"cu_seqlens_q": np.array([0.0, 3.0, 5.0])}, "must be int32 or int64 of shape (batch + 1"),
        ({"cu_seqlens_q": np.array([[0, 3, 5]])}, "got int64 of shape (1, 3)"),
        ({"cu_seqlens_q": np.zeros(0, np.int32)}, "got int32 of shape (0,)"),
        ({"max_len_q": 2}, "2 sequences of at most max_len_q=2 rows are fewer rows than the 5 of"),
        ({"max_len_k": -1}, "max_len_k must be between 0 and 2**30, got -1"),
        ({"mask": np.ones((5, 9), bool)}, "mask must broadcast to (batch, heads, len_q, len_kv) ="),
        (
            {"bias": np.zeros((2, 2, 3, 4), np.float32)},
            "= (2, 2, 3, 5), got bias.shape=(2, 2, 3, 4",
        ),
        (
            {"block_mask": BlockMask.from_window(3, 5, (1, 1)), "max_len_k": 70},
            "for len_q=3 and len_kv=70 must have 1 x 2 blocks, got mask.shape=(1, 1, 1, 1)",
        ),
        (
            {"rope": rope_tables(4, 8)},
            "have 4 positions, but rope_offset_q + len_q = 0 + 3 and len",
        ),
        ({"rope_offset_q": 3}, "say how rope=(cos, sin) is applied: give rope too"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    (q, k, v), (ends_q, ends_k) = packed(((3, 4), (2, 5)), 2, 1, head_dim=8)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_varlen(**given)


def test_kinds_of_arguments_are_checked() -> None:
    (q, k, v), (ends_q, ends_k) = packed(((3, 4), (2, 5)), 2, 1, head_dim=8)
    with pytest.raises(TypeError, match="max_len_q must be a whole number, got 3.5"):
        attention_varlen(q, k, v, ends_q, ends_k, max_len_q=3.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cu_seqlens_k must be a NumPy or CuPy array"):
        attention_varlen(q, k, v, ends_q, None)
    with pytest.raises(ValueError, match="2 sequences of at most max_len_k=4 rows are fewer"):
        check_packed(
            call_of(2, len_q=3, len_kv=4), (5, 9), causal=False, causal_align="top-left",
            window=(-1, -1),
        )  # fmt: skip


@pytest.mark.parametrize("rung", RUNGS)
def test_a_sequence_past_its_limit_is_cut(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the offsets were not checked, no kernel leaves the arrays that were made for it."""
    monkeypatch.setattr("cupyattn.kernels.limits.check_cu_seqlens", lambda *_: None)
    inputs, ends = packed(((5, 9), (40, 70)), 2, 1)
    out = Guarded.empty(inputs[0].shape, "float16")
    varlen(rung, inputs, ends, backend="interpret", max_len_q=33, max_len_k=40, out=out.array)
    whole = out.buffer[GUARD:-GUARD].reshape(inputs[0].shape)
    assert np.isfinite(whole[: 5 + 33]).all() and np.isnan(whole[5 + 33 :]).all()


@pytest.mark.parametrize("rung", RUNGS)
def test_offsets_past_the_arrays_are_a_finding(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyattn.kernels.limits.check_cu_seqlens", lambda *_: None)
    inputs, ends = packed(((5, 9), (40, 70)), 2, 1)
    with pytest.raises(KernelFault, match="out of bounds"):
        varlen(rung, inputs, (ends[0], ends[1] + 1), backend="interpret")
