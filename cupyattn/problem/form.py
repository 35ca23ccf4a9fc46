"""The kernel of a call: variant, form and tiles; its features and operands; checks of its limits.

Plans, the mirror, bounds and the judge all read one record, `Kernel`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.architectures import ARCHITECTURES, shared_memory_of
from cupyattn.compiler.contracts import least_shared_bytes, refused_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelLaunchError, UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.features import Features
from cupyattn.kernels.forms import Form
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.limits import HOPPER_BLOCKS, INT32_MAX, check_grid, several_value_scales
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.numerics import numerics as compose_numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.operands import (
    Codes,
    Operands,
    ValueCodes,
    stacked_call,
    stacked_operands,
)
from cupyattn.problem.support import Offer, choose_form, no_kernel
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantizers import padded_columns

#: Architectures with separate forms; None stands for the portable forms.
FORM_ARCHITECTURES = (None, "sm_90a")


@dataclass(frozen=True)
class Kernel:
    """The kernel of a call.

    Parameters
    ----------
    variant : Variant
    call : AttentionSpec
        The call, with the caller's heads and rows.
    form : str
        Name of the variant's form.
    tiles : Tiles
    codes : Codes, optional
        How its operands are quantised.
    own_tiles : bool
        Whether the tiles are the defaults of the variant, not the caller's.
    stacks : bool
        Whether query heads that share a key head are stacked as the rows of one.
    note : str
        Why a faster form does not run, if there is one, and how the call is split.

    Attributes
    ----------
    row : Form
        The variant's `Form` of that name.
    launched : AttentionSpec
        The call as the kernel is launched for it, with heads stacked if `stacks`.
    """

    variant: Variant
    call: AttentionSpec
    form: str
    tiles: Tiles
    codes: Codes | None = None
    own_tiles: bool = True
    stacks: bool = False
    note: str = ""
    row: Form = field(init=False, compare=False, repr=False)
    launched: AttentionSpec = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row", self.variant.forms[self.form])
        launched = stacked_call(self.call) if self.stacks else self.call
        object.__setattr__(self, "launched", launched)

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
        """Return its rounding points; `quant` is the configuration of its codes."""
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
        Layouts of the operands. Without them a Hopper form runs only if it is named.
    codes : Codes, optional
        How they are quantised, if the rung takes codes.
    tiles : Tiles, optional
        The caller's tiles; by default those of the variant.
    arch : str, optional
        Architecture that it will run on. On ``"sm_90a"`` a Hopper form runs if one takes the call;
        otherwise the note says why.
    form : str, optional
        Name of a form, even one that this call would not choose.

    Returns
    -------
    Kernel

    Raises
    ------
    UnsupportedError
        If the rung has no kernel for codes, or no form takes the head size.
    ValueError
        If the form does not exist or does not take the head size, or if tiles do not divide the
        blocks of a block mask.
    """
    found = choose_form(variant, Offer(call, operands, codes, tiles, arch), form)
    kernel = Kernel(
        variant, call, found.form, found.tiles, codes, tiles is None, found.stacks, found.note
    )
    if kernel.row.takes.few_rows and math.prod(call.output_shape) > 0:
        rows = splits.shared_rows(call.heads, call.heads_kv, call.len_q)
        reads = -(-rows // kernel.tiles.block_q)
        return replace(kernel, note=kernel.cut.describe(rows, reads))
    return kernel


def settle_each(
    variant: Variant,
    call: AttentionSpec,
    places: Sequence[Operands],
    asked: Sequence[tuple[Codes | None, str | None, str | None]],
    tiles: Tiles | None = None,
) -> list[Kernel]:
    """Settle each kernel that may run a call, whatever the layouts of its operands.

    Parameters
    ----------
    variant, call, tiles
        As for `settle`.
    places : sequence of Operands
        Possible layouts of the operands.
    asked : sequence of (Codes or None, str or None, str or None)
        Codes, form and architecture, as for `settle`.

    Returns
    -------
    list of Kernel
        One for each form and its tiles, in the order of `asked`. Portable tiles are not compared
        with the limits of a device, because these are not known.

    Raises
    ------
    ValueError, UnsupportedError
        As `settle` of the first, if no form takes the call.
    """
    found: dict[tuple[str, Tiles], Kernel] = {}
    refused: Exception | None = None
    for (codes, form, arch), operands in itertools.product(asked, places):
        try:
            kernel = settle(
                variant, call, operands, codes=codes, tiles=tiles, arch=arch, form=form
            )
            if kernel.row.on_hopper:
                check_kernel(kernel, operands)
        except (UnsupportedError, ValueError) as error:  # a form that does not take the call
            refused = refused or error
            continue
        found.setdefault((kernel.form, kernel.tiles), kernel)
    if not found and refused is not None:
        raise refused
    return list(found.values())


def fresh_rows(x: Operand) -> Operand:
    """Describe rows as this library allocates them: contiguous, and padded if they are codes."""
    return code_rows(x) if x.itemsize == 1 else Operand.contiguous(x.shape, x.itemsize)


def code_rows(x: Operand) -> Operand:
    """Describe codes of a byte each that are made of rows, which are padded."""
    whole = Operand.contiguous((*x.shape[:3], padded_columns(x.shape[3])), 1)
    return replace(whole, shape=x.shape)


def scale_tiles(variant: Variant, head_dim: int, quant: QuantConfig, arch: str | None) -> Tiles:
    """Return the tiles whose sizes granularity "block" uses: the variant's, for that device.

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
    raise no_kernel(variant, kind)


def check_value_tiles(quant: QuantConfig, tiles: Tiles, arch: str | None) -> None:
    """Raise ValueError if V is to be codes and tiles of these sizes do not support that."""
    hopper = arch == "sm_90a" and quant.granularity_v != "block" and tiles.block_kv % 32 == 0
    if quant.has_value_codes and tiles.block_kv not in (32, 64, 128) and not hopper:
        raise ValueError(
            f"pv={quant.pv!r} needs tiles.block_kv of 32, 64 or 128, whole matrix products of 32 "
            f"keys, got {tiles.block_kv}"
        )


def _kind(quant: QuantConfig) -> str:
    """Return the kind of operands that are made so, of `cupyattn.kernels.forms.VALUES`."""
    if not quant.has_value_codes:
        return "fused" if quant.fused else "16bit"
    if quant.value_p_type == "e4m3":
        return "fp8"
    if quant.value_p_type == "16bit":
        return "int8 beside 16bit"
    return "int8 by group" if quant.granularity_v == "block" else "int8"


# ---- macros and features it is compiled for ------------------------------------------------------


def module_spec(
    variant: Variant, features: Features, tiles: Tiles, form: str = "portable"
) -> ModuleSpec:
    """Return the module to compile for a variant with these features and tiles."""
    return ModuleSpec.of(variant.forms[form].source, tiles.defines(), features.defines())


def features_of(call: AttentionSpec, vec: int, **quantised: Any) -> Features:
    """Return the features of a call's kernels; `quantised` gives further fields of `Features`."""
    return Features(
        call.dtype, call.head_dim, call.causal, call.return_lse, vec, window=call.window,
        softcap=bool(call.softcap), mask=call.mask, bias=call.bias, block_mask=call.block_mask,
        rope=call.rope, varlen=call.packed is not None, padded=call.padded is not None,
        stacked=call.stack > 0, **quantised,
    )  # fmt: skip


def kernel_features(kernel: Kernel, operands: Operands, *, quantize_q: bool = False) -> Features:
    """Return the features of a call's kernel.

    Parameters
    ----------
    kernel : Kernel
    operands : Operands
        The caller's operands, with heads not stacked.
    quantize_q : bool
        Whether the kernel itself makes the codes of Q.
    """
    call, codes, given = kernel.launched, kernel.codes, launched_operands(kernel, operands)
    q, k, v, o = given[:4]
    added: dict[str, Any] = {} if codes is None else codes.features
    if kernel.row.on_hopper:
        added |= _score_features(call, given)
    if codes is None or codes.fused:
        return features_of(call, widest(q, k, v, o), **added)
    rows = (v, o) if codes.values is None else (o,)  # codes of V are read by channel, not by row
    vec = next(w for w in (8, 4, 2, 1) if _codes_allow(w, q, k, *rows))
    return features_of(call, vec, quantize_q=quantize_q, **added)


def launched_operands(kernel: Kernel, operands: Operands) -> Operands:
    """Return the operands as the kernel is launched for them, with stacked heads if it stacks."""
    return stacked_operands(kernel.call, operands) if kernel.stacks else operands


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
        "mask_kind": score_kind(operands.mask, "rows"),
        "bias_kind": score_kind(operands.bias, "dense"),
    }


