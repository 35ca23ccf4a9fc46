"""Energy of several calls in turns: a window of each, one after the other, so heat is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, energy, nvml

#: A window is no shorter: the counter is renewed every 0.1 s.
LEAST_SECONDS = 2.0


def check_seconds(seconds: float) -> None:
    """Raise ValueError for a window that is too short for the counter."""
    if not seconds >= LEAST_SECONDS:
        raise ValueError(f"--seconds must be at least {LEAST_SECONDS}, got {seconds}")


def summed(windows: list[energy.Window], operations: int) -> dict[str, Any]:
    """Return what windows of one call say together: of a call joules, seconds, GFLOP/s per watt."""
    joules, seconds = sum(x.joules for x in windows), sum(x.seconds for x in windows)
    whole = energy.Window(joules, seconds, sum(x.calls for x in windows))
    return {
        "joules": whole.joules, "seconds_counted": whole.seconds, "calls": whole.calls,
        "watts": whole.watts, "joules_per_call": whole.joules_per_call,
        "seconds_per_call": whole.seconds / whole.calls,
        "joules_of_turns": [x.joules_per_call for x in windows],
        "gflops_per_watt": operations / whole.joules_per_call / 1e9,
        "sustained_tflops": operations * whole.calls / whole.seconds / 1e12,
    }  # fmt: skip


def in_turns(
    works: Mapping[str, Callable[[], int]],
    monitor: Any,
    seconds: float,
    turns: int,
    operations: int,
    *,
    window: Callable[..., energy.Window] = energy.window,
    clocks: Callable[[], Mapping[str, Any]] = device.clocks,
) -> dict[str, dict[str, Any]]:
    """Count the energy of calls in turns, each for a window at a time.

    Every other turn goes backwards, so no call always follows the same other call.

    Parameters
    ----------
    works : mapping of str to callable
        By name, as for `energy.window`.
    monitor : nvml.Monitor
    seconds : float
        Of each window, at least.
    turns : int
        Windows of each.
    operations : int
        Of a call.
    window, clocks : callable
        What measures a window, and what reads the clocks after it.

    Returns
    -------
    dict
        By name what `summed` returns, and the clocks after each window.
    """
    found: dict[str, list[energy.Window]] = {name: [] for name in works}
    read: dict[str, list[Any]] = {name: [] for name in works}
    for turn in range(turns):
        for name in [*works][:: -1 if turn % 2 else 1]:
            found[name].append(window(works[name], monitor, seconds))
            read[name].append(dict(clocks()))
    return {
        name: {
            **summed(windows, operations), "clocks": read[name][-1], "clocks_of_turns": read[name]
        }
        for name, windows in found.items()
    }  # fmt: skip


def on_device(
    calls: Mapping[str, Callable[[int], object]],
    typical: Mapping[str, float],
    seconds: float,
    turns: int,
    operations: int,
) -> dict[str, dict[str, Any]]:
    """Return `in_turns` of calls that take a running number, on CuPy's current device.

    `typical` has the seconds of a call, by name.
    """
    import cupy

    with nvml.monitor(cupy.cuda.Device().pci_bus_id) as monitor:
        if monitor is None:
            raise UnsupportedError("NVML is missing: the energy of this device cannot be counted")
        works = {name: energy.repeated(call, typical[name]) for name, call in calls.items()}
        return in_turns(works, monitor, seconds, turns, operations)
