"""FlashAttention-4 for sm_90, compiled by the CuTe DSL without a device: its wheel keeps the PTX.

Its kernels take the layouts of tensors as structs, tensor maps, and what their scheduler needs.
The arrays here are (batch, heads, length, channels), which the strides say.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.interpret import TensorMap
from cupyattn.testing import numerics
from experiments._harness.foreign import LOG2_E, Case, Launcher, importing, share
from experiments._harness.foreign_attention import Gradients, attention, judged
from experiments._harness.foreign_triton import normal, unset

PACKAGE = "flash-attn-4"
#: Head dimension, heads, and the tiles of queries and keys for it: forward, backward.
CHANNELS, HEADS, FORWARD, BACKWARD = 64, 2, (192, 128), (128, 128)
SHARED = 227 << 10  # all of it
SCALE = CHANNELS**-0.5
#: The DSL reads these when it is imported.
ENVIRONMENT = {
    "CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx", "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
}  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory()
Array = npt.NDArray[Any]


@lru_cache
def _compiled() -> dict[str, str]:
    """Return the PTX of all kernels, by the name of the module that each is of."""
    os.environ.update(ENVIRONMENT, CUTE_DSL_DUMP_DIR=_FOLDER.name)
    with importing(PACKAGE):
        import torch
        from flash_attn.cute import interface
        from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        shape, device = (1, 200, HEADS, CHANNELS), "cuda"
        q, k, v, o, do = (torch.empty(shape, dtype=torch.float16, device=device) for _ in range(5))
        lse = torch.empty((1, HEADS, 200), dtype=torch.float32, device=device)
        interface._flash_attn_fwd(q, k, v, return_lse=True)
        interface._flash_attn_bwd(q, k, v, o, do, lse)
    found = {}
    for path in Path(_FOLDER.name).glob("*.ptx"):
        for name in ("fwd_sm90", "bwd_sm90", "bwd_preprocess", "bwd_postprocess"):
            if f"flash_{name}" in path.name:
                found[name] = path.read_text()
    return found


def _tensor(x: Array, order: tuple[int, ...], *, shape: bool = True) -> tuple[Any, ...]:
    """Return a tensor of the DSL: pointer, extents and strides, the last axis contiguous."""
    sizes = [np.int32(x.shape[axis]) for axis in order]
    strides = [np.int64(x.strides[axis] // x.itemsize) for axis in order if axis != x.ndim - 1]
    return (x, *sizes, *strides)


def _sums(x: Array) -> tuple[Any, ...]:
    """Return (batch, heads, length) as (length, heads, batch)."""
    return _tensor(x, (2, 1, 0))


def _map(x: Array, rows: int) -> TensorMap:
    return TensorMap(x, (1, 1, rows, CHANNELS))


def _coordinates(length: int) -> tuple[np.int32, ...]:
    """Return the extents of a tensor that the copy engine reads: length, channels, heads, batch."""
    return tuple(np.int32(n) for n in (length, CHANNELS, HEADS, 1))


def _scheduler(blocks: int) -> dict[str, Any]:
    """Return the parameters of a scheduler that takes its tile from the block's index."""
    blocks_heads_batch = (np.int32(blocks), np.int32(HEADS), np.int32(1))
    divisor = (np.int32(1), np.int32(0), np.int32(0))
    names = ("blocks", "heads", "batch", "divisor", "splits")
    return dict(zip(names, (*blocks_heads_batch, divisor, np.int32(1)), strict=True))


