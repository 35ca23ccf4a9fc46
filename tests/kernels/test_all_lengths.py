"""Every length from 0 to 300 at one head_dim: the mirror within its bound, the plan whole.

The interpreter runs some of them, spread over the rungs; tests/gpu/test_all_lengths.py runs all.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from tests.support.runs import Run, normal, quantized, run, variant_of

HEAD_DIM, MOST = 16, 300
#: Square, and every length beside its complement.
SHAPES = [(n, n) for n in range(MOST + 1)] + [(n, MOST - n) for n in range(MOST + 1)]
#: Lengths that the interpreter runs: some for each rung, on both sides of the tiles' edges.
SPREAD = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 95, 96, 97, 127, 128, 129)


#: Of the shapes.
SHARES = 2 * len(VARIANTS)


@pytest.mark.parametrize(
    ("rung", "share"),
    [
        pytest.param(rung, share, marks=[pytest.mark.slow] if share != number else [])
        for number, rung in enumerate(VARIANTS)
        for share in range(SHARES)
    ],
)
def test_the_mirror_at_every_length(rung: str, share: int) -> None:
    """Every square shape and every fourth of the others; every second one causal.

    Each rung takes a share of them at once, half of them together, and the other shares are slow.
    """
    q, k, v = normal((1, 1, MOST, HEAD_DIM), (1, 1, MOST, HEAD_DIM), seed=1)
    shapes = list(enumerate(SHAPES[: MOST + 1] + SHAPES[MOST + 1 :: 4]))
    for number, (len_q, len_kv) in shapes[share::SHARES]:
        inputs = q[:, :, :len_q], k[:, :, :len_kv], v[:, :, :len_kv]
        report = run(rung, inputs, backend="mirror", causal=number % 2 == 1).check()
        assert report.rows == len_q, (len_q, len_kv)


@pytest.mark.parametrize("rung", VARIANTS)
def test_the_plan_at_every_length(rung: str) -> None:
    """Blocks of query rows cover all rows, and none is empty."""
    q, k, v = normal((2, 3, MOST, HEAD_DIM), (2, 3, MOST, HEAD_DIM))
    tiles = variant_of(rung).default_tiles(HEAD_DIM)
    for len_q, len_kv in SHAPES:
        request = resolved(
            q[:, :, :len_q], k[:, :, :len_kv], v[:, :, :len_kv], variant=rung
        )
        (*_, made) = explain.plans(request)
        if len_q == 0:
            assert made.launches == ()
            continue
        one = made.launches[-1]
        blocks, rest = divmod(one.grid, 6)
        assert rest == 0 and (blocks - 1) * tiles.block_q < len_q <= blocks * tiles.block_q
        values = one.params[0][1]
        assert (values["len_q"], values["len_kv"]) == (len_q, len_kv)


@pytest.mark.parametrize(
    ("rung", "length"),
    [(rung, n) for i, rung in enumerate(VARIANTS) for n in SPREAD[i % 3 :: 3]],
)
def test_the_kernels_at_some_lengths(rung: str, length: int) -> None:
    q, k, v = normal((1, 1, length, HEAD_DIM), (1, 1, 130 - length, HEAD_DIM), seed=length)
    run(rung, (q, k, v), backend="interpret", causal=length % 2 == 0).check()


def test_a_length_that_is_off_by_one_is_noticed() -> None:
    """The judgement above must notice a kernel that loses its last key or row."""
    for rung in VARIANTS:
        q, k, v = normal((1, 1, 40, HEAD_DIM), (1, 1, 40, HEAD_DIM))
        z = quantized(rung, (q, k, v), "mirror", {})
        lost = run(rung, (q, k[:, :, :-1], v[:, :, :-1]), backend="mirror")
        wrong = Run(rung, "portable", (q, k, v), {}, z, lost.o, lost.lse)
        assert wrong.judge().ratio > 1
        right = run(rung, (q, k, v), backend="mirror")
        zeros = np.where(np.arange(40)[:, None] == 39, 0, right.o).astype(right.o.dtype)
        assert Run(rung, "portable", (q, k, v), {}, z, zeros, right.lse).judge().ratio > 1
