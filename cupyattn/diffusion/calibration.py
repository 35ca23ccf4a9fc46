"""Static scales from recorded activations: per head and, where steps differ, per bin of log-SNR."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import on_host, operand, take
from cupyattn.arrays.kinds import Array, array_namespace, check_values
from cupyattn.diffusion import storage
from cupyattn.diffusion.arguments import check_percentile, check_timestep
from cupyattn.diffusion.recordings import HasRecording, Recording, recording_of
from cupyattn.diffusion.schedules import SnrBins, check_sigmas, compute_sigma_schedule
from cupyattn.quant.quantizers import channel_mean, scale_of_absmax

Float32 = npt.NDArray[np.float32]

_KIND, _VERSION = "cupyattn.calibration", 1
#: Arrays of which a percentile may be taken.
OF = ("maxima", "values")
#: Magnitudes are counted by the upper half of their float32: 8 significant bits.
_PATTERNS, _LARGEST_FINITE = 2**15, 0x7F7F


@dataclass(frozen=True, eq=False)
class Calibration:
    """Static scales of Q and K, and their source.

    ``scales_q, scales_k = calibration`` takes the two apart.

    Parameters
    ----------
    q_scale : array, float32, (bins, heads)
        A scale of each head in each bin, positive.
    k_scale : array, float32, (bins, heads_kv)
    bins : SnrBins
        Which timesteps a row is for.
    head_dim : int
    smooth_k : bool
        Whether the keys' scales are of keys less their mean.
    percentile : float
    of : {"maxima", "values"}
        As for `calibrate_quantization_scales`.
    batches : tuple of int
        How many batches each bin has seen.
    source : str
        Name of the calibrated model, in the caller's words.
    source_hash : str
        SHA-256 of the statistics of all batches: equal for equal data in the same order.

    Raises
    ------
    ValueError
        If shapes do not fit together, a scale is not positive and finite, or `percentile` is not
        above 1 and at most 100.
    """

    q_scale: Float32
    k_scale: Float32
    bins: SnrBins
    head_dim: int
    smooth_k: bool
    percentile: float
    of: str
    batches: tuple[int, ...]
    source: str
    source_hash: str

    def __post_init__(self) -> None:
        for name in ("q_scale", "k_scale"):
            scale = operand(name, getattr(self, name))
            object.__setattr__(self, name, scale)
            if scale.ndim != 2 or scale.shape[0] != self.bins.count or scale.dtype != np.float32:
                raise ValueError(
                    f"{name} must be float32 of shape ({self.bins.count} bins, heads), "
                    f"got {scale.dtype} of shape {scale.shape}"
                )
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise ValueError(f"{name} must be positive and finite")
        check_percentile(self.percentile)
        check_values("batches", self.batches)
        if len(self.batches) != self.bins.count:
            raise ValueError(f"{self.bins.count} bins have {len(self.batches)} counts of batches")

    def __iter__(self) -> Iterator[Float32]:
        return iter((self.q_scale, self.k_scale))

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.q_scale.shape[1])

    @property
    def heads_kv(self) -> int:
        """Key heads."""
        return int(self.k_scale.shape[1])

    def uniform(self) -> tuple[Float32, Float32]:
        """Return scales that serve every timestep, the largest of all bins: (1, heads) each."""
        return self.q_scale.max(axis=0)[None], self.k_scale.max(axis=0)[None]

    def check_fits(self, heads: int, head_dim: int) -> None:
        """Raise ValueError unless it was made for so many query heads of that size."""
        if (self.heads, self.head_dim) != (heads, head_dim):
            raise ValueError(
                f"the calibration is of {self.heads} heads of head_dim {self.head_dim}"
                f"{f' ({self.source})' if self.source else ''}, this attention has num_heads="
                f"{heads} and head_dim={head_dim}: calibrate on this model"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, whole or not at all.

        Parameters
        ----------
        path : path
            Replaced if it exists.
        """
        arrays, said = self.to_arrays()
        metadata = {"kind": _KIND, "version": str(_VERSION), **json.loads(said)}
        storage.write(path, arrays, metadata)

    def to_arrays(self) -> tuple[dict[str, np.ndarray], str]:
        """Return its arrays, and the rest as JSON."""
        arrays: dict[str, np.ndarray] = {
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "log_snr_edges": np.asarray(self.bins.edges, np.float64),
            "batches": np.asarray(self.batches, np.int64),
        }
        rest = {
            "head_dim": str(self.head_dim), "smooth_k": str(int(self.smooth_k)),
            "percentile": repr(self.percentile), "of": self.of, "source": self.source,
            "source_hash": self.source_hash, "content": _digest(arrays),
        }  # fmt: skip
        return arrays, json.dumps(rest)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], said: str) -> Calibration:
        """Undo `to_arrays`; raise ValueError or KeyError for anything else."""
        rest = json.loads(said)
        if rest["content"] != _digest(arrays):
            raise ValueError("its arrays have changed since they were written")
        return cls(
            arrays["q_scale"], arrays["k_scale"],
            SnrBins(tuple(map(float, arrays["log_snr_edges"]))), int(rest["head_dim"]),
            bool(int(rest["smooth_k"])), float(rest["percentile"]), rest["of"],
            tuple(map(int, arrays["batches"])), rest["source"], rest["source_hash"],
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, source_hash: str | None = None) -> Calibration:
        """Read a file of `save`.

        Parameters
        ----------
        path : path
        source_hash : str, optional
            Accept only a calibration of this data.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is damaged, something else, of a later version, or of other data; the message has
            its name.
        """
        try:
            arrays, metadata = storage.read(path)
            storage.check_kind(metadata, _KIND, _VERSION)
            if source_hash is not None and metadata["source_hash"] != source_hash:
                raise ValueError(
                    f"it is of the data {metadata['source_hash']:.12}..., not {source_hash:.12}..."
                )
            return cls.of_arrays(arrays, json.dumps(metadata))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)!r} holds no usable calibration: {error}") from error


