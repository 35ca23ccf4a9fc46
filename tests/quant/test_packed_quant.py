"""`QuantizedQKV` of packed sequences: each sequence equals `quantize` of it alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, attention_varlen, explain, plan, quantize
from cupyattn.bounds import kernel as bounds
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from cupyattn.quant.quantizers import padded_length, values_by_key
from cupyattn.reference.attention import attention_mirror
from cupyattn.testing import verdict
from tests.support.runs import Arrays, bits, packed, sequences

#: Empty ones, several groups, more than one lot of 128 codes of V, and one that begins amid a lot.
LENGTHS = ((0, 0), (5, 38), (3, 0), (0, 9), (20, 133), (0, 0))
CONFIGS = (
    QuantConfig(),
    QuantConfig("tensor", "head", smooth_k=False, symmetric=False),
    QuantConfig("block", "token", pv="int8", granularity_v="channel", symmetric=False),
    QuantConfig("token", "block", pv="fp8", smooth_v=False),
)
NAMES = ("cu_seqlens_q", "cu_seqlens_k")


def made(
    quant: QuantConfig | None = None, lengths: Any = LENGTHS, seed: int = 0, **options: Any
) -> tuple[QuantizedQKV, Arrays, Any]:
    """Quantise sequences of these lengths; return what came of it, the arrays and the offsets."""
    inputs, ends = packed(lengths, 2, 1, 16, seed=seed)
    named = dict(zip(NAMES, ends, strict=True))
    return quantize(*inputs, quant=quant, **named, **options), inputs, ends


def arrays_of(z: QuantizedQKV) -> dict[str, Any]:
    return {name: a for name in QUANTIZED if (a := getattr(z, name)) is not None}


# ---- what it holds -------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", CONFIGS)
def test_each_sequence_is_what_quantising_makes_of_it_alone(quant: QuantConfig) -> None:
    z, inputs, ends = made(quant)
    assert (z.batch, z.heads, z.heads_kv, z.head_dim) == (6, 2, 1, 16)
    assert (z.max_len_q, z.max_len_k) == (20, 133)
    parts = list(z.sequences())
    assert len(parts) == len(LENGTHS)
    for part, (_, one) in zip(parts, sequences(inputs, ends), strict=True):
        alone = quantize(*one, quant=quant)
        assert (part.len_q, part.len_kv) == (one[0].shape[2], one[1].shape[2])
        assert (part.config, part.group_q, part.form) == (quant, alone.group_q, alone.form)
        for name, array in arrays_of(alone).items():
            assert bits(getattr(part, name)) == bits(array), name
    (alone,) = alone.sequences()
    assert alone.cu_seqlens_q is None, "a record that is not packed is its own only sequence"


def test_the_kernels_lay_codes_as_the_mirror_does() -> None:
    """J1, with what lies between the sequences: V's padding, and room that no group takes."""
    quant = QuantConfig(
        "thread", "token", pv="int8", symmetric=False, smooth_k=False, smooth_v=False
    )
    mirror, _, _ = made(quant)
    kernel, _, _ = made(quant, backend="interpret")
    expected = arrays_of(mirror)
    assert expected["v_codes"].shape == (1, 1, 16, (180 // 128 + 6) * 128)
    assert {n: bits(a) for n, a in arrays_of(kernel).items()} == {
        n: bits(a) for n, a in expected.items()
    }
    for part in kernel.sequences():
        assert part.v_codes is not None and part.v_codes.shape[3] == padded_length(part.len_kv)
        by_key = values_by_key(part.v_codes, part.v_codes.shape[3])
        assert not by_key[..., part.len_kv :].any()


def test_given_scales_are_those_of_the_entries_of_a_batch(tmp_path: Path) -> None:
    scale = np.linspace(0.02, 0.03, 12, dtype=np.float32).reshape(6, 2, 1)
    quant = QuantConfig("head", "tensor", scales=(scale, 0.025))
    for backend in ("mirror", "interpret"):
        z, inputs, ends = made(quant, backend=backend)
        assert z.config is quant and z.q_scale.shape == (1, 2, 6)
        for number, (part, (_, one)) in enumerate(
            zip(z.sequences(), sequences(inputs, ends), strict=True)
        ):
            alone = quantize(*one, quant=quant.of_entry(number))
            assert bits(part.q_codes) == bits(alone.q_codes)
            assert bits(part.q_scale) == bits(alone.q_scale) == bits(scale[number])
    z.save(tmp_path / "packed.npz")
    assert bits(QuantizedQKV.load(tmp_path / "packed.npz").config.scales[0]) == bits(scale)


@pytest.mark.parametrize("quant", CONFIGS)
def test_it_stands_for_the_operands(quant: QuantConfig) -> None:
    z, inputs, _ = made(quant)
    for found, array in zip(z.dequantize(), inputs, strict=True):
        assert found.shape == array.shape
        np.testing.assert_allclose(found, array.astype(np.float32), atol=0.15)
    nothing, inputs, _ = made(quant, ((0, 0),))
    assert [x.shape for x in nothing.dequantize()] == [x.shape for x in inputs]


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "backend"),
    [
        *((quant, "mirror") for quant in CONFIGS),
        pytest.param(CONFIGS[2], "interpret", marks=pytest.mark.slow),
    ],
)
def test_attention_of_it_is_that_of_the_arrays(quant: QuantConfig, backend: str) -> None:
    """And each sequence is within the bound of its own operands."""
    z, inputs, ends = made(quant, backend=backend)
    given: dict[str, Any] = {"backend": backend, "return_lse": True, "causal": True}
    o, lse = attention_varlen(z, **given)
    expected, expected_lse = attention_varlen(
        *inputs, *ends, variant="fa_int8", quant=quant, **given
    )
    assert o.shape == inputs[0].shape and lse.shape == (2, len(o))
    assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)
    for part, (rows, one) in zip(z.sequences(), sequences(inputs, ends), strict=True):
        if rows.start < rows.stop:
            report = verdict.judge(
                o[rows].swapaxes(0, 1)[None], *one, variant="fa_int8", lse=lse[None, :, rows],
                quantized=part, causal=True,
            )  # fmt: skip
            assert report.passed, str(report)


