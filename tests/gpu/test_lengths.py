"""Padded batches with lengths of their entries, on the device: each entry as if alone, amid NaN.

`tests/problem/test_lengths.py` says the same of the mirror and the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, plan, quantize
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from tests.gpu.support import Captured, arch_of, checked_calls, moved, on_device
from tests.gpu.test_varlen import (
    ALL_CELLS,
    BOTH_FORMS,
    HOPPER,
    OPTIONS,
    PV8,
    WITHOUT_MEANS,
)  # fmt: skip
from tests.problem.test_varlen import FEATURES, added
from tests.support.padded import NAMES, assert_as_alone, padded, run_padded
from tests.support.runs import Arrays, Guarded, asked_for, bits

cupy = pytest.importorskip("cupy")

#: Several tiles and tails, a tile of padding alone, no queries, no keys, more than there are.
LENGTHS = ((5, 170), (135, 0), (0, 9), (300, 257), (1, 1), (129, 999), (299, -4))
SIZES = (300, 400)


def drawn(
    head_dim: int = 64,
    dtype: str = "float16",
    seed: int = 0,
    of: Sequence[tuple[int, int]] = LENGTHS,
) -> tuple[Arrays, dict[str, Any]]:
    host, lengths = padded(of, SIZES, 4, 2, head_dim, dtype, seed)
    return on_device(*host), {name: cupy.asarray(x) for name, x in lengths.items()}


def asked(rung: str, **options: Any) -> dict[str, Any]:
    return {**asked_for(rung), "arch": arch_of(rung), **options, **WITHOUT_MEANS.get(rung, {})}


def check_as_alone(inputs: Arrays, lengths: dict[str, Any], options: dict[str, Any]) -> None:
    """Tiles of the Hopper form are named, which an entry without keys does not get."""
    planned = explain.plans(resolved(*inputs, **options, **lengths))[-1]
    named = {"tiles": planned.tiles} if planned.form.startswith("sm90") else {}
    assert_as_alone(inputs, lengths, options, lambda one: named if one[1].size else {})


@pytest.mark.parametrize(("rung", "dtype"), ALL_CELLS)
@pytest.mark.parametrize("head_dim", [64, 36])
def test_every_entry_is_as_if_alone(rung: str, dtype: str, head_dim: int) -> None:
    for seed, options in enumerate(OPTIONS):
        inputs, lengths = drawn(head_dim, dtype, seed)
        check_as_alone(inputs, lengths, asked(rung, **options))


@pytest.mark.parametrize("rung", [*BOTH_FORMS, PV8])
@pytest.mark.parametrize("feature", [*FEATURES, "all"])
def test_masks_and_positions_keep_their_places(rung: str, feature: str) -> None:
    # NOTE: a float32 bias of one key broadcasts, and so runs in another form than a larger one.
    inputs, lengths = drawn(of=[(1, 2) if both == (1, 1) else both for both in LENGTHS])
    options = moved(added(feature, 4, 64, [SIZES] * len(LENGTHS)))
    if feature == "key mask":
        # NOTE: of 257 keys the last has a step to itself. Were it masked, the entry alone would not
        # take that step, which lowers M in the forms whose O is of whole numbers: the last bit of
        # lse would differ.
        options["mask"][256] = True
    check_as_alone(inputs, lengths, asked(rung, **options))


@pytest.mark.parametrize("rung", [*BOTH_FORMS, PV8])
def test_within_the_bound(rung: str) -> None:
    host, lengths = padded([(a, min(b, 256)) for a, b in LENGTHS], (300, 256), 4, 2, 128)
    given = {name: cupy.asarray(x) for name, x in lengths.items()}
    for one in run_padded(rung, on_device(*host), given, arch=arch_of(rung), causal=True):
        one.check()


@pytest.mark.parametrize("rung", BOTH_FORMS)
def test_results_are_written_in_full_and_nothing_beside_them(rung: str) -> None:
    inputs, lengths = drawn()
    out = Guarded.empty(inputs[0].shape, "float16", xp=cupy)
    attention(*inputs, out=out.array, causal=True, **asked(rung), **lengths)
    out.check()
    o = attention(*inputs, causal=True, **asked(rung), **lengths)
    assert bits(out.array) == bits(o)


@pytest.mark.parametrize("rung", ["fa_int8", "fa_int8@sm90", PV8, "fa_int8@sm90_pv8"])
def test_a_record_is_cut_to_lengths(rung: str) -> None:
    (q, k, v), lengths = drawn()
    inputs = tuple(map(cupy.nan_to_num, (q, k, v)))
    quant, arch = WITHOUT_MEANS[rung]["quant"], arch_of(rung)
    z = quantize(*inputs, quant=quant, arch=arch)
    o = attention(z, arch=arch, lengths_kv=lengths["lengths_kv"])
    keys = cupy.arange(SIZES[1]) < lengths["lengths_kv"][:, None]
    expected = attention(z, arch=arch, mask=keys[:, None, None])
    np.testing.assert_allclose(o.get(), expected.get(), rtol=0, atol=2e-2)


def test_lengths_on_the_host_and_of_64_bits_are_the_same_call() -> None:
    inputs, lengths = drawn()
    expected = bits(attention(*inputs, **lengths))
    for other in (
        {name: x.get() for name, x in lengths.items()},
        {name: x.astype(np.int64) for name, x in lengths.items()},
    ):
        assert bits(attention(*inputs, **other)) == expected


@pytest.mark.parametrize("rung", ["fa_tc", HOPPER, "fa_int8"])
def test_a_captured_call_reads_the_lengths_when_it_runs(rung: str) -> None:
    """Nothing waits for the device, and a replay sees what lies there then."""
    (q, k, v), lengths = drawn()
    q, k, v = map(cupy.nan_to_num, (q, k, v))
    out, options = cupy.full_like(q, cupy.nan), asked(rung)
    prepared = plan(q, k, v, out=out, **options, **lengths)
    captured = Captured(lambda: prepared(q, k, v, out=out))
    other = {name: x[::-1].copy() for name, x in lengths.items()}
    expected = bits(attention(q, k, v, **options, **other))
    for name in NAMES:
        lengths[name][...] = other[name]
    captured.replay()
    assert bits(out) == expected


def test_a_call_is_found_again_and_reads_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), lengths = drawn()
    q, k, v = map(cupy.nan_to_num, (q, k, v))
    other = {name: x[::-1].copy() for name, x in lengths.items()}
    expected = [bits(attention(q, k, v, variant="fa", **x)) for x in (lengths, other)]
    checked = checked_calls(monkeypatch)
    found = [bits(attention(q, k, v, variant="fa", **x)) for x in (lengths, other)]
    assert found == expected and len(checked) == 1
