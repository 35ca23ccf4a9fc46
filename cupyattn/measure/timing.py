"""Time calls on a device: interleaved rounds, cold inputs, medians with their spread.

Clocks drift while a device warms up, so calls that are compared take turns, round after round, and
are compared round by round. Inputs rotate through more memory than the L2 cache holds, so that no
call finds its operands there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Calls are repeated within one sample until it lasts about this long: an event's resolution is
#: about half a microsecond.
SAMPLE_SECONDS = 2e-3
_MAX_REPEATS = 200
#: Bytes that the device writes before each sample: about half a millisecond at 3 TB/s.
LEAD_BYTES, LEAD_FILLS = 2**29, 3


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def to_list(self) -> list[float]:
        """Return all three, JSON-ready."""
        return [self.median, self.low, self.high]


#: Verdicts from an interval of a ratio of speeds.
FASTER, UNDECIDED, SLOWER = "faster", "undecided", "slower"


def judged(speed: Estimate) -> str:
    """Return `FASTER`, `SLOWER`, or `UNDECIDED` where the interval includes 1.

    Examples
    --------
    >>> judged(Estimate(1.2, 1.1, 1.3)), judged(Estimate(1.03, 0.98, 1.09))
    ('faster', 'undecided')
    """
    return FASTER if speed.low > 1 else SLOWER if speed.high < 1 else UNDECIDED


def median(samples: Sequence[float], seed: int = 0) -> Estimate:
    """Return the median of samples with a 95 % bootstrap interval.

    Parameters
    ----------
    samples : sequence of float
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        Without samples.

    Notes
    -----
    Percentile bootstrap, 2,000 resamples (Efron and Tibshirani, An Introduction to the Bootstrap,
    chapter 13).

    Examples
    --------
    >>> median([3.0, 1.0, 2.0]).median
    2.0
    """
    if not len(samples):
        raise ValueError("a median needs at least one sample")
    values = np.asarray(samples, np.float64)
    draws = np.random.default_rng(seed).integers(0, values.size, (2000, values.size))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high))


def paired_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Estimate:
    """Return the median of a / b, round by round, with a 95 % bootstrap interval.

    Parameters
    ----------
    a, b : sequence of float
        Seconds of two calls in the same interleaved rounds.
    seed : int

    Returns
    -------
    Estimate

    Examples
    --------
    >>> paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Estimate(median=2.0, low=2.0, high=2.0)
    """
    if len(a) != len(b):
        raise ValueError(f"paired samples must be equally many, got {len(a)} and {len(b)}")
    return median([x / y for x, y in zip(a, b, strict=True)], seed)


def ratio_of_medians(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Estimate:
    """Return the ratio of the medians of two runs, with a 95 % bootstrap interval.

    Parameters
    ----------
    a, b : sequence of float
        Seconds of two calls that did not take turns: drift between the runs is not in the interval.
    seed : int

    Returns
    -------
    Estimate

    Examples
    --------
    >>> ratio_of_medians([2.0, 2.0, 2.0], [1.0, 1.0])
    Estimate(median=2.0, low=2.0, high=2.0)
    """
    rng = np.random.default_rng(seed)
    both = [np.asarray(x, np.float64) for x in (a, b)]
    over, under = (np.median(x[rng.integers(0, x.size, (2000, x.size))], axis=1) for x in both)
    low, high = np.percentile(over / under, [2.5, 97.5])
    return Estimate(float(np.median(both[0]) / np.median(both[1])), float(low), float(high))


def rotated(arrays: Sequence[Any], cache_bytes: int | None = None) -> list[tuple[Any, ...]]:
    """Return the arrays and copies of them, together more than twice the L2 cache.

    Parameters
    ----------
    arrays : sequence of cupy.ndarray
        Inputs of one call.
    cache_bytes : int, optional
        Size to exceed; that of the current device's L2 when omitted.

    Returns
    -------
    list of tuple
        At least two sets.
    """
    if cache_bytes is None:
        import cupy

        cache_bytes = int(cupy.cuda.Device().attributes["L2CacheSize"])
    size = max(1, sum(array.nbytes for array in arrays))
    copies = max(1, math.ceil(2 * cache_bytes / size) - 1)
    return [tuple(arrays), *(tuple(a.copy() for a in arrays) for _ in range(copies))]


def captured(call: Callable[[int], object], count: int) -> Callable[[int], object]:
    """Return a CUDA graph of several calls, to time them without the host.

    Parameters
    ----------
    call : callable
        As for `time_interleaved`. It must have run before, and it may not allocate memory.
    count : int
        Calls in the graph, of the numbers 0 to ``count - 1``.

    Returns
    -------
    callable
        Launches the graph on the current CuPy stream; its argument is ignored.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            for i in range(count):
                call(i)
        finally:  # a stream that is left capturing would take no other work
            graph = stream.end_capture()
    return lambda _: graph.launch(cupy.cuda.get_current_stream())


def time_interleaved(
    calls: Mapping[str, Callable[[int], object]],
    *,
    rounds: int = 15,
    warmup: int = 2,
    sample_seconds: float = SAMPLE_SECONDS,
    advance: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Time calls on the current CuPy stream, taking turns.

    Parameters
    ----------
    calls : mapping of str to callable
        Each receives a running number, by which it chooses among rotated inputs, and enqueues its
        work on the current stream.
    rounds : int
        Samples of each call; at least 15 for a figure that is kept.
    warmup : int
        First rounds, which are not counted; they also compile.
    sample_seconds : float
        A call is repeated within a sample until it lasts about this long.
    advance : callable, optional
        Called with the name of each sampled call, for a progress bar.

    Returns
    -------
    dict of str to list of float
        Seconds per call, one for each round. The host's share of a call is in it where the host is
        slower than the device.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    scratch = cupy.empty(LEAD_BYTES, np.uint8)

    def sample(call: Callable[[int], object], first: int, repeats: int) -> float:
        # NOTE: while the device fills, the host gets ahead. Without this lead, the first call of a
        # sample would include the host's preparation and an idle device.
        for _ in range(LEAD_FILLS):
            scratch.fill(0)
        begin.record(stream)
        for i in range(first, first + repeats):
            call(i)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3 / repeats

    repeats: dict[str, int] = {}
    for name, call in calls.items():
        for i in range(max(1, warmup)):
            seconds = sample(call, i, 1)
        repeats[name] = max(1, min(_MAX_REPEATS, math.ceil(sample_seconds / max(seconds, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        # NOTE: every other round goes backwards, and every two rounds begin one call later. So each
        # call follows either neighbour equally often. Near its power limit, a device is slower
        # after a call that took more power.
        moved = turn // 2 % len(names)
        order = names[moved:] + names[:moved]
        for name in order if turn % 2 == 0 else order[::-1]:
            first = turn * repeats[name]
            samples[name].append(sample(calls[name], first, repeats[name]))
            if advance is not None:
                advance(name)
    return samples
