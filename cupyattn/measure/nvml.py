"""NVIDIA's management library: clocks, power, temperature and energy of a device, by ctypes.

The driver brings the library, so that no Python package is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
#: ``nvmlClockType_t``.
CLOCK_SM, CLOCK_MEMORY = 1, 2
_GPU_TEMPERATURE = 0


class NvmlError(Exception):
    """A question that the library does not answer on this device."""


@dataclass(frozen=True)
class Monitor:
    """One device, as the library knows it; `monitor` opens it.

    Parameters
    ----------
    library : ctypes.CDLL
    handle : ctypes.c_void_p
    """

    library: Any
    handle: ctypes.c_void_p

    def clock_mhz(self, kind: int) -> float:
        """Return the present clock, of `CLOCK_SM` or `CLOCK_MEMORY`, in MHz."""
        return float(self._ask("nvmlDeviceGetClockInfo", kind))

    def max_clock_mhz(self, kind: int) -> float:
        """Return the highest clock, in MHz."""
        return float(self._ask("nvmlDeviceGetMaxClockInfo", kind))

    def power_w(self) -> float:
        """Return the power of the device, in watts."""
        return self._ask("nvmlDeviceGetPowerUsage") / 1e3

    def temperature_c(self) -> float:
        """Return the temperature, in degrees Celsius."""
        return float(self._ask("nvmlDeviceGetTemperature", _GPU_TEMPERATURE))

    def energy_joules(self) -> float:
        """Return the energy used since the driver was loaded, in joules; renewed every 0.1 s."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", of=ctypes.c_ulonglong) / 1e3

    def _ask(self, name: str, *arguments: int, of: Any = ctypes.c_uint) -> int:
        value = of()
        status = getattr(self.library, name)(self.handle, *arguments, ctypes.byref(value))
        if status:
            raise NvmlError(f"{name} returned {status}")
        return int(value.value)


@contextlib.contextmanager
def monitor(pci_bus_id: str) -> Iterator[Monitor | None]:
    """Open a device; return None if the library or the device is missing.

    Parameters
    ----------
    pci_bus_id : str
        For example ``"0000:19:00.0"``, from `cupy.cuda.Device.pci_bus_id`.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        yield None
        return
    if library.nvmlInit_v2():
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        found = library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle))
        yield None if found else Monitor(library, handle)
    finally:
        library.nvmlShutdown()
