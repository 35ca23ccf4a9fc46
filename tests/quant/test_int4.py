"""Q and K in 4 bits: packed two to a byte where they are kept, multiplied as INT8."""

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
    explain,
    interpret,
    plan,
    quantize,
)
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import unpack
from cupyattn.quant import nibbles
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing import verdict  # fmt: skip
from tests.faults.fault_patches import put_a_line_in_place
from tests.support import runs
from tests.support.runs import bits, normal, packed, sequences

#: Configurations by rung: one scale for many rows and one for few, V in codes as well.
CONFIGS = {
    "fa_int8": QuantConfig("head", "block", qk_bits=4),
    "fa_int8@sm90": QuantConfig(qk_bits=4),
    "fa_int8@pv8": QuantConfig(qk_bits=4, pv="int8"),
    "fa_int8@sm90_pv8_by_tile": QuantConfig(qk_bits=4, pv="int8"),
    "fa_int8@sm90_fp8": QuantConfig(qk_bits=4, pv="fp8", granularity_v="channel"),
}


# ---- two to a byte -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 7, 8, 40])
def test_what_is_packed_comes_back(head_dim: int) -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (2, 3, 5, head_dim)).astype(np.int8)
    halves = nibbles.packed(codes)
    assert halves.shape == (2, 3, 5, nibbles.packed_bytes(head_dim)) and halves.dtype == np.uint8
    back = nibbles.unpacked(halves, head_dim)
    assert bits(back) == bits(codes) and back.strides[2] % 16 == 0


