"""Arguments that other libraries have: one sentence that names ours, on every public function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import bounds, reference, testing
from cupyattn.errors import UnsupportedError
from cupyattn.ops.explain import kernel_form
from cupyattn.problem.borrowed_names import NOT_OFFERED

X = np.random.default_rng(0).normal(size=(1, 1, 4, 8)).astype(np.float16)
#: What has to be in the sentence, by the argument.
OURS = {
    "dropout": "leave it out", "dropout_p": "leave it out", "block_table": "attention_varlen",
    "page_table": "attention_varlen", "softmax_scale": "scale=", "sm_scale": "scale=",
    "is_causal": "causal=.*causal_align='top-left'", "attn_mask": "mask= .*bias= ",
    "window_size": r"window=\(left, right\)", "enable_gqa": "leave it out",
    "alibi_slopes": "bias=-slopes", "cache_seqlens": "lengths_kv=",
    "tensor_layout": "'BHSD' for 'HND', layout='BSHD' for 'NHD'",
    "precision_mode": "precision_policy", "v_precision": r"quant=QuantConfig\(pv=",
    "max_seqlen_q": "max_len_q=", "max_seqlen_k": "max_len_k=", "cu_seqlens_kv": "cu_seqlens_k=",
    "return_softmax_lse": "return_lse=", "logits_soft_cap": "softcap=", "attn_bias": "bias=",
    "key_padding_mask": "mask=, True.*lengths_kv=",
    **dict.fromkeys(("seqused_q", "seq_len_q", "query_seq_lengths"), "lengths_q="),
    **dict.fromkeys(("seqused_k", "seq_len_kv", "key_value_seq_lengths"), "lengths_kv="),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda **o: ca.attention(X, X, X, **o),
    "attention_varlen": lambda **o: ca.attention_varlen(X[0], X[0], X[0], **o),
    "plan": lambda **o: ca.plan(X, X, X, **o),
    "explain": lambda **o: ca.explain(X, X, X, **o),
    "kernel_form": lambda **o: kernel_form(X, X, X, **o),
    "quantize": lambda **o: ca.quantize(X, X, X, **o),
    "attention_backward": lambda **o: ca.attention_backward(X, X, X, X, X, X, **o),
    "attention_varlen_backward": lambda **o: ca.attention_varlen_backward(*[X] * 8, **o),
    "explain_backward": lambda **o: ca.explain_backward(X, X, X, X, X, X, **o),
    "attention_mirror": lambda **o: reference.attention_mirror(X, X, X, variant="fa", **o),
    "attention_exact": lambda **o: reference.attention_exact(X, X, X, **o),
    "bounds.attention": lambda **o: bounds.attention(X, X, X, variant="fa", **o),
    "judge": lambda **o: testing.judge(X, X, X, X, variant="fa", **o),
    "assert_within_bound": lambda **o: testing.assert_within_bound(X, X, X, X, variant="fa", **o),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_of_another_library_names_ours(function: str) -> None:
    assert OURS.keys() == NOT_OFFERED.keys()
    for name, ours in OURS.items():
        with pytest.raises(UnsupportedError, match=rf"^{name} is not supported: .*{ours}") as one:
            FUNCTIONS[function](**{name: 1})
        assert "\n" not in str(one.value)


def test_what_a_function_does_not_take_is_said() -> None:
    message = "to attention: quantize takes no scale"
    with pytest.raises(UnsupportedError, match=message):
        ca.quantize(X, X, X, softmax_scale=1.0)
    with pytest.raises(UnsupportedError, match="to attention: attention_varlen takes no layout"):
        ca.attention_varlen(X[0], X[0], X[0], tensor_layout="NHD")


def test_the_values_translate_as_the_sentences_say() -> None:
    """The scale is the same number, and the bias of slopes is that of flash-attn's definition."""
    q, k, v = np.random.default_rng(1).normal(size=(3, 1, 2, 6, 8)).astype(np.float32)
    q, slopes = q[:, :, :4], np.float32([0.5, 0.25])
    i, j = np.arange(4)[:, None], np.arange(6)
    bias = np.float32(-slopes[:, None, None] * abs(i + 6 - 4 - j))
    scores = (q[0].astype(np.float64) @ k[0].swapaxes(1, 2)) * 0.3
    for head in range(2):
        for row in range(4):
            for key in range(6):
                scores[head, row, key] -= float(slopes[head]) * abs(row + 6 - 4 - key)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    found = ca.attention(q, k, v, scale=0.3, bias=bias)
    np.testing.assert_allclose(found[0], weights @ v[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", [ca.attention, ca.explain, ca.plan])
def test_quant_without_a_variant_says_which(call: Callable[..., Any]) -> None:
    message = "quant is for fa_int8, got variant 'auto': add variant='fa_int8'"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(X, X, X, quant=ca.QuantConfig())


def test_a_plain_kernel_prints_without_its_defaults() -> None:
    text = ca.explain(X, X, X)
    assert "features  dtype='float16', head_dim=8, vec=8\n" in text
    assert "causal" not in text and "causal=True" in ca.explain(X, X, X, causal=True)


class Tracked:
    """An array that requires a gradient, as a tensor of torch does."""

    requires_grad = True

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no export")

    def __dlpack_device__(self) -> tuple[int, int]:
        return X.__dlpack_device__()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_requires_a_gradient_is_sent_to_torch(name: str) -> None:
    given = {"q": X, "k": X, "v": X, name: Tracked()}
    sentence = rf"^{name} requires a gradient.*cupyattn\.interop\.torch, or give {name}\.detach\(\)"
    with pytest.raises(TypeError, match=sentence):
        ca.attention(**given)
