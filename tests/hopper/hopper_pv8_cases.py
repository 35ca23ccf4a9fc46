"""The Hopper forms with P and V in 8 bits: problems for any backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.kernels.ladder import HOPPER_VALUE_KEYS
from cupyattn.problem.block_mask import BlockMask
from cupyattn.quant import QuantizedQKV
from tests.quant import pv8_cases
from tests.support import runs
from tests.support.runs import Arrays, normal

#: With P in u8 and V in INT8, of which a channel has one scale; with both in e4m3; as the first,
#: but a scale for every channel and tile.
PV8, FP8, BY_TILE = RUNGS = ("fa_int8@sm90_pv8", "fa_int8@sm90_fp8", "fa_int8@sm90_pv8_by_tile")
#: All with every storage type that they take.
CELLS = [(rung, dtype) for rung in RUNGS for dtype in runs.variant_of(rung).dtypes]
#: Keys of a step for Q and K of `exact`; the same for `exact_by_tile`.
BLOCK_KV, OF_TILE = pv8_cases.TILE[pv8_cases.HOPPER], HOPPER_VALUE_KEYS


def run(rung: str, inputs: Arrays, **options: Any) -> runs.Run:
    """Call `attention`, and see to it that the form ran."""
    one = runs.run(rung, inputs, arch="sm_90a", **options)
    assert one.form == rung.partition("@")[2], one.form
    return one


def largest_head_dim(rung: str) -> int:
    return runs.variant_of(rung).largest_head_dim(rung.partition("@")[2])


def problems(rung: str) -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield every type, both masks, grouped heads, tails and several tiles, all kinds of scores."""
    widest = largest_head_dim(rung)
    yield normal((1, 2, 70, 64), (1, 1, 150, 64)), {}
    q, k, v = normal((2, 1, 200, 16), (2, 1, 210, 16), "bfloat16", 1)
    yield (q, k * 2 + 1, v + 3), {"causal": True}
    yield normal((1, 1, 140, 96), (1, 1, 260, 96), "float32", 2), {"window": (60, 20)}
    q, k, v = normal((1, 1, 20, widest), (1, 1, 200, widest), seed=3)
    yield (q + 3, k - 7, v), {}


def up_and_down(
    len_q: int = 20,
    len_kv: int = 600,
    levels: Sequence[int] = (0, 5, 8, 2, 7),
    block_kv: int = BLOCK_KV,
) -> np.ndarray:
    """Scores, whole numbers, whose largest rises and falls from tile to tile; float32 sums exactly.

    Weights of a row lie within 2^13 of each other, and 600 of them.
    """
    rng = np.random.default_rng(0)
    level = np.array(levels)[np.arange(len_kv) // block_kv]
    scores = level - rng.integers(0, 3, (len_q, len_kv))
    return scores - np.arange(len_q)[:, None]


def with_gaps(move: pv8_cases.Move, block_kv: int) -> tuple[QuantizedQKV, BlockMask]:
    """Operands, and blocks so dropped that M falls elsewhere than if all of them were counted.

    Weights after that are codes of 0 unless it has fallen.
    """
    kept = np.array([[[[1, 0, 1, 1, 0, 1, 1, 1, 1, 1]]]], bool)
    mask = BlockMask(kept[..., :: block_kv // 64], 128, block_kv)
    return exact(move, up_and_down(levels=(0, 9, 1, 10, 2), block_kv=128)), mask


def exact(move: pv8_cases.Move, scores: np.ndarray, p_type: str = "u8") -> QuantizedQKV:
    """Operands with these scores in log2 units, and random codes of V."""
    largest = 127 if p_type == "u8" else 15
    v = np.random.default_rng(1).integers(
        -largest, largest + 1, (scores.shape[1], pv8_cases.HEAD_DIM)
    )
    return pv8_cases.codes_of(scores, v, move, p_type=p_type)


def exact_by_tile(move: pv8_cases.Move, len_kv: int) -> QuantizedQKV:
    """The same with a scale of V for every channel and tile, powers of two.

    Scores of a row are even numbers apart, so that no weight is near a tie between two codes.
    """
    shape = 1, 1, -(-len_kv // OF_TILE), pv8_cases.HEAD_DIM
    v_scale = np.exp2(np.random.default_rng(2).integers(-3, 4, shape)).astype(np.float32)
    v = np.random.default_rng(1).integers(-127, 128, (len_kv, pv8_cases.HEAD_DIM))
    scores = 2 * up_and_down(len_kv=len_kv, block_kv=OF_TILE)
    given = {"v_scale": move(v_scale), "group_v": OF_TILE, "p_type": "u8"}
    return pv8_cases.codes_of(scores, v, move, **given)
