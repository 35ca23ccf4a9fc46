"""P in u8 in units of its own tile, V with a scale for every channel and tile: Hopper form."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantizedQKV, Tiles, attention, explain
from cupyattn.interpret import KernelFault
from cupyattn.kernels import numerics
from cupyattn.kernels.ladder import HOPPER_VALUE_KEYS, lookup
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.support.marks import slow_unless
from tests.support.runs import bits, normal

LN2 = math.log(2.0)
NAME = "sm90_pv8_by_tile"
FORM: dict[str, Any] = {"variant": "fa_int8", "form": NAME}
KERNEL = "sm90/attn_fa_int8_pv8_by_tile.cu"
BY_TILE = QuantConfig(pv="int8")
CHANNEL = QuantConfig(pv="int8", granularity_v="channel")


def for_hopper(*inputs: Any, quant: QuantConfig = BY_TILE) -> QuantizedQKV:
    """Operands on the host with the scales that this form takes."""
    return quantize(*inputs, quant=quant, backend="mirror", arch="sm_90a")


# ---- the mirror ----------------------------------------------------------------------------------


def test_it_rounds_as_the_portable_form_does() -> None:
    portable, hopper = (
        numerics.numerics("int8", form, "float16", BY_TILE) for form in ("pv8", NAME)
    )
    assert hopper == portable and hopper.sums_operand and not hopper.scales_last


def test_a_tile_has_the_keys_that_share_a_scale() -> None:
    variant = lookup("fa_int8")
    for head_dim in (16, 64, 72, 128, 192, 256):
        tiles = variant.tiles_for(head_dim, form=NAME, lengths=(4096, 4096))
        assert tiles.block_kv == HOPPER_VALUE_KEYS
        q, k, v = normal((1, 1, 8, head_dim), (1, 1, 300, head_dim))
        z = for_hopper(q, k, v)
        assert z.group_v == tiles.block_kv and z.v_scale.shape == (1, 1, 3, head_dim)


def test_it_errs_by_less_than_o_in_whole_numbers() -> None:
    """Somewhat on normal values, and by half where one channel outweighs the others."""
    q, k, v = normal((1, 2, 64, 64), (1, 2, 1024, 64))
    outliers = v.copy()
    outliers[:, :, 5] *= 16
    for values, gain in ((v, 1.15), (outliers, 2.0)):
        exact = attention_exact(q, k, values)
        errors = []
        for form, quant in ((NAME, BY_TILE), ("sm90_pv8", CHANNEL)):
            z = for_hopper(q, k, values, quant=quant)
            o = attention_mirror(z, variant="fa_int8", form=form).astype(np.float64)
            errors.append(np.linalg.norm(o - exact) / np.linalg.norm(exact))
        assert gain * errors[0] < errors[1], errors


# ---- the kernel, interpreted ---------------------------------------------------------------------


def check_whole_numbers(len_kv: int) -> None:
    z = cases.exact_by_tile(np.asarray, len_kv)
    given: dict[str, Any] = {"scale": LN2, "return_lse": True}
    o, lse = attention(z, arch="sm_90a", backend="interpret", **given)
    expected, expected_lse = attention_mirror(z, **FORM, **given)
    np.testing.assert_allclose(o, expected, 2.0**-18, 2.0**-16)
    assert np.abs(lse - expected_lse).max() <= 2.0**-18


@pytest.mark.parametrize("len_kv", [1, 129, 600])
def test_whole_numbers_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    """Codes of P follow by hand, sums of their products are exact: no code flips."""
    check_whole_numbers(len_kv)


def test_columns_end_within_eight() -> None:
    """A row of scales ends within the columns that a fragment has side by side."""
    inputs = normal((1, 1, 20, 36), (1, 1, 150, 36), "float32")
    cases.run(cases.BY_TILE, inputs, backend="interpret").check()


def test_a_value_that_all_keys_of_a_channel_share_comes_back() -> None:
    """O is divided by the sum of what multiplies V, whatever the scales of P and V."""
    q, k, v = normal((1, 1, 20, 16), (1, 1, 200, 16))
    v[...] = np.arange(16)
    quant = replace(BY_TILE, smooth_v=False)
    one = cases.run(cases.BY_TILE, (q, k, v), backend="interpret", quant=quant)
    np.testing.assert_allclose(one.o.astype(np.float64), v[:, :, :20], rtol=2.0**-10)


def test_a_scale_of_keys_that_is_nan_reaches_the_rows_that_attend_alone() -> None:
    """A row whose mask leaves it none of the keys of that scale has no part in it."""
    q, k, v = normal((1, 1, 80, 16), (1, 1, 80, 16))
    z = for_hopper(q, k, v, quant=replace(BY_TILE, smooth_k=False))
    scale = z.k_scale.copy()
    scale[..., 2] = np.nan  # of keys 32 to 47
    spoilt = replace(z, k_scale=scale)
    given: dict[str, Any] = {"arch": "sm_90a", "backend": "interpret", "causal": True}
    clean, clean_lse = attention(z, return_lse=True, **given)
    o, lse = attention(spoilt, return_lse=True, **given)
    assert bits(o[:, :, :32]) == bits(clean[:, :, :32])
    assert bits(lse[:, :, :32]) == bits(clean_lse[:, :, :32])
    assert np.isnan(o[:, :, 32:]).all() and np.isnan(lse[:, :, 32:]).all()


#: Faults: text of the kernel, and its replacement.
WRONG = {
    "scales of V of the first tile": ("V_scale + int64_t(group) * HEAD_DIM", "V_scale"),
    "scales of V of the first columns": (
        "reinterpret_cast<const float2*>(&V_scale[col])",
        "reinterpret_cast<const float2*>(&V_scale[col % SUM_COLS])"),
    "the tile's unit taken for the row's": (
        "ex2_approx_ftz(tile_M[h] - state[h].M_finite());", "1.0f;"),
    "O stays as the maximum rises": ("O_acc[i] *= alpha[i / 2 % 2];", ";"),
    "the sum of lse stays as the maximum rises": (
        "exact_l[0] *= alpha[0], exact_l[1] *= alpha[1];", ";"),
    "columns of the part before": ("next * BOX_BYTES);", "c * BOX_BYTES);"),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_unless(lambda number, _: not number, WRONG))
def test_what_goes_wrong_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place(KERNEL, *WRONG[what], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_whole_numbers(600)


def test_scales_that_a_lane_still_reads_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come to a stage again that one lane gives back for all of its warp."""
    ordered = "      __syncwarp();  // every lane has read its scales\n"
    put_a_line_in_place(KERNEL, ordered, "", tmp_path, monkeypatch)
    inputs = normal((1, 1, 20, 32), (1, 1, 700, 32))
    with pytest.raises(KernelFault, match="race"):
        cases.run(cases.BY_TILE, inputs, backend="interpret")


