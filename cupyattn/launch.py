"""From a checked call to a `cupyattn.plans.Plan`. The only file that casts scalars for a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cupyattn import hopper, pieces, splits, stacking
from cupyattn.checks import INT32_MAX, AttentionCall
from cupyattn.codes import value_form
from cupyattn.compile import ModuleSpec
from cupyattn.contracts import check_tiles
from cupyattn.errors import UnsupportedError
from cupyattn.features import Features
from cupyattn.params import (
    ATTN_PARAMS,
    PIECE_PARAMS,
    QUANT_PARAMS,
    SCHEDULE_PARAMS,
    SPLIT_PARAMS,
)  # fmt: skip
from cupyattn.plans import Launch, Operand, Plan, TensorMap, Workspace
from cupyattn.registry import SUFFIXED, Variant
from cupyattn.tiles import Tiles
from cupyattn.value_codes import (
    VALUE_PARAMS,
    FusedCodes,
    ValueCodes,
    ZeroPoints,
    hopper_obstacle,
    quant_params,
)

LOG2E = math.log2(math.e)
#: Kernels of the unfused rung, in order; each can be planned alone.
UNFUSED_STEPS = ("scores", "softmax", "weighted_sum")

#: Thread blocks of a persistent Hopper kernel: one for each SM of an H100 or H200 SXM. Blocks take
#: tiles as they become free, so a device with fewer SMs computes the same.
HOPPER_BLOCKS = 132
#: Forms that cut the tiles of the last wave (`cupyattn.pieces`).
PIECES_OF = ("sm90", "sm90_pv8")
#: Of Hopper forms that make codes of Q by themselves: how many rows may share a scale, and the
#: largest head_dim that shared memory has room for.
QUANTIZED_ROWS, QUANTIZED_HEAD_DIM = 2, 192
#: Rows of O that a warp of such a kernel stores at a time.
HOPPER_STORE_ROWS = 16


def module_spec(
    variant: Variant, features: Features, tiles: Tiles, form: str = "portable"
) -> ModuleSpec:
    """Return what to compile for a variant with these features and tiles."""
    folder, suffix = SUFFIXED.get(form, ("" if form == "portable" else f"{form}/", ""))
    source = variant.source or f"{folder}attn_{variant.name}{suffix}.cu"
    return ModuleSpec(source, tuple(sorted({**tiles.defines(), **features.defines()}.items())))


def _named(variant: Variant, form: str, note: str = "") -> str:
    """Return a kernel's name for a message, with the reason where its form is not the Hopper one.

    A `note` that gives such a reason begins with ``"portable form: "``.
    """
    return f"{variant.name} ({note if note.startswith('portable form') else form})"


def widest(*operands: Operand) -> int:
    """Return how many elements an access may have that all of the operands allow."""
    return max(w for w in (1, 2, 4, 8) if all(x.allows(w) for x in operands))


def check_grid(what: str, *counts: int, limit: int = INT32_MAX) -> int:
    """Return the product of `counts`, how many blocks there are; UnsupportedError past a limit."""
    blocks = math.prod(counts)
    if blocks > limit:
        raise UnsupportedError(
            f"{what} takes {blocks} blocks, more than {limit}: split the call over batch or heads"
        )
    return blocks


def features_of(call: AttentionCall, vec: int, **quantised: Any) -> Features:
    """Return what kernels of a call are compiled for; `quantised` names fields of `Features`."""
    return Features(
        call.dtype, call.head_dim, call.causal, call.return_lse, vec, window=call.window,
        softcap=bool(call.softcap), mask=call.mask, bias=call.bias, block_mask=call.block_mask,
        rope=call.rope, varlen=call.packed is not None, stacked=call.stack > 0, **quantised,
    )  # fmt: skip


def attn_params(
    call: AttentionCall,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    mask: Operand | None,
    bias: Operand | None,
    kept_blocks: Operand | None,
) -> dict[str, Any]:
    """Return the fields of ``struct AttnParams``, buffers by their names."""
    given = mask is not None, bias is not None, kept_blocks is not None
    if given != (call.mask, bool(call.bias), call.block_mask != (0, 0)):
        raise ValueError(
            "mask, bias and kept_blocks must be given where the call has them, and only there"
        )
    absent, packed = (0, 0, 0, 0), call.packed
    return {
        "Q": "q", "K": "k", "V": "v", "O": "o",
        "lse": "lse" if call.return_lse else None, "S": None,
        "Q_stride": q.row_strides, "K_stride": k.row_strides,
        "V_stride": v.row_strides, "O_stride": o.row_strides,
        "batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv,
        "len_q": call.len_q, "len_kv": call.len_kv, "causal_shift": call.causal_shift,
        "scale": call.scale, "scale_log2": call.scale * LOG2E,
        "mask": "mask" if mask else None, "bias": "bias" if bias else None,
        "mask_stride": mask.strides if mask else absent,
        "bias_stride": bias.strides if bias else absent,
        "window_shift": call.window_shift, "softcap": call.softcap,
        "softcap_inverse": 1 / call.softcap if call.softcap else 0.0,
        "kept_blocks": "kept_blocks" if kept_blocks else None,
        "kept_stride": kept_blocks.row_strides if kept_blocks else absent[:3],
        "rope_cos": "rope_cos" if call.rope else None,
        "rope_sin": "rope_sin" if call.rope else None, "rope_offset_q": call.rope_offset_q,
        "cu_seqlens_q": "cu_seqlens_q" if packed else None,
        "cu_seqlens_k": "cu_seqlens_k" if packed else None,
        "total_q": packed.total_q if packed else 0,
        "bottom_right": packed is not None and packed.bottom_right, "stack": call.stack,
    }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def plan_attention(
    variant: Variant,
    call: AttentionCall,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    *,
    mask: Operand | None = None,
    bias: Operand | None = None,
    kept_blocks: Operand | None = None,
    fused: FusedCodes | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
) -> Plan:
    """Plan a 16/32-bit rung, or the INT8 rung on such operands.

    Parameters
    ----------
    variant : Variant
    call : AttentionCall
    q, k, v, o : Operand
        The buffers called ``"q"``, ``"k"``, ``"v"``, ``"o"`` (and ``"lse"``) when the plan runs;
        with rope also ``"rope_cos"`` and ``"rope_sin"``, as `cupyattn.rope.Rope` has them, and of a
        packed call ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, int32.
    mask, bias : Operand, optional
        The buffers ``"mask"`` and ``"bias"``, of shape (batch, heads, len_q, len_kv), where the
        call has them; stride 0 where they are broadcast.
    kept_blocks : Operand, optional
        The buffer ``"kept_blocks"``, as `cupyattn.block_mask.BlockMask.kept_blocks` makes it, where
        the call has a block mask.
    fused : FusedCodes, optional
        The form ``"fused"`` runs, on every architecture, and makes these codes of q and k itself.
    tiles : Tiles, optional
        The variant's own for this head_dim when omitted.
    arch : str, optional
        Architecture that it will run on: on ``"sm_90a"`` the Hopper form runs where there is one
        that takes the call; `Plan.note` says why where it does not. Few query rows and many keys
        take the split form on every architecture, unless there are `tiles`.

    Returns
    -------
    Plan
        Without launches when the output is empty.

    Raises
    ------
    UnsupportedError
        For a dtype or size that the variant does not take.
    """
    variant.check_dtype(call.dtype)
    if call.qk_norm or (call.rope and not variant.turns_on_load):
        raise UnsupportedError(
            f"{variant.name} takes operands that are turned already: run plan_rotation on q and k"
        )
    given = tiles
    changed, note = call.scores_changed or call.packed is not None, ""
    form = "fused" if fused else variant.form_for(call.len_q, call.len_kv, tiles, changed=changed)
    if form == "split" and arch == "sm_90a" and tiles is None:
        stacked = stacking.stacked(call, q, o)
        if stacked is not None and not hopper.obstacle(variant, stacked[0], stacked[1], k, v, o):
            form, note = "sm90", stacking.describe(call)
            call, q, o = stacked
    if form == "portable" and arch == "sm_90a" and "sm90" in variant.forms:
        note = hopper.obstacle(variant, call, q, k, v, o)
        form = "portable" if note else "sm90"
    tiles = variant.tiles_for(
        call.head_dim, tiles, form=form, lengths=call.mean_lengths, causal=call.causal,
        block_mask=call.block_mask,
        rows=splits.wanted_rows(call.batch, call.heads, call.heads_kv, call.len_q),
    )  # fmt: skip
    if fused is not None:
        fused.check(tiles)
    features = features_of(call, widest(q, k, v, o), **(fused.features if fused else {}))
    spec = module_spec(variant, features, tiles, form)
    if given is not None or variant.source is not None:
        check_tiles(spec, tiles, _named(variant, form, note))
    params = attn_params(call, q, k, v, o, mask, bias, kept_blocks)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=note)
    if form == "split":
        return _plan_split(variant, call, tiles, features, spec, params)
    if variant.family == "unfused":
        return _plan_unfused(variant, call, form, tiles, features, spec, params)
    grid = check_grid(variant.name, -(-call.len_q // tiles.block_q), call.batch * call.heads)
    structs: tuple[Any, ...] = ((ATTN_PARAMS, params),)
    workspace: tuple[Workspace, ...] = ()
    merge: tuple[Launch, ...] = ()
    if form == "sm90":
        boxes = (
            ("q", call.dtype, q, tiles.block_q), ("k", call.dtype, k, tiles.block_kv),
            ("v", call.dtype, v, tiles.block_kv), ("o", call.dtype, o, HOPPER_STORE_ROWS),
        )  # fmt: skip
        grid, added, workspace, cut = _persistent(call, grid, boxes, tiles)
        merge = _merge_pieces(spec, tiles, cut, (*structs, (QUANT_PARAMS, {})))
        structs += added
    entry = f"{variant.entry_point}_fused" if fused else variant.entry_point
    launch = Launch(spec, entry, grid, tiles.num_threads, True, structs)
    return Plan(variant.name, form, tiles, features, (launch, *merge), workspace, note)


def _persistent(
    call: AttentionCall,
    count: int,
    boxes: Sequence[tuple[str, str, Operand, int]],
    tiles: Tiles,
    form: str = "sm90",
) -> tuple[int, tuple[Any, ...], tuple[Workspace, ...], pieces.Pieces]:
    """Return blocks, further parameters, workspace, and pieces of a form that takes `count` tiles.

    Boxes are buffer, dtype, operand and rows of what the copy engine moves.
    """
    # NOTE: every block goes on to a tile past the last, whose number is an int as well.
    check_grid("the Hopper form", count, limit=INT32_MAX - HOPPER_BLOCKS)
    uneven = (call.causal and not call.stack) or call.window
    uneven = uneven or call.packed is not None or call.block_mask != (0, 0)
    cuts = form in PIECES_OF and not uneven
    steps = -(-call.len_kv // tiles.block_kv)
    sharing = HOPPER_BLOCKS if cuts else 1  # one block cuts nothing
    cut = pieces.share_out(count, steps, sharing, tiles.block_kv)
    structs: tuple[Any, ...] = tuple(tensor_map_of(*box) for box in boxes)
    structs += ((SCHEDULE_PARAMS, {"next_tile": "next_tile" if uneven else None}),)
    structs += ((PIECE_PARAMS, cut.params),) if form in PIECES_OF else ()
    counter = (Workspace("next_tile", (1,), "int32", zeros=True),)
    parts = tuple(Workspace(*one) for one in cut.buffers(tiles, call.head_dim))
    blocks = HOPPER_BLOCKS if cut.cut else min(count, HOPPER_BLOCKS)
    return blocks, structs, counter if uneven else parts, cut


def _merge_pieces(
    spec: ModuleSpec, tiles: Tiles, cut: pieces.Pieces, structs: tuple[Any, ...]
) -> tuple[Launch, ...]:
    """Plan what brings the pieces of tiles together, a warp to a query row; () without any."""
    if not cut.cut:
        return ()
    grid = -(-cut.cut * tiles.block_q // tiles.num_warps)
    # Wherever codes of Q are made, the pieces are alike: one module for both.
    defines = tuple(one for one in spec.defines if one[0] != "CFG_QUANTIZE_Q")
    merge = ModuleSpec("sm90/merge_pieces.cu", defines)
    structs += ((PIECE_PARAMS, cut.params),)
    return (Launch(merge, "merge_pieces", grid, tiles.num_threads, False, structs),)


def tensor_map_of(name: str, dtype: str, x: Operand, rows: int) -> TensorMap:
    """Describe an operand, copied `rows` rows and 128 bytes of columns at a time."""
    # NOTE: an axis of length 1 is never stepped along, but its stride must still be a legal one.
    strides = tuple(
        s * x.itemsize if n > 1 else 16 for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True)
    )
    return TensorMap(name, dtype, x.shape, strides, (1, 1, rows, 128 // x.itemsize))


def _plan_split(
    variant: Variant,
    call: AttentionCall,
    tiles: Tiles,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
) -> Plan:
    """Plan the slices of the keys and what brings them together."""
    sizes = call.batch, call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    cut = splits.split(sizes, call.limits, tiles)
    rows = splits.shared_rows(*sizes[1:4])
    reads, own = -(-rows // tiles.block_q), splits.MERGE_TILES
    grid = check_grid(variant.name, reads, cut.parts, call.batch * call.heads_kv)
    structs = ((ATTN_PARAMS, params), (SPLIT_PARAMS, cut.params(rows)))
    launches = [Launch(spec, variant.entry_point, grid, tiles.num_threads, True, structs)]
    if cut.parts > 1:
        merged = check_grid("merge_splits", cut.merge_blocks(math.prod(call.lse_shape)))
        merge = replace(module_spec(variant, features, own), source="split/merge_splits.cu")
        launches.append(Launch(merge, "merge_splits", merged, own.num_threads, True, structs))
    workspace = tuple(Workspace(*one) for one in cut.buffers(call.lse_shape, call.head_dim))
    return Plan(
        variant.name, "split", tiles, features, tuple(launches), workspace,
        cut.describe(rows, reads),
    )  # fmt: skip


def _unfused_launch(
    step: str,
    variant: Variant,
    call: AttentionCall,
    spec: ModuleSpec,
    tiles: Tiles,
    params: Mapping[str, Any],
) -> tuple[Launch, ...]:
    """Return the launch of one step of the unfused rung; none where it has nothing to write."""
    q_blocks, kv_blocks = -(-call.len_q // tiles.block_q), -(-call.len_kv // tiles.block_kv)
    batch_heads = call.batch * call.heads
    grids = {
        "scores": (kv_blocks, q_blocks, batch_heads),
        "softmax": (-(-call.len_q // tiles.num_warps), batch_heads),
        "weighted_sum": (q_blocks, batch_heads),
    }
    grid = check_grid(variant.name, *grids[step])
    if grid == 0:
        return ()
    entry = f"{variant.entry_point}_{step}"
    return (
        Launch(spec, entry, grid, tiles.num_threads, step != "softmax", ((ATTN_PARAMS, params),)),
    )


def _plan_unfused(
    variant: Variant,
    call: AttentionCall,
    form: str,
    tiles: Tiles,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
) -> Plan:
    params = {**params, "S": "S"}
    launches = (
        launch
        for step in UNFUSED_STEPS
        for launch in _unfused_launch(step, variant, call, spec, tiles, params)
    )
    scores = Workspace("S", (call.batch, call.heads, call.len_q, call.len_kv), "float32")
    return Plan(variant.name, form, tiles, features, tuple(launches), (scores,))


def plan_unfused_step(
    step: str,
    variant: Variant,
    call: AttentionCall,
    operands: Mapping[str, Operand],
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """Plan one kernel of the unfused rung by itself.

    Parameters
    ----------
    step : {"scores", "softmax", "weighted_sum"}
        S = scale Q K^T; P = softmax(S), in place; O = P V.
    variant : Variant
        Of family ``"unfused"``.
    call : AttentionCall
    operands : mapping of str to Operand
        Those of ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"mask"``, ``"bias"``, ``"kept_blocks"`` that
        the step uses. It also uses a buffer ``"S"``, float32 ``(batch, heads, len_q, len_kv)`` in C
        order, and ``"lse"`` where the call asks for it.
    tiles : Tiles, optional
        The variant's own when omitted.

    Returns
    -------
    Plan
        Without workspace: S is the caller's.
    """
    tiles = variant.tiles_for(call.head_dim, tiles, block_mask=call.block_mask)
    rows = [x for name, x in operands.items() if name in "qkvo"]
    vec = widest(*rows) if rows else 1
    features = features_of(call, vec)
    spec = module_spec(variant, features, tiles)
    check_tiles(spec, tiles, f"{variant.name} (portable)")
    absent = Operand((1, 1, 1, 1), (0, 0, 0, 0), 1, 0)
    q, k, v, o = (operands.get(name, absent) for name in "qkvo")
    of_scores = (operands.get(name) for name in ("mask", "bias", "kept_blocks"))
    params = attn_params(call, q, k, v, o, *of_scores)
    params["S"] = "S"
    params.update({name.upper(): None for name in "qkvo" if name not in operands})
    launches = _unfused_launch(step, variant, call, spec, tiles, params)
    return Plan(variant.name, "portable", tiles, features, launches)


@functools.lru_cache(maxsize=1024)
def plan_int8(
    variant: Variant,
    call: AttentionCall,
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
    if not own_tiles:
        check_tiles(spec, tiles, _named(variant, form, note))
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=note)
    params = attn_params(call, q_codes, k_codes, v, o, mask, bias, kept_blocks)
    params |= {"Q": "q_codes", "K": "k_codes"}
    quant = quant_params(q_scale, k_scale, smoothed, zeros)
    of_q = "q_codes", "int8", q_codes, tiles.block_q
    if numbers is not None:
        params["Q"] = quant["Q_scale"] = None
        of_q = "q", call.dtype, numbers, tiles.block_q
    merged: tuple[Any, ...] = ((ATTN_PARAMS, params), (QUANT_PARAMS, quant))
    structs, entry = merged, variant.entry_point
    if values is not None:
        params["V"], entry = "v_codes", entry + SUFFIXED[form][1]
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
    launch = Launch(spec, entry, grid, tiles.num_threads, True, structs)
    return Plan(variant.name, form, tiles, features, (launch, *merge), workspace, note)


def _int8_allows(vec: int, q_codes: Operand, k_codes: Operand, *rows: Operand) -> bool:
    """Whether V and O move `vec` elements at a time and the codes CODE_VEC, as in fa_int8."""
    wide = 2 * vec if vec > 1 and q_codes.shape[-1] % (2 * vec) == 0 else vec
    return all(x.allows(vec) for x in rows) and q_codes.allows(wide) and k_codes.allows(wide)
