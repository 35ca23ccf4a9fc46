"""Compile-time features of an attention call, for which a kernel is specialised."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

DTYPES = ("float16", "bfloat16", "float32")
#: Pairs of columns of a rotary embedding: d and d + head_dim / 2, or 2 d and 2 d + 1. Tables have a
#: number for each pair; with `BY_COLUMN` behind, one for each column.
BY_COLUMN = "_by_column"
ROPE_PAIRS = ("half_split", "interleaved", "half_split_by_column", "interleaved_by_column")
#: Norms of rows of Q and K: none, of each row, or of the rows of all heads of a token.
#: ``part`` is a norm of each row, with weights of two parts.
QK_NORMS = ("", "head", "token", "part")
#: Types of P as an operand of P.V: numbers of 16 or 32 bits (""), or codes of these types.
P_TYPES = ("", "u8", "s8", "e4m3", "16bit")
#: Kinds of masks and biases in Hopper forms, in the order of MaskKind and BiasKind.
MASK_KINDS = ("", "rows", "keys")
BIAS_KINDS = ("", "dense", "keys", "rows")


def without_defaults(record: Any) -> str:
    """Return a dataclass as it prints, without the fields that have their default.

    Examples
    --------
    >>> without_defaults(Features("float16", 64, causal=True))
    "Features(dtype='float16', head_dim=64, causal=True)"
    """
    given = ((one.name, getattr(record, one.name), one.default) for one in fields(record))
    said = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
    return f"{type(record).__name__}({said})"


@dataclass(frozen=True)
class Features:
    """The features of a call that one compiled kernel supports, in addition to plain attention.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"}
        Storage type of the 16/32-bit operands and of the output.
    head_dim : int
        True head size, 1 to 256; kernels pad it to their instruction shape themselves.
    causal : bool
        Query row i attends key j only where ``j <= i + causal_shift`` (a run-time number): a causal
        mask, or the right side of a window.
    lse : bool
        Store the log-sum-exp of every row.
    vec : {1, 2, 4, 8, 16}
        Elements per global load and store, the widest that every pointer, stride and head_dim
        allow (at most 16 bytes).
    group_q, group_kv : int
        Query and key rows that share a quantisation scale (a power of two; 0: not quantised).
    window : bool
        Query row i attends key j only where ``j >= i + window_shift`` (a run-time number): the left
        side of a window.
    softcap : bool
        Scores go through ``s -> softcap * tanh(s / softcap)``.
    mask : bool
        A boolean mask says which keys a row attends to.
    bias : {"", "float16", "bfloat16", "float32"}
        Storage type of the bias that is added to the scores; "" without a bias.
    block_mask : (int, int)
        Query rows and key rows of a block of the block mask, which says to which blocks of keys a
        block of rows attends; (0, 0) without one.
    rope : str
        Which columns of Q and K form the pairs that the position of a row rotates, of
        `ROPE_PAIRS`; "" for none.
    varlen : bool
        Batch entries are sequences of different lengths, packed without padding.
    padded : bool
        Batch entries are padded to one length, and each has a separate true length.
    group_v : int
        Value rows that share a scale of a channel (0: V is not quantised).
    p_type : {"", "u8", "s8", "e4m3", "16bit"}
        Type of P if V is codes; "" otherwise.
    zero_points : bool
        Codes have zero points, one with each scale.
    qk_norm : str
        The norm of rows of Q and K, of `QK_NORMS`.
    qk_rotate : bool
        Rows of Q and K are multiplied by a Hadamard matrix.
    quantize_q : bool
        Q comes as numbers, and the kernel quantises it.
    scored : bool
        Hopper forms: softcap, bias or mask change the scores before the softmax, in the units of
        the softmax (``prims/score/score_hook.cuh``).
    mask_kind : {"", "rows", "keys"}
        With `scored`: a separate mask for each query row, or one for all rows; "" for none.
    bias_kind : {"", "dense", "keys", "rows"}
        With `scored`: a bias for each score, one for all query rows, or one for all keys; "" for
        none.
    stacked : bool
        The rows of query heads that share a key head are stacked as the rows of one head. Their
        number is known at run time.
    """

    dtype: str
    head_dim: int
    causal: bool = False
    lse: bool = False
    vec: int = 1
    group_q: int = 0
    group_kv: int = 0
    window: bool = False
    softcap: bool = False
    mask: bool = False
    bias: str = ""
    block_mask: tuple[int, int] = (0, 0)
    rope: str = ""
    varlen: bool = False
    padded: bool = False
    group_v: int = 0
    p_type: str = ""
    zero_points: bool = False
    qk_norm: str = ""
    qk_rotate: bool = False
    stacked: bool = False
    quantize_q: bool = False
    scored: bool = False
    mask_kind: str = ""
    bias_kind: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"features.dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.bias not in ("", *DTYPES):
            raise ValueError(f"features.bias must be '' or one of {DTYPES}, got {self.bias!r}")
        if self.rope not in ("", *ROPE_PAIRS):
            raise ValueError(f"features.rope must be '' or one of {ROPE_PAIRS}, got {self.rope!r}")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"features.qk_norm must be one of {QK_NORMS}, got {self.qk_norm!r}")
        if self.p_type not in P_TYPES:
            raise ValueError(f"features.p_type must be one of {P_TYPES}, got {self.p_type!r}")
        if not 1 <= self.head_dim <= 256:
            raise ValueError(f"features.head_dim must be 1 to 256, got {self.head_dim}")

    def __str__(self) -> str:
        """Name the type, the head size and whatever differs from a plain kernel."""
        return without_defaults(self)

    def defines(self) -> dict[str, int]:
        """Return the ``CFG_*`` macros that carry these features to ``prims/config.cuh``."""
        # Only some kernels have these features; others do not name them.
        added = {"CFG_QK_NORM": QK_NORMS.index(self.qk_norm)} if self.qk_norm else {}
        added |= {"CFG_QK_ROTATE": 1} if self.qk_rotate else {}
        added |= {"CFG_STACKED": 1} if self.stacked else {}
        added |= {"CFG_QUANTIZE_Q": 1} if self.quantize_q else {}
        if self.scored:
            added |= {
                "CFG_SCORED": 1, "CFG_MASK_KIND": MASK_KINDS.index(self.mask_kind),
                "CFG_BIAS_KIND": BIAS_KINDS.index(self.bias_kind),
            }  # fmt: skip
        return {
            **added,
            "CFG_DTYPE": DTYPES.index(self.dtype),
            "CFG_HEAD_DIM": self.head_dim,
            "CFG_CAUSAL": int(self.causal),
            "CFG_LSE": int(self.lse),
            "CFG_VEC": self.vec,
            "CFG_GROUP_Q": self.group_q,
            "CFG_GROUP_KV": self.group_kv,
            "CFG_WINDOW": int(self.window),
            "CFG_SOFTCAP": int(self.softcap),
            "CFG_MASK": int(self.mask),
            "CFG_BIAS": 1 + DTYPES.index(self.bias) if self.bias else 0,
            "CFG_BLOCK_MASK_Q": self.block_mask[0],
            "CFG_BLOCK_MASK_KV": self.block_mask[1],
            "CFG_ROPE": 1 + ROPE_PAIRS.index(self.rope) if self.rope else 0,
            "CFG_VARLEN": 2 if self.padded else int(self.varlen),
            "CFG_GROUP_V": self.group_v,
            "CFG_P_TYPE": P_TYPES.index(self.p_type),
            "CFG_ZERO_POINTS": int(self.zero_points),
        }
