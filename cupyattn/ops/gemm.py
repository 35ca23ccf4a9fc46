"""`int8_gemm`: a matrix product of INT8 codes with scales of blocks or of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_receiver, check_together
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import choose, own_arch
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import MAX_LENGTH
from cupyattn.kernels.tiles import GemmTiles, check_kind
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.gemm import GemmPlan, LayerOperands, ProductOperands, plan_gemm
from cupyattn.plans.records import Work
from cupyattn.problem.gemm_form import (
    COPIED,
    GemmKernel,
    check_channel_codes,
    check_tiles_of,
    settle_gemm,
    settle_layers,
    where_shared,
)
from cupyattn.problem.joint_rows import check_below, in_batches, joined
from cupyattn.problem.problem import Problem, Result
from cupyattn.quant.activation import GLU, check_activation, columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, check_out_dtype, scale_shape, strategy_of
from cupyattn.reference.gemm import gemm_mirror

Array = Any


def int8_gemm(
    a: Array,
    a_scales: Array,
    b: Array,
    b_scales: Array,
    out_dtype: str = "float16",
    *,
    bias: Array | None = None,
    activation: str | None = None,
    outliers: tuple[Array, Array] | None = None,
    residual: Array | None = None,
    residual_below: Array | None = None,
    gate: Array | None = None,
    tiles: GemmTiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    out: Array | None = None,
) -> Array:
    """Multiply activations by a weight, both in INT8 codes: ``activation(a b^T + bias)``.

    With a gated linear unit, such as ``activation="swiglu"``, b has two halves of rows: first the
    gate g, then u. With ``"swiglu_gate_last"`` u comes first. The result is
    ``silu(a g^T + bias_g) (a u^T + bias_u)``.
    With `residual` and `gate`: ``residual + gate activation(a b^T + bias)``.

    Parameters
    ----------
    a : array, (..., k), int8
        Codes of activations, as `act_quant` makes them. NumPy, CuPy, or anything with DLPack.
        Leading axes that do not follow each other evenly in memory are copied.
    a_scales : array, (..., ceil(k / 128)) or (..., 1), float32
        Scales of blocks, or with ``strategy="channel"`` of rows; `b_scales` must have the same
        strategy.
    b : array, (n, k), int8
        Codes of a weight, as `weight_quant` makes them.
    b_scales : array, (ceil(n / 128), ceil(k / 128)) or (n, 1), float32
    out_dtype : {"float16", "bfloat16", "float32"}
    bias : array, (n,), float16, bfloat16 or float32, optional
    activation : {"gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}, optional
        `cupyattn.reference.gemm.activate` defines them. The last three are gated linear units, and
        their names may end in ``"_gate_last"``. With these the result has n / 2 columns, and so
        have `residual`, `gate` and `out`.
    outliers : (array, array), optional
        (..., r) and (n, r), both float16 or both bfloat16: r further columns along k that were not
        quantised. They require scales of blocks.
    residual : array, (..., n), out_dtype, optional
        Added to the result; not modified.
    residual_below : array, (rows, n) or (batch, rows, n), out_dtype, optional
        Rows after the rows of `residual`, as if both were concatenated.
    gate : array, (n,) or (groups, n), out_dtype or float32, optional
        Factors of the result before `residual` is added, which is then required. All groups have
        the same number of consecutive rows, such as the tokens of a sample with its modulation.
    tiles : GemmTiles, optional
        Chosen by the shape when omitted; for the portable form, unless `arch` is ``"sm_90a"``. If
        several blocks share a tile (`GemmTiles.splits`, `GemmTiles.tail_splits`), the bits depend
        on that number, too.
    arch : str, optional
        Architecture to compile for, which decides the form: ``"sm_90a"`` names the Hopper form.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`.
    out : array, (..., n), out_dtype, optional
        Receives the result, in C order; shares no memory with the operands.

    Returns
    -------
    array, (..., n), out_dtype
        `out` if given, otherwise a new array of the kind of a. Elements whose scale is NaN are
        NaN.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together, unknown names, and `tiles` that more blocks share than
        k has slices of 128.
    UnsupportedError
        For `tiles` of the Hopper form and operands that it does not take; for shared tiles on an
        architecture without clusters; for a shared last wave in the portable form. With scales of
        channels, also for outliers, and for k past 131,071, whose sums overflow int32.

    Notes
    -----
    The Hopper form runs on compute capability 9.0 with more than 32 rows, or with more than 16 rows
    of a wide layer (`cupyattn.problem.gemm_form.on_hopper`). Addresses and rows must be multiples
    of 16 bytes. Otherwise the portable form runs, and the logger ``cupyattn`` says why. At level
    DEBUG it prints form, tiles and launches of every new call.

    The scales of a slice of 128 codes are applied to its exact sum, in float32:
    ``c = fma(dot, fl(a_scale b_scale), c)``, slices in order. With few rows, and in the last wave
    of many, the blocks of a cluster may share the slices of a tile. They add up their sums in
    order. So the bits of a result depend only on the sizes of the product, the form and `tiles`.
    With scales of channels the sum over all of k is exact and scaled once: ``c = fl(fl(sum)
    fl(a_scale b_scale))``. Its bits do not depend on form and tiles. `cupyattn.quant.gemm_error`
    bounds the result element by element.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 200), (5, 200)))
    >>> from cupyattn.quant import act_quant, weight_quant
    >>> c = int8_gemm(*act_quant(x), *weight_quant(w), "float32")
    >>> float(np.linalg.norm(c - x @ w.T) / np.linalg.norm(x @ w.T)) < 0.02
    True
    """
    settings = GemmSettings(out_dtype, activation or "", tiles, arch, backend)
    arrays = {"a": a, "a_scales": a_scales, "b": b, "b_scales": b_scales}
    if bias is not None:
        arrays["bias"] = bias
    if outliers is not None:
        arrays["a_16"], arrays["b_16"] = outliers
    if residual is not None:
        arrays["residual"] = residual
    if residual_below is not None:
        arrays["residual_below"] = residual_below
    if gate is not None:
        arrays["gate"] = gate
    if out is not None:
        arrays["c"] = out
    return run(GEMM, settings, arrays)


class GemmSettings(NamedTuple):
    """Arguments of `int8_gemm`, except arrays."""

    out_dtype: str
    activation: str
    tiles: GemmTiles | None
    arch: str | None
    backend: str | None


class _Gemm(Operation):
    """The product of INT8 codes as an operation."""

    name = "int8_gemm"
    receives = ("c",)

    def resolve(self, settings: GemmSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check the operands, and settle form and tiles."""
        operands = {name: x for name, x in arrays.items() if name != "c"}
        a, b, out = operands["a"], operands["b"], arrays.get("c")
        check_together(**operands, out=out)
        backend, tiles = choose(settings.backend, a.device >= 0), settings.tiles
        check_product(settings, operands)
        columns = columns_of(b.shape[0], settings.activation)
        shape = (*a.shape[:-1], columns)
        if out is not None:
            _check_out(out, shape, settings.out_dtype)
        strategy = strategy_of(a, operands["a_scales"], b, operands["b_scales"])
        if tiles is not None:
            check_kind(tiles, GemmTiles)
            check_tiles_of(tiles, a.shape[-1], settings.arch, strategy)
        in_two = {"residual", "residual_below"} if "residual_below" in operands else set()
        for name in ({"a", "a_scales", "a_16", "residual"} - in_two) & operands.keys():
            operands[name] = operands[name].rows()
        operands |= {name: in_batches(operands[name]) for name in in_two}
        if "gate" in operands and operands["gate"].ndim == 1:
            operands["gate"] = operands["gate"].front()
        kernel, arch = None, settings.arch
        if backend != "mirror":
            operands = {name: x.with_whole_rows() for name, x in operands.items()}
            free = arch is None and tiles is None
            kernel = settle_gemm(
                {name: operands[name].place for name in COPIED if name in operands}, strategy,
                activation=settings.activation, tiles=tiles, arch=arch,
                on_hopper_device=free and own_arch(backend, a) is not None,
            )  # fmt: skip
            arch = kernel.arch
        result = Result(shape, STORAGE[settings.out_dtype])
        return Problem(
            what=self.name, backend=backend, arch=arch, operands=operands,
            results={"c": result} if out is None else {},
            received={} if out is None else {"c": out.rows()}, settled=(settings, kernel),
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        settings, kernel = problem.settled
        plan = plan_gemm(
            kernel, _places(problem), settings.out_dtype, bias=_dtype_of(problem, "bias"),
            activation=settings.activation, outliers=_dtype_of(problem, "a_16"),
        )  # fmt: skip
        return Work.of(plan)

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return the product from NumPy."""
        (settings, _), sharing = problem.settled, {}
        a, b, tiles = arrays["a"], arrays["b"], settings.tiles
        if tiles is not None and tiles.cluster > 1:
            shared = where_shared(a.shape[0], b.shape[0], tiles)
            if settings.activation in GLU:  # a tile has both rows of b of a column
                shared = shared[:, ::2]
            sharing = {"splits": tiles.cluster, "shared": shared}
        c = gemm_mirror(
            a, arrays["a_scales"], b, arrays["b_scales"], settings.out_dtype,
            bias=arrays.get("bias"), activation=settings.activation,
            outliers=(arrays["a_16"], arrays["b_16"]) if "a_16" in arrays else None,
            residual=_addend(arrays), gate=arrays.get("gate"), **sharing,
        )  # fmt: skip
        if "c" in problem.received:
            arrays["c"][...] = c
            return {}
        return {"c": c.reshape(problem.results["c"].shape)}

    def restore(self, facts: None, arrays: Mapping[str, Any], results: dict[str, Any]) -> Any:
        """Return the result, or the ``out`` that received it."""
        return arrays["c"] if "c" in arrays else results["c"]


GEMM = _Gemm()


def _addend(arrays: Mapping[str, Array]) -> Array | None:
    """Return the rows that are added to a product, or None."""
    residual, below = (arrays.get(name) for name in ("residual", "residual_below"))
    if residual is None or below is None:
        return residual
    return np.concatenate((residual, below), axis=1).reshape(-1, residual.shape[-1])


def _dtype_of(problem: Problem, name: str) -> str:
    """Return the storage type of a product's operand; "" if it has none of this name."""
    return problem.operands[name].dtype.name if name in problem.operands else ""


def _places(problem: Problem) -> ProductOperands:
    """Return the layouts of a product's operands and result."""
    settings, _ = problem.settled
    of: dict[str, Any] = {name: x.place for name, x in problem.operands.items()}
    if "c" in problem.received:
        return ProductOperands(**of, c=problem.received["c"].place)
    columns = columns_of(of["b"].shape[0], settings.activation)
    itemsize = STORAGE[settings.out_dtype].itemsize
    return ProductOperands(**of, c=Operand.contiguous((of["a"].shape[0], columns), itemsize))


def are_alike(products: Sequence[Problem]) -> bool:
    """Whether products of the same codes differ only in weight, scales, result, and a bias.

    Parameters
    ----------
    products : sequence of Problem
        Of this operation.
    """
    settings, kernel = products[0].settled
    added = {"residual", "gate", "a_16"}
    return (
        kernel is not None
        and settings.activation not in GLU
        and all(one.settled[0] == settings for one in products)
        and not any(added & one.operands.keys() for one in products)
        and len({_dtype_of(one, "bias") for one in products} - {""}) <= 1
    )


def settle_together(products: Sequence[Problem]) -> GemmKernel | None:
    """Settle the kernel that runs several products of the same codes in one launch, or None.

    Parameters
    ----------
    products : sequence of Problem
        Which `are_alike`.
    """
    m, k = products[0].operands["a"].shape
    columns = tuple(one.operands["b"].shape[0] for one in products)
    return settle_layers([one.settled[1] for one in products], m, columns, k)


def plan_together(kernel: GemmKernel, products: Sequence[Problem]) -> GemmPlan:
    """Plan several products of the same codes as one launch.

    Parameters
    ----------
    kernel : GemmKernel
        From `settle_together`.
    products : sequence of Problem
        `cupyattn.plans.gemm.buffer_of` names the buffers of each, except the codes.
    """
    settings, _ = products[0].settled
    first, *others = map(_places, products)
    further = tuple(LayerOperands(one.b, one.b_scales, one.c, one.bias) for one in others)
    bias = max(_dtype_of(one, "bias") for one in products)  # "" of products without
    return plan_gemm(
        kernel, replace(first, further=further), settings.out_dtype, bias=bias,
        activation=settings.activation,
    )  # fmt: skip


def _check_sum(operands: Mapping[str, Described], out_dtype: str, n: int) -> None:
    """Raise unless residual and gate of a product fit its result."""
    rows = math.prod(operands["a"].shape[:-1])
    for name in ("gate", "residual_below"):
        if name in operands and "residual" not in operands:
            raise ValueError(
                f"{name} goes with residual, got residual=None: give zeros to add nothing"
            )
    for name, other in (("residual", out_dtype), ("gate", "float32")):
        if name in operands and operands[name].dtype.name not in (out_dtype, other):
            or_other = "" if other == out_dtype else f" or {other}"
            raise TypeError(
                f"{name} must be {out_dtype} as out_dtype{or_other}, got {operands[name].dtype}"
            )
    residual, below = operands.get("residual"), operands.get("residual_below")
    if residual is not None and below is not None:
        check_below("residual", residual, "residual_below", below)
        residual = joined(residual, below)
    shape = (*operands["a"].shape[:-1], n)
    if residual is not None and tuple(residual.shape) != shape:
        both = "" if below is None else " with residual_below"
        raise ValueError(f"residual{both} must have shape {shape}, got {tuple(residual.shape)}")
    if "gate" in operands:
        shape = tuple(operands["gate"].shape)
        groups = 1 if len(shape) == 1 else shape[0] if shape else 0
        if not 1 <= len(shape) <= 2 or shape[-1] != n or groups < 1 or rows % groups:
            raise ValueError(
                f"gate must be ({n},) or (groups, {n}) with groups that divide the {rows} rows, "
                f"got {shape}"
            )


def _other_strategy(name: str, operands: Mapping[str, Described]) -> str:
    """Return the shapes that scales of channels need, for a message; "" for other arrays."""
    if not name.endswith("_scales"):
        return ""
    a, n = operands["a"], operands["b"].shape[0]
    return (
        f"; of channels a_scales must be {(*a.shape[:-1], 1)} and b_scales {(n, 1)}, got "
        f"{tuple(operands['a_scales'].shape)} and {tuple(operands['b_scales'].shape)}"
    )


def _check_out(out: Described, shape: tuple[int, ...], out_dtype: str) -> None:
    check_receiver(out, shape, out_dtype)
    if not out.is_contiguous:
        raise ValueError(f"out must lie in C order, got strides {out.strides} of {shape}")


def check_product(settings: GemmSettings, operands: Mapping[str, Described]) -> None:
    """Raise unless the operands of a product fit together, by shapes and types.

    Parameters
    ----------
    settings : GemmSettings
    operands : mapping of str to Described
        By the buffers of the plan.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `int8_gemm` says.
    """
    check_arch(settings.arch)
    check_out_dtype(settings.out_dtype)
    activation = settings.activation
    a, b = operands["a"], operands["b"]
    for name, dtype in (("a", "int8"), ("b", "int8"), ("a_scales", "float32"),
                        ("b_scales", "float32")):  # fmt: skip
        if operands[name].dtype != np.dtype(dtype):
            raise TypeError(f"{name} must be {dtype}, got {operands[name].dtype}")
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise ValueError(
            "a must be (..., k) and b (n, k), got a.shape="
            f"{tuple(a.shape)} and b.shape={tuple(b.shape)}"
        )
    check_activation(activation, b.shape[0])
    _check_sum(operands, settings.out_dtype, columns_of(b.shape[0], activation))
    strategy = strategy_of(a, operands["a_scales"], b, operands["b_scales"])
    per_row = 1 if strategy == "channel" else -(-a.shape[-1] // BLOCK_SIZE)
    expected = {
        "a_scales": (*a.shape[:-1], per_row),
        "b_scales": scale_shape(b.shape, BLOCK_SIZE, strategy),
        "bias": (b.shape[0],),
    }
    if strategy == "channel" and "a_16" in operands:
        raise UnsupportedError(
            "outliers go with scales of blocks, got scales of channels: quantise with "
            "strategy='block'"
        )
    if "a_16" in operands:
        columns = operands["a_16"].shape[-1] if operands["a_16"].ndim else 0
        expected |= {"a_16": (*a.shape[:-1], columns), "b_16": (b.shape[0], columns)}
        types = {operands[name].dtype.name for name in ("a_16", "b_16")}
        if len(types) > 1 or not types < {"float16", "bfloat16"}:
            raise TypeError(
                "outliers must both be float16 or both bfloat16, got "
                f"{operands['a_16'].dtype.name} and {operands['b_16'].dtype.name}"
            )
    for name in expected.keys() & operands.keys():
        if tuple(operands[name].shape) != expected[name]:
            raise ValueError(
                f"{name} must have shape {expected[name]} for a.shape={tuple(a.shape)} and "
                f"b.shape={tuple(b.shape)}, got {tuple(operands[name].shape)}"
                + _other_strategy(name, operands)
            )
    if strategy == "channel":
        check_channel_codes(a.shape[-1])
    if "bias" in operands and operands["bias"].dtype.name not in STORAGE:
        raise TypeError(f"bias must be {' or '.join(STORAGE)}, got {operands['bias'].dtype.name}")
    largest = max(math.prod(a.shape[:-1]), a.shape[-1], b.shape[0])
    if largest > MAX_LENGTH:
        raise ValueError(f"rows, columns and k must be at most 2^30, got {largest}")