def calibrate_quantization_scales(
    batches: Iterable[Sequence[Any]] | HasRecording | str | os.PathLike[str],
    percentile: float = 99.0,
    of: str = "maxima",
    *,
    sigmas: npt.ArrayLike | None = None,
    num_bins: int = 1,
    smooth_k: bool = False,
    source: str = "",
) -> Calibration:
    """Find static scales of Q and K, per head and bin of timesteps, from recorded activations.

    Parameters
    ----------
    batches : iterable of (q, k) or (q, k, timestep), Recording, Recorder or path
        Q (batch, heads, len, head_dim) and K (batch, heads_kv, len, head_dim) as `Int8Attention`
        would get them, after any rotary embedding; NumPy, CuPy or DLPack. V has no static scales.
        The layers of a recording have one size, and all get the same scales. For scales of each
        layer call `cupyattn.diffusion.calibrate`.
    percentile : float
        In per cent, above 1 and at most 100: 99.9 for all but a thousandth. The scale's code 127
        stands for this percentile, by nearest rank: the smallest number that so many per cent do
        not exceed. Larger values saturate.
    of : {"maxima", "values"}
        Percentile of the batches' absolute maxima (with fewer than 100 batches 99 is the largest),
        or of all absolute values, rounded up to 8 significant bits.
    sigmas : array_like, optional
        Noise-to-signal ratios of the timesteps. Default: the ratios of a recording, or else
        `compute_sigma_schedule()`.
    num_bins : int
        Bins of one width in log-SNR over `sigmas`; with more than one every batch has a timestep.
    smooth_k : bool
        Scales of keys less the mean that `QuantConfig.smooth_k` subtracts. Attention then has to
        find that mean in a pass over keys; without it the static path reads Q and K once.
    source : str
        Name of the calibrated model, for readers of the file.

    Returns
    -------
    Calibration
        ``scales_q, scales_k = calibrate_quantization_scales(...)`` works, too.

    Raises
    ------
    ValueError
        For a `percentile` of at most 1 or above 100, a bin without a batch, a batch that is not
        finite, or shapes that do not fit together.
    TypeError
        For `batches` that are a model, or nothing to go through, and for a `percentile` that is not
        a number.

    Examples
    --------
    >>> q = np.float16([[[[2.0, -254.0]], [[127.0, 0.0]]]])
    >>> found = calibrate_quantization_scales([(q, q)])
    >>> found.q_scale, found.heads, found.head_dim
    (array([[2., 1.]], dtype=float32), 2, 2)
    """
    batches = recording_of(batches)
    if callable(batches) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be recorded (q, k) or (q, k, timestep), got {type(batches).__name__}: "
            "no model is run here, so run it within cupyattn.interop.torch.record(model), and give "
            "calibrate_quantization_scales what that has recorded"
        )
    if isinstance(batches, Recording):
        batches.check_one_size()
        sigmas, source = _of_recording(batches, sigmas), source or batches.source
    check_percentile(percentile)
    if of not in OF:
        raise ValueError(f"of must be 'maxima' or 'values', got {of!r}")
    schedule = compute_sigma_schedule() if sigmas is None else check_sigmas("sigmas", sigmas)
    if schedule.ndim != 1 or not schedule.size:
        raise ValueError(f"sigmas must be (steps,), a ratio for each step, got {schedule.shape}")
    bins = SnrBins.even(schedule, num_bins)
    seen = [0] * bins.count
    sizes: tuple[int, ...] | None = None
    found: dict[str, list[list[np.ndarray]]] = {n: [[] for _ in seen] for n in "qk"}
    digest = hashlib.sha256(f"{of} {percentile!r} {smooth_k} {bins.edges}".encode())
    for number, batch in enumerate(batches):
        q, k, timestep = _taken(number, batch, schedule.size, bins.count)
        this = (q.shape[1], k.shape[1], q.shape[3])
        sizes = sizes or this
        if sizes != this:
            raise ValueError(
                f"batch {number} has (heads, heads_kv, head_dim) {this}, the first had {sizes}"
            )
        bin_ = 0 if timestep is None else int(bins.index(schedule[timestep]))
        seen[bin_] += 1
        digest.update(f"{bin_} {q.shape} {k.shape}".encode())
        for name, x in (("q", q), ("k", k)):
            magnitudes = _magnitudes(x, smooth_k and name == "k")
            statistic = _maxima(magnitudes) if of == "maxima" else _histogram(magnitudes)
            if not np.isfinite(_maxima(magnitudes)).all():
                raise ValueError(f"{name} of batch {number} holds a NaN or an infinity")
            digest.update(statistic.tobytes())
            mine = found[name][bin_]
            if of == "values" and mine:
                mine[0] += statistic  # counts add up
            else:
                mine.append(statistic)
    if sizes is None:
        raise ValueError("batches is empty: give at least one (q, k)")
    for bin_, count in enumerate(seen):
        if not count:
            raise ValueError(
                f"no batch has a timestep of bin {bin_} of {bins.count} (bins by log-SNR, 0 = most "
                f"noise; batches per bin: {seen}): record those steps, or use fewer bins"
            )
    level = _level_of_maxima if of == "maxima" else _level_of_values
    scales = (
        np.stack([scale_of_absmax(level(one, percentile))[0] for one in found[name]])
        for name in "qk"
    )
    q_scale, k_scale = (s.astype(np.float32) for s in scales)
    return Calibration(
        q_scale, k_scale, bins, sizes[2], bool(smooth_k), float(percentile), of, tuple(seen),
        source, digest.hexdigest(),
    )  # fmt: skip


