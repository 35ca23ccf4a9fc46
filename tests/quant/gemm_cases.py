"""Products of INT8 codes to test: operands by seed and regime, and how they are run and judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmPlan, ProductOperands, plan_gemm
from cupyattn.problem.gemm_form import settle_gemm, where_shared
from cupyattn.quant import gemm_error, gemm_exact, gemm_mirror
from cupyattn.quant.activation import GLU, columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, scale_shape
from tests.faults.fault_patches import check_found
from tests.quant.quant_inputs import operand
from tests.support.runs import Guarded

#: Regimes of operands whose products stay in the range of float32.
REGIMES = ("normal", "outlier channel", "constant rows", "zeros", "subnormal", "wide")


@dataclass(frozen=True)
class Product:
    """Operands of `int8_gemm`, and what follows the product."""

    a: Any
    a_scales: Any
    b: Any
    b_scales: Any
    out_dtype: str = "float32"
    bias: Any = None
    activation: str = ""
    outliers: tuple[Any, Any] | None = None
    residual: Any = None
    gate: Any = None

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.a_scales, self.b, self.b_scales

    @property
    def after(self) -> dict[str, Any]:
        return {
            "bias": self.bias, "activation": self.activation, "outliers": self.outliers,
            "residual": self.residual, "gate": self.gate,
        }  # fmt: skip

    def run(self, **options: Any) -> Any:
        after = {**self.after, "activation": self.activation or None}
        return ca.int8_gemm(*self.operands, self.out_dtype, **after, **options)

    def run_guarded(self, xp: Any = np, **options: Any) -> np.ndarray:
        """Run with arrays of NumPy or CuPy into an array of NaN amid more NaN, which stays."""
        arrays = {
            name: xp.asarray(x) for name, x in vars(self).items() if isinstance(x, np.ndarray)
        }
        if self.outliers is not None:
            arrays["outliers"] = tuple(map(xp.asarray, self.outliers))
        shape = len(self.a), columns_of(len(self.b), self.activation)
        moved = self.but(**arrays)
        for _ in range(2):  # the second is a call that came again
            c = Guarded.empty(shape, self.out_dtype, xp=xp)
            assert moved.run(out=c.array, **options) is c.array
            c.check()
        return on_host(c.array)

    def mirror(self, splits: int = 1) -> np.ndarray:
        return gemm_mirror(*self.operands, self.out_dtype, **self.after, splits=splits)

    def mirror_of(self, tiles: GemmTiles, blocks: int | None = None) -> np.ndarray:
        """Return the mirror of tiles that all blocks share, or the last on so many blocks."""
        shared = where_shared(len(self.a), len(self.b), tiles, blocks)
        shared = shared[:, :: 2 if self.activation in GLU else 1]  # of every pair of rows of b
        return gemm_mirror(
            *self.operands, self.out_dtype, **self.after, splits=tiles.cluster, shared=shared
        )

    def run_on(self, blocks: int, tiles: GemmTiles) -> np.ndarray:
        """Interpret the Hopper form as if a device ran no more than `blocks` at a time."""
        buffers = dict(zip(("a", "a_scales", "b", "b_scales"), self.operands, strict=True))
        if self.outliers is not None:
            buffers["a_16"], buffers["b_16"] = self.outliers
        shape = len(self.a), columns_of(len(self.b), self.activation)
        c = np.empty(shape, STORAGE[self.out_dtype])
        own = {name: Operand.of(x) for name, x in buffers.items()}
        bias = None if self.bias is None else Operand.of(self.bias)
        places = ProductOperands(**own, c=Operand.of(c), bias=bias)
        settled = settle_gemm(
            own, places.strategy, activation=self.activation, tiles=tiles, arch="sm_90a"
        )
        plan = plan_gemm(
            settled, places, self.out_dtype, blocks=blocks, activation=self.activation,
            bias="" if self.bias is None else self.bias.dtype.name,
            outliers="" if self.outliers is None else self.outliers[0].dtype.name,
        )  # fmt: skip
        for x in buffers.values():
            x.flags.writeable = False
        interpret.run(plan, buffers | {"c": c, "bias": self.bias}, "sm_90a")
        return c

    def share_of_bound(self, c: np.ndarray) -> float:
        """Return the largest error as a share of its bound; a NaN is infinitely wrong.

        Where the bound is 0, as without anything to sum, only the exact result will do; where it is
        infinite, past the range of the type, anything.
        """
        error = np.abs(as_float64(c) - gemm_exact(*self.operands, **self.after))
        bound = gemm_error(*self.operands, self.out_dtype, **self.after)
        error = np.where(np.isnan(error), np.inf, error)
        judged = (error > 0) & np.isfinite(bound)
        share = np.divide(error, bound, out=np.zeros_like(error), where=judged)
        return float(share.max(initial=0.0))

    def but(self, **fields: Any) -> Product:
        return replace(self, **fields)

    def check_theft(self, run: Callable[[], np.ndarray], finding: str) -> None:
        """Assert that a mistake in the kernel is found: a hazard, or "": a wrong result."""
        check_found(lambda: self.share_of_bound(run()) > 10, finding)


def planned(
    m: int,
    n: int,
    k: int,
    out_dtype: str = "float16",
    *,
    strategy: str = "block",
    bias: str = "",
    activation: str = "",
    outliers: str = "",
    gates: int = 0,
    blocks: int | None = None,
    **how: Any,
) -> GemmPlan:
    """Plan a product of (m, n, k), of operands in C order; with `gates` it is added to a residual.

    `how` may have tiles and an architecture.
    """

    def place(*shape: int, itemsize: int = STORAGE[out_dtype].itemsize) -> Operand:
        return Operand.contiguous(shape, itemsize)

    copied = {"a": place(m, k, itemsize=1), "b": place(n, k, itemsize=1)}
    if outliers:
        copied |= {"a_16": place(m, 64), "b_16": place(n, 64)}
    c = place(m, columns_of(n, activation))
    at = ProductOperands(
        **copied, c=c, residual=c if gates else None,
        a_scales=place(m, 1 if strategy == "channel" else -(-k // BLOCK_SIZE), itemsize=4),
        b_scales=place(*scale_shape((n, k), BLOCK_SIZE, strategy), itemsize=4),
        gate=place(gates, c.shape[1]) if gates else None,
        bias=place(n, itemsize=STORAGE[bias].itemsize) if bias else None,
    )  # fmt: skip
    return plan_gemm(
        settle_gemm(copied, at.strategy, activation=activation, **how), at, out_dtype, bias=bias,
        activation=activation, outliers=outliers, blocks=blocks,
    )  # fmt: skip


def run(p: Product, tiles: GemmTiles) -> np.ndarray:
    """Run a product in the interpreter, on the architecture that tiles of this size are for."""
    arch = "sm_90a" if tiles.num_warps >= 8 else "sm_90"
    return p.run(backend="interpret", tiles=tiles, arch=arch)


def product(
    seed: int,
    shape: tuple[int, int, int],
    regime: str = "normal",
    *,
    out_dtype: str = "float32",
    bias: bool = False,
    activation: str = "",
    outliers: int = 0,
    strategy: str = "block",
    gates: int | None = None,
) -> Product:
    """Draw a product of (m, n, k): codes of activations of one regime, and of a normal weight.

    The result has n columns, of a gated linear unit n / 2. With `gates` it is added to a residual;
    not 0, factors of so many groups of rows come before.
    """
    m, n, k = shape
    rng = np.random.default_rng(seed)
    regime = regime if k else "normal"  # which channel is an outlier is drawn
    x = operand(seed, np.dtype(np.float32), (1, 1, m, k), regime)[0, 0]
    w = (rng.standard_normal((n, k)) / np.sqrt(max(k, 1))).astype(np.float32)
    pair = None
    if outliers:
        of_type = np.float16 if seed % 2 else ml_dtypes.bfloat16
        pair = tuple(rng.standard_normal((s, outliers)).astype(of_type) for s in (m, n))
    columns = columns_of(n, activation)
    return Product(
        *ca.act_quant(x, strategy=strategy), *ca.weight_quant(w, strategy=strategy), out_dtype,
        rng.standard_normal(n).astype(ml_dtypes.bfloat16) if bias else None, activation, pair,
        None if gates is None else rng.standard_normal((m, columns)).astype(STORAGE[out_dtype]),
        rng.standard_normal((gates, columns)).astype(STORAGE[out_dtype]) if gates else None,
    )  # fmt: skip
