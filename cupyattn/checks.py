"""What a call to `cupyattn.attention` must satisfy: one function per contract.

Works on shapes, dtypes and addresses alone, so that it serves NumPy, CuPy and foreign arrays alike.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.errors import UnsupportedError
from cupyattn.features import DTYPES
from cupyattn.rounding import STORAGE
from cupyattn.tiles import Tiles

#: Query head or key head counts, lengths and the grid are 32-bit numbers in the kernels.
INT32_MAX = 2**31 - 1
#: The kernels add a tile to a length in 32 bits.
MAX_LENGTH = 2**30
_NAMES = {dtype: name for name, dtype in STORAGE.items()}
#: A softmax scale below it, or above its inverse, would leave the range of float32 on the device.
SCALE_MIN = 2.0**-120


@dataclass(frozen=True)
class Packed:
    """What is known beforehand of sequences packed without padding.

    Parameters
    ----------
    total_q, total_k : int
        Rows of all sequences: of Q and O, and of K and V.
    bottom_right : bool
        Whether the shifts of the call are further by ``len_kv - len_q`` of a sequence.
    """

    total_q: int
    total_k: int
    bottom_right: bool


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, checked: all that a kernel, a mirror or a bound needs but the data.

    Parameters
    ----------
    batch, heads, heads_kv, len_q, len_kv, head_dim : int
        Sizes; ``heads_kv`` divides ``heads``. Of packed sequences the longest lengths.
    dtype : str
        Storage type of Q, K, V and O as the caller sees them.
    scale : float
        Softmax scale, natural units.
    causal : bool
        Whether row i attends key j only where ``j <= i + causal_shift``: a causal mask, or the
        right side of a window.
    causal_shift : int
        ``len_kv - len_q`` (bottom-right alignment) or 0 (top-left), plus the keys to the right that
        a window leaves.
    return_lse : bool
        Whether the log-sum-exp is wanted too.
    window : bool
        Whether row i attends key j only where ``j >= i + window_shift``: the left side of a window.
    window_shift : int
        The alignment less the keys to the left that a window leaves.
    softcap : float
        ``s -> softcap * tanh(s / softcap)``; 0: none.
    mask : bool
        Whether there is a boolean mask.
    bias : str
        Storage type of the additive bias; "": none.
    block_mask : (int, int)
        Rows and keys of a block of the block mask; (0, 0): there is none.
    rope : str
        Which columns of Q and K a rotary embedding turns as a pair (`Features.rope`); "": none.
    rope_offset_q : int
        Query row i has the position ``i + rope_offset_q``, key j the position j.
    qk_norm : bool
        Whether rows of Q and K are divided by their root mean square first.
    stack : int
        Rows of each of the query heads that share a key head, where these are stacked as the rows
        of one; 0: they are not.
    packed : Packed, optional
        Batch entries are sequences of different lengths, packed without padding; Q and O are then
        arrays of shape (1, heads, total_q, head_dim), K and V of (1, heads_kv, total_k, head_dim).
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
    window: bool = False
    window_shift: int = 0
    softcap: float = 0.0
    mask: bool = False
    bias: str = ""
    block_mask: tuple[int, int] = (0, 0)
    rope: str = ""
    rope_offset_q: int = 0
    qk_norm: bool = False
    stack: int = 0
    packed: Packed | None = None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """(first, last) of `check_limits`."""
        return (
            self.window_shift if self.window else None,
            self.causal_shift if self.causal else None,
        )

    @property
    def scores_changed(self) -> bool:
        """Whether something but the places of row and key changes a score or masks it."""
        return bool(self.softcap or self.mask or self.bias or self.block_mask != (0, 0))

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Query rows and keys of a batch entry; of packed sequences on average, rounded up."""
        if self.packed is None:
            return self.len_q, self.len_kv
        totals = self.packed.total_q, self.packed.total_k
        return -(-totals[0] // max(self.batch, 1)), -(-totals[1] // max(self.batch, 1))

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of S, ``(batch, heads, len_q, len_kv)``: what mask and bias broadcast to."""
        return (self.batch, self.heads, self.len_q, self.len_kv)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of O: ``(batch, heads, len_q, head_dim)``, packed ``(1, heads, total_q, ...)``."""
        if self.packed is not None:
            return (1, self.heads, self.packed.total_q, self.head_dim)
        return (self.batch, self.heads, self.len_q, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: ``(batch, heads, len_q)``, packed ``(heads, total_q)``."""
        return self.output_shape[self.packed is not None : 3]


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


def check_window(window: Any) -> tuple[int, int]:
    """Return (left, right), how many keys beside its own place a row attends to; -1: no limit."""
    try:
        left, right = (operator.index(n) for n in window)
    except (TypeError, ValueError):
        raise ValueError(
            f"window must be a pair (left, right) of whole numbers, got {window!r:.60}"
        ) from None
    if min(left, right) < -1:
        raise ValueError(f"window must hold numbers of keys, or -1 for no limit, got {window!r}")
    return left, right


def check_limits(
    causal: bool, causal_align: str, window: Any, len_q: int, len_kv: int
) -> tuple[int | None, int | None]:
    """Return (first, last): row i attends key j only where ``i + first <= j <= i + last``.

    None where there is no such limit. Limits that no row or key reaches are cut to what 32 bits
    hold.

    Examples
    --------
    >>> check_limits(True, "bottom-right", (-1, -1), 4, 6)
    (None, 2)
    >>> check_limits(False, "top-left", (3, 1), 4, 6)
    (-3, 1)
    """
    shift = check_causal(causal_align, len_q, len_kv)
    left, right = check_window(window)
    right = 0 if causal else right
    first = None if left == -1 else max(shift - left, -len_q)
    last = None if right == -1 else min(shift + right, len_kv)
    return first, last


def check_softcap(softcap: Any) -> float:
    """Return the bound that tanh gives the scores, 0.0 for none."""
    if not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a number, got {softcap!r:.60}")
    value = float(softcap)
    if value != 0 and not SCALE_MIN <= value <= 1 / SCALE_MIN:
        raise ValueError(f"softcap must be 0 (none) or between 2**-120 and 2**120, got {softcap!r}")
    return value


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Check a boolean mask of scores of a shape (batch, heads, len_q, len_kv)."""
    if mask.dtype != np.bool_:
        raise TypeError(f"mask must be bool (True: attend), got mask.dtype={mask.dtype}")
    check_broadcast("mask", mask, shape)


def check_bias(bias: Any, shape: tuple[int, ...]) -> str:
    """Check an additive bias of scores of a shape; return the name of its dtype."""
    name = _NAMES.get(bias.dtype)
    if name is None:
        raise TypeError(f"bias must be float16, bfloat16 or float32, got bias.dtype={bias.dtype}")
    check_broadcast("bias", bias, shape)
    return name


def check_broadcast(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise unless an array broadcasts to a shape without enlarging it."""
    have = tuple(array.shape)
    fits = len(have) <= len(shape) and all(
        n in (1, want) for n, want in zip(have[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must broadcast to (batch, heads, len_q, len_kv) = {shape}, "
            f"got {name}.shape={have}"
        )


def check_shapes(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    given: Sequence[tuple[int, ...]] | None = None,
) -> tuple[int, int, int, int, int, int]:
    """Return (batch, heads, heads_kv, len_q, len_kv, head_dim) of three 4-D shapes.

    Messages show the shapes that were `given`, where the caller has the axes in another order.
    """
    shown = given or (q, k, v)
    got = f"got q.shape={shown[0]} k.shape={shown[1]} v.shape={shown[2]}"
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


def check_backward_shapes(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> tuple[int, int, int, int, int, int]:
    """Return what `check_shapes` does of q, k and v, the others having the shapes that q asks for.

    `out` and `lse` may be None.
    """
    sizes = check_shapes(*(tuple(x.shape) for x in (q, k, v)))
    shape = tuple(q.shape)
    wanted = {"d_out": (d_out, shape), "out": (out, shape), "lse": (lse, shape[:3])}
    for name, (array, want) in wanted.items():
        if array is not None and tuple(array.shape) != want:
            raise ValueError(
                f"{name} must have shape {want}, to go with q.shape={shape}, got "
                f"{name}.shape={tuple(array.shape)}"
            )
    return sizes


def check_backward(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> tuple[tuple[int, int, int, int, int, int], str]:
    """Return the sizes and the dtype of arrays (batch, heads, len, head_dim) of a backward pass."""
    sizes, dtype = check_backward_shapes(d_out, q, k, v, out, lse), check_dtype(q, k, v)
    for name, array, want in (
        ("d_out", d_out, dtype),
        ("out", out, dtype),
        ("lse", lse, "float32"),
    ):
        if str(array.dtype) != want:
            raise TypeError(f"{name} must be {want}, got {name}.dtype={array.dtype}")
    return sizes, dtype


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    block_mask: Any = None,
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
    window : (int, int)
    softcap : float
    mask, bias : array, optional
    block_mask : BlockMask, optional

    Returns
    -------
    AttentionCall

    Raises
    ------
    TypeError
        For another or a mixed dtype.
    ValueError
        For shapes that do not fit together, or a scale, alignment, window or softcap that means
        nothing.
    UnsupportedError
        For sizes that the kernels do not take.
    """
    sizes = check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    return check_options(
        sizes, check_dtype(q, k, v), scale=scale, causal=causal, causal_align=causal_align,
        return_lse=return_lse, window=window, softcap=softcap, mask=mask, bias=bias,
        block_mask=block_mask,
    )  # fmt: skip


def check_options(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str,
    *,
    scale: float | None,
    causal: bool,
    causal_align: str,
    return_lse: bool,
    window: tuple[int, int],
    softcap: float,
    mask: Any,
    bias: Any,
    block_mask: Any,
) -> AttentionCall:
    """Check the options of a call whose arrays are checked; `check_attention` documents them.

    `sizes` are (batch, heads, heads_kv, len_q, len_kv, head_dim), `dtype` is that of the output.
    """
    batch, heads, _, len_q, len_kv, head_dim = sizes
    first, last = check_limits(causal, causal_align, window, len_q, len_kv)
    shape = (batch, heads, len_q, len_kv)
    if mask is not None:
        check_mask(mask, shape)
    if block_mask is not None:
        block_mask.check(shape)
    return AttentionCall(
        *sizes, dtype, check_scale(scale, head_dim),
        causal=last is not None, causal_shift=last or 0, return_lse=bool(return_lse),
        window=first is not None, window_shift=first or 0, softcap=check_softcap(softcap),
        mask=mask is not None, bias="" if bias is None else check_bias(bias, shape),
        block_mask=(0, 0) if block_mask is None else block_mask.blocks,
    )  # fmt: skip


#: Rows that share a scale where one scale serves them all: ``row // GROUP_ALL`` is 0 for every row.
GROUP_ALL = 2**30


def check_value_group(group: int, tiles: Tiles) -> None:
    """Raise UnsupportedError unless a tile of keys has one scale for each channel of V.

    Parameters
    ----------
    group : int
        Keys that share the scale of a channel.
    tiles : Tiles
        Of the attention kernel.
    """
    if group != GROUP_ALL and group % tiles.block_kv:
        raise UnsupportedError(
            f"a tile of {tiles.block_kv} keys would meet several scales of V, which change every "
            f"{group} keys: quantise V for these tiles, or per channel"
        )


def check_packed(
    call: AttentionCall, totals: tuple[int, int], *, causal: bool, causal_align: str, window: Any
) -> AttentionCall:
    """Return a call on packed sequences of at most ``call.len_q`` rows and ``call.len_kv`` keys.

    Parameters
    ----------
    call : AttentionCall
        As of batch entries that all have those lengths.
    totals : (int, int)
        Rows of all sequences together: of q, and of k and v.
    causal, causal_align, window
        Options of the call.

    Raises
    ------
    ValueError
        If so many sequences of those lengths cannot have so many rows.
    """
    for name, longest, total in zip("qk", (call.len_q, call.len_kv), totals, strict=True):
        if call.batch * longest < total:
            raise ValueError(
                f"{call.batch} sequences of at most max_len_{name}={longest} rows are fewer rows "
                f"than the {total} of {name}"
            )
    # NOTE: shifts count from the alignment, which every sequence has for itself. What a window may
    # be cut to, so that shifts stay within 32 bits, is counted from there too: bottom-right, a row
    # has at most len_kv keys to its left and len_q to its right.
    bottom_right = causal_align == "bottom-right"
    lengths = (call.len_kv, call.len_q) if bottom_right else (call.len_q, call.len_kv)
    first, last = check_limits(causal, "top-left", window, *lengths)
    return replace(
        call, causal_shift=last or 0, window_shift=first or 0,
        packed=Packed(*totals, bottom_right),
    )  # fmt: skip


def check_length(name: str, length: Any) -> int:
    """Return a caller's length as a Python number."""
    try:
        value = operator.index(length)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {length!r:.60}") from None
    if not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be between 0 and 2**30, got {value}")
    return value


def check_cu_seqlens(name: str, cu_seqlens: np.ndarray, total: int, longest: int) -> None:
    """Check the offsets of packed sequences where their values are at hand.

    Parameters
    ----------
    name : {"q", "k"}
        Whose.
    cu_seqlens : numpy.ndarray, (batch + 1,)
    total : int
        Rows of the packed array.
    longest : int
        The caller's ``max_len_q`` or ``max_len_k``.
    """
    offsets = cu_seqlens.astype(np.int64)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != total or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens_{name} must rise from 0 to {total}, the rows of {name}, "
            f"got {np.array2string(offsets, threshold=8)}"
        )
    if lengths.max(initial=0) > longest:
        raise ValueError(
            f"max_len_{name}={longest} is less than the longest sequence of cu_seqlens_{name}, "
            f"{lengths.max()} rows"
        )


def check_out(out: Any, call: AttentionCall, inputs: tuple[Any, ...]) -> None:
    """Check an array given to receive O, as `check_receiver` does.

    `inputs` are q, k, v and, where there are such, mask and bias (None where not).
    """
    named = zip(("q", "k", "v", "mask", "bias"), inputs, strict=False)
    read = {name: array for name, array in named if array is not None}
    check_receiver(out, call.output_shape, call.dtype, read)


def check_receiver(out: Any, shape: Sequence[int], dtype: str, read: Mapping[str, Any]) -> None:
    """Raise ValueError unless `out` can receive a result made of the arrays in `read`.

    It has the shape and dtype of the result, aligned elements and a contiguous last axis, may be
    written to, and overlaps neither itself nor what is read.
    """
    if tuple(out.shape) != tuple(shape) or str(out.dtype) != dtype:
        raise ValueError(
            f"out must have shape {tuple(shape)} and dtype {dtype}, "
            f"got shape {tuple(out.shape)} and dtype {out.dtype}"
        )
    check_aligned("out", out)
    if not out.size:
        return  # strides of an array of nothing mean nothing, and it shares no memory
    if out.shape[-1] > 1 and out.strides[-1] != out.dtype.itemsize:
        raise ValueError(f"out must have a contiguous last axis, got strides {out.strides}")
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out must not be a broadcast view, got strides {out.strides}")
    if not getattr(out.flags, "writeable", True):  # CuPy's arrays have no such flag
        raise ValueError("out must be an array that may be written to, got a read-only one")
    check_apart(
        meetings(out, read), {n: data_address(a) for n, a in read.items()}, data_address(out)
    )


def meetings(out: Any, read: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, for each array that is read, between which distances behind it `out` meets it."""
    low, high = _reach(out)
    found = {}
    for name, array in read.items():
        first, last = _reach(array)
        if first < last and low < high:
            found[name] = first - high, last - low
    return found


def check_apart(
    meeting: Mapping[str, tuple[int, int]], addresses: Mapping[str, int], out: int
) -> None:
    """Raise ValueError where an `out` at an address shares memory with what is read.

    `meeting` is what `meetings` found for arrays of the same forms.
    """
    for name, (first, last) in meeting.items():
        if first < out - addresses[name] < last:
            raise ValueError(f"out must not share memory with {name}")


def _reach(array: Any) -> tuple[int, int]:
    """Return the bytes from an array's first element to its lowest and past its highest."""
    low, high = byte_range(array)
    address = data_address(array)
    return low - address, high - address


def byte_range(array: Any) -> tuple[int, int]:
    """Return the first address of an array and the one past its last byte; equal when empty."""
    address = data_address(array)
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low = address + sum(r for r in reach if r < 0)
    return low, address + sum(r for r in reach if r > 0) + int(array.dtype.itemsize)


def is_aligned(array: Any) -> bool:
    """Whether every element of a NumPy or CuPy array lies at a multiple of its size."""
    size = int(array.dtype.itemsize)
    if size == 1:
        return True
    odd = any(s % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    return not odd and data_address(array) % size == 0


def check_aligned(name: str, array: Any) -> None:
    """Raise ValueError unless an array that receives a result has aligned elements."""
    if not is_aligned(array):
        size = int(array.dtype.itemsize)
        raise ValueError(
            f"{name} must have its elements at multiples of their {size} bytes, got address "
            f"{size} n + {data_address(array) % size} and strides {tuple(array.strides)}: pass an "
            "array of its own memory, as empty() returns, and copy the result"
        )


def data_address(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    # NOTE: NumPy's .data is a buffer, which bfloat16 does not have.
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
