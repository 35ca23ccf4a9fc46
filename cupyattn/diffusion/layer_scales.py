"""Static scales of every layer of a model, from a recording of it."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from cupyattn.diffusion import storage
from cupyattn.diffusion.calibration import Calibration, calibrate_quantization_scales
from cupyattn.diffusion.recordings import HasRecording, Recording, recording_of
from cupyattn.errors import shown

_KIND, _VERSION = "cupyattn.calibrations", 1


class Calibrations(dict[str, Calibration]):
    """A `Calibration` for each layer of a model, by the layer's name.

    `cupyattn.interop.diffusers.replace_attention_with_int8` takes it as ``quant=``.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of them to one safetensors file, whole or not at all."""
        arrays: dict[str, np.ndarray] = {}
        said: dict[str, str] = {}
        for name, one in self.items():
            of_one, said[name] = one.to_arrays()
            arrays |= {f"{name}:{part}": x for part, x in of_one.items()}
        metadata = {"kind": _KIND, "version": str(_VERSION), "layers": json.dumps(said)}
        storage.write(path, arrays, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibrations:
        """Read a file of `save`.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is damaged, something else, or of a later version; the message has its name.
        """
        try:
            arrays, metadata = storage.read(path)
            storage.check_kind(metadata, _KIND, _VERSION)
            found = cls()
            for name, said in json.loads(metadata["layers"]).items():
                own = {
                    part.removeprefix(f"{name}:"): x
                    for part, x in arrays.items() if part.rpartition(":")[0] == name
                }  # fmt: skip
                found[name] = Calibration.of_arrays(own, said)
            return found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"{os.fspath(path)!r} holds no usable calibrations: {error}"
            raise ValueError(message) from error


def calibrate(
    recording: Recording | HasRecording | str | os.PathLike[str],
    percentile: float = 99.0,
    **options: Any,
) -> Calibrations:
    """Find static scales of Q and K for each layer of a recorded model.

    Parameters
    ----------
    recording : Recording, Recorder or path
        Result of `cupyattn.interop.torch.record`, or its file.
    percentile, **options
        As for `calibrate_quantization_scales`: of, num_bins and smooth_k. The recorded schedule
        gives the bins.

    Returns
    -------
    Calibrations

    Raises
    ------
    ValueError
        As `calibrate_quantization_scales`; also for a recording without attention.
    TypeError
        If `recording` is not a recording.

    Examples
    --------
    >>> from cupyattn.diffusion.recordings import RecordedCall
    >>> q = np.float16([[[[127.0, -254.0]]]])
    >>> found = calibrate(Recording([RecordedCall("blocks.0.attn", None, q, q, q)]))
    >>> found["blocks.0.attn"].q_scale
    array([[2.]], dtype=float32)
    """
    recording = recording_of(recording)
    if not isinstance(recording, Recording):
        raise TypeError(
            f"recording must be one of cupyattn.interop.torch.record, or its file, got "
            f"{shown(recording)}"
        )
    if not recording.calls:
        recording.check_one_size()
    found = Calibrations()
    for name in recording.layers:
        one = recording.of(name)
        source = options.get("source") or one.source
        found[name] = calibrate_quantization_scales(
            one, percentile, **{**options, "source": f"{source} {name}".strip()}
        )
    return found
