"""The form of an array, all of it but values: what plans are made for, and calls are known by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn import compile as compiler
from cupyattn import registry
from cupyattn.arrays import device_of, is_cupy
from cupyattn.block_mask import BlockMask
from cupyattn.checks import data_address
from cupyattn.plans import Operand
from cupyattn.preparation import BUFFERS
from cupyattn.quant import QuantizedQKV

#: Buffers of a quantised call, as fields of `QuantizedQKV`.
QUANTIZED = (
    "q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean", "v_codes", "v_scale", "v_mean",
    "q_zero", "k_zero", "v_zero", "q_code_sum", "k_code_sum", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What a plan was made for: shape, strides in bytes, dtype, address modulo 16, device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    misalignment: int
    device: int

    @classmethod
    def of(cls, array: Any) -> Form:
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
            data = array.data  # made anew each time it is asked for
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


def operands_key(
    options: Sequence[Any], operands: Mapping[str, Any], q: Any, *, block_mask: Any = None
) -> Any:
    """Return what a call on CuPy arrays depends on beside their values, None if that is not known.

    Checking, planning and packing depend on the options and on the forms of the arrays alone: a
    call with the same key needs none of it again. Options that are arrays have no key.

    Parameters
    ----------
    options : sequence
        The call's other options, the variant's name first.
    operands : mapping
        What `direct_operands` found.
    q : array or QuantizedQKV
        As the caller gave it.
    block_mask : BlockMask, optional
    """
    key: list[Any] = [*options, registry.VARIANTS.get(options[0]), compiler.generation()]
    for name, a in operands.items():
        data = a.data
        key += (name, a.shape, a.strides, a.dtype, data.ptr % 16, data.device_id)
    if block_mask is not None:
        key.append(block_mask.blocks)
    if isinstance(q, QuantizedQKV):
        key += (q.group_q, q.group_kv, q.group_v, q.config, q.out_dtype, q.max_len_q, q.max_len_k)
    found = tuple(key)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def direct_operands(
    q: Any,
    k: Any,
    v: Any,
    *,
    block_mask: Any = None,
    rope: Any = None,
    qk_norm: Any = None,
    **added: Any,
) -> dict[str, Any] | None:
    """Return the operands by name where all of them are CuPy arrays, else None."""
    if isinstance(q, QuantizedQKV) and k is None and v is None:
        operands = {name: a for name in QUANTIZED if (a := getattr(q, name)) is not None}
    else:
        operands = {"q": q, "k": k, "v": v}
    for name, a in added.items():
        if a is not None:
            operands[name] = a
    for pair, names in ((rope, BUFFERS[:2]), (qk_norm, BUFFERS[2:])):
        if pair is not None:
            if not (isinstance(pair, tuple) and len(pair) == 2):
                return None
            operands |= zip(names, pair, strict=True)
    if not all(map(is_cupy, operands.values())):
        return None
    if isinstance(block_mask, BlockMask):
        operands["kept_blocks"] = block_mask.kept_blocks(next(iter(operands.values())))
    return operands if block_mask is None or "kept_blocks" in operands else None


def same_place(left: Any, right: Any) -> bool:
    """Whether two arrays start at one address."""
    return data_address(left) == data_address(right)


def laid_out(shape: tuple[int, ...], itemsize: int, layout: str) -> Operand:
    """Describe an array of a shape (batch, heads, len, head_dim), contiguous in a layout."""
    if layout == "BHSD":
        return Operand.contiguous(shape, itemsize)
    batch, heads, length, head_dim = shape
    rows = Operand.contiguous((batch, length, heads, head_dim), itemsize)
    by_batch, by_row, by_head, by_column = rows.strides
    return Operand(shape, (by_batch, by_head, by_row, by_column), itemsize, 0)


# ---- calls of late -------------------------------------------------------------------------------

#: Calls that are kept ready to be found by what they depend on.
MAX_RECENT = 512
_recent: dict[Any, Any] = {}


def recall(key: Any) -> Any:
    """Return the `cupyattn.prepared.Prepared` that was remembered under a key, or None."""
    return _recent.get(key)


def remember(key: Any, prepared: Any) -> None:
    """Keep a prepared call ready for `recall`; the oldest make room."""
    while len(_recent) >= MAX_RECENT:
        _recent.pop(next(iter(_recent)), None)
    _recent[key] = prepared
