"""Plan the launch that multiplies INT8 codes: pure data, from the settled kernel."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import DTYPES, without_defaults
from cupyattn.kernels.limits import HOPPER_BLOCKS, INT32_MAX
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.assemble import tensor_map_of
from cupyattn.plans.joint_rows import joint_rows
from cupyattn.plans.records import Launch, TensorMap, Workspace, described
from cupyattn.plans.structs import GEMM_PARAMS, JOINT_GEMM_PARAMS, LAYERS_PARAMS
from cupyattn.problem.gemm_form import (
    MOST_LAYERS,
    GemmKernel,
    all_columns,
    blocks_at_a_time,
    halves_straddle,
    row_bytes,
    tile_count,
    tiles_alone,
)
from cupyattn.quant.activation import ACTIVATIONS, GATE_LAST, GLU
from cupyattn.quant.blocks import strategy_of

_log = logging.getLogger("cupyattn")


@dataclass(frozen=True)
class GemmFeatures:
    """Compile-time features of a product, besides the multiplication.

    Parameters
    ----------
    out_dtype : {"float16", "bfloat16", "float32"}
        Storage type of C.
    access_bytes : {1, 2, 4, 8, 16}
        Bytes per access to A and B.
    vec : {1, 2, 4, 8}
        Elements of C per access.
    bias : {"", "float16", "bfloat16", "float32"}
        Storage type of the bias, which is added to every row; "" for none.
    activation : str
        "", or one of `cupyattn.quant.activation.ACTIVATIONS` or `GLU`.
    outliers : {"", "float16", "bfloat16"}
        Storage type of the outlier columns, which are not codes; "" for none.
    residual : bool
        Whether the result is added to a matrix.
    gate : {"", "float16", "bfloat16", "float32"}
        Storage type of the factors by which columns are multiplied before that; "" for none.
    straddles : bool
        Whether a tile of a gated linear unit may meet two blocks of scales in the second half.
    neighbours : bool
        Whether the copy engine orders rows of B so that a lane has eight adjacent columns of C.
    layers : bool
        Whether several layers multiply the same codes; a bias may then be missing in some.
    joint_rows : bool
        Whether the rows of the residual lie in two tensors.
    """

    out_dtype: str
    access_bytes: int
    vec: int
    bias: str = ""
    activation: str = ""
    outliers: str = ""
    residual: bool = False
    gate: str = ""
    straddles: bool = False
    neighbours: bool = False
    layers: bool = False
    joint_rows: bool = False

    def __str__(self) -> str:
        """Name the type, the accesses and whatever differs from a plain product."""
        return without_defaults(self)

    def defines(self) -> dict[str, int]:
        """Return the ``CFG_*`` macros that carry these features to ``prims/config.cuh``."""
        return {
            "CFG_DTYPE": DTYPES.index(self.out_dtype),
            "CFG_ACCESS_BYTES": self.access_bytes,
            "CFG_VEC": self.vec,
            "CFG_BIAS": 1 + DTYPES.index(self.bias) if self.bias else 0,
            "CFG_ACTIVATION": ACTIVATIONS.index(GLU.get(self.activation, self.activation)),
            "CFG_OUTLIERS": 1 + DTYPES.index(self.outliers) if self.outliers else 0,
            "CFG_RESIDUAL": int(self.residual),
            "CFG_GATE": 1 + DTYPES.index(self.gate) if self.gate else 0,
            **({"CFG_GLU": 1 + self.straddles} if self.activation in GLU else {}),
            **({"CFG_GATE_LAST": 1} if self.activation in GATE_LAST else {}),
            **({"CFG_NEIGHBOURS": 1} if self.neighbours else {}),
            **({"CFG_LAYERS": 1} if self.layers else {}),
            **({"CFG_JOINT_ROWS": 1} if self.joint_rows else {}),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The launches of a call, in order, as an executor runs them."""

    launches: tuple[Launch, ...] = ()
    workspace: tuple[Workspace, ...] = ()

    @functools.cached_property
    def on_devices(self) -> dict[Any, Any]:
        """The executor's data for this plan, by device."""
        return {}


