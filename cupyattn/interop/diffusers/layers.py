"""One attention module of a model: what of it INT8 takes, and what it counted."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.diffusion import schedules
from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.policy import MODES
from cupyattn.errors import UnsupportedError
from cupyattn.interop.diffusers import backends, interception
from cupyattn.interop.diffusers.noise import Noise, Schedule
from cupyattn.interop.diffusers.report import LayerReport
from cupyattn.interop.torch import calls, transforms

_log = logging.getLogger("cupyattn")

#: Steps of the schedule that a layer of a single mode is told: it looks at none.
_ANY_STEPS = 2
#: Types that are taken, and their names.
_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip


class Step:
    """What a model knows of the step that it is called for.

    Parameters
    ----------
    source : Noise, optional
        Where it knows it from.
    """

    def __init__(self, source: Noise | None = None) -> None:
        self._source = source
        #: Schedule and noise-to-signal ratio of the call that runs.
        self.noise: tuple[Schedule, float] | None = None

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Look, before the model runs."""
        if self._source is None or torch.compiler.is_compiling():
            return
        given = _signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        self.noise = self._source.at(given["timestep"]) if "timestep" in given else None


@functools.lru_cache(maxsize=16)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


class Layer:
    """An attention module whose calls go to INT8 where it takes them.

    Parameters
    ----------
    name : str
    module : torch.nn.Module
        Of diffusers, with a processor.
    policy : object
        As `cupyattn.Int8Attention` takes it.
    step : Step
        Of the model; it changes from call to call.
    min_length : int
        Calls with fewer queries or keys stay native.
    **options
        Others of `cupyattn.Int8Attention`: quant, backend and arch.
    """

    def __init__(
        self, name: str, module: Any, policy: Any, step: Step, min_length: int, **options: Any
    ) -> None:
        self.name, self.module = name, module
        self.own_backend: Any = None
        self._mode: interception.AttentionCalls | None = None
        self._policy, self._step = policy, step
        self._min_length, self._options = min_length, options
        self._fixed = policy if isinstance(policy, str) and policy in MODES else None
        self._schedule: Schedule | None = None
        self._attention: dict[tuple[int, int, float | None], Int8Attention] = {}
        self._calls = 0  # all that were counted
        self._modes: Counter[str] = Counter()
        self._native: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()  # of schedules that were
        self._noise: tuple[Schedule, float] | None = None
        self._at: schedules.Step | None = None  # what that noise means
        self._compiled = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Return the layer of a copied module, which counts for itself."""
        module, step = copy.deepcopy(self.module, memo), copy.deepcopy(self._step, memo)
        return Layer(self.name, module, self._policy, step, self._min_length, **self._options)

    # ---- hooks: around every call of the module --------------------------------------------------

    def before(self, module: Any, args: Any) -> None:
        """Begin to take attention of the module's call."""
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        interception.open_call(self)
        self._seen, self._mode, processor = self._calls, None, module.processor
        if not hasattr(processor, "_attention_backend"):
            self._mode = interception.AttentionCalls(self)
            self._mode.__enter__()
        elif processor._attention_backend != backends.NAME:
            self.own_backend = processor._attention_backend
            processor._attention_backend = backends.backend()

    def after(self, module: Any, args: Any, output: Any) -> None:
        """End it, also where the call failed."""
        if torch.compiler.is_compiling():
            return
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        self.release()
        interception.close_call(self)
        if self._calls == self._seen:
            kind = type(module.processor).__name__
            self.stays_native(f"{kind} calls no attention function of torch or diffusers")

    def release(self) -> None:
        """Give the processor its own backend back."""
        processor = self.module.processor
        if getattr(processor, "_attention_backend", None) == backends.NAME:
            processor._attention_backend = self.own_backend

    # ---- calls -----------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """Run attention on tensors (batch, heads, len, head_dim).

        Parameters
        ----------
        q, k, v : Tensor
        scale : float, optional
        options : mapping
            ``attn_mask``, ``dropout_p`` and ``is_causal`` of torch's function.

        Returns
        -------
        Tensor, or None where the model's own attention is to run; it is counted with the reason.
        """
        reason = self._obstacle(q, k, v, options)
        if reason is None:
            try:
                return self._run(q, k, v, scale)
            except UnsupportedError as error:
                reason = str(error)
        self.stays_native(reason)
        return None

    def stays_native(self, reason: str) -> None:
        """Count a call that the model's own attention runs."""
        self._calls += 1
        self._native[reason] += 1
        level = logging.INFO if self._native[reason] == 1 else logging.DEBUG
        _log.log(level, "%s stays native: %s", self.name, reason)

    def _obstacle(self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> str | None:
        """Return why INT8 does not take a call, None where it does."""
        if options["attn_mask"] is not None:
            return "attention mask"
        if options["is_causal"]:
            return "causal"
        if options["dropout_p"]:
            return "dropout"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "gradients"
        if transforms.active() or transforms.forward_mode():
            return "a transform of torch.func, or forward-mode derivatives"
        if not all(type(x) is Tensor for x in (q, k, v)):
            return f"operands of type {type(q).__name__}"
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
        if min(q.shape[2], k.shape[2]) < self._min_length:
            return f"fewer than {self._min_length} queries or keys"
        if self._fixed is None and self._step.noise is None:
            return "the timestep lies on the device alone, the noise level is not known"
        return None

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        noise = None if self._fixed else self._step.noise
        attention = self._attention_for(noise, q.shape[1], q.shape[3], scale)
        if noise is not self._noise or self._at is None:  # all layers' calls of a pass have one
            where: Any = {"timestep": 0} if noise is None else {"sigma": noise[1]}
            self._noise, self._at = noise, attention.step(**where)
        mode = self._fixed or attention.mode_at(self._at)
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        given = {"q": q, "k": k, "v": v}
        o = torch.empty_like(q)  # laid out as q is: what models do next then takes no copy

        def run(**form: Any) -> Tensor:
            return calls.forward(calls.TensorSettings.of(**form), given, o)[0]

        found = attention.in_mode(
            mode, self._at, run,
            device=q.get_device(), dtype=_NAMES[q.dtype], heads_kv=k.shape[1],
        )  # fmt: skip
        self._calls += 1
        self._modes[mode] += 1
        return found

    def _attention_for(
        self,
        noise: tuple[Schedule, float] | None,
        heads: int,
        head_dim: int,
        scale: float | None,
    ) -> Int8Attention:
        """Return attention of a form of call, made anew for every schedule."""
        schedule = None if noise is None else noise[0]
        if schedule is not self._schedule:
            self._fallbacks = self._all_fallbacks()
            self._schedule, self._attention = schedule, {}
        form = heads, head_dim, scale
        if form not in self._attention:
            falling = None if schedule is None else schedule.falling
            # A fixed mode is given in every call, so the policy is not asked.
            policy = "adaptive" if self._fixed else self._policy
            self._attention[form] = Int8Attention(
                heads, head_dim, _ANY_STEPS if falling is None else falling.size, sigmas=falling,
                precision_policy=policy, scale=scale, **self._options,
            )  # fmt: skip
        return self._attention[form]

    def _all_fallbacks(self) -> Counter[str]:
        """Return fallbacks of schedules that were, and of the one that is."""
        return sum((Counter(one.fallbacks) for one in self._attention.values()), self._fallbacks)

    def report(self) -> LayerReport:
        """Return what was counted."""
        return LayerReport(
            self.name,
            dict(self._modes),
            dict(self._native),
            dict(self._all_fallbacks()),
            self._compiled,
        )
