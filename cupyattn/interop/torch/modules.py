"""Attention as modules, which store settings and take tensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cupyattn.compiler.architectures import check_arch
from cupyattn.diffusion.arguments import needs_head_dim
from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch import int8_layer, transforms
from cupyattn.interop.torch.bridge import as_array
from cupyattn.interop.torch.calls import TensorSettings
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.interop.torch.dispatch import call, in_region
from cupyattn.interop.torch.functional import named, pair
from cupyattn.interop.torch.ops import autograd_state
from cupyattn.interop.torch.schema import number_of
from cupyattn.kernels.tiles import check_kind
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import check_scale, check_softcap, check_window
from cupyattn.problem.settings import ModuleOptions, Unpack, accept, interned, takes_options


class Attention(torch.nn.Module):
    """`cupyattn.interop.torch.attention` with stored settings; it has no parameters.

    Parameters
    ----------
    variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved, \
    rope_offset_q, qk_norm_eps, qk_norm_split, block_mask, layout, return_lse, quant, tiles, \
    deterministic, arch, backend
        As for `attention`. Unlike the function, a module takes a block mask into a compiled graph.

    Examples
    --------
    >>> layer = Attention(causal=True, layout="BSHD", backend="mirror")
    >>> x = torch.ones(1, 5, 2, 16, dtype=torch.float16)
    >>> layer(x, x, x).shape, layer
    (torch.Size([1, 5, 2, 16]), Attention(causal=True, layout='BSHD', backend='mirror'))
    """

    @explains_foreign_arguments
    @takes_options
    def __init__(self, *, deterministic: bool = False, **options: Unpack[ModuleOptions]) -> None:
        super().__init__()
        settings = TensorSettings.of(deterministic=deterministic, **options)
        check_arch(settings.of_call.arch)
        check_kind(settings.of_call.tiles)
        check_scale(settings.of_call.scale, 1)
        check_softcap(settings.of_call.softcap)
        check_window(settings.of_call.window)
        of_call = interned(*settings.of_call)
        if not any(hasattr(value, "shape") for value in of_call):  # such a value is not kept alive
            accept(of_call)  # modules of equal settings share calls from the first one on
        self.settings = settings._replace(of_call=interned(*of_call))
        self._name_block_mask()

    def _name_block_mask(self) -> None:
        block_mask = self.settings.block_mask
        self._block_mask_number = None if block_mask is None else number_of(block_mask)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy, which gets a separate block mask."""
        super().__setstate__(state)
        self._name_block_mask()

    @explains_foreign_arguments
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        qk_norm: tuple[Tensor, Tensor] | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
    ) -> Any:
        """Run attention.

        Parameters
        ----------
        q, k, v, mask, bias, rope, qk_norm, lengths_q, lengths_kv
            As for `attention`.

        Returns
        -------
        o, or (o, lse)
            As `attention`.
        """
        settings = self.settings
        if settings.block_mask is not None and torch.compiler.is_compiling():
            settings = settings._replace(block_mask=self._block_mask_number)
        tensors = named(
            q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, lengths_q=lengths_q,
            lengths_kv=lengths_kv,
        )  # fmt: skip
        return call(settings, tensors)

    def extra_repr(self) -> str:
        """Name the settings that are not the default ones."""
        given, plain = (
            {**of_call._asdict(), "deterministic": deterministic, "block_mask": block_mask}
            for of_call, deterministic, block_mask in (self.settings, TensorSettings())
        )
        return ", ".join(
            f"{name}={x!r:.60}"
            for name, x in given.items()
            if x is not plain[name] and x != plain[name]
        )


