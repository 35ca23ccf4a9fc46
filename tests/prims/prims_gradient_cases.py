"""The cases of ``gradient.cuh``: places of padded rows, and weights from the log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.numerics import EX2_APPROX_ERROR
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.backward import ROW_PAD
from cupyattn.plans.structs import ATTN_PARAMS, BACKWARD_PARAMS, pack
from cupyattn.problem.block_mask import BlockMask
from tests.prims.prim import Arguments, Prim, Results, defines, rng

TILES = Tiles(16, 16, 1)
PLAIN = Features("float16", 8)
ENDS = np.array([0, 5, 133, 133, 300], np.int32)
ROWS = 7 * ROW_PAD


def padded_arguments() -> Arguments:
    values = {"batch": 4, "heads": 3, "len_q": 167}
    return {
        "given": pack(ATTN_PARAMS, values, {}),
        "grad": pack(BACKWARD_PARAMS, {"rows": ROWS}, {}),
        "cu_seqlens": ENDS,
        "first": np.full((4, 3), -1, np.int64),
    }


def padded_expected(varlen: bool, /, cu_seqlens: np.ndarray, **_: Any) -> Results:
    batch, head = np.arange(4, dtype=np.int64)[:, None], np.arange(3, dtype=np.int64)
    if not varlen:
        return {"first": (batch * 3 + head) * ROWS}
    first = (cu_seqlens[:-1, None] // ROW_PAD + batch) * ROW_PAD
    lengths = np.diff(cu_seqlens)[:, None]
    ends = first + -(-lengths // ROW_PAD) * ROW_PAD
    assert (ends[:-1] <= first[1:]).all() and ends[-1] <= ROWS  # apart, and all there is room
    return {"first": head * ROWS + first}


def weights_arguments() -> Arguments:
    S, lse = rng().uniform(-30, 30, (2, 32)).astype(np.float32)
    S[:2], lse[1:3] = -np.inf, -np.inf
    return {"S": S, "lse": lse, "M": np.full(32, -7, np.float32), "P": np.full(32, -7, np.float32)}


def weights_expected(natural: bool, /, S: np.ndarray, lse: np.ndarray, **_: Any) -> Results:
    to_log2 = np.log2(np.e)
    M = np.where(lse == -np.inf, np.inf, lse * (1.0 if natural else to_log2))
    exponent = (S - M) * to_log2 if natural else S * 0.5 - M
    return {"M": M.astype(np.float32), "P": np.exp2(exponent).astype(np.float32)}


#: Rows 0 to 199 and keys 0 to 319 of three heads, in blocks of 64; heads 1 and 2 are stepped over.
SIZES = {"len_q": 200, "len_kv": 320, "causal_shift": 40, "window_shift": -90}
KEPT = rng().random((3, 4, 5)) < 0.5  # of a head, by blocks of rows and of keys
KEPT[1, :, 2] = False


def steps_arguments() -> Arguments:
    mask = BlockMask(KEPT[None], 64, 64)
    strides = {"kept_rows_stride": (75, 25, 5)}
    return {
        "p": pack(ATTN_PARAMS, SIZES, {}),
        "given": pack(BACKWARD_PARAMS, strides, {}),
        "kept_rows": mask.transposed.kept_blocks(KEPT),
        "heads": np.full((5, 16), -1, np.int32),
        "rows": np.full((5, 16), -1, np.int32),
    }


def steps_expected(features: Features, /, heads: np.ndarray, rows: np.ndarray, **_: Any) -> Results:
    """Steps of 32 rows in which some row may attend by place, and whose block is kept."""
    heads, rows = heads.copy(), rows.copy()
    for block in range(5):
        kv0 = 64 * block
        first = max(0, kv0 - SIZES["causal_shift"]) if features.causal else 0
        last = min(200, kv0 + 64 - SIZES["window_shift"]) if features.window else 200
        steps = [
            (head, q0)
            for head in (1, 2)
            for q0 in range(0, 200, 32)
            if first < q0 + 32 and q0 < last
            if not features.block_mask[0] or KEPT[head, q0 // 64, block]
        ]
        for i, (head, q0) in enumerate(steps):
            heads[block, i], rows[block, i] = head, q0
    return {"heads": heads, "rows": rows}


HOPPER = Features("float16", 72, vec=8)


def products_arguments(dtype: str) -> Arguments:
    """Small whole numbers: A B^T is exact in 16 bits, and so is what comes of it."""
    A, B, C = (
        rng().integers(-1, 2, (rows, 72)).astype(STORAGE[dtype]).view(np.uint16)
        for rows in (128, 64, 64)
    )
    A[:, 9:] = C[:, 40:] = 0  # sums of 64 products of up to 9 stay below 2^8 x 4
    C[:, 70] = C[:, 3]
    return {"A": A, "B": B, "C": C, "D": np.full((128, 72), 0x7E7E, np.uint16)}


def products_expected(
    dtype: str, /, A: np.ndarray, B: np.ndarray, C: np.ndarray, D: np.ndarray
) -> Results:
    a, b, c = (x.view(STORAGE[dtype]).astype(np.float32) for x in (A, B, C))
    D = D.copy()
    D[:100] = (0.5 * ((a @ b.T) @ c)[:100]).astype(STORAGE[dtype]).view(np.uint16)
    return {"D": D}


def sums_arguments() -> Arguments:
    return {
        "call": pack(ATTN_PARAMS, {"batch": 1, "heads": 3}, {}),
        "given": pack(BACKWARD_PARAMS, {"rows": ROW_PAD}, {}),
        "acc": rng().normal(size=(2, 32, 128)).astype(np.float32),
        "memory": np.zeros((3, ROW_PAD, 128), np.float32),
        "loaded": np.full((2, 32, 128), -7, np.float32),
    }


def sums_expected(acc: np.ndarray, memory: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    memory = memory.copy()
    tiles = memory.reshape(3, ROW_PAD // 64, 2, 8, 128, 4)  # boxes, then as the threads hold them
    tiles[1, 1] = 2 * acc.reshape(2, 8, 4, 128).swapaxes(-1, -2)
    return {"memory": memory, "loaded": acc + 2 * acc}


TURN_BLOCKS, TURN_ROW_TILES = 4, 6


def order_arguments(heads: int) -> Arguments:
    """Rows of two heads fit in the L2 cache, so that a fifth head is alone."""
    sizes = {"batch": 1, "heads": heads, "heads_kv": heads, "len_q": 16_384, "len_kv": 512}
    blocks = heads * TURN_BLOCKS
    return {
        "p": pack(ATTN_PARAMS, sizes, {}),
        "heads": np.full(blocks, -7, np.int32),
        "keys": np.full(blocks, -7, np.int32),
        "before": np.full((blocks, TURN_ROW_TILES), -1, np.int32),
        "last": np.full((blocks, TURN_ROW_TILES), -1, np.int32),
    }


def order_expected(number_of_heads: int, causal: bool, /, **_: Any) -> Results:
    """Turns counted from the order: heads in pairs, the last keys first but in the last group."""
    order = []
    for first in range(0, number_of_heads, 2):
        group = range(first, min(first + 2, number_of_heads))
        reverses = causal and first + 2 >= number_of_heads
        numbers = range(TURN_BLOCKS) if reverses else range(TURN_BLOCKS)[::-1]
        order += [(head, number) for number in numbers for head in group]
    adds = np.zeros((len(order), TURN_ROW_TILES), bool)  # causal: the tile has a row at its keys
    for index, (_, number) in enumerate(order):
        adds[index] = np.arange(TURN_ROW_TILES) * 64 + 63 >= number * 128 if causal else True
    heads = np.array([head for head, _ in order], np.int32)
    earlier = (heads[:, None] == heads) & np.tri(len(order), k=-1, dtype=bool)
    counts, further = earlier @ adds.astype(int), earlier.T @ adds.astype(int)
    return {
        "heads": heads,
        "keys": np.array([number * 128 for _, number in order], np.int32),
        "before": np.where(adds, counts, -1).astype(np.int32),
        "last": np.where(adds, further == 0, -1).astype(np.int32),
    }


#: Beside one row, 2^15 heads could run at a time: 2^32 blocks of keys.
MANY_KEYS, PLACES, PLACE_STEP = 2**24, 8, 2**15 - 1


def places_arguments() -> Arguments:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 2, "len_q": 1, "len_kv": MANY_KEYS}
    empty = {name: np.full(PLACES, -7, np.int32) for name in ("heads", "keys")}
    return {"p": pack(ATTN_PARAMS, sizes, {}), "step": np.int32(PLACE_STEP), **empty}


def places_expected(**_: Any) -> Results:
    """Both heads in turn, the last keys first."""
    index = np.arange(PLACES, dtype=np.int32) * PLACE_STEP
    return {"heads": index % 2, "keys": MANY_KEYS - 128 * (1 + index // 2)}


GRADIENT_SM90_PRIMS = [
    Prim(
        "gradient_turns-places", "gradient_turns", "places", PLACES, places_arguments,
        places_expected, hopper=True,
        defines=(*defines(Tiles(64, 128, 12, 2), replace(HOPPER, head_dim=128)), ("CFG_DQ", 2)),
    ),
    *(
        Prim(
            f"gradient_turns-{'causal' if causal else 'plain'}-{heads}", "gradient_turns", "order",
            heads * TURN_BLOCKS, partial(order_arguments, heads),
            partial(order_expected, heads, causal), hopper=True,
            defines=(
                *defines(Tiles(64, 128, 12, 2), replace(HOPPER, head_dim=128, causal=causal)),
                ("CFG_DQ", 2),
            ),
        )
        for causal, heads in ((False, 5), (True, 5), (True, 4))
    ),
    *(
        Prim(
            f"gradient_sm90-products-{dtype}", "gradient_sm90", "products", 256,
            partial(products_arguments, dtype), partial(products_expected, dtype), hopper=True,
            defines=defines(TILES, replace(HOPPER, dtype=dtype)),
        )
        for dtype in ("float16", "bfloat16")
    ),
    Prim(
        "gradient_sm90-sums", "gradient_sm90", "sums", 256, sums_arguments, sums_expected,
        hopper=True, defines=defines(TILES, HOPPER),
    ),
]  # fmt: skip
GRADIENT_PRIMS = [
    *(
        Prim(
            f"gradient-steps-{number}", "gradient", "row_steps", 5,
            steps_arguments, partial(steps_expected, features),
            defines=defines(Tiles(32, 64, 1), features),
        )
        for number, features in enumerate(
            replace(PLAIN, **changed)
            for changed in (
                {}, {"causal": True, "window": True}, {"block_mask": (64, 64)},
                {"block_mask": (64, 64), "causal": True},
            )
        )
    ),
    *(
        Prim(
            f"gradient-padded-{'packed' if varlen else 'batch'}", "gradient", "padded", 12,
            padded_arguments, partial(padded_expected, varlen),
            defines=defines(TILES, replace(PLAIN, varlen=varlen)),
        )
        for varlen in (False, True)
    ),
    *(
        Prim(
            f"gradient-weights-{'natural' if natural else 'log2'}", "gradient", "weights", 32,
            weights_arguments, partial(weights_expected, natural),
            # The exponent is rounded where it is up to 100.
            relative=EX2_APPROX_ERROR + 2.0**-16, absolute=2.0**-126,
            defines=defines(TILES, replace(PLAIN, softcap=natural)),
        )
        for natural in (False, True)
    ),
    Prim(
        "gradient-rows", "gradient", "rows", 32,
        lambda: {
            "from": rng().normal(size=32).astype(np.float32), "to": np.full(32, -7, np.float32)
        },
        lambda **given: {"to": np.append(given["from"][4:20], np.zeros(16, np.float32))},
        defines=defines(TILES, PLAIN),
    ),
]  # fmt: skip
