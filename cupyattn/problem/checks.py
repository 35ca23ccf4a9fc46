"""A call of attention: its sizes and options, with no array, and one function for each contract.

The checks read only shapes, dtypes and addresses, so they serve NumPy, CuPy and foreign arrays.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import shown
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.limits import SCALE_MIN, as_float

_NAMES = {dtype: name for name, dtype in STORAGE.items()}


@dataclass(frozen=True)
class Packed:
    """Facts about sequences packed without padding, known before their offsets are read.

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
class Padded:
    """The arrays with the number of valid rows of padded batch entries, and the limits from them.

    Parameters
    ----------
    of_q, of_kv : bool
        Whether entries have numbers of queries, and of keys.
    bottom_right : bool
        Whether causal masks and windows end at an entry's last key: their shift then grows by its
        number of keys, less its number of queries.
    """

    of_q: bool
    of_kv: bool
    bottom_right: bool


@dataclass(frozen=True)
class AttentionSpec:
    """One attention call, checked: all that a kernel, a mirror or a bound needs but the data.

    Parameters
    ----------
    batch, heads, heads_kv, len_q, len_kv, head_dim : int
        Sizes; ``heads_kv`` divides ``heads``. For packed sequences, the longest lengths.
    dtype : str
        Storage type of Q, K, V and O as the caller sees them.
    scale : float
        Softmax scale, natural units.
    causal : bool
        Whether row i attends key j only if ``j <= i + causal_shift``: a causal mask, or the right
        side of a window.
    causal_shift : int
        ``len_kv - len_q`` (bottom-right alignment) or 0 (top-left), plus the keys to the right in a
        window.
    return_lse : bool
        Whether the call returns the log-sum-exp, too.
    window : bool
        Whether row i attends key j only if ``j >= i + window_shift``: the left side of a window.
    window_shift : int
        The alignment minus the keys to the left in a window.
    softcap : float
        ``s -> softcap * tanh(s / softcap)``; 0 for none.
    mask : bool
        Whether there is a boolean mask.
    bias : str
        Storage type of the additive bias; "" for none.
    block_mask : (int, int)
        Rows and keys of a block of the block mask; (0, 0) without one.
    rope : str
        Which columns of Q and K a rotary embedding rotates as a pair, and by which tables
        (`Features.rope`); "" for none.
    rope_offset_q : int
        Query row i has the position ``i + rope_offset_q``, key j the position j.
    qk_norm : bool
        Whether rows of Q and K are divided by their root mean square first.
    stack : int
        Rows of each query head, if the query heads that share a key head are stacked as the rows of
        one head; 0 otherwise.
    packed : Packed, optional
        Batch entries are sequences of different lengths, packed without padding; Q and O are then
        arrays of shape (1, heads, total_q, head_dim), K and V of (1, heads_kv, total_k, head_dim).
    padded : Padded, optional
        Each batch entry has its lengths, up to ``len_q`` and ``len_kv``.

    Attributes
    ----------
    own_lengths : Packed or Padded or None
        `packed` or `padded`, if lengths differ between batch entries; None otherwise.
    output_shape : (int, int, int, int)
        Shape of O: ``(batch, heads, len_q, head_dim)``, packed ``(1, heads, total_q, ...)``.
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
    padded: Padded | None = None
    own_lengths: Packed | Padded | None = field(init=False, compare=False, repr=False)
    output_shape: tuple[int, int, int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own_lengths", self.packed or self.padded)
        batch, rows = self.batch, self.len_q
        if self.packed is not None:
            batch, rows = 1, self.packed.total_q
        object.__setattr__(self, "output_shape", (batch, self.heads, rows, self.head_dim))

    @property
    def lengths_in(self) -> dict[str, str | None]:
        """The buffers of the offsets of sequences, or the lengths of entries, for Q and for K."""
        if self.packed is not None:
            return {"q": "cu_seqlens_q", "k": "cu_seqlens_k"}
        of_q, of_kv = (self.padded.of_q, self.padded.of_kv) if self.padded else (False, False)
        return {"q": "lengths_q" if of_q else None, "k": "lengths_kv" if of_kv else None}

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """(first, last) of `check_limits`."""
        return (
            self.window_shift if self.window else None,
            self.causal_shift if self.causal else None,
        )

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Query rows and keys of a batch entry; of packed sequences on average, rounded up."""
        if self.packed is None:
            return self.len_q, self.len_kv
        totals = self.packed.total_q, self.packed.total_k
        return -(-totals[0] // max(self.batch, 1)), -(-totals[1] // max(self.batch, 1))

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of S, ``(batch, heads, len_q, len_kv)``: to which mask and bias broadcast."""
        return (self.batch, self.heads, self.len_q, self.len_kv)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: ``(batch, heads, len_q)``, packed ``(heads, total_q)``."""
        return self.output_shape[self.packed is not None : 3]


def check_dtype(q: Any, k: Any, v: Any) -> str:
    """Return the common dtype name of q, k and v."""
    return check_one_dtype(q=q, k=k, v=v)


def check_one_dtype(**arrays: Any) -> str:
    """Return the common dtype name of operands."""
    # NOTE: NumPy takes microseconds to name a dtype, but compares two dtypes at once.
    names = {n: _NAMES.get(x.dtype) or str(x.dtype) for n, x in arrays.items()}
    first, *others = names.values()
    if first not in DTYPES or any(other != first for other in others):
        *before, last = names
        raise TypeError(
            f"{', '.join(before)} and {last} must be of one type, float16, bfloat16 or float32, "
            "got " + ", ".join(f"{n}.dtype={d}" for n, d in names.items()) + ": convert them"
        )
    return first


def check_scale(scale: Any, head_dim: int) -> float:
    """Return the softmax scale: the caller's number, or ``head_dim ** -0.5`` for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None, got {shown(scale)}")
    value = as_float(scale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"scale must be positive and finite, got {shown(scale)}")
    if not SCALE_MIN <= value <= 1 / SCALE_MIN:
        raise ValueError(f"scale must be between 2**-120 and 2**120, got {shown(scale)}")
    return value


def check_causal(causal_align: str, len_q: int, len_kv: int) -> int:
    """Return ``causal_shift`` for an alignment."""
    if causal_align == "bottom-right":
        return len_kv - len_q
    if causal_align == "top-left":
        return 0
    raise ValueError(
        f"causal_align must be 'bottom-right' or 'top-left', got {shown(causal_align)}"
    )


def check_window(window: Any) -> tuple[int, int]:
    """Return (left, right), the number of keys on each side of a row's position; -1: no limit."""
    try:
        left, right = map(operator.index, window if isinstance(window, (tuple, list)) else ())
    except (TypeError, ValueError):
        raise ValueError(
            f"window must be a pair (left, right) of whole numbers, got {shown(window)}"
        ) from None
    if not (-1 <= left < 2**63 and -1 <= right < 2**63):
        raise ValueError(
            "window must hold numbers of keys below 2**63, or -1 for no limit, "
            f"got {shown(window)}"
        )
    return left, right


def check_limits(
    causal: bool, causal_align: str, window: Any, len_q: int, len_kv: int
) -> tuple[int | None, int | None]:
    """Return (first, last): row i attends key j only where ``i + first <= j <= i + last``.

    None means no limit. Limits that no row or key reaches are cut to fit in 32 bits.

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
    """Return the softcap, the largest score after tanh; 0.0 for none."""
    if not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a number, got {shown(softcap)}")
    value = as_float(softcap)
    if value != 0 and not SCALE_MIN <= value <= 1 / SCALE_MIN:
        raise ValueError(
            f"softcap must be 0 (none) or between 2**-120 and 2**120, got {shown(softcap)}"
        )
    return value


def check_smoothing(softcap: float, k_mean: Any) -> None:
    """Raise if a call has a softcap and keys whose mean was subtracted.

    Without a softcap the mean shifts all scores of a row, which a softmax does not feel.
    """
    if softcap and k_mean is not None:
        raise ValueError(
            f"softcap={softcap} needs keys that are not smoothed: quantize them with "
            "quant=QuantConfig(smooth_k=False)"
        )


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Check a boolean mask of scores of a shape (batch, heads, len_q, len_kv)."""
    if mask.dtype != np.bool_:
        integers = np.issubdtype(mask.dtype, np.integer)  # 0 and 1, of a tokeniser
        advice = "give mask != 0" if integers else "give numbers that are added to scores as bias="
        raise TypeError(f"mask must be bool (True: attend), got mask.dtype={mask.dtype}: {advice}")
    check_broadcast("mask", mask, shape)


def check_bias(bias: Any, shape: tuple[int, ...]) -> str:
    """Check an additive bias of scores of a shape; return the name of its dtype."""
    name = _NAMES.get(bias.dtype)
    if name is None:
        advice = "give it as mask=" if bias.dtype == np.bool_ else "give bias.astype('float32')"
        raise TypeError(
            f"bias must be float16, bfloat16 or float32, got bias.dtype={bias.dtype}: {advice}"
        )
    check_broadcast("bias", bias, shape)
    return name


def check_block_mask(block_mask: Any, shape: tuple[int, ...]) -> None:
    """Check a block mask of scores of a shape, if there is one."""
    # NOTE: by an attribute, as a block mask imports this module.
    if block_mask is not None and not hasattr(block_mask, "blocks"):
        raise TypeError(
            f"block_mask must be a cupyattn.BlockMask or None, got {shown(block_mask)}"
        )
    if block_mask is not None:
        block_mask.check(shape)


def check_broadcast(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise unless an array broadcasts to a shape without enlarging it."""
    have = tuple(array.shape)
    fits = len(have) <= len(shape) and all(
        n in (1, want) for n, want in zip(have[::-1], shape[::-1], strict=False)
    )
    if not fits:
        padding = have == (shape[0], shape[3])  # True or a number for each key of each entry
        raise ValueError(
            f"{name} must broadcast to (batch, heads, len_q, len_kv) = {shape}, "
            f"got {name}.shape={have}" + f": give {name}[:, None, None]" * padding
        )


def check_options(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str,
    scale: float | None,
    scores: Mapping[str, Any],
    *,
    return_lse: bool,
) -> AttentionSpec:
    """Check the options of a call whose arrays are checked.

    Parameters
    ----------
    sizes : (batch, heads, heads_kv, len_q, len_kv, head_dim)
    dtype : str
        Dtype of the output.
    scale, return_lse
        As for `cupyattn.attention`.
    scores : mapping
        Options that change and mask scores (`cupyattn.problem.settings.Settings.scores`).
    """
    batch, heads, _, len_q, len_kv, head_dim = sizes
    first, last = check_limits(
        scores["causal"], scores["causal_align"], scores["window"], len_q, len_kv
    )
    shape = (batch, heads, len_q, len_kv)
    mask, bias, block_mask = scores["mask"], scores["bias"], scores["block_mask"]
    if mask is not None:
        check_mask(mask, shape)
    check_block_mask(block_mask, shape)
    return AttentionSpec(
        *sizes, dtype, check_scale(scale, head_dim),
        causal=last is not None, causal_shift=last or 0, return_lse=bool(return_lse),
        window=first is not None, window_shift=first or 0,
        softcap=check_softcap(scores["softcap"]), mask=mask is not None,
        bias="" if bias is None else check_bias(bias, shape),
        block_mask=(0, 0) if block_mask is None else block_mask.blocks,
    )  # fmt: skip


def with_lengths(
    call: AttentionSpec, len_q: int, len_kv: int, *, causal: bool, causal_align: str, window: Any
) -> AttentionSpec:
    """Return a call with other lengths, and the limits of its options for these.

    Parameters
    ----------
    call : AttentionSpec
        Call with batch entries that are not packed.
    len_q, len_kv : int
    causal, causal_align, window
        Options of the call.
    """
    first, last = check_limits(causal, causal_align, window, len_q, len_kv)
    return replace(
        call, len_q=len_q, len_kv=len_kv, causal=last is not None, causal_shift=last or 0,
        window=first is not None, window_shift=first or 0,
    )  # fmt: skip


def check_packed(
    call: AttentionSpec, totals: tuple[int, int], *, causal: bool, causal_align: str, window: Any
) -> AttentionSpec:
    """Return a call on packed sequences of at most ``call.len_q`` rows and ``call.len_kv`` keys.

    Parameters
    ----------
    call : AttentionSpec
        The call, as if all batch entries had the longest lengths.
    totals : (int, int)
        Total rows of all sequences: of q, and of k and v.
    causal, causal_align, window
        Options of the call.

    Raises
    ------
    ValueError
        If the totals do not fit the number of sequences and their limits.
    """
    for name, longest, total in zip("qk", (call.len_q, call.len_kv), totals, strict=True):
        if call.batch * longest < total:
            raise ValueError(
                f"{call.batch} sequences of at most max_len_{name}={longest} rows are fewer rows "
                f"than the {total} of {name}"
            )
    bottom_right = causal_align == "bottom-right"
    call = _with_own_shifts(call, bottom_right=bottom_right, causal=causal, window=window)
    return replace(call, packed=Packed(*totals, bottom_right))


def check_padded(
    call: AttentionSpec, given: tuple[bool, bool], *, causal: bool, causal_align: str, window: Any
) -> AttentionSpec:
    """Return a call in which each batch entry has its numbers of queries and keys.

    Parameters
    ----------
    call : AttentionSpec
        As of batch entries that all have ``call.len_q`` rows and ``call.len_kv`` keys.
    given : (bool, bool)
        Whether there are lengths of Q, and of K and V.
    causal, causal_align, window
        Options of the call.
    """
    bottom_right = causal_align == "bottom-right"
    call = _with_own_shifts(call, bottom_right=bottom_right, causal=causal, window=window)
    return replace(call, padded=Padded(*given, bottom_right))


def _with_own_shifts(
    call: AttentionSpec, *, bottom_right: bool, causal: bool, window: Any
) -> AttentionSpec:
    """Return a call with the shifts of batch entries whose lengths differ."""
    # NOTE: shifts count from the alignment of each entry. The limits of a window count from there,
    # too. They are cut to keep shifts within 32 bits. With bottom-right alignment, a row has at
    # most len_kv keys to its left and len_q to its right.
    lengths = (call.len_kv, call.len_q) if bottom_right else (call.len_q, call.len_kv)
    first, last = check_limits(causal, "top-left", window, *lengths)
    return replace(call, causal_shift=last or 0, window_shift=first or 0)
