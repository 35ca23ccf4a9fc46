"""Zero points in the Hopper forms of fa_int8 with V in 16 bits and in e4m3, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, Tiles, attention, attention_varlen, explain
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.interpret import KernelFault
from cupyattn.kernels import tile_pieces
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.problem import form as kernel_form_module
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.quant.quantizers import in_padded_rows
from tests.faults.fault_patches import put_a_line_in_place
from tests.kernels.test_kernels_compile import features_of
from tests.quant.test_zero_points import check_the_largest_products, moved
from tests.support import runs
from tests.support.marks import slow, slow_rows
from tests.support.runs import bits, hopper_blocks, normal, packed, sequences

RUNG, FP8 = "fa_int8@sm90", "fa_int8@sm90_fp8"
HOPPER: dict[str, Any] = {"arch": "sm_90a", "backend": "interpret"}


def pair(
    head_dim: int, group_q: int, group_kv: int, lengths: tuple[int, int] = (40, 150)
) -> tuple[QuantizedQKV, QuantizedQKV]:
    """Symmetric operands, and the same with all codes moved by zero points."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.integers(-60, 61, (1, h, n, head_dim)).astype(np.int8)
        for h, n in zip((2, 1, 1), (*lengths, lengths[1]), strict=True)
    )
    q_moved, q_zero = moved(q, group_q, 1)
    k_moved, k_zero = moved(k, group_kv, 2)
    scales = [rng.uniform(0.01, 0.02, z.shape).astype(np.float32) for z in (q_zero, k_zero)]
    given: dict[str, Any] = {
        "group_q": group_q, "group_kv": group_kv,
        "k_mean": rng.standard_normal((1, 1, head_dim)).astype(np.float32),
    }  # fmt: skip
    v = v.astype(np.float16)
    plain = QuantizedQKV.from_codes(in_padded_rows(q), in_padded_rows(k), v, *scales, **given)
    zeros = {"q_zero": q_zero, "k_zero": k_zero}
    shifted = QuantizedQKV.from_codes(
        in_padded_rows(q_moved), in_padded_rows(k_moved), v, *scales, **given, **zeros
    )
    return plain, shifted


# ---- fixtures that need no bound -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "group_q", "group_kv"),
    [
        (64, GROUP_ALL, GROUP_ALL), (72, 1, 16), (128, 2, GROUP_ALL), (128, 64, 32),
        (256, GROUP_ALL, 16),
    ],
)  # fmt: skip
def test_codes_moved_by_their_zero_points_change_no_bit(head_dim, group_q, group_kv, causal):
    """Scores begin with whole numbers, and keep their values: every term, every group."""
    plain, shifted = pair(head_dim, group_q, group_kv)
    given = {"return_lse": True, "causal": causal, **HOPPER}
    assert "fa_int8 (sm90)" in str(explain(shifted, causal=causal, arch="sm_90a"))
    for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
        assert bits(a) == bits(b)


def check_pieces() -> None:
    plain, shifted = pair(64, 2, GROUP_ALL, (40, 400))
    with pytest.MonkeyPatch.context() as patch, hopper_blocks(3):
        patch.setattr(tile_pieces, "LEAST_SAVED", 1)
        assert "merge_pieces" in str(explain(shifted, return_lse=True, arch="sm_90a"))
        given = {"return_lse": True, **HOPPER}
        for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
            assert bits(a) == bits(b)


@pytest.mark.slow
def test_pieces_of_tiles_begin_at_keys_of_their_own() -> None:
    """And codes moved by their zero points change no bit."""
    check_pieces()


@pytest.mark.slow
def test_the_largest_products_there_are() -> None:
    check_the_largest_products(**HOPPER)


# ---- J2 and J3 -----------------------------------------------------------------------------------


def check(
    granularity: str, head_dim: int = 64, dtype: str = "float16", rung: str = RUNG, **options: Any
) -> None:
    """J2 and J3 of numbers that lie to one side of 0; two steps of keys at least."""
    q, k, v = normal((1, 2, 40, head_dim), (1, 1, 200, head_dim), dtype)
    sides = np.where(np.arange(head_dim) % 2, 1, -1).astype(dtype)
    rising = np.linspace(-3, 3, 200).astype(dtype)[:, None]
    given = {"pv": "fp8", "granularity_v": "channel"} if rung == FP8 else {}
    quant = QuantConfig(granularity, granularity, symmetric=False, **given)
    inputs = (q + q.dtype.type(1), k + rising * sides, v)
    one = runs.run(rung, inputs, quant=quant, **{**HOPPER, **options})
    assert one.form == rung.partition("@")[2]
    one.check()


@pytest.mark.parametrize(
    ("granularity", "head_dim", "dtype", "options"),
    [
        ("thread", 64, "float16", {"causal": True}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("tensor", 128, "bfloat16", {}),
                ("head", 64, "float32", {"causal": True}),
                ("block", 128, "float16", {"causal": True}),
                ("tensor", 256, "float16", {}),
                ("thread", 128, "bfloat16", {"window": (20, 30)}),
                ("head", 72, "float16", {"window": (90, 0)}),
                ("tensor", 8, "float16", {"causal": True}),
            )
        ),
    ],
)
def test_within_the_bound(granularity, head_dim, dtype, options) -> None:
    for backend in ("mirror", "interpret"):
        check(granularity, head_dim, dtype, backend=backend, **options)


