"""Members of quantised operands that mirror and reference read, and codes as numbers."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from cupyattn.arrays.groups import scale_of_row
from cupyattn.arrays.kinds import Array


@runtime_checkable
class Quantized(Protocol):
    """Members of quantised operands that the mirror reads (see `cupyattn.quant.QuantizedQKV`)."""

    @property
    def q_codes(self) -> Array: ...  # (batch, heads, len_q, head_dim), int8 once unpacked
    @property
    def k_codes(self) -> Array: ...  # (batch, heads_kv, len_kv, head_dim), int8
    @property
    def q_scale(self) -> Array: ...  # (batch or 1, heads or 1, groups), of row i at i // group_q
    @property
    def k_scale(self) -> Array: ...  # (batch or 1, heads_kv or 1, groups)
    @property
    def group_q(self) -> int: ...
    @property
    def group_kv(self) -> int: ...
    @property
    def v(self) -> Array | None: ...  # (batch, heads_kv, len_kv, head_dim), float16 or bfloat16
    @property
    def k_mean(self) -> Array | None: ...  # (batch, heads_kv, head_dim), subtracted from K
    @property
    def q_zero(self) -> Array | None: ...  # as q_scale: the code of 0
    @property
    def k_zero(self) -> Array | None: ...  # as k_scale
    @property
    def out_dtype(self) -> str: ...
    @property
    def form(self) -> str: ...  # "portable"; "pv8", "v8": v is None and codes take its place
    def value_codes(self) -> Array: ...  # (batch, heads_kv, len_kv, head_dim), numbers less zeros
    @property
    def v_scale(self) -> Array | None: ...  # (batch, heads_kv, groups, head_dim)
    @property
    def group_v(self) -> int: ...
    @property
    def v_mean(self) -> Array | None: ...  # (batch, heads_kv, head_dim), subtracted from V
    @property
    def v_zero(self) -> Array | None: ...  # as v_scale
    @property
    def config(self) -> Any: ...  # a cupyattn.quant.QuantConfig
    @property
    def cu_seqlens_q(self) -> Array | None: ...  # of packed sequences
    def unpacked(self) -> Any: ...  # the same with codes of a byte each
    @property
    def has_queries(self) -> bool: ...  # False: keys and values without queries


def check_queries(quantized: Quantized) -> None:
    """Raise ValueError if operands are keys and values without queries."""
    if not quantized.has_queries:
        raise ValueError(
            "this QuantizedQKV holds keys and values only: give it queries, as record.with_q(q)"
        )


def check_one_sequence(quantized: Quantized) -> None:
    """Raise ValueError if operands are packed sequences, whose scales have another layout."""
    if quantized.cu_seqlens_q is not None:
        raise ValueError(
            "mirror and bounds take the operands of one sequence at a time: give the records of "
            "QuantizedQKV.sequences()"
        )


def codes_less_zero(codes: Array, zero: Array | None, group: int) -> Array:
    """Return codes less the zero point of their group of rows, as float32: exact whole numbers.

    Parameters
    ----------
    codes : array, (batch, heads, length, head_dim), int8
    zero : array, (batch or 1, heads or 1, groups), int32, or None
        None: every zero point is 0.
    group : int
        Rows per zero point.

    Examples
    --------
    >>> codes = np.full((1, 1, 2, 1), -128, np.int8)
    >>> codes_less_zero(codes, np.array([[[127, 0]]]), 1).ravel().tolist()
    [-255.0, -128.0]
    """
    numbers = codes.astype(np.float32)
    if zero is None:
        return numbers
    by_row = scale_of_row(zero, group, codes.shape[2]).astype(np.float32)
    return numbers - by_row[..., None]