def run_unpack(halves: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the result of ``unpack.cu``."""
    found = np.full((*halves.shape[:3], -(-head_dim // 16) * 16), 99, np.int8)
    made = unpack.plan_unpack(Operand.of(halves), head_dim)
    interpret.run(made, {"nibbles": halves, "codes": found})
    return found


@pytest.mark.parametrize("head_dim", [7, 40])
def test_the_kernel_unpacks_to_the_bit(head_dim: int) -> None:
    """By words and by bytes, several blocks, rows that are strided; no more than whole pairs."""
    codes = np.random.default_rng(0).integers(-8, 8, (2, 3, 70, head_dim)).astype(np.int8)
    wide = np.zeros((2, 4, 70, 28), np.uint8)[:, 1:, :, : nibbles.packed_bytes(head_dim)]
    wide[...] = nibbles.packed(codes)
    for halves in (nibbles.packed(codes), wide, wide.swapaxes(0, 1)):
        found = run_unpack(halves, head_dim)
        assert bits(found[..., :head_dim]) == bits(nibbles.unpacked(halves, head_dim))
        assert (found[..., head_dim + head_dim % 2 :] == 99).all()


def test_halves_exchanged_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_a_line_in_place("prims/codes/nibbles.cuh", "0x5140", "0x1504", tmp_path, monkeypatch)
    halves = nibbles.packed(np.arange(-8, 8, dtype=np.int8).reshape(1, 1, 2, 8))
    assert bits(run_unpack(halves, 8)[..., :8]) != bits(nibbles.unpacked(halves, 8))


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["tensor", "head", "thread"])
def test_kernels_and_mirror_make_the_same_codes(granularity: str) -> None:
    """J1."""
    quant = QuantConfig(granularity, granularity, qk_bits=4, smooth_k=False)
    inputs = normal((1, 2, 40, 24), (1, 1, 50, 24), "bfloat16")
    mirror, kernel = (quantize(*inputs, quant=quant, backend=b) for b in ("mirror", "interpret"))
    for name in ("q_codes", "k_codes", "q_scale", "k_scale"):
        assert bits(getattr(mirror, name)) == bits(getattr(kernel, name)), name
    codes = mirror.unpacked().q_codes
    assert np.abs(codes).max() == 7
    assert mirror.q_scale.max() == np.float32(np.abs(inputs[0].astype(np.float32)).max()) / 7


def test_given_scales_saturate_at_7() -> None:
    inputs = normal((1, 1, 20, 16), (1, 1, 30, 16))
    quant = QuantConfig("tensor", "tensor", qk_bits=4, smooth_k=False, scales=(0.1, 0.2))
    for backend in ("mirror", "interpret"):
        z = quantize(*inputs, quant=quant, backend=backend)
        assert np.abs(z.unpacked().q_codes).max() == 7
        o, lse = attention(z, return_lse=True, backend=backend)
        report = verdict.judge(o, *inputs, variant="fa_int8", lse=lse, quantized=z)
        assert report.passed, str(report)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "backend"),
    [
        *((rung, "mirror") for rung in CONFIGS),
        ("fa_int8", "interpret"),
        pytest.param("fa_int8@sm90", "interpret", marks=pytest.mark.slow),
        pytest.param("fa_int8@pv8", "interpret", marks=pytest.mark.slow),
        pytest.param("fa_int8@sm90_pv8_by_tile", "interpret", marks=pytest.mark.slow),
        pytest.param("fa_int8@sm90_fp8", "interpret", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_within_the_bounds(rung: str, backend: str) -> None:
    """J2 and J3; quantising and attending in one call are to the bit the two steps."""
    inputs = normal((1, 2, 40, 24), (1, 1, 90, 24))
    given: dict[str, Any] = {"quant": CONFIGS[rung], "backend": backend}
    given["arch"] = "sm_90a" if "sm90" in rung else None
    one = runs.run(rung, inputs, causal=True, **given)
    assert one.form == (rung.partition("@")[2] or "portable")
    assert one.quantized is not None and one.quantized.has_nibbles
    report = one.check()
    assert report.passed and np.isfinite(one.o.astype(np.float32)).all()
    whole = attention(*inputs, variant="fa_int8", causal=True, **given)
    assert bits(whole) == bits(one.o)


def test_four_bits_err_about_18_times_as_much_as_eight() -> None:
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64))
    exact = attention(q, k, v, variant="fa_tc").astype(np.float64)
    off = [
        np.linalg.norm(
            attention(q, k, v, variant="fa_int8", quant=QuantConfig(qk_bits=qk_bits)) - exact
        )
        for qk_bits in (8, 4)
    ]
    assert 127 / 7 / 2 < off[1] / off[0] < 127 / 7 * 2


@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
def test_packed_sequences(backend: str) -> None:
    inputs, ends = packed(((3, 5), (0, 4), (20, 17)), 2, 1, 24)
    quant = QuantConfig(qk_bits=4, smooth_k=False)
    given = {"backend": backend, "return_lse": True}
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    z = quantize(*inputs, quant=quant, backend=backend, **named)
    assert z.has_nibbles and z.shape == (1, 2, 23, 24)
    o, lse = attention_varlen(z, **given)
    for (rows, one), own in zip(sequences(inputs, ends), z.sequences(), strict=True):
        alone, alone_lse = attention(*one, variant="fa_int8", quant=quant, **given)
        assert bits(o[rows].swapaxes(0, 1)) == bits(alone)
        assert bits(lse[:, rows]) == bits(alone_lse)
        assert bits(own.q_codes) == bits(quantize(*one, quant=quant, backend=backend).q_codes)
    assert [x.shape for x in z.dequantize()] == [(23, 2, 24), (26, 1, 24), (26, 1, 24)]


# ---- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [7, 24])
def test_a_record_takes_half_the_bytes_and_travels(head_dim: int, tmp_path: Path) -> None:
    inputs = normal((1, 2, 9, head_dim), (1, 1, 11, head_dim))
    quant = QuantConfig(qk_bits=4)
    z = quantize(*inputs, quant=quant)
    assert z.q_codes.nbytes == 2 * 9 * -(-head_dim // 2) and z.head_dim == head_dim
    z.save(tmp_path / "z.npz")
    loaded = QuantizedQKV.load(tmp_path / "z.npz")
    assert loaded.config == quant and bits(loaded.k_codes) == bits(z.k_codes)
    for one in (loaded, z.unpacked(), z.unpacked().in_nibbles()):
        assert bits(attention(one)) == bits(attention(z))
    whole = quantize_mirror(*inputs, quant, Tiles(128, 32, 4, 2))
    for found, expected in zip(z.dequantize(), whole.dequantize(), strict=True):
        assert bits(found) == bits(expected)
    assert z.in_nibbles() is z and z.unpacked().unpacked().q_codes.dtype == np.int8


def test_what_explain_says_of_its_memory() -> None:
    z = quantize(*normal((1, 2, 70, 72), (1, 1, 90, 72)), quant=QuantConfig(qk_bits=4))
    text = str(explain(z, arch="sm_90a"))
    assert "q_codes_unpacked 1 x 2 x 70 x 80 int8, 11,200 bytes" in text
    assert "unpack<<<" in text and "fa_int8 (sm90)" in text
    prepared = plan(z, backend="interpret")
    assert prepared.workspace_bytes == (2 * 70 + 90) * 80
    assert bits(prepared(z)) == bits(attention(z, backend="interpret"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_codes": np.zeros((1, 2, 9, 11), np.uint8)}, "must have 12 bytes a row, two codes of"),
        ({"k_codes": np.zeros((1, 1, 11, 24), np.int8)}, "k_codes must be uint8, got int8"),
        ({"config": QuantConfig()}, "q_codes must be int8, got uint8"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    z = quantize(*normal((1, 2, 9, 24), (1, 1, 11, 24)), quant=QuantConfig(qk_bits=4))
    fields = {name: getattr(z, name) for name in z.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        QuantizedQKV(**{**fields, **change})
