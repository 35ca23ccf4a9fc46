"""Choose the kernel that multiplies INT8 codes: form and tiles are settled only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.contracts import check_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import HOPPER_BLOCKS, INT32_MAX
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.support import SUPPORTED, Support
from cupyattn.quant.activation import GLU, MOST_SPLITS
from cupyattn.quant.blocks import BLOCK_SIZE, MOST_CHANNEL_CODES

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
    GemmTiles(64, 64, num_warps=8, num_stages=12, splits=2),
    *(GemmTiles(64, 64, num_warps=8, num_stages=5, splits=s) for s in (2, 4)),
    *(GemmTiles(128, 128, num_warps=12, num_stages=6, splits=s) for s in (2, 4)),
)
#: Portable tiles whose k the blocks of a cluster share, on devices with clusters. Keys are the
#: largest number of rows, then the number of blocks.
_SHARED_TILES = {
    16: {4: GemmTiles(16, 128, num_warps=4, num_stages=6, splits=4)},
    32: {s: GemmTiles(32, 64, num_warps=4, num_stages=6, splits=s) for s in (2, 4)},
}
#: Operands that the copy engine brings to the Hopper form.
COPIED = ("a", "b", "a_16", "b_16")
#: The kernels by strategy, the groups that share a scale.
ENTRIES = {"block": "gemm_int8", "channel": "gemm_int8_channel"}
#: Largest number of rows of A for which blocks share tiles of 64 rows. Largest number for which the
#: portable form, with tiles of 16, is faster on Hopper, too. The second does not hold if there are
#: more than 16 rows and no room for pairs of blocks. Raced: experiments/results/gemm_few_rows.json.
FEW_ROWS, PORTABLE_ROWS = 64, 32
#: Least numbers of slices of a part. The first lets blocks share tiles of 128 rows, the second
#: lets more blocks than SMs share tiles of 64 rows. With fewer slices, merging costs more than it
#: saves (experiments/results/gemm_few_rows_512.json and gemm_few_rows_channel_512.json).
_LEAST_SLICES = 24
#: Model of a device for the choice of tiles. Number of thread blocks that run at a time, and the
#: same in clusters, which lie in groups of 8 SMs. Bytes of A and B that a block reads from the L2
#: cache while its tensor cores multiply 4096 pairs of codes.
_CLUSTERED_BLOCKS, _L2_BYTES = HOPPER_BLOCKS // 8 * 8, 40
#: Number of blocks up to which blocks that share a tile are faster with one SM each. More blocks
#: are faster two to an SM, if their clusters fit (experiments/results/gemm_few_rows.json and
#: gemm_few_rows_channel.json). A block alone on its SM has as many stages as fit.
_ONE_TO_AN_SM, _ALL_STAGES = 96, 12
#: Time of a cluster to start, synchronise and add up, in units of a slice's 4096 pairs: about 1 us.
_MEETING = 14
#: Time of a launch on the device, in the same units: about 3 us.
_LAUNCH = 42
#: Largest number of layers that one launch multiplies by the same codes.
MOST_LAYERS = 4
#: Time of whole waves in a kernel launched in clusters, relative to the same kernel without them
#: (experiments/results/gemm_tails.json).
_IN_CLUSTERS = 1.02


@dataclass(frozen=True)
class GemmKernel:
    """The kernel of a product.

    Parameters
    ----------
    strategy : {"block", "channel"}
        The groups that share a scale.
    form : {"portable", "sm90"}
    tiles : GemmTiles
    arch : str, optional
        Architecture to compile for; the device's own when None.
    note : str
        Why the Hopper form does not run, if it does not.
    """

    strategy: str
    form: str
    tiles: GemmTiles
    arch: str | None = None
    note: str = ""

    @property
    def entry(self) -> str:
        """Its name in the source."""
        return ENTRIES[self.strategy]

    @property
    def source(self) -> str:
        """Its file, below ``kernels_cu/``."""
        return _source(self.form, self.entry)


def settle_gemm(
    operands: Mapping[str, Operand],
    strategy: str = "block",
    *,
    activation: str = "",
    tiles: GemmTiles | None = None,
    arch: str | None = None,
    on_hopper_device: bool = False,
) -> GemmKernel:
    """Settle which form of a product runs, and in which tiles.

    Parameters
    ----------
    operands : mapping of str to Operand
        Layouts of the operands in `COPIED` that exist, with two axes each; others are ignored.
    strategy : {"block", "channel"}
        The groups that share a scale.
    activation : str
        If the halves of a gated linear unit do not end at blocks of scales, tiles have at most 128
        columns.
    tiles : GemmTiles, optional
        The caller's tiles; chosen by the sizes when omitted.
    arch : str, optional
        The caller's architecture. On ``"sm_90a"`` the Hopper form runs if it takes the operands.
    on_hopper_device : bool
        Whether the device is a Hopper GPU and neither `tiles` nor `arch` is given. The Hopper form
        and its tiles are then chosen.

    Returns
    -------
    GemmKernel

    Raises
    ------
    UnsupportedError
        If `tiles` belong to the Hopper form and it does not take the operands, or if a channel has
        so many codes that int32 would overflow.
    ValueError
        For `tiles` that the form does not take.
    """
    (m, k), n = operands["a"].shape, operands["b"].shape[0]
    if strategy == "channel":
        check_channel_codes(k)
    if on_hopper_device:
        arch, tiles = on_hopper(m, n, k)
    note = _hopper_support(operands).note if arch == "sm_90a" else ""
    form = "sm90" if arch == "sm_90a" and not note else "portable"
    if tiles is None:
        choices = PORTABLE_TILES if form == "portable" else HOPPER_TILES
        if halves_straddle(n, strategy, activation):
            # A third scale for each row does not fit the registers of 256 columns.
            choices = tuple(x for x in choices if x.block_n <= BLOCK_SIZE)
        tiles = choose_tiles(m, n, k, choices)
    elif note:
        raise UnsupportedError(f"tiles of the Hopper form do not go with the {note}")
    else:
        _check_form(tiles, form, ENTRIES[strategy])
    return GemmKernel(strategy, form, tiles, arch, note)


def settle_layers(
    kernels: Sequence[GemmKernel], m: int, n: tuple[int, ...], k: int
) -> GemmKernel | None:
    """Settle the kernel of one launch for layers of the same codes, which are alike otherwise.

    Parameters
    ----------
    kernels : sequence of GemmKernel
        The kernel of each layer by itself.
    m, k : int
        Rows of the codes, and codes of a row.
    n : tuple of int
        Columns of each layer.

    Returns
    -------
    GemmKernel or None
        None for separate launches: in the portable form, with scales of blocks, for more than
        `MOST_LAYERS`, and if they are faster by the model of `choose_tiles`.

    Examples
    --------
    >>> apart = GemmKernel("channel", "sm90", HOPPER_TILES[1], "sm_90a")
    >>> settle_layers([apart] * 3, 4608, (3072,) * 3, 3072).tiles == HOPPER_TILES[0]
    True
    """
    if {(one.strategy, one.form) for one in kernels} != {("channel", "sm90")}:
        return None
    tiles = choose_tiles(m, n, k, HOPPER_TILES)
    if len(n) > MOST_LAYERS or all_columns(n, tiles) > INT32_MAX:
        return None
    apart = sum(
        _time(m, columns, k, one.tiles) for one, columns in zip(kernels, n, strict=True)
    ) + _LAUNCH * (len(n) - 1)
    return replace(kernels[0], tiles=tiles) if _time(m, n, k, tiles) <= apart else None


def halves_straddle(rows: int, strategy: str, activation: str) -> bool:
    """Whether a tile of a gated linear unit may meet two blocks of scales in the second half.

    Parameters
    ----------
    rows : int
        Rows of the weight, both halves.
    strategy : {"block", "channel"}
    activation : str

    Examples
    --------
    >>> [halves_straddle(rows, "block", "swiglu") for rows in (512, 320)]
    [False, True]
    """
    return activation in GLU and strategy == "block" and rows // 2 % BLOCK_SIZE != 0


def tiles_alone(
    m: int, n: int | tuple[int, ...], tiles: GemmTiles, blocks: int | None = None
) -> int:
    """Return how many tiles of an (m, n) product have one block each; they come first.

    Parameters
    ----------
    m : int
    n : int or tuple of int
        Columns; of each layer of one launch.
    tiles : GemmTiles
    blocks : int, optional
        That a device runs at a time: `cupyattn.kernels.limits.HOPPER_BLOCKS` when omitted.

    Notes
    -----
    With `GemmTiles.tail_splits`: all but the last wave, if that wave leaves enough blocks idle.

    Examples
    --------
    >>> tiles_alone(4608, 3072, GemmTiles(128, 256, 12, 4, tail_splits=2))  # of 432
    396
    """
    count, at_a_time = tile_count(m, n, tiles), blocks_at_a_time(tiles, blocks)
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
    index = np.arange(tiles_alone(m, n, tiles, blocks), tile_count(m, n, tiles))
    m_blocks, n_blocks = -(-m // tiles.block_m), -(-n // tiles.block_n)
    # As gemm_tile of kernels_cu/prims/codes/gemm.cuh counts them.
    together = 16 if tiles.block_n > tiles.block_m else 12
    first = index // (together * n_blocks) * together
    here = np.minimum(together, m_blocks - first)
    rest = index % (together * n_blocks)
    found = np.zeros((m_blocks, n_blocks), np.bool_)
    found[first + rest % here, rest // here] = True
    return found.repeat(tiles.block_m, axis=0)[:m].repeat(tiles.block_n, axis=1)[:, :n]


def choose_tiles(
    m: int, n: int | tuple[int, ...], k: int, choices: tuple[GemmTiles, ...]
) -> GemmTiles:
    """Return the tiles that take the shortest time for an (m, n) product over k.

    Parameters
    ----------
    m, k : int
    n : int or tuple of int
        Columns; of each layer of one launch.
    choices : tuple of GemmTiles
        At least one without splits.

    Notes
    -----
    A model counts the time. Tiles run in waves, one on each SM. A slice takes the time of its
    products or of its loads, whichever is longer. If there are few tiles, each may be split among
    blocks; if there are many, only the last wave. Split tiles have fewer slices a block, and a
    merge. The choice, hence every bit of the result, depends only on the sizes of a product.

    Examples
    --------
    >>> choose_tiles(4096, 4096, 4096, PORTABLE_TILES).block_m
    128
    >>> choose_tiles(64, 4096, 4096, HOPPER_TILES)
    GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=5, splits=2, tail_splits=1)
    >>> choose_tiles(64, 3072, 3072, HOPPER_TILES).num_stages  # 96 blocks, an SM for each
    12
    >>> choose_tiles(128, 3072, 12_288, HOPPER_TILES).splits  # of 96 slices
    4
    >>> choose_tiles(4608, 3072, 3072, HOPPER_TILES).tail_splits
    2
    """
    slices = _slices(k)

    def fits(tiles: GemmTiles) -> bool:
        if tiles.tail_splits > 1:
            return tiles.tail_splits <= slices and tiles_alone(m, n, tiles) > 0
        if tiles.splits == 1:
            return True
        blocks = tile_count(m, n, tiles) * tiles.splits
        long = tiles.splits * _LEAST_SLICES <= slices
        if tiles.block_m > FEW_ROWS:
            return m > FEW_ROWS and long and blocks <= _CLUSTERED_BLOCKS
        most = _CLUSTERED_BLOCKS
        if tiles.num_stages == _ALL_STAGES:
            most = _ONE_TO_AN_SM
        elif tiles.splits == 2 and long:
            most = 2 * HOPPER_BLOCKS  # two to an SM
        return m <= FEW_ROWS and tiles.splits <= slices and blocks <= most

    return min(filter(fits, choices), key=lambda tiles: _time(m, n, k, tiles))


def _time(m: int, n: int | tuple[int, ...], k: int, tiles: GemmTiles) -> float:
    """Return the modelled time of a product, in units of a slice's 4096 pairs."""
    slices, alone = _slices(k), tiles_alone(m, n, tiles)
    shared = tile_count(m, n, tiles) - alone
    products = tiles.block_m * tiles.block_n / 4096
    slice_time = max(products, (tiles.block_m + tiles.block_n) / _L2_BYTES)
    part = -(-slices // tiles.cluster) * slice_time + _MEETING
    of_wave = _IN_CLUSTERS if tiles.cluster > 1 else 1.0
    whole_waves = -(-alone // blocks_at_a_time(tiles)) * slices * slice_time * of_wave
    blocks = shared * tiles.cluster
    if tiles.splits > 1:  # all run at once: see fits of choose_tiles
        return whole_waves + max(blocks / _CLUSTERED_BLOCKS, 1.0) * part
    return whole_waves + -(-blocks // blocks_at_a_time(tiles)) * part


def on_hopper(m: int, n: int, k: int) -> tuple[str | None, GemmTiles | None]:
    """Return architecture and tiles for a Hopper device, as far as sizes tell.

    Returns
    -------
    arch : str or None
        ``"sm_90a"`` if the Hopper form is faster.
    tiles : GemmTiles or None
        None for the tiles that `choose_tiles` chooses for the form.

    Examples
    --------
    >>> on_hopper(64, 4096, 4096), on_hopper(16, 4096, 4096)
    (('sm_90a', None), (None, None))
    >>> on_hopper(16, 1792, 7168)[1].splits, on_hopper(32, 12_288, 3072)
    (4, ('sm_90a', None))
    """
    tiles, slices = -(-n // 64), _slices(k)
    # Of tiles of 32 rows an SM has room for two blocks or three.
    most = HOPPER_BLOCKS if m <= 16 else HOPPER_BLOCKS * 3 // 2
    if m > PORTABLE_ROWS or (m > 16 and 2 * tiles > most):
        return "sm_90a", None
    for splits in (4, 2):
        if tiles * splits <= most and slices >= 4 * splits:
            return None, _SHARED_TILES[16 if m <= 16 else PORTABLE_ROWS].get(splits)
    return None, None


def _slices(k: int) -> int:
    """Slices of codes that share a scale."""
    return -(-k // BLOCK_SIZE)


def tile_count(m: int, n: int | tuple[int, ...], tiles: GemmTiles) -> int:
    """Return how many tiles an (m, n) product has, or layers of these columns."""
    return -(-m // tiles.block_m) * (all_columns(n, tiles) // tiles.block_n)


def all_columns(n: int | tuple[int, ...], tiles: GemmTiles) -> int:
    """Return the columns of all tiles beside each other: each layer begins with a tile.

    Examples
    --------
    >>> all_columns((300, 256), HOPPER_TILES[0])
    768
    """
    columns = n if isinstance(n, tuple) else (n,)
    return sum(-(-one // tiles.block_n) for one in columns) * tiles.block_n


def blocks_at_a_time(tiles: GemmTiles, blocks: int | None = None) -> int:
    """Blocks that a device runs at a time: whole clusters of them, at least one."""
    clusters = (HOPPER_BLOCKS if blocks is None else blocks) // tiles.cluster
    return max(clusters, 1) * tiles.cluster


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
        Codes of a row. Every block that shares a tile needs at least one slice of them.
    arch : str or None
        ``"sm_90a"`` if the tiles belong to the Hopper form.
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
    spec = ModuleSpec.of(_source(form, entry), tiles.defines())
    check_tiles(spec, tiles, f"int8_gemm ({form})")


def _hopper_support(operands: Mapping[str, Operand]) -> Support:
    """Say whether the Hopper form takes these operands."""
    for name, x in ((name, operands[name]) for name in COPIED if name in operands):
        if 0 in x.shape:
            return Support(False, f"{name} has nothing for the copy engine")
        if x.misalignment or x.row_strides[0] < 0 or row_bytes(x) % 16:
            return Support(
                False,
                "the copy engine needs addresses and rows at multiples of 16 bytes, "
                f"got {name} at 16 n + {x.misalignment} with rows of {row_bytes(x)} bytes",
            )
    return SUPPORTED


def _source(form: str, entry: str) -> str:
    folder = "" if form == "portable" else f"{form}/"
    return f"linear/{folder}{entry}.cu"


def row_bytes(x: Operand) -> int:
    """Return the bytes from one row of a matrix to the next."""
    return x.row_strides[0] * x.itemsize
