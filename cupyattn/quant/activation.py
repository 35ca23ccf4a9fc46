"""Activation functions of a product's epilogue, and their largest slopes."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Activations that may follow a product, by name: none, GELU by erf or by tanh, SiLU.
ACTIVATIONS = ("", "gelu", "gelu_tanh", "silu")

_GATE_FIRST = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}

#: Gated linear units whose gate is the second half of a weight's rows, as in diffusers.
GATE_LAST = {f"{name}_gate_last": kind for name, kind in _GATE_FIRST.items()}

#: Gated linear units (Shazeer 2020), by name, with the activation of the gate. One half of a
#: weight's rows is the gate: its activated sums multiply the sums of the other half. The gate is
#: the first half unless the name is in `GATE_LAST`.
GLU = _GATE_FIRST | GATE_LAST

#: [L41] Largest slope of each of these; of both forms of GELU it is below 1.129.
ACTIVATION_SLOPE = {"": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}

#: Thread blocks that may share a tile: the largest cluster that every device supports.
MOST_SPLITS = 8


def check_activation(activation: str, size: int, what: str = "a weight", of: str = "rows") -> None:
    """Raise ValueError for an unknown name, and for a gated linear unit of an odd size.

    Parameters
    ----------
    activation : str
    size : int
        Rows of the weight, or channels of what is activated.
    what, of : str, optional
        What has the size, and of what it counts, in words.
    """
    if activation not in (*ACTIVATIONS, *GLU):
        names = " or ".join(map(repr, (*ACTIVATIONS[1:], *GLU)))
        raise ValueError(f"activation must be {names} or None, got {activation!r}")
    if activation in GLU and size % 2:
        raise ValueError(
            f"activation={activation!r} takes {what} with an even number of {of}, of which half "
            f"are the gate's, got {size}: use {GLU[activation]!r} for {what} without a gate"
        )


def gate_and_other(halves: Any, activation: str) -> tuple[Any, Any]:
    """Return the gate's half of the columns of a gated linear unit, and the other half.

    Parameters
    ----------
    halves : array, (m, 2 n)
    activation : str
        One of `GLU`.

    Examples
    --------
    >>> import numpy as np
    >>> [gate_and_other(np.arange(4), name)[0].tolist() for name in ("swiglu", "swiglu_gate_last")]
    [[0, 1], [2, 3]]
    """
    first, second = np.split(halves, 2, axis=-1)
    return (second, first) if activation in GATE_LAST else (first, second)


def columns_of(rows: int, activation: str) -> int:
    """Return the number of columns of a result, from the number of rows of its weight.

    Examples
    --------
    >>> columns_of(6, "swiglu"), columns_of(6, "silu")
    (3, 6)
    """
    return rows // 2 if activation in GLU else rows
