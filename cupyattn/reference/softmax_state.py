"""The state of the mirror between steps, a row's running softmax; and its trace."""

# ruff: noqa: E741  (l is the paper's letter)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import NEG_INF, Array
from cupyattn.kernels.numerics import LANES, LARGEST_EXPONENT, LARGEST_SCORE, P_CODE_ONE, Shifts
from cupyattn.reference.rounding import ex2, fma32, mul_down32, sub_up32

Float32 = npt.NDArray[np.float32]

LOG2E = np.float32(np.log2(np.e))
LN2 = np.float32(np.log(2.0))
#: From here on the largest score of a whole row stays in natural units: log2(e) times it may
#: overflow.
LARGEST_IN_LOG2 = 2.0**126


@dataclass(frozen=True)
class Step:
    """One step of the loop over keys, as `attention_mirror` saw it.

    Parameters
    ----------
    kv0 : int
        First key of the step.
    S : (batch, heads, len_q, keys) array, float32
        Scores as S3 leaves them: times `scale` (natural), a bare dot product (folded) or in log2
        units (dequantised); -inf where masked. With softcap or bias natural in every rung.
    P : (batch, heads, len_q, keys) array, float32
        Probabilities as S5 multiplies them with V; with 8-bit P as shares of the tile's largest, or
        codes where these are multiples of 2^m.
    m : (batch, heads, len_q) array, float32
        The kernel's M: the running maximum in log2 units, rounded; with softcap or bias in natural
        units. Where the numerics have headroom it may lie below the maximum.
    l : (batch, heads, len_q) array, float32
        Running sum of exponentials of score - m, this step included; with softcap or bias and 8-bit
        P in units of code 1.
    alpha : (batch, heads, len_q) array, float32
        Factor that brought l and O to this step's m.
    """

    kv0: int
    S: Float32
    P: Float32
    m: Float32
    l: Float32
    alpha: Float32


def inverse(l: Float32) -> Float32:
    """1 / l; a row that attended to nothing has l = 0 and gets O = 0."""
    return np.where(l == 0, np.float32(0), np.float32(1) / l)


def row_maximum(m: Float32, factor: np.float32) -> Float32:
    """M of the largest score, `factor` bringing it to log2 units, as ``score.cuh`` has it."""
    M = m * factor
    return np.where(np.abs(M) < LARGEST_SCORE, M, mul_down32(m, factor))


class RowState:
    """Running softmax of every query row, as ``prims/score/online_softmax.cuh`` has it.

    M is in log2 units, or natural where `subtracts_first`.
    """

    def __init__(self, shape: tuple[int, ...], subtracts_first: bool) -> None:
        self.M = np.full(shape, NEG_INF, np.float32)
        self.l = np.zeros(shape, np.float32)
        self.subtracts_first = subtracts_first

    def M_finite(self) -> Float32:
        """M as a number that may be subtracted: 0 where no key was admitted yet."""
        return np.where(self.M == NEG_INF, np.float32(0), self.M)

    def raised_by(self, m: Float32, factor: np.float32, headroom: int) -> npt.NDArray[np.bool_]:
        """Whether scores whose largest is `m` have weights of more than 2^headroom."""
        return ~(fma32(m, factor, -self.M) <= headroom)  # no key yet: +inf or NaN

    def advance(self, m: Float32, factor: np.float32) -> Float32:
        """Admit scores whose largest is `m`; return alpha."""
        M_new = m if self.subtracts_first else row_maximum(m, factor)
        M_old, self.M = self.M, np.fmax(self.M, M_new)
        rise = M_old - self.M_finite()
        alpha = ex2(rise * factor if self.subtracts_first else rise)  # R4
        self.l = self.l * alpha  # R6
        return alpha

    def exponentials(self, S: Float32, factor: np.float32) -> Float32:
        """Return the exponentials of S - M, `factor` bringing S to log2 units; add them to l."""
        M = self.M_finite()[..., None]
        if self.subtracts_first:
            p = ex2((S - M) * factor)  # R4
        else:
            p = ex2(np.minimum(fma32(S, factor, -M), np.float32(LARGEST_EXPONENT)))  # R4
        self.l = self.l + p.sum(axis=-1, dtype=np.float32)  # R6
        return p

    def inverse_l(self) -> Float32:
        """Factor of O."""
        return inverse(self.l)

    def lse(self) -> Float32:
        """Natural log of the sum of exponentials."""
        log_l = np.log2(self.l)
        return fma32(log_l, LN2, self.M) if self.subtracts_first else (self.M + log_l) * LN2


