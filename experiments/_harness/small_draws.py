"""Small calls whose lengths, head_dims and options fixed seeds draw, beside the listed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from experiments._harness.small_attention import FP8, RUNGS, Rung, attend
from experiments._harness.small_gradients import gradients
from experiments._harness.small_inputs import aligned_bias, arrays
from experiments._harness.small_layers import product

#: Draws for a rung, for a form of the backward pass, and for a strategy and form of products.
DRAWS = 4
SLOW = "unfused", "fa", "fa_warps"


def _options(rng: Any, heads: int, len_q: int, len_kv: int, dtype: str) -> dict[str, Any]:
    """Draw where rows attend, and up to two changes of their scores."""
    window = int(rng.integers(1, 150)), int(rng.integers(0, 60))
    places: list[dict[str, Any]] = [
        {}, {"causal": True}, {"causal": True, "causal_align": "top-left"}, {"window": window},
    ]  # fmt: skip
    found = places[int(rng.integers(4))]
    shape = (heads, 1)[rng.integers(2)], (len_q, 1)[rng.integers(2)], len_kv
    if rng.random() < 0.3:
        found["softcap"] = float(rng.uniform(0.5, 5))
    if rng.random() < 0.3:
        found["mask"] = rng.random(shape) < rng.choice([0.1, 0.8])
    if rng.random() < 0.3:
        found["bias"] = aligned_bias(dtype, *shape, masked=rng.choice([0, 0.3]))
    return found


def _shape(rng: Any, longest: tuple[int, int]) -> dict[str, Any]:
    """Draw lengths, a number of heads, and of batch entries."""
    return {
        "lengths": tuple(int(rng.integers(1, most)) for most in longest),
        "heads": [(1, 1), (2, 2), (2, 1), (3, 1)][rng.integers(4)],
        "batch": int(rng.integers(1, 3)),
    }


def _attention(name: str, rung: Rung, seed: int) -> str:
    rng = np.random.default_rng(seed)
    most = 128 if rung[3] is FP8 else 160
    head_dim = int(rng.choice([x for x in (16, 32, 52, 64, 80, 100, 128, 144) if x <= most]))
    shape = _shape(rng, (50, 90) if name in SLOW else (210, 300))
    len_q, len_kv = shape.pop("lengths")
    inputs = arrays(len_q, len_kv, rung[2], seed, head_dim, **shape)
    options = _options(rng, shape["heads"][0], len_q, len_kv, rung[2])
    return attend(rung, inputs, options, with_lse=bool(rng.random() < 0.7))


def _gradients(arch: str | None, deterministic: bool, seed: int) -> str:
    rng = np.random.default_rng(seed)
    head_dim = int(rng.choice([16, 40, 64, 88, 128, 160]))
    dtype = str(rng.choice(["float16", "bfloat16"]))
    shape = _shape(rng, (180, 280))
    len_q, len_kv = shape["lengths"]
    options = _options(rng, shape["heads"][0], len_q, len_kv, dtype)
    factor = float(rng.choice([1, 1, 1, 12]))
    how = {"head_dim": head_dim, "dtype": dtype, "factor": factor, **shape}
    return gradients(options, **how, deterministic=deterministic, arch=arch)


def _product(arch: str | None, strategy: str, seed: int) -> str:
    rng = np.random.default_rng(seed)
    activation = str(rng.choice(["", "gelu", "silu", "swiglu", "geglu"]))
    m, k = int(rng.integers(1, 150)), 16 * int(rng.integers(1, 50))
    how: dict[str, Any] = {"activation": activation, "bias": bool(rng.random() < 0.5)}
    how["out_dtype"] = str(rng.choice(["float16", "bfloat16", "float32"]))
    how["gates"] = [None, None, 0, 1][rng.integers(4)]
    n = 8 * int(rng.integers(1, 40))
    return product((m, n, k), None, arch, strategy=strategy, **how)


def draw_calls() -> dict[str, Callable[[], str]]:
    """Return the calls by name."""
    calls: dict[str, Callable[[], str]] = {}
    for draw in range(DRAWS):
        for number, (name, rung) in enumerate(RUNGS.items()):
            calls[f"{name}: draw {draw}"] = partial(_attention, name, rung, 100 * number + draw)
        for number, (arch, deterministic) in enumerate(
            (arch, each) for arch in (None, "sm_90a") for each in (True, False)
        ):
            label = f"backward, {arch or 'portable'}, {'ordered' if deterministic else 'atomic'}"
            calls[f"{label}: draw {draw}"] = partial(
                _gradients, arch, deterministic, 2000 + 100 * number + draw
            )
        for number, (arch, strategy) in enumerate(
            (arch, each) for arch in ("sm_90", "sm_90a") for each in ("block", "channel")
        ):
            calls[f"product, {arch}, {strategy}: draw {draw}"] = partial(
                _product, arch, strategy, 3000 + 100 * number + draw
            )
    return calls
