"""A checked and settled call of attention, for plans and kernels, and for mirror, bounds, judge."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cupyattn.arrays.described import Described, places_of
from cupyattn.arrays.interchange import operands as as_arrays
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand, laid_out
from cupyattn.compiler import target
from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.problem.checks import AttentionSpec, check_dtype, check_options
from cupyattn.problem.form import (
    FORM_ARCHITECTURES,
    Kernel,
    check_kernel,
    check_value_tiles,
    code_rows,
    fresh_rows,
    kernel_features,
    module_spec,
    scale_tiles,
    settle,
    settle_each,
)
from cupyattn.problem.operands import Codes, Operands, ValueCodes
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.row_preparation import Preparation, check_turned_before
from cupyattn.problem.sequences import LENGTHS, SEQUENCES
from cupyattn.problem.settings import Settings, of_arguments
from cupyattn.problem.support import within_reach
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.operand_protocol import Quantized, check_one_sequence, check_queries
from cupyattn.quant.packed import packed_groups, packed_values
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import group_count, padded_length

#: Operands that change or mask the scores.
OF_SCORES = ("mask", "bias", "kept_blocks")
#: A value of `AttentionProblem.prepared_when`.
BEFORE = "in a pass before"
#: Number of products of a score with a channel per second of the interpreter, by family. They were
#: timed with lengths of 256 in one head of 64, on one core of a server.
INTERPRETED = {"unfused": 6e6, "float32": 5e6, "tensor_core": 6e7, "int8": 1.5e7}
#: Seconds in the interpreter that a call tells of beforehand.
LONG = 10.0
_DEFAULT = QuantConfig()


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(Problem):
    """One call, resolved.

    Its operands are in layout BHSD with a contiguous last axis. If the caller gave codes, they are
    codes. Packed sequences are one batch entry. Mask and bias are broadcast to (batch, heads,
    len_q, len_kv), with the longest lengths of packed sequences.

    Parameters
    ----------
    settings : Settings
        The caller's settings, with layout, limits of lengths and quantisation as settled.
    variant : Variant
        The rung that runs.
    why : str
        Why this rung was chosen.
    call : AttentionSpec
    preparation : Preparation or None
        Normalisation and rotation of the rows of Q and K, with weights and tables as kernels read
        them.
    quantized : QuantizedQKV or None
        Descriptions of operands that the caller has already quantised.
    """

    settings: Settings
    variant: Variant
    why: str
    call: AttentionSpec
    preparation: Preparation | None = None
    quantized: QuantizedQKV | None = field(default=None, compare=False)  # whose arrays are operands

    @property
    def rows(self) -> dict[str, Described]:
        """q, k and v by name, or the codes in their place."""
        z, read = self.quantized, self.operands
        if z is None:
            return {name: read[name] for name in "qkv"}
        v = "v" if z.v_codes is None else "v_codes"
        return {"q": read["q_codes"], "k": read["k_codes"], "v": read[v]}

    @property
    def of_scores(self) -> dict[str, Described]:
        """The operands in `OF_SCORES`, which change or mask the scores."""
        return self._those(OF_SCORES)

    @property
    def sequences(self) -> dict[str, Described]:
        """The operands that give the offsets of packed sequences, or the lengths of entries."""
        return self._those((*SEQUENCES, *LENGTHS))

    def _those(self, names: tuple[str, ...]) -> dict[str, Described]:
        return {name: self.operands[name] for name in names if name in self.operands}

    @property
    def long_run(self) -> str:
        """The warning of a call that would run long in the interpreter, by default; else ""."""
        call, name = self.call, self.variant.name
        if self.variant.source is None or self.settings.backend:
            return ""
        seconds = math.prod(call.score_shape) * call.head_dim / INTERPRETED[self.variant.family]
        if seconds < LONG:
            return ""
        return (
            f"{name} runs in the interpreter, as a registered kernel does on NumPy arrays, for "
            f"about {seconds:.0f} s: backend='mirror' runs the NumPy mirror of its family in its "
            "place, which does not read the kernel"
        )

    def fused_form_needs_no_scratch(self, work: Any) -> bool:
        """Whether the fused form of the rung would avoid the scratch memory of this form."""
        quant, (*passes, last) = self.settings.quant, work.plans
        codes = any(plan.variant == "quantize" for plan in passes)
        whole = quant is None or (quant.qk_bits == 8 and quant.rotate is None)
        forms = self.variant.forms
        return codes and whole and "16bit" in forms[last.form].takes.values and "fused" in forms

    @property
    def prepared_when(self) -> str:
        """When rows of Q and K are prepared, if at all; `BEFORE`: in a separate pass."""
        quant = self.settings.quant
        if self.variant.family == "int8" and not (quant and quant.fused):
            return "as they are quantised"
        if self.variant.turns_on_load and not self.call.qk_norm:
            return "as they are loaded"
        return BEFORE

    @property
    def prepares_before(self) -> bool:
        """Whether a separate pass prepares rows of Q and K."""
        return self.preparation is not None and self.prepared_when == BEFORE

    @functools.cached_property
    def attended(self) -> AttentionSpec:
        """The call as the attention kernel sees it, after passes that prepare or quantise."""
        if self.preparation is None:
            return self.call
        if self.variant.family == "int8" or self.prepares_before:
            return replace(self.call, rope="", rope_offset_q=0, qk_norm=False)
        return self.call

    @functools.cached_property
    def quant(self) -> QuantConfig:
        """Quantisation of the caller's arrays by ``fa_int8``."""
        return self.settings.quant or _DEFAULT

    @functools.cached_property
    def architecture(self) -> str | None:
        """The architecture to plan for: the caller's, or that of the arrays' device.

        A caller's tiles mean the portable form, unless ``"sm_90a"`` is named too.
        """
        settings = self.settings
        if settings.arch is not None or settings.tiles is not None:
            return settings.arch
        return target.own_arch(self.backend, self.rows["q"])

    @property
    def limited_by(self) -> str:
        """The architecture whose limits hold if there is no device."""
        kernel = self.kernel
        features = kernel_features(kernel, self.places)
        spec = module_spec(kernel.variant, features, kernel.tiles, kernel.form)
        return self.architecture or spec.least_arch

    @functools.cached_property
    def scale_tiles(self) -> Tiles:
        """The tiles whose sizes granularity "block" uses: the caller's, or the variant's."""
        arch, head_dim = self.architecture, self.call.head_dim
        return self.settings.tiles or scale_tiles(self.variant, head_dim, self.quant, arch)

    @functools.cached_property
    def operand_layouts(self) -> dict[str, Operand]:
        """Layouts of q, k and v."""
        return places_of(self.rows)

    @functools.cached_property
    def places(self) -> Operands:
        """Layouts of the kernel's operands: the caller's arrays, or arrays made from them."""
        call, z = self.call, self.quantized
        q, k, v = self.operand_layouts.values()
        if z is not None:
            if z.has_nibbles:
                q, k = (code_rows(replace(x, shape=(*x.shape[:3], z.head_dim))) for x in (q, k))
        elif self.variant.family == "int8" and not self.quant.fused:
            q, k = code_rows(q), code_rows(k)
            if self.quant.has_value_codes:
                v = _value_codes(v, call)
            elif call.dtype == "float32":  # P.V takes float16
                v = Operand.contiguous(v.shape, 2)
        elif self.prepares_before:
            q, k = (Operand.contiguous(x.shape, x.itemsize) for x in (q, k))
        return Operands(q, k, v, self._output, **places_of(self.of_scores))

    @property
    def _output(self) -> Operand:
        """Destination of O: the caller's array, or one contiguous in the caller's layout."""
        if "o" in self.received:
            return self.received["o"].place
        itemsize = STORAGE[self.call.dtype].itemsize
        return laid_out(self.call.output_shape, itemsize, self.settings.layout)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The attention kernel, settled at first use; the last plan launches it.

        ValueError or UnsupportedError, with the reason, if it does not take the call.
        """
        codes, tiles, arch = None, self.settings.tiles, self.architecture
        if self.quantized is not None:
            codes = Codes.of(self.quantized)
        elif self.variant.family == "int8":
            quant, made_for = self.quant, self.scale_tiles
            if not quant.fused:
                check_value_tiles(quant, made_for, arch)
            codes = self._made_codes
            if codes.fused:
                tiles, arch = made_for, None
        kernel = settle(
            self.variant, self.attended, self.places, codes=codes, tiles=tiles, arch=arch
        )
        on_device = self.backend == "cuda"
        check_kernel(kernel, self.places, self.architecture, on_device=on_device)
        return kernel

    @property
    def _made_codes(self) -> Codes:
        """The codes of a caller's arrays, which passes or the kernel itself make."""
        call, quant, tiles, values = self.call, self.quant, self.scale_tiles, None
        if quant.has_value_codes:
            batch, heads, keys, head_dim = self.rows["v"].shape
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