@pytest.mark.parametrize(
    ("granularity", "head_dim", "dtype", "options"),
    [
        ("thread", 64, "float16", {"causal": True}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("tensor", 128, "bfloat16", {}),
                ("head", 96, "float32", {"causal": True}),
                ("block", 128, "float16", {"window": (20, 30)}),
            )
        ),
    ],
)
def test_within_the_bound_with_values_in_8_bit_floats(
    granularity, head_dim, dtype, options
) -> None:
    for backend in ("mirror", "interpret"):
        check(granularity, head_dim, dtype, FP8, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "thread"])
def test_block_masks(granularity) -> None:
    """Among them rows that keep no block, and steps that are not where their number says."""
    q, k, v = normal((1, 2, 150, 64), (1, 1, 290, 64))
    kept = np.array([[[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]], [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]], bool)
    quant = QuantConfig(granularity, granularity, symmetric=False)
    inputs = (q + np.float16(1), k + np.float16(1), v)
    one = runs.run(RUNG, inputs, quant=quant, block_mask=BlockMask(kept[None], 128, 64), **HOPPER)
    assert one.form == "sm90"
    one.check()


@pytest.mark.parametrize("granularity", ["thread", *slow(("tensor", "head"))])
def test_packed_sequences_have_zero_points_of_their_own(granularity) -> None:
    inputs, ends = packed(((5, 9), (0, 7), (6, 0), (35, 40)), 2, 1)
    inputs = tuple(a + np.float16(1) for a in inputs)
    quant = QuantConfig(granularity, granularity, symmetric=False, smooth_k=False)
    given = {
        "variant": "fa_int8", "quant": quant, "return_lse": True, "causal": True,
        "tiles": Tiles(128, 64, 12, 2), **HOPPER,
    }  # fmt: skip
    o, lse = attention_varlen(*inputs, *ends, **given)
    for rows, one in sequences(inputs, ends):
        if rows.start == rows.stop or not one[1].shape[2]:
            assert not o[rows].any()
            continue
        own, own_lse = attention(*one, **given)
        assert bits(o[rows].swapaxes(0, 1)) == bits(own[0])
        assert bits(lse[:, rows]) == bits(own_lse[0])


# ---- what would be noticed -----------------------------------------------------------------------

HEADER = "prims/codes/zero_points_sm90.cuh"


@pytest.mark.parametrize(
    ("source", "line", "instead"),
    [
        (HEADER, "q.x * of_key[j / 4 * 2 + j % 2] + q.y * K", "q.y * K"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (HEADER, " + q.y * K[stage].zero[i / PART];", ";"),
                (HEADER, "code_sum[q] - HEAD_DIM * own.x;", "code_sum[q];"),
                (HEADER, "K[stage].zero[i / PART]", "K[stage].zero[0]"),
                (HEADER, "key % 8 / 2 * 4 + key / 8 % 2 * 2", "key % 16 / 2 * 2"),
                ("sm90/attn_fa_int8.cu", ", zeros.of_row(h));", ");"),
            )
        ),
    ],
)
def test_a_term_left_out_is_noticed(source, line, instead, tmp_path: Path, monkeypatch) -> None:
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check("thread", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("      zeros.begin(dot, K_at.stage);\n", "      zeros.begin(dot, V_at.stage);\n"),
        (", zeros.of_row(h));", ");"),
    ],
)
def test_a_mistake_beside_8_bit_floats_is_noticed(line, instead, tmp_path, monkeypatch) -> None:
    put_a_line_in_place("sm90/attn_fa_int8_fp8.cu", line, instead, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, KernelFault)):
        check("thread", rung=FP8, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "line", "instead"),
    [
        (HEADER, " + tile.first * BLOCK_KV;", ";"),
        ("merge/sm90/merge_pieces.cu", "K_mean, zero);", "K_mean);"),
    ],
)
def test_a_mistake_in_pieces_is_noticed(source, line, instead, tmp_path: Path, monkeypatch) -> None:
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_pieces()


# ---- registers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "varlen"), [(True, False), *slow_rows(((True, True), (False, False)))]
)
@pytest.mark.parametrize(
    ("form", "head_dim"),
    [
        ("sm90", 128),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("sm90", 64), ("sm90", 256), ("sm90_fp8", 64), ("sm90_fp8", 96), ("sm90_fp8", 128),
            )
        ),
    ],
)  # fmt: skip
def test_default_tiles_spill_nothing(form: str, head_dim: int, causal: bool, varlen: bool) -> None:
    """Data of rows and keys leaves shared memory as late as possible."""
    variant = lookup("fa_int8")
    plain = features_of(variant, form, "float16", head_dim, causal, lse=True)
    features = replace(plain, varlen=varlen, zero_points=True)
    tiles = variant.tiles_for(head_dim, form=form)
    binary = kc.build(kernel_form_module.module_spec(variant, features, tiles, form), "sm_90a")
    (taken,) = binary.kernels.values()
    assert (taken.spill_stores, taken.spill_loads) == (0, 0), taken
    devices.check_shared_memory(binary.smem_bytes, 227 * 1024, str(tiles))


# ---- what it leaves to the portable form ---------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        (QuantConfig("token", "token", symmetric=False), "has one scale for 16 keys, or for a mul"),
        (QuantConfig(pv="int8", granularity_v="channel", symmetric=False), "takes no zero points"),
    ],
)
def test_what_it_leaves_to_the_portable_form(quant: QuantConfig, reason: str) -> None:
    inputs = normal((1, 1, 20, 64), (1, 1, 30, 64))
    text = str(explain(*inputs, variant="fa_int8", quant=quant, arch="sm_90a"))
    assert f"portable form: the Hopper form {reason}" in text
