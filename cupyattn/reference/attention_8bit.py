"""The mirror's loops over keys if P and V are codes; `attention.py` has the loops of 16 and 32
bits."""

# ruff: noqa: E741  (O and l are the paper's letters)

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from cupyattn.arrays.groups import merge_heads
from cupyattn.arrays.kinds import NEG_INF
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import several_value_scales
from cupyattn.kernels.numerics import P_CODE_ONE, Numerics, Shifts
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.operand_protocol import Quantized
from cupyattn.reference.rounding import codes_of_p, ex2, fma32
from cupyattn.reference.softmax_state import Float32, RowState, ShiftState, Step, TileState

if TYPE_CHECKING:
    from cupyattn.reference.scores import Scores


def by_tile(
    scores: Scores, quantized: Quantized, n: Numerics, tiles: Tiles, steps: list[Step]
) -> tuple[Float32, RowState]:
    """The loop of ``"pv8"``, ``"sm90_pv8_by_tile"`` and ``"sm90_fp8"``: P as codes in units of its
    tile, V as codes."""
    if reason := several_value_scales(quantized.group_v, tiles):
        raise UnsupportedError(reason)
    state = RowState(scores.rows, scores.subtracts_first)
    exact_l = state.l.copy()  # the sum of the weights, for lse; l is what O is divided by
    V = cast(Float32, quantized.value_codes())[:, :, None]
    V_scale = cast(Float32, quantized.v_scale)[:, :, None]  # (batch, heads_kv, 1, groups, head_dim)
    O = np.zeros((*scores.rows, V.shape[-1]), np.float32)
    factor, one, len_kv = scores.exponent_factor, P_CODE_ONE[n.p_type], V.shape[-2]
    for kv0 in range(0, len_kv, tiles.block_kv):
        # S2 load K, V
        kv1 = min(kv0 + tiles.block_kv, len_kv)
        group = kv0 // quantized.group_v
        scale = V_scale[..., group : group + 1, :]

        # S3 scores
        S = scores.block(kv0, kv1)

        # S4 softmax
        m = np.fmax.reduce(S, axis=-1, initial=NEG_INF)
        tile = TileState(m, n.p_type, scores.subtracts_first)
        alpha = state.advance(tile.M, factor)
        weights = tile.exponentials(S, factor)
        fall = tile.M - state.M_finite()
        beta = ex2(fall * factor if scores.subtracts_first else fall)  # R4
        codes = codes_of_p(weights, n.p_type)  # R5
        exact_l = fma32(tile.l, beta, exact_l * alpha)  # R6
        # NOTE: the sum of integer codes is exact; that of 8-bit floats is not taken.
        sum_of_codes = codes.sum(axis=-1, dtype=np.float32)
        state.l = fma32(sum_of_codes, beta, state.l) if n.sums_operand else exact_l  # R6

        # S5 output
        O *= alpha[..., None]  # R6
        # NOTE: integer codes stay below 2^24 in sum: their products are exact here as well.
        rows = scores.visitors(kv0, tiles)
        products = codes[..., rows, :] @ V[..., kv0:kv1, :]
        of_tile = beta[..., rows, None]
        weighed = products * (of_tile if n.scales_last else of_tile * scale)
        O[..., rows, :] += scores.kept(weighed, rows, kv0)  # R6
        merged = (merge_heads(x) for x in (S, codes / np.float32(one), state.M, state.l, alpha))
        steps.append(Step(kv0, *merged))
    inverse_l = state.inverse_l()[..., None]
    O = O * (V_scale[..., :1, :] * inverse_l if n.scales_last else inverse_l)  # R7
    if quantized.v_mean is not None:
        mean = np.asarray(quantized.v_mean)[:, :, None, None]
        O = np.where(state.l[..., None] == 0, O, O + mean)  # R7; a row without keys stays 0
    if scores.listed_rows:  # Hopper forms store 0 there, even if a scale of V is NaN
        O = np.where(state.l[..., None] == 0, np.float32(0), O)
    state.l = exact_l * np.float32(1 / one) if scores.subtracts_first else exact_l  # R7: units of M
    return O, state


def by_shifts(
    scores: Scores, quantized: Quantized, by: Shifts, tiles: Tiles, steps: list[Step]
) -> tuple[Float32, RowState]:
    """The loop of ``"pv8_whole"`` and ``"sm90_pv8"``: codes are multiples of 2^M, O is whole."""
    state = ShiftState(scores.rows)
    V = cast(Float32, quantized.value_codes())[:, :, None]
    O = np.zeros((*scores.rows, V.shape[-1]), np.float64)  # whole numbers below 2^31
    len_kv = V.shape[-2]
    count = np.zeros(scores.rows, np.int32)  # of steps that the tile of a row has taken
    for kv0 in range(0, len_kv, tiles.block_kv):
        # S2 load K, V
        kv1 = min(kv0 + tiles.block_kv, len_kv)

        # S3 scores
        S = scores.block(kv0, kv1)

        # S4 softmax
        m = np.fmax.reduce(S, axis=-1, initial=NEG_INF)
        taken = np.broadcast_to(scores.taken(kv0, tiles), scores.rows)
        watched = taken & (count % by.watch_steps == 0) & by.guards(len_kv)
        alpha = np.exp2(state.follow(m, by, taken, watched))
        count += taken
        p = state.exponentials(S, scores.exponent_factor)
        unknown = np.isnan(p)
        codes = np.fmin(np.rint(np.where(unknown, np.float32(0), p)), 255)  # R5
        state.add_codes(codes, by)  # R6
        # NOTE: no code is NaN.
        state.lane_sums[unknown.any(axis=-1)] = np.nan
        state.l = np.where(unknown.any(axis=-1), np.float32(np.nan), state.l)

        # S5 output
        O = np.floor(O * alpha[..., None])  # R6
        O += codes @ V[..., kv0:kv1, :]
        merged = (merge_heads(x) for x in (S, codes, state.M, state.l, alpha))
        steps.append(Step(kv0, *merged))
    V_scale = cast(Float32, quantized.v_scale)[:, :, None]  # (batch, heads_kv, 1, 1, head_dim)
    factor = V_scale * state.inverse_l()[..., None]  # R7
    mean: Float32 = np.zeros(1, np.float32)
    if quantized.v_mean is not None:
        mean = np.asarray(quantized.v_mean)[:, :, None, None]
    O = fma32(O.astype(np.float32), factor, mean)  # R7
    return np.where(state.l[..., None] == 0, np.float32(0), O), state  # a row without keys