def results_of(call: AttentionSpec, layout: str, *, receives: bool) -> dict[str, Result]:
    """Return the results in the caller's layout: O, unless ``out`` receives it, and any lse."""
    found = {}
    if not receives:
        batch, heads, rows, head_dim = call.output_shape
        shape: tuple[int, ...] = call.output_shape
        if layout == "BSHD":
            shape = (batch, rows, heads, head_dim)
        if call.packed is not None:
            shape = shape[1:]
        found["o"] = Result(shape, STORAGE[call.dtype])
    if call.return_lse:
        found["lse"] = Result(call.lse_shape, STORAGE["float32"])
    return found


def _value_codes(v: Operand, call: AttentionSpec) -> Operand:
    """Describe codes that are made of V, by channel."""
    batch, heads, keys, head_dim = v.shape
    padded = packed_values(keys, call.batch) if call.packed else padded_length(keys)
    return Operand.contiguous((batch, heads, head_dim, padded), 1)


# ---- a kernel with arrays ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A kernel and the arrays of its call, as mirror, bounds and judge receive them.

    Nothing is launched, so arrays may lie on any device, and no device is needed.

    Parameters
    ----------
    kernel : Kernel
    settings : Settings
        Only settings that change the result matter.
    arrays : mapping
        By name, in layout (batch, heads, len, head_dim): q, k and v, which are None if only the
        `quantized` operands are known; and ``mask``, ``bias`` and ``block_mask``, if given.
    quantized : QuantizedQKV, optional
        The INT8 operands that the kernel reads in place of arrays.
    preparation : Preparation, optional
        Normalisation and rotation of rows of q and k.
    """

    kernel: Kernel
    settings: Settings
    arrays: Mapping[str, Any]
    quantized: Any = None
    preparation: Preparation | None = None

    @property
    def rows(self) -> tuple[Any, Any, Any]:
        """The caller's q, k and v."""
        return self.arrays["q"], self.arrays["k"], self.arrays["v"]

    @functools.cached_property
    def scores(self) -> dict[str, Any]:
        """The options that change and mask scores (`Settings.scores`)."""
        return self.settings.scores(self.arrays)

    @functools.cached_property
    def prepared(self) -> tuple[Any, Any, Any]:
        """q, k and v as rungs of 16 and 32 bits multiply them."""
        q, k, v = self.rows
        return (q, k, v) if self.preparation is None else (*self.preparation.stored(q, k), v)