class TileState(RowState):
    """The same of one tile, as ``p_codes.cuh`` has it: weights are in units of code 1."""

    def __init__(self, m: Float32, p_type: str, subtracts_first: bool) -> None:
        super().__init__(m.shape, subtracts_first)
        self.code_log2 = np.float32(np.log2(P_CODE_ONE[p_type]))
        self.M = m if subtracts_first else sub_up32(m, self.code_log2)  # R4

    def exponentials(self, S: Float32, factor: np.float32) -> Float32:
        """Return the weights of scores; l is their sum."""
        difference = S - self.M_finite()[..., None]
        if self.subtracts_first:
            difference = fma32(difference, factor, self.code_log2)
        weights = ex2(difference)  # R4
        self.l = weights.sum(axis=-1, dtype=np.float32)  # R6
        return weights


class ShiftState(RowState):
    """The same where O is whole (`Shifts`): M is a whole number, and O follows it.

    l is the sum of codes, which O is divided by; lse has `exact_l`, that of the exponentials. Where
    l is whole, too, it is that of `lane_sums`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape, subtracts_first=False)
        self.M = np.full(shape, -(2.0**127), np.float32)
        self.highest = self.M.copy()
        self.exact_l = self.l.copy()
        self.lane_sums = np.zeros((*shape, LANES))

    def add_codes(self, codes: Float32, by: Shifts) -> None:
        """Add the codes (..., keys) of a step to l."""
        if by.l_bits is None:
            self.l = self.l + codes.sum(axis=-1, dtype=np.float32)  # R6
            return
        eights = -(-codes.shape[-1] // (2 * LANES))
        pad = [(0, 0)] * (codes.ndim - 1) + [(0, eights * 2 * LANES - codes.shape[-1])]
        by_lane = np.pad(codes, pad).reshape(*codes.shape[:-1], eights, LANES, 2)
        self.lane_sums = self.lane_sums + by_lane.sum(axis=(-3, -1))  # exact
        self.l = self.lane_sums.sum(axis=-1).astype(np.float32)

    def follow(self, m: Float32, by: Shifts, taken: Array, watched: Array) -> Array:
        """Choose M for scores whose largest is `m`; return how far to the left O is shifted.

        Rows whose step is not `taken` stay as they are.
        """
        M_old = self.M
        exponent = np.where(self.l > 0, np.frexp(self.l)[1] - 1, -127)
        least = M_old + (exponent + 3 - by.sum_bits + by.lower_bits).astype(np.float32)
        self.highest = np.where(watched, np.fmax(self.highest, least), self.highest)
        self.M = np.floor(m) + np.float32(1 - by.code_bits)
        self.highest = np.fmax(self.highest, self.M)
        self.M = np.fmax(self.M, np.where(taken, self.highest - by.lower_bits, M_old))
        shift = np.fmax(M_old - self.M, -126.0)
        self.l, self.exact_l = (l * np.exp2(shift) for l in (self.l, self.exact_l))
        if by.l_bits is not None:
            one = np.exp2(np.float64(by.l_bits))
            self.lane_sums = np.floor(self.lane_sums * np.exp2(shift)[..., None] * one) / one  # R6
            self.l = self.lane_sums.sum(axis=-1).astype(np.float32)
        return shift

    def exponentials(self, S: Float32, factor: np.float32) -> Float32:
        """Return the exponentials of S - M; add them to exact_l."""
        p = ex2(fma32(S, factor, -self.M[..., None]))  # R4
        self.exact_l = self.exact_l + p.sum(axis=-1, dtype=np.float32)  # R6
        return p

    def lse(self) -> Float32:
        """Natural log of the sum of exponentials."""
        return (self.M + np.log2(self.exact_l)) * LN2


class _WholeRows(RowState):
    """The state of whole rows, those in `natural` in natural units."""

    natural: npt.NDArray[np.bool_] | None = None

    def lse(self) -> Float32:
        """Natural log of the sum of exponentials."""
        lse = super().lse()
        if self.natural is None:
            return lse
        return np.where(self.natural, fma32(np.log2(self.l), LN2, self.M), lse)


def softmax_of_rows(
    S: Float32, factor: np.float32, subtracts_first: bool
) -> tuple[Float32, RowState]:
    """Whole rows: P divided by l, and the final state."""
    state = _WholeRows(S.shape[:-1], subtracts_first)
    m = np.fmax.reduce(S, axis=-1, initial=NEG_INF)
    state.advance(m, factor)
    p = state.exponentials(S, factor)
    large = (m != NEG_INF) & (np.abs(m) >= LARGEST_IN_LOG2)
    if large.any() and not subtracts_first:
        other = RowState(m.shape, subtracts_first=True)
        other.advance(m, factor)
        p = np.where(large[..., None], other.exponentials(S, factor), p)
        state.M, state.l = np.where(large, m, state.M), np.where(large, other.l, state.l)
        state.natural = large
    return p * state.inverse_l()[..., None], state  # R6
