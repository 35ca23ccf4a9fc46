"""Combinations of features in which every two values of two features meet, and arrays for them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.problem.block_mask import BlockMask

#: Values of each option; masks and biases by their shapes.
AXES: dict[str, tuple[Any, ...]] = {
    "causal": (False, True),
    "causal_align": ("bottom-right", "top-left"),
    "window": ((-1, -1), (9, 4), (20, -1), (-1, 6), (0, 0)),
    "softcap": (0.0, 2.5),
    "mask": ("", "whole", "keys", "rows"),
    "bias": ("", "float16", "bfloat16", "float32"),
    "bias_shape": ("whole", "keys", "turned"),
    "block_mask": (False, True),
}


def pairwise(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Choose combinations, one after the other, that bring the most new pairs of values."""
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    pairs = [set(itertools.combinations(cell.items(), 2)) for cell in cells]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda number: len(pairs[number] & missing))
        chosen.append(cells[best])
        missing -= pairs[best]
    return chosen


CELLS = pairwise(AXES)


def options_of(cell: dict[str, Any], shape: tuple[int, int, int, int], seed: int) -> dict[str, Any]:
    """Return options of a call whose scores have this shape; some rows attend to nothing."""
    rng = np.random.default_rng(seed)
    batch, heads, len_q, len_kv = shape
    options = {name: cell[name] for name in ("causal", "causal_align", "window", "softcap")}
    if cell["mask"]:
        sizes = {"whole": shape, "keys": (len_kv,), "rows": (batch, 1, len_q, 1)}
        mask = rng.random(sizes[cell["mask"]]) < 0.7
        if cell["mask"] == "whole":
            mask[:, :, len_q // 2] = False
        options["mask"] = mask
    if cell["bias"]:
        sizes = {"whole": shape, "keys": (heads, 1, len_kv), "turned": (batch, 1, len_kv, len_q)}
        bias = 3 * rng.standard_normal(sizes[cell["bias_shape"]])
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        bias[rng.random(bias.shape) < 0.1] = -1e4
        bias = bias.astype(STORAGE[cell["bias"]])
        options["bias"] = bias.swapaxes(2, 3) if cell["bias_shape"] == "turned" else bias
    if cell["block_mask"]:
        blocks = batch, heads, -(-len_q // 64), -(-len_kv // 128)
        options["block_mask"] = BlockMask(rng.random(blocks) < 0.7, 64, 128)
    return options


def admitted(
    shape: tuple[int, int, int, int], options: dict[str, Any], *, by_place: bool = False
) -> np.ndarray:
    """Which key each row attends to, by the definition, one pair at a time; without mask, bias
    and block mask where `by_place`."""
    batch, heads, len_q, len_kv = shape
    shift = len_kv - len_q if options.get("causal_align", "bottom-right") == "bottom-right" else 0
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal") else right
    found = np.ones(shape, bool)
    for i, j in itertools.product(range(len_q), range(len_kv)):
        found[:, :, i, j] &= left == -1 or j >= i + shift - left
        found[:, :, i, j] &= right == -1 or j <= i + shift + right
    if not by_place and options.get("mask") is not None:
        found &= options["mask"]
    if not by_place and options.get("block_mask") is not None:
        found &= options["block_mask"].to_dense(len_q, len_kv)
    if not by_place and options.get("bias") is not None:
        found &= options["bias"].astype(np.float32) != -np.inf
    return found
