"""Scores as the mirror computes them, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.groups import scale_of_row, split_heads
from cupyattn.arrays.kinds import Array
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.operand_protocol import Quantized, codes_less_zero
from cupyattn.reference.rounding import fma32, round_to, small_and_large_softcap, tanh
from cupyattn.reference.scoring import EVERYWHERE, Scoring
from cupyattn.reference.softmax_state import LOG2E, Float32


@dataclass(frozen=True)
class Scores:
    """S0, S1 and S3 of a kernel: what turns a block of keys into scores.

    Query heads that share a key head are an axis of their own: (batch, heads_kv, group, len, ...).
    """

    Q: Float32  # (batch, heads_kv, group, len_q, head_dim), codes as numbers for int8
    K: Float32  # (batch, heads_kv, 1, len_kv, head_dim)
    row_factor: Float32 | None  # broadcasts to (..., len_q, 1)
    key_factor: Float32 | None  # broadcasts to (..., 1, len_kv)
    exponent_factor: np.float32  # times S gives log2 units
    subtracts_first: bool
    scoring: Scoring
    unit: float = 0.0  # of S per natural score, the unit of softcap and bias
    listed_rows: int = 0  # of a tile that takes the steps in which the mask admits a key; 0: all

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of one number a row."""
        return self.Q.shape[:-1]

    def block(self, kv0: int, kv1: int) -> Float32:
        """Scores of the keys kv0 to kv1, -inf where masked."""
        # NOTE: codes stay exact here: |dot| <= 2^16 head_dim <= 2^24 up to head_dim 256.
        S = self.Q @ self.K[..., kv0:kv1, :].swapaxes(-1, -2)  # R2
        if self.key_factor is not None:
            S = S * self.key_factor[..., kv0:kv1]  # R3
        if self.row_factor is not None:
            S = S * self.row_factor  # R3
        rows, keys, softcap = slice(0, S.shape[-2]), slice(kv0, kv1), self.scoring.softcap
        if softcap and self.unit:
            S = small_and_large_softcap(S, softcap * self.unit)  # R3
        elif softcap:
            S = np.float32(softcap) * tanh(S * np.float32(1 / softcap))  # R3
        if self.scoring.bias is not None:
            bias = self.scoring.bias_at(EVERYWHERE, rows, keys).astype(np.float32)
            S = fma32(bias, np.float32(self.unit), S) if self.unit else S + bias  # R3
        return cast(Float32, self.scoring.select(S, EVERYWHERE, rows, keys))

    def slope(self, kv0: int, kv1: int) -> Float32:
        """Slope of these keys' scores with respect to scale q.k: 1 except with a softcap."""
        if not self.scoring.softcap or self.row_factor is None:
            return np.ones(1, np.float32)
        x = self.Q @ self.K[..., kv0:kv1, :].swapaxes(-1, -2) * self.row_factor
        t = tanh(x * np.float32(1 / self.scoring.softcap))
        return fma32(-t, t, np.float32(1))  # R11

    def visitors(self, kv0: int, tiles: Tiles) -> slice:
        """Query rows of the tiles that visit the step at kv0; the others skip it."""
        len_q, len_kv = self.rows[-1], self.K.shape[-2]
        q0 = np.arange(0, len_q, tiles.block_q)
        begin, end = np.zeros_like(q0), np.full_like(q0, len_kv)
        if self.scoring.first is not None:
            begin = np.maximum(0, q0 + self.scoring.first) // tiles.block_kv * tiles.block_kv
        if self.scoring.last is not None:
            end = q0 + tiles.block_q + self.scoring.last
        visiting = q0[(begin <= kv0) & (kv0 < end)]
        return slice(visiting[0], visiting[-1] + tiles.block_q) if visiting.size else slice(0)

    def taken(self, kv0: int, tiles: Tiles) -> npt.NDArray[np.bool_]:
        """Whether the tile of each query row takes the step at kv0: broadcasts to `rows`."""
        taken = np.zeros(self.rows[-1], bool)
        taken[self.visitors(kv0, tiles)] = True
        if self.scoring.kept is None:
            return taken
        kept = self.scoring.kept_at(EVERYWHERE, slice(0, self.rows[-1]))
        return cast("npt.NDArray[np.bool_]", taken & kept[..., kv0 // self.scoring.blocks[1]])

    def kept(self, products: Float32, rows: slice, key: int) -> Float32:
        """P V of some rows and of keys in one block, where the block mask keeps it; else 0."""
        if self.scoring.kept is None:
            return products
        rows = slice(*rows.indices(self.rows[-1]))
        column = key // self.scoring.blocks[1]
        kept = self.scoring.kept_at(EVERYWHERE, rows)[..., column, None]
        return np.where(kept, products, np.float32(0))


    def listed(self, products: Float32, rows: slice, keys: slice) -> Float32:
        """P V of some rows and of keys in one step, where their tiles take it; else 0.

        `rows` begin with a tile.
        """
        if not self.listed_rows or self.scoring.mask is None:
            return products
        admitted = self.scoring.mask[..., rows, keys].any(axis=-1)
        tiles = np.arange(0, admitted.shape[-1], self.listed_rows)
        if not tiles.size:
            return products
        taken = np.logical_or.reduceat(admitted, tiles, axis=-1)
        taken = taken.repeat(self.listed_rows, axis=-1)[..., : admitted.shape[-1], None]
        return np.where(taken, products, np.float32(0))


def prepare_scores(
    q: Array, k: Array, scale: float, scoring: Scoring, n: Numerics, quantized: Quantized | None
) -> Scores:
    """Put the factors of a score where this kernel applies them (R3)."""
    if (quantized is None) != (n.scaling != "dequantised"):
        have = "arrays" if quantized is None else "quantised operands"
        raise ValueError(
            f"scaling {n.scaling!r} does not go with {have}: quantize first, or only there"
        )
    row_factor = key_factor = None
    unit = 1 / scale if quantized is None else math.log2(math.e)
    exponent_factor = np.float32(scale * np.log2(np.e))
    if n.scaling == "natural" or n.subtracts_first:
        row_factor, exponent_factor = np.asarray(scale, np.float32), LOG2E
    if quantized is None:
        Q, K = round_to(q, n.q_type), round_to(k, n.k_type)
    else:
        Q = codes_less_zero(q, quantized.q_zero, quantized.group_q)
        K = codes_less_zero(k, quantized.k_zero, quantized.group_kv)
        q_scale = scale_of_row(quantized.q_scale, quantized.group_q, q.shape[2])
        k_scale = scale_of_row(quantized.k_scale, quantized.group_kv, k.shape[2])
        # R3: the factor goes into the scale of a row once: scale_log2, so that S comes out in log2
        # units, or scale.
        by_row = exponent_factor if row_factor is None else row_factor
        by_head = np.broadcast_to(by_row * q_scale, q.shape[:3])
        row_factor = split_heads(by_head, k.shape[1])[..., None]
        key_factor = k_scale[:, :, None, None]
        exponent_factor = LOG2E if n.subtracts_first else np.float32(1)
    return Scores(
        split_heads(Q, k.shape[1]), K[:, :, None], row_factor, key_factor, exponent_factor,
        n.subtracts_first, scoring, unit if n.scored else 0.0,
    )  # fmt: skip