def score_kind(x: Operand | None, whole: str) -> str:
    """Return the kind of a mask or bias: `whole`, or the axis along which it is constant."""
    if x is None:
        return ""
    _, _, by_row, by_key = x.steps
    if whole == "dense" and by_key == 0:
        return "rows"
    return "keys" if by_row == 0 else whole


# ---- checks of its tiles, its codes and its size -------------------------------------------------


def check_kernel(
    kernel: Kernel, operands: Operands, arch: str | None = None, *, on_device: bool = False
) -> None:
    """Raise unless a kernel takes the operands of the call that it was settled for.

    Parameters
    ----------
    kernel : Kernel
    operands : Operands
        As for `cupyattn.plans.attention.plan_attention`.
    arch : str, optional
        The architecture that the caller named.
    on_device : bool
        Whether there is a device, whose limits hold. Otherwise the limits are those of the named
        architecture, or of the oldest one that its kernel supports.

    Raises
    ------
    ValueError, UnsupportedError, KernelLaunchError
        For codes, tiles and sizes that it does not take, in this order.
    """
    codes, tiles, call = kernel.codes, kernel.tiles, kernel.call
    if codes is not None and codes.fused:
        _check_fused(codes, tiles)
    if codes is not None and codes.values is not None:
        _check_values(codes.values, operands.v, tiles)
    if math.prod(call.output_shape) == 0:  # nothing is launched
        return
    if not kernel.own_tiles or kernel.variant.source is not None:
        features = kernel_features(kernel, operands)
        spec = module_spec(kernel.variant, features, tiles, kernel.form)
        if reason := refused_tiles(spec, tiles, _called(kernel)):
            raise ValueError(reason)
        if not on_device:
            _check_shared_memory(spec, arch or spec.least_arch, kernel)
    for counts in kernel.blocks.values():
        check_grid(kernel.variant.name, *counts)
        if kernel.row.on_hopper:  # every block counts to a tile past the last, an int as well
            check_grid("the Hopper form", *counts, limit=INT32_MAX - HOPPER_BLOCKS)


