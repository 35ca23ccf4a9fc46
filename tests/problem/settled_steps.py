"""Products of codes and backward passes whose form and tiles settled_steps.json pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.ops import backward, gemm
from cupyattn.ops.operation import problem_of
from tests.problem.settled_calls import DTYPES, masked

#: Architectures by name, and a device that is a Hopper one, where none is named.
ARCHES = (None, "sm_80", "sm_90", "sm_90a", "hopper")


def placed(shape: tuple[int, ...], dtype: Any, shift: int = 0, wide: int = 0) -> Any:
    """An array of zeros so many elements past a multiple of 16 bytes, of so much longer rows."""
    whole = (*shape[:-1], shape[-1] + wide)
    flat = np.zeros(int(np.prod(whole)) + 32, dtype)
    start = -(flat.ctypes.data % 16) // flat.itemsize % 16 + shift
    return flat[start : start + int(np.prod(whole))].reshape(whole)[..., : shape[-1]]


@dataclass(frozen=True)
class Product:
    """A product of (m, k) and (n, k) codes; `options` are of the settings, `added` operands."""

    name: str
    shape: tuple[int, int, int]
    arch: str | None = None
    strategy: str = "block"
    shift: int = 0
    wide: int = 0
    added: tuple[str, ...] = ()
    tiles: ca.GemmTiles | None = None

    def problem(self) -> Any:
        """Return the checked call, in the interpreter."""
        (m, n, k), of_block = self.shape, self.strategy == "block"
        blocks = -(-k // 128) if of_block else 1
        rows = -(-n // 128) if of_block else n
        arrays = {
            "a": placed((m, k), np.int8, self.shift, self.wide),
            "a_scales": placed((m, blocks), np.float32),
            "b": placed((n, k), np.int8), "b_scales": placed((rows, blocks), np.float32),
        }  # fmt: skip
        others = {
            "bias": ((n,), np.float16), "residual": ((m, n), np.float16),
            "gate": ((n,), np.float16),
            "a_16": ((m, 40), np.float16), "b_16": ((n, 40), np.float16),
        }  # fmt: skip
        arrays |= {name: placed(*others[name]) for name in self.added}
        arch = None if self.arch == "hopper" else self.arch
        settings = gemm.GemmSettings("float16", "", self.tiles, arch, "interpret")
        return problem_of(gemm.GEMM, settings, arrays)

    def plan(self, problem: Any) -> Any:
        """Return the plan of the product."""
        return gemm.GEMM.plan(problem).plans[-1]


@dataclass(frozen=True)
class Gradient:
    """A backward pass; `options` are its options, and ``"shift"`` and ``"ends"`` of its arrays."""

    name: str
    sizes: tuple[int, int, int, int, int, int]
    arch: str | None = None
    dtype: str = "f16"
    options: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> Any:
        """Return the checked call, in the interpreter."""
        batch, heads, heads_kv, len_q, len_kv, head_dim = self.sizes
        options = dict(self.options)
        shift, ends = options.pop("shift", 0), options.pop("ends", None)
        of_q, of_k = (batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim)
        of_lse: tuple[int, ...] = of_q[:3]
        if options.get("layout") == "BSHD":
            of_q, of_k = (of_q[0], len_q, heads, head_dim), (of_k[0], len_kv, heads_kv, head_dim)
        if ends is not None:
            options |= dict(
                zip(("cu_seqlens_q", "cu_seqlens_k"), (np.array(x, np.int32) for x in ends),
                    strict=True)
            )  # fmt: skip
            of_q, of_k = (len_q, heads, head_dim), (len_kv, heads_kv, head_dim)  # type: ignore[assignment]
            of_lse = heads, len_q
        q, o, d_out = (placed(of_q, DTYPES[self.dtype]) for _ in range(3))
        k, v = placed(of_k, DTYPES[self.dtype], shift), placed(of_k, DTYPES[self.dtype])
        rows = d_out, q, k, v, o, placed(of_lse, np.float32)
        options |= {"arch": self.arch, "backend": "interpret"}
        return backward.resolved_backward("attention_backward", *rows, options)

    def plan(self, problem: Any) -> Any:
        """Return the plan of the gradients, between rows that are turned and turned back."""
        return backward.plan_of(problem)


def steps() -> Iterator[Product | Gradient]:
    """Yield the calls."""
    yield from _products()
    yield from _gradients()


def _products() -> Iterator[Product]:
    shapes = (
        (1, 4096, 4096), (16, 1792, 7168), (17, 1792, 7168), (32, 12_288, 3072), (33, 256, 256),
        (64, 4096, 4096), (64, 64, 128), (300, 300, 300), (4608, 3072, 3072), (4096, 4096, 4096),
        (2048, 512, 100), (0, 64, 128), (64, 0, 128), (5, 7, 0),
    )  # fmt: skip
    for strategy in ("block", "channel"):
        for shape in shapes:
            for arch in ARCHES if strategy == "block" else (None, "sm_90a", "hopper"):
                yield Product(f"{strategy} {shape} {arch}", shape, arch, strategy)
        for name, options in {
            "shifted": {"shift": 4}, "rows of 20": {"wide": 4}, "rows of 16": {"wide": 16},
            "bias": {"added": ("bias",)}, "gated": {"added": ("residual", "gate")},
            "outliers": {"added": ("a_16", "b_16")},
        }.items():  # fmt: skip
            if name != "outliers" or strategy == "block":
                for arch in ("sm_80", "sm_90a", "hopper"):
                    yield Product(
                        f"{strategy} {name} {arch}", (100, 384, 256), arch, strategy,
                        **options,  # type: ignore[arg-type]
                    )  # fmt: skip
    for tiles, arch in (
        (ca.GemmTiles(64, 64, 4, 3), None), (ca.GemmTiles(64, 64, 4, 3), "sm_90"),
        (ca.GemmTiles(64, 128, 8, 4, tail_splits=2), "sm_90a"),
        (ca.GemmTiles(32, 64, 4, 4, splits=2), "sm_90"), (ca.GemmTiles(128, 128, 12, 4), "sm_90a"),
        (ca.GemmTiles(64, 64, 4, 3), "hopper"),
    ):  # fmt: skip
        yield Product(f"own {tiles} {arch}", (300, 600, 512), arch, tiles=tiles)


def _gradients() -> Iterator[Gradient]:
    for head_dim in (40, 64, 96, 128, 192, 256):
        for deterministic in (None, False, True):
            for arch in (None, "sm_90a"):
                yield Gradient(
                    f"hd{head_dim} deterministic={deterministic} {arch}",
                    (1, 2, 1, 600, 700, head_dim), arch, "bf16", {"deterministic": deterministic},
                )  # fmt: skip
    for len_q, len_kv in ((2048, 1024), (512, 1025), (512, 2048), (512, 2049), (0, 64), (64, 0)):
        for causal in (False, True):
            yield Gradient(
                f"{len_q}x{len_kv} causal={causal}", (1, 1, 1, len_q, len_kv, 64), "sm_90a", "f16",
                {"causal": causal},
            )  # fmt: skip
    for heads_kv in (1, 2):
        for causal in (False, True):
            yield Gradient(
                f"2 heads on {heads_kv} causal={causal}", (1, 2, heads_kv, 512, 512, 128), "sm_90a",
                "bf16", {"causal": causal},
            )  # fmt: skip
    for name, options in masked(512, 512).items():
        for head_dim in (64, 192):
            yield Gradient(
                f"{name} hd{head_dim}", (1, 1, 1, 512, 512, head_dim), "sm_90a", "f16", options
            )
    for name, shape in {"bias of scores": (512, 512), "bias of keys": (512,)}.items():
        for head_dim in (64, 128, 192):
            yield Gradient(
                f"{name} hd{head_dim}", (1, 1, 1, 512, 512, head_dim), "sm_90a", "f16",
                {"bias": np.zeros(shape, np.float16)},
            )  # fmt: skip
    turns = {"rope": (np.ones((300, 32), np.float32), np.zeros((300, 32), np.float32))}
    for name, options in {
        "shifted": {"shift": 1}, "layout": {"layout": "BSHD"}, "rope": turns,
        "rope layout": {**turns, "layout": "BSHD"},
        "packed": {"ends": ([0, 100, 300], [0, 20, 300]), "max_len_q": 200, "max_len_k": 280},
    }.items():  # fmt: skip
        for arch in (None, "sm_90a"):
            yield Gradient(f"{name} {arch}", (1, 2, 1, 300, 300, 64), arch, "f16", options)
