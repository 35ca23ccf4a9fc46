"""Calls of attention whose form and tiles settled.json pins, and the arrays that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
ARCHES = (None, "sm_80", "sm_90a")


@dataclass(frozen=True)
class Call:
    """One call.

    Parameters
    ----------
    name : str
        Its key in the table.
    variant : str
    sizes : (int, int, int, int, int, int)
        batch, heads, heads_kv, len_q, len_kv, head_dim.
    dtype : {"f16", "bf16", "f32"}
    options : mapping
        Keyword arguments of `cupyattn.attention`; ``"shift"`` and ``"wide"`` are about the arrays:
        they begin so many elements past a multiple of 16 bytes, or have so many columns more than
        they are read to have. ``"packed"`` holds the ends of sequences.
    coded : bool
        Whether operands are quantised beforehand, with the options ``quant`` and ``arch``.
    """

    name: str
    variant: str
    sizes: tuple[int, int, int, int, int, int]
    dtype: str = "f16"
    options: dict[str, Any] = field(default_factory=dict)
    coded: bool = False

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return q, k, v."""
        batch, heads, heads_kv, len_q, len_kv, head_dim = self.sizes
        if "packed" in self.options:
            shapes = [(len_q, heads, head_dim), *[(len_kv, heads_kv, head_dim)] * 2]
        elif self.options.get("layout") == "BSHD":
            shapes = [(batch, len_q, heads, head_dim), *[(batch, len_kv, heads_kv, head_dim)] * 2]
        else:
            shapes = [(batch, heads, len_q, head_dim), *[(batch, heads_kv, len_kv, head_dim)] * 2]
        return tuple(self._array(shape) for shape in shapes)  # type: ignore[return-value]

    def _array(self, shape: tuple[int, ...]) -> Any:
        wide, shift = self.options.get("wide", 0), self.options.get("shift", 0)
        whole = (*shape[:-1], shape[-1] + wide)
        flat = np.zeros(int(np.prod(whole)) + 16, DTYPES[self.dtype])
        start = -(flat.ctypes.data % 16) // flat.itemsize % 16 + shift
        return flat[start : start + int(np.prod(whole))].reshape(whole)[..., : shape[-1]]

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the call."""
        found = {n: x for n, x in self.options.items() if n not in ("shift", "wide", "packed")}
        if "packed" in self.options:
            ends = [np.array(x, np.int32) for x in self.options["packed"]]
            found |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        return {**found, "variant": self.variant}

    def operands(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of `cupyattn.plan` for this call."""
        arrays, keywords = self.arrays(), self.keywords()
        if not self.coded:
            return arrays, keywords
        made = {n: keywords.pop(n) for n in ("quant", "layout") if n in keywords}
        made |= {n: keywords[n] for n in ("arch", "tiles") if n in keywords}
        return (ca.quantize(*arrays, **made),), keywords


def masked(len_q: int, len_kv: int) -> dict[str, dict[str, Any]]:
    """Return what may change the scores of a call, by a short name."""
    blocks = {
        f"blocks{rows}x{keys}": {"block_mask": ca.BlockMask.from_window(
            len_q, len_kv, (128, 128), block_q=rows, block_kv=keys)}
        for rows, keys in ((64, 64), (128, 64), (128, 128))
    }  # fmt: skip
    return {
        "causal": {"causal": True},
        "topleft": {"causal": True, "causal_align": "top-left"},
        "window": {"window": (64, 16)},
        "leftwindow": {"window": (64, -1)},
        "softcap": {"softcap": 30.0},
        "mask": {"mask": np.ones((len_q, len_kv), bool)},
        "bias": {"bias": np.zeros((len_q, len_kv), np.float32)},
        **blocks,
    }


