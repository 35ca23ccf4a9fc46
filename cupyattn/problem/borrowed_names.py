"""Arguments that other attention libraries and the founding notes have, and which to give here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cupyattn.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

_DROPOUT = "leave it out, no weight is dropped here; torch's scaled_dot_product_attention has it"
_PAGES = "gather the keys and values of a sequence, and pack sequences for attention_varlen"
_QUERIES, _KEYS = (f"give {name}=, the same numbers" for name in ("lengths_q", "lengths_kv"))
_SCALE = "give scale=, the same number (None: head_dim ** -0.5)"
#: What to do in place of an argument of another library.
NOT_OFFERED = {
    "dropout": _DROPOUT, "dropout_p": _DROPOUT, "block_table": _PAGES, "page_table": _PAGES,
    "softmax_scale": _SCALE, "sm_scale": _SCALE,
    "is_causal": "give causal=, the same value, and causal_align='top-left' for torch's alignment "
    "where len_q differs from len_kv",
    "attn_mask": "give mask= for booleans (True: attend), bias= for numbers added to the scores",
    "window_size": "give window=(left, right), the same two numbers (-1: no limit on that side)",
    "enable_gqa": "leave it out, heads of k and v may always be a divisor of those of q",
    "alibi_slopes": "give bias=-slopes[:, None, None] * abs(i + len_kv - len_q - j), i the rows "
    "as a column and j the keys as a row",
    "cache_seqlens": "give lengths_kv=, the same numbers, new keys counted and already in k and v; "
    "where all entries have one length, cut k and v to it, k[:, :, :length], which is faster",
    "seqused_q": _QUERIES, "seq_len_q": _QUERIES, "query_seq_lengths": _QUERIES,
    "seqused_k": _KEYS, "seq_len_kv": _KEYS, "key_value_seq_lengths": _KEYS,
    "tensor_layout": "give layout='BHSD' for 'HND', layout='BSHD' for 'NHD'",
    "max_seqlen_q": "give max_len_q=, the same number, to attention_varlen",
    "max_seqlen_k": "give max_len_k=, the same number, to attention_varlen",
    "cu_seqlens_kv": "give cu_seqlens_k=, the same offsets, to attention_varlen",
    "return_softmax_lse": "give return_lse=, the same value",
    "logits_soft_cap": "give softcap=, the same number",
    "attn_bias": "give bias=, the same numbers, or mask= where it is -inf or 0 alone",
    "key_padding_mask": "give mask=, True where a key is attended to, as (batch, 1, 1, len_kv), or "
    "where padding ends the rows lengths_kv=, how many keys of each entry count",
    "precision_mode": "Int8Attention takes precision_policy and its calls take mode, each of "
    "'aggressive', 'balanced' or 'precision'; attention takes accuracy",
    "v_precision": "V stays in 16 bits unless quant=QuantConfig(pv=...) says otherwise; "
    "Int8Attention takes mode='precision' for 16 bits throughout",
}  # fmt: skip
#: The argument of ours that takes its place, where there is one.
_OURS = {
    "softmax_scale": ("scale",), "sm_scale": ("scale",), "is_causal": ("causal",),
    "attn_mask": ("mask", "bias"), "window_size": ("window",), "alibi_slopes": ("bias",),
    "tensor_layout": ("layout",), "return_softmax_lse": ("return_lse",),
    "logits_soft_cap": ("softcap",), "attn_bias": ("bias", "mask"),
    "key_padding_mask": ("mask", "lengths_kv"), "cache_seqlens": ("lengths_kv",),
    "seqused_q": ("lengths_q",), "seq_len_q": ("lengths_q",), "query_seq_lengths": ("lengths_q",),
    "seqused_k": ("lengths_kv",), "seq_len_kv": ("lengths_kv",),
    "key_value_seq_lengths": ("lengths_kv",),
}  # fmt: skip
#: Arguments of `attention` that functions like it do not have, and what to do there.
_OF_ATTENTION = dict.fromkeys(
    ("lengths_q", "lengths_kv"),
    "call it for each entry, cut to its rows, or give it the entries packed, or with a mask, where "
    "it takes these",
)


def instead_of(name: str, function: str, taken: tuple[str, ...] | None = None) -> str:
    """Return one sentence that says what to give in place of an argument of another library.

    Parameters
    ----------
    name : str
        One of `NOT_OFFERED`.
    function : str
        What was called.
    taken : tuple of str, optional
        Its arguments; None: those of `attention`.

    Examples
    --------
    >>> instead_of("tensor_layout", "attention")
    "tensor_layout is not supported: give layout='BHSD' for 'HND', layout='BSHD' for 'NHD'"
    """
    said = f"{name} is not supported: {NOT_OFFERED[name]}"
    ours = _OURS.get(name, ())
    if taken is None or not ours or set(ours) & set(taken):
        return said
    return f"{said}, to attention: {function} takes no {' or '.join(ours)}"


def points_to_our_names(function: Callable[P, R]) -> Callable[P, R]:
    """Let arguments that only other libraries have raise UnsupportedError with the way out."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:  # looked into here alone: calls that are right pay nothing for it
            own = _arguments(function)
            for name in NOT_OFFERED.keys() & kwargs.keys() - set(own or ()):
                raise UnsupportedError(instead_of(name, function.__qualname__, own)) from None
            for name in _OF_ATTENTION.keys() & kwargs.keys() - set(own or kwargs):
                what = f"{function.__qualname__} takes no {name}: {_OF_ATTENTION[name]}"
                raise UnsupportedError(what) from None
            raise

    return called


def _arguments(function: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the names of a function's arguments, None where it takes those of another."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return tuple(parameters)