def _of_recording(recording: Recording, sigmas: Any) -> Any:
    """Return the schedule that a recording's timesteps are of; ValueError for another."""
    if recording.sigmas is None or sigmas is None:
        return recording.sigmas if sigmas is None else sigmas
    given = check_sigmas("sigmas", sigmas)
    if given.shape != recording.sigmas.shape:
        raise ValueError(
            f"the recording is of {recording.sigmas.size} steps, sigmas has {given.size}: leave "
            "sigmas out"
        )
    off = ~np.isclose(given, recording.sigmas, rtol=1e-3, atol=0)
    if off.any():
        step = int(off.argmax())
        raise ValueError(
            f"the recording has noise {recording.sigmas[step]:.4g} at step {step}, sigmas has "
            f"{given[step]:.4g}: leave sigmas out"
        )
    return given


def _taken(
    number: int, batch: Sequence[Any], steps: int, bins: int
) -> tuple[Array, Array, int | None]:
    """Return Q, K and the timestep of a batch, checked."""
    if isinstance(batch, Mapping) or not hasattr(batch, "__len__"):
        raise TypeError(
            f"batch {number} must be (q, k) or (q, k, timestep), got {type(batch).__name__}"
        )
    if len(batch) not in (2, 3):
        raise ValueError(f"batch {number} must be (q, k) or (q, k, timestep), got {len(batch)}")
    q, k = (take(name, x)[0] for name, x in zip("qk", batch[:2], strict=True))
    array_namespace(q, k)
    if not (q.ndim == k.ndim == 4 and q.shape[3] == k.shape[3]):
        raise ValueError(
            f"q and k of batch {number} must be (batch, heads, len, head_dim), "
            f"got q.shape={q.shape} k.shape={k.shape}"
        )
    timestep = batch[2] if len(batch) == 3 else None
    if timestep is None and bins > 1:
        raise ValueError(f"batch {number} needs a timestep, (q, k, timestep), for {bins} bins")
    if timestep is not None:
        timestep = check_timestep(f"the timestep of batch {number}", timestep, steps)
    return q, k, timestep


