"""The judge accepts the inputs of calls: layouts, lengths of padded entries, packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.testing import judge

ENDS_Q, ENDS_K = np.array([0, 9, 9, 30]), np.array([0, 20, 24, 41])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def batch() -> tuple[np.ndarray, ...]:
    return normal(3, 2, 24, 16), normal(3, 1, 40, 16, seed=1), normal(3, 1, 40, 16, seed=2)


def test_layout() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in batch())
    options: dict[str, Any] = {"variant": "fa_tc", "layout": "BSHD", "causal": True}
    o, lse = ca.attention(q, k, v, return_lse=True, **options)
    assert judge(o, q, k, v, lse=lse, **options).passed
    wrong = o.copy()
    wrong[1, 5, 1, 3] += np.float16(0.05)
    report = judge(wrong, q, k, v, lse=lse, **options)
    assert not report.passed and report.index == (1, 1, 5, 3)
    with pytest.raises(ValueError, match="layout must be 'BHSD' or 'BSHD', got 'SBHD'"):
        judge(o, q, k, v, variant="fa_tc", layout="SBHD")


LENGTHS = {"lengths_q": np.array([24, 7, 0]), "lengths_kv": np.array([40, 31, 5])}
OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window": (9, 4), "causal_align": "top-left"},
    {"causal": True, "window": (12, 0), "softcap": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "window", "both, softcap"])
@pytest.mark.parametrize("variant", ["fa", "fa_tc"])
def test_lengths(variant: str, options: dict[str, Any]) -> None:
    q, k, v = batch()
    k[1, :, 31:], v[2, :, 5:] = np.nan, np.inf  # nobody reads it
    given: dict[str, Any] = {"variant": variant, **LENGTHS, **options}
    o, lse = ca.attention(q, k, v, return_lse=True, **given)
    assert judge(o, q, k, v, lse=lse, **given).passed
    fewer = LENGTHS | {"lengths_kv": LENGTHS["lengths_kv"] - [30, 10, 2]}
    wrong = ca.attention(q, k, v, **given | fewer)
    assert judge(wrong, q, k, v, **given).ratio > 1
    wrong = o.copy()
    wrong[1, 0, 7, 0] = np.float16(1e-7)  # behind its length
    report = judge(wrong, q, k, v, **given)
    assert not report.passed and report.index == (1, 0, 7, 0)


def test_lengths_of_codes_with_mask_bias_and_layout() -> None:
    q, k, v = batch()
    rng = np.random.default_rng(3)
    added = {"mask": rng.random((1, 1, 24, 40)) < 0.8, "bias": normal(3, 1, 1, 40, seed=4)}
    z = ca.quantize(q, k, v)
    given: dict[str, Any] = {**LENGTHS, **added, "causal": True}
    o, lse = ca.attention(z, return_lse=True, **given)
    report = judge(o, q, k, v, variant="fa_int8", quantized=z, lse=lse, **given)
    assert report.passed and report.quantisation is not None
    other = {**given, "causal": False}
    assert not judge(o, q, k, v, variant="fa_int8", quantized=z, **other).passed
    one_sided = {"lengths_kv": LENGTHS["lengths_kv"]}
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    o = ca.attention(*turned, variant="fa", layout="BSHD", **one_sided, **added)
    assert judge(o, *turned, variant="fa", layout="BSHD", **one_sided, **added).passed


def packed() -> tuple[np.ndarray, ...]:
    return normal(30, 2, 16), normal(41, 1, 16, seed=1), normal(41, 1, 16, seed=2)


def test_packed_sequences_whose_mask_has_room_for_longer_ones() -> None:
    q, k, v = packed()
    mask = np.random.default_rng(5).random((3, 1, 40, 50)) < 0.8
    given: dict[str, Any] = {"variant": "fa", "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
    given["mask"] = mask
    o = ca.attention_varlen(q, k, v, max_len_q=40, max_len_k=50, **given)
    assert judge(o, q, k, v, **given).passed
    assert not judge(o, q, k, v, **{**given, "mask": mask[..., ::-1]}).passed


def test_packed_sequences_whose_block_mask_has_room_for_longer_ones() -> None:
    q, k, v = packed()
    given: dict[str, Any] = {"variant": "fa", "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
    given["block_mask"] = ca.BlockMask(np.tri(2, dtype=bool)[None, None, ::-1], 64, 64)
    o = ca.attention_varlen(q, k, v, max_len_q=70, max_len_k=128, **given)
    assert judge(o, q, k, v, **given).passed
    assert not judge(2 * o, q, k, v, **given).passed


def test_packed_sequences_whose_mask_is_of_keys_alone() -> None:
    q, k, v = packed()
    given: dict[str, Any] = {"variant": "fa", "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
    given["mask"] = np.arange(np.diff(ENDS_K).max()) % 3 > 0
    o = ca.attention_varlen(q, k, v, **given)
    assert judge(o, q, k, v, **given).passed
    assert not judge(o, q, k, v, **given | {"mask": ~given["mask"]}).passed


@pytest.mark.parametrize("variant", ["fa", "fa_tc", "auto"])
def test_packed_sequences(variant: str) -> None:
    q, k, v = packed()
    rng = np.random.default_rng(5)
    given: dict[str, Any] = {
        "variant": variant, "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, "causal": True,
        "mask": rng.random((3, 1, 21, 20)) < 0.8, "bias": normal(1, 2, 1, 20, seed=6),
    }  # fmt: skip
    o, lse = ca.attention_varlen(q, k, v, return_lse=True, **given)
    report = judge(o, q, k, v, lse=lse, **given)
    assert report.passed and report.rows == 30 and report.ran == "mirror"
    wrong = o.copy()
    wrong[11, 1, 4] += np.float16(0.05)
    report = judge(wrong, q, k, v, lse=lse, **given)
    assert not report.passed and report.index == (2, 1, 2, 4)
    # As if sequence 2 began a key later.
    shifted = {**given, "cu_seqlens_k": ENDS_K + [0, 0, 1, 0]}
    assert not judge(ca.attention_varlen(q, k, v, **shifted), q, k, v, **given).passed


@pytest.mark.parametrize("quant", [ca.QuantConfig(), ca.QuantConfig(pv="int8")], ids=["16", "8"])
def test_packed_codes(quant: ca.QuantConfig) -> None:
    q, k, v = packed()
    ends = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
    z = ca.quantize(q, k, v, quant=quant, **ends)
    o, lse = ca.attention_varlen(z, return_lse=True)
    report = judge(o, q, k, v, variant="fa_int8", quantized=z, lse=lse, **ends)
    assert report.passed and report.quantisation is not None, str(report)
    assert judge(o, None, None, None, variant="fa_int8", quantized=z).passed
    assert not judge(np.float16(1.02) * o, None, None, None, variant="fa_int8", quantized=z).passed


def test_signs_in_another_layout() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in batch())
    options: dict[str, Any] = {"variant": "fa_tc", "layout": "BSHD"}
    run: Callable[[Any], Any] = lambda values: ca.attention(q, k, values, **options)  # noqa: E731
    report = judge(run(v), q, k, v, signed=run, **options)
    assert report.passed and report.signed is not None and report.signed.index


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": np.array([0])}, "signed and rows are of one sequence"),
        ({"signed": lambda v: v}, "signed and rows are of one sequence"),
        ({"lse": np.zeros((2, 29), np.float32)}, r"\(heads, total_q\) = \(2, 30\), got shape"),
        ({"cu_seqlens_k": ENDS_K[:-1]}, "cu_seqlens_k must rise from 0 to 41"),
    ],
    ids=["rows", "signed", "lse", "offsets"],
)
def test_refusals_of_packed_sequences(change: dict[str, Any], said: str) -> None:
    q, k, v = packed()
    given: dict[str, Any] = {"variant": "fa", "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
    with pytest.raises(ValueError, match=said):
        judge(q, q, k, v, **given | change)
    with pytest.raises(ValueError, match="o of packed sequences must be"):
        judge(q[:-1], q, k, v, **given)
