"""`Int8Attention`: attention of a diffusion transformer, whose arithmetic follows the timestep."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy.typing as npt

from cupyattn.arrays.interchange import device_of, is_cupy, take
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.arrays.threads import Lock
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.contracts import check_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.compiler.target import check_backend
from cupyattn.diffusion import guidance, pruning, unused
from cupyattn.diffusion.arguments import (
    check_count,
    check_number,
    check_projection,
    check_softmax_eps,
    needs_head_dim,
    warn_without_effect,
)
from cupyattn.diffusion.kept_keys import KeptKeys, needs_key_sums
from cupyattn.diffusion.policy import PrecisionPolicy, as_policy, check_mode
from cupyattn.diffusion.products import product
from cupyattn.diffusion.scales import StepScales
from cupyattn.diffusion.schedules import Step
from cupyattn.diffusion.settings import Int8AttentionSettings, wants_mask
from cupyattn.diffusion.steps import Steps
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels import ladder, limits
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import attention
from cupyattn.problem import checks
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.config import QuantConfig
from cupyattn.runtime.scratch import Memory, explaining_memory_errors

#: Query rows of a warp come in multiples of this, the rows of an mma.
ROWS_OF_WARP = 16

_log = logging.getLogger("cupyattn")
Result = TypeVar("Result")


class Int8Attention:
    """Attention for diffusion transformers: INT8 where noise covers it, 16 bits where not.

    Parameters
    ----------
    num_heads, head_dim : int
        Heads of the queries and their size; k and v may have a divisor of `num_heads`.
    num_timesteps : int
        Entries of the schedule.
    use_adaptive_scaling : bool, optional
        True, or omitted: static scales follow the timestep. A `Calibration` gives those of the
        step's bin. Static scales of `quant`, which are those of the schedule's middle, are
        multiplied by a factor of the step. False: one scale for all steps, the largest of all bins,
        or that of `quant`. Without static scales it has no effect.
    timestep_scales : array, (num_timesteps,), Calibration or path, optional
        Factors, positive, as `compute_adaptive_scales` returns them (which is called for them where
        they are needed and omitted), or a calibration or its file. Scales are dynamic, every
        call's own, unless this is a calibration or `quant` has static ones. Factors have no effect
        on dynamic scales.
    block_q, block_k : int, optional
        Query rows and keys of the kernels' tiles; what was measured best when omitted. Tiles of
        fewer rows have fewer warps.
    softmax_eps : float
        0, which is what code written for other libraries wants of it: rows without keys are zeros
        without it. What it would be added to differs from kernel to kernel.
    precision_policy : "adaptive", a mode, a table or an object
        Which mode runs at which step: `cupyattn.diffusion.policy.as_policy`. "adaptive" is
        `SigmaPolicy`: "aggressive" (INT8 Q.K^T, 8-bit P.V) above 5 times the noise-to-signal ratio
        of the schedule's middle, "precision" (16 bits) below a tenth of it, "balanced" (INT8
        Q.K^T, 16-bit P.V) between.
    attention_type : {"dense", "local", "block_sparse"}
        All keys; those of a window around each row; or the blocks of a block mask. Cost follows
        what is kept.
    window_size : int or (int, int), optional
        With "local": a row attends to keys at most ``window_size // 2`` away, or (left, right).
        With "block_sparse": the blocks that such a window reaches, whole.
    block_size : {64, 128}
        Rows and keys of a block of that window.
    enable_pruning : bool
        Drop keys that get little attention (`cupyattn.diffusion.pruning`); with "dense" alone.
    pruning_ratio : float
        Share of the keys of every head that is dropped, 0 to less than 1.
    enable_cfg_fusion : bool
        A call may bring q of both guidance branches concatenated along the batch, twice that of k
        and v, which they share: one launch, o in the form of q. `fused_cfg` needs no such leave.
    out_proj : array, (num_heads * head_dim, channels), or callable, optional
        Applied to o as (batch, len_q, num_heads * head_dim); a call then returns its result. A
        callable gets the caller's kind of array.
    sigmas : array, (num_timesteps,), or {"edm", "flow", "ddpm"}, optional
        Noise-to-signal ratios of the schedule, not rising; `compute_sigma_schedule` of this kind,
        "edm" when omitted.
    quant : QuantConfig, optional
        How the INT8 modes quantise. `pv` is what "aggressive" takes; where it says "16bit", "int8"
        with one scale for a channel of V. `fused` is for "balanced".
    pruning_threshold : float, optional
        In place of `pruning_ratio`: keys are dropped whose importance is less than this share of
        what each would get if all got the same, times the noise-to-signal ratio over that of the
        middle, at most 1. Waits for the device: every call finds how many keys are kept.
    pruning_rows : int
        Query rows of each head that importance is estimated from, at even distances.
    block_mask : BlockMask or callable, optional
        With "block_sparse", in place of `window_size`; a callable makes one of (q, k), as
        `cupyattn.diffusion.VideoMask` does.
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    qk_norm : (array, array), optional
        As for `cupyattn.attention`: the weights of this layer that normalise q and k, which a call
        may also turn (`rope`). The INT8 modes do both as they quantise. What looks at q and k
        before sees them as they came: a callable `block_mask`. Not with pruning.
    qk_norm_eps : float
        Added to the mean square.
    backend, arch : str, optional
        As for `cupyattn.attention`.

    Raises
    ------
    ValueError, TypeError
        For values that mean nothing or do not fit together; also for a calibration of another
        model.
    UnsupportedError
        For a `softmax_eps` that is not 0, or pruning with sparse attention.

    Warns
    -----
    UserWarning
        For an option that has no effect beside the others, such as `timestep_scales` with dynamic
        scales, `pruning_ratio` without `enable_pruning`, or `block_size` with dense attention.

    Notes
    -----
    What INT8 does not take falls back to 16 bits, is logged by the logger ``cupyattn`` and counted
    in `fallbacks`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn as ca
    >>> layer = ca.Int8Attention(num_heads=2, head_dim=16, num_timesteps=50)
    >>> q = k = v = np.ones((1, 2, 40, 16), np.float16)
    >>> layer(q, k, v, timestep=3).shape, layer.mode(3), layer.mode(49)
    ((1, 2, 40, 16), 'aggressive', 'precision')
    """

    @needs_head_dim
    @explains_foreign_arguments
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_timesteps: int = 1000,
        use_adaptive_scaling: bool | None = None,
        timestep_scales: Any = None,
        block_q: int | None = None,
        block_k: int | None = None,
        softmax_eps: float = 0.0,
        precision_policy: Any = "adaptive",
        attention_type: str = "dense",
        window_size: int | tuple[int, int] | None = None,
        block_size: int = 64,
        enable_pruning: bool = False,
        pruning_ratio: float = 0.2,
        enable_cfg_fusion: bool = False,
        out_proj: Any = None,
        *,
        sigmas: npt.ArrayLike | str | None = None,
        quant: QuantConfig | None = None,
        pruning_threshold: float | None = None,
        pruning_rows: int = pruning.SAMPLE_ROWS,
        block_mask: Any = None,
        scale: float | None = None,
        qk_norm: Any = None,
        qk_norm_eps: float = EPS,
        backend: str | None = None,
        arch: str | None = None,
    ) -> None:
        self.num_heads = check_count("num_heads", num_heads)
        self.head_dim = check_count("head_dim", head_dim)
        self.num_timesteps = check_count("num_timesteps", num_timesteps)
        self.use_adaptive_scaling = use_adaptive_scaling is None or bool(use_adaptive_scaling)
        self.enable_cfg_fusion = bool(enable_cfg_fusion)
        self._steps = Steps(sigmas, self.num_timesteps)
        self.sigmas = self._steps.sigmas
        self.policy: PrecisionPolicy = as_policy(precision_policy, self.num_timesteps)
        self.quant = QuantConfig() if quant is None else quant
        if not isinstance(self.quant, QuantConfig):
            raise TypeError(f"quant must be a cupyattn.QuantConfig or None, got {shown(quant)}")
        self._scales = StepScales(
            self.quant, timestep_scales, self.sigmas, self.num_heads, self.head_dim,
            adaptive=use_adaptive_scaling,
        )  # fmt: skip
        self.calibration = self._scales.calibration
        check_softmax_eps(softmax_eps)
        self._blocks = _check_blocks(block_q, block_k)
        for variant in ("fa_tc", "fa_int8"):
            tiles = self._tiles(variant, "portable")
            if tiles is not None:
                own = {"CFG_HEAD_DIM": self.head_dim, "CFG_VEC": 1}
                spec = ModuleSpec.of(f"attn_{variant}.cu", tiles.defines(), own)
                check_tiles(spec, tiles, f"{variant} (portable)")
        self._settings = Int8AttentionSettings(
            attention_type, window_size, block_size, block_mask, enable_pruning, pruning_ratio,
            pruning_threshold, pruning_rows,
        )  # fmt: skip
        self._out_proj = check_projection(out_proj, self.num_heads * self.head_dim)
        self._scale = checks.check_scale(scale, self.head_dim)
        self._norm = {"qk_norm": _take_weights(qk_norm), "qk_norm_eps": qk_norm_eps}
        check_arch(arch)
        check_backend(backend)
        self._where = {"backend": backend, "arch": arch}
        warn_without_effect([
            *self._scales.unused,
            *unused.of_policy(self.policy, quant, timestep_scales, self.num_timesteps),
            *self._settings.unused(self._settings.given),
            *(["qk_norm_eps has no effect without qk_norm: give qk_norm, or leave it out"]
              if qk_norm is None and qk_norm_eps != EPS else []),
        ])  # fmt: skip
        self._fallbacks: dict[str, int] = {}
        self._lock = Lock()

    # ---- the meaning of a step -------------------------------------------------------------------

    def step(self, timestep: int | None = None, sigma: float | None = None) -> Step:
        """Return the properties of a step; exactly one of the two arguments is given.

        Parameters
        ----------
        timestep : int
            0 to num_timesteps - 1, 0 = most noise.
        sigma : float
            Noise-to-signal ratio, 0 to infinity.

        Raises
        ------
        ValueError, TypeError
            Otherwise.
        """
        return self._steps.find(timestep, sigma)

    def mode(self, timestep: int | None = None, *, sigma: float | None = None) -> str:
        """Return the mode that the policy takes at a step."""
        return self.mode_at(self.step(timestep, sigma))

    def mode_at(self, step: Step) -> str:
        """Return the mode that the policy takes at a step of `step`."""
        return check_mode(self.policy.mode(step.timestep, step.ratio))

    def quant_config(
        self,
        q: Any,
        k: Any,
        timestep: int | None = None,
        *,
        sigma: float | None = None,
        mode: str = "balanced",
    ) -> QuantConfig:
        """Return how q and k of a call would be quantised in an INT8 mode.

        Parameters
        ----------
        q, k, timestep, sigma
            As for a call.
        mode : {"aggressive", "balanced"}

        Raises
        ------
        ValueError, TypeError
            As a call.
        """
        if check_mode(mode) == "precision":
            raise ValueError("mode 'precision' quantises nothing: ask for one of the others")
        q, k = (take(name, a)[0] for name, a in zip("qk", (q, k), strict=True))
        with on_device_of(q):
            step = self.step(timestep, sigma)
            return self._scales.config(mode, step, device_of(q), k.shape[1])

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of calls that fell back to 16 bits, by reason."""
        with self._lock:
            return dict(self._fallbacks)

    def cuda(self) -> Int8Attention:
        """Return this layer, for code that moves modules: it computes where q, k and v lie."""
        return self

    # ---- calls -----------------------------------------------------------------------------------

    @explains_foreign_arguments
    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        timestep: int | None = None,
        *,
        sigma: float | None = None,
        return_mask: bool | None = None,
        mask: Any = None,
        rope: Any = None,
        rope_interleaved: bool = False,
        **overrides: Any,
    ) -> Any:
        """Run attention at one step.

        Parameters
        ----------
        q : array, (batch, num_heads, len_q, head_dim)
            float16, bfloat16 or float32: CuPy, NumPy or DLPack.
        k, v : array, (batch, heads_kv, len_kv, head_dim)
        timestep : int
            Index into the schedule, 0 = most noise.
        sigma : float
            Noise-to-signal ratio in place of `timestep`.
        return_mask : bool, optional
            Return which keys were kept, too. When omitted: only if this call has
            ``enable_pruning=True``. Pruning that was set at construction does not count.
        mask, rope, rope_interleaved
            As for `cupyattn.attention`; not with pruning.
        **overrides
            For this call: attention_type, window_size, block_size, block_mask, enable_pruning,
            pruning_ratio, pruning_threshold and pruning_rows as for the class, and mode, in place
            of the policy's.

        Returns
        -------
        o : array, (batch, num_heads, len_q, head_dim)
            Kind and dtype of q; with `out_proj`, the result of that.
        kept : array, bool, (batch, num_heads, len_kv)
            Where `return_mask` says so: True for the keys that were kept. All True without pruning.

        Raises
        ------
        ValueError, TypeError, UnsupportedError
            As the class and `cupyattn.attention`. There is no ``return_lse``.

        Examples
        --------
        >>> import numpy as np
        >>> q = k = v = np.ones((2, 1, 40, 16), np.float16)
        >>> layer = Int8Attention(1, 16, 50)
        >>> o, kept = layer(q, k, v, 3, enable_pruning=True, pruning_ratio=0.25)
        >>> o.shape, kept.shape, kept.sum(axis=2).tolist()
        ((2, 1, 40, 16), (2, 1, 40), [[30], [30]])
        """
        return_mask = wants_mask(return_mask, overrides)
        settings, step = self._settings.changed(overrides), self.step(timestep, sigma)
        (q, restore), (k, _), (v, _) = (take(n, a) for n, a in zip("qkv", (q, k, v), strict=True))
        extras = {"mask": mask, "rope": rope, "rope_interleaved": rope_interleaved}
        with on_device_of(q):
            batch = k.shape[0] if q.ndim == k.ndim == 4 else 0
            if self.enable_cfg_fusion and q.shape[0] == guidance.BRANCHES * batch != 0:
                *halves, kept = self._shared(q[:batch], q[batch:], k, v, step, settings, extras)
                o = guidance.join_batches(*halves)
                kept = None if kept is None else guidance.join_batches(kept, kept)
            else:
                o, kept = self._attend(q, k, v, step, settings, extras)
            result = self._projected(o, restore)
            if not return_mask:
                return result
            return result, restore(self._all_kept(q, k) if kept is None else kept)

    @explains_foreign_arguments
    def fused_cfg(
        self,
        q_cond: Any,
        q_uncond: Any,
        k: Any,
        v: Any,
        timestep: int | None = None,
        guidance_scale: float = 7.5,
        *,
        sigma: float | None = None,
        return_mask: bool | None = None,
        mask: Any = None,
        rope: Any = None,
        rope_interleaved: bool = False,
        **overrides: Any,
    ) -> Any:
        """Run both branches of guided sampling in one launch.

        Parameters
        ----------
        q_cond, q_uncond : array, (batch, num_heads, len_q, head_dim)
            Queries of the conditional and the unconditional branch.
        k, v : array, (batch or 2 batch, heads_kv, len_kv, head_dim)
            Shared by the branches; or of both, the conditional one's first.
        timestep, sigma, mask, rope, rope_interleaved, **overrides
            As for a call. Pruning keeps keys that either branch attends to: one choice for both.
        guidance_scale : float
            Changes nothing here, since guidance combines outputs of the network, not of a layer;
            `cupyattn.diffusion.guided` is the expression that would combine these.
        return_mask : bool, optional
            Return which keys were kept, too. When omitted, as for a call: if it has
            ``enable_pruning=True``.

        Returns
        -------
        o_cond, o_uncond : array
            As of two calls: to the bit, unless `quant` has one dynamic scale for all of Q
            (granularity "tensor") or keys are pruned.
        kept : array, bool
            Where `return_mask` says so: (batch or 2 batch, num_heads, len_kv), as k has.

        Raises
        ------
        ValueError, TypeError, UnsupportedError
            As a call.
        """
        check_number("guidance_scale", guidance_scale, "a finite number", math.isfinite)
        return_mask = wants_mask(return_mask, overrides)
        settings, step = self._settings.changed(overrides), self.step(timestep, sigma)
        named = {"q_cond": q_cond, "q_uncond": q_uncond, "k": k, "v": v}
        (q_cond, restore), (q_uncond, _), (k, _), (v, _) = (take(n, a) for n, a in named.items())
        extras = {"mask": mask, "rope": rope, "rope_interleaved": rope_interleaved}
        with on_device_of(q_cond):
            batch = q_cond.shape[0] if q_cond.ndim == k.ndim == 4 else 0
            if batch and k.shape[0] == guidance.BRANCHES * batch:
                q = guidance.join_batches(q_cond, q_uncond)
                both, kept = self._attend(q, k, v, step, settings, extras)
                o_cond, o_uncond = both[:batch], both[batch:]
            else:
                o_cond, o_uncond, kept = self._shared(
                    q_cond, q_uncond, k, v, step, settings, extras
                )
            results = self._projected(o_cond, restore), self._projected(o_uncond, restore)
            if not return_mask:
                return results
            return (*results, restore(self._all_kept(k, k) if kept is None else kept))

    def _shared(
        self,
        q_cond: Array,
        q_uncond: Array,
        k: Array,
        v: Array,
        step: Step,
        settings: Int8AttentionSettings,
        extras: dict[str, Any],
    ) -> tuple[Array, Array, Array | None]:
        """Run two branches against the same keys and values; return both, and the kept keys."""
        copy = {"q of both branches": guidance.BRANCHES * q_cond.nbytes}
        with explaining_memory_errors(Memory("fused_cfg", copy), on_device=is_cupy(q_cond)):
            q = guidance.stack_queries(q_cond, q_uncond)
        mask = extras["mask"]
        if mask is not None and mask.ndim >= 3:
            extras = {**extras, "mask": guidance.repeat_heads(take("mask", mask)[0], mask.ndim - 3)}
        o, kept = self._attend(q, k, v, step, settings, extras, guidance.BRANCHES)
        return (*guidance.split_branches(o), kept)

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        step: Step,
        settings: Int8AttentionSettings,
        extras: dict[str, Any],
        branches: int = 1,
    ) -> tuple[Array, Array | None]:
        """Run attention, heads of `branches` stacked in q; return O and the keys kept by head.

        None: no key was dropped.
        """
        self._check(q, k, v, branches)
        keys: KeptKeys | None = None
        extras = {**extras, **self._norm}
        options = settings.of_scores(q, k, branches)
        if settings.enable_pruning:
            if not extras["mask"] is extras["rope"] is extras["qk_norm"] is None:
                raise UnsupportedError(
                    "token pruning reads keys and moves the kept keys, so it takes no "
                    "mask, no rope and no qk_norm: normalise and turn q and k beforehand, or leave "
                    "pruning out"
                )
            keys = self._pruned(q, k, v, step, settings)
        if branches == guidance.BRANCHES and extras["qk_norm"] is not None:
            of_q, of_k = extras["qk_norm"]
            extras = {**extras, "qk_norm": (guidance.repeat_weights(of_q, q.shape[3]), of_k)}
        options |= extras

        def run(**form: Any) -> Array:
            if keys is not None:
                return keys.attend(q, **form, **options)
            return attention(q, k, v, **form, **options)

        o = self.in_mode(
            settings.mode or self.mode_at(step), step, run,
            device=device_of(q), dtype=q.dtype.name, heads_kv=k.shape[1], branches=branches,
        )  # fmt: skip
        if keys is None or keys.kept is None:
            return o, None
        return o, keys.kept.repeat(self.num_heads // k.shape[1], axis=1)

    def _all_kept(self, q: Array, k: Array) -> Array:
        """Return that no key was dropped, for the batch of q."""
        return array_namespace(k).ones((q.shape[0], self.num_heads, k.shape[2]), bool)

    def _check(self, q: Array, k: Array, v: Array, branches: int) -> None:
        array_namespace(q, k, v)
        checks.check_dtype(q, k, v)
        limits.check_shapes(*(tuple(x.shape) for x in (q, k, v)))
        heads, head_dim = q.shape[1] // branches, q.shape[3]
        if (heads, head_dim) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"q must have num_heads={self.num_heads} and head_dim={self.head_dim}, got "
                f"{heads} heads of {head_dim}"
            )
        if not k.shape[1] or self.num_heads % k.shape[1]:
            raise ValueError(
                f"the heads of k and v must divide num_heads={self.num_heads}, got {k.shape[1]}"
            )

    def _pruned(
        self, q: Array, k: Array, v: Array, step: Step, settings: Int8AttentionSettings
    ) -> KeptKeys:
        """Return the keys that are kept: which they are is found out beside attention."""
        backend = self._where["backend"]
        needed = pruning.bytes_needed(q, k, v, settings.pruning_rows, backend)
        in_codes = (settings.mode or self.mode_at(step)) != "precision"
        key_sums = needs_key_sums(self.quant if in_codes else None, backend, k, v)
        with explaining_memory_errors(Memory("token pruning", needed), on_device=is_cupy(k)):
            importance, sums = pruning.weigh_keys(
                q, k, scale=self._scale, rows=settings.pruning_rows, key_sums=key_sums,
                **self._where,
            )  # fmt: skip
            if settings.pruning_threshold is None:
                count = pruning.kept_count(k.shape[2], settings.pruning_ratio)
            else:
                threshold = settings.pruning_threshold * min(step.ratio, 1.0)
                count = pruning.count_above(importance, threshold)
        return KeptKeys(k, v, importance, sums, count, needed)

    def in_mode(
        self,
        mode: str,
        step: Step,
        run: Callable[..., Result],
        *,
        device: int,
        dtype: str,
        heads_kv: int,
        branches: int = 1,
    ) -> Result:
        """Run a mode at a step, or 16 bits where INT8 does not take the call, which is counted.

        Parameters
        ----------
        mode : str
            One of `cupyattn.diffusion.MODES`.
        step : Step
            Result of `step`.
        run : callable
            Is given `variant`, `quant`, `tiles`, `scale`, `backend` and `arch` of
            `cupyattn.attention`, as named arguments, and raises UnsupportedError as that does.
        device : int
            Where the operands lie; -1 is the host.
        dtype : {"float16", "bfloat16", "float32"}
        heads_kv : int
        branches : {1, 2}
            How many heads of q are stacked for each head of the model.

        Returns
        -------
        object
            What `run` returns.
        """
        where: dict[str, Any] = {**self._where, "scale": self._scale}
        if mode != "precision":
            quant = self._scales.config(mode, step, device, heads_kv, branches)
            tiles = self._tiles("fa_int8", quant.form)
            try:
                return run(variant="fa_int8", quant=quant, tiles=tiles, **where)
            except UnsupportedError as error:
                self._count(mode, str(error))
        variant, tiles = "auto", None
        if self._blocks != (None, None):
            variant = "fa_warps" if dtype == "float32" else "fa_tc"
            tiles = self._tiles(variant, "portable")
        return run(variant=variant, quant=None, tiles=tiles, **where)

    def _count(self, mode: str, reason: str) -> None:
        with self._lock:
            count = self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
        level = logging.WARNING if count == 1 else logging.DEBUG
        _log.log(level, "mode %r fell back to 16 bits (call %d): %s", mode, count, reason)

    def _tiles(self, variant: str, form: str) -> Tiles | None:
        """Return tiles of the caller's sizes, None where he names none."""
        block_q, block_k = self._blocks
        if block_q is None and block_k is None:
            return None
        own = ladder.lookup(variant).default_tiles(self.head_dim, form)
        block_q = block_q or own.block_q
        num_warps = own.num_warps
        if variant != "fa_warps" and block_q % ROWS_OF_WARP == 0:
            while block_q % (ROWS_OF_WARP * num_warps):
                num_warps //= 2
        return Tiles(block_q, block_k or own.block_kv, num_warps, own.num_stages)

    def _projected(self, o: Array, restore: Callable[[Any], Any]) -> Any:
        if self._out_proj is None:
            return restore(o)
        batch, heads, len_q, head_dim = o.shape
        rows = o.swapaxes(1, 2).reshape(batch, len_q, heads * head_dim)
        if callable(self._out_proj):
            return self._out_proj(restore(rows))
        weights = take("out_proj", self._out_proj)[0].astype(o.dtype, copy=False)
        return restore(product(rows, weights).astype(o.dtype))


def _take_weights(qk_norm: Any) -> Any:
    """Return weights as arrays that this library knows; calls check them beside q and k."""
    if not (isinstance(qk_norm, (tuple, list)) and len(qk_norm) == 2):
        return qk_norm
    names = "q_weight", "k_weight"
    return tuple(take(name, weight)[0] for name, weight in zip(names, qk_norm, strict=True))


def _check_blocks(block_q: Any, block_k: Any) -> tuple[int | None, int | None]:
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None:
            check_count(name, block)
    return block_q, block_k
