"""Small calls of `cupyattn.quantize`: codes and scales are the mirror's, bit for bit (J1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.bounds.perturbation import gamma
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.quantizers import of_mean
from cupyattn.reference.quantize import quantize_mirror
from experiments._harness.small_inputs import LENGTHS, arrays

TILES = Tiles(64, 64, 4, 2)
#: A scale for every row of Q and of K.
TOKEN_SCALES = tuple(np.linspace(0.01, 0.05, n, dtype=np.float32)[None, None] for n in LENGTHS)
CONFIGS = {
    **{by: ca.QuantConfig(by, by) for by in ("token", "thread", "block", "head", "tensor")},
    "V by block": ca.QuantConfig(pv="int8"),
    "V by channel": ca.QuantConfig("head", "head", "channel", pv="int8"),
    "zero points": ca.QuantConfig("tensor", "head", "channel", symmetric=False, pv="int8"),
    "zero points by token": ca.QuantConfig("token", "thread", symmetric=False),
    "fp8": ca.QuantConfig("token", "tensor", symmetric=False, pv="fp8"),
    "fp8 by channel": ca.QuantConfig(pv="fp8", granularity_v="channel"),
    "no means": ca.QuantConfig("block", "block", smooth_k=False, smooth_v=False, pv="int8"),
    "4 bits": ca.QuantConfig("thread", "head", qk_bits=4, smooth_k=False),
    "given scales": ca.QuantConfig("tensor", "tensor", smooth_k=False, scales=(0.02, 0.03)),
    "given scales by token": ca.QuantConfig("token", "token", smooth_k=False, scales=TOKEN_SCALES),
}


def quantized(
    quant: Any, lengths: tuple[int, int], dtype: str, head_dim: int, heads: tuple[int, int] = (4, 2)
) -> str:
    """Make codes in the interpreter, and compare them with the mirror's."""
    inputs = arrays(*lengths, dtype, 3, head_dim, heads=heads)
    z = ca.quantize(*inputs, quant=quant, tiles=TILES, backend="interpret")
    for mean, x in ((z.k_mean, inputs[1]), (z.v_mean, inputs[2])):
        if mean is None:
            continue
        rows = of_mean(x).astype(np.float64)
        exact = rows.mean(axis=2)
        # Sums in float32, and a rounding of the mean.
        allowed = gamma(rows.shape[2], 2.0**-24) * np.abs(rows).mean(axis=2) + 2.0**-23 * abs(exact)
        if (np.abs(mean.reshape(exact.shape).astype(np.float64) - exact) > allowed).any():
            return "a mean of keys or values is wrong"
    want = quantize_mirror(*inputs, quant, TILES, k_mean=z.k_mean, v_mean=z.v_mean)
    if quant.qk_bits == 4:
        z = z.unpacked()
    wrong = [
        name for name, x in vars(want).items()
        if isinstance(x, np.ndarray)
        and np.ascontiguousarray(getattr(z, name)).tobytes() != np.ascontiguousarray(x).tobytes()
    ]  # fmt: skip
    return f"J1: {', '.join(wrong)}" if wrong else ""


def code_calls() -> dict[str, Callable[[], str]]:
    """Return the calls by name."""
    calls: dict[str, Callable[[], str]] = {}
    types = ("float16", 64), ("float32", 20), ("bfloat16", 7)
    for number, (name, quant) in enumerate(CONFIGS.items()):
        for dtype, head_dim in (types[0], types[1 + number % 2]):
            how = quant, LENGTHS, dtype, head_dim
            calls[f"quantize: {name}, {dtype}"] = partial(quantized, *how)
    long = ca.QuantConfig(pv="int8"), (1100, 1040), "float16", 24, (1, 1)
    calls["quantize: many rows"] = lambda: quantized(*long)
    return calls
