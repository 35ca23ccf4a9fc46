"""The device of measurements: whether there is one, its properties, its peak rates."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.compiler import nvrtc
from cupyattn.errors import UnsupportedError
from cupyattn.measure import nvml

#: Floating-point and integer operations per clock per SM (a multiply-add counts twice), dense, by
#: compute capability times ten. FP32: CUDA programming guide, "Throughput of native arithmetic
#: instructions". Tensor cores: NVIDIA's A100 and H100 whitepapers (peak / SMs / boost clock). Other
#: devices of one capability differ among themselves, so they have no entry and no share is printed.
OPERATIONS_PER_CLOCK = {
    "fp32": {80: 128, 86: 256, 89: 256, 90: 256, 100: 256, 120: 256},
    "fp16": {80: 2048, 90: 4096},
    "int8": {80: 4096, 90: 8192},
}
#: The units that each family of kernels uses for its two products.
_UNITS = {
    "unfused": ("fp32", "fp32"),
    "float32": ("fp32", "fp32"),
    "tensor_core": ("fp16", "fp16"),
    "int8": ("int8", "fp16"),
}


def device_missing() -> str:
    """Say why no CUDA device can be used; empty if one can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy sees no CUDA device ({error})"
    return "" if count else "CuPy sees no CUDA device"


def compiler_missing() -> str:
    """Say why kernels cannot be compiled here; empty if they can."""
    try:
        nvrtc.headers(nvrtc.load())
    except UnsupportedError as error:
        return str(error)
    return ""


def ceiling(family: str, capability: int, multiprocessors: int, clock_hz: float) -> float | None:
    """Return the operations per second that the units which a rung uses could do at most.

    Parameters
    ----------
    family : str
        `cupyattn.kernels.ladder.Variant.family`.
    capability : int
        Compute capability times ten.
    multiprocessors : int
        SMs of the device.
    clock_hz : float
        Its highest SM clock.

    Returns
    -------
    float or None
        None if `OPERATIONS_PER_CLOCK` does not list the device.

    Notes
    -----
    Half of the operations are Q.K^T, half P.V. If these run on different units, the ceiling is the
    harmonic mean of both. Exponentials and other work are not counted.

    Examples
    --------
    >>> f"{ceiling('tensor_core', 90, 132, 1.98e9):.3g}"
    '1.07e+15'
    >>> ceiling("tensor_core", 86, 84, 1.7e9) is None
    True
    """
    rates = [OPERATIONS_PER_CLOCK[unit].get(capability) for unit in _UNITS[family]]
    if None in rates:
        return None
    seconds = sum(0.5 / rate for rate in rates if rate is not None)
    return multiprocessors * clock_hz / seconds


def device_ceiling(family: str) -> float | None:
    """Return `ceiling` of the current CuPy device."""
    import cupy

    device = cupy.cuda.Device()
    attributes = device.attributes
    clock_khz = attributes.get("ClockRate") or _max_clock_khz(device)
    if not clock_khz:
        return None
    return ceiling(
        family,
        int(device.compute_capability),
        int(attributes["MultiProcessorCount"]),
        1e3 * clock_khz,
    )


def _max_clock_khz(device: Any) -> float:
    watched = clocks(device.pci_bus_id)
    return 1e3 * float(watched.get("sm_clock_max_mhz", 0.0))


def clocks(pci_bus_id: str | None = None) -> dict[str, float]:
    """Return current clocks, power and temperature of a device; empty if they cannot be read.

    Parameters
    ----------
    pci_bus_id : str, optional
        Which device; the current CuPy device when omitted.
    """
    if pci_bus_id is None:
        import cupy

        pci_bus_id = cupy.cuda.Device().pci_bus_id
    with nvml.monitor(pci_bus_id) as monitor:
        try:
            return {} if monitor is None else {
                "sm_clock_mhz": monitor.clock_mhz(nvml.CLOCK_SM),
                "sm_clock_max_mhz": monitor.max_clock_mhz(nvml.CLOCK_SM),
                "memory_clock_mhz": monitor.clock_mhz(nvml.CLOCK_MEMORY),
                "power_w": monitor.power_w(),
                "temperature_c": monitor.temperature_c(),
            }  # fmt: skip
        except nvml.NvmlError:
            return {}


def environment() -> dict[str, Any]:
    """Return the context of a measurement: device, driver, libraries, revision.

    Returns
    -------
    dict
        JSON-ready. Without a device, ``device`` is None and ``device_missing`` says why. Versions
        of torch and cuDNN appear if torch has been imported.
    """
    from cupyattn.version import __version__

    facts: dict[str, Any] = {
        "cupyattn": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": _version_of("cupy"),
        "nvrtc": _nvrtc_version(),
        **_revision(),
    }
    missing = device_missing()
    facts["device"] = None if missing else _device()
    if missing:
        facts["device_missing"] = missing
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def _device() -> dict[str, Any]:
    import cupy

    device, runtime = cupy.cuda.Device(), cupy.cuda.runtime
    properties = runtime.getDeviceProperties(device.id)
    return {
        "name": properties["name"].decode(),
        "capability": int(device.compute_capability),
        "multiprocessors": int(device.attributes["MultiProcessorCount"]),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "l2_bytes": int(device.attributes["L2CacheSize"]),
        "driver_cuda": runtime.driverGetVersion(),
        "driver": _driver_version(),
        "runtime": runtime.runtimeGetVersion(),
        **clocks(device.pci_bus_id),
    }


def _driver_version() -> str | None:
    """Return the version of the kernel module, for example ``580.65.06``."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)


def _version_of(module: str) -> str | None:
    imported = sys.modules.get(module)
    if imported is not None:
        return str(imported.__version__)
    for name in metadata.packages_distributions().get(module, ()):
        return metadata.version(name)
    return None


def _nvrtc_version() -> str | None:
    try:
        return ".".join(map(str, nvrtc.load().version))
    except UnsupportedError:
        return None


def _revision() -> dict[str, Any]:
    """Return the git revision of a checkout and whether it has changes; nothing if installed.

    ``CUPYATTN_REVISION`` names it where the files travelled without their history.
    """
    if named := os.environ.get("CUPYATTN_REVISION"):
        return {"revision": named, "dirty": False}
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return {}

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    # NOTE: a run writes its results, and the pages that show them; they do not make it dirty.
    written = (":!experiments/results", ":!docs", ":!README.md")
    changed = git("status", "--porcelain", "--", ".", *written)
    revision = git("rev-parse", "--verify", "--quiet", "HEAD")
    return {"revision": revision, "dirty": bool(changed)} if revision else {}