# ---- which calls it takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        (replace(BY_TILE, p_type="s8"), "takes P in u8, or in e4m3 with pv='fp8', got p_type 's8'"),
        (replace(BY_TILE, symmetric=False), "takes no zero points"),
        (QuantConfig(granularity_k="token", pv="int8"), "one scale for 16 keys, or for a multiple"),
        (QuantConfig(pv="fp8"), "for P and V in e4m3 takes one scale for a channel of V"),
    ],
)
def test_what_it_leaves_to_the_portable_form(quant: QuantConfig, reason: str) -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    given: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90a"}
    text = str(explain(q, k, v, quant=quant, **given))
    assert "fa_int8 (pv8)" in text and reason in text
    text = str(explain(q, k, v, quant=BY_TILE, **given))
    assert f"fa_int8 ({NAME})" in text and "attn_fa_int8_pv8_by_tile<<<" in text


def test_scales_that_no_step_fits_are_left_to_the_portable_form() -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 300, 64))
    z = quantize(q, k, v, quant=BY_TILE, backend="mirror")
    text = str(explain(z, arch="sm_90a"))
    assert "fa_int8 (pv8)" in text
    assert "has one scale of V for 128 keys, for a multiple or for all, got one for 64" in text
    given = Tiles(128, 64, 12, 3)  # a caller's, of as many keys
    assert f"fa_int8 ({NAME})" in str(explain(z, arch="sm_90a", tiles=given))


def test_scales_that_the_copy_engine_cannot_take_are_left_to_the_portable_form() -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 300, 64))
    z = for_hopper(q, k, v)
    room = np.empty(z.v_scale.size + 1, np.float32)
    room[1:] = z.v_scale.ravel()  # 4 bytes past an address of 16
    text = str(explain(replace(z, v_scale=room[1:].reshape(z.v_scale.shape)), arch="sm_90a"))
    assert "fa_int8 (pv8)" in text and "reads scales of V 16 bytes at a time, got 16 n + " in text
