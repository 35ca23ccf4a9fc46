"""One tiny kernel per header of ``kernels_cu/prims``, with what it must write, in NumPy.

`PRIMS` is data: whoever can run a kernel (a device, an interpreter) runs each with its arguments
and hands what came out to `Prim.check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.features import Features
from cupyattn.params import ATTN_PARAMS, QUANT_PARAMS, pack
from cupyattn.plans import TensorMap
from cupyattn.quant.nibbles import packed
from cupyattn.quant.quantizers import scale_of_absmax, scale_of_static
from cupyattn.rounding import STORAGE, ex2, round_to
from cupyattn.tiles import Tiles
from tests.prim import Arguments, Prim, butterfly, defines, normal, rng
from tests.prims_cluster_cases import CLUSTER_PRIMS
from tests.prims_exp2_cases import EXP2_PRIMS
from tests.prims_finite_cases import FINITE_PRIMS
from tests.prims_gemm_cases import GEMM_PRIMS
from tests.prims_gradient_cases import GRADIENT_PRIMS, GRADIENT_SM90_PRIMS
from tests.prims_p_cases import P_PRIMS
from tests.prims_pieces_cases import PIECES_PRIMS
from tests.prims_prepare_cases import prepare_prims
from tests.prims_quantize_cases import QUANTIZE_PRIMS
from tests.prims_rope_cases import rope_prims
from tests.prims_score_cases import SCORE_PRIMS
from tests.prims_shift_cases import SHIFT_PRIMS
from tests.prims_step_cases import STEP_PRIMS
from tests.prims_tile_end_cases import TILE_END_PRIMS
from tests.prims_wgmma_cases import wgmma_prims
from tests.prims_zero_cases import ZERO_PRIMS

LANES = np.arange(32)

# ---- base, warp ----------------------------------------------------------------------------------


def base_expected(**_: Any) -> dict[str, np.ndarray]:
    constants = [-np.inf, math.log2(math.e), math.log(2.0)]
    return {
        "integers": np.array([3, 2, 0, 48, 32, 8, 2, 1, 8, 8], np.int32),
        "floats": np.array(constants, np.float32),
    }


def warp_arguments() -> Arguments:
    outputs = {name: np.zeros(64, np.float32) for name in ("max4", "max32", "sum4", "sum32")}
    four = np.zeros((4, 64), np.uint32)
    return {"x": normal(64), "who": np.zeros((4, 64), np.int32), **outputs, "four": four}


def warp_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    thread = np.arange(64, dtype=np.int32)
    return {
        "who": np.stack([thread, thread // 32, thread % 32, thread // 32 * 32]),
        "max4": butterfly(x, 4, np.fmax),
        "max32": butterfly(x, 32, np.fmax),
        "sum4": butterfly(x, 4, np.add),
        "sum32": butterfly(x, 32, np.add),
        "four": np.stack([thread // 4 * 16 + 4 * j + thread % 4 for j in range(4)]).astype("u4"),
    }


# ---- swizzle -------------------------------------------------------------------------------------

CHUNKS = range(2, 33, 2)


def swizzle(chunks: int, row: int, chunk: int) -> int:
    """Index of a 16-byte chunk in a tile of rows of `chunks` chunks."""
    g = math.gcd(chunks, 8)
    return row * chunks + (chunk ^ (row // (8 // g) % g))


def swizzle_expected(**_: Any) -> dict[str, np.ndarray]:
    index = [swizzle(n, row, chunk) for n in CHUNKS for row in range(16) for chunk in range(n)]
    return {
        "index": np.array(index, np.int32),
        "from": np.array(index, np.int32),
        "bytes": np.array([16 * swizzle(2, 3, 1), 16 * swizzle(2, 3, 0)], np.int32),
    }


# ---- tensor cores --------------------------------------------------------------------------------


def pairs_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit patterns in one 32-bit register."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


TILE = np.arange(256, dtype=np.uint16).reshape(16, 16)


def ldmatrix_expected(tile: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    r, c = LANES // 4, LANES % 4
    quarters = [tile[i % 2 * 8 :, i // 2 * 8 :] for i in range(4)]
    return {
        "plain": np.stack([pairs_of(q[r, 2 * c], q[r, 2 * c + 1]) for q in quarters]),
        "transposed": np.stack([pairs_of(q[2 * c, r], q[2 * c + 1, r]) for q in quarters]),
    }


def mma_arguments(dtype: Any, depth: int, largest: int, out: Any) -> Arguments:
    """Whole numbers, so that every product and sum is exact in any order."""
    A, B = (rng().integers(-largest, largest + 1, (n, depth)) for n in (16, 8))
    stored = (x.astype(dtype).view(f"u{np.dtype(dtype).itemsize}") for x in (A, B))
    return {"A": next(stored), "B": next(stored), "C": np.zeros((16, 8), out)}


def mma_expected(dtype: Any) -> Callable[..., dict[str, np.ndarray]]:
    def expected(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> dict[str, np.ndarray]:
        a, b = (x.view(dtype).astype(np.float64) for x in (A, B))
        return {"C": (1 + a @ b.T).astype(C.dtype)}

    return expected


def pack_arguments() -> Arguments:
    x = normal(2, 32) * 100
    x[:, 0], x[:, 1] = 2049.0, 257.0  # ties of float16 and bfloat16
    x[:, 2], x[:, 3] = 1e6, 1e-7  # past the largest float16, below the smallest normal one
    return {"x": x, "f16": np.zeros(32, np.uint32), "bf16": np.zeros(32, np.uint32)}


def pack_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    with np.errstate(over="ignore"):
        stored = {"f16": x.astype(np.float16), "bf16": x.astype(ml_dtypes.bfloat16)}
    return {name: pairs_of(*value.view(np.uint16)) for name, value in stored.items()}


# ---- softmax and masks ---------------------------------------------------------------------------


def online_softmax_arguments() -> Arguments:
    maxima = 10 * normal(4, 32)
    maxima[:, 0] = -np.inf  # a row without a key
    maxima[:2, 1] = -np.inf  # one whose first keys come late
    maxima[1:, 2] = maxima[0, 2]  # a maximum that comes back
    outputs = {name: np.zeros(32, np.float32) for name in ("M", "l", "inverse_l", "lse")}
    return {"maxima": maxima, "alpha": np.zeros((4, 32), np.float32), **outputs}


def online_softmax_expected(maxima: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    M, total = np.full(32, -np.inf, np.float32), np.zeros(32)
    alphas = []
    for new in maxima:
        old, M = M, np.fmax(M, new)
        finite = np.where(-np.inf == M, 0, M)
        alphas.append(ex2(old - finite))
        total = total * alphas[-1] + np.where(new == -np.inf, 0.0, ex2(new - finite))
    with np.errstate(divide="ignore"):
        inverse = np.where(total == 0, 0, 1 / np.where(total == 0, 1, total))
        lse = (M + np.log2(total)) * math.log(2.0)
    return {
        "alpha": np.stack(alphas),
        "M": np.where(-np.inf == M, np.float32(0), M),
        "l": total,
        "inverse_l": inverse,
        "lse": lse,
    }


# ---- tiles ---------------------------------------------------------------------------------------

ROWS, ROWS_VALID = 16, 11


def padded(head_dim: int, multiple: int = 16) -> int:
    return -(-head_dim // multiple) * multiple


def tile_source(dtype: str, head_dim: int) -> tuple[np.ndarray, int]:
    """Rows `stride` apart in a buffer that is NaN wherever the tile must not look."""
    stride = padded(head_dim, 8) + 8
    buffer = np.full((ROWS, stride), np.nan, STORAGE[dtype])
    buffer[:ROWS_VALID, :head_dim] = normal(ROWS_VALID, head_dim).astype(STORAGE[dtype])
    return buffer, stride


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def tile_arguments(kind: str, dtype: str, head_dim: int) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        buffer, stride = tile_source(dtype, head_dim)
        shapes = {"tile_f32": (ROWS, head_dim + 1), "tile_async": (ROWS, padded(head_dim))}
        out = np.float32 if kind == "tile_f32" else bits(buffer).dtype
        return {
            "X": bits(buffer),
            "stride": np.array([stride], np.int64),
            "tile": np.zeros(shapes[kind], out),
        }

    return arguments


def tile_expected(kind: str, dtype: str, head_dim: int) -> Callable[..., dict[str, np.ndarray]]:
    def expected(X: np.ndarray, tile: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        rows = X.view(STORAGE[dtype])[:ROWS_VALID, :head_dim]
        if kind == "tile_f32":
            whole = np.zeros(tile.shape, np.float32)
            whole[:, head_dim:] = -1.0  # the gap that makes the rows odd is left alone
        else:
            whole = np.zeros(tile.shape, STORAGE[dtype])
        whole[:ROWS_VALID, :head_dim] = rows.astype(whole.dtype)
        return {"tile": whole if kind == "tile_f32" else bits(whole)}

    return expected


def pairs_arguments(dtype: str, head_dim: int) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        row = np.full(head_dim + 8, np.nan, STORAGE[dtype])
        return {"x": normal(padded(head_dim)), "row": bits(row)}

    return arguments


def pairs_expected(dtype: str, head_dim: int) -> Callable[..., dict[str, np.ndarray]]:
    def expected(x: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        written = row.copy()
        written[:head_dim] = bits(x[:head_dim].astype(STORAGE[dtype]))
        return {"row": written}

    return expected


def copies_expected(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    written = np.full((2, 8), 0xFFFFFFFF, np.uint32)
    written[0, :7], written[1, :7] = x, 0
    return {"y": written}


def tile_prims() -> Iterator[Prim]:
    """Every width of access of every storage type."""
    for dtype, head_dim, vec in (
        ("float16", 24, 8), ("float16", 20, 4), ("float16", 6, 2), ("float16", 7, 1),
        ("bfloat16", 40, 8), ("float32", 24, 4), ("float32", 5, 1),
    ):  # fmt: skip
        macros = defines(Tiles(16, 16, 2), Features(dtype, head_dim, vec=vec))
        for kind in ("tile_f32", "tile_async"):
            yield Prim(
                f"{kind}-{dtype}-{head_dim}-{vec}", "tile_io", kind, 64,
                tile_arguments(kind, dtype, head_dim), tile_expected(kind, dtype, head_dim),
                defines=macros,
            )  # fmt: skip
        yield Prim(
            f"pairs-{dtype}-{head_dim}-{vec}", "tile_io", "pairs", 64,
            pairs_arguments(dtype, head_dim), pairs_expected(dtype, head_dim), defines=macros,
        )  # fmt: skip


# ---- config, params, quant -----------------------------------------------------------------------

CONFIG_TILES = Tiles(48, 80, 2, 3)


def config_features(dtype: str) -> Features:
    return Features(
        dtype, 24, causal=True, lse=False, vec=4, group_q=2, group_kv=16, window=True,
        softcap=False, mask=True, bias=dtype, rope="interleaved", varlen=True,
    )  # fmt: skip


def config_arguments() -> Arguments:
    x = normal(64) * np.float32(1000)
    x[:3] = [2049.0, 257.0, 1e6]
    outputs = {"constants": np.full(21, -1, np.int32), "rounded": np.zeros(64, np.float32)}
    return {"x": x, **outputs}


def config_expected(dtype: str) -> Callable[..., dict[str, np.ndarray]]:
    def expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        bias_size = STORAGE[dtype].itemsize
        values = [48, 80, 2, 3, 64, 24, 24, 1, 0, 4, 2, 16, 1, 0, 1, 1, 1, bias_size]
        values += [1, 1, 1]  # rope, interleaved; varlen
        constants = np.array(values, np.int32)
        return {"constants": constants, "rounded": round_to(x, dtype)}

    return expected


def params_arguments() -> Arguments:
    """Every field different, past 32 bits where it may be."""
    records = []
    for struct in (ATTN_PARAMS, QUANT_PARAMS):
        values: dict[str, Any] = {}
        for i, name in enumerate(struct.names or ()):
            field = struct[name]
            wide = 2**33 * (1 + i + len(values))
            if field.shape:
                values[name] = [wide + 1, -wide, 0, 7][: field.shape[0]]
            else:
                values[name] = wide if field.itemsize == 8 else 0.1 * i if field.kind == "f" else -i
        records.append(pack(struct, values, {}))
    outputs = {"integers": np.zeros(62, np.int64), "floats": np.zeros(4, np.float32)}
    return {"p": records[0], "quant": records[1], **outputs}


def params_expected(p: np.ndarray, quant: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    values = [np.ravel(r[name]) for r in (p, quant) for name in r.dtype.names or ()]
    integers = np.concatenate([v.astype(np.int64) for v in values if v.dtype.kind != "f"])
    floats = np.concatenate([v for v in values if v.dtype.kind == "f"])
    return {"integers": integers, "floats": floats}


#: Rows of packed sequences, and a limit that cuts the longest of them.
ENDS_Q, ENDS_K, LONGEST = [0, 0, 3, 10, 10, 12], [0, 5, 5, 7, 16, 17], 8


def varlen_arguments(bottom_right: int) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        values = {
            "Q_stride": (0, 7, 2), "K_stride": (0, 7, -3), "V_stride": (0, 7, 5),
            "O_stride": (0, 7, 11), "len_q": LONGEST, "len_kv": LONGEST, "causal_shift": 2,
            "window_shift": -4, "total_q": 12, "bottom_right": bottom_right,
        }  # fmt: skip
        return {
            "given": pack(ATTN_PARAMS, values, {}),
            "cu_seqlens_q": np.array(ENDS_Q, np.int32),
            "cu_seqlens_k": np.array(ENDS_K, np.int32),
            "lengths": np.full((5, 4), -99, np.int32),
            "offsets": np.full((5, 6), -99, np.int64),
        }

    return arguments


def varlen_expected(bottom_right: int) -> Callable[..., dict[str, np.ndarray]]:
    def expected(**_: Any) -> dict[str, np.ndarray]:
        lengths, offsets = [], []
        for batch in range(5):
            q, k = ENDS_Q[batch], ENDS_K[batch]
            len_q = min(ENDS_Q[batch + 1] - q, LONGEST)
            len_kv = min(ENDS_K[batch + 1] - k, LONGEST)
            shift = (len_kv - len_q) * bottom_right
            last, first = min(shift + 2, len_kv), max(shift - 4, -len_q)
            lengths.append([len_q, len_kv, last, first])
            # Q has elements of 1 byte, V and O of 2; the log-sum-exp is that of head 1.
            offsets.append([2 * q, -3 * k, 5 * k * 2, 11 * q * 2, 12 + q, k // 4 + batch])
        return {"lengths": np.int32(lengths), "offsets": np.int64(offsets)}

    return expected


def quant_arguments() -> Arguments:
    absmax = np.abs(normal(64)) * np.float32(2.0) ** np.arange(-60, 68, 2, np.float32)
    absmax[:6] = [0.0, 1e-45, 2.0**-126, np.inf, np.nan, 3e38]
    with np.errstate(invalid="ignore"):
        x = (absmax * rng().uniform(-1, 1, 64)).astype(np.float32)
    x[6:12], absmax[6:12] = 0.5, 127.0  # ties
    given = np.abs(normal(64))
    given[:6] = [np.nan, np.inf, 0.0, -1.0, 2.0**-127, 2.0**-126]
    return {
        "absmax": absmax,
        "x": x,
        "static_scale": given,
        "bits": np.zeros(64, np.uint32),
        "bits_max4": np.zeros(64, np.uint32),
        "scales": np.zeros((4, 64), np.float32),
        "codes": np.zeros((2, 64), np.int32),
    }


def quant_expected(
    absmax: np.ndarray, x: np.ndarray, static_scale: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore", over="ignore"):
        (found, inverse), (given, inverse_given) = (
            scale_of_absmax(absmax),
            scale_of_static(static_scale),
        )
        dynamic, static = np.rint(x * inverse), np.rint(x * inverse_given)
    codes = np.stack([dynamic, np.clip(static, -127, 127)])
    magnitude = absmax.view(np.uint32) & 0x7FFFFFFF
    return {
        "bits": magnitude,
        "bits_max4": butterfly(magnitude, 4, np.maximum),
        "scales": np.stack([found, given, inverse, inverse_given]).astype(np.float32),
        "codes": np.where(np.isnan(codes), 0, codes).astype(np.int32),
    }


# ---- Hopper: barriers, the copy engine, warpgroups -----------------------------------------------

BOX_ROWS = 16
#: (column, row, head, batch) of boxes of 64 columns: inside, over each end, before the first row,
#: and wholly outside.
BOXES = (
    (0, 0, 0, 0), (0, 2, 1, 1), (64, 0, 2, 0), (0, 16, 0, 1), (64, 16, 1, 0), (0, -3, 2, 1),
    (0, 0, 3, 0),
)  # fmt: skip


def ring_arguments() -> Arguments:
    x = rng().integers(-1000, 1000, (9, 32)).astype(np.int32)
    return {"x": x, "y": np.zeros_like(x)}


def turns_arguments() -> Arguments:
    return {"start": np.full(1, 5, np.int32), "seen": np.zeros((6, 96), np.int32)}


def turns_expected(start: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Warp w is the (3 round + w)-th to have its turn, and sees the number of those before it."""
    turn = 3 * np.arange(6)[:, None] + np.arange(96) // 32
    return {"seen": (start + turn).astype(np.int32)}


