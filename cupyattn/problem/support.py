"""Choose the form and tiles of a call, with the reasons against other forms.

`cupyattn.kernels.forms.Takes` lists the conditions of a form as plain values. This module compares
them with a call. The copy engine moves the operands of Hopper forms and sets further conditions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from cupyattn.arrays.operand import Operand
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.forms import OPTIONS, VALUES, WIDE_BIAS, Form
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.operands import (
    Codes,
    Operands,
    ValueCodes,
    can_be_stacked,
    describe_stacking,
    stacked_call,
    stacked_operands,
    stacking_pays,
)

#: Limits of a softcap in the units of scores, in the Hopper forms: its powers up to the eighth do
#: not overflow float32.
LEAST_CAP, MOST_CAP = 2.0**-10, 2.0**14
#: The largest head_dim for which both fit in the shared memory of fa_tc.
MAX_HEAD_DIM_MASK_AND_BIAS = 192
#: The largest head_dim of a float32 bias with a number for each key: of fa_tc, of fa_int8. Past it
#: shared memory has no room for two stages of it.
MAX_HEAD_DIM_WIDE_BIAS = (192, 128)
LOG2E = math.log2(math.e)
#: Code that allocates a bias for the copy engine.
PADDED_BIAS = "allocate len_kv rounded up to 8 and give the slice [..., :len_kv]"
#: Bytes that rows of a bias are apart for the copy engine: a multiple.
BIAS_ALIGNMENT = 16


class Support(NamedTuple):
    """Whether a form takes a call, and if not, why not.

    Parameters
    ----------
    supported : bool
    reason : str
        Why not, in words for the caller; "" if it is supported.
    """

    supported: bool
    reason: str = ""

    @property
    def note(self) -> str:
        """The note in a plan of the portable form; "" if this form takes the call."""
        return "" if self.supported else f"portable form: {self.reason}"


SUPPORTED = Support(True)


def options_of(call: AttentionSpec) -> tuple[str, ...]:
    """Return the `cupyattn.kernels.forms.OPTIONS` that a call has."""
    given = call.softcap, call.mask, call.bias, call.block_mask != (0, 0), call.own_lengths
    return tuple(name for name, value in zip(OPTIONS, given, strict=True) if value)


class Offer(NamedTuple):
    """A call with the facts that forms decide by.

    Parameters
    ----------
    call : AttentionSpec
    operands : Operands, optional
        Layouts of the operands, which every Hopper form needs.
    codes : Codes, optional
        How they are quantised.
    tiles : Tiles, optional
        The caller's tiles.
    arch : str, optional
        The architecture that the call runs on, if it is known.
    """

    call: AttentionSpec
    operands: Operands | None = None
    codes: Codes | None = None
    tiles: Tiles | None = None
    arch: str | None = None

    @property
    def values(self) -> str:
        """The kind of its operands, of `cupyattn.kernels.forms.VALUES`."""
        return "16bit" if self.codes is None else self.codes.kind

    @property
    def options(self) -> tuple[str, ...]:
        """The `cupyattn.kernels.forms.OPTIONS` that it has."""
        return options_of(self.call)

    @property
    def tile_options(self) -> tuple[str, ...]:
        """The names by which a form may have separate tiles for it (`FormTiles.scored`)."""
        return (*self.options, *((WIDE_BIAS,) if self.call.bias == "float32" else ()))


class Choice(NamedTuple):
    """The form that runs a call.

    Parameters
    ----------
    form : str
        Name of the form.
    tiles : Tiles
    note : str
        Why no Hopper form runs, if none does, or that heads are stacked.
    stacks : bool
        Whether query heads that share a key head are stacked as the rows of one.
    """

    form: str
    tiles: Tiles
    note: str = ""
    stacks: bool = False


def choose_form(variant: Variant, offer: Offer, form: str | None = None) -> Choice:
    """Choose the form of a call and its tiles; `form` names one that need not take it.

    Raises
    ------
    UnsupportedError
        If no form takes the call.
    ValueError
        If the form does not exist or does not take the head size, or if tiles do not divide the
        blocks of a block mask.
    """
    variant.check_form(form)
    if form is not None:
        return Choice(form, _tiles(variant, form, offer, offer.call))
    note, found = "", Support(False)
    for name, one in candidates(variant, offer):
        found = takes(name, one, offer)
        if found.supported:
            few = one.takes.few_rows or (one.takes.stacks and _has_few_rows(offer))
            stacked = _stacking(variant, offer) if few else ""
            if stacked:
                launched = stacked_call(offer.call)
                tiles = _tiles(variant, stacked, offer, launched)
                return Choice(stacked, tiles, describe_stacking(offer.call), True)
            return Choice(name, _tiles(variant, name, offer, offer.call), note)
        if one.on_hopper:
            note = found.note
    if found.reason:
        raise UnsupportedError(f"{variant.name} takes no such call: {found.reason}")
    raise no_kernel(variant, offer.values)


def _tiles(variant: Variant, form: str, offer: Offer, launched: AttentionSpec) -> Tiles:
    """Return the tiles of a form, whose launch may stack heads."""
    call = offer.call
    lengths = launched.mean_lengths if offer.codes is None else (call.len_q, call.len_kv)
    return variant.tiles_for(
        call.head_dim, offer.tiles, form=form, lengths=lengths, causal=call.causal,
        block_mask=call.block_mask,
        rows=splits.wanted_rows(call.batch, call.heads, call.heads_kv, call.len_q),
        options=offer.tile_options,
    )  # fmt: skip


def _has_few_rows(offer: Offer) -> bool:
    """Whether a call of few rows is left to a form for more by softcap, mask or bias."""
    call = offer.call
    scored = bool(call.softcap or call.mask or call.bias) and call.block_mask == (0, 0)
    return scored and call.own_lengths is None and splits.applies(call.len_q, call.len_kv)


def _stacking(variant: Variant, offer: Offer) -> str:
    """Return the form that takes a call of few rows with its heads stacked; "" if none does."""
    call, operands = offer.call, offer.operands
    if operands is None or not (stacking_pays(call) and can_be_stacked(operands)):
        return ""
    stacked = offer._replace(
        call=stacked_call(call), operands=stacked_operands(call, operands)
    )
    for name, form in candidates(variant, stacked):
        if form.takes.stacks and takes(name, form, stacked).supported:
            return name
    return ""


def no_kernel(variant: Variant, kind: str) -> UnsupportedError:
    """Return the error for operands of a kind that no form of a variant is for."""
    what, instead = "codes of V", "quant.pv='16bit'"
    if kind == "fused":
        what, instead = "codes that it makes itself", "quant.fused=False"
    return UnsupportedError(f"{variant.name} has no kernel for {what}: use {instead}, or fa_int8")


def candidates(variant: Variant, offer: Offer) -> Iterator[tuple[str, Form]]:
    """Yield the forms that are for such operands and run there, the fastest first."""
    kind = offer.values
    for name, form in variant.fastest_first:
        if kind in form.takes.values and (not form.on_hopper or _runs_on_hopper(form, offer)):
            yield name, form


def takes(name: str, form: Form, offer: Offer) -> Support:
    """Say whether a form, called by its name, takes a call."""
    limits, copied = form.takes, offer.operands if form.on_hopper else None
    if offer.values not in limits.values:
        wanted = " or ".join(VALUES[one] for one in limits.values)
        return Support(False, f"{_called(name, form)} takes {wanted}, got {VALUES[offer.values]}")
    if form.on_hopper and not _runs_on_hopper(form, offer):
        return Support(
            False,
            f"{_called(name, form)} needs arch={limits.arch!r} and operands whose place is known, "
            f"got arch={offer.arch!r}",
        )
    reason = _of_codes(form, offer)
    if not reason and copied is not None and 0 in (offer.call.len_kv, copied.k.shape[2]):
        return Support(False, "there are no keys for the copy engine")
    reason = reason or _of_options(form, offer) or _of_sizes(form, offer)
    if reason:
        return Support(False, f"{_called(name, form)} {reason}")
    return SUPPORTED if copied is None else reach(copied.rows)


def _runs_on_hopper(form: Form, offer: Offer) -> bool:
    """Whether the call runs on Hopper and the layouts of its operands are known."""
    return offer.arch == form.takes.arch and offer.operands is not None


def _called(name: str, form: Form) -> str:
    """Return the name of a form for messages, in which the Hopper forms of a rung are one."""
    return "the Hopper form" if form.on_hopper else f"the {name} form"


def _of_codes(form: Form, offer: Offer) -> str:
    """Return why a form does not take the codes of a call; "" if it does."""
    codes, limits = offer.codes, form.takes
    if codes is None:
        return ""
    if codes.zero_points and not limits.zero_points:
        return "takes no zero points with P and V as INT8 codes"
    if codes.group_kv % limits.scale_keys:
        keys = limits.scale_keys
        return f"has one scale for {keys} keys, or for a multiple, got {codes.group_kv}"
    return "" if codes.values is None else _of_values(form, codes.values, offer)


def _of_values(form: Form, values: ValueCodes, offer: Offer) -> str:
    """Return why a form does not take codes of V; "" if it does."""
    limits, head_dim, most = form.takes, offer.call.head_dim, form.tiles.largest_head_dim
    step = limits.value_keys if offer.tiles is None else offer.tiles.block_kv
    by_group = values.group != GROUP_ALL and limits.value_keys > 1
    found = ""
    if values.p_type != "e4m3" and values.p_type not in limits.p_types:
        other = ", or in e4m3 with pv='fp8'" if form.on_hopper else ""
        found = f"takes P in {' or '.join(limits.p_types)}{other}, got p_type {values.p_type!r}"
    elif by_group and limits.value_keys == GROUP_ALL:
        found = (
            f"for P and V in {values.p_type} takes one scale for a channel of V "
            f"(granularity_v='channel'), got one for every {values.group} keys"
        )
    elif by_group and values.group % step:
        found = (
            f"has one scale of V for {step} keys, for a multiple or for all, got one for "
            f"{values.group}: quantise V for it, with arch='sm_90a'"
        )
    elif by_group and not values.scale.allows(4):
        found = (
            "reads scales of V 16 bytes at a time, got "
            f"16 n + {values.scale.misalignment} and strides {values.scale.strides}"
        )
    elif head_dim > most:
        found = f"for P and V in {values.p_type} takes head_dim up to {most}, got {head_dim}"
    return found


def _of_options(form: Form, offer: Offer) -> str:
    """Return why a form does not take the options of a call; "" if it does."""
    call = offer.call
    left = [name for name in offer.options if name not in form.takes.options]
    if left:
        words = {"packed": _lengths_of(call)}
        return f"takes no {' and no '.join(words.get(name, name) for name in left)}"
    if form.on_hopper and offer.operands is not None:
        reason = _of_scores(form, offer, offer.operands.bias)
        if reason:
            return reason
    if not form.on_hopper or call.block_mask == (0, 0):
        return ""  # NOTE: tiles that do not divide the blocks raise in `Variant.tiles_for`
    if call.own_lengths is not None:
        return f"takes no block mask of {_lengths_of(call)}"
    tiles = form.tiles.with_options(offer.tile_options)
    if tiles.for_blocks(call.head_dim, call.block_mask) is None:
        rows = tiles.with_blocks(call.head_dim)[0].block_q
        return (
            f"takes block masks of {rows} query rows, got blocks of "
            f"{call.block_mask[0]} x {call.block_mask[1]}"
        )
    return ""


def _lengths_of(call: AttentionSpec) -> str:
    """Return the words for batch entries of different lengths, for messages."""
    return "packed sequences" if call.padded is None else "entries with lengths of their own"


def _of_scores(form: Form, offer: Offer, bias: Operand | None) -> str:
    """Return why a Hopper form does not take softcap or bias of a call; "" if it does."""
    call, coded = offer.call, offer.codes is not None
    cap = call.softcap * LOG2E if coded else call.softcap / call.scale
    if call.softcap and not LEAST_CAP <= cap <= MOST_CAP:
        what = "softcap*log2(e)" if coded else "softcap/scale"
        return f"takes {what} from 2**-10 to 2**14, got {cap:g}"
    if bias is None:
        return ""
    if call.mask and not coded and call.head_dim > MAX_HEAD_DIM_MASK_AND_BIAS:
        most = MAX_HEAD_DIM_MASK_AND_BIAS
        return f"takes mask and bias together up to head_dim {most}, got {call.head_dim}"
    if not coded and not 1 / MOST_CAP <= call.scale <= MOST_CAP:
        return f"takes a bias with scale from 2**-14 to 2**14, got scale={call.scale:g}"
    if bias.steps[-1] == 0:  # the same for every key: it is read row by row
        return ""
    if call.bias == "float32":
        if WIDE_BIAS not in form.tiles.scored:
            return "takes a bias of float16 or bfloat16, got float32: convert it if exact enough"
        most = MAX_HEAD_DIM_WIDE_BIAS[coded]
        if call.head_dim > most:
            return (
                f"takes a float32 bias up to head_dim {most}, got {call.head_dim}: convert it to "
                "16 bits if exact enough"
            )
    return obstacle_of_places(bias)


def obstacle_of_places(bias: Operand) -> str:
    """Return why the copy engine does not move a bias for where its numbers are."""
    if not can_copy_bias(bias):
        steps = tuple(s * bias.itemsize for s in bias.steps)
        return (
            "copies a bias whose keys are contiguous, and whose address and strides are positive "
            f"multiples of 16 bytes, got 16 n + {bias.misalignment} with strides of {steps} bytes: "
            f"{PADDED_BIAS}"
        )
    return ""


def can_copy_bias(bias: Operand) -> bool:
    """Whether the copy engine can move a bias that has a number for every key."""
    *rows, key = bias.steps
    odd = any(s < 0 or s * bias.itemsize % BIAS_ALIGNMENT for s in rows)
    return key == 1 and not bias.misalignment and not odd


def within_reach(bias: Operand) -> Operand:
    """Describe a bias as the copy engine moves it: itself, or a copy with padded rows."""
    if bias.steps[-1] == 0 or can_copy_bias(bias):
        return bias
    count = BIAS_ALIGNMENT // bias.itemsize
    *rows, keys = (n if step else 1 for n, step in zip(bias.shape, bias.steps, strict=True))
    copy = Operand.contiguous((*rows, -(-keys // count) * count), bias.itemsize)
    strides = tuple(s if step else 0 for s, step in zip(copy.strides, bias.steps, strict=True))
    return replace(copy, shape=bias.shape, strides=strides)


def _of_sizes(form: Form, offer: Offer) -> str:
    """Return why a form does not take the sizes of a call, or its tiles; "" if it does."""
    head_dim, most = offer.call.head_dim, form.tiles.largest_head_dim
    if head_dim > most:
        return f"takes head_dim up to {most}, got {head_dim}"
    if not form.takes.few_rows:
        return ""
    if offer.tiles is not None:
        return "takes no tiles of the caller's"
    len_q, len_kv = offer.call.len_q, offer.call.len_kv
    if splits.applies(len_q, len_kv):
        return ""
    return (
        f"takes 1 to {splits.MOST_QUERIES} queries and {splits.LEAST_KEYS} keys or more, got "
        f"{len_q} and {len_kv}"
    )


def reach(operands: Mapping[str, Operand]) -> Support:
    """Say whether the copy engine can move all operands."""
    for name, x in operands.items():
        strides = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.misalignment or any(s <= 0 or s * x.itemsize % 16 for s in strides):
            return Support(
                False,
                "the copy engine needs addresses and positive strides that are "
                f"multiples of 16 bytes, got {name} at 16 n + {x.misalignment} with strides of "
                f"{tuple(s * x.itemsize for s in x.strides[:-1])} bytes",
            )
    return SUPPORTED
