"""The mirror of the three kernels of the unfused rung: each step of attention alone, on NumPy."""

# ruff: noqa: E741  (O is the paper's letter)

from __future__ import annotations

from typing import cast

import numpy as np

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import STORAGE, Array
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.numerics import numerics
from cupyattn.problem.checks import check_scale
from cupyattn.problem.settings import MaskedOptions, Unpack, parse, takes_options
from cupyattn.reference.attention import require_numpy, storage_name
from cupyattn.reference.rounding import round_to
from cupyattn.reference.scores import prepare_scores
from cupyattn.reference.scoring import Scoring
from cupyattn.reference.softmax_state import LOG2E, Float32, softmax_of_rows


@takes_options
def scores_mirror(
    q: Array,
    k: Array,
    **options: Unpack[MaskedOptions],
) -> Float32:
    """S3 of the unfused rung: the scores, in float32.

    Parameters
    ----------
    q, k, scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `attention_mirror`.

    Returns
    -------
    S : (batch, heads, len_q, len_kv) array, float32
        fl(dot * scale), softcapped, with the bias; -inf where masked.

    Examples
    --------
    >>> x = np.full((1, 1, 2, 4), 0.5, np.float16)
    >>> scores_mirror(x, x, causal=True)[0, 0].tolist()
    [[0.5, -inf], [0.5, 0.5]]
    """
    _, _, _, _, len_kv, head_dim = check_shapes(q.shape, k.shape, k.shape)
    n = numerics("unfused", "portable", storage_name(q, k, k))
    settings, arrays = parse("scores_mirror", q, k, None, options)
    scoring = Scoring.of(q, k, settings.scores(arrays))
    with np.errstate(over="ignore", invalid="ignore"):
        scores = prepare_scores(q, k, check_scale(settings.scale, head_dim), scoring, n, None)
        return cast(Float32, merge_heads(scores.block(0, len_kv)))


def softmax_mirror(S: Float32) -> tuple[Float32, Float32]:
    """S4 of the unfused rung: P = softmax(S) and the log-sum-exp, in float32.

    Parameters
    ----------
    S : (..., len_kv) array, float32

    Returns
    -------
    P : (..., len_kv) array, float32
    lse : (...) array, float32

    Examples
    --------
    >>> P, lse = softmax_mirror(np.zeros((1, 4), np.float32))
    >>> P.tolist(), lse.round(5).tolist()
    ([[0.25, 0.25, 0.25, 0.25]], [1.3862899541854858])
    """
    require_numpy(S)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        P, state = softmax_of_rows(S, LOG2E, False)
        return P, state.lse()


def weighted_sum_mirror(P: Float32, v: Array) -> Array:
    """S5 and S6 of the unfused rung: O = P V, stored in v's type.

    Parameters
    ----------
    P : (batch, heads, len_q, len_kv) array, float32
    v : (batch, heads_kv, len_kv, head_dim) array, float16, bfloat16 or float32

    Returns
    -------
    o : (batch, heads, len_q, head_dim) array, v's dtype

    Examples
    --------
    >>> v = np.arange(4, dtype=np.float16).reshape(1, 1, 4, 1)
    >>> weighted_sum_mirror(np.full((1, 1, 1, 4), 0.25, np.float32), v).tolist()
    [[[[1.5]]]]
    """
    require_numpy(P)
    out_type = storage_name(v, v, v)
    if P.ndim != 4 or P.shape[0] != v.shape[0] or P.shape[3] != v.shape[2]:
        raise ValueError(f"P and v must agree on batch and len_kv, got {P.shape=} {v.shape=}")
    with np.errstate(over="ignore", invalid="ignore"):
        O = split_heads(P, v.shape[1]) @ v[:, :, None].astype(np.float32)  # R6
        return merge_heads(round_to(O, out_type)).astype(STORAGE[out_type])  # R7