def test_features_go_with_it() -> None:
    z, inputs, ends = made(QuantConfig(pv="int8"))
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {
        "mask": rng.random((6, 1, 20, 133)) < 0.7,
        "bias": rng.standard_normal((2, 1, 133)).astype("f4"),
    }  # fmt: skip
    asked = {"variant": "fa_int8", "quant": z.config}
    assert bits(attention_varlen(z, **options)) == bits(
        attention_varlen(*inputs, *ends, **asked, **options)
    )
    assert bits(attention_varlen(z, max_len_k=150)) == bits(attention_varlen(z))
    out = np.empty_like(inputs[0])
    assert attention_varlen(z, out=out) is out and bits(out) == bits(attention_varlen(z))
    assert "varlen=True" in explain(z) and "fa_int8 (pv8)" in explain(z)


def test_a_prepared_call_takes_others_of_the_same_form() -> None:
    """Other offsets, of as many sequences and rows; and longer ones up to its limits."""
    z, _, _ = made()
    other, _, _ = made(lengths=((4, 60), (0, 0), (9, 40), (0, 9), (15, 71), (0, 0)), seed=1)
    for backend in ("mirror", "interpret"):
        prepared = plan(z, backend=backend, return_lse=True)
        for one in (z, other):
            expected = attention_varlen(one, backend=backend, return_lse=True)
            assert [bits(x) for x in prepared(one)] == [bits(x) for x in expected]
    longer, _, _ = made(lengths=((28, 180), *[(0, 0)] * 5))
    with pytest.raises(ValueError, match="max_len_q=20 is less than the limit of the Quantized"):
        plan(z)(longer)
    roomy = plan(z, max_len_q=28, max_len_k=180)
    assert bits(roomy(longer)) == bits(attention_varlen(longer))


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", CONFIGS)
def test_a_file_gives_back_what_was_saved(tmp_path: Path, quant: QuantConfig) -> None:
    z, _, _ = made(quant)
    z.save(tmp_path / "packed.npz")
    y = QuantizedQKV.load(tmp_path / "packed.npz")
    assert {n: bits(a) for n, a in arrays_of(y).items()} == {
        n: bits(a) for n, a in arrays_of(z).items()
    }
    assert (y.config, y.max_len_q, y.max_len_k, y.batch) == (quant, 20, 133, 6)
    assert bits(attention_varlen(y)) == bits(attention_varlen(z))


