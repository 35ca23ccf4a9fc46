"""Which kernel takes a call: variant, form and tiles, settled here and nowhere else.

Plans, the mirror, bounds and the judge all read one record, `Kernel`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand, laid_out
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.forms import Form
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.numerics import numerics as compose_numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import stacking, support
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.operands import Codes, Operands, ValueCodes
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.packed import packed_groups, packed_values
from cupyattn.quant.quantizers import group_count, padded_columns, padded_length

if TYPE_CHECKING:
    from cupyattn.problem.request import Request


@dataclass(frozen=True)
class Kernel:
    """The kernel of a call.

    Parameters
    ----------
    variant : Variant
    call : AttentionSpec
        What is computed, with as many heads and rows as the caller has.
    form : str
        Which form of the variant.
    tiles : Tiles
    codes : Codes, optional
        How its operands are quantised.
    own_tiles : bool
        Whether the tiles are the variant's own, not the caller's.
    stacks : bool
        Whether query heads that share a key head are stacked as the rows of one.
    note : str
        Why a faster form was left out, where one was, and how a call is split.
    """

    variant: Variant
    call: AttentionSpec
    form: str
    tiles: Tiles
    codes: Codes | None = None
    own_tiles: bool = True
    stacks: bool = False
    note: str = ""

    @property
    def row(self) -> Form:
        """The form as the variant has it."""
        return self.variant.forms[self.form]

    @property
    def launched(self) -> AttentionSpec:
        """The call as the kernel is launched for it, heads stacked where they are."""
        return stacking.stacked_call(self.call) if self.stacks else self.call

    @property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Thread blocks of each kernel, as factors: of the steps of the unfused rung, or of one."""
        call, tiles = self.launched, self.tiles
        q_blocks, heads = -(-call.len_q // tiles.block_q), call.batch * call.heads
        if self.variant.family == "unfused":
            return {
                "scores": (-(-call.len_kv // tiles.block_kv), q_blocks, heads),
                "softmax": (-(-call.len_q // tiles.num_warps), heads),
                "weighted_sum": (q_blocks, heads),
            }
        if self.row.takes.few_rows:
            rows = splits.shared_rows(call.heads, call.heads_kv, call.len_q)
            reads = -(-rows // tiles.block_q)
            return {"attention": (reads, self.cut.parts, call.batch * call.heads_kv)}
        return {"attention": (q_blocks, heads)}

    @property
    def cut(self) -> splits.Splits:
        """The slices of the keys, of the split form."""
        call = self.call
        sizes = call.batch, call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
        return splits.split(sizes, call.limits, self.tiles)

    def numerics(self, quant: Any = None) -> Numerics:
        """Return where it rounds; `quant` is the configuration of its codes."""
        call = self.call
        return compose_numerics(
            self.variant.family, self.form, call.dtype, quant, softcap=bool(call.softcap),
            bias=bool(call.bias),
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def settle(
    variant: Variant,
    call: AttentionSpec,
    operands: Operands | None = None,
    *,
    codes: Codes | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    form: str | None = None,
) -> Kernel:
    """Settle which form of a variant takes a call, and in which tiles.

    Parameters
    ----------
    variant : Variant
    call : AttentionSpec
    operands : Operands, optional
        Where the operands lie. Without them no Hopper form is chosen, only taken by name.
    codes : Codes, optional
        How they are quantised, on a rung that takes codes.
    tiles : Tiles, optional
        The caller's; by default the variant's own.
    arch : str, optional
        Architecture that it will run on: on ``"sm_90a"`` a Hopper form runs where there is one that
        takes the call, and the note says why where there is none.
    form : str, optional
        A form by its name, whether or not calls of this kind take it by themselves.

    Returns
    -------
    Kernel

    Raises
    ------
    UnsupportedError
        For codes on a rung without a kernel for them, or if no form takes such a head size.
    ValueError
        If there is no such form, it takes no such head size, or tiles do not divide the blocks of a
        block mask.
    """
    variant.check_form(form)
    note, stacks = "", False
    if form is None:
        offer = support.Offer(call, operands, codes, tiles, arch)
        form, note, stacks = _choose(variant, offer)
    kernel = Kernel(
        variant, call, form, _tiles(variant, call, form, codes, tiles, stacks), codes,
        tiles is None, stacks, note,
    )  # fmt: skip
    if kernel.row.takes.few_rows and math.prod(call.output_shape) > 0:
        rows = splits.shared_rows(call.heads, call.heads_kv, call.len_q)
        reads = -(-rows // kernel.tiles.block_q)
        return replace(kernel, note=kernel.cut.describe(rows, reads))
    return kernel


def _choose(variant: Variant, offer: support.Offer) -> tuple[str, str, bool]:
    """Return the form of a call, why a Hopper form was left out, and whether heads are stacked.

    Raises
    ------
    UnsupportedError
        If no form takes the call.
    """
    note, found = "", support.Support(False)
    for name, form in support.candidates(variant, offer):
        found = support.takes(name, form, offer)
        if found.supported:
            few = form.takes.few_rows or (form.takes.stacks and _has_few_rows(offer))
            stacked = _stacking(variant, offer) if few else ""
            if stacked:
                return stacked, stacking.describe(offer.call), True
            return name, note, False
        if form.on_hopper:
            note = found.note
    if found.reason:
        raise UnsupportedError(f"{variant.name} takes no such call: {found.reason}")
    raise _no_kernel(variant, offer.values)


def _has_few_rows(offer: support.Offer) -> bool:
    """Whether a call of few rows is left to a form for more by softcap, mask or bias."""
    call = offer.call
    scored = bool(call.softcap or call.mask or call.bias) and call.block_mask == (0, 0)
    return scored and call.own_lengths is None and splits.applies(call.len_q, call.len_kv)


def _stacking(variant: Variant, offer: support.Offer) -> str:
    """Return the form that takes a call of few rows with its heads stacked; "" if none does."""
    call, operands = offer.call, offer.operands
    if operands is None or not (stacking.pays(call) and stacking.possible(operands)):
        return ""
    stacked = offer._replace(
        call=stacking.stacked_call(call), operands=stacking.stacked_operands(call, operands)
    )
    for name, form in support.candidates(variant, stacked):
        if form.takes.stacks and support.takes(name, form, stacked).supported:
            return name
    return ""


def _no_kernel(variant: Variant, kind: str) -> UnsupportedError:
    """Return the error for operands of a kind that no form of a variant is for."""
    what, instead = "codes of V", "quant.pv='16bit'"
    if kind == "fused":
        what, instead = "codes that it makes itself", "quant.fused=False"
    return UnsupportedError(f"{variant.name} has no kernel for {what}: use {instead}, or fa_int8")


def _tiles(
    variant: Variant,
    call: AttentionSpec,
    form: str,
    codes: Codes | None,
    tiles: Tiles | None,
    stacks: bool,
) -> Tiles:
    launched = stacking.stacked_call(call) if stacks else call
    lengths = launched.mean_lengths if codes is None else (call.len_q, call.len_kv)
    return variant.tiles_for(
        call.head_dim, tiles, form=form, lengths=lengths, causal=call.causal,
        block_mask=call.block_mask,
        rows=splits.wanted_rows(call.batch, call.heads, call.heads_kv, call.len_q),
        options=support.options_of(call),
    )  # fmt: skip


# ---- of a request --------------------------------------------------------------------------------


def settle_request(request: Request) -> Kernel:
    """Settle the kernel of a request: that of its last plan."""
    z, codes = request.quantized, None
    arch, tiles = request.architecture, request.settings.tiles
    if z is not None:
        codes = Codes.of(z)
    elif request.variant.family == "int8":
        quant, made_for = request.quant, request.scale_tiles
        if not quant.fused:
            support.value_tiles_support(quant, made_for, request.architecture).check()
        codes = _made_codes(request)
        if codes.fused:
            tiles, arch = made_for, None
    return settle(
        request.variant, request.attended, request.places, codes=codes, tiles=tiles, arch=arch
    )


def request_places(request: Request) -> Operands:
    """Return the operands of the last plan of a request: the caller's, or those made of them."""
    call, z = request.call, request.quantized
    q, k, v = request.given_places.values()
    if z is not None:
        if z.has_nibbles:
            q, k = (_code_rows(replace(x, shape=(*x.shape[:3], z.head_dim))) for x in (q, k))
    elif request.variant.family == "int8" and not request.quant.fused:
        q, k = _code_rows(q), _code_rows(k)
        if request.quant.form == "pv8":
            v = _value_codes(v, call)
        elif call.dtype == "float32":  # P.V takes float16
            v = Operand.contiguous(v.shape, 2)
    elif request.prepares_before:
        q, k = (Operand.contiguous(x.shape, x.itemsize) for x in (q, k))
    given: Mapping[str, Any] = {n: getattr(request, n) for n in ("mask", "bias", "kept_blocks")}
    described = {name: None if a is None else Operand.of(a) for name, a in given.items()}
    return Operands(q, k, v, _output(request), **described)


def fresh_rows(x: Operand) -> Operand:
    """Describe rows as this library allocates them: contiguous, and padded if they are codes."""
    return _code_rows(x) if x.itemsize == 1 else Operand.contiguous(x.shape, x.itemsize)


def _code_rows(x: Operand) -> Operand:
    """Describe codes of a byte each that are made of rows, which are padded."""
    whole = Operand.contiguous((*x.shape[:3], padded_columns(x.shape[3])), 1)
    return replace(whole, shape=x.shape)


def _value_codes(v: Operand, call: AttentionSpec) -> Operand:
    """Describe codes that are made of V, by channel."""
    batch, heads, keys, head_dim = v.shape
    padded = packed_values(keys, call.batch) if call.packed else padded_length(keys)
    return Operand.contiguous((batch, heads, head_dim, padded), 1)


def _made_codes(request: Request) -> Codes:
    """Describe the codes that passes make of a caller's arrays, or the kernel by itself."""
    call, quant, tiles, values = request.call, request.quant, request.scale_tiles, None
    if quant.form == "pv8":
        batch, heads, keys, head_dim = request.v.shape
        group = quant.group_v(tiles)
        groups = (
            packed_groups(keys, call.batch, group) if call.packed else group_count(keys, group)
        )
        scale = Operand.contiguous((batch, heads, groups, head_dim), 4)
        values = ValueCodes(
            scale, group, quant.value_p_type, bool(quant.smooth_v), quant.value_zero_points
        )
    return Codes(
        quant.group_q(tiles), quant.group_kv(tiles), quant.zero_points, values, quant.fused
    )


def _output(request: Request) -> Operand:
    """Describe where O goes: the caller's array, or one contiguous in the caller's layout."""
    if request.receiver is not None:
        return Operand.of(request.receiver)
    itemsize = STORAGE[request.call.dtype].itemsize
    return laid_out(request.call.output_shape, itemsize, request.settings.layout)


def scale_tiles(variant: Variant, head_dim: int, quant: QuantConfig, arch: str | None) -> Tiles:
    """Return the tiles whose sizes granularity "block" takes: the variant's own, as it runs there.

    A step of the Hopper form then meets one scale of K.

    Raises
    ------
    UnsupportedError
        If no form of the variant is for such codes.
    """
    kind, p_type = _kind(quant), quant.value_p_type
    for name, form in variant.fastest_first:
        takes = form.takes
        meant = form.block_scales and kind in takes.values and takes.arch in (None, arch)
        meant = meant and (not kind.startswith("int8") or p_type in takes.p_types)
        # With zero points another form runs. Only scales of V have to fit its steps.
        if meant and (takes.zero_points or not quant.zero_points or kind != "int8 by group"):
            return variant.default_tiles(head_dim, name)
    raise _no_kernel(variant, kind)


def _kind(quant: QuantConfig) -> str:
    """Return the kind of operands that are made so, of `cupyattn.kernels.forms.VALUES`."""
    if quant.form != "pv8":
        return "fused" if quant.fused else "16bit"
    if quant.value_p_type == "e4m3":
        return "fp8"
    return "int8" if quant.granularity_v == "channel" else "int8 by group"
