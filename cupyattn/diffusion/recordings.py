"""Recorded inputs of a running model's layers: Q, K and V of attention, inputs of linear layers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.checkpoints.activations import OF_ATTENTION, RECORDING, mapped
from cupyattn.checkpoints.header import read_header
from cupyattn.diffusion import storage
from cupyattn.diffusion.schedules import Float64
from cupyattn.measure.words import counted, format_bytes, printable

_VERSION = 1
_SIGMAS = f"{OF_ATTENTION}sigmas"


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """Operands of one call of attention, on the host.

    Parameters
    ----------
    layer : str
    timestep : int or None
        Index into the schedule, 0 = most noise; None where no schedule is known.
    q : array, (batch, heads, len_q, head_dim)
    k, v : array, (batch, heads_kv, len_kv, head_dim)
    """

    layer: str
    timestep: int | None
    q: Array
    k: Array
    v: Array


@dataclass(frozen=True, eq=False)
class Recording:
    """Activations of a model, as `cupyattn.interop.torch.record` keeps them.

    Iterating yields (q, k, timestep), or (q, k) without a schedule, of every call: the batches that
    `calibrate_quantization_scales` takes.

    Parameters
    ----------
    calls : sequence of RecordedCall
    inputs : mapping of str to array, (rows, in)
        Rows that linear layers got, by their names.
    sigmas : array, float64, (steps,), or None
        Noise-to-signal ratios of the schedule, falling.
    source : str
        Name of the recording.
    """

    calls: Sequence[RecordedCall] = ()
    inputs: Mapping[str, Array] = field(default_factory=dict)
    sigmas: Float64 | None = None
    source: str = ""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for call in self.calls:
            step = () if call.timestep is None else (call.timestep,)
            yield (call.q, call.k, *step)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of attention, in the order of their first calls."""
        return tuple(dict.fromkeys(call.layer for call in self.calls))

    def of(self, layer: str) -> Recording:
        """Return the calls of one layer.

        Raises
        ------
        ValueError
            If there are none.
        """
        calls = [call for call in self.calls if call.layer == layer]
        if not calls:
            raise ValueError(
                f"the recording has no attention of {layer!r:.80}, it has {self._some_layers()}"
            )
        return Recording(calls, {}, self.sigmas, self.source)

    def check_one_size(self) -> None:
        """Raise ValueError unless all its layers have the same heads."""
        sizes = {(c.q.shape[1], c.k.shape[1], c.q.shape[3]): c.layer for c in self.calls}
        if not sizes:
            raise ValueError(
                "the recording has no calls of attention: record layers that call "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        if len(sizes) > 1:
            first, second = [*sizes.values()][:2]
            raise ValueError(
                f"the recording has layers of different heads, such as {first} and {second}: give "
                f"recording.of({first!r}), or all of it to cupyattn.diffusion.calibrate, which "
                "gives every layer separate scales"
            )

    def _some_layers(self) -> str:
        names = [printable(name) for name in self.layers[:3]]
        return (", ".join(names) or "none") + (", ..." if len(self.layers) > 3 else "")

    def __repr__(self) -> str:
        arrays = [x for c in self.calls for x in (c.q, c.k, c.v)] + [*self.inputs.values()]
        return (
            f"Recording of {counted(len(self), 'call')} of {counted(len(self.layers), 'layer')} "
            f"of attention, rows of {counted(len(self.inputs), 'linear layer')}, "
            f"{format_bytes(sum(x.nbytes for x in arrays))}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, whole or not at all; an existing one is replaced."""
        for name in self.inputs:
            if name.startswith(OF_ATTENTION):
                raise ValueError(f"{name!r:.80} is no name of a layer in a file: rename the layer")
        arrays = {name: np.ascontiguousarray(x) for name, x in self.inputs.items()}
        for number, call in enumerate(self.calls):
            for name in "qkv":
                x = np.ascontiguousarray(getattr(call, name))
                arrays[f"{OF_ATTENTION}{number}:{name}"] = x
        if self.sigmas is not None:
            arrays[_SIGMAS] = np.asarray(self.sigmas, np.float64)
        calls = json.dumps([[call.layer, call.timestep] for call in self.calls])
        metadata = {
            "kind": RECORDING, "version": str(_VERSION), "calls": calls, "source": self.source,
        }  # fmt: skip
        storage.write(path, arrays, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Open a file of `save`; arrays are read when they are used.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is damaged, something else, or of a later version; the message has its name.
        """
        header = read_header(path)
        try:
            storage.check_kind(header.metadata, RECORDING, _VERSION)
            calls = tuple(
                RecordedCall(
                    layer, timestep,
                    *(mapped(path, header, f"{OF_ATTENTION}{number}:{x}") for x in "qkv"),
                )
                for number, (layer, timestep) in enumerate(json.loads(header.metadata["calls"]))
            )  # fmt: skip
            inputs = {
                name: mapped(path, header, name)
                for name in header.tensors if not name.startswith(OF_ATTENTION)
            }  # fmt: skip
            sigmas = mapped(path, header, _SIGMAS) if _SIGMAS in header.tensors else None
            for number, call in enumerate(calls):
                _check_call(number, call)
            return cls(calls, inputs, sigmas, header.metadata["source"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)!r} holds no usable recording: {error}") from error


def _check_call(number: int, call: RecordedCall) -> None:
    """Raise ValueError for a call that no recorder writes."""
    shapes = [x.shape for x in (call.q, call.k, call.v)]
    if not isinstance(call.layer, str) or not isinstance(call.timestep, int | None):
        raise ValueError(f"call {number} is of {call.layer!r:.40} at step {call.timestep!r:.40}")
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"q, k and v of call {number} must have four axes, got {shapes}")


class HasRecording(Protocol):
    """A recorder, such as that of `cupyattn.interop.torch.record`."""

    @property
    def recording(self) -> Recording:
        """Everything recorded so far."""


def recording_of(given: Any) -> Any:
    """Return the recording of a recorder or of a file; anything else unchanged."""
    if isinstance(given, (str, os.PathLike)):
        return Recording.load(given)
    return getattr(given, "recording", given)
