"""One attention module of a model: decide which calls run in INT8, and count them."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.policy import MODES
from cupyattn.diffusion.settings import Int8AttentionSettings
from cupyattn.errors import UnsupportedError
from cupyattn.interop.diffusers import (
    backends,
    features,
    interception,
    layer_operator,
    masks,
    operator,
)
from cupyattn.interop.diffusers.context_parallel import Ranks, Shared, facts_of_call, words
from cupyattn.interop.diffusers.noise import Schedule
from cupyattn.interop.diffusers.report import LayerReport
from cupyattn.interop.diffusers.steps import Step
from cupyattn.interop.torch import calls, transforms
from cupyattn.interop.torch.bridge import as_array, as_tensor, on_device_of
from cupyattn.interop.torch.functional import named
from cupyattn.interop.torch.ops import PLAIN, is_exported

_log = logging.getLogger("cupyattn")

#: Reason if a policy that follows the noise level cannot choose a mode.
UNKNOWN = "the timestep is only on the device, so the noise level is unknown"
#: Names of the counts of calls in compiled code.
_COUNTED = (*MODES, "native")
#: Supported types, and their names.
_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip


class InGraphs:
    """A layer's entries in torch's graphs: one attribute for each text, in the order of graphs.

    Graphs set the attributes and never read them, so they add no guards. A dict's keys would be
    guarded, and a change would cause another compilation.
    """


class Layer:
    """An attention module whose calls run in INT8 if INT8 supports them.

    Parameters
    ----------
    name : str
    module : torch.nn.Module
        A module of diffusers with a processor.
    policy : object
        As for `cupyattn.Int8Attention`.
    step : Step
        Current step of the model.
    min_length : int
        Calls with fewer queries or keys stay native.
    **options
        Other options of `cupyattn.Int8Attention`. Without `quant` or a calibration, an INT8 mode is
        an accuracy class of `cupyattn.attention`, whose fastest rung runs, unless keys are pruned.
    """

    def __init__(
        self, name: str, module: Any, policy: Any, step: Step, min_length: int, **options: Any
    ) -> None:
        self.name, self.module = name, module
        self.own_backend: Any = None
        self.is_eager = False  # whether the call that runs is no graph's
        self._mode: interception.AttentionCalls | None = None
        self._policy, self._step = policy, step
        self._choice = step.choice(policy)
        self._min_length, self._options = min_length, options
        self._schedule: Schedule | None = None
        self._attention: dict[tuple[int, int, float | None], Int8Attention] = {}
        self._calls = self._seen = 0  # all counts, and the counts before the current call
        self._modes: Counter[str] = Counter()
        self._native: Counter[str] = Counter()
        self._on_ranks: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()  # of schedules that were
        with warnings.catch_warnings():  # which `features.step_dependent_layers` gave
            warnings.simplefilter("ignore", UserWarning)
            trial = features.trial(options)
        known = {field.name for field in fields(Int8AttentionSettings)}
        self._settings = Int8AttentionSettings(**{n: x for n, x in options.items() if n in known})
        self._prunes, self._kind = self._settings.enable_pruning, self._settings.attention_type
        self._by_class = options.get("quant") is None and trial.calibration is None
        self._any_step = trial.step(0)
        self._follows = features.step_options(trial, options)
        on_host = self._prunes or self._kind == "block_sparse"
        self._texts = {} if on_host else _texts(trial, self._settings, self._by_class)
        self._number = layer_operator.number_of(self)
        self._in_graphs = InGraphs()
        self._counts: Tensor | None = None  # (len(_COUNTED),), int64; None unless asked

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Return the layer of a copied module, which counts for itself."""
        module, step = copy.deepcopy(self.module, memo), copy.deepcopy(self._step, memo)
        return Layer(self.name, module, self._policy, step, self._min_length, **self._options)

    # ---- around every eager call of the module ---------------------------------------------------

    def before(self) -> None:
        """Begin to take attention of the module's call."""
        self.is_eager = False
        self._seen, self._mode, processor = self._calls, None, self.module.processor
        if not hasattr(processor, "_attention_backend"):
            self._mode = interception.AttentionCalls(self)
            self._mode.__enter__()
        elif processor._attention_backend != backends.NAME:
            self.own_backend = processor._attention_backend
            processor._attention_backend = backends.backend()

    def after(self) -> None:
        """Stop intercepting, even if the call failed."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        self.release()
        if self.is_eager and self._calls == self._seen:
            kind = type(self.module.processor).__name__
            self.stays_native(f"{kind} calls no attention function of torch or diffusers")

    def release(self) -> None:
        """Restore the backend of the processor."""
        processor = self.module.processor
        if getattr(processor, "_attention_backend", None) == backends.NAME:
            processor._attention_backend = self.own_backend

    # ---- calls -----------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any],
        ranks: Ranks | None = None,
    ) -> Tensor | None:
        """Run attention on tensors (batch, heads, len, head_dim).

        Parameters
        ----------
        q, k, v : Tensor
        scale : float, optional
        options : mapping
            ``attn_mask``, ``dropout_p`` and ``is_causal`` of torch's function.
        ranks : Ranks, optional
            Ranks that share the sequence; q, k and v then belong to this rank.

        Returns
        -------
        Tensor, or None if native attention must run, which is counted with the reason.
        """
        reason = _transform(q, k, v, options) or self._obstacle(q, k, v, options, ranks)
        mode, shared = self._choice.mode, None
        if reason is None and (mode is None or (self._follows and self._step.at is None)):
            reason = UNKNOWN
        if ranks is not None:
            reason, said = ranks.agreed(facts_of_call(reason, q, k, options["attn_mask"]))
            shared = ranks, said
        if reason is None and mode is not None:
            mask, bias = masks.of_scores(options["attn_mask"])
            try:
                found = self._run(named(q, k, v, mask=mask, bias=bias), scale, mode, shared)
            except UnsupportedError as error:
                reason = str(error)
            except ValueError as error:  # a calibration of other heads, factors of other steps
                raise ValueError(f"{self.name}: {error}") from error
            else:
                self._calls += 1
                self._modes[mode] += 1
                return found
        self.stays_native(reason or UNKNOWN)
        return None

    def stays_native(self, reason: str) -> None:
        """Count a call that native attention runs."""
        self._calls += 1
        self._native[reason] += 1
        level = logging.INFO if self._native[reason] == 1 else logging.DEBUG
        _log.log(level, "%s stays native: %s", self.name, reason)

    def _obstacle(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any],
        ranks: Ranks | None = None,
    ) -> str | None:
        """Return why a call cannot run in INT8, or None if it can; torch may trace this."""
        mask = options["attn_mask"]
        if options["is_causal"]:
            return "causal"
        if options["dropout_p"]:
            return "dropout"
        given = (q, k, v, mask) if isinstance(mask, Tensor) else (q, k, v)
        if ranks is None and torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return "gradients"
        if not q.ndim == k.ndim == v.ndim == 4:
            return f"{q.ndim} axes"
        if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
            return "operands that broadcast"
        if q.device.type not in ("cpu", "cuda"):
            return f"device {q.device.type}"
        if q.dtype not in _NAMES or not q.dtype == k.dtype == v.dtype:
            return f"dtype {str(q.dtype).removeprefix('torch.')}"
        if not 1 <= q.shape[3] <= 256 or v.shape[3] != q.shape[3]:
            sizes = sorted({int(x.shape[3]) for x in (q, v)})
            return f"head size {' and '.join(map(str, sizes))}"
        if ranks is not None:
            if self._prunes or self._kind != "dense":
                what = "token pruning" if self._prunes else f"{self._kind} attention"
                return f"{what} in context parallelism"
            return ranks.obstacle(q, k, v, mask, self._min_length)
        if min(q.shape[2], k.shape[2]) < self._min_length:
            return f"fewer than {self._min_length} queries or keys"
        if self._kind != "dense" and q.shape[2] != k.shape[2]:
            return f"{self._kind} attention, with fewer or more keys than queries"
        if self._prunes and mask is not None:
            return "token pruning, which takes no attention mask"
        return masks.obstacle(mask, q, k)

    def _run(
        self, given: dict[str, Tensor], scale: float | None, mode: str, shared: Shared | None = None
    ) -> Tensor:
        noise = None if self._choice.is_fixed and not self._follows else self._step.noise
        attention = self._attention_for(noise, given["q"].shape[1], given["q"].shape[3], scale)
        at = (None if noise is None else self._step.at) or self._any_step
        given |= {n: x.contiguous() for n in "qkv" if (x := given[n]).stride(3) != 1}
        q, k = given["q"], given["k"]
        if self._prunes:
            with on_device_of(q):
                arrays = [as_array(given[name]) for name in "qkv"]
                o = torch.empty_like(q)  # in the layout of q, so what follows needs no copy
                return o.copy_(as_tensor(attention(*arrays, sigma=at.sigma, mode=mode)))
        scores = {}
        if self._kind != "dense":
            with on_device_of(q):
                scores = self._settings.of_scores(as_array(q), as_array(k), 1)

        def run(**form: Any) -> Tensor:
            if self._by_class:
                form = _of_class(mode, form)
            if shared is not None:
                call, o = shared[0].attend(form, given, shared[1])
                self._on_ranks[words(call)] += 1
                return o
            return calls.forward(calls.TensorSettings.of(**form, **scores), given)[0]

        return attention.in_mode(
            mode, at, run,
            device=q.get_device(), dtype=_NAMES[q.dtype], heads_kv=k.shape[1],
        )  # fmt: skip

    def run_in_graph(self, given: dict[str, Tensor], scale: float | None, mode: str) -> Tensor:
        """Run a call of a graph at the step that the model is called for now."""
        if self._follows and self._step.at is None:
            raise RuntimeError(
                f"{self.name} has {self._follows}, in compiled code, and {UNKNOWN}: give the model "
                "the scheduler's own timesteps"
            )
        try:
            return self._run(given, scale, mode)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _attention_for(
        self,
        noise: tuple[Schedule, float] | None,
        heads: int,
        head_dim: int,
        scale: float | None,
    ) -> Int8Attention:
        """Return attention for a form of call, made again for every schedule."""
        schedule = None if noise is None else noise[0]
        if schedule is not self._schedule:
            self._fallbacks = self._all_fallbacks()
            self._schedule, self._attention = schedule, {}
        form = heads, head_dim, scale
        if form not in self._attention:
            falling = None if schedule is None else schedule.falling
            with warnings.catch_warnings():  # which the trial of the options gave
                warnings.simplefilter("ignore", UserWarning)
                self._attention[form] = Int8Attention(
                    heads, head_dim, features.ANY_STEPS if falling is None else falling.size,
                    sigmas=falling, scale=scale, **self._options,
                )  # fmt: skip
        return self._attention[form]

    # ---- in graphs of torch ----------------------------------------------------------------------

    def attend_in_graph(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """Put attention into the graph that torch makes; arguments and result as of `attend`.

        A graph is of the mode of its step: torch traces again for another mode, once.
        """
        reason = self._obstacle(q, k, v, options)
        mode = self._choice.mode
        needs_step = not self._choice.is_fixed or self._follows
        if reason is None and needs_step and not self._step.is_seen:
            reason = "the step of a model within a compiled function is not known"
        on_host = mode not in self._texts
        if reason is None and on_host and is_exported():
            what = "token pruning" if self._prunes else self._follows or f"{self._kind} attention"
            reason = f"{what} in an exported program, which has no layers"
        if reason is not None or mode is None:
            self.note(f"native: {reason or UNKNOWN}")
            self._count("native")
            return None
        self.note(mode)
        self._count(mode)
        q, k, v = [x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v)]
        mask, bias = masks.of_scores(options["attn_mask"])
        given = named(q, k, v, mask=mask, bias=bias)
        if on_host:
            return layer_operator.attend(given, scale, self._number, mode)
        return operator.attend(given, scale, self._texts[mode])

    def note(self, ran: str) -> None:
        """Record the layer's part in the graph that torch traces, now and for each run.

        Torch sets the attribute after each run, on the layer that the module has then. So layers
        know of graphs that were traced for another block, or before the module was replaced again.
        """
        self._note_now(ran)
        setattr(self._in_graphs, ran, True)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_now(self, ran: str) -> bool:
        """Remember it while torch traces, for graphs that are exported; return True."""
        if not hasattr(self._in_graphs, ran):
            _log.info("%s in compiled code: %s", self.name, ran)
        setattr(self._in_graphs, ran, True)
        return True

    def count_on(self, device: torch.device) -> None:
        """Count calls in compiled code from now on, on a device."""
        if self._counts is not None and self._counts.device == device:
            return
        with torch.inference_mode(False):
            if self._counts is None:
                self._counts = torch.zeros(len(_COUNTED), dtype=torch.int64, device=device)
            else:
                self._counts = self._counts.to(device)
        torch._dynamo.mark_static_address(self._counts, guard=False)  # for CUDA graphs

    def _count(self, ran: str) -> None:
        """Add 1 on the device, in the graph; an exported program counts nothing."""
        if self._counts is not None and not is_exported():
            self._counts[_COUNTED.index(ran)].add_(1)

    def _all_fallbacks(self) -> Counter[str]:
        """Return the fallbacks of earlier schedules and of the current one."""
        return sum((Counter(one.fallbacks) for one in self._attention.values()), self._fallbacks)

    def report(self) -> LayerReport:
        """Return the counts; reading counts from a device synchronises."""
        counts = [] if self._counts is None else self._counts.tolist()
        counted = {name: n for name, n in zip(_COUNTED, counts, strict=False) if n}
        return LayerReport(
            self.name,
            dict(self._modes),
            dict(self._native),
            dict(self._all_fallbacks()),
            tuple(vars(self._in_graphs)),
            counted,
            dict(self._on_ranks),
        )


def _transform(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> str | None:
    """Return why an eager call cannot read the memory of these tensors, or None if it can."""
    if transforms.active() or transforms.forward_mode():
        return "a transform of torch.func, or forward-mode derivatives"
    given = q, k, v, options["attn_mask"]
    others = [type(x).__name__ for x in given if isinstance(x, Tensor) and type(x) not in PLAIN]
    return f"operands of type {others[0]}" if others else None


def _of_class(mode: str, form: dict[str, Any]) -> dict[str, Any]:
    """Return options for a call of the fastest rung in an INT8 mode's accuracy class."""
    if form["variant"] != "fa_int8":
        return form
    return {**form, "variant": "auto", "accuracy": mode, "quant": None}


def _texts(
    attention: Int8Attention, settings: Int8AttentionSettings, by_class: bool
) -> dict[str, str]:
    """Return the operator's settings for each mode whose settings are the same at all steps.

    Static scales are given by the layer at each call.
    """
    window = settings.of_scores(None, None, 1)  # of all types but the host's

    def text(mode: str) -> str:
        def run(**form: Any) -> str:
            own = _of_class(mode, form) if by_class else form
            return operator.text_of(calls.TensorSettings.of(**own, **window))

        return attention.in_mode(
            mode, attention.step(0), run, device=-1, dtype="float16", heads_kv=1
        )

    static = attention.quant.static or attention.calibration is not None
    return {mode: text(mode) for mode in MODES if mode == "precision" or not static}
