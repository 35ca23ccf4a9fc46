"""A call of attention as it was asked for: options, and operands by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import (
    Kernel,
    architecture,
    request_operands,
    scale_tiles,
    settle_request,
)
from cupyattn.problem.operands import Operands
from cupyattn.problem.row_preparation import EPS, Preparation
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `cupyattn.attention` and `attention_varlen`, which document them.

    Sequences are packed where there are `cu_seqlens_q` and `cu_seqlens_k`.
    """

    variant: str = "auto"
    accuracy: str = "full"
    scale: float | None = None
    causal: bool = False
    causal_align: str = "bottom-right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    mask: Any = None
    bias: Any = None
    rope: Any = None
    rope_interleaved: bool = False
    rope_offset_q: int = 0
    block_mask: BlockMask | None = None
    layout: str = "BHSD"
    return_lse: bool = False
    out: Any = None
    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    arch: str | None = None
    backend: str | None = None
    check_finite: bool = False
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_len_q: int | None = None
    max_len_k: int | None = None
    qk_norm: Any = None
    qk_norm_eps: float = EPS

#: A value of `Request.prepared_when`.
BEFORE = "in a pass before"


@dataclass(frozen=True)
class Request:
    """One call, resolved.

    Parameters
    ----------
    options : Options
    variant : Variant
        The rung that runs.
    why : str
        Why this one.
    call : AttentionSpec
    backend : {"cuda", "mirror", "interpret"}
    q, k, v : array
        Operands in layout BHSD, contiguous last axis; codes where the caller brought codes. Packed
        sequences are one batch entry.
    mask, bias : array or None
        The caller's, broadcast to (batch, heads, len_q, len_kv) without a copy; of packed sequences
        to the longest lengths.
    kept_blocks : array or None
        What kernels read of the caller's block mask, beside q.
    preparation : Preparation or None
        What happens to the rows of Q and K first, with weights and tables as the kernels read them.
    quantized : QuantizedQKV or None
        What the caller brought already quantised.
    receiver : array or None
        The caller's ``out`` in layout BHSD.
    restore : callable
        Turns a result into the kind of array and the layout of the caller's q.
    restore_lse : callable
        The same for the log-sum-exp, which has one layout.
    cu_seqlens_q, cu_seqlens_k : array, int32, (batch + 1,), or None
        Where packed sequences begin and end, on the device of q.
    """

    options: Options
    variant: Variant
    why: str
    call: AttentionSpec
    backend: str
    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    kept_blocks: Any
    preparation: Preparation | None
    quantized: QuantizedQKV | None
    receiver: Any
    restore: Callable[[Any], Any]
    restore_lse: Callable[[Any], Any]
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    @property
    def prepared_when(self) -> str:
        """When rows of Q and K are normalised and turned, if they are: `BEFORE` in a pass of its
        own."""
        quant = self.options.quant
        if self.variant.family == "int8" and not (quant and quant.fused):
            return "as they are quantised"
        if self.variant.turns_on_load and not self.call.qk_norm:
            return "as they are loaded"
        return BEFORE

    @property
    def prepares_before(self) -> bool:
        """Whether a pass of its own prepares rows of Q and K."""
        return self.preparation is not None and self.prepared_when == BEFORE

    @property
    def attended(self) -> AttentionSpec:
        """The call as the attention kernel sees it, after passes that prepare or quantise."""
        if self.variant.family == "int8" or self.prepares_before:
            return replace(self.call, rope="", rope_offset_q=0, qk_norm=False)
        return self.call

    @functools.cached_property
    def quant(self) -> QuantConfig:
        """How ``fa_int8`` quantises the caller's arrays."""
        return self.options.quant or QuantConfig()

    @functools.cached_property
    def scale_tiles(self) -> Tiles:
        """Those whose sizes granularity "block" takes: the caller's, or the variant's."""
        arch, head_dim = architecture(self), self.call.head_dim
        return self.options.tiles or scale_tiles(self.variant, head_dim, self.quant, arch)

    @functools.cached_property
    def operands(self) -> Operands:
        """Where the operands of the attention kernel lie."""
        return request_operands(self)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The attention kernel, settled when it is first asked for: the last plan is its."""
        return settle_request(self)
