"""The kernel of ``prims/score/score_hook.cuh``: a tile of scores, as a Hopper form has it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.softcap import SOFTCAP_ERROR
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import TensorMap
from cupyattn.plans.structs import ATTN_PARAMS, SCORE_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, eighths, rng
from tests.prims.prims_mask_bits_cases import BLOCK_Q, packed_keys, packed_rows
from tests.prims.prims_softcap_cases import softcap_values

PLAIN = Features("float16", 64)

HOOK_STEPS, HOOK_KV, HOOK_ROWS = 5, 96, 64
UNIT, FACTOR = 20.0, 0.75  # of the softcap and of a bias
BATCH, HEAD, Q0 = 1, 2, 32  # the last head
LEN_KV = HOOK_STEPS * HOOK_KV
#: Steps that a mask leaves, and the one of them that it admits whole.
TAKEN, FULL = (0, 2, 3, 4), 2
#: Steps that the last warp skips, among the steps that are taken.
SKIPPED = 1
#: Query rows of a sequence that ends among the last rows of the tile's last warp.
SHORT = 60


def hook_mask(kind: str) -> np.ndarray:
    """Return [head, row, key]."""
    mask = rng().random((3, HOOK_ROWS if kind == "rows" else 1, LEN_KV)) < 0.5
    step = np.arange(LEN_KV) // HOOK_KV
    return mask & np.isin(step, TAKEN) | (step == FULL)


def hook_bias(features: Features) -> np.ndarray:
    """Return [1, head, row, key], inf where it is masked; one of keys is the same for all heads."""
    rows, keys = {"dense": (HOOK_ROWS, LEN_KV), "keys": (1, LEN_KV), "rows": (HOOK_ROWS, 1)}[
        features.bias_kind
    ]
    bias = rng().integers(-127, 128, (1, 1 if features.bias_kind == "keys" else 3, rows, keys)) / 4
    if features.mask_kind:
        mask = hook_mask(features.mask_kind)[HEAD]
        bias[0, -1][~np.broadcast_to(mask, bias.shape[2:])] = np.inf
    return bias.astype(STORAGE[features.bias])


def hook_map(features: Features, bias: np.ndarray) -> TensorMap:
    """Describe a bias to the copy engine; one of rows is not copied, and any map will do."""
    if features.bias_kind == "rows":
        return TensorMap("boxes", "float16", (1, 1, 1, 8), (16, 16, 16), (1, 1, 1, 64))
    steps = zip(bias.strides[:-1], bias.shape[:-1], strict=True)
    strides = tuple(step if n > 1 else 16 for step, n in steps)
    rows = BLOCK_Q if features.bias_kind == "dense" else 1
    return TensorMap("boxes", features.bias, bias.shape, strides, (1, 1, rows, 64))


def hook_arguments(features: Features) -> Arguments:
    kind, rows = features.mask_kind, features.mask_kind == "rows"
    values = {
        "bias_factor": FACTOR, "bias_head": int(features.bias_kind == "dense"),
        "key_tiles": HOOK_STEPS, **softcap_values(UNIT),
        "mask_head": 2 if rows else 1, "mask_q": int(rows),
        "list_head": 2 if rows else 1, "list_q": int(rows),
    }  # fmt: skip
    sizes = {
        "len_q": SHORT if features.varlen else HOOK_ROWS, "len_kv": LEN_KV,
        "bias_stride": (0, HOOK_ROWS, 1, 0),
    }  # fmt: skip
    bits = np.zeros(1, np.uint32)
    listed = np.full((6 if rows else 3, 2 + HOOK_STEPS), 999, np.int32)
    if kind:
        mask = hook_mask(kind)
        bits = packed_rows(mask, HOOK_KV) if rows else packed_keys(mask, HOOK_KV)
        listed[5 if rows else 2, :6] = [len(TAKEN), 0, *(2 * n + (n != FULL) for n in TAKEN)]
    bias = hook_bias(features) if features.bias else np.zeros((1, 1, 1, 8), np.float16)
    raw = bias.view(f"u{bias.itemsize}") if bias.dtype != np.float32 else bias
    arguments: Arguments = {
        "given": pack(ATTN_PARAMS, sizes, {}),
        "place": np.array([BATCH, HEAD, Q0, SKIPPED], np.int32),
        "bits": bits, "listed": listed, "bias": raw,
        "x": eighths(BLOCK_Q, LEN_KV), "S": np.zeros((BLOCK_Q, LEN_KV), np.float32),
        "constants": np.full(6, -7, np.int32),
    }  # fmt: skip
    if features.scored:
        arguments["score_params"] = pack(SCORE_PARAMS, values, {})
        arguments["boxes"] = raw
        arguments["bias_map"] = hook_map(features, bias)
    return arguments


def hook_expected(features: Features, constants: list[int], /, x: np.ndarray, **_: Any) -> Results:
    own = slice(Q0, Q0 + BLOCK_Q)
    S = x.astype(np.float64)
    if features.softcap:
        S = UNIT * np.tanh(S / UNIT)
    if features.bias:
        bias = hook_bias(features)[0, -1].astype(np.float64)
        S = S + FACTOR * (bias if features.bias_kind == "keys" else bias[own])
    if features.mask_kind:
        mask = hook_mask(features.mask_kind)[HEAD]
        S = np.where(mask if len(mask) == 1 else mask[own], S, -np.inf)
    if features.varlen:
        S[SHORT - Q0 :] = 0
    step = np.arange(LEN_KV) // HOOK_KV
    taken = TAKEN if features.mask_kind else range(HOOK_STEPS)
    S[:, ~np.isin(step, taken)] = 0
    S[16:, step == taken[SKIPPED]] = 0
    return {"S": S.astype(np.float32), "constants": np.array(constants, np.int32)}


#: Features, and the constants that follow: is there a mask, a dense bias, one of both; bytes of
#: bias and of bits, shared memory of a stage.
HOOKS = (
    (PLAIN, [0, 0, 0, 0, 0, 0]),
    (
        replace(PLAIN, scored=True, softcap=True, mask=True, mask_kind="rows", bias="float16",
                bias_kind="dense"),
        [1, 1, 1, 2 * 32 * 128, 512, 2 * 4096 + 512],
    ),
    (
        replace(PLAIN, scored=True, mask=True, mask_kind="keys", bias="bfloat16",
                bias_kind="keys", varlen=True),
        [1, 0, 1, 2 * 128, 16, 2 * 1024 + 16],
    ),
    (
        replace(PLAIN, scored=True, softcap=True, bias="float32", bias_kind="rows"),
        [0, 0, 0, 0, 0, 0],
    ),
)  # fmt: skip


SCORE_HOOK_PRIMS = [
    Prim(
        f"score_hook-{features.bias_kind or 'plain'}", "score_hook", "change", 96,
        partial(hook_arguments, features), partial(hook_expected, features, constants), hopper=True,
        absolute=UNIT * SOFTCAP_ERROR if features.softcap else 0.0,
        defines=defines(Tiles(BLOCK_Q, HOOK_KV, 2, 2), features),
    )
    for features, constants in HOOKS
]  # fmt: skip