@dataclass(frozen=True, kw_only=True)
class OneLaunch(Launches):
    """The only launch of a call, or none.

    `features` are the compile-time features.
    """

    features: GemmFeatures


@dataclass(frozen=True, kw_only=True)
class GemmPlan(OneLaunch):
    """A product turned into a launch, as `cupyattn.plans.records.Plan` is of attention.

    `alone` is the number of tiles with one block, and `shared` the number that clusters share.
    `note` says why the Hopper form does not run, if it does not.
    """

    form: str
    tiles: GemmTiles
    alone: int = 0
    shared: int = 0
    note: str = ""

    def __str__(self) -> str:
        taken = f"{self.alone} tiles of a block each"
        if self.shared:
            taken += f", {self.shared} that {self.tiles.cluster} blocks share"
        return described(self, f"int8_gemm ({self.form})", self.tiles, self.features, blocks=taken)


@dataclass(frozen=True)
class LayerOperands:
    """Layouts of one of several layers of the same codes, as in `ProductOperands`."""

    b: Operand
    b_scales: Operand
    c: Operand
    bias: Operand | None = None


@dataclass(frozen=True)
class ProductOperands:
    """Layouts of codes, scales and result, which are the buffers of these names in a plan.

    All have two axes, the last one contiguous, except `bias` (n,). `residual` (m, n) and `gate`
    (groups of rows, n) have the type of c; the gate may also be float32. `a_16` and `b_16` are the
    columns in 16 bits that are multiplied in addition to the codes. With `residual_below`, rows of
    `residual` continue there; both are (batch, rows, n). `further` are layers that the launch
    multiplies by the same codes, too; `buffer_of` names their buffers. No layer then has
    `residual`, `gate`, or columns in 16 bits.
    """

    a: Operand
    a_scales: Operand
    b: Operand
    b_scales: Operand
    c: Operand
    residual: Operand | None = None
    residual_below: Operand | None = None
    gate: Operand | None = None
    bias: Operand | None = None
    a_16: Operand | None = None
    b_16: Operand | None = None
    further: tuple[LayerOperands, ...] = ()

    @property
    def layers(self) -> tuple[LayerOperands, ...]:
        """All layers."""
        return LayerOperands(self.b, self.b_scales, self.c, self.bias), *self.further

    @property
    def addends(self) -> tuple[Operand, ...]:
        """The tensors whose rows are added to the result."""
        return tuple(x for x in (self.residual, self.residual_below) if x is not None)

    @property
    def columns(self) -> tuple[int, ...]:
        """Rows of the weight of each layer."""
        return tuple(layer.b.shape[0] for layer in self.layers)

    @property
    def strategy(self) -> str:
        """The groups that share a scale: one of `cupyattn.quant.blocks.STRATEGIES`."""
        return strategy_of(self.a, self.a_scales, self.b, self.b_scales)


def buffer_of(name: str, layer: int) -> str:
    """Return the name of a layer's buffer in a plan; the first layer has no number.

    Examples
    --------
    >>> [buffer_of("bias", layer) for layer in range(3)]
    ['bias', 'bias_1', 'bias_2']
    """
    return f"{name}_{layer}" if layer else name


