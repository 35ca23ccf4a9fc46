"""Calls on tensors, below torch's dispatcher: arrays of their memory in, tensors of torch's out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn.arrays.memory import data_address
from cupyattn.compiler import modules as compiler
from cupyattn.interop.torch.bridge import as_array, as_own_tensor, on_device_of
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.kernels import ladder
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops import backward
from cupyattn.ops.attention import ATTENTION, resolved
from cupyattn.ops.operation import make_ready, run_on_host, run_ready
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.config import QuantConfig
from cupyattn.runtime.ready import Ready
from cupyattn.runtime.recent import recall, remember

#: Tensors of a call, by the names that plans have for them.
TENSORS = (
    "q", "k", "v", "mask", "bias", "rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class Settings(NamedTuple):
    """What a call is beside its tensors: arguments of `cupyattn.attention`, which has them all."""

    scale: float | None = None
    rope_offset_q: int = 0
    return_lse: bool = False
    max_len_q: int | None = None
    max_len_k: int | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    variant: str = "auto"
    accuracy: str = "full"
    causal: bool = False
    causal_align: str = "bottom-right"
    rope_interleaved: bool = False
    qk_norm_eps: float = EPS
    layout: str = "BHSD"
    deterministic: bool = False
    check_finite: bool = False
    quant: QuantConfig | None = None
    tiles: Tiles | None = None
    block_mask: Any = None
    arch: str | None = None
    backend: str | None = None


#: Settings of the forward pass alone.
_FORWARD = (
    "variant", "accuracy", "return_lse", "quant", "tiles", "qk_norm_eps", "check_finite",
)  # fmt: skip


def forward(
    settings: Settings, tensors: Mapping[str, Tensor], out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run `cupyattn.attention`, or `attention_varlen` where there are offsets.

    Parameters
    ----------
    settings : Settings
    tensors : mapping of str to Tensor
        Those of `TENSORS` that there are.
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
        As `cupyattn.interop.torch.checks.check_tensors`.
    """
    q = tensors["q"]
    key, ready = _find(settings, tensors, out) if q.is_cuda else (None, None)
    if ready is not None:
        return _again(ready, settings, tensors, out)
    check_tensors("attention", tensors if out is None else {**tensors, "out": out})
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    with on_device_of(q):
        options = _options({n: as_array(x) for n, x in tensors.items()}, settings)
        options |= {n: getattr(settings, n) for n in _FORWARD}
        request = resolved(**options, out=as_array(o))
        if request.backend == "cuda":
            ready = make_ready(request, ATTENTION.plan(request))
            made = run_ready(ready, request)
            own = {n: data_address(a) for n, a in request.operands.items()}
            copied = any(own[n] != x.data_ptr() for n, x in tensors.items())
            if key is not None and ready.is_complete and not copied:
                remember(key, ready)
        else:
            made = run_on_host(ATTENTION, request)
        return o, as_own_tensor(made["lse"]) if settings.return_lse else None


def _find(
    settings: Settings, tensors: Mapping[str, Tensor], out: Tensor | None, what: str = "attention"
) -> tuple[Any, Any]:
    """Return what a call on a device depends on beside values, and one of late of which it is so.

    The key is None where a call looks at values, or cannot be known by one.
    """
    packed = "cu_seqlens_q" in tensors
    if settings.check_finite or (packed and None in (settings.max_len_q, settings.max_len_k)):
        return None, None
    key: list[Any] = [
        f"torch, {what}",
        ladder.VARIANTS.get(settings.variant),
        compiler.generation(),
    ]
    mask, places = settings.block_mask, tensors if out is None else {**tensors, "out": out}
    try:
        if mask is not None:  # known by its form: what is remembered keeps no array alive
            settings = settings._replace(block_mask=None)
            key += (mask.blocks, mask.mask.shape)
        for name, x in places.items():
            key += (name, x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.get_device())
        found = (settings, *key)
        return found, recall(found)
    except (TypeError, AttributeError):  # a list for a window, what is no tensor
        return None, None


def _again(
    ready: Ready, settings: Settings, tensors: Mapping[str, Tensor], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Launch a call that has run on tensors of the same forms."""
    q = tensors["q"]
    device = q.device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _again(ready, settings, tensors, out)
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    if settings.block_mask is not None:
        kept = settings.block_mask.kept_blocks(_array_on(device.index))
        addresses["kept_blocks"] = data_address(kept)
    if out is None:
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        o = out
    addresses["o"] = o.data_ptr()
    if out is not None and ready.receiver is not None:
        ready.receiver.check(addresses)
    lse = None
    if settings.return_lse:
        ((_, shape, *_),) = ready.results
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        addresses["lse"] = lse.data_ptr()
    launch(ready, addresses, device)
    return o, lse


@functools.cache
def _array_on(device: int) -> Any:
    """Return an array of nothing on a device."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty(0)


def backward_pass(
    settings: Settings,
    tensors: Mapping[str, Tensor],
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
    packed = "cu_seqlens_q" in tensors
    if d_out.shape[-1] > 1 and d_out.stride(-1) != 1:  # such as sum() hands back
        d_out = d_out.contiguous()
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    settings = settings._replace(deterministic=deterministic, check_finite=False)
    received = {**tensors, "d_out": d_out, "o": out, "lse": lse}
    again = d_out.is_cuda and "rope_cos" not in tensors  # turned rows take more than launches
    key, ready = _find(settings, received, None, "gradients") if again else (None, None)
    if ready is not None:
        return _gradients_again(ready, settings, received)
    with on_device_of(tensors["q"]):
        options = _options({n: as_array(x) for n, x in tensors.items()}, settings)
        options |= {"d_out": as_array(d_out), "out": as_array(out), "lse": as_array(lse)}
        function: Any = (
            backward.attention_varlen_backward if packed else backward.attention_backward
        )
        if packed:
            del options["layout"]
        else:
            for name in ("max_len_q", "max_len_k"):
                del options[name]
        options["deterministic"] = deterministic or None  # the faster form where nobody asks
        dq, dk, dv = map(as_own_tensor, function(**options))
        if key is not None:
            ready = backward.ready_backward(**options)
            if ready is not None:
                remember(key, ready)
    return dq, dk, dv


def _gradients_again(
    ready: Ready, settings: Settings, received: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch a backward pass that has run on tensors of the same forms."""
    device = received["q"].device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _gradients_again(ready, settings, received)
    addresses = {name: x.data_ptr() for name, x in received.items()}
    if settings.block_mask is not None:
        like = _array_on(device.index)
        for name, mask in (
            ("kept_blocks", settings.block_mask),
            ("kept_rows", settings.block_mask.transposed),
        ):
            addresses[name] = data_address(mask.kept_blocks(like))
    results = [torch.empty_like(received[n], memory_format=torch.contiguous_format) for n in "qkv"]
    addresses |= {f"d{n}": x.data_ptr() for n, x in zip("qkv", results, strict=True)}
    launch(ready, addresses, device)
    dq, dk, dv = results
    return dq, dk, dv


def launch(ready: Ready, addresses: Mapping[str, int], device: Any) -> None:
    """Launch on torch's current stream, with scratch memory from torch's allocator."""
    start, nbytes = 0, ready.scratch_bytes
    if nbytes:
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        start = scratch.data_ptr()
    ready.launch(addresses, start, torch.cuda.current_stream(device).cuda_stream)


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
