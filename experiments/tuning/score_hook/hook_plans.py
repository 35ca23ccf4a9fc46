"""Plans of the candidate: fa_tc's Hopper form with softcap, bias and mask before its softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels import ladder
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import attention
from cupyattn.plans.assemble import (
    HOPPER_BLOCKS,
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _persistent,
    attn_params,
    features_of,
    module_spec,
    tensor_map_of,
)
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import ATTN_PARAMS, PIECE_PARAMS, QUANT_PARAMS, SCHEDULE_PARAMS
from cupyattn.problem.call import AttentionSpec

FOLDER = Path(__file__).resolve().parent
ARCH = "sm_90a"
FA_TC = ladder.lookup("fa_tc")
#: Polynomials in y^2 of tanh(y) / y that err least, by 2^-16.15, up to the y that comes first.
TANH = {
    4: (0.77349, (0.9999862909, -0.3325863481, 0.1267993599, -0.0345928185)),
    5: (1.08671, (0.9999862909, -0.3327365816, 0.1290488839, -0.0425835401, 0.0078722397)),
    8: (1.99123, (
        0.9999862909, -0.3328702748, 0.1306673437, -0.0477982387, 0.0142537206, -0.0029920199,
        0.0003744073911, -2.055625373e-05,
    )),
}
MOST_TERMS = 8
#: ``struct HookParams`` of hook.cuh.
HOOK_PARAMS = np.dtype(
    [
        ("bits", "u8"), ("classes", "u8"), ("steps", "u8"),
        ("tiles_batch", "i8"), ("tiles_head", "i8"), ("tiles_q", "i4"), ("mask_heads", "i4"),
        ("q_tiles", "i4"), ("key_tiles", "i4"), ("aligned", "i4"),
        ("bias_batch", "i4"), ("bias_head", "i4"), ("bias_factor", "f4"),
        ("coefficient", "f4", MOST_TERMS), ("largest_square", "f4"), ("exponent", "f4"),
        ("unit", "f4"),
    ],
    align=True,
)  # fmt: skip
NO_MASK, ROWS, KEYS = 0, 1, 2
KEYS_THREADS = 256  # of pack_mask.cu

def describe(tiles: Tiles) -> str:
    """Return tiles in a few characters."""
    return f"{tiles.block_q}x{tiles.block_kv}s{tiles.num_stages}"


@dataclass(frozen=True)
class Choice:
    """Tiles of a candidate, and terms of the polynomial of tanh where it has a softcap."""

    block_q: int
    block_kv: int
    num_stages: int = 2
    terms: int = 5

    @property
    def tiles(self) -> Tiles:
        """The tiles; warps follow from the query rows."""
        return Tiles(self.block_q, self.block_kv, self.block_q // 16 + 4, self.num_stages)

    def __str__(self) -> str:
        terms = f" t{self.terms}" if self.terms != 5 else ""
        return describe(self.tiles) + terms


#: What is raced, by feature and head_dim; the first are today's tiles where they do not spill.
CANDIDATES: dict[str, dict[int, tuple[Choice, ...]]] = {
    "key padding": {
        64: (Choice(192, 128), Choice(192, 64, 3)),
        128: (Choice(192, 80), Choice(128, 128), Choice(192, 64)),
    },
    "mask": {
        64: (Choice(192, 128), Choice(192, 128, 3), Choice(192, 96), Choice(192, 64, 3),
             Choice(128, 128)),
        128: (Choice(192, 80), Choice(128, 128), Choice(128, 96)),
    },
    "bias": {
        64: (Choice(192, 128), Choice(192, 64, 3), Choice(192, 64), Choice(128, 128)),
        128: (Choice(192, 64), Choice(192, 80), Choice(128, 128), Choice(128, 64, 3)),
    },
    "bias of keys": {
        64: (Choice(192, 128), Choice(192, 96)), 128: (Choice(192, 80), Choice(128, 128)),
    },
    "softcap": {
        64: (Choice(192, 112), Choice(192, 128), Choice(192, 96), Choice(128, 128),
             Choice(192, 112, terms=4), Choice(192, 112, terms=8)),
        128: (Choice(192, 80), Choice(192, 64), Choice(128, 128), Choice(192, 80, terms=4),
              Choice(192, 80, terms=8)),
    },
    "softcap, large": {
        64: (Choice(192, 112), Choice(192, 112, terms=8)),
        128: (Choice(192, 80), Choice(128, 128)),
    },
}  # fmt: skip
#: Calls that say where the time goes, with the first choice of a feature.
PROBES = {
    "mask, all true": "mask", "mask, lower half": "mask", "bias, one head": "bias",
    "bias, loaded once": "bias",
}  # fmt: skip


@dataclass(frozen=True)
class Hook:
    """What a call adds to plain attention; mask and bias of four axes, 1 where broadcast."""

    softcap: float = 0.0
    mask: Any = None
    bias: Any = None
    terms: int = 5  #: of the polynomial of tanh
    bias_loads: bool = True  #: False: what comes first serves all steps, to time all but its way

    @property
    def mask_kind(self) -> int:
        """Which MaskKind of hook.cuh."""
        return NO_MASK if self.mask is None else KEYS if self.mask.shape[2] == 1 else ROWS

    @property
    def bias_of_keys(self) -> bool:
        """Whether a bias is the same for every query row."""
        return self.bias is not None and self.bias.shape[2] == 1

    @property
    def options(self) -> dict[str, Any]:
        """As the reference and ``cupyattn.attention`` take it."""
        return {"softcap": self.softcap, "mask": self.mask, "bias": self.bias}

    @property
    def defines(self) -> dict[str, int]:
        """The HOOK_* macros."""
        bias = 0 if self.bias is None else 1 + DTYPES.index(self.bias.dtype.name)
        return {
            "HOOK_MASK_KIND": self.mask_kind, "HOOK_SOFTCAP_ON": int(bool(self.softcap)),
            "HOOK_BIAS_TYPE": bias, "HOOK_TANH_TERMS": self.terms,
            "HOOK_BIAS_LOADS": int(self.bias_loads), "HOOK_BIAS_KEYS": int(self.bias_of_keys),
        }  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        """Arrays that a plan names."""
        found = {"mask": self.mask, "bias": self.bias}
        return {name: a for name, a in found.items() if a is not None}


def plan_of(
    call: AttentionSpec, hook: Hook, tiles: Tiles, q: Any, k: Any, v: Any, o: Any
) -> Plan:
    """Return the launches of one call; `call` is the plain one."""
    operands = [Operand.of(x) for x in (q, k, v, o)]
    features = features_of(call, 8)
    spec = module_spec(FA_TC, features, tiles, "sm90")
    own = {name: str(FOLDER / f"{name}.cu") for name in ("attn_fa_tc_scores", "pack_mask")}
    defines = tuple(sorted({**dict(spec.defines), **hook.defines}.items()))
    of_q, of_k, of_v, of_o = operands
    params = attn_params(call, of_q, of_k, of_v, of_o, None, None, None)
    count = -(-call.len_q // tiles.block_q) * call.batch * call.heads
    boxes = tuple(
        (name, call.dtype, x, rows)
        for name, x, rows in zip(
            "qkvo", operands,
            (tiles.block_q, tiles.block_kv, tiles.block_kv, HOPPER_STORE_ROWS), strict=True,
        )
    )  # fmt: skip
    grid, structs, workspace, cut = _persistent(call, count, boxes, tiles, FA_TC.forms["sm90"])
    base = ((ATTN_PARAMS, params),)
    merge = _merge_pieces(spec, tiles, cut, (*base, (QUANT_PARAMS, {})))
    dense_bias = hook.bias is not None and not hook.bias_of_keys
    if hook.mask is not None or dense_bias:  # tiles are taken as they come, uncut
        grid, merge = min(count, HOPPER_BLOCKS), ()
        workspace = (Workspace("next_tile", (1,), "int32", zeros=True),)
        whole = {"whole": count, "cut": 0, "steps": 1, "share": 1}
        structs = (
            *structs[:4], (SCHEDULE_PARAMS, {"next_tile": "next_tile"}), (PIECE_PARAMS, whole),
        )  # fmt: skip
    of_hook, passes, between = _hook_params(call, hook, tiles, params, own["pack_mask"], defines)
    bias_map = structs[0]
    if hook.bias is not None:
        x = Operand.of(hook.bias)
        rows = tiles.block_q if dense_bias else 1
        bias_map = tensor_map_of("bias", hook.bias.dtype.name, x, rows)
    launch = Launch(
        ModuleSpec(own["attn_fa_tc_scores"], defines), "attn_fa_tc", grid, tiles.num_threads, True,
        (*base, *structs, (HOOK_PARAMS, of_hook), bias_map),
    )  # fmt: skip
    return Plan(
        "fa_tc", "sm90", tiles, features, (*passes, launch, *merge), (*workspace, *between)
    )  # fmt: skip


def _hook_params(
    call: AttentionSpec,
    hook: Hook,
    tiles: Tiles,
    params: Mapping[str, Any],
    source: str,
    defines: tuple[tuple[str, int], ...],
) -> tuple[dict[str, Any], tuple[Launch, ...], tuple[Workspace, ...]]:
    """Return ``struct HookParams``, the launches that pack a mask, and what they write to."""
    found: dict[str, Any] = {}
    if hook.softcap:
        unit = hook.softcap / call.scale
        largest, coefficients = TANH[hook.terms]
        scaled = np.zeros(MOST_TERMS)
        scaled[: hook.terms] = [c / unit ** (2 * k) for k, c in enumerate(coefficients)]
        found |= {
            "coefficient": scaled, "largest_square": (largest * unit) ** 2,
            "exponent": 2 / math.log(2) / unit, "unit": unit,
        }  # fmt: skip
    if hook.bias is not None:
        found |= {
            "bias_batch": int(hook.bias.shape[0] > 1), "bias_head": int(hook.bias.shape[1] > 1),
            "bias_factor": 1 / call.scale,
        }  # fmt: skip
    if hook.mask is None:
        return found, (), ()
    mask, rows = Operand.of(hook.mask), hook.mask_kind == ROWS
    batches, heads = mask.shape[:2]
    strides = tuple(0 if n == 1 else s for s, n in zip(mask.strides, mask.shape, strict=True))
    q_tiles = -(-call.len_q // tiles.block_q) if rows else 1
    key_tiles = -(-call.len_kv // tiles.block_kv)
    words = tiles.block_q * 4 if rows else 4
    found |= {
        "bits": "bits", "classes": "classes", "steps": "steps",
        "tiles_batch": heads * q_tiles * (batches > 1), "tiles_head": q_tiles * (heads > 1),
        "tiles_q": int(rows), "mask_heads": heads, "q_tiles": q_tiles, "key_tiles": key_tiles,
        "aligned": int(
            strides[3] == 1 and not any(s % 8 for s in strides[:3]) and mask.misalignment % 8 == 0
        ),
    }  # fmt: skip
    of_mask = {**params, "mask": "mask", "mask_stride": strides}
    structs = ((ATTN_PARAMS, of_mask), (HOOK_PARAMS, found))
    module, count = ModuleSpec(source, defines), batches * heads * q_tiles
    passes: tuple[Launch, ...] = (
        Launch(module, "pack_keys", count, KEYS_THREADS, False, structs),
    )
    if rows:
        passes = (
            Launch(module, "pack_mask", count * key_tiles, tiles.block_q * 2, False, structs),
            Launch(module, "list_steps", count, 32, False, structs),
        )
    return found, passes, (
        Workspace("bits", (count, key_tiles, words), "uint32"),
        Workspace("classes", (count, key_tiles), "uint8"),
        Workspace("steps", (count, 1 + key_tiles), "int32"),
    )  # fmt: skip


def plain_plan(call: AttentionSpec, q: Any, k: Any, v: Any, o: Any) -> Plan:
    """Return the plan of plain attention in the Hopper form."""
    plan = attention.plan_attention(FA_TC, call, *(Operand.of(x) for x in (q, k, v, o)), arch=ARCH)
    if plan.form != "sm90":
        raise ca.UnsupportedError(plan.note)
    return plan


def resources(plan: Plan) -> dict[str, Any]:
    """Return what the attention kernel of a plan takes, and whether its wgmma are serialised."""
    launch = next(one for one in plan.launches if one.entry == "attn_fa_tc")
    binary = compiler.build(launch.module, ARCH)
    taken = binary.kernels[launch.entry]
    return {
        "registers": taken.registers, "spill_bytes": taken.spill_stores + taken.spill_loads,
        "shared_bytes": binary.smem_bytes, "serialised": "serialized" in binary.log,
    }  # fmt: skip
