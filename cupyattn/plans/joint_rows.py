"""Fields of the structs of kernels that read rows of two tensors as their concatenation."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.operand import Operand


def joint_rows(first: Operand, below: Operand, buffer: str) -> dict[str, Any]:
    """Return the fields of `cupyattn.plans.structs.JOINT_ROWS_PARAMS`.

    Parameters
    ----------
    first, below : Operand
        (batch, rows, channels), contiguous last axis; the rows of `below` follow.
    buffer : str
        The second buffer.
    """
    return {
        "below": buffer, "batch_stride": first.row_strides[0],
        "below_batch_stride": below.row_strides[0], "below_stride": below.row_strides[1],
        "split": first.shape[1], "joint_rows": first.shape[1] + below.shape[1],
    }  # fmt: skip
