"""A call of attention, checked and settled: what plans, kernels and mirror are given."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import target
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import (
    Kernel,
    request_places,
    scale_tiles,
    settle_request,
)
from cupyattn.problem.kernel_module import kernel_features, module_spec
from cupyattn.problem.kernel_support import kernel_support
from cupyattn.problem.operands import Operands
from cupyattn.problem.problem import Result
from cupyattn.problem.row_preparation import Preparation
from cupyattn.problem.settings import Settings
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from cupyattn.quant.quantized import QuantizedQKV

#: Operands that say what happens to the scores.
OF_SCORES = ("mask", "bias", "kept_blocks")
#: Operands that say where packed sequences lie.
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k")
#: Operands that say how many rows of padded batch entries count.
LENGTHS = ("lengths_q", "lengths_kv")
#: A value of `Request.prepared_when`.
BEFORE = "in a pass before"
#: Products of a score with a channel that the interpreter computes in a second, of each family:
#: lengths of 256 in one head of 64 on one core of a server.
INTERPRETED = {"unfused": 6e6, "float32": 5e6, "tensor_core": 6e7, "int8": 1.5e7}
#: Seconds in the interpreter that a call tells of beforehand.
LONG = 10.0
_DEFAULT = QuantConfig()


@dataclass(frozen=True)
class Request:
    """One call, resolved.

    Parameters
    ----------
    settings : Settings
        The caller's; layout, limits of lengths and how it quantises as they were settled.
    given : mapping
        The caller's arrays by the names of the arguments, those that there are.
    variant : Variant
        The rung that runs.
    why : str
        Why this one.
    call : AttentionSpec
    backend : {"cuda", "mirror", "interpret"}
    q, k, v : array
        Operands in layout BHSD, contiguous last axis; codes where the caller brought codes. Packed
        sequences are one batch entry.
    mask, bias : array or None
        The caller's, broadcast to (batch, heads, len_q, len_kv) without a copy; of packed sequences
        to the longest lengths.
    preparation : Preparation or None
        What happens to the rows of Q and K first, with weights and tables as the kernels read them.
    as_given : callable
        Turns a result into the kind of array that the caller's q is.
    kept_blocks : array or None
        What kernels read of the caller's block mask, beside q.
    quantized : QuantizedQKV or None
        What the caller brought already quantised.
    receiver : array or None
        The caller's ``out`` in layout BHSD.
    cu_seqlens_q, cu_seqlens_k : array, int32, (batch + 1,), or None
        Where packed sequences begin and end, on the device of q.
    lengths_q, lengths_kv : array, int32, (batch,), or None
        How many rows of padded batch entries count, on the device of q.
    kept : mapping of str to array
        Scales that the caller gives, by the names that plans have for them.
    """

    settings: Settings
    given: Mapping[str, Any]
    variant: Variant
    why: str
    call: AttentionSpec
    backend: str
    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    preparation: Preparation | None
    as_given: Callable[[Any], Any]
    kept_blocks: Any = None
    quantized: QuantizedQKV | None = None
    receiver: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    lengths_q: Any = None
    lengths_kv: Any = None
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Who needs memory: the rung."""
        return self.variant.name

    @property
    def arch(self) -> str | None:
        """The architecture to compile for; None: the device's own."""
        return self.settings.arch

    @property
    def like(self) -> Any:
        """An array that lies where the call runs."""
        return self.q

    @property
    def operands(self) -> dict[str, Any]:
        """What is read, by the names that plans have for it."""
        found = {name: getattr(self, name) for name in "qkv"}
        if self.quantized is not None:
            found = {name: getattr(self.quantized, name) for name in QUANTIZED}
        if self.preparation is not None:
            found |= self.preparation.buffers
        found = {name: a for name, a in found.items() if a is not None}
        return {**found, **self.of_scores, **self.sequences}

    @property
    def of_scores(self) -> dict[str, Any]:
        """What says what happens to the scores, of `OF_SCORES`."""
        return self._those(OF_SCORES)

    @property
    def sequences(self) -> dict[str, Any]:
        """What says where packed sequences lie, of `SEQUENCES`, or how long entries are, of
        `LENGTHS`."""
        return self._those((*SEQUENCES, *LENGTHS))

    def _those(self, names: tuple[str, ...]) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in names}
        return {name: a for name, a in found.items() if a is not None}

    @property
    def results(self) -> dict[str, Result]:
        """What is made, in the caller's layout: O, unless he gives an ``out``, and lse if asked."""
        call, found = self.call, {}
        if self.receiver is None:
            batch, heads, rows, head_dim = call.output_shape
            shape: tuple[int, ...] = call.output_shape
            if self.settings.layout == "BSHD":
                shape = (batch, rows, heads, head_dim)
            if call.packed is not None:
                shape = shape[1:]
            found["o"] = Result(shape, STORAGE[call.dtype])
        if call.return_lse:
            found["lse"] = Result(call.lse_shape, STORAGE["float32"])
        return found

    @property
    def received(self) -> dict[str, Any]:
        """The caller's ``out``, by the name that plans have for it."""
        return {} if self.receiver is None else {"o": self.receiver}

    @property
    def facts(self) -> None:
        """The results say all that handing them over takes."""

    @property
    def long_run(self) -> str:
        """What a call says that runs in the interpreter by default, and for long; "" otherwise."""
        call, settings, name = self.call, self.settings, self.variant.name
        seconds = math.prod(call.score_shape) * call.head_dim / INTERPRETED[self.variant.family]
        if self.variant.source is None or settings.backend or seconds < LONG:
            return ""
        return (
            f"{name} runs in the interpreter, as a registered kernel does on NumPy arrays, for "
            f"about {seconds:.0f} s: backend='mirror' runs the NumPy mirror of its family in its "
            "place, which does not read the kernel"
        )

    def needs_none_fused(self, work: Any) -> bool:
        """Whether the rung's fused form would need none of the scratch memory of its work."""
        quant, (*passes, last) = self.settings.quant, work.plans
        codes = any(plan.variant == "quantize" for plan in passes)
        whole = quant is None or quant.qk_bits == 8
        forms = self.variant.forms
        return codes and whole and "16bit" in forms[last.form].takes.values and "fused" in forms

    @property
    def block_mask(self) -> BlockMask | None:
        """The caller's block mask."""
        return self.given.get("block_mask")

    @property
    def prepared_when(self) -> str:
        """When rows of Q and K are normalised and turned, if they are: `BEFORE` in a pass of its
        own."""
        quant = self.settings.quant
        if self.variant.family == "int8" and not (quant and quant.fused):
            return "as they are quantised"
        if self.variant.turns_on_load and not self.call.qk_norm:
            return "as they are loaded"
        return BEFORE

    @property
    def prepares_before(self) -> bool:
        """Whether a pass of its own prepares rows of Q and K."""
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
        """How ``fa_int8`` quantises the caller's arrays."""
        return self.settings.quant or _DEFAULT

    @functools.cached_property
    def architecture(self) -> str | None:
        """The architecture to plan for: the caller's, or that of the device of the arrays.

        Tiles that a caller names are those of the portable form, unless ``"sm_90a"`` is named too.
        """
        settings = self.settings
        if settings.arch is not None or settings.tiles is not None:
            return settings.arch
        return target.own_arch(self.backend, self.q)

    @property
    def limited_by(self) -> str:
        """The architecture whose limits hold where there is no device."""
        kernel = self.kernel
        features = kernel_features(kernel, self.places)
        spec = module_spec(kernel.variant, features, kernel.tiles, kernel.form)
        return self.architecture or spec.least_arch

    @functools.cached_property
    def scale_tiles(self) -> Tiles:
        """Those whose sizes granularity "block" takes: the caller's, or the variant's."""
        arch, head_dim = self.architecture, self.call.head_dim
        return self.settings.tiles or scale_tiles(self.variant, head_dim, self.quant, arch)

    @functools.cached_property
    def given_places(self) -> dict[str, Operand]:
        """Where q, k and v lie."""
        return {name: Operand.of(getattr(self, name)) for name in "qkv"}

    @functools.cached_property
    def places(self) -> Operands:
        """Where the operands of the attention kernel lie."""
        return request_places(self)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The attention kernel, settled when it is first asked for: the last plan is its.

        ValueError or UnsupportedError, with the reason, if it does not take the call.
        """
        kernel = settle_request(self)
        on_device = self.backend == "cuda"
        kernel_support(kernel, self.places, self.architecture, on_device=on_device).check()
        return kernel
