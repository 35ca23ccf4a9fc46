"""Memory of the interpreted device: every byte has an owner, and every access is checked.

Addresses belong to a separate 64-bit space. Each array has a region of 2^40 bytes, so an access
past its array hits no other array. Shared, local and parameter memory are windows of the generic
space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.memory import data_address
from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.ordering import BetweenBlocks, Bools, Clocks, Ints
from cupyattn.interpret.shadow import Report, Shadow, spread

if TYPE_CHECKING:
    from cupyattn.interpret.variables import Extent

#: log2 of the bytes between the regions of two arrays.
REGION_BITS = 40
#: Bytes of an array's region before the array, so that an access slightly below it is attributed
#: to it.
FRONT = 1 << 20
#: Generic addresses of shared, local and parameter memory start here.
WINDOWS = {"shared": 1 << 56, "local": 1 << 57, "param": 1 << 58}
#: First byte of shared memory in its window; it is not 0, so that null pointers are found.
SHARED_BASE = 1024
#: log2 of the distance between the ranks of an address in a cluster; shared memory is smaller.
RANK_BITS = 24
#: The bits of an address below its rank.
WITHIN = (1 << RANK_BITS) - 1

Bytes = npt.NDArray[np.uint8]
#: Unsigned integers of 1, 2, 4 or 8 bytes, the units between registers and memory.
Units = npt.NDArray[Any]


class Space(Protocol):
    """A memory that lanes load from and store to.

    A strong access (``.relaxed`` and the like) does not race with another strong one.
    """

    def load(
        self, address: Ints, unit: int, count: int, lanes: Ints, strong: bool = False
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes)."""

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Store (count, lanes) units."""

    def exchange(self, address: Ints, unit: int, lanes: Ints) -> tuple[Bytes, Ints]:
        """Check an atomic access; return the memory that it goes to, and the offsets in it."""


def gather(data: Bytes, offset: Ints, unit: int, count: int) -> Units:
    """Read `count` units of `unit` bytes from each of `offset`: (count, lanes)."""
    if unit * count == 16:  # as one element: addresses are multiples of the width
        whole = data.view(np.complex128)[offset >> 4].view(f"u{unit}")
        return np.ascontiguousarray(whole.reshape(-1, count).T)
    index = offset // unit
    return data.view(f"u{unit}")[index + np.arange(count)[:, None]]  # type: ignore[no-any-return]


def scatter(data: Bytes, offset: Ints, values: Units) -> None:
    """Write (count, lanes) units; the units of a lane are consecutive from its `offset` on."""
    unit = values.dtype.itemsize
    data.view(f"u{unit}")[offset // unit + np.arange(len(values))[:, None]] = values


def stores_agree(data: Bytes, offset: Ints, values: Units) -> bool:
    """Write units like `scatter`; return whether lanes that share a place wrote the same values."""
    scatter(data, offset, values)
    return np.array_equal(gather(data, offset, values.dtype.itemsize, len(values)), values)


def span(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the bytes below an array's first element, and the bytes that it spans."""
    if not array.size:
        return 0, 0
    reach = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    below = -sum(r for r in reach if r < 0)
    return below, below + sum(r for r in reach if r > 0) + array.itemsize


