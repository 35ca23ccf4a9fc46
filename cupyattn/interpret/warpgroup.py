"""Compute Hopper's ``wgmma``: products of warpgroups, with operands in shared memory.

A warpgroup is four warps. Arrays of registers are shaped (groups, 128, registers). Warp w of a
group holds rows ``16 w`` to ``16 w + 15``, as fragments of `cupyattn.interpret.tensor_core`.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.operation import match
from cupyattn.interpret.tensor_core import (
    ELEMENT_BITS,
    Accumulator,
    Fragment,
    Index,
    accumulates,
    accumulator,
    elements,
    fragment_a,
)

# ---- operands in shared memory -------------------------------------------------------------------

#: Bytes of a row of the swizzled atom, by the code in a descriptor; 16 is no swizzle.
SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


class Descriptor(NamedTuple):
    """The fields of a matrix descriptor (PTX ISA, "Matrix Descriptor Format"), in bytes.

    Parameters
    ----------
    start : int
        Shared-memory address of the first element.
    leading, stride : int
        Leading- and stride-dimension byte offsets.
    base_offset : int
        Rows of 128 bytes by which the swizzle pattern starts late.
    swizzle : {16, 32, 64, 128}
        Bytes over which chunks of 16 bytes are exchanged; 16 for none.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """Read the 64-bit operand of an instruction.

        Examples
        --------
        >>> Descriptor.decode(1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 0x2000 >> 4)
        Descriptor(start=8192, leading=16, stride=1024, base_offset=0, swizzle=128)
        """
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, bits >> 49 & 7, SWIZZLE_BYTES[bits >> 62])


def swizzled_address(address: Array, swizzle: int, base_offset: int = 0) -> Array:
    """Return the swizzled address of a byte of a plain layout.

    Parameters
    ----------
    address : array of int
        Shared-memory addresses.
    swizzle : {0, 16, 32, 64, 128}
        Bytes of a row, whose 16-byte chunks are permuted by the address bits from 7 on. 0 and 16:
        the plain layout.
    base_offset : int
        Base offset of the descriptor.
    """
    row = (address >> 7) - base_offset
    return address ^ (row & (max(swizzle, 16) // 16 - 1)) << 4


@lru_cache(maxsize=4096)
def operand_addresses(bits: int, rows: int, depth: int, width: int, k_major: bool) -> Index:
    """Return the shared-memory address of every element of an operand.

    Parameters
    ----------
    bits : int
        The descriptor.
    rows : int
        M of A or N of B.
    depth : int
        K.
    width : int
        Bits of an element.
    k_major : bool
        Elements are contiguous along K; along M or N if not (``imm-trans`` is 1).

    Returns
    -------
    array of int, (rows, depth)
        Byte addresses; not to be written to.

    Notes
    -----
    PTX ISA, "Strides" and "Canonical layouts". A core matrix has 16 bytes along the contiguous
    dimension and 8 lines along the other. Without a swizzle the 8 lines are 16 bytes apart, and
    cores are a leading offset apart along K and a stride offset along M or N. With a swizzle, a
    line is as long as the swizzle and contains several cores. Groups of 8 lines are a stride offset
    apart. In M- or N-major layouts, an operand wider than a line continues after a leading offset.
    """
    descriptor = Descriptor.decode(bits)
    row, k = np.indices((rows, depth))
    along, across = (k, row) if k_major else (row, k)
    line = descriptor.swizzle
    part, within = np.divmod(along * width // 8, line)
    group, place = np.divmod(across, 8)
    part_bytes, group_bytes = descriptor.leading, descriptor.stride
    if line == 16 and not k_major:
        part_bytes, group_bytes = group_bytes, part_bytes
    plain = descriptor.start + part * part_bytes + within + group * group_bytes + place * line
    address: Index = swizzled_address(plain, descriptor.swizzle, descriptor.base_offset)
    address.flags.writeable = False
    return address


@lru_cache(maxsize=4096)
def operand_granules(
    bits: int, rows: int, depth: int, width: int, k_major: bool, granule_bytes: int
) -> Index:
    """Return the words of `granule_bytes` that contain an operand: their numbers, each once,
    rising.

    The other parameters are as for `operand_addresses`. The result is read-only.
    """
    granules: Index = distinct(
        operand_addresses(bits, rows, depth, width, k_major) // granule_bytes
    )
    granules.flags.writeable = False
    return granules


# ---- products ------------------------------------------------------------------------------------


class Wgmma(NamedTuple):
    """A form of ``wgmma.mma_async``: D [64, columns] = A [64, depth] B [depth, columns] + C."""

    columns: int
    depth: int
    a_type: str
    b_type: str
    a: Fragment
    accumulator: Accumulator

    def rows_of_registers(self, registers: Array) -> Array:
        """Return the values of A (groups, 64, depth) from registers (groups, 128, 4)."""
        warps = registers.reshape(-1, 32, registers.shape[-1])
        return self.a.gather(elements(warps, self.a_type)).reshape(-1, 64, self.depth)

    def __call__(
        self, a: Array, b: Array, c: Array, scale_d: Array | bool = True, sign: int = 1
    ) -> Array:
        """Return D in registers.

        Parameters
        ----------
        a : array of float64, (groups, 64, depth)
            Values: `rows_of_registers`, or `cupyattn.interpret.tensor_core.elements` of shared
            memory.
        b : array of float64, (groups, columns, depth)
            Values; B is given by its columns, as `operand_addresses` has them.
        c : array of uint32, (groups, 128, registers)
        scale_d : array of bool, (groups,), or bool
            Whether C is added; otherwise its contents do not matter.
        sign : {1, -1}
            ``imm-scale-a`` times ``imm-scale-b``.
        """
        products = sign * np.matmul(a, b.swapaxes(1, 2))
        counts = np.reshape(np.asarray(scale_d), (-1, 1, 1))
        c = np.where(counts, c, np.uint32(0)).reshape(-1, 32, c.shape[-1])
        result = self.accumulator(products.reshape(-1, 16, self.columns), c)
        return result.reshape(len(products), 128, -1)


@cache
def find_wgmma(modifiers: tuple[str, ...]) -> Wgmma | None:
    """Return the product that ``wgmma`` with these modifiers computes, or None if it is unknown.

    Parameters
    ----------
    modifiers : tuple of str
        E.g. ``("mma_async", "sync", "aligned", "m64n128k16", "f32", "f16", "f16")``.
    """
    shapes = "|".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32))
    operands = "|".join(kind for kind, bits in ELEMENT_BITS.items() if bits >= 8)
    found = match(
        modifiers, "mma_async", "sync", "aligned", shapes, "satfinite?", "f16|f32|s32", operands,
        operands,
    )  # fmt: skip
    if not found:
        return None
    saturates, (d_type, a_type, b_type) = bool(found[4]), found[5:]
    columns, depth = map(int, found[3].removeprefix("m64n").split("k"))
    bits = ELEMENT_BITS[a_type]
    if not accumulates(a_type, b_type, d_type) or depth != 256 // bits:
        return None
    if saturates and d_type != "s32":
        return None
    if d_type == "s32" and columns % 16 and columns not in (8, 24):
        return None
    sums = accumulator(d_type, d_type, saturates, columns)
    return Wgmma(columns, depth, a_type, b_type, fragment_a(depth, bits), sums)
