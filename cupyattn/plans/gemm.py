"""Which kernel multiplies INT8 codes, with which tiles: pure data."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.contracts import check_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import DTYPES, without_defaults
from cupyattn.kernels.limits import INT32_MAX
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.assemble import HOPPER_BLOCKS, tensor_map_of
from cupyattn.plans.records import Launch, TensorMap, Workspace, described
from cupyattn.plans.structs import GEMM_PARAMS
from cupyattn.problem.support import SUPPORTED, Support
from cupyattn.quant.activation import ACTIVATIONS, GLU, MOST_SPLITS
from cupyattn.quant.blocks import BLOCK_SIZE, MOST_CHANNEL_CODES, strategy_of

_log = logging.getLogger("cupyattn")

#: Tiles to choose from, by form, the largest first.
PORTABLE_TILES = (
    GemmTiles(block_m=128, block_n=128, num_warps=8, num_stages=3),
    GemmTiles(block_m=64, block_n=128, num_warps=4, num_stages=4),
    GemmTiles(block_m=64, block_n=64, num_warps=4, num_stages=5),
    GemmTiles(block_m=16, block_n=64, num_warps=4, num_stages=8),
    GemmTiles(block_m=16, block_n=32, num_warps=2, num_stages=8),
)
HOPPER_TILES = (
    GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=4),
    GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=4, tail_splits=2),
    GemmTiles(block_m=128, block_n=128, num_warps=12, num_stages=6),
    GemmTiles(block_m=64, block_n=128, num_warps=8, num_stages=8),
    GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=12),
    *(GemmTiles(64, 64, num_warps=8, num_stages=5, splits=s) for s in (2, 4)),
)
#: Portable tiles whose k the blocks of a cluster share, on devices that have clusters: by the most
#: rows, then by how many blocks.
_SHARED_TILES = {
    16: {4: GemmTiles(16, 128, num_warps=4, num_stages=6, splits=4)},
    32: {s: GemmTiles(32, 64, num_warps=4, num_stages=6, splits=s) for s in (2, 4)},
}
#: The kernels, by what shares a scale.
ENTRIES = {"block": "gemm_int8", "channel": "gemm_int8_channel"}
#: Rows of A up to which tiles are shared; and up to which the portable form, with tiles of 16, is
#: the faster on Hopper, too, unless there are more than 16 and so many tiles of 128 columns.
#: Raced: experiments/results/gemm_few_rows.json.
FEW_ROWS, PORTABLE_ROWS, _FULL = 64, 32, 64
#: Thread blocks that a device runs at a time, about, and those of them in clusters, which lie in
#: groups of 8 SMs; and bytes of A and B that one of them gets from the L2 cache while its tensor
#: cores multiply 4096 pairs of codes. Tiles are chosen by these.
_CLUSTERED_BLOCKS, _L2_BYTES = HOPPER_BLOCKS // 8 * 8, 40
#: What a cluster takes to begin, meet and add up, in times of 4096 pairs for a slice: about 1 us.
_MEETING = 14
#: How much longer whole waves take of a kernel that is launched in clusters, which they do not need
#: (experiments/results/gemm_tails.json).
_IN_CLUSTERS = 1.02


@dataclass(frozen=True)
class GemmFeatures:
    """What one compiled product does beside multiplying.

    Parameters
    ----------
    out_dtype : {"float16", "bfloat16", "float32"}
        Storage type of C.
    access_bytes : {1, 2, 4, 8, 16}
        Bytes per access to A and B.
    vec : {1, 2, 4, 8}
        Elements of C per access.
    bias : {"", "float16", "bfloat16", "float32"}
        Storage type of what is added to every row; "": nothing.
    activation : {"", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}
    outliers : {"", "float16", "bfloat16"}
        Storage type of columns that are no codes; "": there are none.
    residual, gate : bool
        Whether the result is added to a matrix, and multiplied by a factor for each column before.
    straddles : bool
        Whether a tile of a gated linear unit may meet two blocks of scales in the second half.
    """

    out_dtype: str
    access_bytes: int
    vec: int
    bias: str = ""
    activation: str = ""
    outliers: str = ""
    residual: bool = False
    gate: bool = False
    straddles: bool = False

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
            "CFG_RESIDUAL": int(self.residual), "CFG_GATE": int(self.gate),
            **({"CFG_GLU": 1 + self.straddles} if self.activation in GLU else {}),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launches:
    """A call turned into launches, one after the other: what an executor runs."""

    launches: tuple[Launch, ...] = ()
    workspace: tuple[Workspace, ...] = ()

    @functools.cached_property
    def on_devices(self) -> dict[Any, Any]:
        """What an executor keeps of this plan, by device."""
        return {}


@dataclass(frozen=True, kw_only=True)
class OneLaunch(Launches):
    """A call turned into a launch, or none.

    `features` is what was compiled in.
    """

    features: GemmFeatures


@dataclass(frozen=True, kw_only=True)
class GemmPlan(OneLaunch):
    """A product turned into a launch, as `cupyattn.plans.records.Plan` is of attention.

    `alone` and `shared` are how many tiles have a block of their own and how many a cluster shares.
    `note` says why the Hopper form was left out, where it was.
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
        return described(
            self, f"int8_gemm ({self.form})", self.tiles, self.features, blocks=taken
        )


