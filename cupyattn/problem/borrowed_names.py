"""Arguments that other attention libraries and the founding notes have, and which to give here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cupyattn.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments of other libraries: their names, our arguments that replace them (if any), and advice.
#: The names come from torch with its FlexAttention, flash-attn 2 and 3, xformers, SageAttention,
#: diffusers, transformers, JAX, cuDNN and FlashInfer, and from the founding notes.
_BORROWED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "query key value", ("q", "k", "v"), "give q=, k= and v=, or the three arrays in this order",
    ),
    (
        "dropout dropout_p p dropout_rate dropout_rng dropout_seed attention_dropout training", (),
        "leave it out, no weight is dropped here; torch's scaled_dot_product_attention has it",
    ),
    (
        "softmax_scale sm_scale attn_scale scaling scale_softmax bmm1_scale", ("scale",),
        "give scale=, the same number (None: head_dim ** -0.5)",
    ),
    (
        "is_causal use_causal_mask", ("causal",),
        "give causal=, the same value, and causal_align='top-left' for torch's alignment where "
        "len_q differs from len_kv",
    ),
    (
        "use_causal_mask_bottom_right", ("causal",),
        "give causal=, the same value, whose alignment is bottom-right",
    ),
    (
        "mask_type attn_mask_type", ("causal",),
        "give causal=True for a causal mask, with causal_align='top-left' or 'bottom-right'",
    ),
    (
        "diagonal_alignment", ("causal_align",), "give causal_align='top-left' or 'bottom-right'",
    ),
    (
        "attn_mask attention_mask custom_mask", ("mask", "bias"),
        "give mask= for booleans (True: attend), bias= for numbers added to the scores",
    ),
    (
        "packed_custom_mask", ("mask",), "give mask=, booleans (True: attend), a byte each",
    ),
    (
        "key_padding_mask", ("mask", "lengths_kv"),
        "give mask=, True where a key is attended to, as (batch, 1, 1, len_kv), or where padding "
        "ends the rows lengths_kv=, how many keys of each entry count",
    ),
    (
        "attn_bias ab core_attention_bias", ("bias", "mask"),
        "give bias=, the same numbers, or mask= where it is -inf or 0 alone",
    ),
    (
        "alibi_slopes use_alibi_mask", ("bias",),
        "give bias=-slopes[:, None, None] * abs(i + len_kv - len_q - j), i the rows as a column "
        "and j the keys as a row",
    ),
    (
        "score_mod mask_mod", ("bias", "mask"),
        "functions of a score are not supported: give bias= for added numbers, mask= or "
        "block_mask= for excluded keys, softcap= for a tanh",
    ),
    (
        "learnable_sink s_aux sinks", ("bias",),
        "append a key and a value of zeros, and give bias= with the sink of each head for that key",
    ),
    (
        "window_size local_window_size", ("window",),
        "give window=(left, right), the same two numbers (-1: no limit on that side)",
    ),
    (
        "window_left", ("window",), "give window=(left, -1), the same number",
    ),
    (
        "sliding_window sliding_window_length", ("window",),
        "give window=(length - 1, 0) and causal=True, since a row sees itself too",
    ),
    (
        "diagonal_band_left_bound diagonal_band_right_bound", ("window",),
        "give window=(left, right), how many keys before and after its own a row sees",
    ),
    (
        "attention_chunk", ("mask",),
        "give mask= or block_mask=, or pack the chunks as sequences for attention_varlen",
    ),
    (
        "logits_soft_cap", ("softcap",), "give softcap=, the same number",
    ),
    (
        "enable_gqa pack_gqa", (),
        "leave it out, heads of k and v may always be a divisor of the heads of q",
    ),
    (
        "tensor_layout kv_layout", ("layout",),
        "give layout='BHSD' for 'HND', layout='BSHD' for 'NHD'",
    ),
    (
        "qkv_layout qkv_format", ("layout",),
        "give layout='BHSD' or layout='BSHD', and attention_varlen for packed sequences",
    ),
    (
        "cache_seqlens", ("lengths_kv",),
        "give lengths_kv=, the same numbers, new keys counted and already in k and v; where all "
        "entries have one length, cut k and v to it, k[:, :, :length], which is faster",
    ),
    (
        "seqused_k key_value_seq_lengths kv_seqlen seq_len_kv kv_lens", ("lengths_kv",),
        "give lengths_kv=, the same numbers",
    ),
    (
        "seqused_q query_seq_lengths q_seqlen seq_len_q", ("lengths_q",),
        "give lengths_q=, the same numbers",
    ),
    (
        "seq_lens use_padding_mask segment_ids", ("lengths_q", "lengths_kv"),
        "give lengths_q= and lengths_kv=, how many rows of each entry count, or pack sequences for "
        "attention_varlen with cu_seqlens_q and cu_seqlens_k",
    ),
    (
        "cache_leftpad leftpad_k", (),
        "cut k and v to the keys that are filled, k[:, :, first:], or give mask=",
    ),
    (
        "k_cache v_cache kv_cache", ("k", "v"),
        "give k= and v=, the keys and values that are filled; nothing is appended to a cache here",
    ),
    (
        "cache_batch_idx kv_batch_idx", (), "gather the entries before, k[index] and v[index]",
    ),
    (
        "block_table block_tables page_table paged_kv_indices paged_kv_indptr", (),
        "gather the keys and values of a sequence, and pack sequences for attention_varlen",
    ),
    (
        "cu_seqlens cu_seq_q cu_seq_k cum_seq_lens_q cum_seq_lens_kv qo_indptr kv_indptr",
        ("cu_seqlens_q", "cu_seqlens_k"),
        "give cu_seqlens_q= and cu_seqlens_k=, the same offsets, to attention_varlen",
    ),
    (
        "cu_seqlens_kv", (), "give cu_seqlens_k=, the same offsets, to attention_varlen",
    ),
    (
        "max_seqlen_q max_q max_q_len", (), "give max_len_q=, the same number, to attention_varlen",
    ),
    (
        "max_seqlen_k max_seqlen_kv max_k max_kv_len", (),
        "give max_len_k=, the same number, to attention_varlen",
    ),
    (
        "return_softmax_lse return_aux return_residual return_residuals generate_stats",
        ("return_lse",), "give return_lse=, True for the log-sum-exp",
    ),
    (
        "is_inference", ("return_lse",), "give return_lse=True where gradients are wanted later",
    ),
    (
        "return_attn_probs return_softmax need_weights average_attn_weights output_attentions "
        "return_attention_scores",
        (), "no weights are returned: cupyattn.unfused.softmax of cupyattn.unfused.scores has them",
    ),
    (
        "rotary_cos rotary_sin", ("rope",), "give rope=(cos, sin), (positions, head_dim / 2) each",
    ),
    (
        "rotary_interleaved", ("rope_interleaved",), "give rope_interleaved=, the same value",
    ),
    (
        "rotary_seqlens seqlens_rotary", ("rope_offset_q",),
        "give rope_offset_q=, the position of the first query, one number for all",
    ),
    (
        "pos_encoding_mode rope_theta rope_scale", ("rope", "bias"),
        "give rope=(cos, sin), tables of float32, or bias= for ALiBi",
    ),
    (
        "qk_quant_gran", ("quant",),
        "give quant=QuantConfig(granularity_q='thread', granularity_k='thread') for 'per_thread', "
        "with variant='fa_int8'",
    ),
    (
        "smooth_k smooth_v", ("quant",),
        "give quant=QuantConfig(smooth_k=..., smooth_v=...), with variant='fa_int8'",
    ),
    (
        "pv_accum_dtype quantization_backend use_fp16_qk_reduction", (),
        "leave it out, sums are always float32 or int32; quant=QuantConfig(pv=...) chooses the "
        "type of P and V",
    ),
    (
        "q_descale k_descale v_descale scale_q scale_k scale_v q_scale k_scale v_scale fp8_params",
        (),
        "give codes and their scales to cupyattn.QuantizedQKV.from_codes, and attention its result",
    ),
    (
        "out_dtype output_dtype o_dtype", (), "leave it out, the result has the type of q",
    ),
    (
        "implementation op use_tensor_cores attention_backend", ("variant",),
        "give variant=, a rung by its name, or leave it out for the fastest",
    ),
    (
        "kernel_options block_sizes num_splits sm_margin scheduler_metadata", ("tiles",),
        "leave it out, tiles and splits follow the shape; tiles=cupyattn.Tiles(...) sets the tiles",
    ),
    (
        "deterministic", (),
        "leave it out, every call has the same bits on every run; attention_backward takes it",
    ),
    (
        "parallel_config", (), "call cupyattn.distributed.parallel_attention for several devices",
    ),
    (
        "attention_kwargs", (), "give the arguments themselves, by name",
    ),
    (
        "qv", (), "no second product of queries with v is offered: flash-attn 3 has it",
    ),
    (
        "precision_mode", (),
        "Int8Attention takes precision_policy, its calls take mode and "
        "replace_attention_with_int8 takes policy, each of 'aggressive', 'balanced' or "
        "'precision'; attention takes accuracy",
    ),
    (
        "v_precision", (),
        "V stays in 16 bits unless quant=QuantConfig(pv=...) says otherwise; Int8Attention takes "
        "mode='precision' for 16 bits throughout",
    ),
)  # fmt: skip
#: Advice for each argument of another library.
NOT_OFFERED = {name: do for names, _, do in _BORROWED for name in names.split()}
#: The arguments of ours that take its place.
_OURS = {name: ours for names, ours, _ in _BORROWED for name in names.split()}
#: Arguments of `attention` and `attention_varlen` that other functions lack, each with advice.
_OF_ATTENTION = dict.fromkeys(
    ("lengths_q", "lengths_kv"),
    "call it for each entry, cut to its rows, or give it the entries packed, or with a mask, where "
    "it takes these",
) | dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "max_len_q", "max_len_k"),
    "attention_varlen and attention_varlen_backward take packed sequences, rows of (total, heads, "
    "head_dim)",
)
#: Messages of Python, and of functions that pass arguments on, for an unknown name.
_UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")


def instead_of(name: str, function: str, taken: tuple[str, ...] | None = None) -> str:
    """Return one sentence that says how to replace an argument of another library.

    Parameters
    ----------
    name : str
        One of `NOT_OFFERED`.
    function : str
        Name of the called function.
    taken : tuple of str, optional
        Its arguments; None for the arguments of `attention`.

    Examples
    --------
    >>> instead_of("tensor_layout", "attention")
    "tensor_layout is not supported: give layout='BHSD' for 'HND', layout='BSHD' for 'NHD'"
    """
    said = f"{name} is not supported: {NOT_OFFERED[name]}"
    ours = _OURS[name]
    if taken is None or not ours or set(ours) & set(taken):
        return said
    return f"{said}, to attention: {function} takes no {' or '.join(ours)}"


def explains_foreign_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make arguments that only other libraries have raise UnsupportedError with advice."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest shows the caller's line, and that of the error
        try:
            return function(*args, **kwargs)
        except TypeError as error:  # checked only after a failure, so valid calls pay nothing
            unknown = _UNKNOWN.search(str(error))
            known = (NOT_OFFERED.keys() | _OF_ATTENTION.keys()) & kwargs.keys()
            if unknown is None or unknown[1] not in known:
                raise
            name, own = unknown[1], _arguments(function)
            if name in _OF_ATTENTION:
                what = f"{function.__qualname__} takes no {name}: {_OF_ATTENTION[name]}"
                raise UnsupportedError(what) from None
            raise UnsupportedError(instead_of(name, function.__qualname__, own)) from None

    return called


def _arguments(function: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the names of a function's arguments; None if it forwards them to another."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return tuple(parameters)
