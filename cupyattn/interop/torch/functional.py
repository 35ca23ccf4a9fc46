"""Attention on tensors: the functions of `cupyattn`, and one with torch's signature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch import attn_masks
from cupyattn.interop.torch.calls import TensorSettings
from cupyattn.interop.torch.checks import check_strided
from cupyattn.interop.torch.dispatch import call
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.row_preparation import BUFFERS_OF, EPS
from cupyattn.problem.settings import NO_WINDOW, Settings, interned
from cupyattn.quant.config import QuantConfig


@explains_foreign_arguments
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str = "auto",
    accuracy: str = "full",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: tuple[Tensor, Tensor] | None = None,
    qk_norm_eps: float = EPS,
    qk_norm_split: int = 0,
    block_mask: BlockMask | None = None,
    lengths_q: Tensor | None = None,
    lengths_kv: Tensor | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    out: Tensor | None = None,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    deterministic: bool = False,
    arch: str | None = None,
    backend: str | None = None,
    check_finite: bool = False,
) -> Any:
    """Scaled dot-product attention of tensors, ``softmax(scale * Q K^T) V``, with gradients.

    Parameters
    ----------
    q : Tensor, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32, on a CUDA device or a CPU, with any strides: q, k and v are
        copied if their last axis is not contiguous. Under ``torch.autocast`` they are first
        converted to its type.
    k, v : Tensor, (batch, heads_kv, len_kv, head_dim)
    mask, bias, rope, qk_norm : Tensor, or a pair of them, optional
        As for `cupyattn.attention`, on the device of q. Of these a bias and the weights of
        `qk_norm` get gradients, with the same bits on every run. A mask or bias that is a
        `torch.nn.attention.bias.CausalBias` replaces `causal` and `causal_align`.
    lengths_q, lengths_kv : Tensor, (batch,), int32 or int64, optional
        As for `cupyattn.attention`, on the device of q. int32 needs no copy. There are no gradients
        with them.
    deterministic : bool
        Gradients have the same bits on every run, as after
        ``torch.use_deterministic_algorithms(True)``.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`: CUDA tensors run on "cuda", CPU tensors on the mirror or the
        interpreter of the kernels.
    variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved, \
    rope_offset_q, qk_norm_eps, qk_norm_split, block_mask, layout, return_lse, out, quant, \
    tiles, arch, check_finite
        As for `cupyattn.attention`.

    Returns
    -------
    o : Tensor
        Shape, dtype and device of q, strides of ``torch.empty_like(q)``, on torch's current stream
        and from its allocator.
    lse : Tensor, float32, (batch, heads, len_q)
        With `return_lse`; gradients go through it, too.

    Raises
    ------
    RuntimeError
        For tensors on different devices or of different types, a lower right `CausalBias` of other
        lengths, and `out` if a gradient is required.
    NotImplementedError
        For other devices, including meta, and for sparse and nested tensors.
    UnsupportedError
        For unsupported options; if float32 or a table requires a gradient; for forward-mode
        derivatives (``torch.func.jvp``, dual tensors); and for second derivatives.
    ValueError, TypeError
        As `cupyattn.attention`. ValueError also for a `CausalBias` with `causal` or lengths, and
        TypeError for a mask of another subclass of `torch.Tensor`, whose memory may be no mask.

    Notes
    -----
    Gradients are those of `cupyattn.attention_backward`, after an INT8 forward pass
    straight-through. The transforms ``grad``, ``vjp``, ``jacrev`` and ``vmap`` of ``torch.func``
    are supported.
    A CUDA graph may capture a call once the same call has run outside of it.

    Examples
    --------
    >>> q = k = v = torch.ones(1, 1, 4, 8, dtype=torch.float16, requires_grad=True)
    >>> o = attention(q, k, v, causal=True, backend="mirror")
    >>> o.sum().backward()
    >>> o[0, 0, :, 0].tolist(), q.grad.shape
    ([1.0, 1.0, 1.0, 1.0], torch.Size([1, 1, 4, 8]))
    """
    made = Settings if torch.compiler.is_compiling() else interned  # torch traces no look-up
    settings = made(
        variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, layout, return_lse, quant, tiles, arch, backend, check_finite,
        None, None, qk_norm_split,
    )  # fmt: skip
    tensors = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, lengths_q=lengths_q,
        lengths_kv=lengths_kv,
    )  # fmt: skip
    return call(TensorSettings(settings, deterministic, block_mask), tensors, out)


@explains_foreign_arguments
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    variant: str = "auto",
    accuracy: str = "full",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: tuple[Tensor, Tensor] | None = None,
    qk_norm_eps: float = EPS,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    deterministic: bool = False,
    arch: str | None = None,
    backend: str | None = None,
    check_finite: bool = False,
) -> Any:
    """Attention within each of several sequences, packed one behind the other without padding.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k, v : Tensor, (total_k, heads_kv, head_dim)
    cu_seqlens_q, cu_seqlens_k : Tensor, (batch + 1,), int32 or int64
        As for `cupyattn.attention_varlen`, on the device of q. int32 needs no copy.
    max_len_q, max_len_k : int, optional
        As for `cupyattn.attention_varlen`: with both, offsets cause no synchronisation, as a CUDA
        graph requires.
    variant, accuracy, scale, causal, causal_align, window, softcap, mask, bias, rope, \
    rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps, block_mask, return_lse, out, quant, \
    tiles, deterministic, arch, backend, check_finite
        As for `attention`.

    Returns
    -------
    o : Tensor, (total_q, heads, head_dim)
    lse : Tensor, float32, (heads, total_q)
        With `return_lse`.

    Raises
    ------
    RuntimeError, NotImplementedError, UnsupportedError, ValueError, TypeError
        As `attention`.

    Examples
    --------
    >>> x, ends = torch.ones(5, 1, 8, dtype=torch.float16), torch.tensor([0, 2, 2, 5])
    >>> attention_varlen(x, x, x, ends, ends, backend="mirror").shape
    torch.Size([5, 1, 8])
    """
    made = Settings if torch.compiler.is_compiling() else interned  # torch traces no look-up
    settings = made(
        variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, "BHSD", return_lse, quant, tiles, arch, backend, check_finite,
        max_len_q, max_len_k,
    )  # fmt: skip
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise TypeError("attention_varlen needs cu_seqlens_q and cu_seqlens_k")
    tensors = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return call(TensorSettings(settings, deterministic, block_mask), tensors, out)


def int8_attention(
    q: Tensor, k: Tensor, v: Tensor, *, quant: QuantConfig | None = None, **options: Any
) -> Any:
    """Attention with Q.K^T on INT8 codes: `attention` with ``variant="fa_int8"``.

    Parameters
    ----------
    q, k, v : Tensor
    quant : QuantConfig, optional
        How they are quantised; it may choose P.V in 8 bits, too.
    **options
        As for `attention`, except `variant` and `accuracy`.

    Returns
    -------
    o, or (o, lse)
        As `attention`. Gradients are those of the 16-bit operands, straight-through.

    Raises
    ------
    RuntimeError, NotImplementedError, UnsupportedError, ValueError, TypeError
        As `attention`.

    Examples
    --------
    >>> x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
    >>> int8_attention(x, x, x, backend="mirror").dtype
    torch.bfloat16
    """
    return attention(q, k, v, variant="fa_int8", quant=quant, **options)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on these kernels.

    Parameters
    ----------
    query : Tensor, (..., heads, len_q, head_dim)
        Two axes or more. Leading axes of query, key and value broadcast to one another.
    key, value : Tensor, (..., heads_kv, len_kv, head_dim)
    attn_mask : Tensor, optional
        bool (True: attend), or float32 or the dtype of query (added to the scores); broadcasts to
        (..., heads, len_q, len_kv). It is combined with `is_causal`. It may be a
        `torch.nn.attention.bias.CausalBias`.
    dropout_p : float
        0.
    is_causal : bool
        Query i attends key j if ``j <= i``: aligned top-left, as in torch.
    scale : float, optional
        ``head_dim ** -0.5`` when omitted; may be negative, not 0.
    enable_gqa : bool
        Let key and value have fewer heads than query.
    **options
        Further options of `attention`: variant, accuracy, quant, backend and others.

    Returns
    -------
    Tensor, (..., heads, len_q, head_dim)
        With four axes it has the strides of ``torch.empty_like(query)``; otherwise it is
        contiguous, as in torch. Rows without unmasked keys are 0. In Hopper forms, rows whose
        biases are all ``finfo.min`` of bfloat16 are 0, too; torch returns the mean of value (see
        `bias` of `cupyattn.attention`).

    Raises
    ------
    RuntimeError
        As torch: for shapes that do not broadcast, fewer heads without `enable_gqa`, and a 16-bit
        `attn_mask` of another dtype than query.
    UnsupportedError
        For dropout, and if value has another head_dim.
    RuntimeError, NotImplementedError, ValueError, TypeError
        As `attention`, for nested tensors too.

    Examples
    --------
    >>> x = torch.ones(2, 4, 3, 8, dtype=torch.float16)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True, backend="mirror").shape
    torch.Size([2, 4, 3, 8])
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in given.items():
        if isinstance(x, Tensor):
            check_strided("scaled_dot_product_attention", name, x)
        elif name != "attn_mask" or x is not None:
            raise TypeError(
                f"scaled_dot_product_attention(): argument '{name}' must be Tensor, not "
                f"{type(x).__name__}"
            )
    if dropout_p:
        raise UnsupportedError(
            f"dropout_p={dropout_p!r} is not supported: give 0.0, as a model in eval() does, or "
            "call torch's own scaled_dot_product_attention"
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key and value to be at least 2 dimensional, but got "
            f"{query.dim()}, {key.dim()} and {value.dim()}"
        )
    batch, heads = _leading_axes(query, key, value, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if isinstance(attn_mask, CausalBias):
            options["bias"] = attn_mask
        else:
            attn_masks.check_class("attn_mask", attn_mask)
            name, mask = attn_masks.of_query(attn_mask, query)
            options[name] = attn_masks.of_four_axes(mask, batch)
    if isinstance(scale, (int, float)) and (scale == 0 or not math.isfinite(scale)):
        raise ValueError(
            f"scale must be a finite number other than 0, got {scale}: leave it out for "
            "head_dim ** -0.5"
        )
    if isinstance(scale, (int, float)) and scale < 0:
        query, scale = -query, -scale  # kernels take the maximum of scores before they scale them
    q, k, v = (
        _four_axes(x, batch, own) for x, own in zip((query, key, value), heads, strict=True)
    )
    o: Tensor = attention(
        q, k, v, causal=is_causal, causal_align="top-left", scale=scale, **options
    )
    axes = max(x.dim() for x in (query, key, value))
    if axes == 4:
        return o
    return o.reshape(*batch, *heads[0], *o.shape[-2:]).contiguous()


def named(q: Any, k: Any, v: Any, **others: Any) -> dict[str, Any]:
    """Return the given tensors of a call, by names in `calls.TENSORS`."""
    tensors = {"q": q, "k": k, "v": v}
    for name, x in others.items():
        if x is None:
            continue
        if name in BUFFERS_OF:
            tensors.update(zip(BUFFERS_OF[name], pair(name, x), strict=True))
        else:
            tensors[name] = x
    return tensors


def pair(name: str, given: Any) -> tuple[Any, Any]:
    """Return the two tensors of an option, or None twice."""
    if given is None:
        return None, None
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise TypeError(f"{name} must be a pair of tensors or None, got {type(given).__name__}")
    return given[0], given[1]


def _leading_axes(
    query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the axes before the heads after broadcasting, and the heads of each operand.

    Heads broadcast like the axes before them, unless key and value may have fewer heads.
    """
    operands = query, key, value
    leading = [x.shape[:-2] for x in operands]
    try:
        if enable_gqa:
            batch = torch.broadcast_shapes(*[axes[:-1] for axes in leading])
            return tuple(batch), [tuple(axes[-1:]) for axes in leading]
        shape = tuple(torch.broadcast_shapes(*leading))
    except RuntimeError:
        shapes = ", ".join(f"{tuple(x.shape)}" for x in operands)
        raise RuntimeError(
            "Expected query, key and value to broadcast in their leading dimensions, but got "
            f"shapes {shapes}; fewer heads need enable_gqa=True"
        ) from None
    return shape[:-1], [shape[-1:]] * 3


def _four_axes(x: Tensor, batch: tuple[int, ...], heads: tuple[int, ...]) -> Tensor:
    """Return an operand of any number of axes as (batch, heads, len, head_dim)."""
    leading = (*batch, *heads)
    if tuple(x.shape[:-2]) != leading:
        x = x.expand(*leading, *x.shape[-2:])
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    return x.flatten(0, -4) if x.dim() > 4 else x