#: Ways to quantise, by a short name.
QUANTS = {
    "default": {},
    "token": {"granularity_q": "token", "granularity_k": "token"},
    "block": {"granularity_q": "block", "granularity_k": "block"},
    "fused": {"fused": True, "smooth_k": False},
    "fusedblock": {"fused": True, "smooth_k": False, "granularity_q": "block"},
    "zeros": {"symmetric": False},
    "zeros8": {"symmetric": False, "pv": "int8"},
    "int8": {"pv": "int8"},
    "int8channel": {"pv": "int8", "granularity_v": "channel"},
    "s8": {"pv": "int8", "p_type": "s8"},
    "fp8": {"pv": "fp8", "granularity_v": "channel"},
    "fp8block": {"pv": "fp8"},
    "int4": {"qk_bits": 4},
    "v8": {"pv": "int8", "p_type": "16bit"},
}  # fmt: skip


def calls() -> Iterator[Call]:
    """Yield the calls."""
    yield from _plain()
    yield from _few_rows()
    yield from _features()
    yield from _layouts()
    yield from _codes()


def _plain() -> Iterator[Call]:
    """Every rung at every entry of its table, on each architecture."""
    for variant in ("unfused", "fa", "fa_warps"):
        for head_dim in (32, 128, 192):
            yield Call(f"{variant} hd{head_dim}", variant, (1, 2, 2, 300, 300, head_dim))
        yield Call(
            f"{variant} sm_90a f32", variant, (1, 2, 1, 9, 700, 64), "f32", {"arch": "sm_90a"}
        )
    for variant in ("fa_tc", "fa_int8"):
        for head_dim in (40, 64, 96, 128, 192, 256):
            for arch in ARCHES:
                name, options = f"{variant} hd{head_dim} {arch}", {"arch": arch}
                yield Call(name, variant, (1, 2, 2, 1024, 1024, head_dim), "bf16", options)
    for len_q, len_kv in ((512, 77), (100, 100), (192, 4096), (200, 600), (385, 130), (64, 0)):
        for head_dim in (64, 128):
            for variant in ("fa_tc", "fa_int8"):
                name = f"{variant} {len_q}x{len_kv} hd{head_dim} sm_90a"
                sizes = 1, 1, 1, len_q, len_kv, head_dim
                yield Call(name, variant, sizes, "f16", {"arch": "sm_90a"})
    for variant in ("fa_tc", "fa_int8"):
        for tiles, arch in (((64, 32, 4, 2), None), ((128, 64, 12, 2), "sm_90a")):
            yield Call(
                f"{variant} own tiles {arch}", variant, (1, 2, 2, 300, 300, 64), "f16",
                {"tiles": ca.Tiles(*tiles), "arch": arch},
            )  # fmt: skip
    for arch in (None, "sm_90a"):
        yield Call(f"own {arch}", "settled_own", (1, 2, 2, 8, 700, 64), "f16", {"arch": arch})


def _few_rows() -> Iterator[Call]:
    """Split keys, and heads stacked as rows."""
    shapes = ((1, 8, 8, 1), (1, 32, 8, 1), (1, 32, 2, 4), (2, 64, 2, 16), (40, 32, 8, 16),
              (1, 16, 1, 17))  # fmt: skip
    for batch, heads, heads_kv, len_q in shapes:
        for head_dim in (64, 128, 256):
            arch = "sm_90a" if head_dim != 256 or heads_kv == 2 else None
            name = f"fa_tc {batch}x{heads}/{heads_kv} rows{len_q} hd{head_dim} {arch}"
            sizes = batch, heads, heads_kv, len_q, 640, head_dim
            yield Call(name, "fa_tc", sizes, "f16", {"arch": arch})
    sizes = 1, 32, 2, 8, 640, 128
    for name, options in (
        ("causal", {"causal": True}), ("topleft", {"causal": True, "causal_align": "top-left"}),
        ("window", {"window": (64, 0)}), ("softcap", {"softcap": 9.0}),
        ("layout", {"layout": "BSHD"}), ("tiles", {"tiles": ca.Tiles(128, 64, 12, 2)}),
        ("short", {}),
    ):  # fmt: skip
        few = (*sizes[:4], 500, 128) if name == "short" else sizes
        yield Call(f"fa_tc stacked {name}", "fa_tc", few, "f16", {**options, "arch": "sm_90a"})
    yield Call("fa_int8 rows8", "fa_int8", sizes, "f16", {"arch": "sm_90a"})


