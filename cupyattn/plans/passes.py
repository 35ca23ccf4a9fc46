"""The stages of a call that prepares, quantises or unpacks its operands before attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand
from cupyattn.plans import attention, attention_int8
from cupyattn.plans.codes import Scales, ZeroPoints
from cupyattn.plans.prepare_rows import plan_preparation, prepares_of
from cupyattn.plans.quantize import Part, operand_parts, plan_quantize
from cupyattn.plans.records import Stage, Work, Workspace
from cupyattn.plans.unpack import plan_unpack
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.checks import AttentionSpec
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantizers import padded_columns


def stages_with_passes(problem: AttentionProblem) -> Work:
    """Plan the passes over the operands, and attention of what they return."""
    z: Any = problem.quantized
    if problem.prepares_before:
        return _preparing_stages(problem)
    if z is None:
        return _quantising_stages(problem)
    first = _unpacking_stages(z)
    names = {one.names["nibbles"]: one.names["codes"] for one in first.stages}
    zeros = None
    if z.q_zero is not None:
        zeros = ZeroPoints(z.q_code_sum.place, z.k_code_sum.place)
    scales = Scales(z.q_scale.place, z.k_scale.place, z.k_mean is not None, zeros)
    plan = attention_int8.plan_int8(problem.kernel, problem.places, scales)
    return Work((*first.stages, Stage(plan, names)), first.between)


def _unpacking_stages(z: Any) -> Work:
    """Plan the kernel that unpacks codes of 4 bits to INT8; no stages for 8-bit codes."""
    stages, between = [], []
    for name in ("q_codes", "k_codes") if z.has_nibbles else ():
        x, result = getattr(z, name).place, f"{name}_unpacked"
        stages.append(Stage(plan_unpack(x, z.head_dim), {"nibbles": name, "codes": result}))
        between.append(Workspace(result, (*x.shape[:3], padded_columns(z.head_dim)), "int8"))
    return Work(tuple(stages), tuple(between))


def _preparing_stages(problem: AttentionProblem) -> Work:
    """Plan a rung that takes operands prepared already: a pass for each of Q and K, then that."""
    call, hows = problem.call, prepares_of(problem.preparation)
    operands = {name: problem.operand_layouts[name] for name in "qk"}
    passes = tuple(
        Stage(
            plan_preparation(x, call.dtype, hows[name], packed_lengths(call, name)),
            {"x": name, "turned": f"{name}_turned", "cu_seqlens": f"cu_seqlens_{name}"},
        )
        for name, x in operands.items()
    )
    between = tuple(Workspace(f"{n}_turned", x.shape, call.dtype) for n, x in operands.items())
    plan = attention.plan_attention(problem.kernel, problem.places)
    turned = {name: f"{name}_turned" for name in operands}
    return Work((*passes, Stage(plan, turned)), between)


def packed_lengths(call: AttentionSpec, name: str) -> tuple[int, int] | None:
    """Return the number and largest length of an operand's packed sequences; None without any."""
    if call.packed is None:
        return None
    return call.batch, call.len_q if name == "q" else call.len_kv


def _quantising_stages(problem: AttentionProblem) -> Work:
    """Plan ``fa_int8`` on arrays: quantise, unless the kernel does it itself, then attend."""
    quant, tiles, call = problem.quant, problem.scale_tiles, problem.attended
    if quant.fused:
        return Work((Stage(attention.plan_attention(problem.kernel, problem.places)),))
    given = problem.operand_layouts
    packed = {name: packed_lengths(call, name) for name in given}
    lengths = call.lengths_in
    padded = None if call.padded is None else {**lengths, "v": lengths["k"]}
    found = operand_parts(quant, tiles, given, packed, prepares_of(problem.preparation), padded)
    # No launch writes the mean of zero keys, or the memory past the codes of packed sequences and
    # padded entries. These values meet weights of 0, and a float among them might be NaN. Given
    # scales are in other buffers.
    filled = {f"{name}_mean" for name, part in found.items() if not all(part.x.shape)}
    filled |= {"v_codes"} if call.own_lengths and quant.value_p_type == "e4m3" else set()
    between = [
        Workspace(b, shape, dtype, b in filled, copy_of=_given_scale(b) if part.static else "")
        for name, part in found.items()
        for b, (shape, dtype) in part.buffers(name).items()
        if not b.endswith("static_scale")
    ]
    made = {w.name: Operand.contiguous(w.shape, np.dtype(w.dtype).itemsize) for w in between}
    zeros: ZeroPoints | None = None
    renamed: dict[str, str] = {}
    if quant.zero_points:
        zeros = ZeroPoints(made["q_code_sum"], made["k_code_sum"])
    if "v" not in found and call.dtype == "float32":  # P.V takes float16
        renamed = {"v": "v_float16"}
        v = given["v"]
        between.append(
            Workspace("v_float16", v.shape, "float16", cast_of="v", cast_strides=v.strides)
        )
    scales = Scales(
        made["q_scale"], made["k_scale"], quant.smooth_k, zeros, _numbers(quant, found["q"])
    )
    plan = attention_int8.plan_int8(problem.kernel, problem.places, scales)
    if plan.features.quantize_q:
        del found["q"]
        between = [work for work in between if work.name not in ("q_codes", "q_scale")]
    first = plan_quantize(call.dtype, **found, p_type=quant.value_p_type, qk_bits=quant.qk_bits)
    return Work((Stage(first), Stage(plan, renamed)), tuple(between))


def _given_scale(buffer: str) -> str:
    """Return the name of the given scales that are copied to a buffer; "" if it has no scales.

    Quantising may write NaN over the copy.

    Examples
    --------
    >>> _given_scale("q_scale"), _given_scale("q_codes")
    ('q_static_scale', '')
    """
    return f"{buffer[0]}_static_scale" if buffer in ("q_scale", "k_scale") else ""


def _numbers(quant: QuantConfig, part: Part) -> Operand | None:
    """Describe Q if a kernel that sees only some rows could make its codes; otherwise None."""
    of_rows = quant.granularity_q in ("thread", "token") and not quant.static
    return part.x if of_rows and quant.qk_bits == 8 and part.prepares is None else None
