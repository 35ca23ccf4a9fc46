"""Small calls of what stands beside attention: layers, weights, pruning, merges, preparation.

Codes and copies are compared with the mirror bit for bit, other numbers with their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.diffusion import key_importance, key_passes
from cupyattn.diffusion.importance_bounds import importance_bound
from cupyattn.diffusion.pruning import compact
from cupyattn.distributed.bounds import Expected, merged
from cupyattn.distributed.merging import Partial
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops.act_quant import ACT_QUANT, ActQuantSettings
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.operation import run
from cupyattn.plans import norm_quant as plan_norm_quant
from cupyattn.plans import unpack
from cupyattn.plans.gemm import plan_gemm
from cupyattn.problem import gemm_form
from cupyattn.quant import gemm_error, gemm_exact, nibbles
from cupyattn.quant.activation import GLU, columns_of
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.gemm import activate
from cupyattn.reference.norm_quant import Vectors, norm_quant_exact

SMALL = GemmTiles(32, 32, 2, 2)


def _same(found: Any, expected: Any) -> str:
    """Return "" if arrays have the same bits, else which do not."""
    wrong = [
        str(number) for number, (x, y) in enumerate(zip(found, expected, strict=True))
        if x.shape != y.shape or x.tobytes() != np.ascontiguousarray(y).tobytes()
    ]  # fmt: skip
    return f"bits of result {', '.join(wrong)} differ from the mirror's" if wrong else ""


def _uneven(rng: Any, shape: tuple[int, int], dtype: str) -> Any:
    """Return rows of different sizes, with a column of outliers, a row of zeros, and a gap."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, (shape[0], 1))
    x[:, shape[1] // 3] *= 50
    x[shape[0] // 2] = 0
    wide = np.zeros((shape[0], shape[1] + 8), STORAGE[dtype])
    wide[:, : shape[1]] = x.astype(STORAGE[dtype])
    return wide[:, : shape[1]]


def codes(function: Any, shape: tuple[int, int], dtype: str, strategy: str) -> str:
    """Quantise activations or a weight by the kernel and the mirror."""
    x = _uneven(np.random.default_rng(3), shape, dtype)
    given = {"strategy": strategy}
    return _same(function(x, backend="interpret", **given), function(x, **given))


def _side_by_side(left: int, right: int, dtype: str) -> str:
    """Quantise rows of two tensors by the kernel, and their concatenation by the mirror."""
    x = _uneven(np.random.default_rng(3), (9, left + right), dtype)
    how = ActQuantSettings(BLOCK_SIZE, "interpret", strategy="channel")
    sides = {"x": x[:, :left], "right": np.ascontiguousarray(x[:, left:])}
    return _same(run(ACT_QUANT, how, sides).values(), ca.act_quant(x, strategy="channel"))


def weight(shape: tuple[int, ...], dtype: str, block: int) -> str:
    """Quantise a weight in blocks and back, by the kernels and the mirror."""
    w = _uneven(np.random.default_rng(4), (shape[0], int(np.prod(shape[1:]))), dtype)
    w = w.reshape(shape)
    made = ca.weight_quant(w, block)
    back = ca.weight_dequant(*made, block, dtype)
    found = ca.weight_quant(w, block, backend="interpret")
    again = ca.weight_dequant(*made, block, dtype, backend="interpret")
    return _same((*found, again), (*made, back))


def product(
    shape: tuple[int, int, int], tiles: GemmTiles | None, arch: str | None, *,
    strategy: str = "block", activation: str = "", bias: bool = False, outliers: int = 0,
    gates: int | None = None, out_dtype: str = "float32", blocks: int | None = None,
) -> str:  # fmt: skip
    """Multiply codes, and hold the product to its bound."""
    m, n, k = shape
    rng = np.random.default_rng(5)
    x, w = _uneven(rng, (m, k), "float32"), rng.standard_normal((n, k)).astype(np.float32)
    operands = *ca.act_quant(x, strategy=strategy), *ca.weight_quant(w, strategy=strategy)
    columns, stored = columns_of(n, activation), STORAGE[out_dtype]
    after: dict[str, Any] = {"activation": activation}
    if bias:
        after["bias"] = rng.standard_normal(n).astype(STORAGE["bfloat16"])
    if outliers:
        after["outliers"] = tuple(
            rng.standard_normal((s, outliers)).astype(np.float16) for s in (m, n)
        )
    if gates is not None:
        after["residual"] = rng.standard_normal((m, columns)).astype(stored)
        after["gate"] = rng.standard_normal((gates, columns)).astype(stored) if gates else None
    plan_gemm.cache_clear()
    try:
        with mock.patch.object(gemm_form, "HOPPER_BLOCKS", blocks or gemm_form.HOPPER_BLOCKS):
            c = ca.int8_gemm(
                *operands, out_dtype, **{**after, "activation": activation or None}, tiles=tiles,
                arch=arch, backend="interpret",
            )  # fmt: skip
    finally:
        plan_gemm.cache_clear()
    exact = gemm_exact(*operands, **after)
    bound = gemm_error(*operands, out_dtype, **after)
    worst = ratio_to_bound(as_float64(c), exact, bound).max(initial=0.0)
    return "" if worst <= 1 else f"{worst:.3g} of the bound of a product"


def norm(
    shape: tuple[int, ...], dtype: str, vectors: str, groups: int = 1, blocks: int | None = None,
    **steps: Any,
) -> str:  # fmt: skip
    """Normalise, rotate and quantise rows by the kernel and the mirror; `vectors` are name:type.

    An activation is approximated, and then codes are held to their bound. With few `blocks` at a
    time, each takes several rows.
    """
    rng = np.random.default_rng(6)
    doubled = 2 if steps.get("activation") in GLU else 1
    x = rng.standard_normal((*shape[:-1], doubled * shape[-1])) * 3 + 0.5
    arrays = {"x": x.astype(STORAGE[dtype])}
    for name, kind in (one.split(":") for one in vectors.split()):
        size = (groups, shape[-1]) if name in ("scale", "shift") else shape[-1:]
        arrays[name] = rng.standard_normal(size).astype(STORAGE[kind])
    plan_norm_quant.plan_norm_quant.cache_clear()
    try:
        with mock.patch.object(plan_norm_quant, "HOPPER_BLOCKS", blocks or HOPPER_BLOCKS):
            found = ca.norm_quant(**arrays, **steps, backend="interpret")
    finally:
        plan_norm_quant.plan_norm_quant.cache_clear()
    if not steps.get("activation"):
        return _same(found, ca.norm_quant(**arrays, **steps, backend="mirror"))
    return _norm_bound(found, arrays, steps)


def _norm_bound(found: Any, arrays: dict[str, Any], steps: dict[str, Any]) -> str:
    given = {"norm": None, "rotate": None, "strategy": "channel", **steps}
    settled = RowSteps(
        given["norm"], given.get("activation") or "", given["rotate"],
        float(np.float32(given.get("eps", 1e-6))), given["strategy"],
    )  # fmt: skip
    x, vectors = arrays["x"].reshape(-1, arrays["x"].shape[-1]), Vectors.of(arrays)
    codes, scales = (y.reshape(len(x), -1) for y in found)
    every = codes.shape[1] if scales.shape[1] == 1 else 128
    values = codes * np.repeat(scales.astype(np.float64), every, axis=1)[:, : codes.shape[1]]
    exact = norm_quant_exact(x, settled, vectors)
    bound = norm_quant_error(x, scales, settled, vectors)
    worst = ratio_to_bound(values, exact, bound).max(initial=0.0)
    if np.abs(codes).max() != 127:
        return "no code is 127"
    return "" if worst <= 1 else f"{worst:.3g} of the bound of codes"


def importance(
    heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, rows: int, arch: str | None,
    waves: int | None = None, *, spread: float = 2.0,
) -> str:  # fmt: skip
    """Estimate the importance of keys, and hold it to its bound; `spread` of Q."""
    rng = np.random.default_rng(8)
    q, k = (
        rng.standard_normal((2, count, length, head_dim)).astype(np.float16)
        for count, length in zip(heads, lengths, strict=True)
    )
    q *= np.float16(spread)
    scale = head_dim**-0.5
    key_passes.plan_key_importance.cache_clear()
    try:
        with mock.patch.object(
            key_passes, "_WAVES_OF_BLOCKS", waves or key_passes._WAVES_OF_BLOCKS
        ):
            found = key_importance(q, k, rows=rows, backend="interpret", arch=arch)
    finally:
        key_passes.plan_key_importance.cache_clear()
    exact, bound = importance_bound(q, k, scale=scale, rows=rows)
    return "" if (np.abs(found - exact) <= bound).all() else "importance past its bound"


def kept(length: int, count: int, dtype: str, head_dim: int) -> str:
    """Keep some keys, and compare them with the mirror's choice."""
    rng = np.random.default_rng(9)
    values = np.float32([0, 2.0**-149, 0.25, 0.25, 1, np.inf, np.nan])
    importance = rng.choice(values, (2, 2, length))
    importance[1] = rng.integers(0, 0x7F800000, (2, length)).astype(np.uint32).view(np.float32)
    k, v = (rng.standard_normal((2, 2, length, head_dim)).astype(STORAGE[dtype]) for _ in range(2))
    k = k.swapaxes(1, 2).copy().swapaxes(1, 2)
    found, want = (compact(k, v, importance, count, backend=b) for b in ("interpret", "mirror"))
    return _same(found, want)


def partials(dtype: str, head_dim: int, count: int, spread: float = 3.0) -> str:
    """Merge partial results over some keys each, and hold the sum to its bound."""
    rng = np.random.default_rng(10)
    parts = []
    for number in range(count):
        o = rng.standard_normal((2, 2, 70, head_dim)).astype(STORAGE[dtype])
        lse = (spread * rng.standard_normal(o.shape[:3])).astype(np.float32)
        nothing = rng.random(lse.shape) < 0.2
        if number + 1 == count:
            nothing[:, :, :5] = True
        o[nothing], lse[nothing] = 0, -np.inf
        parts.append((o, lse))
    total = Partial(parts[0][0], "interpret")
    for number, (o, lse) in enumerate(parts):
        last = number + 1 == count
        rows = slice(5 if last else 0, 70)
        wide = np.zeros((*o.shape[:3], head_dim + 8), o.dtype)
        wide[..., :head_dim] = o
        some = wide[:, :, rows, :head_dim], lse[:, :, rows].copy()
        total.add((rows.start, 70), *some, last=last)
    exact = merged(
        [
            Expected(as_float64(o), lse.astype(np.float64), np.zeros(o.shape), np.zeros(lse.shape))
            for o, lse in parts
        ],
        dtype,
    )
    o, lse = (as_float64(x) for x in total.result())
    worst = max(
        ratio_to_bound(o, exact.o, exact.bound).max(),
        ratio_to_bound(lse, exact.lse, exact.lse_bound).max(),
    )
    return "" if worst <= 1 else f"{worst:.3g} of the bound of a merge"


def _unpacked(head_dim: int, gap: int) -> str:
    """Unpack codes of 4 bits."""
    codes = np.random.default_rng(11).integers(-8, 8, (2, 3, 70, head_dim)).astype(np.int8)
    halves = nibbles.packed(codes)
    wide = np.zeros((2, 4, 70, halves.shape[3] + gap), np.uint8)[:, 1:, :, : halves.shape[3]]
    wide[...] = halves
    found = np.full((*codes.shape[:3], -(-head_dim // 16) * 16), 99, np.int8)
    interpret.run(unpack.plan_unpack(Operand.of(wide), head_dim), {"nibbles": wide, "codes": found})
    if not (found[..., head_dim + head_dim % 2 :] == 99).all():
        return "written past the pairs"
    return _same((np.ascontiguousarray(found[..., :head_dim]),), (codes,))


def _layer(kept: int, activation: str | None) -> str:
    """Run a layer of INT8 with columns kept in 16 bits, and hold it to its bound."""
    rng = np.random.default_rng(12)
    w = rng.standard_normal((40, 200)).astype(np.float16)
    x = _uneven(rng, (6, 200), "float16")
    with mock.patch.object(gemm_form, "PORTABLE_TILES", (SMALL,)):
        layer = ca.Int8Linear.from_weight(
            w, w[:, 0], activation=activation, outlier_columns=range(kept)
        )
        y = layer(x, backend="interpret")
    exact = activate(as_float64(x) @ as_float64(w).T + as_float64(w[:, 0]), activation or "")
    fits = np.abs(as_float64(y) - exact) <= layer.error(x, w)
    return "" if fits.all() else "a layer past its bound"


def _overlapped(strategy: str, arch: str) -> str:
    """Run two layers of one input: the first product begins before the codes are there."""
    rng = np.random.default_rng(13)
    arrays: dict[str, Any] = {"x": _uneven(rng, (40, 272), "float16")}
    weights = [
        ca.weight_quant(rng.standard_normal((64, 272)).astype(np.float32), strategy=strategy)
        for _ in range(2)
    ]
    for number, (codes, scales) in enumerate(weights):
        arrays |= {f"b{number}": codes, f"b_scales{number}": scales}
        arrays[f"c{number}"] = np.full((40, 64), np.nan, np.float16)
    run(LAYERS, LayersSettings("float16", ("", ""), arch, "interpret"), arrays)
    made = ca.act_quant(arrays["x"], strategy=strategy)
    worst = [
        ratio_to_bound(
            as_float64(arrays[f"c{number}"]), gemm_exact(*made, *one, activation=""),
            gemm_error(*made, *one, "float16", activation=""),
        ).max()
        for number, one in enumerate(weights)
    ]  # fmt: skip
    return "" if max(worst) <= 1 else f"{max(worst):.3g} of the bound of a product"


def layer_calls() -> dict[str, Callable[[], str]]:
    """Return the calls by name."""
    c: dict[str, Callable[[], str]] = {}
    for dtype, channels in (("float16", 260), ("float32", 200), ("bfloat16", 1283)):
        shape = 37, channels
        c[f"activations by row: {dtype}"] = partial(codes, ca.act_quant, shape, dtype, "channel")
        c[f"activations by block: {dtype}"] = partial(codes, ca.act_quant, shape, dtype, "block")
        c[f"weight by row: {dtype}"] = partial(codes, ca.weight_quant, shape, dtype, "channel")
    for left, right, dtype in (
        (72, 200, "float16"), (29, 300, "bfloat16"), (4000, 4278, "float16"),
    ):  # fmt: skip
        c[f"side by side: {left} and {right}"] = partial(_side_by_side, left, right, dtype)
    # Rows past the registers of a block.
    c["long activations: bfloat16"] = partial(codes, ca.act_quant, (3, 4141), "bfloat16", "channel")
    c["long activations: float16"] = partial(codes, ca.act_quant, (2, 8278), "float16", "channel")
    weights: tuple[tuple[tuple[int, ...], str, int], ...] = (
        ((130, 264), "float16", 128), ((129, 132), "float32", 128), ((33, 70), "bfloat16", 30),
        ((50, 40), "bfloat16", 16), ((100, 90), "float32", 45), ((9, 5, 3, 4), "float16", 7),
    )  # fmt: skip
    for one in weights:
        c[f"weight by block: {one[0]}, {one[2]}"] = partial(weight, *one)
    for heads, lengths, head_dim, rows, arch, waves in (
        ((2, 1), (83, 150), 16, 41, None, None), ((6, 2), (33, 131), 40, 32, None, None),
        ((1, 1), (9, 1100), 16, 8, None, None), ((1, 1), (5, 70), 160, 4, None, None),
        ((1, 1), (32, 150), 16, 32, None, None),
        ((6, 2), (33, 77), 40, 41, "sm_90a", 1), ((5, 5), (9, 1000), 64, 8, "sm_90a", 1),
        ((1, 1), (64, 2049), 16, 32, "sm_90a", None), ((2, 1), (5, 600), 160, 4, "sm_90a", None),
    ):  # fmt: skip
        c[f"importance: {arch or 'portable'}, {heads}, {lengths}, {head_dim}"] = partial(
            importance, heads, lengths, head_dim, rows, arch, waves
        )
    far = partial(importance, spread=400.0)
    c["importance: far apart"] = partial(far, (6, 2), (33, 77), 40, 41, "sm_90a", 1)
    c["importance: portable, far apart"] = partial(far, (2, 1), (83, 150), 16, 41, None)
    for length, count, dtype, head_dim in (
        (33, 7, "float16", 16), (1100, 330, "float32", 34), (75, 60, "bfloat16", 7),
        (517, 516, "float16", 20),
    ):  # fmt: skip
        c[f"kept keys: {count} of {length}"] = partial(kept, length, count, dtype, head_dim)
    for dtype, head_dim, count in (("float16", 128, 2), ("bfloat16", 17, 4), ("float32", 40, 3)):
        c[f"merge: {dtype}"] = partial(partials, dtype, head_dim, count)
    c["merge: far apart"] = partial(partials, "float16", 36, 3, 60.0)
    c["4 bits: bytes"], c["4 bits: words"] = partial(_unpacked, 7, 3), partial(_unpacked, 40, 12)
    c["layer"], c["layer, outliers"] = partial(_layer, 0, None), partial(_layer, 9, "gelu")
    for strategy in ("block", "channel"):
        for arch in ("sm_90", "sm_90a"):
            c[f"layers: {strategy}, {arch}"] = partial(_overlapped, strategy, arch)
    return c | _products() | _norms()


def _products() -> dict[str, Callable[[], str]]:
    """Return products of codes, portable and for Hopper."""
    split, hopper = GemmTiles(32, 32, 2, 2, 2), GemmTiles(64, 64, 8, 2)
    halves, tail = GemmTiles(64, 64, 8, 2, 2), GemmTiles(64, 64, 8, 2, tail_splits=2)
    by_row = {"strategy": "channel"}
    products: dict[str, tuple[tuple[int, int, int], GemmTiles, str | None, dict[str, Any]]] = {
        "blocks": ((70, 68, 400), SMALL, None, {"bias": True, "activation": "gelu"}),
        "fewer accesses than threads": ((20, 140, 304), GemmTiles(16, 128, 8, 2), None, {}),
        "outliers": ((40, 36, 200), SMALL, None, {"outliers": 9, "out_dtype": "float16"}),
        "gates": ((42, 36, 200), SMALL, None, {"gates": 3, "activation": "gelu_tanh"}),
        "swiglu": ((40, 72, 200), SMALL, None, {"activation": "swiglu", "bias": True}),
        "rows": ((70, 68, 400), SMALL, None, {**by_row, "bias": True}),
        "rows, silu": ((33, 40, 160), SMALL, None, {
            **by_row, "activation": "silu", "gates": 0, "out_dtype": "bfloat16"}),
        "rows, geglu": ((33, 40, 160), SMALL, None, {**by_row, "activation": "geglu"}),
        "split": ((70, 68, 900), split, "sm_90", {"bias": True}),
        "sm90 blocks": ((150, 140, 912), hopper, "sm_90a", {"bias": True, "activation": "gelu"}),
        "sm90 outliers": ((70, 140, 304), hopper, "sm_90a", {"outliers": 16, "gates": 2}),
        "sm90 many outliers": ((40, 72, 272), hopper, "sm_90a", {"outliers": 80}),
        "sm90 rows": ((150, 140, 704), hopper, "sm_90a", {**by_row, "bias": True}),
        "sm90 rows, swiglu": ((70, 140, 304), hopper, "sm_90a", {
            **by_row, "activation": "swiglu", "out_dtype": "float16"}),
        "sm90 split": ((150, 140, 912), halves, "sm_90a", {}),
        "sm90 last wave split": ((150, 140, 400), tail, "sm_90a", {"blocks": 4}),
        "sm90 wide tiles": ((70, 300, 304), GemmTiles(128, 256, 12, 4), "sm_90a", {"bias": True}),
        "sm90 many stages": ((70, 140, 1312), GemmTiles(64, 128, 8, 6), "sm_90a", {}),
        "sm90 few blocks": ((150, 140, 400), hopper, "sm_90a", {"blocks": 2, "bias": True}),
        "sm90 rows, few blocks": ((150, 140, 400), hopper, "sm_90a", {**by_row, "blocks": 2}),
    }  # fmt: skip
    for number, (tiles, arch) in enumerate(_tiles()):
        label = f"{arch or 'portable'} {tiles.block_m} x {tiles.block_n}, {tiles.num_stages} stages"
        label += f", {tiles.splits} splits" if tiles.splits > 1 else ""
        k = 400 + 128 * (tiles.num_stages > 5) * (number % 3) * 2
        n = tiles.block_n + (24 if number % 2 else 12)  # rows of C in 16 bits begin at 16 bytes
        shape = tiles.block_m + 10, n, max(k, 320 * tiles.splits)
        options = {"bias": True, "out_dtype": "float16"} if number % 2 else {}
        products[label] = shape, tiles, arch, options
        products[f"rows, {label}"] = shape, tiles, arch, {**options, **by_row}
    for arch, tiles in ((None, GemmTiles(16, 32, 2, 8)), ("sm_90a", hopper)):
        rows = 17 * tiles.block_m + 3  # more than one group of blocks of rows
        products[f"{arch or 'portable'}, many rows"] = (rows, 76, 144), tiles, arch, {"blocks": 3}
    return {
        f"product: {name}": partial(product, shape, tiles, arch, **how)
        for name, (shape, tiles, arch, how) in products.items()
    }


def _tiles() -> Iterator[tuple[GemmTiles, str | None]]:
    """Yield all tiles that a product may choose, and the architecture of each."""
    yield from ((tiles, None) for tiles in gemm_form.PORTABLE_TILES)
    shared = (one for of_blocks in gemm_form._SHARED_TILES.values() for one in of_blocks.values())
    yield from ((tiles, "sm_90") for tiles in shared)
    yield from ((tiles, "sm_90a") for tiles in gemm_form.HOPPER_TILES if tiles.tail_splits == 1)


def _norms() -> dict[str, Callable[[], str]]:
    """Return calls of `cupyattn.norm_quant`: every step, type and number of warps of a row."""
    modulated, every = "scale:float16 shift:float16", "weight:float32 bias:float32 shift:bfloat16"
    weighted, turned = "weight:bfloat16 bias:bfloat16", {"rotate": "hadamard"}
    layer, rms, blocks = {"norm": "layer"}, {"norm": "rms"}, {"strategy": "block"}
    tanh, gated = {"activation": "gelu_tanh"}, {"activation": "swiglu"}
    silu = {"activation": "silu"}
    norms: dict[str, tuple[tuple[int, ...], str, str, int, dict[str, Any]]] = {
        "layer": ((5, 192), "float16", "", 1, layer),
        "layer, by token": ((2, 3, 1536), "float16", modulated, 6, layer),
        "layer, weight": ((3, 1024), "bfloat16", weighted, 1, layer),
        "rms, all": ((4, 640), "float16", f"{every} scale:bfloat16", 2, rms),
        "shift": ((3, 264), "float32", "shift:float32", 1, {}),
        "odd width": ((3, 333), "float16", "weight:float16 scale:float32", 1, layer),
        "blocks": ((3, 1152), "float16", modulated, 1, layer | blocks),
        "blocks, odd width": ((5, 300), "float32", "", 1, rms | blocks),
        "rotated by 256": ((3, 1536), "float16", modulated, 1, layer | turned),
        "rotated by 128": ((3, 1152), "bfloat16", "", 1, rms | turned),
        "rotated by 64": ((5, 192), "float32", "weight:float32", 1, turned),
        "large eps": ((3, 256), "float16", "", 1, rms | {"eps": 0.5}),
        "gelu": ((4, 512), "float16", "", 1, {"activation": "gelu"}),
        "gelu_tanh, rotated": ((4, 768), "float16", "", 1, tanh | turned),
        "silu": ((4, 256), "float16", modulated, 1, rms | silu | turned),
        "swiglu": ((4, 384), "bfloat16", "", 1, gated | blocks),
        "16 warps": ((3, 13_824), "float16", modulated, 1, layer | turned),
    }
    few = {"blocks": 1}
    norms |= {
        "few blocks": ((150, 192), "float16", "", 1, layer | few),
        "few blocks, by token": ((6, 35, 256), "float16", modulated, 6, layer | few),
        "few blocks, weight": ((70, 1024), "bfloat16", weighted, 1, layer | few),
        "few blocks, rotated": ((6, 11, 768), "float16", modulated, 6, layer | turned | few),
    }
    return {
        f"norm_quant: {name}": partial(norm, shape, dtype, vectors, groups, **steps)
        for name, (shape, dtype, vectors, groups, steps) in norms.items()
    }
