"""Stand-ins for modules of our own, written on libraries; `experiments.speed.libraries` times them.

Each has the face of the module that it would replace, so that one code measures both.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.compiler.nvrtc import NvrtcError, Output
from cupyattn.measure.nvml import NvmlError

# ---- nvidia-ml-py, for cupyattn/measure/nvml.py --------------------------------------------------


class PynvmlMonitor:
    """`cupyattn.measure.nvml.Monitor` by pynvml."""

    def __init__(self, library: Any, handle: Any) -> None:
        self.library, self.handle = library, handle

    def clock_mhz(self, kind: int) -> float:
        return float(self._ask("ClockInfo", kind))

    def max_clock_mhz(self, kind: int) -> float:
        return float(self._ask("MaxClockInfo", kind))

    def power_w(self) -> float:
        return self._ask("PowerUsage") / 1e3

    def temperature_c(self) -> float:
        return float(self._ask("Temperature", self.library.NVML_TEMPERATURE_GPU))

    def energy_joules(self) -> float:
        return self._ask("TotalEnergyConsumption") / 1e3

    def _ask(self, what: str, *arguments: int) -> int:
        try:
            return int(getattr(self.library, f"nvmlDeviceGet{what}")(self.handle, *arguments))
        except self.library.NVMLError as error:
            raise NvmlError(f"nvmlDeviceGet{what}: {error}") from error


@contextlib.contextmanager
def pynvml_monitor(pci_bus_id: str) -> Iterator[PynvmlMonitor | None]:
    """`cupyattn.measure.nvml.monitor` by pynvml."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        try:
            found = PynvmlMonitor(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id))
        except pynvml.NVMLError:
            found = None
        yield found
    finally:
        pynvml.nvmlShutdown()


# ---- cuda.bindings.nvrtc, for the calls of cupyattn/compiler/nvrtc.py ----------------------------


class BindingsNvrtc:
    """`cupyattn.compiler.nvrtc.Nvrtc` by cuda.bindings, which finds the library by itself."""

    def __init__(self) -> None:
        from cuda.bindings import nvrtc

        self._nvrtc = nvrtc

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *found = getattr(self._nvrtc, name)(*arguments)
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            what = self._nvrtc.nvrtcGetErrorString(status)[1].decode()
            raise NvrtcError(f"{name}: {what}")
        return found[0] if len(found) == 1 else tuple(found)

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        major, minor = self._call("nvrtcVersion")
        return major, minor

    @functools.cached_property
    def capabilities(self) -> tuple[int, ...]:
        return tuple(sorted(self._call("nvrtcGetSupportedArchs")))

    def compile(self, source: str, name: str, options: Sequence[str]) -> Output:
        program = self._call(
            "nvrtcCreateProgram", source.encode(), os.fsencode(name), 0, None, None
        )
        try:
            encoded = [os.fsencode(option) for option in options]
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise NvrtcError(self._nvrtc.nvrtcGetErrorString(status)[1].decode(), log)
            ptx = self._fetch(program, "PTX").decode().rstrip("\0")
            return Output(ptx, self._fetch(program, "CUBIN"), log)
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _fetch(self, program: Any, what: str) -> bytes:
        buffer = bytes(self._call(f"nvrtcGet{what}Size", program))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer


# ---- jax.experimental.buffer_callback, for cupyattn/interop/xla_ffi.py ---------------------------

#: kDLCPU, of DLPack.
_HOST = 1
#: Same type as `cupyattn.interop.xla_ffi.Target`: (operands, results, attributes).
Target = Callable[[Sequence[Any], Sequence[Any], dict[str, str]], None]


def buffer_call(
    target: Target, shapes: Sequence[Any], vmap_method: str | None = None
) -> Callable[..., Any]:
    """`jax.ffi.ffi_call` of a target, by buffer_callback: takes operands and attributes."""
    from jax.experimental.buffer_callback import buffer_callback

    def bind(*operands: Any, **attributes: str) -> Any:
        callback = _callback(target, tuple(attributes.items()))
        return buffer_callback(callback, list(shapes), vmap_method=vmap_method)(*operands)

    return bind


@functools.lru_cache(maxsize=1024)
def _callback(target: Target, attributes: tuple[tuple[str, str], ...]) -> Callable[..., None]:
    """Return one function for equal attributes: JAX compares callbacks by identity."""

    def callback(context: Any, results: Sequence[Any], *operands: Any) -> None:
        kind, device = results[0].__dlpack_device__()
        if kind == _HOST:
            read, written = [np.asarray(x) for x in operands], [np.asarray(x) for x in results]
            for x in read:
                x.flags.writeable = False
            target(read, written, dict(attributes))
            return
        import cupy

        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(context.stream, device):
            read, written = (
                [cupy.from_dlpack(x) for x in buffers] for buffers in (operands, results)
            )
            target(read, written, dict(attributes))

    return callback


# ---- nccl4py, for the calls of cupy.cuda.nccl in cupyattn/distributed/nccl.py --------------------


class Nccl4py:
    """A communicator of one rank that sends to itself, by nccl4py."""

    def __init__(self) -> None:
        import nccl.core

        self._nccl = nccl.core
        self._comm = nccl.core.Communicator.init(1, 0, nccl.core.get_unique_id())

    def exchange(self, x: Any, y: Any, stream: int) -> None:
        with self._nccl.group():
            self._comm.send(x, 0, stream=stream)
            self._comm.recv(y, 0, stream=stream)

    def close(self) -> None:
        self._comm.destroy()


class CupyNccl:
    """The same by `cupy.cuda.nccl`, as `cupyattn.distributed.nccl` calls it."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self._nccl = nccl
        self._comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def exchange(self, x: Any, y: Any, stream: int) -> None:
        self._nccl.groupStart()
        self._comm.send(x.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, 0, stream)
        self._comm.recv(y.data.ptr, y.nbytes, self._nccl.NCCL_UINT8, 0, stream)
        self._nccl.groupEnd()

    def close(self) -> None:
        self._comm.destroy()
