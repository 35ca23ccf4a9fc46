"""One tiny kernel per header of ``kernels_cu/prims``, with its expected results from NumPy.

`PRIMS` is data: whoever can run a kernel (a device, an interpreter) runs each with its arguments
and hands what came out to `Prim.check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, pack
from cupyattn.quant.nibbles import packed
from cupyattn.quant.quantizers import scale_of_absmax, scale_of_static
from cupyattn.reference.rounding import ex2, round_to
from tests.prims.prim import Arguments, Prim, Results, butterfly, defines, normal, rng
from tests.prims.prims_cluster_cases import CLUSTER_PRIMS
from tests.prims.prims_exp2_cases import EXP2_PRIMS, RCP_PRIMS
from tests.prims.prims_finite_cases import FINITE_PRIMS
from tests.prims.prims_fragment_cases import FRAGMENT_PRIMS
from tests.prims.prims_gemm_cases import GEMM_PRIMS
from tests.prims.prims_gradient_bias_cases import GRADIENT_BIAS_PRIMS
from tests.prims.prims_gradient_cases import GRADIENT_PRIMS, GRADIENT_SM90_PRIMS
from tests.prims.prims_hopper_cases import hopper_prims
from tests.prims.prims_joint_rows_cases import JOINT_ROWS_PRIMS
from tests.prims.prims_mask_bits_cases import MASK_BITS_PRIMS
from tests.prims.prims_mma_cases import MMA_PRIMS
from tests.prims.prims_p_cases import P_PRIMS
from tests.prims.prims_pieces_cases import PIECES_PRIMS
from tests.prims.prims_prepare_cases import prepare_prims
from tests.prims.prims_quantize_cases import QUANTIZE_PRIMS
from tests.prims.prims_rope_cases import rope_prims
from tests.prims.prims_score_bias_cases import SCORE_BIAS_PRIMS
from tests.prims.prims_score_cases import SCORE_PRIMS
from tests.prims.prims_score_hook_cases import SCORE_HOOK_PRIMS
from tests.prims.prims_shift_cases import SHIFT_PRIMS
from tests.prims.prims_softcap_cases import SOFTCAP_PRIMS
from tests.prims.prims_step_cases import STEP_PRIMS
from tests.prims.prims_tile_end_cases import TILE_END_PRIMS
from tests.prims.prims_zero_cases import ZERO_PRIMS

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


def tile_arguments(kind: str, dtype: str, head_dim: int) -> Arguments:
    buffer, stride = tile_source(dtype, head_dim)
    shapes = {"tile_f32": (ROWS, head_dim + 1), "tile_async": (ROWS, padded(head_dim))}
    out = np.float32 if kind == "tile_f32" else bits(buffer).dtype
    return {
        "X": bits(buffer),
        "stride": np.array([stride], np.int64),
        "tile": np.zeros(shapes[kind], out),
    }


def tile_expected(
    kind: str, dtype: str, head_dim: int, /, X: np.ndarray, tile: np.ndarray, **_: Any
) -> Results:
    rows = X.view(STORAGE[dtype])[:ROWS_VALID, :head_dim]
    if kind == "tile_f32":
        whole = np.zeros(tile.shape, np.float32)
        whole[:, head_dim:] = -1.0  # the gap that makes the rows odd is left alone
    else:
        whole = np.zeros(tile.shape, STORAGE[dtype])
    whole[:ROWS_VALID, :head_dim] = rows.astype(whole.dtype)
    return {"tile": whole if kind == "tile_f32" else bits(whole)}


def pairs_arguments(dtype: str, head_dim: int) -> Arguments:
    row = np.full(head_dim + 8, np.nan, STORAGE[dtype])
    return {"x": normal(padded(head_dim)), "row": bits(row)}


def pairs_expected(dtype: str, head_dim: int, /, x: np.ndarray, row: np.ndarray) -> Results:
    written = row.copy()
    written[:head_dim] = bits(x[:head_dim].astype(STORAGE[dtype]))
    return {"row": written}


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
                partial(tile_arguments, kind, dtype, head_dim),
                partial(tile_expected, kind, dtype, head_dim),
                defines=macros,
            )  # fmt: skip
        yield Prim(
            f"pairs-{dtype}-{head_dim}-{vec}", "tile_io", "pairs", 64,
            partial(pairs_arguments, dtype, head_dim), partial(pairs_expected, dtype, head_dim),
            defines=macros,
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


def config_expected(dtype: str, /, x: np.ndarray, **_: Any) -> Results:
    bias_size = STORAGE[dtype].itemsize
    values = [48, 80, 2, 3, 64, 24, 24, 1, 0, 4, 2, 16, 1, 0, 1, 1, 1, bias_size]
    values += [1, 1, 1]  # rope, interleaved; varlen
    constants = np.array(values, np.int32)
    return {"constants": constants, "rounded": round_to(x, dtype)}


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


def varlen_arguments(bottom_right: int) -> Arguments:
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


def varlen_expected(bottom_right: int, /, **_: Any) -> Results:
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


def padded_expected(**_: Any) -> dict[str, np.ndarray]:
    """The same numbers as lengths of the entries, which lie at their strides."""
    lengths = []
    for len_q, len_kv in np.minimum((ENDS_Q[:5], ENDS_K[:5]), LONGEST).T.tolist():
        shift = len_kv - len_q
        lengths.append([len_q, len_kv, min(shift + 2, len_kv), max(shift - 4, -len_q)])
    # Pointers are the arrays' own; the log-sum-exp is that of head 99 of all.
    return {"lengths": np.int32(lengths), "offsets": np.int64([[0, 0, 0, 0, 99 * 12, 0]] * 5)}


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


#: Every pair of 4-bit codes, neighbours in a row: 64 rows of 8.
ALL_PAIRS = np.stack(np.indices((16, 16), np.int8) - np.int8(8), axis=-1).reshape(64, 8)

# ---- all of them ---------------------------------------------------------------------------------

PRIMS = [
    Prim(
        "base", "base", "base", 1,
        lambda: {"integers": np.zeros(10, np.int32), "floats": np.zeros(3, np.float32)},
        base_expected,
    ),
    *EXP2_PRIMS, *RCP_PRIMS,
    *FINITE_PRIMS,
    *JOINT_ROWS_PRIMS,
    Prim("warp", "warp", "warp", 64, warp_arguments, warp_expected),
    *MMA_PRIMS,
    Prim(
        "online_softmax", "online_softmax", "online_softmax", 32,
        online_softmax_arguments, online_softmax_expected, relative=2.0**-19, absolute=2.0**-19,
    ),
    *SCORE_PRIMS, *SHIFT_PRIMS, *PIECES_PRIMS, *STEP_PRIMS, *rope_prims(), *prepare_prims(),
    *SOFTCAP_PRIMS, *MASK_BITS_PRIMS, *SCORE_BIAS_PRIMS, *SCORE_HOOK_PRIMS,
    *P_PRIMS, *ZERO_PRIMS, *FRAGMENT_PRIMS,
    *CLUSTER_PRIMS, *GEMM_PRIMS, *GRADIENT_PRIMS, *GRADIENT_SM90_PRIMS,
    *GRADIENT_BIAS_PRIMS,
    *QUANTIZE_PRIMS, *TILE_END_PRIMS,
    *tile_prims(),
    Prim(
        "copies", "tile_io", "copies", 128,
        lambda: {"x": np.arange(1, 8, dtype=np.uint32), "y": np.zeros((2, 8), np.uint32)},
        copies_expected,
    ),
    *(
        Prim(
            f"config-{dtype}", "config", "config", 64, config_arguments,
            partial(config_expected, dtype),
            defines=defines(CONFIG_TILES, config_features(dtype)),
        )
        for dtype in STORAGE
    ),
    Prim("params", "params", "params", 1, params_arguments, params_expected),
    *(
        Prim(
            f"varlen-{bottom_right}", "varlen", "varlen", 5,
            partial(varlen_arguments, bottom_right),
            partial(varlen_expected, bottom_right),
            defines=defines(CONFIG_TILES, Features("float16", 24, varlen=True)),
        )
        for bottom_right in (0, 1)
    ),
    Prim(
        "varlen-padded", "varlen", "varlen", 5, partial(varlen_arguments, 1), padded_expected,
        defines=defines(CONFIG_TILES, Features("float16", 24, padded=True)),
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