@functools.lru_cache(maxsize=1024)
def plan_gemm(
    kernel: GemmKernel,
    at: ProductOperands,
    out_dtype: str,
    *,
    bias: str = "",
    activation: str = "",
    outliers: str = "",
    blocks: int | None = None,
) -> GemmPlan:
    """Plan a product, or the products of several layers in one launch.

    Parameters
    ----------
    kernel : GemmKernel
        Of several layers: from `cupyattn.problem.gemm_form.settle_layers`.
    at : ProductOperands
    out_dtype : {"float16", "bfloat16", "float32"}
        Storage type of c.
    bias : {"", "float16", "bfloat16", "float32"}
        Storage type of the buffer ``"bias"``, contiguous; "" for none. One of several layers has a
        bias if `at` gives its layout.
    activation : str
        "", or one of `cupyattn.quant.activation.ACTIVATIONS` or `GLU`; all layers have it.
    outliers : {"", "float16", "bfloat16"}
        Storage type of the buffers ``"a_16"`` and ``"b_16"``; "" for none.
    blocks : int, optional
        Number of Hopper blocks that a device runs at a time;
        `cupyattn.kernels.limits.HOPPER_BLOCKS` when omitted.

    Returns
    -------
    GemmPlan
        Without launches where c is empty.

    Raises
    ------
    UnsupportedError
        For more tiles than a grid has blocks, and for layers that one launch does not take.
    """
    if at.further:
        _check_layers(kernel, at, activation)
    (m, _), n = at.a.shape, at.columns
    form, tiles = kernel.form, kernel.tiles
    if kernel.note:
        _log.info("int8_gemm: %s", kernel.note)
    features = _features(kernel, at, out_dtype, bias, activation, outliers)
    if m * sum(n) == 0:
        return GemmPlan(features=features, form=form, tiles=tiles, note=kernel.note)
    alone = tiles_alone(m, n, tiles, blocks)
    shared = tile_count(m, n, tiles) - alone
    if not shared:  # then no clusters are launched, whose blocks a grid would have to fill
        tiles = replace(tiles, tail_splits=1)
    grid = alone + shared * tiles.cluster
    # NOTE: a persistent block counts on to a part past the last, whose number must fit in an int,
    # too.
    if grid > INT32_MAX - HOPPER_BLOCKS:
        raise UnsupportedError(f"a product of {m} x {sum(n)} takes {grid} tiles: split its rows")
    spec = ModuleSpec.of(kernel.source, tiles.defines(), features.defines())
    params = {**_params(at, features), "alone": alone}
    if features.layers:
        params["n"] = all_columns(n, tiles)
    structs: tuple[tuple[np.dtype[Any], dict[str, Any]] | TensorMap, ...]
    structs = ((JOINT_GEMM_PARAMS if features.joint_rows else GEMM_PARAMS, params),)
    if form == "sm90":
        maps = _maps(at, features, tiles)
        # Blocks without outliers do not read these maps, which must be valid nevertheless.
        structs += tuple(maps if outliers or kernel.strategy == "channel" else maps * 2)
        structs += _of_layers(at, features, tiles) if features.layers else ()
        grid = min(grid, blocks_at_a_time(tiles, blocks)) if tiles.splits == 1 else grid
    launch = Launch(spec, kernel.entry, grid, tiles.num_threads, True, structs)
    plan = GemmPlan(
        features=features, launches=(launch,), form=form, tiles=tiles, alone=alone, shared=shared,
        note=kernel.note,
    )  # fmt: skip
    _log.debug("%s", plan)
    return plan


def _check_layers(kernel: GemmKernel, at: ProductOperands, activation: str) -> None:
    """Raise UnsupportedError for layers that the kernel does not multiply in one launch."""
    added = [name for name in ("residual", "gate", "a_16") if getattr(at, name) is not None]
    added += [activation] if activation in GLU else []
    if (kernel.strategy, kernel.form) != ("channel", "sm90") or added:
        raise UnsupportedError(
            "one launch takes several layers in the Hopper form with scales of channels, without "
            "residual, gate, outliers and gated linear units, got scales of "
            f"{kernel.strategy}s in form {kernel.form!r} with {', '.join(added) or 'none of these'}"
            ": plan each layer separately"
        )
    if len(at.layers) > MOST_LAYERS:
        raise UnsupportedError(
            f"one launch takes at most {MOST_LAYERS} layers, got {len(at.layers)}: plan them in "
            "several launches"
        )


