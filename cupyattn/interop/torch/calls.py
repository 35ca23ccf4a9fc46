"""Calls on tensors, below torch's dispatcher: arrays of their memory in, tensors of torch's out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn import backward
from cupyattn.block_mask import BlockMask
from cupyattn.interop.torch.bridge import as_array, as_tensor, on_device_of
from cupyattn.interop.torch.checks import check_device, check_tensors
from cupyattn.preparation import EPS
from cupyattn.prepared import Prepared, operands_of, run_mirror
from cupyattn.quant import QuantConfig
from cupyattn.request import Options, resolve
from cupyattn.tiles import Tiles

#: Tensors of a call, by the names that plans have for them.
TENSORS = (
    "q", "k", "v", "mask", "bias", "rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class Settings(NamedTuple):
    """What a call is beside its tensors: arguments of `cupyattn.attention`, which has them all."""

    variant: str = "auto"
    accuracy: str = "full"
    scale: float | None = None
    causal: bool = False
    causal_align: str = "bottom-right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    rope_interleaved: bool = False
    rope_offset_q: int = 0
    qk_norm_eps: float = EPS
    layout: str = "BHSD"
    return_lse: bool = False
    deterministic: bool = False
    check_finite: bool = False
    max_len_q: int | None = None
    max_len_k: int | None = None
    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    block_mask: BlockMask | None = None
    arch: str | None = None
    backend: str | None = None


#: Settings of the forward pass alone.
_FORWARD = (
    "variant", "accuracy", "return_lse", "quant", "tiles", "qk_norm_eps", "check_finite",
)  # fmt: skip


def forward(
    settings: Settings, tensors: Mapping[str, Tensor | None], out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run `cupyattn.attention`, or `attention_varlen` where there are offsets.

    Parameters
    ----------
    settings : Settings
    tensors : mapping of str to Tensor or None
        Of `TENSORS`.
    out : Tensor, optional
        Receives O.

    Returns
    -------
    o : Tensor
    lse : Tensor or None
        None unless the settings ask for it.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention`.
    RuntimeError, NotImplementedError
        As `check_tensors` and `check_device`.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    check_tensors("attention", given if out is None else {**given, "out": out})
    q = given["q"]
    check_device("cupyattn::attention", q)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    with on_device_of(q):
        options = _options({n: as_array(x) for n, x in given.items()}, settings)
        own = {n: options.pop(n) for n in "qkv"}
        asked = {n: getattr(settings, n) for n in _FORWARD}
        request = resolve(**own, options=Options(**options, **asked, out=as_array(o)))
        if request.backend == "mirror":
            _, lse = run_mirror(request)
        else:
            ready = Prepared(request, keep=False)
            _, lse = ready.run(operands_of(request), request.receiver)
        return o, None if not settings.return_lse else as_tensor(request.restore_lse(lse))


def backward_pass(
    settings: Settings,
    tensors: Mapping[str, Tensor | None],
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `cupyattn.attention_backward`, or that of packed sequences.

    Parameters
    ----------
    settings, tensors
        As for `forward`.
    d_out, out, lse : Tensor
        As for `cupyattn.attention_backward`; `d_out` of any strides.

    Returns
    -------
    dq, dk, dv : Tensor
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    packed = "cu_seqlens_q" in given
    if d_out.shape[-1] > 1 and d_out.stride(-1) != 1:  # such as sum() hands back
        d_out = d_out.contiguous()
    with on_device_of(given["q"]):
        options = _options({n: as_array(x) for n, x in given.items()}, settings)
        function: Any = (
            backward.attention_varlen_backward if packed else backward.attention_backward
        )
        if packed:
            del options["layout"]
        else:
            for name in ("max_len_q", "max_len_k"):
                del options[name]
        found = function(
            as_array(d_out), out=as_array(out), lse=as_array(lse), **options,
            deterministic=settings.deterministic,
        )  # fmt: skip
        dq, dk, dv = map(as_tensor, found)
    return dq, dk, dv


def _options(arrays: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return operands and those options that the forward and the backward pass have alike."""
    options = dict(arrays)
    for name, pair in (
        ("rope", ("rope_cos", "rope_sin")),
        ("qk_norm", ("q_norm_weight", "k_norm_weight")),
    ):
        found = [options.pop(n, None) for n in pair]
        options[name] = None if found[0] is None else tuple(found)
    shared = {n: x for n, x in settings._asdict().items() if n not in (*_FORWARD, "deterministic")}
    return {**options, **shared}
