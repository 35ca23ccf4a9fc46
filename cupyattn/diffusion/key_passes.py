"""Plan the kernels that find the kept keys and gather them: pure data."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import MAX_LENGTH, check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.assemble import LOG2E
from cupyattn.plans.gemm import Launches
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import (
    CLUSTER_IMPORTANCE_PARAMS,
    GATHER_PARAMS,
    IMPORTANCE_PARAMS,
    LARGEST_PARAMS,
)

#: Types and head sizes of the kernels of importance.
IMPORTANCE_DTYPES, MOST_HEAD_DIM = ("float16", "bfloat16"), 256
#: Query rows of a chunk; tiles of 128 keys fit up to this head size, beyond it 64.
_CHUNK_ROWS, _WIDE_HEAD_DIM = 32, 128
#: Thread blocks that a launch is to have, where there are keys enough: some for each place of a
#: device. A split has at least so many tiles, and a block merges the rows of at most so many.
_WANTED_BLOCKS, _LEAST_TILES, _MOST_SPLITS = 4096, 4, 32
#: Keys whose scores a warp of a cluster holds, and blocks of a cluster, which all devices that have
#: clusters run.
_WARP_KEYS, _MOST_BLOCKS = 64, 8
#: Warps of a block while the cluster may still grow: two such blocks share a multiprocessor. Beyond
#: that at most so many, by head size: their rings of keys fill its shared memory.
_PAIRED_WARPS, _MOST_WARPS, _MOST_WIDE_WARPS = 8, 16, 8
#: Largest number of heads that a cluster takes in turn, so that keys of the next head arrive during
#: the current one. Least number of blocks of a launch: four times as many as run at a time.
_MOST_TURNS, _WAVES_OF_BLOCKS = 4, 1024
#: Number of warps of a block that selects the largest keys, and of a block that gathers. Number of
#: accesses of an operand that a gathering thread has in flight.
_SELECT_WARPS, _GATHER_WARPS, _IN_FLIGHT = 16, 4, 4


def sampled_rows(len_q: int, rows: int) -> range:
    """Return which query rows stand for all: at most `rows`, at even distances.

    Examples
    --------
    >>> list(sampled_rows(10, 4)), list(sampled_rows(2, 32))
    ([1, 4, 7], [0, 1])
    """
    step = -(-len_q // rows)
    return range((step - 1) // 2, len_q, step)


def importance_tiles(head_dim: int) -> Tiles:
    """Return the sizes of the kernels of importance."""
    block_kv = 128 if head_dim <= _WIDE_HEAD_DIM else 64
    return Tiles(block_q=_CHUNK_ROWS, block_kv=block_kv, num_warps=4, num_stages=2)


def reads_keys_once(k: Operand, arch: str | None) -> bool:
    """Whether a cluster of thread blocks holds the keys of a head, and importance reads them once.

    It does on the architecture ``"sm_90a"``, for up to 8,192 keys (head_dim beyond 128: 4,096).
    Elsewhere two kernels read them, one after the other.
    """
    most = _MOST_WARPS if k.shape[3] <= _WIDE_HEAD_DIM else _MOST_WIDE_WARPS
    return arch == "sm_90a" and k.shape[2] <= _MOST_BLOCKS * most * _WARP_KEYS


def cluster_tiles(len_kv: int, head_dim: int) -> tuple[Tiles, int]:
    """Return the sizes of the kernel that reads keys once, and the thread blocks of a cluster.

    Examples
    --------
    >>> [(t.num_warps, blocks) for t, blocks in (cluster_tiles(n, 128) for n in (77, 4096, 4608))]
    [(2, 1), (8, 8), (9, 8)]
    """
    wanted = -(-len_kv // (_PAIRED_WARPS * _WARP_KEYS))
    blocks = min(_MOST_BLOCKS, 1 << (wanted - 1).bit_length())
    warps = -(-len_kv // (blocks * _WARP_KEYS))
    stages = 4 if _WIDE_HEAD_DIM // 4 < head_dim <= _WIDE_HEAD_DIM // 2 else 3
    return Tiles(_CHUNK_ROWS, warps * _WARP_KEYS, warps, stages), blocks


def row_states_shape(k: Operand, group: int, rows: int) -> tuple[int, ...]:
    """Return the shape of the buffers ``"row_M"`` and ``"row_l"`` of `plan_key_importance`."""
    splits, _ = _splits(k)
    chunks = group * -(-rows // _CHUNK_ROWS)
    return (k.shape[0] * k.shape[1], splits, chunks, _CHUNK_ROWS)


def key_sums_shape(k: Operand) -> tuple[int, ...]:
    """Return the shape of the buffer ``"partial_sum"`` of `plan_key_importance`."""
    batch, heads_kv, len_kv, head_dim = k.shape
    return (batch, heads_kv, cluster_tiles(len_kv, head_dim)[1], head_dim)


def _splits(k: Operand) -> tuple[int, int]:
    """Return how many blocks share the keys of a head, and how many keys one has at most."""
    batch, heads_kv, len_kv, head_dim = k.shape
    block_kv = importance_tiles(head_dim).block_kv
    tiles = -(-len_kv // block_kv)
    wanted = -(-_WANTED_BLOCKS // (batch * heads_kv))
    splits = min(wanted, _MOST_SPLITS, -(-tiles // _LEAST_TILES))
    keys = -(-tiles // splits) * block_kv
    return -(-len_kv // keys), keys


def _spec(source: str, tiles: Tiles, features: Features, **more: int) -> ModuleSpec:
    return ModuleSpec.of(source, tiles.defines(), features.defines(), more)


def _check_length(len_kv: int) -> None:
    if len_kv > MAX_LENGTH:
        raise UnsupportedError(f"{len_kv} keys exceed 2^30: attend to parts of them")


@functools.lru_cache(maxsize=1024)
def plan_key_importance(
    q: Operand,
    k: Operand,
    dtype: str,
    scale: float,
    sampled: range,
    once: bool = False,
    key_sums: bool = False,
) -> Launches:
    """Plan the importance of keys.

    One launch where keys are read once; otherwise the row states of parts of the keys, then the
    sums of probabilities over rows.

    Parameters
    ----------
    q, k : Operand
        (batch, heads, length, head_dim), contiguous last axis, none of them empty; the buffers
        ``"q"`` and ``"k"``.
    dtype : {"float16", "bfloat16"}
        Their storage type.
    scale : float
        Softmax scale.
    sampled : range
        Rows of q to look at.
    once : bool
        Clusters read the keys, once: as `reads_keys_once` says of k and the architecture.
    key_sums : bool
        The sums of the keys of each block of a cluster are wanted too, where keys are read once.

    Returns
    -------
    Launches
        They name the buffer ``"importance"``, (batch, heads_kv, len_kv), too, where there are
        two, ``"row_M"`` and ``"row_l"``, `row_states_shape`, and with `key_sums`
        ``"partial_sum"``, `key_sums_shape`, all of float32.

    Raises
    ------
    UnsupportedError
        For more keys or blocks than the kernels count.
    """
    batch, heads_kv, len_kv, head_dim = k.shape
    _check_length(len_kv)
    group, rows = q.shape[1] // heads_kv, len(sampled)
    features = Features(dtype, head_dim, vec=widest(q, k))
    params: dict[str, Any] = {
        "Q": "q", "K": "k", "importance": "importance", "Q_stride": q.row_strides,
        "K_stride": k.row_strides, "heads_kv": heads_kv, "group": group,
        "first_row": sampled.start, "row_step": sampled.step, "rows": rows, "len_kv": len_kv,
        "scale_log2": scale * LOG2E, "share": 1 / (group * rows),
    }  # fmt: skip
    if once:
        params["partial_sum"] = "partial_sum" if key_sums else None
        return _one_pass(batch * heads_kv, features, params, key_sums)
    splits, split_keys = _splits(k)
    _, _, chunks, _ = row_states_shape(k, group, rows)
    tiles = importance_tiles(head_dim)
    spec = _spec("pruning/key_importance.cu", tiles, features)
    params |= {"row_M": "row_M", "row_l": "row_l", "splits": splits, "split_keys": split_keys}
    structs = ((IMPORTANCE_PARAMS, params),)
    blocks = check_grid("key_importance", batch * heads_kv, splits)
    grids = {
        "row_statistics": check_grid("row_statistics", blocks, chunks),
        "key_importance": blocks,
    }
    return Launches(
        launches=tuple(
            Launch(spec, entry, grid, tiles.num_threads, True, structs)
            for entry, grid in grids.items()
        )
    )


def _one_pass(heads: int, features: Features, params: dict[str, Any], key_sums: bool) -> Launches:
    """Return the launch of clusters that read the keys of so many heads once."""
    tiles, blocks = cluster_tiles(params["len_kv"], features.head_dim)
    more = {"CFG_SPLITS": blocks, **({"CFG_KEY_SUMS": 1} if key_sums else {})}
    spec = _spec("pruning/sm90/key_importance.cu", tiles, features, **more)
    check_grid("key_importance", heads, blocks)
    turns = min(_MOST_TURNS, max(1, heads * blocks // _WAVES_OF_BLOCKS))
    grid = -(-heads // turns) * blocks
    structs = ((CLUSTER_IMPORTANCE_PARAMS, {**params, "heads": heads, "turns": turns}),)
    return Launches(
        launches=(Launch(spec, "key_importance", grid, tiles.num_threads, True, structs),)
    )


@functools.lru_cache(maxsize=1024)
def plan_compact(k: Operand | None, v: Operand, dtype: str, count: int) -> Launches:
    """Plan the choice of keys, and that rows of K and V move together.

    Parameters
    ----------
    k, v : Operand
        (batch, heads_kv, len_kv, head_dim), of one shape, contiguous last axis, none of them empty;
        the buffers ``"k"`` and ``"v"``. Without k its rows stay where they are.
    dtype : {"float16", "bfloat16", "float32"}
        Their storage type.
    count : int
        1 to len_kv.

    Returns
    -------
    Launches
        They name the buffers ``"importance"``, float32, and ``"kept"``, bool, (batch, heads_kv,
        len_kv), ``"places"``, int32, (batch, heads_kv, count), ``"kept_k"`` and ``"kept_v"``,
        (batch, heads_kv, count, head_dim), too, all contiguous.

    Raises
    ------
    UnsupportedError
        For more keys or blocks than the kernels count.
    """
    batch, heads_kv, len_kv, head_dim = v.shape
    _check_length(len_kv)
    choice: dict[str, Any] = {
        "importance": "importance", "kept": "kept", "places": "places", "len_kv": len_kv,
        "count": count,
    }  # fmt: skip
    plain = Tiles(block_q=1, block_kv=1, num_warps=_SELECT_WARPS)
    largest = _spec("pruning/largest_keys.cu", plain, Features("float32", 1))
    gathered: dict[str, Any] = {
        "K": "k" if k else None, "V": "v", "kept_K": "kept_k" if k else None, "kept_V": "kept_v",
        "places": "places", "K_stride": (k or v).row_strides, "V_stride": v.row_strides,
        "heads_kv": heads_kv, "count": count,
    }  # fmt: skip
    vec = widest(k or v, v)
    accesses = head_dim // vec
    lanes = min(32, 1 << (accesses - 1).bit_length())  # of a row, as in gather_rows.cu
    passes = max(1, _IN_FLIGHT // -(-accesses // lanes))
    tiles = Tiles(block_q=passes * _GATHER_WARPS * 32 // lanes, block_kv=1, num_warps=_GATHER_WARPS)
    gather = _spec("pruning/gather_rows.cu", tiles, Features(dtype, head_dim, vec=vec))
    heads = math.prod((batch, heads_kv))
    grid = check_grid("gather_rows", heads, -(-count // tiles.block_q))
    structs = (LARGEST_PARAMS, choice), (GATHER_PARAMS, gathered)
    return Launches(
        launches=(
            Launch(largest, "largest_keys", heads, plain.num_threads, False, structs[:1]),
            Launch(gather, "gather_rows", grid, tiles.num_threads, False, structs[1:]),
        )
    )