class Int8Attention(torch.nn.Module):
    """`cupyattn.Int8Attention` on tensors: INT8 at noisy steps, 16 bits at the other steps.

    Parameters
    ----------
    num_heads, head_dim, num_timesteps, use_adaptive_scaling, timestep_scales
        As for `cupyattn.Int8Attention`.
    out_proj : Module, callable or Tensor (num_heads * head_dim, channels), optional
        Applied to o as (batch, len_q, num_heads * head_dim). A module's parameters are this
        module's, and a tensor is a buffer.
    qk_norm : (Tensor, Tensor), optional
        As for `cupyattn.Int8Attention`; buffers, which move with the module.
    **options
        All other options of `cupyattn.Int8Attention`, by name.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.Int8Attention`.

    Notes
    -----
    Gradients are those of the 16-bit operands, straight-through. With gradients, or in compiled
    calls, pruning and overrides for one call are not supported.

    Examples
    --------
    >>> layer = Int8Attention(2, 16, num_timesteps=50, backend="mirror")
    >>> x = torch.ones(1, 2, 40, 16, dtype=torch.float16)
    >>> layer(x, x, x, timestep=3).shape, layer.mode(3), layer.mode(49)
    (torch.Size([1, 2, 40, 16]), 'aggressive', 'precision')
    """

    @needs_head_dim
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_timesteps: int = 1000,
        use_adaptive_scaling: bool | None = None,
        timestep_scales: Any = None,
        *,
        out_proj: Any = None,
        qk_norm: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {
            "num_heads": num_heads, "head_dim": head_dim, "num_timesteps": num_timesteps, **options,
        }  # fmt: skip
        given = {"use_adaptive_scaling": use_adaptive_scaling, "timestep_scales": timestep_scales}
        self._options |= {name: x for name, x in given.items() if x is not None}
        of_q, of_k = pair("qk_norm", qk_norm)
        self.register_buffer("q_norm_weight", of_q, persistent=False)
        self.register_buffer("k_norm_weight", of_k, persistent=False)
        if isinstance(out_proj, Tensor) and not isinstance(out_proj, torch.nn.Parameter):
            self.register_buffer("out_proj", out_proj)
        else:
            self.out_proj = out_proj
        self._make_layer()

    def _make_layer(self) -> None:
        """Make the layer that computes, from the current options and tensors."""
        norm = None
        if self.q_norm_weight is not None:
            norm = as_array(self.q_norm_weight), as_array(self.k_norm_weight)
        self._layer = int8_layer.Layer(**self._options, qk_norm=norm)
        self._number = int8_layer.number_of(self._layer)

    def _apply(self, *args: Any, **kwargs: Any) -> Int8Attention:
        """Move or convert tensors, as ``to`` does."""
        super()._apply(*args, **kwargs)
        if self.q_norm_weight is not None:
            self._remake_layer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the parts that are made from the rest."""
        return {n: x for n, x in self.__dict__.items() if n not in ("_layer", "_number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and make these parts again."""
        super().__setstate__(state)
        self._remake_layer()

    def _remake_layer(self) -> None:
        """Make the layer again, without repeating the warnings of the constructor."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._make_layer()

    def mode(self, timestep: int | None = None, *, sigma: float | None = None) -> str:
        """Return the mode that the policy chooses at a step."""
        return self._layer.mode(timestep, sigma=sigma)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of calls that fell back to 16 bits, by reason."""
        return self._layer.fallbacks

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        timestep: int | None = None,
        *,
        sigma: float | None = None,
        return_mask: bool | None = None,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        rope_interleaved: bool = False,
        **overrides: Any,
    ) -> Any:
        """Run attention at one step.

        Parameters
        ----------
        q : Tensor, (batch, num_heads, len_q, head_dim)
        k, v : Tensor, (batch, heads_kv, len_kv, head_dim)
        timestep, sigma, return_mask, mask, rope, rope_interleaved, **overrides
            As for a call of `cupyattn.Int8Attention`. Give a timestep as a number, because reading
            a tensor would synchronise.

        Returns
        -------
        o : Tensor
            Shape of q, or of the result of `out_proj`.
        kept : Tensor, bool, (batch, num_heads, len_kv)
            With `return_mask`, or ``enable_pruning=True`` in the call and no `return_mask`.

        Raises
        ------
        RuntimeError, NotImplementedError, UnsupportedError, ValueError, TypeError
            As `attention` and `cupyattn.Int8Attention`.
        """
        timestep = _number(timestep)
        tensors = in_region(named(q, k, v, mask=mask, rope=rope))
        differentiable, watched = autograd_state(tensors.values())
        if not (differentiable or watched):
            found = int8_layer.attend(
                self._layer, "qkv", tensors, rope_interleaved, timestep=timestep, sigma=sigma,
                return_mask=return_mask, **overrides,
            )  # fmt: skip
            if isinstance(found, tuple):
                return self._project(found[0]), found[1]
            return self._project(found)
        if return_mask or overrides:
            asked = ", ".join([*["return_mask"] * bool(return_mask), *overrides])
            raise UnsupportedError(
                f"{asked}: not supported where torch traces or differentiates a call; make a "
                "module of those settings, or compute under torch.no_grad() and outside of "
                "torch.compile"
            )
        check_tensors("Int8Attention", tensors)
        self._layer.check_operator(tensors, differentiable=differentiable)
        operands = [tensors.get(name) for name in int8_layer.TENSORS]
        return_lse = differentiable or transforms.active()  # which may differentiate unseen
        o, _ = int8_layer.int8_attention(
            *operands, timestep, sigma, rope_interleaved, return_lse, self._number
        )
        return self._project(o)

    def fused_cfg(
        self,
        q_cond: Tensor,
        q_uncond: Tensor,
        k: Tensor,
        v: Tensor,
        timestep: int | None = None,
        guidance_scale: float = 7.5,
        *,
        sigma: float | None = None,
        return_mask: bool | None = None,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        rope_interleaved: bool = False,
        **overrides: Any,
    ) -> Any:
        """Run both branches of guided sampling in one launch.

        Parameters
        ----------
        q_cond, q_uncond, k, v, timestep, guidance_scale, sigma, return_mask, mask, rope, \
        rope_interleaved, **overrides
            As for `cupyattn.Int8Attention.fused_cfg`.

        Returns
        -------
        o_cond, o_uncond : Tensor
        kept : Tensor
            With `return_mask`, or ``enable_pruning=True`` in the call and no `return_mask`.

        Raises
        ------
        UnsupportedError
            If torch traces or differentiates the call.
        RuntimeError, NotImplementedError, ValueError, TypeError
            As for a call of the module.
        """
        tensors = in_region(named(q_cond, k, v, mask=mask, rope=rope))
        if not isinstance(q_uncond, Tensor):
            raise TypeError(
                f"fused_cfg(): argument 'q_uncond' must be Tensor, not {type(q_uncond).__name__}"
            )
        tensors["q_uncond"] = in_region(named(q_uncond, tensors["k"], tensors["v"]))["q"]
        if any(autograd_state(tensors.values())):
            raise UnsupportedError(
                "fused_cfg is not supported where torch traces or differentiates it: call the "
                "module on both branches, concatenated along the batch"
            )
        cond, uncond, *kept = int8_layer.attend(
            self._layer.fused_cfg, ("q", "q_uncond", "k", "v"), tensors, rope_interleaved,
            timestep=_number(timestep), guidance_scale=guidance_scale, sigma=sigma,
            return_mask=return_mask, **overrides,
        )  # fmt: skip
        return (self._project(cond), self._project(uncond), *kept)

    def _project(self, o: Tensor) -> Tensor:
        if self.out_proj is None:
            return o
        rows = o.transpose(1, 2).flatten(2)
        if isinstance(self.out_proj, Tensor):
            return rows @ self.out_proj.to(rows.dtype)
        return self.out_proj(rows)

    def extra_repr(self) -> str:
        """Name the options."""
        return ", ".join(f"{name}={x!r:.60}" for name, x in self._options.items())


def _number(timestep: Any) -> Any:
    """Return a timestep as a number, read from a tensor if that is on the host."""
    if not isinstance(timestep, Tensor):
        return timestep
    if not timestep.is_cpu:
        raise TypeError(
            f"timestep must be an int, or a tensor on the CPU, got one on {timestep.device}: to "
            "read it would wait for the device"
        )
    if timestep.numel() != 1:
        raise ValueError(
            f"timestep must be one step for the whole batch, got shape {tuple(timestep.shape)}: "
            "give timestep[0] if all are equal, or call the module for each"
        )
    return timestep.item()
