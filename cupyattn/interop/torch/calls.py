"""Calls on tensors, below torch's dispatcher: arrays of their memory in, tensors of torch's out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn.arrays.memory import data_address
from cupyattn.interop.torch.bridge import (
    as_array,
    as_own_tensor,
    forms_of,
    on_device_of,
    stream_handle,
)
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.kernels import ladder
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.backward import BACKWARD, BackwardSettings, arguments_of_backward, check_offered
from cupyattn.ops.call_operands import arguments_of
from cupyattn.ops.operation import run_new
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS_OF
from cupyattn.problem.settings import Settings, interned
from cupyattn.runtime.ready import Conversion, Ready
from cupyattn.runtime.recent import CALLS

#: Tensors of a call, by the names that plans have for them.
TENSORS = (
    "q", "k", "v", "mask", "bias", "rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight",
    "lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class TensorSettings(NamedTuple):
    """What a call is beside its tensors.

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
    """Run `cupyattn.attention`, or `attention_varlen` where there are offsets.

    Parameters
    ----------
    settings : TensorSettings
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
    key: Any = None
    addresses: dict[str, int] = {}
    if q.is_cuda:
        key, ready, addresses = _find(settings, tensors, out)
        if ready is not None:
            return _again(ready, addresses, settings, tensors, out)
    check_tensors("attention", tensors if out is None else {**tensors, "out": out})
    o = torch.empty_like(q) if out is None else out
    with on_device_of(q):
        call = arguments_of(settings.of_call, {**_arrays(settings, tensors), "out": as_array(o)})
        found, _ = run_new(ATTENTION, call.asked, call.arrays, key, copied=False)
        return o, as_own_tensor(found["lse"]) if "lse" in found else None


def _find(
    settings: TensorSettings, tensors: Mapping[str, Tensor], out: Tensor | None,
    what: str = "torch, attention",
) -> tuple[Any, Any, dict[str, int]]:  # fmt: skip
    """Return the key of a call on a device, what was remembered under it, and where tensors lie.

    The key is None where a call looks at values, or cannot be known by one.
    """
    call, deterministic, mask = settings
    packed = "cu_seqlens_q" in tensors
    if call.check_finite or (packed and None in (call.max_len_q, call.max_len_k)):
        return None, None, {}
    kept = None
    if mask is not None:
        if not isinstance(mask, BlockMask):
            return None, None, {}
        kept = mask.blocks, mask.mask.shape  # what is remembered keeps no array alive
    rung = ladder.VARIANTS.get(call.variant)
    if type(call) is Settings:
        call = interned(*call)
    facts = what, call, call.types, deterministic, kept, rung
    forms, addresses = forms_of(tensors if out is None else {**tensors, "out": out})
    return *CALLS.find(facts, forms), addresses


def _again(
    ready: Ready,
    addresses: dict[str, int],
    settings: TensorSettings,
    tensors: Mapping[str, Tensor],
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Launch a call that has run on tensors of the same forms."""
    q = tensors["q"]
    device = q.device
    if settings.block_mask is not None:
        kept = settings.block_mask.kept_blocks(_array_on(device.index))
        addresses["kept_blocks"] = data_address(kept)
    if out is None:
        o = torch.empty_like(q)
    else:
        o = out
    addresses["o"] = o.data_ptr()
    if out is not None and ready.receiver is not None:
        ready.receiver.check(addresses)
    lse = None
    if settings.of_call.return_lse:
        ((_, shape, *_),) = ready.results
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        addresses["lse"] = lse.data_ptr()
    launch(ready, addresses, device, tensors)
    return o, lse


@functools.cache
def _array_on(device: int) -> Any:
    """Return an array of nothing on a device."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty(0)


def backward_pass(
    settings: TensorSettings,
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
    if d_out.shape[-1] > 1 and d_out.stride(-1) != 1:  # such as sum() hands back
        d_out = d_out.contiguous()
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    call = settings.of_call.without_rung
    settings = TensorSettings(call, deterministic, settings.block_mask)
    received = {**tensors, "d_out": d_out, "o": out, "lse": lse}
    key: Any = None
    addresses: dict[str, int] = {}
    if d_out.is_cuda and "rope_cos" not in tensors:  # turned rows take more than launches
        key, known, addresses = _find(settings, received, None, "torch, gradients")
        if known is not None:
            return _gradients_again(known, addresses, settings, received)
    with on_device_of(tensors["q"]):
        arrays = _arrays(settings, tensors)
        arrays |= {"d_out": as_array(d_out), "out": as_array(out), "lse": as_array(lse)}
        # The faster form where none is asked for.
        asked = BackwardSettings(call, deterministic or None)
        check_offered(arrays["q"], arrays.get("qk_norm"))
        backward, own, _ = arguments_of_backward(asked, arrays)
        made, facts = run_new(BACKWARD, backward, own, key, copied=False)
        dq, dk, dv = map(as_own_tensor, BACKWARD.restore(facts, own, made))
    return dq, dk, dv


def _gradients_again(
    ready: Ready,
    addresses: dict[str, int],
    settings: TensorSettings,
    received: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch a backward pass that has run on tensors of the same forms."""
    device = received["q"].device
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


def launch(
    ready: Ready,
    addresses: Mapping[str, int],
    device: Any,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Launch on torch's current stream of a device, with scratch memory from torch's allocator.

    Parameters
    ----------
    ready, addresses, device
        What is launched, where operands and results lie, and on which device, current or not.
    tensors : mapping of str to Tensor, optional
        The operands, by buffer; read where one is converted.
    """
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(ready, addresses, device, tensors)
        return
    start, nbytes = 0, ready.scratch_bytes
    if nbytes:
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        start = scratch.data_ptr()
        for one in ready.conversions:
            convert(one, (tensors or {})[one.buffer], scratch)
    ready.launch(addresses, start, stream_handle(device.index))


def convert(one: Conversion, source: Tensor, scratch: Tensor) -> None:
    """Convert an operand into scratch memory, on torch's current stream."""
    place = scratch[one.start : one.start + one.nbytes].view(getattr(torch, one.dtype))
    place.view(one.shape).copy_(source.detach().as_strided(one.shape, one.strides))


def _arrays(settings: TensorSettings, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arrays of a call as `cupyattn.problem.settings.parse` names them."""
    arrays: dict[str, Any] = {name: as_array(x) for name, x in tensors.items()}
    for option, names in BUFFERS_OF.items():
        if names[0] in arrays:
            arrays[option] = tuple(arrays.pop(name) for name in names)
    if settings.block_mask is not None:
        arrays["block_mask"] = settings.block_mask
    return arrays
