"""Runs plans on a CuPy device, with as little to do for a launch as there can be.

Module, kernel and all parameters except addresses are the same in every call. They are looked up
and laid out once for each launch and device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from cupyattn.compiler import modules as compiler
from cupyattn.errors import KernelLaunchError
from cupyattn.plans.records import Launch, TensorMap
from cupyattn.runtime import overlapping, tensor_map
from cupyattn.switches import is_on

#: Alignment of every parameter in the buffer that the driver reads: a tensor map's.
_ALIGNMENT = 128
#: Number of addresses of a tensor map that a launch remembers, for example of every layer's weight.
_MAX_ENCODED = 4096


class ReadyLaunch:
    """One launch on one device: compiled, loaded, its parameters laid out but for addresses.

    ``buffers`` names the arrays whose addresses the kernel needs, in the kernel's order.

    Parameters
    ----------
    one : Launch
    arch : str or None
        Architecture to compile for; the current device's own when None.
    """

    def __init__(self, one: Launch, arch: str | None) -> None:
        import cupy

        module = compiler.load(one.module, arch)
        self._launch = one
        self._kernel = module.kernel(one.entry)  # keeps the module loaded
        self._function = self._kernel.kernel.ptr
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._shared = module.binary.smem_bytes if one.dynamic_shared else 0
        self._overlaps = bool(one.awaits) and overlapping.is_supported()
        self._per_thread = threading.local()
        #: Whether it waits, so that what goes wrong is told here: as it was when this was made.
        self.waits = is_on("CUPYATTN_DEBUG")

        templates = one.templates
        place = -(-8 * len(templates) // _ALIGNMENT) * _ALIGNMENT  # behind the pointers to them
        self._places: list[int] = []
        self._structs: list[tuple[slice, np.ndarray]] = []
        self._maps: list[tuple[slice, TensorMap]] = []
        self._encoded: list[dict[int, memoryview[int]]] = []  # of each map, by address
        pointers: list[tuple[int, str]] = []  # 64-bit word of an address, buffer
        shared: dict[TensorMap, int] = {}  # places of maps: of two that are equal there is one
        for template in templates:
            if isinstance(template, TensorMap) and template in shared:
                self._places.append(shared[template])
                continue
            self._places.append(place)
            first = place // 8
            if isinstance(template, TensorMap):
                size = tensor_map.NBYTES
                shared[template] = place
                self._encoded.append({})
                self._maps.append((slice(first, first + size // 8), template))
            else:
                words, named = template
                size = words.nbytes
                self._structs.append((slice(first, first + len(words)), words))
                pointers += [(first + index, name) for index, name in named]
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._nbytes = place
        self._pointers = [index for index, _ in pointers]
        self.buffers = (*(name for _, name in pointers), *(m.buffer for _, m in self._maps))

    def _buffer(self) -> tuple[memoryview[int], int, list[int]]:
        """Return this thread's parameters as words, their address, and the arrays of their maps."""
        import cupy

        # NOTE: the driver launches in the context of the thread, which a new one does not have.
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        raw = np.zeros(self._nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        words = raw[start : start + self._nbytes].view(np.uint64)
        address = int(words.ctypes.data)
        words[: len(self._places)] = [address + place for place in self._places]
        for where, struct in self._structs:
            words[where] = struct
        buffer = words.data, address, [-1] * len(self._maps)
        self._per_thread.buffer = buffer
        return buffer

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream of the current device.

        Parameters
        ----------
        addresses : sequence of int
            Addresses of ``buffers``.
        stream : int
            Handle.

        Raises
        ------
        KernelLaunchError
            If the device refuses the launch; the message gives grid, block and shared memory.
        """
        buffer = getattr(self._per_thread, "buffer", None)
        words, address, described = self._buffer() if buffer is None else buffer
        for index, pointer in zip(self._pointers, addresses, strict=False):
            words[index] = pointer
        if described:
            self._describe(words, described, addresses[len(self._pointers) :])
        one, driver = self._launch, self._driver
        try:
            if self._overlaps:
                driver.check_status(
                    overlapping.launch(
                        self._function, one.grid, one.block, self._shared, stream, address
                    )
                )
            else:
                driver.launchKernel(
                    self._function, one.grid, 1, 1, one.block, 1, 1, self._shared, stream, address,
                    0,
                )
        except driver.CUDADriverError as error:
            raise KernelLaunchError(
                f"{one.entry} cannot be launched with grid {one.grid}, block {one.block} and "
                f"{self._shared} bytes of shared memory: {error}"
            ) from error
        if self.waits:
            self._runtime.streamSynchronize(stream)

    def _describe(
        self, words: memoryview[int], described: list[int], addresses: Sequence[int]
    ) -> None:
        """Update the tensor maps of arrays at other addresses than in the last launch."""
        for number, ((where, x), address) in enumerate(zip(self._maps, addresses, strict=True)):
            if described[number] == address:
                continue
            known = self._encoded[number]
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MAX_ENCODED:
                    known.clear()
                new = tensor_map.encode(address, x.dtype, x.shape, x.strides, x.box)
                encoded = known[address] = new.view(np.uint64).data
            words[where] = encoded
            described[number] = address
