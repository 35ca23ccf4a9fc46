"""Run calls on tensors below torch's dispatcher, and return torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn.interop.torch.bridge import Tensors
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.backward import BackwardSettings, run_backward
from cupyattn.ops.call_operands import arguments_of
from cupyattn.ops.operation import run
from cupyattn.problem.settings import Settings

#: Tensors of a call, by their names in plans.
TENSORS = (
    "q", "k", "v", "mask", "bias", "rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight",
    "lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class TensorSettings(NamedTuple):
    """The settings of a call, without its tensors.

    Parameters
    ----------
    of_call : Settings
    deterministic : bool
        Whether gradients have the same bits on every run.
    block_mask : BlockMask or None
        Among the settings, since a schema has a number in its place.
    """

    of_call: Settings = Settings()
    deterministic: bool = False
    block_mask: Any = None

    @classmethod
    def of(cls, **options: Any) -> TensorSettings:
        """Return settings by the keywords of `cupyattn.interop.torch.attention_varlen`."""
        own = {name: options.pop(name) for name in cls._fields[1:] if name in options}
        return cls(Settings(**options), **own)


def forward(
    settings: TensorSettings, tensors: Mapping[str, Tensor], out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run `cupyattn.attention`, or `attention_varlen` if there are offsets.

    Parameters
    ----------
    settings : TensorSettings
    tensors : mapping of str to Tensor
        The given tensors, by names in `TENSORS`.
    out : Tensor, optional
        Receives O.

    Returns
    -------
    o : Tensor
    lse : Tensor or None
        None unless the settings have `return_lse`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention`.
    RuntimeError, NotImplementedError
        As `cupyattn.interop.torch.checks.check_tensors`.
    """
    call, q = settings.of_call, tensors["q"]
    if out is None and q.layout is torch.strided and not q.is_contiguous():
        out = torch.empty_like(q)  # in the layout of q, so what follows in a model needs no copy
    given: Mapping[str, Any] = tensors
    if settings.block_mask is not None:
        given = {**given, "block_mask": settings.block_mask}
    if out is not None:
        given = {**given, "out": out}
    asked, arrays, facts = arguments_of(call, given, _OF_ATTENTION)
    found = run(ATTENTION, asked, arrays, facts, library=_OF_ATTENTION)
    return found if call.return_lse else (found, None)


def _check(tensors: Mapping[str, Any]) -> None:
    """Raise, with torch's messages, for tensors that cannot be used in one call."""
    own = {n: x for n, x in tensors.items() if n in TENSORS}
    check_tensors("attention", {**own, "out": tensors["o"]} if "o" in tensors else own)


_OF_ATTENTION, _OF_GRADIENTS = Tensors(_check), Tensors()


def backward_pass(
    settings: TensorSettings,
    tensors: Mapping[str, Tensor],
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None = None,
    grad_bias: bool = False,
) -> dict[str, Tensor]:
    """Run `cupyattn.attention_backward`, or `attention_varlen_backward`.

    Parameters
    ----------
    settings, tensors
        As for `forward`.
    d_out, out, lse : Tensor
        As for `cupyattn.attention_backward`; `d_out` of any strides.
    d_lse : Tensor, optional
    grad_bias : bool
        As for `cupyattn.attention_backward`.

    Returns
    -------
    dict of str to Tensor
        By operand: q, k and v, with `grad_bias` bias, and the weights of `qk_norm`.
    """
    if d_out.shape[-1] > 1 and d_out.stride(-1) != 1:  # such as sum() hands back
        d_out = d_out.contiguous()
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    given = {**tensors, "d_out": d_out, "out": out, "lse": lse}
    if d_lse is not None:
        given["d_lse"] = d_lse
    if settings.block_mask is not None:
        given["block_mask"] = settings.block_mask
    # The faster form is the default.
    asked = BackwardSettings(
        settings.of_call.without_rung, deterministic or None, grad_bias=grad_bias
    )
    found = run_backward(asked, given, _OF_GRADIENTS)
    return {GRADIENT_OF[name]: x for name, x in found._asdict().items()}


#: Operands by the names of their gradients.
GRADIENT_OF = {
    "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dq_weight": "q_norm_weight",
    "dk_weight": "k_norm_weight",
}  # fmt: skip
