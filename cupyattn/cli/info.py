"""Print facts for bug reports: device, driver, NVRTC, libraries, architectures, folders, flags."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.compiler import architectures, devices, nvrtc, target
from cupyattn.compiler import modules as compiler
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device
from cupyattn.measure.words import counted, format_bytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", metavar="FILE", help="write the facts to a file, too")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    facts = collect()
    output.print_facts(facts)
    if args.json:
        output.write_json(args.json, facts)
    return 0


def collect() -> dict[str, Any]:
    """Return everything that `cupyattn info` prints."""
    known = device.environment()
    found = known["device"]
    facts: dict[str, Any] = {"cupyattn": known["cupyattn"]}
    if "revision" in known:
        facts["revision"] = known["revision"] + (" (with changes)" if known["dirty"] else "")
    facts["package"] = Path(device.__file__).parents[1]
    facts["python"], facts["numpy"] = known["python"], known["numpy"]
    facts["cupy"] = known["cupy"] or "not installed"
    facts |= _compiler()
    if found is None:
        facts["device"] = f"none: {known['device_missing']}"
    else:
        facts["device"] = (
            f"{found['name']}, compute capability {found['capability'] / 10}, "
            f"{found['multiprocessors']} SMs, {format_bytes(found['memory_bytes'])}, "
            f"L2 {format_bytes(found['l2_bytes'])}"
        )
        facts["driver"] = f"{found['driver'] or 'unknown'} (CUDA {_cuda(found['driver_cuda'])})"
        facts["kernels for"] = devices.device_architecture(found["capability"])
        if "sm_clock_mhz" in found:
            facts["clocks"] = (
                f"SM {found['sm_clock_mhz']:.0f} of {found['sm_clock_max_mhz']:.0f} MHz"
            )
    facts["kernels"] = compiler.KERNELS
    cache = compiler.cache_info()
    kept = f"{counted(cache.entries, 'kernel')}, {format_bytes(cache.bytes)}"
    facts["cache"] = f"{cache.folder}: {kept}"
    settings = sorted(name for name in os.environ if name.startswith("CUPYATTN_"))
    for name in settings:
        # A bug report must not publish the secret of a group.
        facts[name] = "(set, not shown)" if name.endswith("_SECRET") else os.environ[name]
    if not settings:
        facts["settings"] = "no CUPYATTN_* variable is set"
    return {name: str(value) for name, value in facts.items()}


def _compiler() -> dict[str, Any]:
    try:
        library = nvrtc.load()
        known = target.supported_architectures()
    except UnsupportedError as error:
        return {"nvrtc": f"none: {error}"}
    unknown = [arch for arch in architectures.ARCHITECTURES if arch not in known]
    facts = {
        "nvrtc": f"{'.'.join(map(str, library.version))}, {library.path}",
        "architectures": ", ".join(known) + (f" (not {', '.join(unknown)})" if unknown else ""),
    }
    try:
        facts["CUDA headers"] = str(nvrtc.headers(library))
    except UnsupportedError as error:
        facts["CUDA headers"] = f"none: {error}"
    return facts


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
