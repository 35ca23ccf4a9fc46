"""What an attention kernel is compiled for: features of a call, and the module that has them."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import stacking
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import Kernel
from cupyattn.problem.operands import Operands


def module_spec(
    variant: Variant, features: Features, tiles: Tiles, form: str = "portable"
) -> ModuleSpec:
    """Return what to compile for a variant with these features and tiles."""
    defines = {**tiles.defines(), **features.defines()}
    return ModuleSpec(variant.forms[form].source, tuple(sorted(defines.items())))


def widest(*operands: Operand) -> int:
    """Return how many elements an access may have that all of the operands allow."""
    return max(w for w in (1, 2, 4, 8) if all(x.allows(w) for x in operands))


def features_of(call: AttentionSpec, vec: int, **quantised: Any) -> Features:
    """Return what kernels of a call are compiled for; `quantised` names fields of `Features`."""
    return Features(
        call.dtype, call.head_dim, call.causal, call.return_lse, vec, window=call.window,
        softcap=bool(call.softcap), mask=call.mask, bias=call.bias, block_mask=call.block_mask,
        rope=call.rope, varlen=call.packed is not None, padded=call.padded is not None,
        stacked=call.stack > 0, **quantised,
    )  # fmt: skip


def kernel_features(kernel: Kernel, operands: Operands, *, quantize_q: bool = False) -> Features:
    """Return what the kernel of a call is compiled for.

    Parameters
    ----------
    kernel : Kernel
    operands : Operands
        As the caller has them, heads not stacked.
    quantize_q : bool
        Whether it makes the codes of Q by itself.
    """
    call, codes, given = kernel.launched, kernel.codes, launched_operands(kernel, operands)
    q, k, v, o = given.rows.values()
    added: dict[str, Any] = {} if codes is None else codes.features
    if kernel.row.on_hopper:
        added |= _score_features(call, given)
    if codes is None or codes.fused:
        return features_of(call, widest(q, k, v, o), **added)
    rows = (v, o) if codes.values is None else (o,)  # codes of V are read by channel, not by row
    vec = max(w for w in (1, 2, 4, 8) if _codes_allow(w, q, k, *rows))
    return features_of(call, vec, quantize_q=quantize_q, **added)


def launched_operands(kernel: Kernel, operands: Operands) -> Operands:
    """Return the operands as the kernel is launched for them, heads stacked where they are."""
    return stacking.stacked_operands(kernel.call, operands) if kernel.stacks else operands


def _codes_allow(vec: int, q_codes: Operand, k_codes: Operand, *rows: Operand) -> bool:
    """Whether V and O move `vec` elements at a time and the codes CODE_VEC, as in fa_int8."""
    wide = 2 * vec if vec > 1 and q_codes.shape[-1] % (2 * vec) == 0 else vec
    return all(x.allows(vec) for x in rows) and q_codes.allows(wide) and k_codes.allows(wide)


def _score_features(call: AttentionSpec, operands: Operands) -> dict[str, Any]:
    """Return the fields of `Features` that a Hopper form has for softcap, bias and mask."""
    if not (call.softcap or call.mask or call.bias):
        return {}
    return {
        "scored": True,
        "mask_kind": _kind(operands.mask, "rows"),
        "bias_kind": _kind(operands.bias, "dense"),
    }


def _kind(x: Operand | None, whole: str) -> str:
    """Return of what kind a mask or bias is: `whole`, or what it is the same for all others of."""
    if x is None:
        return ""
    _, _, by_row, by_key = x.steps
    if whole == "dense" and by_key == 0:
        return "rows"
    return "keys" if by_row == 0 else whole