def _magnitudes(x: Array, smooth: bool) -> Array:
    """Return |x| in float32, after smoothing if requested."""
    xp = array_namespace(x)
    values = x.astype(np.float32)
    if smooth:
        values = values - channel_mean(x)[:, :, None]
    return xp.abs(values)


def _maxima(magnitudes: Array) -> np.ndarray:
    """Return the largest magnitude of each head; 0 where there is none."""
    heads = magnitudes.shape[1]
    if not magnitudes.size:
        return np.zeros(heads, np.float32)
    return on_host(magnitudes.max(axis=(0, 2, 3)))


def _histogram(magnitudes: Array) -> np.ndarray:
    """Count each head's magnitudes, rounded up to 8 significant bits: (heads, patterns)."""
    xp = array_namespace(magnitudes)
    bits = magnitudes.view(np.uint32).astype(np.int64)
    pattern = xp.minimum((bits + 0xFFFF) >> 16, _LARGEST_FINITE)
    heads = magnitudes.shape[1]
    flat = (pattern + xp.arange(heads)[:, None, None] * _PATTERNS).ravel()
    return on_host(xp.bincount(flat, minlength=heads * _PATTERNS)).reshape(heads, _PATTERNS)


def _rank(percentile: float, count: int) -> int:
    """Return the nearest rank of a percentile, from 1: exactly, so 999 of 1,000 for 99.9."""
    return math.ceil(Fraction(repr(float(percentile))) * count / 100)


def _level_of_maxima(maxima: list[np.ndarray], percentile: float) -> Float32:
    levels: Float32 = np.sort(np.stack(maxima), axis=0)[_rank(percentile, len(maxima)) - 1]
    return levels


def _level_of_values(histogram: list[np.ndarray], percentile: float) -> Float32:
    below = histogram[0].cumsum(axis=1)
    wanted = _rank(percentile, int(below[:, -1].max(initial=0)))  # of every head
    pattern = (below < wanted).sum(axis=1).astype(np.uint32)
    level: Float32 = (pattern << np.uint32(16)).view(np.float32)
    return level


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