def forward(run: Launcher, rng: np.random.Generator) -> float:
    """Length 200: two tiles of queries and of keys, the second one not full."""
    length = 200
    shape = (1, HEADS, length, CHANNELS)
    q, k, v = (normal(rng, *shape) for _ in range(3))
    o, lse = unset(*shape), unset(1, HEADS, length, dtype=np.float32)
    blocks = -(-length // FORWARD[0])
    args = {
        **{f"shape of {name}": _coordinates(length) for name in ("q", "k", "v", "o")},
        "lse": _sums(lse), "q": _map(q, FORWARD[0]), "k": _map(k, FORWARD[1]),
        "v": _map(v, FORWARD[1]), "o": _map(o, FORWARD[0]), "scale": np.float32(SCALE * LOG2_E),
        "scheme q": np.uint8(0), "scheme k": np.uint8(0), **_scheduler(blocks),
    }  # fmt: skip
    run(_compiled()["fwd_sm90"], "", (blocks, HEADS, 1), 512, args, SHARED)
    return judged(o, q, k, v, numerics("fp16", accumulate="fp32"), lse=lse)


def backward(run: Launcher, rng: np.random.Generator) -> float:
    """dK and dV of two tiles, and the sums of dQ, which the copy engine adds up."""
    length, tiles = 200, 2
    shape, rounded = (1, HEADS, length, CHANNELS), tiles * BACKWARD[0]
    q, k, v, do = (normal(rng, *shape) for _ in range(4))
    o, lse = attention(q, k, v, SCALE)
    exact = Gradients.of(q, k, v, o, lse, do, SCALE)
    delta, lse2 = np.zeros((1, HEADS, rounded), np.float32), unset(1, HEADS, rounded, dtype="f4")
    delta[:, :, :length], lse2[:] = exact.delta, np.inf
    lse2[:, :, :length] = lse * np.float32(LOG2_E)
    dq, dk, dv = (unset(*shape) for _ in range(3))
    sums = np.zeros((1, HEADS, rounded * CHANNELS), np.float32)
    maps = {"q": (q, 0), "k": (k, 1), "v": (v, 1), "do": (do, 0), "dk": (dk, 1), "dv": (dv, 1)}
    empty = {f"nothing {index}": np.uint8(0) for index in range(4)}
    args = {
        **{f"shape of {name}": _coordinates(length) for name in maps},
        **{name: _map(array, BACKWARD[tile]) for name, (array, tile) in maps.items()},
        "lse": _sums(lse2), "delta": _sums(delta), "sums of dq": _sums(sums), **empty,
        "scale, exponents": np.float32(SCALE * LOG2_E), "scale": np.float32(SCALE),
        **_scheduler(tiles),
    }  # fmt: skip
    run(_compiled()["bwd_sm90"], "", (tiles, HEADS, 1), 384, args, SHARED)
    _finish(run, sums, dq, tiles)
    return exact.share(dq, dk, dv)


def _finish(run: Launcher, sums: Array, dq: Array, tiles: int) -> None:
    """Scale and round the sums of dQ, which lie in the order of the tensor cores' registers."""
    args = {
        "sums": _tensor(sums, (0, 1, 2)), "dq": _tensor(dq, (0, 2, 1, 3)),
        "scale": np.float32(SCALE), "nothing": np.uint8(0), **_scheduler(tiles),
    }  # fmt: skip
    run(_compiled()["bwd_postprocess"], "", (tiles, HEADS, 1), 256, args, SHARED - 4096)


def backward_preprocess(run: Launcher, rng: np.random.Generator, length: int = 100) -> float:
    """The sums of dO times O, lse in base 2, and zeros."""
    tiles = -(-length // BACKWARD[0])
    rounded = tiles * BACKWARD[0]
    o, do = (normal(rng, 1, HEADS, length, CHANNELS) for _ in range(2))
    lse = normal(rng, 1, HEADS, length, dtype=np.float32)
    delta, lse2 = (unset(1, HEADS, rounded, dtype=np.float32) for _ in range(2))
    sums = unset(1, HEADS, rounded * CHANNELS, dtype=np.float32)
    order = (2, 3, 1, 0)
    args = {
        "o": _tensor(o, order), "do": _tensor(do, order), "delta": _sums(delta),
        "lse": _sums(lse), "lse2": _sums(lse2), "sums of dq": _sums(sums),
        "scale": np.float32(1), **_scheduler(tiles),
    }  # fmt: skip
    run(_compiled()["bwd_preprocess"], "", (tiles, HEADS, 1), 256, args, SHARED - 4096)
    o, do = o.astype(np.float64), do.astype(np.float64)
    bound = 2 * CHANNELS * 2.0**-24 * (np.abs(o) * np.abs(do)).sum(-1)
    in_base_2 = lse.astype(np.float64) * LOG2_E
    return max(
        share(delta[:, :, :length], (o * do).sum(-1), bound),
        share(lse2[:, :, :length], in_base_2, 2.0**-23 * np.abs(in_base_2)),
        share(sums, np.zeros_like(sums), 0.0),
    )


def backward_preprocess_two_tiles(run: Launcher, rng: np.random.Generator) -> float:
    """Its 256 threads write lse for the rows of a tile of 128, and for the next tile."""
    return backward_preprocess(run, rng, length=200)


CASES = (
    Case("forward, sm_90", PACKAGE, forward),
    Case("backward, sums before it, one tile, sm_90", PACKAGE, backward_preprocess),
    Case("backward, sums before it, two tiles, sm_90", PACKAGE, backward_preprocess_two_tiles),
    Case("backward and the rounding of dQ, sm_90", PACKAGE, backward),
)