def _check_fused(codes: Codes, tiles: Tiles) -> None:
    """Raise unless the kernel can make the codes itself in tiles of this size."""
    whole = not tiles.block_q % codes.group_q and not tiles.block_kv % codes.group_kv
    if tiles.num_stages != 1 or not whole:
        raise ValueError(
            f"fused=True needs tiles.num_stages=1, and tiles.block_q and tiles.block_kv of "
            f"whole groups of {codes.group_q} rows and {codes.group_kv} keys, got {tiles}"
        )


def _check_values(values: ValueCodes, v_codes: Operand, tiles: Tiles) -> None:
    """Raise unless the kernel can read codes of V in tiles of this size."""
    if reason := several_value_scales(values.group, tiles):
        raise UnsupportedError(reason)
    if 0 not in v_codes.shape and not v_codes.allows(16):
        raise ValueError(
            "v_codes must be contiguous at an address that is a multiple of 16 bytes, got "
            f"16 n + {v_codes.misalignment} and strides {v_codes.strides}"
        )


def _check_shared_memory(spec: ModuleSpec, arch: str, kernel: Kernel) -> None:
    """Raise unless a block has room for the tiles on an architecture."""
    least, limit = least_shared_bytes(spec), shared_memory_of(arch)
    most = max(map(shared_memory_of, ARCHITECTURES))
    if least > limit:
        raise KernelLaunchError(
            f"{_called(kernel)} does not take {kernel.tiles} at head_dim {kernel.call.head_dim}: a "
            f"block needs at least {least} bytes of shared memory, {arch} allows {limit}; reduce "
            "tiles.block_kv or tiles.num_stages first, then tiles.block_q"
            + (", or name another arch" if least <= most else "")
        )


def _called(kernel: Kernel) -> str:
    """Return the rung's name with its form, or with why the form is not the Hopper one."""
    note = kernel.note
    return f"{kernel.variant.name} ({note if note.startswith('portable form') else kernel.form})"