def _multiplied(at: ProductOperands, outliers: str) -> dict[str, tuple[Operand, str]]:
    """Return the matrices that are multiplied, and their storage types, by name."""
    given = {"a": (at.a, "int8"), "b": (at.b, "int8")}
    of_16 = {"a_16": (at.a_16, outliers), "b_16": (at.b_16, outliers)}
    return given | {name: (x, dtype) for name, (x, dtype) in of_16.items() if x is not None}


def _features(
    kernel: GemmKernel,
    at: ProductOperands,
    out_dtype: str,
    bias: str,
    activation: str,
    outliers: str,
) -> GemmFeatures:
    """Return the compile-time features, with the widest accesses that all operands allow."""
    n, halves = at.b.shape[0], 2 if activation in GLU else 1
    gate = at.gate and ("float32" if at.gate.itemsize == 4 else out_dtype)
    straddles = halves_straddle(n, kernel.strategy, activation)
    return GemmFeatures(
        out_dtype,
        min(_bytes_per_access(x) for x, _ in _multiplied(at, outliers).values()),
        _elements_per_access(at),
        bias,
        activation,
        outliers,
        at.residual is not None,
        gate or "",
        straddles,
        kernel.form == "sm90" and not straddles and all(
            _takes_neighbours(at, one, halves, bias) for one in at.layers
        ),
        bool(at.further),
        at.residual_below is not None,
    )  # fmt: skip


def _params(at: ProductOperands, features: GemmFeatures) -> dict[str, Any]:
    """Return the fields of GEMM_PARAMS, except the number of tiles that have one block each."""
    (m, k), n = at.a.shape, at.b.shape[0]
    params: dict[str, Any] = {
        "A": "a", "B": "b", "A_scale": "a_scales", "B_scale": "b_scales", "C": "c",
        "bias": "bias" if features.bias and not at.further else None,
        "A_stride": row_bytes(at.a), "B_stride": row_bytes(at.b),
        "A_scale_stride": at.a_scales.row_strides[0], "B_scale_stride": at.b_scales.row_strides[0],
        "C_stride": at.c.row_strides[0],
        "A_16": None, "B_16": None, "A_16_stride": 0, "B_16_stride": 0, "outliers": 0,
        "residual": None, "residual_stride": 0, "gate": None, "gate_stride": 0, "gate_rows": m,
        "m": m, "n": n // 2 if features.activation in GLU else n, "k": k,
    }  # fmt: skip
    if at.a_16 and at.b_16:
        params |= {
            "A_16": "a_16", "A_16_stride": row_bytes(at.a_16),
            "B_16": "b_16", "B_16_stride": row_bytes(at.b_16), "outliers": at.a_16.shape[1],
        }  # fmt: skip
    if at.residual:
        params |= {"residual": "residual", "residual_stride": at.residual.row_strides[-1]}
        if at.residual_below:
            params |= joint_rows(at.residual, at.residual_below, "residual_below")
    if at.gate:
        params |= {"gate": "gate", "gate_stride": at.gate.row_strides[0]}
        params["gate_rows"] = m // at.gate.shape[0]
    return params


def _maps(at: ProductOperands, features: GemmFeatures, tiles: GemmTiles) -> list[TensorMap]:
    """Describe the matrices that the copy engine reads; of layers, the first one's."""
    return [
        _map_of_weight(name, dtype, x, features, tiles)
        if name[0] == "b"
        else _map_of(name, dtype, x, 1, tiles.block_m)
        for name, (x, dtype) in _multiplied(at, features.outliers).items()
    ]


