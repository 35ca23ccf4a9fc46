"""Energy of calls, by the counter of the device, over windows of seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from cupyattn.measure.nvml import Monitor, NvmlError

#: Seconds between two readings of the counter, which changes every 0.1 s.
LOOK_SECONDS = 0.02
#: Time in seconds after which an unchanged counter is considered absent.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class Window:
    """Energy and time that a device used for one piece of work.

    Parameters
    ----------
    joules : float
        Idle power included.
    seconds : float
        Wall-clock seconds.
    calls : int
        That it did.
    """

    joules: float
    seconds: float
    calls: int

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds

    @property
    def joules_per_call(self) -> float:
        """Energy of one call, idle power included."""
        return self.joules / self.calls


def window(
    work: Callable[[], int],
    monitor: Monitor,
    at_least: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Window:
    """Repeat a piece of work and measure the energy that the device uses.

    Parameters
    ----------
    work : callable
        Does some calls, waits for the device and returns how many they were. It should take about
        LOOK_SECONDS.
    monitor : Monitor
    at_least : float
        Seconds. The window begins and ends where the counter is renewed, and lasts longer than
        this by one renewal at most.
    clock : callable
        Seconds from any point in time.

    Returns
    -------
    Window

    Raises
    ------
    NvmlError
        Where the device has no counter, or one that stands still for PATIENCE_SECONDS.
    """
    _until_renewed(work, monitor, clock)
    joules, start, calls = monitor.energy_joules(), clock(), 0
    while clock() - start < at_least:
        calls += work()
    calls += _until_renewed(work, monitor, clock)
    return Window(monitor.energy_joules() - joules, clock() - start, calls)


def _until_renewed(work: Callable[[], int], monitor: Monitor, clock: Callable[[], float]) -> int:
    """Work until the counter changes; return how many calls it took."""
    before, start, calls = monitor.energy_joules(), clock(), 0
    while monitor.energy_joules() == before:
        if clock() - start > PATIENCE_SECONDS:
            raise NvmlError(
                f"the energy counter stood still at {before} J for {PATIENCE_SECONDS} s: "
                "this device counts no energy"
            )
        calls += work()
    return calls


def idle() -> int:
    """Let the device rest for LOOK_SECONDS: no calls."""
    time.sleep(LOOK_SECONDS)
    return 0


def repeated(call: Callable[[int], object], seconds: float) -> Callable[[], int]:
    """Return work for `window`: calls on the current CuPy stream for about LOOK_SECONDS.

    Parameters
    ----------
    call : callable
        Takes a running number and enqueues its work.
    seconds : float
        That one call takes.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    batch = max(1, round(LOOK_SECONDS / seconds))
    numbers = itertools.count()

    def work() -> int:
        for _ in range(batch):
            call(next(numbers))
        stream.synchronize()
        return batch

    return work