def boxes_arguments(dtype: str) -> Callable[[], Arguments]:
    """An array in a larger buffer that is all ones, by bits, where no box may look."""
    shape, parent = (2, 3, 21, 72), (2, 4, 25, 80)
    code = np.dtype("u1" if dtype == "int8" else "u2")
    columns = 128 // code.itemsize

    def arguments() -> Arguments:
        X = np.full(parent, np.iinfo(code).max, code)
        X[tuple(map(slice, shape))] = rng().integers(0, np.iinfo(code).max, shape)
        box = (1, 1, BOX_ROWS, columns)
        at = np.array([(column * columns // 64, *rest) for column, *rest in BOXES], np.int32)
        return {
            "X": X,
            "X_map": TensorMap("X", dtype, shape, X.strides[:-1], box),
            "at": at,
            "tile": np.zeros((len(BOXES), BOX_ROWS * 128), np.uint8),
            "elected": np.zeros(1, np.int32),
        }

    return arguments


def boxes_expected(
    X: np.ndarray, X_map: TensorMap, at: np.ndarray, tile: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    array = X[tuple(map(slice, X_map.shape))]
    _, _, rows, columns = X_map.box
    chunks = np.zeros((len(at), rows * 8, 16), np.uint8)
    for box, (column, row, head, batch) in zip(chunks, at, strict=True):
        plain = np.zeros((rows, columns), X.dtype)
        for i, j in np.ndindex(plain.shape):
            index = (batch, head, row + i, column + j)
            if all(0 <= k < n for k, n in zip(index, array.shape, strict=True)):
                plain[i, j] = array[index]
        for i, j in np.ndindex(rows, 8):
            box[swizzle(8, i, j)] = plain.view(np.uint8)[i, 16 * j : 16 * j + 16]
    return {"tile": chunks.reshape(tile.shape), "elected": np.ones(1, np.int32)}


def stores_arguments() -> Arguments:
    loaded = boxes_arguments("float16")()
    Y = loaded["X"]
    tile = rng().integers(0, 256, loaded["tile"].shape).astype(np.uint8)
    at = np.abs(loaded["at"])  # no box may be stored from before the array
    return {"Y": Y, "Y_map": replace(loaded["X_map"], buffer="Y"), "at": at, "tile": tile}


def stores_expected(
    Y: np.ndarray, Y_map: TensorMap, at: np.ndarray, tile: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    Y = Y.copy()
    array = Y[tuple(map(slice, Y_map.shape))]
    _, _, rows, columns = Y_map.box
    for box, (column, row, head, batch) in zip(tile.reshape(len(at), -1, 16), at, strict=True):
        places = [[swizzle(8, i, j) for j in range(8)] for i in range(rows)]
        plain = box[places].view(Y.dtype).reshape(rows, columns)
        for i, j in np.ndindex(plain.shape):
            index = (batch, head, row + i, column + j)
            if all(0 <= k < n for k, n in zip(index, array.shape, strict=True)):
                array[index] = plain[i, j]
    return {"Y": Y}


def counter_arguments() -> Arguments:
    return {name: np.zeros(count, np.int32) for name, count in
            (("counter", 1), ("written", 1), ("order", 8))}  # fmt: skip


def counter_expected(**_: Any) -> dict[str, np.ndarray]:
    eight = np.array([8], np.int32)
    return {"counter": eight, "written": eight, "order": np.arange(8, dtype=np.int32)}


def hopper_prims() -> Iterator[Prim]:
    yield Prim("counter", "counter", "turns", 256, counter_arguments, counter_expected)
    yield Prim(
        "mbarrier", "mbarrier", "ring", 64, ring_arguments, lambda x, y: {"y": x[:, ::-1]},
        hopper=True,
    )  # fmt: skip
    yield Prim(
        "named_barrier", "named_barrier", "turns", 96, turns_arguments, turns_expected
    )  # fmt: skip
    for dtype in ("float16", "bfloat16", "int8"):
        yield Prim(
            f"tma-{dtype}", "tma", "boxes", 32, boxes_arguments(dtype), boxes_expected,
            hopper=True,
        )  # fmt: skip
    yield Prim(
        "tma_store", "tma", "stores", 32, stores_arguments, stores_expected, hopper=True
    )  # fmt: skip
    yield Prim(
        "tma_bytes", "tma", "bytes", 32,
        lambda: {
            "from": rng().normal(size=64).astype(np.float32), "to": np.full(64, -7, np.float32)
        },
        lambda **given: {
            "to": np.r_[np.full(4, -1), given["from"][8:48], np.full(20, -1)].astype(np.float32)
        },
        hopper=True,
    )  # fmt: skip
    yield Prim(
        "stmatrix", "wgmma", "stmatrix", 32,
        lambda: {
            "fragment": ldmatrix_expected(TILE)["plain"], "tile": np.zeros((16, 16), np.uint16),
        },
        lambda **_: {"tile": TILE}, hopper=True,
    )  # fmt: skip
    yield from wgmma_prims()
    yield Prim(
        "registers", "wgmma", "registers", 384,
        lambda: {"x": normal(200, 256), "y": np.zeros((200, 256), np.float32)},
        lambda x, y: {"y": x[::-1]}, hopper=True,
    )  # fmt: skip


#: Every pair of 4-bit codes, neighbours in a row: 64 rows of 8.
ALL_PAIRS = np.stack(np.indices((16, 16), np.int8) - np.int8(8), axis=-1).reshape(64, 8)

# ---- all of them ---------------------------------------------------------------------------------

PRIMS = [
    Prim(
        "base", "base", "base", 1,
        lambda: {"integers": np.zeros(10, np.int32), "floats": np.zeros(3, np.float32)},
        base_expected,
    ),
    *EXP2_PRIMS,
    *FINITE_PRIMS,
    Prim("warp", "warp", "warp", 64, warp_arguments, warp_expected),
    Prim(
        "swizzle", "swizzle", "swizzle", 16,
        lambda: {
            "index": np.zeros(16 * sum(CHUNKS), np.int32),
            "from": np.zeros(16 * sum(CHUNKS), np.int32), "bytes": np.zeros(2, np.int32),
        },
        swizzle_expected,
    ),
    Prim(
        "ldmatrix", "mma", "ldmatrix", 32,
        lambda: {
            "tile": TILE,
            "plain": np.zeros((4, 32), np.uint32), "transposed": np.zeros((4, 32), np.uint32),
        },
        ldmatrix_expected,
    ),
    Prim(
        "mma_f16", "mma", "mma_f16", 32,
        lambda: mma_arguments(np.float16, 16, 15, np.float32), mma_expected(np.float16),
    ),
    Prim(
        "mma_bf16", "mma", "mma_bf16", 32,
        lambda: mma_arguments(ml_dtypes.bfloat16, 16, 15, np.float32),
        mma_expected(ml_dtypes.bfloat16),
    ),
    Prim(
        "mma_s8", "mma", "mma_s8", 32,
        lambda: mma_arguments(np.int8, 32, 127, np.int32), mma_expected(np.int8),
    ),
    Prim("pack", "mma", "pack", 32, pack_arguments, pack_expected),
    Prim(
        "online_softmax", "online_softmax", "online_softmax", 32,
        online_softmax_arguments, online_softmax_expected, relative=2.0**-19, absolute=2.0**-19,
    ),
    *SCORE_PRIMS, *SHIFT_PRIMS, *PIECES_PRIMS, *STEP_PRIMS, *rope_prims(), *prepare_prims(),
    *P_PRIMS, *ZERO_PRIMS,
    *CLUSTER_PRIMS, *GEMM_PRIMS, *GRADIENT_PRIMS, *GRADIENT_SM90_PRIMS,
    *QUANTIZE_PRIMS, *TILE_END_PRIMS,
    *tile_prims(),
    Prim(
        "copies", "tile_io", "copies", 128,
        lambda: {"x": np.arange(1, 8, dtype=np.uint32), "y": np.zeros((2, 8), np.uint32)},
        copies_expected,
    ),
    *(
        Prim(
            f"config-{dtype}", "config", "config", 64, config_arguments, config_expected(dtype),
            defines=defines(CONFIG_TILES, config_features(dtype)),
        )
        for dtype in STORAGE
    ),
    Prim("params", "params", "params", 1, params_arguments, params_expected),
    *(
        Prim(
            f"varlen-{bottom_right}", "varlen", "varlen", 5, varlen_arguments(bottom_right),
            varlen_expected(bottom_right),
            defines=defines(CONFIG_TILES, Features("float16", 24, varlen=True)),
        )
        for bottom_right in (0, 1)
    ),
    Prim("quant", "quant", "quant", 64, quant_arguments, quant_expected),
    Prim(
        "quant_words", "quant", "quant_words", 32,
        lambda: {"codes": np.arange(-128, 128).astype(np.int8), "numbers": np.zeros((4, 256), "f")},
        lambda codes, **_: {"numbers": np.tile(codes.astype(np.float32), (4, 1))},
    ),
    Prim(
        "nibbles", "nibbles", "nibbles", 64,
        lambda: {
            "words": packed(ALL_PAIRS).view(np.uint32), "codes": np.zeros((64, 2), np.uint32),
        },
        lambda **_: {"codes": ALL_PAIRS.view(np.uint32)},
    ),
    *hopper_prims(),
]  # fmt: skip