def _map_of_weight(
    name: str, dtype: str, x: Operand, features: GemmFeatures, tiles: GemmTiles
) -> TensorMap:
    halves = 2 if features.activation in GLU else 1
    if features.neighbours:
        return _map_of_neighbours(name, dtype, x, tiles.block_n // halves)
    return _map_of(name, dtype, x, halves, tiles.block_n // halves)


def _of_layers(at: ProductOperands, features: GemmFeatures, tiles: GemmTiles) -> tuple[Any, ...]:
    """Return what the kernel takes of several layers, and the maps of all weights but the first."""
    layers, most = at.layers, MOST_LAYERS
    empty = (most - len(layers)) * (None,)
    zeros = (most - len(layers)) * (0,)

    def buffers(name: str, given: Sequence[object]) -> tuple[str | None, ...]:
        names = (buffer_of(name, number) for number in range(len(layers)))
        return *(n if x is not None else None for n, x in zip(names, given, strict=True)), *empty

    first = [all_columns(at.columns[:number], tiles) for number in range(most)]
    fields = {
        "B_scale": buffers("b_scales", layers), "C": buffers("c", layers),
        "bias": buffers("bias", [one.bias for one in layers]),
        "B_scale_stride": (*(one.b_scales.row_strides[0] for one in layers), *zeros),
        "C_stride": (*(one.c.row_strides[0] for one in layers), *zeros),
        "n": (*at.columns, *zeros), "first": tuple(first),
    }  # fmt: skip
    maps = [
        _map_of_weight(buffer_of("b", number), "int8", one.b, features, tiles)
        for number, one in enumerate(layers[1:], start=1)
    ]
    return (LAYERS_PARAMS, fields), *maps, *maps[-1:] * (most - len(layers))


def _map_of(name: str, dtype: str, x: Operand, halves: int, rows: int) -> TensorMap:
    """Describe a matrix, copied `rows` rows of every half, or of the whole, at a time."""
    shape, (row, element) = (1, halves, x.shape[0] // halves, x.shape[1]), x.strides
    parts = Operand(shape, (0, shape[2] * row, row, element), x.itemsize, x.misalignment)
    found = tensor_map_of(name, dtype, parts, rows)
    return replace(found, box=(1, halves, *found.box[2:]))


def _map_of_neighbours(name: str, dtype: str, x: Operand, rows: int) -> TensorMap:
    """Describe a weight whose rows 8 t + 2 f + e of 32 are loaded as rows 8 f + 2 t + e.

    Strides of its axes do not grow from the fastest on: the driver takes that, seen on an H200.
    """
    row, row_count = row_bytes(x), 32
    shape = (x.shape[0] // row_count, 4, 4, 2, x.shape[1])
    strides = (row_count * row, 2 * row, 8 * row, row)  # of 32 rows, of f, of t, of e
    return TensorMap(
        name, dtype, shape, strides, (rows // row_count, *shape[1:4], 128 // x.itemsize)
    )


def _takes_neighbours(at: ProductOperands, layer: LayerOperands, halves: int, bias: str) -> bool:
    """Whether every array of a layer allows access to eight adjacent columns of C.

    False if there is a bias whose layout `at` does not give.
    """
    if bias and layer.bias is None and not at.further:
        return False
    columns = layer.b.shape[0] // halves
    beside = [*at.addends, *(x for x in (layer.c, at.gate, layer.bias) if x is not None)]
    if at.strategy == "channel":
        scales = layer.b_scales
        if scales.row_strides != (1,):
            return False
        beside.append(Operand((scales.shape[0],), (1,), scales.itemsize, scales.misalignment))
    if columns % 32 or layer.c.itemsize != 2:
        return False
    return all(x.allows(16 // x.itemsize) for x in beside)


def _elements_per_access(at: ProductOperands) -> int:
    """Return how many elements of a row of C are stored at a time."""
    together = [*at.addends, *(layer.c for layer in at.layers)]
    # Factors are read in pairs.
    return widest(*together) if at.gate is None or at.gate.allows(2) else 1


def _bytes_per_access(x: Operand) -> int:
    """Return how many bytes of every row can be read at a time, from its first byte on."""
    return math.gcd(16, x.misalignment, row_bytes(x), x.shape[1] * x.itemsize)
