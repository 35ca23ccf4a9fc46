"""The form of an array: everything about it except its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.interchange import device_of, is_cupy
from cupyattn.arrays.memory import data_address


@dataclass(frozen=True)
class ArrayForm:
    """What a plan was made for: shape, strides in bytes, dtype, address modulo 16, device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    misalignment: int
    device: int

    @classmethod
    def of(cls, array: Any) -> ArrayForm:
        """Describe a NumPy or CuPy array."""
        address = data_address(array)
        return cls(array.shape, array.strides, array.dtype, address % 16, device_of(array))

    def address_of(self, array: Any) -> int | None:
        """Return the address of an array of this form, None for any other and for none."""
        if (
            array is None
            or array.shape != self.shape
            or array.strides != self.strides
            or array.dtype != self.dtype
            or is_cupy(array) != (self.device >= 0)
        ):
            return None
        if self.device < 0:
            address = data_address(array)
        else:
            data = array.data  # a new object at each access
            if data.device_id != self.device:
                return None
            address = data.ptr
        return address if address % 16 == self.misalignment else None

    def __str__(self) -> str:
        return (
            f"shape {self.shape}, strides {self.strides} bytes, dtype {self.dtype}, address "
            f"16 n + {self.misalignment}"
            + (f" on device {self.device}" if self.device >= 0 else "")
        )


def same_place(left: Any, right: Any) -> bool:
    """Whether two arrays start at one address."""
    return data_address(left) == data_address(right)
