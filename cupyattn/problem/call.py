"""The sizes and options of a call of attention, with no array in it."""

from __future__ import annotations

from dataclasses import dataclass


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
class Padded:
    """Which arrays say how many rows of a padded batch entry count, and how limits follow them.

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
    padded : Padded, optional
        Batch entries have lengths of their own, up to ``len_q`` and ``len_kv``.
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

    @property
    def own_lengths(self) -> Packed | Padded | None:
        """What is known of batch entries with lengths of their own; None where all have one."""
        return self.packed or self.padded

    @property
    def lengths_in(self) -> dict[str, str | None]:
        """The buffers that say where a sequence lies, or how long an entry is, for Q and for K."""
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
