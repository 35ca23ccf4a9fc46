"""Plans attention of INT8 operands: pure data."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.contracts import check_tiles
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import hopper
from cupyattn.plans.assemble import (
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _named,
    _persistent,
    attn_params,
    check_grid,
    entry_of,
    features_of,
    module_spec,
)
from cupyattn.plans.codes import VALUE_PARAMS, ValueCodes, ZeroPoints, hopper_obstacle, quant_params
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS
from cupyattn.problem.call import AttentionSpec
from cupyattn.quant.operand_protocol import value_form

#: Of Hopper forms that make codes of Q by themselves: how many rows may share a scale, and the
#: largest head_dim that shared memory has room for.
QUANTIZED_ROWS, QUANTIZED_HEAD_DIM = 2, 192


@functools.lru_cache(maxsize=1024)
def plan_int8(
    variant: Variant,
    call: AttentionSpec,
    q_codes: Operand,
    k_codes: Operand,
    v: Operand,
    o: Operand,
    q_scale: Operand,
    k_scale: Operand,
    *,
    group_q: int,
    group_kv: int,
    smoothed: bool,
    numbers: Operand | None = None,
    values: ValueCodes | None = None,
    zeros: ZeroPoints | None = None,
    mask: Operand | None = None,
    bias: Operand | None = None,
    kept_blocks: Operand | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
) -> Plan:
    """Plan the INT8 rung on quantised operands.

    Parameters
    ----------
    variant, call, v, o, mask, bias, kept_blocks, tiles, arch
        As for `plan_attention`; v is 16-bit, or the buffer ``"v_codes"`` where `values` is given.
    q_codes, k_codes : Operand
        INT8 codes, the buffers ``"q_codes"`` and ``"k_codes"``.
    q_scale, k_scale : Operand
        Scales ``(batch or 1, heads or 1, groups)``, the buffers ``"q_scale"`` and ``"k_scale"``.
    group_q, group_kv : int
        Rows per scale.
    smoothed : bool
        Whether a buffer ``"k_mean"`` was subtracted from the keys.
    numbers : Operand, optional
        What the codes of Q are made of, the buffer ``"q"``. Where they have 16 bits, nothing else
        reads the codes, and a Hopper form runs with tiles of its own, it makes the same codes by
        itself: ``features.quantize_q`` of the plan says so, ``"q_codes"``, ``"q_scale"`` are not
        read.
    values : ValueCodes, optional
        V is codes: the form ``"pv8"`` runs, or ``"pv8_whole"`` where each channel has one scale;
        UnsupportedError where there is none, or where scales change within a tile.
    zeros : ZeroPoints, optional
        Q and K, and V where it is INT8 codes, have zero points.

    Returns
    -------
    Plan
    """
    form, note, own_tiles = "portable", "", tiles is None
    if values is not None:
        plain = not call.softcap and bias is None
        form = value_form(values.group, values.p_type, zeros is not None, plain=plain)
    if form not in variant.forms:
        raise UnsupportedError(
            f"{variant.name} has no kernel for codes of V: use quant.pv='16bit', or fa_int8"
        )
    if arch == "sm_90a" and "sm90" in variant.forms:
        own = "sm90" if values is None else values.hopper_form
        note = hopper_obstacle(variant, call.head_dim, group_kv, zeros, values, tiles)
        note = note or hopper.obstacle(variant, call, q_codes, k_codes, v, o)
        form = form if note else own
    tiles = variant.tiles_for(
        call.head_dim, tiles, form=form, lengths=(call.len_q, call.len_kv), causal=call.causal,
        block_mask=call.block_mask,
    )  # fmt: skip
    rows = (o,) if values else (v, o)  # codes of V are read by channel, not by row
    vec = max(w for w in (1, 2, 4, 8) if _int8_allows(w, q_codes, k_codes, *rows))
    quantised: dict[str, Any] = {"group_q": group_q, "group_kv": group_kv}
    quantised["zero_points"] = zeros is not None
    on_hopper = form.startswith("sm90")
    # NOTE: the log-sum-exp takes a product of codes of Q with the mean of the keys, and zero points
    # take the sums of codes.
    inside = on_hopper and group_q <= QUANTIZED_ROWS and not call.return_lse and zeros is None
    inside = inside and call.head_dim <= QUANTIZED_HEAD_DIM and own_tiles
    if numbers is not None and (numbers.itemsize != 2 or hopper.out_of_reach({"q": numbers})):
        inside = False
    numbers = numbers if inside else None
    quantised["quantize_q"] = numbers is not None
    if values is not None:
        values.check(v, tiles)
        quantised |= {"group_v": values.group, "p_type": values.p_type}
    features = features_of(call, vec, **quantised)
    spec = module_spec(variant, features, tiles, form)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=note)
    if not own_tiles:
        check_tiles(spec, tiles, _named(variant, form, note))
    params = attn_params(call, q_codes, k_codes, v, o, mask, bias, kept_blocks)
    params |= {"Q": "q_codes", "K": "k_codes"}
    quant = quant_params(q_scale, k_scale, smoothed, zeros)
    of_q = "q_codes", "int8", q_codes, tiles.block_q
    if numbers is not None:
        params["Q"] = quant["Q_scale"] = None
        of_q = "q", call.dtype, numbers, tiles.block_q
    merged: tuple[Any, ...] = ((ATTN_PARAMS, params), (QUANT_PARAMS, quant))
    structs = merged
    if values is not None:
        params["V"] = "v_codes"
        structs += ((VALUE_PARAMS, values.params),)
    grid = check_grid(variant.name, -(-call.len_q // tiles.block_q), call.batch * call.heads)
    workspace: tuple[Workspace, ...] = ()
    merge: tuple[Launch, ...] = ()
    if on_hopper:
        value = "bfloat16" if call.dtype == "bfloat16" else "float16"
        of_v = values.box(v, call.head_dim) if values else ("v", value, v, tiles.block_kv)
        boxes = (
            of_q, ("k_codes", "int8", k_codes, tiles.block_kv), of_v,
            ("o", call.dtype, o, HOPPER_STORE_ROWS),
        )  # fmt: skip
        grid, added, workspace, cut = _persistent(call, grid, boxes, tiles, form)
        merge = _merge_pieces(spec, tiles, cut, merged)
        structs += added
    launch = Launch(spec, entry_of(variant, form), grid, tiles.num_threads, True, structs)
    return Plan(variant.name, form, tiles, features, (launch, *merge), workspace, note)


def _int8_allows(vec: int, q_codes: Operand, k_codes: Operand, *rows: Operand) -> bool:
    """Whether V and O move `vec` elements at a time and the codes CODE_VEC, as in fa_int8."""
    wide = 2 * vec if vec > 1 and q_codes.shape[-1] % (2 * vec) == 0 else vec
    return all(x.allows(vec) for x in rows) and q_codes.allows(wide) and k_codes.allows(wide)