def tiles_alone(m: int, n: int, tiles: GemmTiles, blocks: int | None = None) -> int:
    """Return how many tiles of an (m, n) product, the first ones, have a block of their own.

    Parameters
    ----------
    m, n : int
    tiles : GemmTiles
    blocks : int, optional
        That a device runs at a time: `cupyattn.plans.assemble.HOPPER_BLOCKS` when omitted.

    Notes
    -----
    With `GemmTiles.tail_splits` all but those of the last wave, if that leaves enough blocks idle.

    Examples
    --------
    >>> tiles_alone(4608, 3072, GemmTiles(128, 256, 12, 4, tail_splits=2))  # of 432
    396
    """
    count, at_a_time = _count(m, n, tiles), _at_a_time(tiles, blocks)
    if tiles.splits > 1:
        return 0
    rest = count % at_a_time
    return count if tiles.cluster == 1 or rest * tiles.cluster > at_a_time else count - rest


def where_shared(m: int, n: int, tiles: GemmTiles, blocks: int | None = None) -> Any:
    """Return which elements of an (m, n) product belong to tiles that blocks share.

    Parameters
    ----------
    m, n, tiles, blocks
        As for `tiles_alone`.

    Returns
    -------
    array, (m, n), bool

    Examples
    --------
    >>> tiles = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=2)
    >>> where_shared(130, 150, tiles, blocks=4)[::64, ::64].astype(int).tolist()  # down 3 rows
    [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    """
    index = np.arange(tiles_alone(m, n, tiles, blocks), _count(m, n, tiles))
    m_blocks, n_blocks = -(-m // tiles.block_m), -(-n // tiles.block_n)
    # As gemm_tile of kernels_cu/prims/codes/gemm.cuh counts them.
    together = 16 if tiles.block_n > tiles.block_m else 12
    first = index // (together * n_blocks) * together
    here = np.minimum(together, m_blocks - first)
    rest = index % (together * n_blocks)
    found = np.zeros((m_blocks, n_blocks), np.bool_)
    found[first + rest % here, rest // here] = True
    return found.repeat(tiles.block_m, axis=0)[:m].repeat(tiles.block_n, axis=1)[:, :n]


def choose_tiles(m: int, n: int, k: int, choices: tuple[GemmTiles, ...]) -> GemmTiles:
    """Return the tiles that take the shortest time for an (m, n) product over k.

    Parameters
    ----------
    m, n, k : int
    choices : tuple of GemmTiles
        At least one without splits.

    Notes
    -----
    By count: tiles are worked off in waves, one to each SM, and a slice of a tile takes as long as
    its products or as its operands take to arrive, whichever is longer. With few rows a tile may be
    split, with many those of the last wave: more blocks with fewer slices each, which then meet. So
    the choice, and with it every bit of the result, depends on the sizes of a product alone.

    Examples
    --------
    >>> choose_tiles(4096, 4096, 4096, PORTABLE_TILES).block_m
    128
    >>> choose_tiles(64, 4096, 4096, HOPPER_TILES)
    GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=5, splits=2, tail_splits=1)
    >>> choose_tiles(4608, 3072, 3072, HOPPER_TILES).tail_splits
    2
    """
    slices = _slices(k)

    def time(tiles: GemmTiles) -> float:
        alone = tiles_alone(m, n, tiles)
        shared = _count(m, n, tiles) - alone
        products = tiles.block_m * tiles.block_n / 4096
        slice_time = max(products, (tiles.block_m + tiles.block_n) / _L2_BYTES)
        part = -(-slices // tiles.cluster) * slice_time + _MEETING
        of_wave = _IN_CLUSTERS if tiles.cluster > 1 else 1.0
        clustered = _CLUSTERED_BLOCKS if tiles.splits > 1 else _at_a_time(tiles)
        return (
            -(-alone // _at_a_time(tiles)) * slices * slice_time * of_wave
            + -(-shared * tiles.cluster // clustered) * part
        )

    most = max(slices, 1) if m <= FEW_ROWS else 1

    def fits(tiles: GemmTiles) -> bool:
        if tiles.tail_splits > 1:
            return tiles.tail_splits <= slices and tiles_alone(m, n, tiles) > 0
        return tiles.splits <= most

    return min(filter(fits, choices), key=time)


def on_hopper(m: int, n: int, k: int) -> tuple[str | None, GemmTiles | None]:
    """Return architecture and tiles for a Hopper device, as far as sizes tell.

    Returns
    -------
    arch : str or None
        ``"sm_90a"``: the Hopper form is the faster one.
    tiles : GemmTiles or None
        None: those that `choose_tiles` finds for the form.

    Examples
    --------
    >>> on_hopper(64, 4096, 4096), on_hopper(16, 4096, 4096)
    (('sm_90a', None), (None, None))
    >>> on_hopper(16, 1792, 7168)[1].splits, on_hopper(32, 12_288, 3072)
    (4, ('sm_90a', None))
    """
    if m > PORTABLE_ROWS or (m > 16 and -(-n // 128) >= _FULL):
        return "sm_90a", None
    tiles, slices = -(-n // 64), _slices(k)
    for splits in (4, 2):
        if tiles * splits <= HOPPER_BLOCKS and slices >= 4 * splits:
            return None, _SHARED_TILES[16 if m <= 16 else PORTABLE_ROWS].get(splits)
    return None, None


def _slices(k: int) -> int:
    """Slices of codes that share a scale."""
    return -(-k // BLOCK_SIZE)


def _count(m: int, n: int, tiles: GemmTiles) -> int:
    return -(-m // tiles.block_m) * -(-n // tiles.block_n)


def _at_a_time(tiles: GemmTiles, blocks: int | None = None) -> int:
    """Blocks that a device runs at a time: whole clusters of them, at least one."""
    clusters = (HOPPER_BLOCKS if blocks is None else blocks) // tiles.cluster
    return max(clusters, 1) * tiles.cluster


@dataclass(frozen=True)
class ProductOperands:
    """Where codes, scales and result lie: the buffers of these names when a plan runs.

    All have two axes, the last one contiguous. `residual` (m, n) and `gate` (groups of rows, n) are
    of the type of c, where there are any.
    """

    a: Operand
    a_scales: Operand
    b: Operand
    b_scales: Operand
    c: Operand
    residual: Operand | None = None
    gate: Operand | None = None

    @property
    def strategy(self) -> str:
        """What shares a scale: one of `cupyattn.quant.blocks.STRATEGIES`."""
        return strategy_of(self.a, self.a_scales, self.b, self.b_scales)


@dataclass(frozen=True)
class OutlierOperands:
    """Where columns in 16 bits lie that are multiplied beside the codes.

    Parameters
    ----------
    a_16, b_16 : Operand
        The buffers of these names.
    dtype : {"float16", "bfloat16"}
        Their storage type.
    """

    a_16: Operand
    b_16: Operand
    dtype: str


@functools.lru_cache(maxsize=1024)
def plan_gemm(
    at: ProductOperands,
    out_dtype: str,
    *,
    bias: str = "",
    activation: str = "",
    outliers: OutlierOperands | None = None,
    tiles: GemmTiles | None = None,
    arch: str | None = None,
    blocks: int | None = None,
) -> GemmPlan:
    """Plan a product.

    Parameters
    ----------
    at : ProductOperands
    out_dtype : {"float16", "bfloat16", "float32"}
        Storage type of c.
    bias : {"", "float16", "bfloat16", "float32"}
        Storage type of the buffer ``"bias"``, contiguous; "": there is none.
    activation : {"", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}
    outliers : OutlierOperands, optional
    tiles : GemmTiles, optional
        Chosen by `choose_tiles` when omitted.
    arch : str, optional
        Architecture that it will run on: on ``"sm_90a"`` the Hopper form runs where it takes the
        operands; `GemmPlan.note` says why where it does not.
    blocks : int, optional
        Of the Hopper form, that a device runs at a time: `cupyattn.plans.assemble.HOPPER_BLOCKS`
        when omitted.

    Returns
    -------
    GemmPlan
        Without launches where c is empty.

    Raises
    ------
    UnsupportedError
        For more tiles than a grid has blocks, for `tiles` of the Hopper form and operands that it
        does not take, and for more codes of a channel than int32 sums.
    """
    (m, k), n = at.a.shape, at.b.shape[0]
    strategy = at.strategy
    if strategy == "channel":
        check_channel_codes(k)
    operands = {"a": (at.a, "int8"), "b": (at.b, "int8")}
    if outliers is not None:
        operands["a_16"] = outliers.a_16, outliers.dtype
        operands["b_16"] = outliers.b_16, outliers.dtype
    note = _hopper_support(operands).note if arch == "sm_90a" else ""
    form = "sm90" if arch == "sm_90a" and not note else "portable"
    if note and tiles is not None:
        raise UnsupportedError(f"tiles of the Hopper form do not go with the {note}")
    if note:
        _log.info("int8_gemm: %s", note)
    entry = ENTRIES[strategy]
    straddles = activation in GLU and strategy == "block" and n // 2 % BLOCK_SIZE != 0
    if tiles is not None:
        _check_form(tiles, form, entry)
    if tiles is None:
        choices = PORTABLE_TILES if form == "portable" else HOPPER_TILES
        if straddles:  # a third scale of a row is more than the registers of 256 columns hold
            choices = tuple(x for x in choices if x.block_n <= BLOCK_SIZE)
        tiles = choose_tiles(m, n, k, choices)
    features = GemmFeatures(
        out_dtype,
        min(_bytes_per_access(x) for x, _ in operands.values()),
        _elements_per_access(at),
        bias,
        activation,
        outliers.dtype if outliers else "",
        at.residual is not None,
        at.gate is not None,
        straddles,
    )
    halves = 2 if activation in GLU else 1
    if m * n == 0:
        return GemmPlan(features=features, form=form, tiles=tiles, note=note)
    params: dict[str, Any] = {
        "A": "a", "B": "b", "A_scale": "a_scales", "B_scale": "b_scales", "C": "c",
        "bias": "bias" if bias else None,
        "A_16": "a_16" if outliers else None, "B_16": "b_16" if outliers else None,
        "A_stride": _row_bytes(at.a), "B_stride": _row_bytes(at.b),
        "A_scale_stride": at.a_scales.row_strides[0], "B_scale_stride": at.b_scales.row_strides[0],
        "C_stride": at.c.row_strides[0],
        "A_16_stride": _row_bytes(outliers.a_16) if outliers else 0,
        "B_16_stride": _row_bytes(outliers.b_16) if outliers else 0,
        "residual": "residual" if at.residual else None, "gate": "gate" if at.gate else None,
        "residual_stride": at.residual.row_strides[0] if at.residual else 0,
        "gate_stride": at.gate.row_strides[0] if at.gate else 0,
        "gate_rows": m // at.gate.shape[0] if at.gate else m,
        "m": m, "n": n // halves, "k": k, "outliers": outliers.a_16.shape[1] if outliers else 0,
    }  # fmt: skip
    alone = tiles_alone(m, n, tiles, blocks)
    shared = _count(m, n, tiles) - alone
    params["alone"] = alone
    grid = alone + shared * tiles.cluster
    # NOTE: a block that stays goes on to a part past the last, whose number is an int as well.
    if grid > INT32_MAX - HOPPER_BLOCKS:
        raise UnsupportedError(f"a product of {m} x {n} takes {grid} tiles: split its rows")
    defines = {**tiles.defines(), **features.defines()}
    folder = "" if form == "portable" else f"{form}/"
    spec = ModuleSpec(f"linear/{folder}{entry}.cu", tuple(sorted(defines.items())))
    structs: tuple[tuple[np.dtype[Any], dict[str, Any]] | TensorMap, ...]
    structs = ((GEMM_PARAMS, params),)
    if form == "sm90":
        rows = {"a": (1, tiles.block_m), "b": (halves, tiles.block_n // halves)}
        maps = [_map_of(name, dtype, x, *rows[name[0]]) for name, (x, dtype) in operands.items()]
        # In blocks without outliers their maps are not looked at, and say something that holds.
        structs += tuple(maps if outliers or strategy == "channel" else maps * 2)
        grid = min(grid, _at_a_time(tiles, blocks)) if tiles.splits == 1 else grid
    launch = Launch(spec, entry, grid, tiles.num_threads, True, structs)
    plan = GemmPlan(
        features=features, launches=(launch,), form=form, tiles=tiles, alone=alone, shared=shared,
        note=note,
    )  # fmt: skip
    _log.debug("%s", plan)
    return plan


def check_channel_codes(k: int) -> None:
    """Raise UnsupportedError for more codes that share a scale than int32 sums."""
    if k > MOST_CHANNEL_CODES:
        raise UnsupportedError(
            f"int32 sums at most {MOST_CHANNEL_CODES} products of codes that share a scale, got "
            f"k={k}: quantise in blocks, with strategy='block'"
        )


def check_tiles_of(tiles: GemmTiles, k: int, arch: str | None, strategy: str = "block") -> None:
    """Raise ValueError unless a caller's tiles suit the kernel and every block has work.

    Parameters
    ----------
    tiles : GemmTiles
    k : int
        Codes of a row. Every block that shares a tile needs a slice of them.
    arch : str or None
        On ``"sm_90a"`` the tiles are those of the Hopper form.
    strategy : {"block", "channel"}
    """
    _check_form(tiles, "sm90" if arch == "sm_90a" else "portable", ENTRIES[strategy])
    most = max(min(_slices(k), MOST_SPLITS), 1)
    if tiles.cluster > most:
        name = "splits" if tiles.splits > 1 else "tail_splits"
        raise ValueError(
            f"tiles.{name} must be 1 to {most}: at most {MOST_SPLITS}, and one for every "
            f"{BLOCK_SIZE} codes of k={k}, got {tiles.cluster}"
        )


def _check_form(tiles: GemmTiles, form: str, entry: str) -> None:
    """Raise unless a kernel's form, ``"portable"`` or ``"sm90"``, takes tiles."""
    if form == "portable" and tiles.tail_splits > 1:
        raise UnsupportedError(
            "tiles.tail_splits must be 1 in the portable form, whose blocks take a tile each, got "
            f'{tiles.tail_splits}: use arch="sm_90a", or tiles.splits'
        )
    folder = "" if form == "portable" else f"{form}/"
    spec = ModuleSpec(f"linear/{folder}{entry}.cu", tuple(sorted(tiles.defines().items())))
    check_tiles(spec, tiles, f"int8_gemm ({form})")


def _hopper_support(operands: dict[str, tuple[Operand, str]]) -> Support:
    """Say whether the Hopper form takes these operands."""
    for name, (x, _) in operands.items():
        if 0 in x.shape:
            return Support(False, f"{name} has nothing for the copy engine")
        if x.misalignment or x.row_strides[0] < 0 or _row_bytes(x) % 16:
            return Support(
                False,
                "the copy engine needs addresses and rows at multiples of 16 bytes, "
                f"got {name} at 16 n + {x.misalignment} with rows of {_row_bytes(x)} bytes",
            )
    return SUPPORTED


def _map_of(name: str, dtype: str, x: Operand, halves: int, rows: int) -> TensorMap:
    """Describe a matrix, copied `rows` rows of every half, or of the whole, at a time."""
    shape, (row, element) = (1, halves, x.shape[0] // halves, x.shape[1]), x.strides
    parts = Operand(shape, (0, shape[2] * row, row, element), x.itemsize, x.misalignment)
    found = tensor_map_of(name, dtype, parts, rows)
    return replace(found, box=(1, halves, *found.box[2:]))


def _row_bytes(x: Operand) -> int:
    return x.row_strides[0] * x.itemsize


def _elements_per_access(at: ProductOperands) -> int:
    """Return how many elements of a row of C are stored at a time.

    More than one means that scales of columns are read in pairs, too, where columns have scales.
    """
    scales = at.b_scales
    paired = scales.row_strides[:1] == (1,) and scales.misalignment % 8 == 0
    if at.strategy == "channel" and not paired:
        return 1
    together = [x for x in (at.c, at.residual, at.gate) if x is not None]
    return max(width for width in (1, 2, 4, 8) if all(x.allows(width) for x in together))


def _bytes_per_access(x: Operand) -> int:
    """Return how many bytes of every row can be read at a time, from its first byte on."""
    return math.gcd(16, x.misalignment, _row_bytes(x), x.shape[1] * x.itemsize)