def kernel_call(
    settings: Settings,
    arrays: Mapping[str, Any],
    *,
    quantized: Quantized | None = None,
    form: str | None = None,
) -> KernelCall:
    """Settle the kernel of arrays or quantised operands, on any device.

    Parameters
    ----------
    settings : Settings
        With the name of a rung. Of the other settings, only tiles and those that change the result
        matter.
    arrays : mapping
        q, k and v of layout (batch, heads, len, head_dim), ignored if `quantized` is given; and the
        arrays in `cupyattn.problem.settings.ARRAYS` that change scores or rows.
    quantized : QuantizedQKV, optional
        Operands that are quantised already.
    form : str, optional
        As for `cupyattn.problem.form.settle`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        For operands or options that do not fit together.
    """
    check_kind(settings.tiles)
    rung, codes = ladder.lookup(settings.variant), None
    rung.check_form(form)
    q, k, v = (arrays[name] for name in "qkv")
    if quantized is None:
        dtype, shapes = check_dtype(q, k, v), [tuple(x.shape) for x in (q, k, v)]
    else:
        if not isinstance(quantized, Quantized):
            raise TypeError(f"quantized must be a cupyattn.QuantizedQKV, got {shown(quantized)}")
        check_queries(quantized)
        check_one_sequence(quantized)
        z = quantized.unpacked()
        dtype, codes = z.out_dtype, Codes.of(z)
        shapes = [tuple(x.shape) for x in (z.q_codes, z.k_codes, z.k_codes)]
    scores = settings.scores(arrays)
    mask, bias = as_arrays(mask=scores["mask"], bias=scores["bias"])
    scores |= {"mask": mask, "bias": bias}
    call = check_options(check_shapes(*shapes), dtype, settings.scale, scores, return_lse=True)
    kernel = settle(rung, call, codes=codes, tiles=settings.tiles, form=form)
    sizes = call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    quant = settings.quant if quantized is None else quantized.config
    rotate = quant.rotate if quant else None
    preparation = Preparation.of_arrays(settings.rows(arrays), sizes, rotate)
    return KernelCall(kernel, settings, arrays, quantized, preparation)


def kernel_call_of(arguments: Mapping[str, Any]) -> KernelCall:
    """Settle the kernel from the arguments of a mirror or a bound.

    Parameters
    ----------
    arguments : mapping
        Of `cupyattn.problem.settings.of_arguments`, with ``quantized`` and ``form`` as for
        `kernel_call`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `kernel_call`, and for rows of quantised operands that were to be prepared.
    """
    settings, arrays = of_arguments(arguments)
    quantized = arguments["quantized"]
    found = kernel_call(settings, arrays, quantized=quantized, form=arguments["form"])
    if found.preparation is not None and found.preparation.buffers:
        check_turned_before(quantized)
    return found


def in_every_form(one: KernelCall) -> list[KernelCall]:
    """Return the call with each kernel that may run it, on any architecture, portable first."""
    kernel, z = one.kernel, one.quantized
    call = kernel.call
    q, k, v = one.rows
    if z is not None:
        z = z.unpacked()
        q, k, v = z.q_codes, z.k_codes, z.v if z.v_codes is None else z.v_codes
    scores = as_arrays(mask=one.arrays.get("mask"), bias=one.arrays.get("bias"))
    mask, bias = (
        None if x is None else Described.of(n, x).broadcast_to(call.score_shape).place
        for n, x in zip(("mask", "bias"), scores, strict=True)
    )
    q, k, v = (fresh_rows(Operand.of(x)) for x in (q, k, v))
    o = Operand.contiguous(call.output_shape, STORAGE[call.dtype].itemsize)
    bias = None if bias is None else within_reach(bias)
    places = Operands(q, k, v, o, mask, bias)
    asked = [(kernel.codes, None, arch) for arch in FORM_ARCHITECTURES]
    kernels = settle_each(kernel.variant, call, [places], asked, one.settings.tiles)
    return [replace(one, kernel=found) for found in kernels]
