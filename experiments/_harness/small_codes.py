"""Small calls of `cupyattn.quantize`: codes and scales are the mirror's, bit for bit (J1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds.perturbation import gamma
from cupyattn.diffusion import pruning
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
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
    quant: Any, lengths: tuple[int, int], dtype: str, head_dim: int,
    heads: tuple[int, int] = (4, 2), *, finite: bool = True, tiles: Tiles = TILES,
) -> str:  # fmt: skip
    """Make codes in the interpreter, and compare them with the mirror's.

    If not `finite`, some numbers are NaN or infinite, and some rows are zeros or nearly so.
    """
    inputs = arrays(*lengths, dtype, 3, head_dim, heads=heads)
    for seed, x in enumerate(inputs if not finite else ()):
        x[0, :, 5], x[0, :, 9] = 0, np.finfo(STORAGE[dtype]).smallest_subnormal
        x[1, 0, 7 + seed, 3], x[0, 1, 30, seed], x[1, 1, 33, 4] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        return _compared(quant, inputs, tiles)


def _compared(quant: Any, inputs: Any, tiles: Tiles) -> str:
    """Make codes of arrays by the kernels and by the mirror."""
    z = ca.quantize(*inputs, quant=quant, tiles=tiles, backend="interpret")
    for mean, x in ((z.k_mean, inputs[1]), (z.v_mean, inputs[2])):
        if mean is None:
            continue
        rows = of_mean(x).astype(np.float64)
        exact = rows.mean(axis=2)
        # Sums in float32, and a rounding of the mean.
        allowed = gamma(rows.shape[2], 2.0**-24) * np.abs(rows).mean(axis=2) + 2.0**-23 * abs(exact)
        some = np.isfinite(exact)
        off = np.abs(mean.reshape(exact.shape).astype(np.float64) - exact)
        if (off[some] > allowed[some]).any() or mean.reshape(exact.shape)[~some].any():
            return "a mean of keys or values is wrong"
    want = quantize_mirror(*inputs, quant, tiles, k_mean=z.k_mean, v_mean=z.v_mean)
    if quant.qk_bits == 4:
        z = z.unpacked()
    return _differing(z, want)


def _in_place(quant: Any, dtype: str, head_dim: int) -> str:
    """Make codes of keys that are chosen where they lie, with the mean of all keys if they can."""
    q, k, v = arrays(12, 600, dtype, 4, head_dim, heads=(4, 2), batch=1)
    once: dict[str, Any] = {"backend": "interpret", "arch": "sm_90a"}
    importance, sums = pruning.weigh_keys(q, k, scale=0.01, rows=8, **once, key_sums=True)
    few_v, _, places = pruning.compact_values(k, v, importance, 470, backend="interpret")
    few_k, _, _ = pruning.compact(k, v, importance, 470)
    settings = QuantizeSettings(quant=quant, tiles=TILES, backend="interpret")
    found = quantize_at(q, k, few_v, places, settings, sums)
    summed = few_k if quant.granularity_k == "head" else k  # these are read before their codes
    if found.k_mean is not None:
        exact = of_mean(summed).astype(np.float64).mean(axis=2)
        if np.abs(found.k_mean.reshape(exact.shape) - exact).max() > 2.0**-10:
            return "a mean of keys is wrong"
    want = quantize_mirror(q, few_k, few_v, quant, TILES, k_mean=found.k_mean, v_mean=found.v_mean)
    return _differing(found, want)


def _differing(found: Any, want: Any) -> str:
    """Return which arrays of codes have other bits than the mirror's."""
    wrong = [
        name for name, x in vars(want).items()
        if isinstance(x, np.ndarray)
        and np.ascontiguousarray(getattr(found, name)).tobytes()
        != np.ascontiguousarray(x).tobytes()
    ]  # fmt: skip
    return f"J1: {', '.join(wrong)}" if wrong else ""


def _packed(quant: Any) -> str:
    """Make codes of packed sequences, and compare them with the mirror's.

    Some are empty, but for scales of whole heads, which an empty one does not have.
    """
    of_heads = {"head", "tensor", "channel"} & set(vars(quant).values())
    empty = () if of_heads else ((0, 17), (20, 0))
    lengths = ((64, 128), (130, 1), *empty, (1, 300))
    ends = (np.cumsum((0, *one), dtype=np.int32) for one in zip(*lengths, strict=True))
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    rng = np.random.default_rng(5)
    q, k, v = (
        rng.standard_normal((int(named[f"cu_seqlens_{n}"][-1]), h, 36)).astype(np.float16)
        for n, h in (("q", 4), ("k", 2), ("k", 2))
    )
    found, want = (
        ca.quantize(q, k, v, quant=quant, tiles=TILES, backend=b, **named)
        for b in ("interpret", "mirror")
    )
    return _differing(found, want)


def code_calls() -> dict[str, Callable[[], str]]:
    """Return the calls by name."""
    calls: dict[str, Callable[[], str]] = {}
    types = ("float16", 64), ("float32", 20), ("bfloat16", 7)
    for number, (name, quant) in enumerate(CONFIGS.items()):
        for dtype, head_dim in (types[0], types[1 + number % 2]):
            how = quant, LENGTHS, dtype, head_dim
            calls[f"quantize: {name}, {dtype}"] = partial(quantized, *how)
        # A pass has more rows than a block.
        calls[f"quantize: {name}, head_dim 8"] = partial(quantized, quant, LENGTHS, "float16", 8)
        odd = quant, LENGTHS, "float16", 36
        calls[f"quantize: {name}, not finite"] = partial(quantized, *odd, finite=False)
        if not name.startswith(("given", "4 bits")):
            plain = replace(quant, smooth_k=False, smooth_v=False)
            calls[f"quantize: {name}, packed"] = partial(_packed, plain)
    for number, of_keys in enumerate(("thread", "head", "token")):
        where = ca.QuantConfig("token", of_keys, pv=("16bit", "int8", "fp8")[number])
        dtype, head_dim = (*types, ("float16", 20))[number]
        calls[f"quantize: chosen keys, {of_keys}"] = partial(_in_place, where, dtype, head_dim)
    unmoved = ca.QuantConfig("block", "block", smooth_k=False)
    calls["quantize: chosen keys, no means"] = partial(_in_place, unmoved, "bfloat16", 64)
    for keys in (48, 80, 96, 112, 192):  # numbers of our tiles that are no powers of two
        for by in ("block", "thread"):
            calls[f"quantize: {by} of {keys} keys"] = partial(
                quantized, ca.QuantConfig(by, by), LENGTHS, "float16", 64,
                tiles=Tiles(192, keys, 4, 2),
            )  # fmt: skip
    long = ca.QuantConfig(pv="int8"), (1100, 1040), "float16", 24, (1, 1)
    calls["quantize: many rows"] = lambda: quantized(*long)
    return calls
