"""Every feature with every rung, type and layout: cases in which each two values of two axes meet.

`CELLS` is the same list on every machine; `drawn` draws cases of the same axes by a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.kernels.features import BY_COLUMN, ROPE_PAIRS
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.quant import QuantConfig
from tests.kernels import feature_cases
from tests.support.runs import column_tables, normal, packed, rope_tables, variant_of

Cell = dict[str, Any]

#: Memory layouts of q, k and v.
LAYOUTS = ("contiguous", "BSHD", "amid NaN", "reversed")

AXES: dict[str, tuple[Any, ...]] = {
    "rung": tuple(VARIANTS),
    "dtype": ("float16", "bfloat16", "float32"),
    "head_dim": (16, 20, 7),
    "lengths": ((33, 40), (5, 70), (37, 9), (1, 1)),
    "heads": ((2, 1), (2, 2), (3, 1)),
    "layout": LAYOUTS,
    "packed": (False, True),
    "scale": (None, 0.3),
    "rope": ("", *ROPE_PAIRS),
    **feature_cases.AXES,
}


def possible(cell: Mapping[str, Any]) -> bool:
    """Whether values go together; axes that are missing so far go with everything."""
    if "rung" in cell and "dtype" in cell and cell["dtype"] not in variant_of(cell["rung"]).dtypes:
        return False
    return not (cell.get("rope") and cell.get("head_dim", 2) % 2)


def cover(axes: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Choose cells until every two possible values of two axes have met.

    Each cell starts from a pair that has not met and takes, axis by axis, the value that brings the
    most new pairs.
    """

    def key(one: str, x: Any, other: str, y: Any) -> tuple[Any, ...]:
        return (one, x, other, y) if names.index(one) < names.index(other) else (other, y, one, x)

    names = list(axes)
    missing = {
        (a, x, b, y): None
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(axes[a], axes[b])
        if possible({a: x, b: y})
    }
    cells = []
    while missing:
        a, x, b, y = next(iter(missing))
        cell: Cell = {a: x, b: y}
        for name in names:
            if name in cell:
                continue
            fits = [v for v in axes[name] if possible({**cell, name: v})]
            cell[name] = max(
                fits, key=lambda v: sum(key(name, v, n, w) in missing for n, w in cell.items())
            )
        cell = {name: cell[name] for name in names}
        for one, other in itertools.combinations(names, 2):
            missing.pop((one, cell[one], other, cell[other]), None)
        cells.append(cell)
    return cells


def drawn(axes: Mapping[str, Sequence[Any]], seed: int, count: int) -> Iterator[Cell]:
    """Draw cells at random, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    while count:
        cell = {name: values[rng.integers(len(values))] for name, values in axes.items()}
        if possible(cell):
            yield cell
            count -= 1


@dataclass(frozen=True)
class Case:
    """The arrays and options of a cell, on the host, and where its sequences begin and end.

    These are the offsets of two packed sequences, one of them shorter; None of a batch of two.
    """

    cell: Cell
    inputs: tuple[Any, Any, Any]
    options: dict[str, Any]
    ends: Any = None

    @classmethod
    def of(cls, cell: Cell, seed: int) -> Case:
        """Draw the arrays of a cell."""
        (heads, heads_kv), (len_q, len_kv) = cell["heads"], cell["lengths"]
        head_dim = cell["head_dim"]
        shapes = (2, heads, len_q, head_dim), (2, heads_kv, len_kv, head_dim)
        inputs, ends = normal(*shapes, cell["dtype"], seed), None
        if cell["packed"]:
            lengths = (len_q // 2 + 1, len_kv), (len_q, len_kv // 2)
            inputs, ends = packed(lengths, heads, heads_kv, head_dim, cell["dtype"], seed)
        options = feature_cases.options_of(cell, (2, heads, len_q, len_kv), seed)
        options["scale"] = cell["scale"]
        if cell["rope"]:
            tables = column_tables if cell["rope"].endswith(BY_COLUMN) else rope_tables
            interleaved = cell["rope"].startswith("interleaved")
            options["rope"] = tables(max(len_q + 3, len_kv), head_dim)
            options |= {"rope_interleaved": interleaved, "rope_offset_q": 3}
        return cls(cell, inputs, options, ends)

    def laid(self, xp: Any = np) -> tuple[Any, Any, Any]:
        """Return q, k and v with the layout of the cell, in arrays of `xp`."""
        q, k, v = (self._laid(x, xp) for x in self.inputs)
        return q, k, v

    def _laid(self, x: np.ndarray, xp: Any) -> Any:
        if self.ends is None:
            return _lay(x, self.cell["layout"], xp)
        return _lay(x.swapaxes(0, 1)[None], self.cell["layout"], xp)[0].swapaxes(0, 1)


def _lay(x: np.ndarray, layout: str, xp: Any) -> Any:
    if layout == "BSHD":
        return xp.asarray(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
    if layout == "reversed":
        return xp.asarray(np.ascontiguousarray(x[:, ::-1, ::-1]))[:, ::-1, ::-1]
    if layout == "amid NaN":
        buffer = np.full((*x.shape[:2], x.shape[2] + 2, x.shape[3] + 3), np.nan, x.dtype)
        buffer[:, :, 1:-1, 1:-2] = x
        return xp.asarray(buffer)[:, :, 1:-1, 1:-2]
    return xp.asarray(x)


#: Ways to quantise: every granularity of each operand, with and without zero points and means, V
#: in 16 bits and as every kind of codes, in a pass before and inside the kernel.
QUANTS = (
    QuantConfig(),
    QuantConfig("token", "token"),
    QuantConfig("block", "block", smooth_k=False),
    QuantConfig("head", "tensor"),
    QuantConfig("tensor", "head"),
    QuantConfig("token", "block", symmetric=False),
    QuantConfig("head", "thread", symmetric=False, smooth_k=False),
    QuantConfig(pv="int8"),
    QuantConfig("block", "token", pv="int8", granularity_v="channel", p_type="s8"),
    QuantConfig("thread", "head", pv="int8", symmetric=False, smooth_v=False),
    QuantConfig("tensor", "tensor", pv="fp8", granularity_v="channel"),
    QuantConfig("token", "head", pv="int8", p_type="16bit", symmetric=False),
    QuantConfig(smooth_k=False, fused=True),
    QuantConfig("token", "block", smooth_k=False, fused=True, symmetric=False),
)
#: The same axes for the INT8 rung alone, and how it quantises.
QUANT_AXES: dict[str, tuple[Any, ...]] = {**AXES, "rung": ("fa_int8",), "quant": QUANTS}


def rung_of(quant: QuantConfig) -> str:
    """Return the rung, with its form, that runs a way to quantise."""
    return "fa_int8" if quant.form == "portable" else f"fa_int8@{quant.form}"


CELLS = cover(AXES)
QUANT_CELLS = cover(QUANT_AXES)
