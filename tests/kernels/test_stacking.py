"""Query heads that share a key head, stacked as the rows of one in the Hopper form of fa_tc."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import attention, explain, plan
from cupyattn.arrays.operand import Operand
from cupyattn.distributions import make
from cupyattn.problem.operands import LEAST_STACKED_ROWS
from tests.support import runs
from tests.support.marks import slow_unless
from tests.support.runs import bits

HOPPER: dict[str, Any] = {"arch": "sm_90a", "backend": "interpret"}
#: batch, heads, heads_kv, len_q, len_kv, head_dim, dtype, options. Rows of a tile that is not full,
#: of several heads in a warp, of two tiles; keys of every row's own.
CELLS: tuple[tuple[Any, ...], ...] = (
    (1, 8, 1, 9, 600, 64, "float16", {"causal": True}),
    (1, 64, 1, 1, 520, 128, "bfloat16", {}),
    (1, 10, 1, 15, 530, 40, "float16", {"causal": True}),
    (2, 10, 2, 13, 513, 64, "bfloat16", {}),
)


def inputs_of(cell: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    batch, heads, heads_kv, len_q, len_kv, head_dim, dtype, _ = cell
    return make("normal", batch, heads, len_q, len_kv, head_dim, dtype, 0, heads_kv)


@pytest.mark.parametrize("cell", slow_unless(lambda i, _: i < 2, CELLS), ids=str)
def test_results_are_within_their_bound(cell: tuple[Any, ...]) -> None:
    one = runs.run("fa_tc", inputs_of(cell), **HOPPER, **cell[-1])
    assert one.form == "sm90"
    report = one.check()
    assert report.lse_ratio is not None and report.lse_ratio <= 1


def test_they_are_the_rows_of_one_head_to_the_bit() -> None:
    q, k, v = inputs_of((1, 8, 1, 9, 600, 64, "float16", {}))
    stacked = attention(q, k, v, variant="fa_tc", **HOPPER)
    alone = attention(q.reshape(1, 1, 72, 64), k, v, variant="fa_tc", **HOPPER)
    assert bits(stacked) == bits(alone.reshape(q.shape))


def test_one_row_a_head_may_lie_in_any_layout() -> None:
    q, k, v = inputs_of((1, 64, 1, 1, 520, 64, "float16", {}))
    o = attention(q, k, v, variant="fa_tc", **HOPPER)
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    found = attention(*turned, variant="fa_tc", layout="BSHD", **HOPPER)
    assert bits(found.swapaxes(1, 2)) == bits(o)


def forms(q: Any, k: Any, v: Any, **options: Any) -> str:
    return plan(q, k, v, variant="fa_tc", **{**HOPPER, **options}).plans[-1].form


def test_what_is_stacked_and_what_is_not() -> None:
    q, k, v = inputs_of((1, 16, 2, 8, 600, 64, "float16", {}))
    assert q.shape[1] // k.shape[1] * q.shape[2] == LEAST_STACKED_ROWS
    text = explain(q, k, v, arch="sm_90a", causal=True)
    assert "fa_tc (sm90)" in text
    assert "8 query heads share each key head, stacked as rows of one" in text
    assert forms(q, k, v) == forms(q, k, v, causal=True) == "sm90"
    assert forms(q[:, :, :7], k, v) == "split"  # views of rows that lie further apart
    assert forms(np.ascontiguousarray(q[:, :, :7]), k, v) == "split"  # 56 rows
    assert forms(q[:, :2], k, v) == "split"  # heads by themselves
    assert forms(q, k, v, window=(99, 0)) == "split"
    assert forms(q, k, v, causal=True, causal_align="top-left") == "split"  # of most keys none sees
    assert forms(q, k, v, arch="sm_80") == "split"
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    assert forms(*turned, layout="BSHD") == "split"  # rows of a head lie among those of others
    assert Operand.of(q).strides[1] == 8 * Operand.of(q).strides[2]


KEYS = np.arange(600) % 7 != 3


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 4.0, "mask": KEYS[None, None, None]},
        {"bias": np.where(KEYS, np.float16(0.5), np.float16(-np.inf)), "causal": True},
    ],
    ids="-".join,
)
def test_softcap_and_masks_and_biases_of_keys(options: dict[str, Any]) -> None:
    inputs = inputs_of((1, 8, 1, 9, 600, 64, "float16", {}))
    assert "stacked as rows of one" in str(explain(*inputs, variant="fa_tc", **HOPPER, **options))
    one = runs.run("fa_tc", inputs, **HOPPER, **options)
    assert one.form == "sm90"
    one.check()


def test_scores_that_differ_by_row_or_head_are_not_stacked() -> None:
    inputs = inputs_of((1, 8, 1, 9, 600, 64, "float16", {}))
    for options in (
        {"mask": np.ones((9, 600), bool)}, {"bias": np.zeros((8, 1, 600), np.float16)},
        {"bias": np.zeros((1, 1), np.float16)},
    ):  # fmt: skip
        text = str(explain(*inputs, variant="fa_tc", **HOPPER, **options))
        assert "fa_tc (sm90)" in text and "stacked" not in text


def test_nothing_beside_the_rows_is_written() -> None:
    q, k, v = inputs_of((1, 10, 1, 7, 520, 40, "float16", {}))
    before = [bits(x) for x in (q, k, v)]
    out = runs.Guarded.empty(q.shape, "float16")
    runs.attend("fa_tc", q, k, v, out=out.array, **HOPPER)
    out.check()
    assert [bits(x) for x in (q, k, v)] == before
    assert bits(out.array) == bits(runs.attend("fa_tc", q, k, v, **HOPPER))
