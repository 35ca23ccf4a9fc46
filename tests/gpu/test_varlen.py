"""Packed sequences on the device: each as if alone, offsets unread where limits are given.

`tests/problem/test_varlen.py` says the same of the mirror and the interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import (
    QuantConfig,
    QuantizedQKV,
    attention,
    attention_varlen,
    plan,
    quantize,  # fmt: skip
)
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.ops.prepared import SEQUENCES
from tests.gpu.support import (
    Captured,
    arch_of,
    attend,
    checked_calls,
    moved,
    on_device,
    run_packed,
)
from tests.problem.test_varlen import CELLS, FEATURES, OPTIONS, RUNGS, added, rng_of
from tests.support.runs import (
    Arrays,
    Guarded,
    asked_for,
    bits,
    of_sequence,
    packed,
    sequences,
    variant_of,
)

cupy = pytest.importorskip("cupy")

HOPPER, HOPPER_CODES, PV8 = "fa_tc@sm90", "fa_int8@sm90", "fa_int8@pv8"
HOPPER_PV8, HOPPER_FP8 = "fa_int8@sm90_pv8", "fa_int8@sm90_fp8"
BY_TILE = "fa_int8@sm90_pv8_by_tile"
#: The mean of keys or values is summed in slices, as many as the longest needs.
WITHOUT_MEANS = {
    "fa_int8": {"quant": QuantConfig(smooth_k=False)},
    HOPPER_CODES: {"quant": QuantConfig(smooth_k=False)},
    **{
        rung: {"quant": QuantConfig(pv="int8", smooth_k=False, smooth_v=False)}
        for rung in (PV8, BY_TILE)
    },
    **{
        rung: {"quant": QuantConfig(pv=pv, granularity_v="channel", smooth_k=False, smooth_v=False)}
        for rung, pv in ((HOPPER_PV8, "int8"), (HOPPER_FP8, "fp8"))
    },
}
HOPPER_FORMS = (HOPPER, HOPPER_CODES, HOPPER_PV8, HOPPER_FP8, BY_TILE)
BOTH_FORMS = (*RUNGS, *HOPPER_FORMS)
ALL_CELLS = [
    *CELLS, *((rung, dtype) for rung in HOPPER_FORMS for dtype in variant_of(rung).dtypes)
]  # fmt: skip
#: Several tiles and tails; empty ones in front, in the middle and at the end.
LENGTHS = ((0, 0), (5, 170), (135, 0), (0, 9), (0, 0), (300, 257), (1, 1), (129, 400), (0, 3))


def varlen(rung: str, inputs: Arrays, ends: Any, **options: Any) -> Any:
    asked = {**asked_for(rung), "arch": arch_of(rung), "return_lse": True, **options}
    return attention_varlen(*inputs, *ends, **asked)


def hopper_tiles(rung: str, inputs: Arrays, ends: Any, **options: Any) -> dict[str, Any]:
    """Return the tiles of a packed call in the Hopper form, which a call by itself may not have."""
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    asked = dict(variant=variant_of(rung).name, arch=arch_of(rung), **named, **options)
    planned = explain.plans(resolved(*inputs, **asked))[-1]
    return {"tiles": planned.tiles} if planned.form.startswith("sm90") else {}


@pytest.mark.parametrize(("rung", "dtype"), ALL_CELLS)
@pytest.mark.parametrize("head_dim", [64, 36])
def test_every_sequence_is_as_if_alone(rung: str, dtype: str, head_dim: int) -> None:
    for seed, options in enumerate(OPTIONS):
        host, host_ends = packed(LENGTHS, 4, 2, head_dim, dtype, seed)
        inputs, ends = on_device(*host), on_device(*host_ends)
        options = options | WITHOUT_MEANS.get(rung, {})
        tiles = hopper_tiles(rung, inputs, ends, **options)
        for limits in ({}, {"max_len_q": 300, "max_len_k": 400}, {"max_len_q": 999}):
            o, lse = varlen(rung, inputs, ends, **limits, **options)
            for rows, one in sequences(inputs, ends):
                expected, expected_lse = attend(
                    rung, *one, return_lse=True, **options, **(tiles if one[1].size else {})
                )
                assert bits(o[rows].swapaxes(0, 1)) == bits(expected), (rows, options)
                assert bits(lse[:, rows]) == bits(expected_lse), (rows, options)


@pytest.mark.parametrize("rung", [*BOTH_FORMS, PV8])
@pytest.mark.parametrize("feature", [*FEATURES, "all"])
def test_masks_and_positions_are_those_of_a_sequence(rung: str, feature: str) -> None:
    # NOTE: a float32 bias of one key broadcasts, and so runs in another form than a larger one.
    lengths = [(1, 2) if both == (1, 1) else both for both in LENGTHS]
    host, host_ends = packed(lengths, 4, 2)
    inputs, ends = on_device(*host), on_device(*host_ends)
    options = moved(added(feature, 4, 64, lengths)) | WITHOUT_MEANS.get(rung, {})
    tiles = hopper_tiles(rung, inputs, ends, **options)
    o, lse = varlen(rung, inputs, ends, **options)
    asked = {"variant": variant_of(rung).name, "arch": arch_of(rung), "return_lse": True}
    for number, (rows, one) in enumerate(sequences(inputs, ends)):
        own = of_sequence(options, number, one) | (tiles if one[1].size else {})
        expected, expected_lse = attention(*one, **asked, **own)
        assert bits(o[rows].swapaxes(0, 1)) == bits(expected), rows
        assert bits(lse[:, rows]) == bits(expected_lse), rows


@pytest.mark.parametrize("rung", ["fa_int8", HOPPER_CODES, PV8, HOPPER_PV8, HOPPER_FP8, BY_TILE])
def test_quantised_operands_may_be_packed(rung: str, tmp_path: Path) -> None:
    host, host_ends = packed(LENGTHS, 4, 2)
    inputs, ends = on_device(*host), on_device(*host_ends)
    quant = WITHOUT_MEANS[rung]["quant"]
    arch = arch_of(rung)
    z = quantize(*inputs, quant=quant, arch=arch, **dict(zip(SEQUENCES, ends, strict=True)))
    expected = bits(varlen(rung, inputs, ends, quant=quant)[0])
    z.save(tmp_path / "packed.npz")
    loaded = QuantizedQKV.load(tmp_path / "packed.npz", namespace=cupy)
    for one in (z, z, loaded):  # the second call finds the first again
        assert bits(attention_varlen(one, arch=arch_of(rung))) == expected
        assert bits(plan(one, arch=arch_of(rung))(one)) == expected
    named = dict(zip(SEQUENCES, host_ends, strict=True))
    on_host = quantize(*host, quant=quant, arch=arch, **named)
    for found, wanted in zip(z.sequences(), on_host.sequences(), strict=True):
        assert bits(found.k_codes) == bits(wanted.k_codes)
        if found.v_codes is not None:
            assert bits(found.v_codes) == bits(wanted.v_codes)


@pytest.mark.parametrize("rung", BOTH_FORMS)
def test_within_the_bound(rung: str) -> None:
    host, ends = packed([(a, min(b, 256)) for a, b in LENGTHS], 4, 2, 128)
    for one in run_packed(rung, on_device(*host), on_device(*ends), causal=True):
        one.check()


@pytest.mark.parametrize("rung", BOTH_FORMS)
def test_neighbours_have_no_influence(rung: str) -> None:
    host, host_ends = packed(((3, 2), (137, 241), (4, 5)), 2, 1)
    ends = on_device(*host_ends)
    spoilt = []
    for x, end in zip(host, (host_ends[0], host_ends[1], host_ends[1]), strict=True):
        spoilt.append(np.full_like(x, np.nan))
        spoilt[-1][end[1] : end[2]] = x[end[1] : end[2]]
    o, lse = varlen(rung, on_device(*host), ends, causal=True)
    amid, amid_lse = varlen(rung, on_device(*spoilt), ends, causal=True)
    rows = slice(3, 140)
    assert bits(amid[rows]) == bits(o[rows]) and bits(amid_lse[:, rows]) == bits(lse[:, rows])


@pytest.mark.parametrize("rung", BOTH_FORMS)
def test_results_are_written_in_full_and_nothing_beside_them(rung: str) -> None:
    host, ends = packed(LENGTHS, 4, 2)
    out = Guarded.empty(host[0].shape, "float16", xp=cupy)
    inputs, ends = on_device(*host), on_device(*ends)
    o, _ = varlen(rung, inputs, ends, out=out.array, causal=True)
    out.check()
    assert bits(o) == bits(varlen(rung, inputs, ends, causal=True)[0])


@pytest.mark.parametrize("rung", BOTH_FORMS)
def test_a_sequence_past_its_limit_is_cut(rung: str) -> None:
    host, ends = packed(((5, 9), (40, 70)), 2, 1)
    out = Guarded.empty(host[0].shape, "float16", xp=cupy)
    varlen(rung, on_device(*host), on_device(*ends), max_len_q=33, max_len_k=40, out=out.array)
    assert bool(cupy.isfinite(out.array[: 5 + 33]).all())
    assert bool(cupy.isnan(out.array[5 + 33 :]).all())


def test_offsets_on_the_host_and_of_64_bits_are_the_same_call() -> None:
    host, ends = packed(LENGTHS, 4, 2)
    inputs = on_device(*host)
    expected = bits(varlen("fa", inputs, on_device(*ends))[0])
    wide = on_device(*(x.astype(np.int64) for x in ends))
    limits = {"max_len_q": 300, "max_len_k": 400}
    for others in (ends, wide):
        assert bits(varlen("fa", inputs, others)[0]) == expected
        assert bits(varlen("fa", inputs, others, **limits)[0]) == expected


@pytest.mark.parametrize("rung", ["fa_tc", HOPPER])
def test_calls_of_late_see_the_offsets_that_they_are_given(rung: str) -> None:
    host, host_ends = packed(LENGTHS, 4, 2)
    inputs, limits = on_device(*host), {"max_len_q": 1000, "max_len_k": 1000}
    for seed in range(3):
        other = [np.sort(rng_of(x + seed).integers(0, x[-1] + 1, len(x))) for x in host_ends]
        for x, end in zip(other, host_ends, strict=True):
            x[0], x[-1] = 0, end[-1]
        ends = on_device(*(x.astype(np.int32) for x in other))
        expected = bits(varlen(rung, inputs, ends)[0])
        assert bits(varlen(rung, inputs, ends, **limits)[0]) == expected
        named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        prepared = plan(*inputs, variant="fa_tc", arch=arch_of(rung), **named, **limits)
        assert bits(prepared(*inputs)) == expected
        assert bits(prepared(*inputs, **named)) == expected


@pytest.mark.parametrize("rung", ["fa_tc", HOPPER])
def test_a_captured_call_reads_the_offsets_when_it_runs(rung: str) -> None:
    """Nothing waits for the device, and a replay sees what lies there then."""
    host, host_ends = packed(((100, 70), (30, 90)), 4, 2)
    (q, k, v), ends = on_device(*host), on_device(*host_ends)
    out = cupy.full_like(q, cupy.nan)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    asked: dict[str, Any] = {"variant": "fa_tc", "arch": arch_of(rung)}
    prepared = plan(q, k, v, out=out, max_len_q=130, max_len_k=160, **asked, **named)
    captured = Captured(lambda: prepared(q, k, v, out=out))
    other = on_device(np.array([0, 130, 130], np.int32), np.array([0, 159, 160], np.int32))
    expected = bits(attention_varlen(q, k, v, *other, **asked))
    for mine, theirs in zip(ends, other, strict=True):
        mine[...] = theirs
    captured.replay()
    assert bits(out) == expected


def test_a_call_with_limits_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host, ends = packed(LENGTHS, 4, 2)
    (q, k, v), (ends_q, ends_k) = on_device(*host), on_device(*ends)
    checked = checked_calls(monkeypatch)
    for max_len_k, times in ((400, 1), (400, 1), (401, 2)):
        attention_varlen(q, k, v, ends_q, ends_k, variant="fa", max_len_q=300, max_len_k=max_len_k)
        assert len(checked) == times
