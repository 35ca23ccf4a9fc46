"""What a call consists of: plans that run one after the other, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand, laid_out
from cupyattn.compiler import target
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import attention, attention_int8
from cupyattn.plans.codes import FusedCodes, ValueCodes, ZeroPoints
from cupyattn.plans.prepare_rows import plan_preparation, prepares_of
from cupyattn.plans.quantize import Part, check_value_tiles, parts, plan_quantize, scale_tiles
from cupyattn.plans.records import Plan, Workspace
from cupyattn.plans.unpack import plan_unpack
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.request import BEFORE, Request
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import padded_columns

#: Operands that say what happens to the scores, as fields of `Request`.
OF_SCORES = ("mask", "bias", "kept_blocks")


@dataclass(frozen=True)
class Stage:
    """One plan of a call, and what its buffers are called in the call where they differ."""

    plan: Plan
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stages:
    """All plans of a call in order, and the buffers that one writes and another reads."""

    stages: tuple[Stage, ...]
    between: tuple[Workspace, ...] = ()

    @property
    def plans(self) -> list[Plan]:
        """The plans alone."""
        return [stage.plan for stage in self.stages]

    @property
    def memory(self) -> list[str]:
        """What is between the plans, a line each: its extents, which make its size."""
        return [
            f"{work.name} {' x '.join(map(str, work.shape))} {work.dtype}, {work.nbytes:,} bytes"
            for work in self.between
        ]

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        """All scratch memory of the call, under the names that it has there."""
        inner = [
            replace(work, name=f"{i}.{work.name}")
            for i, stage in enumerate(self.stages)
            for work in stage.plan.workspace
        ]
        return (*self.between, *inner)


def stages(request: Request) -> Stages:
    """Plan a request from shapes and strides alone.

    First come the passes that turn and quantise the operands, where there are such, then attention.
    """
    call, options, z = request.call, request.options, request.quantized
    o = _output(request)
    if request.preparation and request.prepared_when == BEFORE:
        return _preparing_stages(request, o)
    q, k, v = (Operand.of(a) for a in (request.q, request.k, request.v))
    if request.variant.family != "int8":
        return Stages((Stage(_attention_plan(request, call, q, k, v, o)),))
    if z is not None:
        of_v = z.v if z.v_codes is None else z.v_codes
        first = _unpacking_stages(z)
        names = {one.names["nibbles"]: one.names["codes"] for one in first.stages}
        rows = (Operand.contiguous(made.shape, 1) for made in first.between)
        codes = [replace(x, shape=(*x.shape[:3], z.head_dim)) for x in rows]
        codes = codes or [Operand.of(x) for x in (z.q_codes, z.k_codes)]
        operands = [*codes, Operand.of(of_v)]
        scales = [Operand.of(z.q_scale), Operand.of(z.k_scale)]
        values = None
        if z.v_codes is not None:
            values = ValueCodes(
                Operand.of(z.v_scale), z.group_v, str(z.config.p_type), z.v_mean is not None,
                z.v_zero is not None,
            )  # fmt: skip
        zeros = None
        if z.q_zero is not None:
            zeros = ZeroPoints(Operand.of(z.q_code_sum), Operand.of(z.k_code_sum))
        plan = attention_int8.plan_int8(
            request.variant, call, *operands, o, *scales, group_q=z.group_q, group_kv=z.group_kv,
            smoothed=z.k_mean is not None, values=values, zeros=zeros, **_of_scores(request),
            tiles=options.tiles, arch=architecture(request),
        )  # fmt: skip
        return Stages((*first.stages, Stage(plan, names)), first.between)
    return _quantising_stages(request, call, q, k, v, o)


def _unpacking_stages(z: QuantizedQKV) -> Stages:
    """Plan what makes INT8 of codes that lie two to a byte; nothing where they have one each."""
    stages, between = [], []
    for name in ("q_codes", "k_codes") if z.has_nibbles else ():
        x, result = Operand.of(getattr(z, name)), f"{name}_unpacked"
        stages.append(Stage(plan_unpack(x, z.head_dim), {"nibbles": name, "codes": result}))
        between.append(Workspace(result, (*x.shape[:3], padded_columns(z.head_dim)), "int8"))
    return Stages(tuple(stages), tuple(between))


def _attention_plan(
    request: Request, call: AttentionSpec, q: Operand, k: Operand, v: Operand, o: Operand
) -> Plan:
    """Plan a 16/32-bit rung on operands that may be others than the caller's."""
    return attention.plan_attention(
        request.variant, call, q, k, v, o, **_of_scores(request), tiles=request.options.tiles,
        arch=architecture(request),
    )  # fmt: skip


def _preparing_stages(request: Request, o: Operand) -> Stages:
    """Plan a rung that takes operands prepared already: a pass for each of Q and K, then that."""
    call, hows = request.call, prepares_of(request.preparation)
    operands = {"q": Operand.of(request.q), "k": Operand.of(request.k)}
    passes = tuple(
        Stage(
            plan_preparation(x, call.dtype, hows[name], _packed(call, name)),
            {"x": name, "turned": f"{name}_turned", "cu_seqlens": f"cu_seqlens_{name}"},
        )
        for name, x in operands.items()
    )
    between = tuple(Workspace(f"{n}_turned", x.shape, call.dtype) for n, x in operands.items())
    q, k = (Operand.contiguous(x.shape, x.itemsize) for x in operands.values())
    v, call = Operand.of(request.v), replace(call, rope="", rope_offset_q=0, qk_norm=False)
    if request.variant.family == "int8":
        rest = _quantising_stages(request, call, q, k, v, o)
    else:
        rest = Stages((Stage(_attention_plan(request, call, q, k, v, o)),))
    turned = {name: f"{name}_turned" for name in operands}
    stages = tuple(
        Stage(one.plan, {**turned, **{n: turned.get(b, b) for n, b in one.names.items()}})
        for one in rest.stages
    )
    return Stages((*passes, *stages), (*between, *rest.between))