def duplicate(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array and its layout: strides, and address modulo 256."""
    before, nbytes = span(array)
    buffer = np.zeros(nbytes + 256, np.uint8)
    start = (data_address(array) - before - data_address(buffer)) % 256
    copy: npt.NDArray[Any] = np.ndarray(
        array.shape, array.dtype, buffer.data, start + before, array.strides
    )
    copy[...] = array
    return copy


def check_aligned(
    address: Ints, width: int, lanes: Ints, report: Report, name: str, base: int = 0
) -> None:
    """Report addresses that are not multiples of the access width; `base` is the first address."""
    odd = address & (width - 1)
    if odd.any():
        message = f"an access of {width} bytes to {name} at an address that is no multiple of that"
        report("misaligned", message, lanes, odd != 0, address - base)


# ---- global memory -------------------------------------------------------------------------------


@dataclass(eq=False)
class Array:
    """An array on the interpreted device: a copy of all bytes that the caller's array spans.

    Parameters
    ----------
    name : str
    source : numpy.ndarray
        The caller's array.
    base : int
        Address of its lowest byte.
    before : int
        Bytes from there to its first element; not 0 if a stride is negative.
    data : numpy.ndarray of uint8
        Its bytes, from the multiple of 16 below `base` on.
    nbytes : int
        Number of bytes that it spans.
    owned : numpy.ndarray of bool or None
        Which bytes of `data` are elements and not gaps between rows; None if all are.
    shadow : Shadow or None
        None for read-only arrays, which cannot have hazards.
    awaited : bool
        Whether the previous launch writes it, so a thread must wait before it reads.
    undefined : numpy.ndarray of bool or None
        Which of its `nbytes` no launch before this one has written; None if all have a value.
    """

    name: str
    source: npt.NDArray[Any]
    base: int
    before: int
    data: Bytes
    nbytes: int
    owned: Bools | None
    shadow: Shadow | None
    awaited: bool = False
    undefined: Bools | None = None

    @property
    def elements(self) -> npt.NDArray[Any]:
        """Its current contents: a view of `data` in the caller's shape and strides."""
        x = self.source
        return np.ndarray(x.shape, x.dtype, self.data, self.base % 16 + self.before, x.strides)


class GlobalMemory:
    """The arrays of a launch.

    Parameters
    ----------
    granule_bytes : int
        Width of the narrowest access of the kernel to global memory.
    """

    def __init__(self, granule_bytes: int) -> None:
        self.arrays: list[Array] = []
        self.between = BetweenBlocks()
        self._granule_bytes = granule_bytes

    def attach(self, clocks: Clocks, report: Report) -> None:
        """Attach the memory to a batch of blocks."""
        self._clocks = clocks
        self._report = report
        overlaps = any(array.awaited for array in self.arrays)
        self._is_early = np.full(len(clocks.floor), overlaps)

    def wait(self, lanes: Ints) -> None:
        """Record that lanes wait for the previous launch."""
        self._is_early[lanes] = False

    def add(
        self,
        name: str,
        source: npt.NDArray[Any],
        *,
        undefined: Bools | None = None,
        writable: bool = True,
        awaited: bool = False,
    ) -> int:
        """Copy an array to the device and return its address, equal to the caller's modulo 256.

        Parameters
        ----------
        name : str
            For findings.
        source : numpy.ndarray
        undefined : numpy.ndarray of bool, optional
            As for `Array`; reading these bytes is a finding.
        writable : bool
        awaited : bool
            As for `Array`.
        """
        before, nbytes = span(source)
        base = ((len(self.arrays) + 1) << REGION_BITS) + FRONT
        base += (data_address(source) - before) % 256
        room = math.lcm(16, self._granule_bytes)
        data = np.zeros(-(-(base % 16 + nbytes) // room) * room + room, np.uint8)
        owned = None
        if source.nbytes != nbytes:
            owned = np.zeros(data.size, np.bool_)
            shape, strides = (*source.shape, source.itemsize), (*source.strides, 1)
            np.ndarray(shape, np.bool_, owned.data, base % 16 + before, strides)[...] = True
        shadow = None
        if writable:
            granules = data.size // self._granule_bytes
            shadow = Shadow(
                name, granules, self._granule_bytes, 0, initialised=True, first=-(base % 16)
            )
            if undefined is not None:
                places = np.flatnonzero(undefined) + base % 16
                shadow.forget(distinct(places // self._granule_bytes))
        array = Array(name, source, base, before, data, nbytes, owned, shadow, awaited, undefined)
        if source.size:
            array.elements[...] = source
        self.arrays.append(array)
        return base + before

    def give_back(self) -> dict[str, Bools]:
        """Copy written arrays back to the caller's arrays; return which bytes are undefined."""
        undefined = {}
        for array in self.arrays:
            if array.shadow is not None and array.shadow.was_written:
                array.source[...] = array.elements
            if array.shadow is not None and array.undefined is not None:
                untouched = np.repeat(array.shadow.written < 0, self._granule_bytes)
                left = untouched[array.base % 16 :][: array.nbytes] & array.undefined
                if left.any():
                    undefined[array.name] = left
        return undefined

    def load(
        self,
        address: Ints,
        unit: int,
        count: int,
        lanes: Ints,
        strong: bool = False,
        alignment: int | None = None,
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes).

        Addresses must be multiples of `alignment`; by default, of the bytes of an access.
        """
        array = self._owner(address, lanes)
        if array is None:
            values = np.empty((count, len(lanes)), f"u{unit}")
            for some in self._by_owner(address):
                values[:, some] = self.load(
                    address[some], unit, count, lanes[some], strong, alignment
                )
            return values
        offset = self._offset(array, address, unit * count, lanes, alignment)
        if array.awaited:
            self._check_waited("reads", array, address, lanes)
        if array.shadow is not None:
            size = self._granule_bytes
            array.shadow.before_read(
                offset // size, lanes, self._clocks, self._report,
                count=max(unit * count // size, 1), atomic=strong,
            )  # fmt: skip
        return gather(array.data, offset, unit, count)

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Store (count, lanes) units."""
        array = self._owner(address, lanes)
        if array is None:
            for some in self._by_owner(address):
                self.store(address[some], values[:, some], lanes[some], strong)
            return
        width = len(values) * values.dtype.itemsize
        offset = self._offset(array, address, width, lanes)
        shadow = self._writable(array, address, lanes)
        self._check_waited("writes to", array, address, lanes)
        granules = self._granules(offset, width, lanes)
        shadow.before_write(*granules, self._clocks, self._report, atomic=strong)
        shadow.wrote(*granules, self._clocks, self._report, atomic=strong)
        self.between.overwrite(address)
        scatter(array.data, offset, values)

    def exchange(self, address: Ints, unit: int, lanes: Ints) -> tuple[Bytes, Ints]:
        """Check an atomic access; return the memory that it goes to, and the offsets in it."""
        array = self._owner(address, lanes)
        if array is None:
            everything = np.ones(len(lanes), np.bool_)
            message = "one atomic operation on several arrays"
            self._report("out of bounds", message, lanes, everything, address)
        offset = self._offset(array, address, unit, lanes)
        shadow = self._writable(array, address, lanes)
        self._check_waited("writes to", array, address, lanes)
        granules = self._granules(offset, unit, lanes)
        shadow.check_written(*granules, self._report)
        shadow.before_write(*granules, self._clocks, self._report, atomic=True)
        shadow.wrote(*granules, self._clocks, self._report, atomic=True)
        return array.data, offset

    def _granules(self, offset: Ints, width: int, lanes: Ints) -> tuple[Ints, Ints]:
        size = self._granule_bytes
        return spread(offset // size, lanes, max(width // size, 1))

    def _by_owner(self, address: Ints) -> list[Ints]:
        region = address >> REGION_BITS
        return [np.flatnonzero(region == one) for one in distinct(region)]

    def _owner(self, address: Ints, lanes: Ints) -> Array | None:
        """Return the array whose region contains all addresses, or None if there are several."""
        region = address >> REGION_BITS
        first = int(region[0])
        if (region != first).any():
            return None
        if not 1 <= first <= len(self.arrays):
            message = f"an access at {int(address[0]):#x}, where no array lies"
            self._report("out of bounds", message, lanes, np.ones(len(lanes), np.bool_))
        return self.arrays[first - 1]

    def name_at(self, address: int) -> str:
        """Return the name of the array whose region contains an address."""
        number = address >> REGION_BITS
        return self.arrays[number - 1].name if 1 <= number <= len(self.arrays) else "no array"

    def _offset(
        self, array: Array, address: Ints, width: int, lanes: Ints, alignment: int | None = None
    ) -> Ints:
        """Return offsets into the array's data after checking them."""
        check_aligned(address, alignment or width, lanes, self._report, array.name, array.base)
        within = address - array.base
        outside = (within < 0) | (within + width > array.nbytes)
        if outside.any():
            message = f"an access of {width} bytes outside {array.name}, which has {array.nbytes}"
            self._report("out of bounds", message, lanes, outside, within)
        offset: Ints = within + array.base % 16
        if array.owned is not None:
            gap = ~(array.owned[offset] & array.owned[offset + width - 1])
            if gap.any():
                message = f"an access of {width} bytes between the rows of {array.name}"
                self._report("out of bounds", message, lanes, gap, within)
        return offset

    def _check_waited(self, does: str, array: Array, address: Ints, lanes: Ints) -> None:
        """Report lanes that access an array before they wait for the previous launch."""
        early = self._is_early[lanes]
        if early.any():
            message = f"the kernel {does} {array.name} before it waits for the launch before it"
            self._report("race", message, lanes, early, address - array.base)

    def _writable(self, array: Array, address: Ints, lanes: Ints) -> Shadow:
        if array.shadow is None:
            message = f"{array.name} is an input, and the kernel writes to it"
            everything = np.ones(len(lanes), np.bool_)
            self._report("read-only", message, lanes, everything, address - array.base)
        return array.shadow


# ---- memory of a block, of a lane, of the launch -------------------------------------------------


class SharedMemory:
    """Shared memory of a batch of blocks, uninitialised.

    Parameters
    ----------
    blocks : int
    nbytes : int
        Bytes of each block.
    granule_bytes : int
        Width of the narrowest access of the kernel to shared memory.
    clocks : Clocks
    report : Report
    cluster : int
        Blocks of a cluster.
    extent : callable, optional
        Returns the variables that the access under way must stay within, if they are known.
    """

    def __init__(
        self, blocks: int, nbytes: int, granule_bytes: int, clocks: Clocks, report: Report,
        cluster: int, extent: Callable[[], Extent | None] | None = None,
    ) -> None:  # fmt: skip
        room = math.lcm(16, granule_bytes)
        self.nbytes = nbytes
        self.stride = -(-nbytes // room) * room
        self.data = np.zeros(blocks * self.stride, np.uint8)
        self.granule_bytes = granule_bytes
        granules = self.data.size // granule_bytes
        self.shadow = Shadow(
            "shared memory", granules, granule_bytes, clocks.threads, initialised=False,
            period=self.stride or None,
        )  # fmt: skip
        block_of_lane = np.arange(blocks * clocks.threads) // clocks.threads
        self._start = block_of_lane * self.stride - SHARED_BASE  # of each lane's block
        ranks = (block_of_lane % cluster + 1) << RANK_BITS if cluster > 1 else None
        self.ranks = ranks  # of each lane's block, as addresses in a cluster have them
        self._clocks = clocks
        self._report = report
        self._extent = extent

    def offset(self, address: Ints, width: int, lanes: Ints) -> Ints:
        """Return offsets into the memory of all blocks after checking the addresses."""
        if self.ranks is not None:
            own = address & ~WITHIN == self.ranks[lanes]
            address = np.where(own, address & WITHIN, address)
        check_aligned(address, width, lanes, self._report, "shared memory", SHARED_BASE)
        if address.min() < SHARED_BASE or address.max() > SHARED_BASE + self.nbytes - width:
            within = address - SHARED_BASE
            outside = (within < 0) | (within + width > self.nbytes)
            message = f"an access of {width} bytes outside shared memory, which has {self.nbytes}"
            self._report("out of bounds", message, lanes, outside, within)
        if self._extent is not None and (extent := self._extent()) is not None:
            outside = (address < extent.begin) | (address + width > extent.end)
            if outside.any():
                size = extent.end - extent.begin
                message = f"an access of {width} bytes outside {extent.names}, which has {size}"
                self._report("out of bounds", message, lanes, outside, address - extent.begin)
        return address + self._start[lanes]

    def granules(self, offset: Ints, width: int, lanes: Ints) -> tuple[Ints, Ints]:
        """Return the granules of an access, and the lane of each."""
        size = self.granule_bytes
        return spread(offset // size, lanes, max(width // size, 1))

    def show(self, lanes: Ints) -> None:
        """Make accesses ordered before `lanes` visible to the asynchronous proxy.

        This is ``fence.proxy.async``."""
        per_block = self.stride // self.granule_bytes
        blocks = lanes // self._clocks.threads
        for block in distinct(blocks).tolist():
            granules = slice(block * per_block, (block + 1) * per_block)
            self.shadow.fence(granules, lanes[blocks == block], self._clocks)

    def load(
        self, address: Ints, unit: int, count: int, lanes: Ints, strong: bool = False
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes)."""
        width, size = unit * count, self.granule_bytes
        offset = self.offset(address, width, lanes)
        self.shadow.before_read(
            offset // size, lanes, self._clocks, self._report, count=max(width // size, 1),
            atomic=strong,
        )  # fmt: skip
        return gather(self.data, offset, unit, count)

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Store (count, lanes) units."""
        width = len(values) * values.dtype.itemsize
        offset = self.offset(address, width, lanes)
        granules = self.granules(offset, width, lanes)
        self.shadow.before_write(*granules, self._clocks, self._report, atomic=strong)
        self.shadow.wrote(
            *granules, self._clocks, self._report, atomic=strong,
            agree=lambda: stores_agree(self.data, offset, values),
        )  # fmt: skip
        scatter(self.data, offset, values)

    def exchange(self, address: Ints, unit: int, lanes: Ints) -> tuple[Bytes, Ints]:
        """Check an atomic access; return the memory that it goes to, and the offsets in it."""
        offset = self.offset(address, unit, lanes)
        granules = self.granules(offset, unit, lanes)
        self.shadow.check_written(*granules, self._report)
        self.shadow.before_write(*granules, self._clocks, self._report, atomic=True)
        self.shadow.wrote(*granules, self._clocks, self._report, atomic=True)
        return self.data, offset


class _NotAtomic:
    """Memory that at most one lane can write, which allows no atomic operations."""

    _report: Report
    _name: str

    def exchange(self, address: Ints, unit: int, lanes: Ints) -> tuple[Bytes, Ints]:
        """Report the access."""
        everything = np.ones(len(lanes), np.bool_)
        message = f"an atomic operation on {self._name}"
        self._report("out of bounds", message, lanes, everything, address)


class LocalMemory(_NotAtomic):
    """The local memory of each lane: arrays that the compiler could not keep in registers."""

    _name = "local memory"

    def __init__(self, lanes: int, nbytes: int, report: Report) -> None:
        self.nbytes = nbytes
        self._stride = -(-nbytes // 16) * 16
        self._data = np.zeros(lanes * self._stride, np.uint8)
        self._written = np.zeros(lanes * self._stride, np.bool_)
        self._report = report

    def _offset(self, address: Ints, width: int, lanes: Ints) -> Ints:
        check_aligned(address, width, lanes, self._report, "local memory")
        outside = (address < 0) | (address + width > self.nbytes)
        if outside.any():
            message = f"an access of {width} bytes outside local memory, which has {self.nbytes}"
            self._report("out of bounds", message, lanes, outside, address)
        return address + lanes * self._stride

    def load(
        self, address: Ints, unit: int, count: int, lanes: Ints, strong: bool = False
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes)."""
        width = unit * count
        offset = self._offset(address, width, lanes)
        written = self._written[spread(offset, lanes, width)[0]].reshape(len(lanes), width)
        if not written.all():
            message = "local memory is read before anything was written there"
            self._report(
                "never written", message, lanes, np.logical_not(written.all(axis=1)), address
            )
        return gather(self._data, offset, unit, count)

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Store (count, lanes) units."""
        width = len(values) * values.dtype.itemsize
        offset = self._offset(address, width, lanes)
        self._written[spread(offset, lanes, width)[0]] = True
        scatter(self._data, offset, values)


class ParamMemory(_NotAtomic):
    """The parameters of a launch, as the driver packs them."""

    _name = "the parameters"

    def __init__(self, data: Bytes, report: Report) -> None:
        self.nbytes = data.size
        self._data = np.concatenate([data, np.zeros(-data.size % 16, np.uint8)])
        self._report = report

    def load(
        self, address: Ints, unit: int, count: int, lanes: Ints, strong: bool = False
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes)."""
        width = unit * count
        check_aligned(address, width, lanes, self._report, "the parameters")
        outside = (address < 0) | (address + width > self.nbytes)
        if outside.any():
            message = f"an access of {width} bytes outside the {self.nbytes} of the parameters"
            self._report("out of bounds", message, lanes, outside, address)
        return gather(self._data, address, unit, count)

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Report: parameters are constant."""
        everything = np.ones(len(lanes), np.bool_)
        self._report("read-only", "the kernel writes to its parameters", lanes, everything, address)
