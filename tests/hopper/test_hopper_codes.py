"""Any head_dim in the Hopper forms of fa_int8: rows of codes are padded, those of O are not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantizedQKV, Tiles, attention, attention_varlen, explain, quantize
from cupyattn.interpret import KernelFault
from cupyattn.quant.quantizers import padded_columns
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.support import runs
from tests.support.marks import slow
from tests.support.runs import bits, check_each_alone, form_taken, normal, packed

CODES, CODES_OF_V = "fa_int8@sm90", "fa_int8@sm90_pv8"
FORMS = {CODES: "sm90", CODES_OF_V: "sm90_pv8"}
HOPPER: dict[str, Any] = {"arch": "sm_90a", "backend": "interpret"}


@pytest.mark.parametrize(
    ("rung", "head_dim", "dtype", "options"),
    [
        (CODES, 72, "float16", {"causal": True}),
        pytest.param(CODES_OF_V, 40, "float16", {}, marks=pytest.mark.slow),
        pytest.param(CODES, 8, "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param(CODES, 200, "float32", {}, marks=pytest.mark.slow),
        pytest.param(CODES_OF_V, 72, "bfloat16", {"causal": True}, marks=pytest.mark.slow),
    ],
)
def test_within_the_bound(rung: str, head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    inputs = normal((1, 2, 40, head_dim), (1, 1, 90, head_dim), dtype)
    for backend in ("mirror", "interpret"):
        one = runs.run(rung, inputs, arch="sm_90a", backend=backend, **options)
        assert one.form == FORMS[rung]
        one.check()


def run_among_rows(rung: str) -> runs.Run:
    """Attend through a window whose first key differs among the rows of a warp."""
    return runs.run(rung, normal((1, 1, 40, 72), (1, 1, 200, 72)), window=(90, 0), **HOPPER)


@pytest.mark.parametrize(
    "rung", ["fa_tc@sm90", CODES, cases.FP8, *slow((CODES_OF_V, cases.BY_TILE))]
)
def test_a_window_that_begins_among_the_rows_of_a_warp(rung: str) -> None:
    """A step is masked for only some rows, but the lanes of the warp take one path."""
    one = run_among_rows(rung)
    assert one.form == rung.partition("@")[2]
    one.check()


def test_lanes_that_ask_for_their_own_rows_vote_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, own = "q - lane_id() / 4, 16)", "q, 9)"
    put_a_line_in_place("prims/score/score.cuh", rows, own, tmp_path, monkeypatch)
    with pytest.raises(KernelFault):
        run_among_rows(CODES)


@pytest.mark.slow
def test_sequences_of_codes_are_as_if_alone() -> None:
    tiles = Tiles(128, 64, 12, 2)
    inputs, ends = packed(((5, 30), (20, 70)), 2, 1, 40)
    given = {"variant": "fa_int8", "tiles": tiles, "return_lse": True, **HOPPER}
    found = attention_varlen(*inputs, *ends, **given)
    check_each_alone(found, inputs, ends, functools.partial(attention, **given))


# ---- where rows end ------------------------------------------------------------------------------


def wide_rows(head_dim: int = 36, dtype: str = "float16") -> tuple[runs.Arrays, np.ndarray]:
    """Return operands with rows that the copy engine takes, and a buffer of NaN for O like them."""
    columns = -(-head_dim // 8) * 8
    wide = normal((1, 1, 20, columns), (1, 1, 30, columns), dtype)
    q, k, v = (x[..., :head_dim] for x in wide)
    return (q, k, v), np.full_like(wide[0], np.nan)


def check_that_no_column_past_head_dim_is_written(rung: str) -> None:
    inputs, buffer = wide_rows()
    out = buffer[..., :36]
    assert form_taken(rung, inputs, out=out, **HOPPER) == FORMS[rung]
    runs.attend(rung, *inputs, out=out, **HOPPER)
    assert np.isfinite(out).all() and np.isnan(buffer[..., 36:]).all()


@pytest.mark.parametrize("rung", [CODES, pytest.param(CODES_OF_V, marks=pytest.mark.slow)])
def test_no_column_past_head_dim_is_written(rung: str) -> None:
    check_that_no_column_past_head_dim_is_written(rung)


def test_a_column_past_head_dim_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "  if (col + 8 <= HEAD_DIM) {\n"
    some = "  if (col < HEAD_DIM) {\n"
    put_a_line_in_place("prims/io/tile_io.cuh", whole, some, tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match="out of bounds"):
        check_that_no_column_past_head_dim_is_written(CODES)


# ---- rows of codes -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, pytest.param(1, marks=pytest.mark.slow), 72])
def test_rows_of_codes_are_padded_wherever_they_are_made(head_dim: int, tmp_path: Path) -> None:
    inputs = normal((1, 2, 5, head_dim), (1, 1, 7, head_dim))
    (q, k, v), ends = packed(((2, 3), (3, 4)), 2, 1, head_dim)
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    for backend in ("mirror", "interpret"):
        z = quantize(*inputs, backend=backend)
        z.save(tmp_path / backend)
        loaded = QuantizedQKV.load(tmp_path / backend)
        for one in (z, loaded, quantize(q, k, v, backend=backend, **offsets)):
            for codes in (one.q_codes, one.k_codes):
                assert codes.shape[-1] == head_dim
                assert codes.strides[2:] == (padded_columns(head_dim), 1)
        assert bits(loaded.k_codes) == bits(z.k_codes)


def test_codes_of_ones_own_lie_as_they_lie() -> None:
    """`explain` says what keeps them from the Hopper form."""
    z = quantize(*normal((1, 1, 20, 40), (1, 1, 30, 40)))
    codes = np.ascontiguousarray(z.q_codes), np.ascontiguousarray(z.k_codes)
    own = QuantizedQKV.from_codes(*codes, z.v, z.q_scale, z.k_scale, group_q=2, group_kv=16)
    assert "fa_int8 (sm90)" in str(explain(z, arch="sm_90a"))
    text = str(explain(own, arch="sm_90a"))
    assert "fa_int8 (portable)" in text and "multiples of 16 bytes, got q" in text
    o = attention(z, arch="sm_90", backend="interpret")
    assert bits(o) == bits(attention(own, arch="sm_90", backend="interpret"))


def test_the_memory_that_explain_counts_is_padded() -> None:
    q, k, v = normal((1, 2, 70, 72), (1, 1, 90, 72))
    text = str(explain(q, k, v, variant="fa_int8"))
    assert "q_codes 1 x 2 x 70 x 80 int8, 11,200 bytes" in text
    assert "k_codes 1 x 1 x 90 x 80 int8, 7,200 bytes" in text
