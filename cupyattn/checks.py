"""What a call to `cupyattn.attention` must satisfy: one function per contract.

Works on shapes, dtypes and addresses alone, so that it serves NumPy, CuPy and foreign arrays alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.errors import UnsupportedError
from cupyattn.features import DTYPES
from cupyattn.rounding import STORAGE

#: Query head or key head counts, lengths and the grid are 32-bit numbers in the kernels.
INT32_MAX = 2**31 - 1
#: The kernels add a tile to a length in 32 bits.
MAX_LENGTH = 2**30
_NAMES = {dtype: name for name, dtype in STORAGE.items()}
#: A softmax scale below it, or above its inverse, would leave the range of float32 on the device.
SCALE_MIN = 2.0**-120


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, checked: all that a kernel, a mirror or a bound needs but the data.

    Parameters
    ----------
    batch, heads, heads_kv, len_q, len_kv, head_dim : int
        Sizes; ``heads_kv`` divides ``heads``.
    dtype : str
        Storage type of Q, K, V and O as the caller sees them.
    scale : float
        Softmax scale, natural units.
    causal : bool
        Whether row i attends key j only where ``j <= i + causal_shift``.
    causal_shift : int
        ``len_kv - len_q`` (bottom-right alignment) or 0 (top-left).
    return_lse : bool
        Whether the log-sum-exp is wanted too.
    """

    batch: int
    heads: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    dtype: str
    scale: float
    causal: bool = False
    causal_shift: int = 0
    return_lse: bool = False

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of O, ``(batch, heads, len_q, head_dim)``."""
        return (self.batch, self.heads, self.len_q, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of the log-sum-exp, ``(batch, heads, len_q)``."""
        return (self.batch, self.heads, self.len_q)


def check_dtype(q: Any, k: Any, v: Any) -> str:
    """Return the common dtype name of q, k and v."""
    # NOTE: NumPy takes microseconds to name a dtype; comparing two of them takes none.
    names = tuple(_NAMES.get(x.dtype) or str(x.dtype) for x in (q, k, v))
    if names[0] not in DTYPES or len(set(names)) != 1:
        raise TypeError(
            "q, k and v must all be float16, bfloat16 or float32, got "
            + ", ".join(f"{n}.dtype={d}" for n, d in zip("qkv", names, strict=True))
        )
    return names[0]


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the softmax scale: the caller's, or ``head_dim ** -0.5``."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = float(scale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"scale must be positive and finite, got {scale!r}")
    if not SCALE_MIN <= value <= 1 / SCALE_MIN:
        raise ValueError(f"scale must be between 2**-120 and 2**120, got {scale!r}")
    return value


def check_causal(causal_align: str, len_q: int, len_kv: int) -> int:
    """Return ``causal_shift`` for an alignment."""
    if causal_align == "bottom-right":
        return len_kv - len_q
    if causal_align == "top-left":
        return 0
    raise ValueError(f"causal_align must be 'bottom-right' or 'top-left', got {causal_align!r}")


def check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> tuple[int, int, int, int, int, int]:
    """Return (batch, heads, heads_kv, len_q, len_kv, head_dim) of three 4-D shapes."""
    got = f"got q.shape={q} k.shape={k} v.shape={v}"
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"q, k and v must have four axes (batch, heads, len, head_dim), {got}")
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v must agree on batch, {got}")
    if k[1] != v[1]:
        raise ValueError(f"k and v must agree on heads, {got}")
    if k[2] != v[2]:
        raise ValueError(f"k and v must agree on length, {got}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must agree on head_dim, {got}")
    if k[3] != v[3]:
        raise UnsupportedError(
            f"v with a head_dim of its own is not supported: pad the narrower of k and v, {got}"
        )
    if not 1 <= q[3] <= 256:
        raise UnsupportedError(f"head_dim must be 1 to 256, {got}")
    if q[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(f"the heads of k and v must divide the heads of q, {got}")
    if max(*q, *k) > MAX_LENGTH:
        raise UnsupportedError(f"every axis must be at most 2**30 long, {got}")
    return q[0], q[1], k[1], q[2], k[2], q[3]


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
) -> AttentionCall:
    """Check three arrays of layout (batch, heads, len, head_dim) and the options of a call.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        float16, bfloat16 or float32, all of the same dtype.
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    causal : bool
    causal_align : {"bottom-right", "top-left"}
    return_lse : bool

    Returns
    -------
    AttentionCall

    Raises
    ------
    TypeError
        For another or a mixed dtype.
    ValueError
        For shapes that do not fit together, or a scale or alignment that means nothing.
    UnsupportedError
        For sizes that the kernels do not take.
    """
    dtype = check_dtype(q, k, v)
    batch, heads, heads_kv, len_q, len_kv, head_dim = check_shapes(
        tuple(q.shape), tuple(k.shape), tuple(v.shape)
    )
    shift = check_causal(causal_align, len_q, len_kv)
    return AttentionCall(
        batch, heads, heads_kv, len_q, len_kv, head_dim, dtype,
        check_scale(scale, head_dim), bool(causal), shift if causal else 0, bool(return_lse),
    )  # fmt: skip


def check_out(out: Any, call: AttentionCall, inputs: tuple[Any, ...]) -> None:
    """Check an array given to receive O: shape, dtype, contiguous last axis, no overlap."""
    if tuple(out.shape) != call.output_shape or str(out.dtype) != call.dtype:
        raise ValueError(
            f"out must have shape {call.output_shape} and dtype {call.dtype}, "
            f"got shape {tuple(out.shape)} and dtype {out.dtype}"
        )
    if out.shape[-1] > 1 and out.strides[-1] != out.dtype.itemsize:
        raise ValueError(f"out must have a contiguous last axis, got strides {out.strides}")
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out must not be a broadcast view, got strides {out.strides}")
    low, high = byte_range(out)
    for name, array in zip("qkv", inputs, strict=False):
        first, last = byte_range(array)
        if low < last and first < high:
            raise ValueError(f"out must not share memory with {name}")


def byte_range(array: Any) -> tuple[int, int]:
    """Return the first address of an array and the one past its last byte; equal when empty."""
    address = data_address(array)
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low = address + sum(r for r in reach if r < 0)
    return low, address + sum(r for r in reach if r > 0) + int(array.dtype.itemsize)


def data_address(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    # NOTE: NumPy's .data is a buffer, which bfloat16 does not have.
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