def test_a_file_with_foreign_offsets_is_named(tmp_path: Path) -> None:
    z, _, _ = made()
    z.save(tmp_path / "packed.npz")
    with np.load(tmp_path / "packed.npz") as file:
        arrays = dict(file)
    arrays["cu_seqlens_k"][-1] += 1
    np.savez(tmp_path / "packed.npz", **arrays)
    with pytest.raises(ValueError, match=r"packed.npz' holds no usable .* must rise from 0 to 180"):
        QuantizedQKV.load(tmp_path / "packed.npz")


# ---- what is refused -----------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused() -> None:
    z, inputs, ends = made()
    whole = quantize(*(x.swapaxes(0, 1)[None] for x in inputs))
    for call, error, sentence in (
        (lambda: attention(z), ValueError, "holds packed sequences: call attention_varlen"),
        (lambda: attention_varlen(whole), ValueError, "no packed sequences: call attention, or"),
        (lambda: attention_varlen(z, None, None, *ends), ValueError, "give no cu_seqlens_q or cu"),
        (lambda: attention_varlen(z, max_len_k=99), ValueError, "max_len_k=99 is less than"),
        (lambda: plan(whole, max_len_q=5), ValueError, "give no max_len_q or max_len_k, or quant"),
        (lambda: attention_varlen(*inputs), TypeError, "needs cu_seqlens_q and cu_seqlens_k besid"),
        (lambda: quantize(*inputs, max_len_q=5), TypeError, "go with cu_seqlens_q and cu"),
        (lambda: attention_mirror(z, variant="fa_int8"), ValueError, "one sequence at a time"),
        (
            lambda: bounds.attention(None, None, None, variant="fa_int8", quantized=z), ValueError,
            "one sequence at a time: give the records of QuantizedQKV.sequences()",
        ),
        (lambda: replace(z, max_len_q=19), ValueError, "max_len_q=19 is less than the longest"),
        (lambda: replace(z, cu_seqlens_k=None), ValueError, "go together, got max_len_q=20"),
        (lambda: replace(whole, max_len_k=3), ValueError, "and not both offsets"),
        (lambda: replace(z, cu_seqlens_q=ends[0][1:]), ValueError, "one shape (batch + 1,)"),
        (lambda: replace(z, q_scale=z.q_scale[..., :-1]), ValueError, "q_scale must have shape (1"),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(sentence)):
            call()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("shape", [(3, 2, 1), (1, 3, 1)], ids=["entries", "heads"])
def test_given_scales_of_another_shape_are_refused_by_all(
    backend: str, shape: tuple[int, ...]
) -> None:
    """The call, and what prepares or explains it, by one sentence."""
    inputs, ends = packed(((5, 38), (20, 33)), 2, 1, 16)
    scales = np.full(shape, 0.1, np.float32), np.full((1, 1, 1), 0.1, np.float32)
    options = {"quant": QuantConfig("head", "head", scales=scales), "variant": "fa_int8"}
    options |= {"backend": backend, **dict(zip(NAMES, ends, strict=True))}
    sentence = re.escape(
        "the static q_scale must have shape (2 or 1, 2 or 1, 1) for granularity_q='head', "
        f"got {shape}"
    )
    for function in (attention_varlen, plan, explain):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            function(*inputs, **options)
