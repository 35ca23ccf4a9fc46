"""Calls that run in a portable form on Hopper, one for each reason: the table of docs/FEATURES.md.

Each row is resolved as a call is, so that the reason is what `cupyattn.explain` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.ops.attention import resolved
from cupyattn.quant import QuantConfig
from experiments._harness import recording

#: Title of the section.
TITLE = "What leaves the Hopper forms"


@dataclass(frozen=True)
class PortableCall:
    """A call for which every Hopper form of its rung is left out.

    `remedy` says what to do, `head_dim` and `keys` are sizes; `odd` puts operands 2 bytes past a
    multiple of 16, `codes` quantises them beforehand.
    """

    condition: str
    remedy: str
    variant: str
    options: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = 64
    keys: int = 256
    odd: bool = False
    codes: QuantConfig | None = None



def _zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


_BIAS = _zeros(256, 256)
_KEPT = np.ones((1, 1, 4, 4), bool)
CALLS = (
    PortableCall(
        "`bias` in float32, a number for each key, past head_dim 192",
        "float16 or bfloat16, if exact enough", "fa_tc",
        {"bias": _zeros(256, 256, dtype=np.float32)}, 256,
    ),
    PortableCall(
        "`bias` in float32, a number for each key, past head_dim 128",
        "float16 or bfloat16, if exact enough", "fa_int8",
        {"bias": _zeros(256, 256, dtype=np.float32)}, 256,
    ),
    PortableCall(
        "`bias` in float32, a number for each key, beside V in 8 bits",
        "float16 or bfloat16, if exact enough", "fa_int8",
        {"bias": _zeros(256, 256, dtype=np.float32), "quant": QuantConfig(pv="int8")},
    ),
    PortableCall(
        "`mask` and `bias` together past head_dim 192", "-inf in the bias in place of the mask",
        "fa_tc", {"bias": _BIAS, "mask": np.ones((256, 256), bool)}, 256,
    ),
    PortableCall(
        "`bias` with an extreme `scale`", "scale q", "fa_tc",
        {"bias": _BIAS, "scale": 2.0**20},
    ),
    PortableCall(
        "an extreme `softcap`", "a cap nearer to the scores", "fa_tc", {"softcap": 1e6}
    ),
    PortableCall(
        "an extreme `softcap`", "a cap nearer to the scores", "fa_int8", {"softcap": 2e4}
    ),
    PortableCall(
        "`block_mask` of blocks of 64 query rows", "blocks of 128 query rows", "fa_tc",
        {"block_mask": ca.BlockMask(_KEPT, 64, 64)},
    ),
    PortableCall(
        "`block_mask` of padded entries", "masks of entries in `mask`", "fa_tc",
        {"block_mask": ca.BlockMask(_KEPT[..., :2, :2], 128, 128), "lengths_kv": np.int32([200])},
    ),
    PortableCall("no keys", "nothing: O is 0", "fa_tc", keys=0),
    PortableCall(
        "q, k, v or out at no multiple of 16 bytes", "whole arrays, head_dim a multiple of 8",
        "fa_tc", odd=True,
    ),
    PortableCall(
        "a scale of K for fewer than 16 keys", "`granularity_k` thread, block or head", "fa_int8",
        {"quant": QuantConfig(granularity_k="token")},
    ),
    PortableCall(
        "zero points with P and V as INT8 codes", "`pv='16bit'`, or symmetric codes", "fa_int8",
        {"quant": QuantConfig(symmetric=False, pv="int8", granularity_v="channel")},
    ),
    PortableCall(
        "P in s8", "u8, the default", "fa_int8",
        {"quant": QuantConfig(pv="int8", p_type="s8", granularity_v="channel")},
    ),
    PortableCall(
        "FP8 with a scale of V for each group of keys", "`granularity_v='channel'`", "fa_int8",
        {"quant": QuantConfig(pv="fp8", granularity_v="block")},
    ),
    PortableCall(
        "FP8 past head_dim 128", "`pv='int8'`", "fa_int8",
        {"quant": QuantConfig(pv="fp8", granularity_v="channel")}, 192,
    ),
    PortableCall(
        "codes of V grouped for other tiles", "quantise for the device: `arch='sm_90a'`",
        "fa_int8", codes=QuantConfig(pv="int8", granularity_v="block"),
    ),
)  # fmt: skip


def outcome(call: PortableCall) -> tuple[str, str]:
    """Return the form of a call on Hopper, and why a Hopper form was left out; nothing runs."""
    shapes = (1, 1, 256, call.head_dim), (1, 1, call.keys, call.head_dim)
    q, k, v = (_operand(shape, call.odd) for shape in (shapes[0], shapes[1], shapes[1]))
    given: Any = (q, k, v)
    if call.codes is not None:
        given = (ca.quantize(q, k, v, quant=call.codes),)
    kernel = resolved(*given, variant=call.variant, arch="sm_90a", **call.options).kernel
    return kernel.form, kernel.note


def _operand(shape: tuple[int, ...], odd: bool) -> Any:
    flat = np.zeros(int(np.prod(shape)) + 17, np.float16)
    start = -(flat.ctypes.data % 16) // 2 % 8 + int(odd)
    return flat[start : start + int(np.prod(shape))].reshape(shape)


def reason(note: str) -> str:
    """Return what a note says about the call, without its numbers."""
    return note.removeprefix("portable form: ").split(", got ")[0]


def section() -> Iterator[str]:
    """Yield the lines of the section of docs/FEATURES.md."""
    yield from (
        f"## {TITLE}", "",
        "On a device of compute capability 9.0 these calls run in a portable form of their rung, "
        "which is several times slower. `cupyattn.explain` says the same reason, with the sizes "
        "that it found. All other calls of `fa_tc` and `fa_int8` run in a Hopper form, but for two "
        "choices. A few query rows with many keys run in the split form, which is made for them. "
        "`QuantConfig(fused=True)` and `tiles=` without `arch=\"sm_90a\"` ask for a portable form.",
        "",
        "A bias whose rows begin at no multiple of 16 bytes runs in the Hopper form. It is copied "
        "first, which moves 4 bytes a number in each call, or 8 of float32. To save the copy, "
        "allocate len_kv rounded up to 8 and give the slice `[..., :len_kv]`.", "",
        "A bias in float32 has tiles of twice the size. Shared memory has room for them up to "
        "head_dim 192 in `fa_tc`, and up to 128 in `fa_int8` with V in 16 bits. Other such calls "
        "keep their numbers and run in the portable form.", "",
    )  # fmt: skip
    rows = [
        [call.condition, f"`{call.variant}`", reason(outcome(call)[1]), call.remedy]
        for call in CALLS
    ]
    yield from recording.markdown(["call", "rung", "reason", "instead"], rows)
