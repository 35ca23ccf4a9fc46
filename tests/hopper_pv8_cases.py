"""The Hopper form with P and V in 8 bits: problems for any backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.block_mask import BlockMask
from cupyattn.quant import QuantizedQKV
from tests import pv8_cases, runs
from tests.runs import Arrays, normal

RUNG = "fa_int8@sm90_pv8"


def run(inputs: Arrays, **options: Any) -> runs.Run:
    """Call `attention`, and see to it that the form ran."""
    one = runs.run(RUNG, inputs, arch="sm_90a", **options)
    assert one.form == "sm90_pv8", one.form
    return one


def problems() -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Yield every type, both masks, grouped heads, tails and several tiles, all kinds of scores."""
    yield normal((1, 2, 70, 64), (1, 1, 150, 64)), {}
    q, k, v = normal((2, 1, 200, 16), (2, 1, 210, 16), "bfloat16", 1)
    yield (q, k * 2 + 1, v + 3), {"causal": True}
    yield normal((1, 1, 140, 96), (1, 1, 260, 96), "float32", 2), {"window": (60, 20)}
    q, k, v = normal((1, 1, 20, 256), (1, 1, 200, 256), seed=3)
    yield (q + 3, k - 7, v), {}


def up_and_down(
    len_q: int = 20, len_kv: int = 600, levels: Sequence[int] = (0, 5, 1, 8, 3)
) -> np.ndarray:
    """Scores, whole numbers, whose largest rises and falls from tile to tile; float32 sums exactly.

    Weights of a row lie within 2^13 of each other, and 600 of them.
    """
    rng = np.random.default_rng(0)
    level = np.array(levels)[np.arange(len_kv) // 128]
    scores = level - rng.integers(0, 3, (len_q, len_kv))
    return scores - np.arange(len_q)[:, None]


def with_gaps(move: pv8_cases.Move, block_kv: int) -> tuple[QuantizedQKV, BlockMask]:
    """Operands, and blocks of which an odd number is dropped before M may fall.

    The last weights are codes of 0 unless it has fallen.
    """
    kept = np.array([[[[1, 0, 1, 1, 0, 0, 1, 1, 1, 1]]]], bool)
    mask = BlockMask(kept[..., :: block_kv // 64], 128, block_kv)
    return exact(move, up_and_down(levels=(0, 9, 1, 10, 2))), mask


def exact(move: pv8_cases.Move, scores: np.ndarray, **given: Any) -> QuantizedQKV:
    """Operands with these scores in log2 units, and random codes of V."""
    v = np.random.default_rng(1).integers(-127, 128, (scores.shape[1], pv8_cases.HEAD_DIM))
    return pv8_cases.codes_of(scores, v, move, p_type="u8", **given)
