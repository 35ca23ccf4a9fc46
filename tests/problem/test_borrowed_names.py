"""Arguments that other libraries have: one sentence that names ours, on every public function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import bounds, reference, testing
from cupyattn.distributed import parallel_attention
from cupyattn.errors import UnsupportedError
from cupyattn.problem.borrowed_names import NOT_OFFERED

X = np.random.default_rng(0).normal(size=(1, 1, 4, 8)).astype(np.float16)
#: Text that the sentence must contain, by names of other libraries.
SENTENCES = {
    "query key value": "q=, k= and v=",
    "dropout dropout_p p dropout_rate dropout_rng dropout_seed attention_dropout training": (
        "leave it out"
    ),
    "softmax_scale sm_scale attn_scale scaling scale_softmax bmm1_scale": "scale=",
    "is_causal use_causal_mask": "causal=.*causal_align='top-left'",
    "use_causal_mask_bottom_right": "causal=",
    "mask_type attn_mask_type": "causal=True",
    "diagonal_alignment": "causal_align=",
    "attn_mask attention_mask custom_mask": "mask= .*bias= ",
    "packed_custom_mask key_padding_mask": "mask=, ",
    "attn_bias ab core_attention_bias": "bias=",
    "alibi_slopes use_alibi_mask": "bias=-slopes",
    "score_mod mask_mod": "bias= .*mask= or block_mask= ",
    "learnable_sink s_aux sinks": "bias= with the sink",
    "window_size local_window_size": r"window=\(left, right\)",
    "window_left": r"window=\(left, -1\)",
    "sliding_window sliding_window_length": r"window=\(length - 1, 0\) and causal=True",
    "diagonal_band_left_bound diagonal_band_right_bound": r"window=\(left, right\)",
    "attention_chunk": "attention_varlen",
    "logits_soft_cap": "softcap=",
    "enable_gqa pack_gqa": "leave it out",
    "tensor_layout kv_layout": "'BHSD' for 'HND', layout='BSHD' for 'NHD'",
    "qkv_layout qkv_format": "layout=",
    "cache_seqlens seqused_k key_value_seq_lengths kv_seqlen seq_len_kv kv_lens": "lengths_kv=",
    "seqused_q query_seq_lengths q_seqlen seq_len_q": "lengths_q=",
    "seq_lens use_padding_mask segment_ids": "lengths_q= and lengths_kv=",
    "cache_leftpad leftpad_k": "mask=",
    "k_cache v_cache kv_cache": "k= and v=",
    "cache_batch_idx kv_batch_idx": r"k\[index\]",
    "block_table block_tables page_table paged_kv_indices paged_kv_indptr": "attention_varlen",
    "cu_seqlens cu_seq_q cu_seq_k cum_seq_lens_q cum_seq_lens_kv qo_indptr kv_indptr": (
        "cu_seqlens_q= and cu_seqlens_k="
    ),
    "cu_seqlens_kv": "cu_seqlens_k=",
    "max_seqlen_q max_q max_q_len": "max_len_q=",
    "max_seqlen_k max_seqlen_kv max_k max_kv_len": "max_len_k=",
    "return_softmax_lse return_aux return_residual return_residuals generate_stats": "return_lse=",
    "is_inference": "return_lse=",
    "return_attn_probs return_softmax need_weights average_attn_weights output_attentions "
    "return_attention_scores": r"cupyattn\.unfused\.softmax",
    "rotary_cos rotary_sin pos_encoding_mode rope_theta rope_scale": r"rope=\(cos, sin\)",
    "rotary_interleaved": "rope_interleaved=",
    "rotary_seqlens seqlens_rotary": "rope_offset_q=",
    "qk_quant_gran": "granularity_q='thread'",
    "smooth_k smooth_v": r"quant=QuantConfig\(smooth_k=",
    "pv_accum_dtype quantization_backend use_fp16_qk_reduction": r"quant=QuantConfig\(pv=",
    "q_descale k_descale v_descale scale_q scale_k scale_v q_scale k_scale v_scale fp8_params": (
        r"cupyattn\.QuantizedQKV\.from_codes"
    ),
    "out_dtype output_dtype o_dtype": "the type of q",
    "implementation op use_tensor_cores attention_backend": "variant=",
    "kernel_options block_sizes num_splits sm_margin scheduler_metadata": "tiles=",
    "deterministic": "attention_backward takes it",
    "parallel_config": r"cupyattn\.distributed\.parallel_attention",
    "attention_kwargs": "by name",
    "qv": "no second product",
    "precision_mode": "precision_policy",
    "v_precision": r"quant=QuantConfig\(pv=",
}  # fmt: skip
OURS = {name: says for names, says in SENTENCES.items() for name in names.split()}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda **o: ca.attention(X, X, X, **o),
    "attention_varlen": lambda **o: ca.attention_varlen(X[0], X[0], X[0], **o),
    "plan": lambda **o: ca.plan(X, X, X, **o),
    "explain": lambda **o: ca.explain(X, X, X, **o),
    "kernel_form": lambda **o: ca.kernel_form(X, X, X, **o),
    "quantize": lambda **o: ca.quantize(X, X, X, **o),
    "attention_backward": lambda **o: ca.attention_backward(X, X, X, X, X, X, **o),
    "attention_varlen_backward": lambda **o: ca.attention_varlen_backward(*[X] * 8, **o),
    "explain_backward": lambda **o: ca.explain_backward(X, X, X, X, X, X, **o),
    "attention_mirror": lambda **o: reference.attention_mirror(X, X, X, variant="fa", **o),
    "attention_exact": lambda **o: reference.attention_exact(X, X, X, **o),
    "bounds.attention": lambda **o: bounds.attention(X, X, X, variant="fa", **o),
    "judge": lambda **o: testing.judge(X, X, X, X, variant="fa", **o),
    "assert_within_bound": lambda **o: testing.assert_within_bound(X, X, X, X, variant="fa", **o),
    "quantize_kv": lambda **o: ca.quantize_kv(X, X, **o),
    "unfused.scores": lambda **o: ca.unfused.scores(X, X, **o),
    "ladder": lambda **o: ca.ladder(X, X, X, **o),
    "parallel_attention": lambda **o: parallel_attention(X, X, X, None, **o),
}
#: Functions that have such an argument of their own.
TAKEN = {
    "deterministic": {"attention_backward", "attention_varlen_backward", "explain_backward"},
    "sinks": {"judge", "assert_within_bound"},
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_of_another_library_names_ours(function: str) -> None:
    assert OURS.keys() == NOT_OFFERED.keys() and len(OURS) > 140
    for name, ours in OURS.items():
        if function in TAKEN.get(name, ()):
            continue
        with pytest.raises(UnsupportedError, match=rf"^{name} is not supported: .*{ours}") as one:
            FUNCTIONS[function](**{name: 1})
        assert "\n" not in str(one.value)


def test_the_sentence_is_of_the_argument_that_is_not_known() -> None:
    """One that a function takes, under a name that others have, is not blamed for another."""
    layer = ca.Int8Attention(1, 8, attention_type="local", window_size=4)
    with pytest.raises(TypeError, match="^timestep must be an index"):
        layer(X, X, X, 1.5, window_size=2)
    with pytest.raises(TypeError, match="^causal must be True or False"):
        ca.explain_backward(X, X, X, X, X, X, deterministic=True, causal=3)
    with pytest.raises(UnsupportedError, match="^is_causal is not supported: give causal="):
        layer(X, X, X, 3, is_causal=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'softmaxscale'"):
        ca.attention(X, X, X, softmaxscale=1.0)


def test_a_sink_is_a_key_of_zeros_with_a_bias() -> None:
    """As the sentence says, it adds exp(sink) to the sum of exponentials."""
    q, k, v = np.random.default_rng(2).normal(size=(3, 1, 2, 6, 8)).astype(np.float32)
    sink = np.float32([0.5, -1.0])
    scores = (q[0].astype(np.float64) @ k[0].swapaxes(1, 2)) * 8**-0.5
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink)[:, None, None]
    zeros = np.zeros((1, 2, 1, 8), np.float32)
    bias = np.concatenate([np.zeros((2, 1, 6)), sink[:, None, None]], axis=2).astype(np.float32)
    found = ca.attention(q, np.concatenate([k, zeros], 2), np.concatenate([v, zeros], 2), bias=bias)
    np.testing.assert_allclose(found[0], weights @ v[0], rtol=0, atol=1e-5)


def test_what_a_function_does_not_take_is_said() -> None:
    message = "to attention: quantize takes no scale"
    with pytest.raises(UnsupportedError, match=message):
        ca.quantize(X, X, X, softmax_scale=1.0)
    with pytest.raises(UnsupportedError, match="to attention: attention_varlen takes no layout"):
        ca.attention_varlen(X[0], X[0], X[0], tensor_layout="NHD")


def test_the_values_translate_as_the_sentences_say() -> None:
    """The scale is the same number, and the bias of slopes follows flash-attn's definition."""
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