def _features() -> Iterator[Call]:
    """Options that change scores."""
    for variant in ("fa_tc", "fa_int8"):
        for name, options in masked(512, 512).items():
            head_dim = 128 if name != "blocks64x64" else 64
            for arch in (None, "sm_90a"):
                yield Call(
                    f"{variant} {name} {arch}", variant, (1, 1, 1, 512, 512, head_dim), "f16",
                    {**options, "arch": arch},
                )  # fmt: skip
    for variant in ("unfused", "fa_warps"):
        options = masked(512, 512)["blocks64x64"]
        yield Call(f"{variant} blocks64x64", variant, (1, 1, 1, 512, 512, 64), "f16", options)


def _layouts() -> Iterator[Call]:
    """Operands that the copy engine takes, or not, and packed sequences."""
    sizes = 1, 2, 1, 300, 300, 64
    for variant in ("fa_tc", "fa_int8"):
        for name, options in (
            ("shifted", {"shift": 1}), ("wide8", {"wide": 8}), ("wide3", {"wide": 3}),
            ("layout", {"layout": "BSHD"}),
            ("packed", {"packed": ([0, 100, 100, 300], [0, 20, 200, 300])}),
            ("packed causal", {"packed": ([0, 7, 300], [0, 7, 300]), "causal": True}),
            ("packed softcap", {"packed": ([0, 7, 300], [0, 7, 300]), "softcap": 9.0}),
        ):  # fmt: skip
            options = {**options, "arch": "sm_90a"}
            yield Call(f"{variant} {name}", variant, sizes, "f16", options)
        odd = (*sizes[:5], 60)
        yield Call(f"{variant} hd60", variant, odd, "f16", {"arch": "sm_90a"})
    yield Call("fa_int8 f32 hd60", "fa_int8", odd, "f32", {"arch": "sm_90a"})


def _codes() -> Iterator[Call]:
    """Ways to quantise, on the way and beforehand."""
    for name, given in QUANTS.items():
        for head_dim in (64, 128) if name not in ("int8", "fp8") else (64, 96, 192):
            for arch in (None, "sm_90a"):
                options = {"quant": ca.QuantConfig(**given), "arch": arch}
                sizes = 1, 1, 1, 512, 512, head_dim
                yield Call(f"quant {name} hd{head_dim} {arch}", "fa_int8", sizes, "f16", options)
    for name in ("default", "token", "zeros", "int8", "int8channel", "fp8", "int4"):
        for made in (None, "sm_90a"):
            options = {"quant": ca.QuantConfig(**QUANTS[name]), "arch": made}
            sizes = 1, 2, 1, 130, 200, 64
            yield Call(f"codes {name} {made}", "fa_int8", sizes, "f16", options, coded=True)
    for name in ("int8", "int8channel", "fp8"):
        for change, options in (
            ("softcap", {"softcap": 9.0}), ("bias", {"bias": np.zeros((1, 300), np.float32)}),
            ("causal", {"causal": True}), ("tiles", {"tiles": ca.Tiles(64, 64, 4, 2)}),
            ("packed", {"packed": ([0, 100, 300], [0, 20, 300])}),
        ):  # fmt: skip
            quant = ca.QuantConfig(**QUANTS[name], smooth_k=change != "softcap")
            for arch in (None, "sm_90a") if change in ("softcap", "causal") else (None,):
                yield Call(
                    f"quant {name} {change} {arch}", "fa_int8", (1, 1, 1, 300, 300, 64), "bf16",
                    {**options, "quant": quant, "arch": arch},
                )  # fmt: skip
