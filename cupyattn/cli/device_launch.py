"""Run a kernel in a file on the current device, according to its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli.launch_file import LaunchFile
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.devices import check_runs_on, device_architecture
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelLaunchError, UnsupportedError
from cupyattn.interpret import TensorMap
from cupyattn.interpret.executor import extents
from cupyattn.interpret.own_kernels import compiled, entry_name, is_ptx, text_of
from cupyattn.runtime import tensor_map

#: Bytes of dynamic shared memory that every kernel may use without an attribute.
USUAL_SHARED_BYTES = 48 * 1024
#: Types of tensor maps.
MAPPED = ("int8", "float16", "bfloat16", "float32")


class DeviceLaunch:
    """A loaded kernel and its arguments on the current device.

    ``arrays`` holds the arrays of the description, with the results after a call.

    Parameters
    ----------
    path : Path
        A ``.cu``, ``.ptx`` or ``.fatbin`` file.
    given : LaunchFile

    Raises
    ------
    KernelCompileError
        If the source does not compile.
    UnsupportedError
        If the device or this command cannot run it.
    ValueError
        If the file has no such kernel.
    """

    def __init__(self, path: Path, given: LaunchFile) -> None:
        import cupy

        settings = given.settings
        code, ptx = _code(path, settings, int(cupy.cuda.Device().compute_capability))
        name = entry_name(given.entry, ptx)
        if (settings["cluster"] or 1) > 1:
            raise UnsupportedError(
                "a launch with a cluster runs in the interpreter only: let the kernel state it, "
                "__cluster_dims__, and leave cluster out"
            )
        self._kernel = compiler.load_code(code, name)
        self._shared: int = settings["shared_bytes"]
        if self._shared > USUAL_SHARED_BYTES:
            self._kernel.max_dynamic_shared_size_bytes = self._shared
        self._grid, self._block = extents(given.grid), extents(given.block)
        self.arrays = {name: _on_device(x) for name, x in given.arrays.items()}
        of_array = {id(x): self.arrays[name] for name, x in given.arrays.items()}
        self._args = tuple(_argument(x, of_array) for x in given.args.values())

    def __call__(self) -> None:
        """Launch on the current stream.

        Raises
        ------
        KernelLaunchError
            If the device refuses the launch.
        """
        import cupy

        try:
            self._kernel(self._grid, self._block, self._args, shared_mem=self._shared)
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelLaunchError(
                f"the kernel cannot be launched with grid {self._grid}, block {self._block} and "
                f"{self._shared} bytes of shared memory: {error}"
            ) from error


def _code(path: Path, settings: dict[str, Any], capability: int) -> tuple[bytes, str]:
    """Return the code that the device loads, and the PTX, which has the kernels' names."""
    text = text_of(path)
    if is_ptx(text):
        return text.encode() + b"\0", text
    arch = settings["arch"] or device_architecture(capability)
    check_runs_on(arch, capability)
    module = ModuleSpec(path.resolve(), tuple((settings["defines"] or {}).items()))
    binary = compiled(module, arch, text, compiler.build)
    return binary.cubin, binary.ptx


def _on_device(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy on the device; CuPy has no 8-bit floats, so they are copied as bytes."""
    import cupy

    known = array.dtype.kind != "V" or array.dtype.name == "bfloat16"
    return cupy.asarray(array if known else array.view(np.uint8))


def _argument(value: Any, of_array: dict[int, Any]) -> Any:
    """Return an argument in the form that CuPy passes to kernels."""
    if value is None:
        return np.uintp(0)
    if isinstance(value, TensorMap):
        array, dtype = value.array, value.array.dtype.name
        if value.swizzle != 128 or dtype not in MAPPED:
            raise UnsupportedError(
                f"a tensor map of {dtype} with swizzle {value.swizzle} runs in the interpreter "
                f"only: on a device it must be of {', '.join(MAPPED)}, with swizzle 128"
            )
        address = of_array[id(array)].data.ptr
        return tensor_map.encode(address, dtype, array.shape, array.strides[:-1], value.box)
    if isinstance(value, np.ndarray):
        return of_array[id(value)]
    if value.dtype.kind == "V":  # bfloat16 and 8-bit floats, which CuPy passes as their bits
        return value.view(f"u{value.dtype.itemsize}")
    return value