def _packed(call: AttentionSpec, name: str) -> tuple[int, int] | None:
    """Return how many packed sequences an operand consists of, and the longest; None where none."""
    if call.packed is None:
        return None
    return call.batch, call.len_q if name == "q" else call.len_kv


def _of_scores(request: Request) -> dict[str, Operand | None]:
    """Describe mask, bias and what is read of a block mask."""
    given = {name: getattr(request, name) for name in OF_SCORES}
    return {name: None if a is None else Operand.of(a) for name, a in given.items()}


def _output(request: Request) -> Operand:
    """Describe where O goes: the caller's array, or one contiguous in his layout."""
    if request.receiver is not None:
        return Operand.of(request.receiver)
    itemsize = STORAGE[request.call.dtype].itemsize
    return laid_out(request.call.output_shape, itemsize, request.options.layout)


def _quantising_stages(
    request: Request, call: AttentionSpec, q: Operand, k: Operand, v: Operand, o: Operand
) -> Stages:
    """Plan ``fa_int8`` on arrays, which may be others than the caller's: quantise, then attend."""
    options = request.options
    quant = options.quant or QuantConfig()
    tiles = tiles_of_scales(request, quant)
    if quant.fused:
        fused = FusedCodes(quant.group_q(tiles), quant.group_kv(tiles), quant.zero_points)
        plan = attention.plan_attention(
            request.variant, call, q, k, v, o, **_of_scores(request), fused=fused, tiles=tiles
        )
        return Stages((Stage(plan),))
    check_value_tiles(quant, tiles, architecture(request))
    operands = {"q": q, "k": k, "v": v}
    packed = {name: _packed(call, name) for name in operands}
    found = parts(quant, tiles, operands, packed, prepares_of(request.preparation))
    call = replace(call, rope="", rope_offset_q=0, qk_norm=False)
    # No launch makes the mean of no keys, nor what lies between codes of packed sequences, which
    # meets weights of 0: among floats it may be NaN. Given scales lie elsewhere.
    filled = {f"{name}_mean" for name, part in found.items() if not all(part.x.shape)}
    filled |= {"v_codes"} if call.packed and quant.value_p_type == "e4m3" else set()
    between = [
        Workspace(b, shape, dtype, zeros=b in filled)
        for name, part in found.items()
        for b, (shape, dtype) in part.buffers(name).items()
        if not b.endswith("static_scale")
    ]
    made = {w.name: Operand.contiguous(w.shape, np.dtype(w.dtype).itemsize) for w in between}
    for name in "qk":  # in rows that are padded
        codes = f"{name}_codes"
        made[codes] = replace(made[codes], shape=operands[name].shape)
    values: ValueCodes | None = None
    zeros: ZeroPoints | None = None
    renamed: dict[str, str] = {}
    if quant.zero_points:
        zeros = ZeroPoints(made["q_code_sum"], made["k_code_sum"])
    if "v" in found:
        v, of_v = made["v_codes"], found["v"]
        values = ValueCodes(
            made["v_scale"], of_v.group, quant.value_p_type, of_v.smooth, of_v.zero_points
        )  # fmt: skip
    elif call.dtype == "float32":  # P.V takes float16
        v, renamed = Operand.contiguous(v.shape, 2), {"v": "v_operand"}
        between.append(Workspace("v_operand", v.shape, "float16"))
    plan = attention_int8.plan_int8(
        request.variant, call, made["q_codes"], made["k_codes"], v, o, made["q_scale"],
        made["k_scale"], group_q=found["q"].group, group_kv=found["k"].group,
        smoothed=quant.smooth_k, numbers=_numbers(quant, found["q"]), values=values, zeros=zeros,
        **_of_scores(request), tiles=options.tiles, arch=architecture(request),
    )  # fmt: skip
    if plan.features.quantize_q:
        del found["q"]
        between = [work for work in between if work.name not in ("q_codes", "q_scale")]
    first = plan_quantize(call.dtype, **found, p_type=quant.value_p_type, qk_bits=quant.qk_bits)
    return Stages((Stage(first), Stage(plan, renamed)), tuple(between))


def _numbers(quant: QuantConfig, part: Part) -> Operand | None:
    """Describe Q where a kernel that sees some rows alone could make its codes; None elsewhere."""
    of_rows = quant.granularity_q in ("thread", "token") and not quant.static
    return part.x if of_rows and quant.qk_bits == 8 and part.prepares is None else None


def tiles_of_scales(request: Request, quant: QuantConfig) -> Tiles:
    """Return the tiles whose sizes granularity "block" takes: the caller's, or the variant's."""
    arch, head_dim = architecture(request), request.call.head_dim
    return request.options.tiles or scale_tiles(request.variant, head_dim, quant, arch)


def architecture(request: Request) -> str | None:
    """Return the architecture to plan for: the caller's, or that of the device of the arrays.

    Tiles that a caller names are those of the portable form, unless he names ``"sm_90a"`` too.
    """
    options = request.options
    if options.arch is not None or options.tiles is not None:
        return options.arch
    return target.own_arch(request.backend, request.q)
