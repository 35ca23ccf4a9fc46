"""Settle the quantisation of Q, K and V from descriptions, for `quantize` and `quantize_at`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import own_arch
from cupyattn.kernels import ladder
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.plans.prepare_rows import prepares_of
from cupyattn.plans.quantize import Part, operand_parts
from cupyattn.problem.form import check_value_tiles, scale_tiles
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.row_preparation import BUFFERS_OF, Preparation
from cupyattn.problem.sequences import Sequences
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.static_scales import described_scales


@dataclass(frozen=True)
class Coding:
    """Settled quantisation of operands.

    Parameters
    ----------
    quant : QuantConfig
    tiles : Tiles
        Tiles of the attention kernel.
    parts : mapping of str to Part
        How each operand is quantised; empty on the mirror.
    sequences : Sequences or None
        Packed sequences, as descriptions.
    preparation : Preparation or None
        Normalisation and rotation of the rows of Q and K.
    """

    quant: QuantConfig
    tiles: Tiles
    parts: Mapping[str, Part] = field(default_factory=dict)
    sequences: Sequences | None = None
    preparation: Preparation | None = None


class Made(NamedTuple):
    """Arguments of `QuantizedQKV` except arrays, its head_dim, and V if it is unchanged."""

    group_q: int
    group_kv: int
    group_v: int
    config: QuantConfig
    out_dtype: str
    head_dim: int
    sequences: Sequences | None = None
    prepared: tuple[str, ...] = ()
    v: Described | None = None


def read_beside(coding: Coding) -> dict[str, Described]:
    """Return the operands besides q, k and v: offsets, tables and weights."""
    found = {} if coding.preparation is None else dict(coding.preparation.buffers)
    return found if coding.sequences is None else found | coding.sequences.offsets


def given_scales(
    coding: Coding, rows: Mapping[str, Described], arrays: Mapping[str, Described]
) -> dict[str, Described]:
    """Return given scales by buffer, in the shapes of dynamic scales; empty if they are dynamic."""
    if not coding.quant.static:
        return {}
    count = None if coding.sequences is None else coding.sequences.batch
    return described_scales(coding.quant, arrays, rows, coding.tiles, sequences=count)


def made_of(coding: Coding, rows: Mapping[str, Described]) -> Made:
    quant, tiles = coding.quant, coding.tiles
    groups = quant.group_q(tiles), quant.group_kv(tiles), quant.group_v(tiles)
    buffers = coding.preparation.buffers if coding.preparation else {}
    prepared = tuple(option for option, names in BUFFERS_OF.items() if names[0] in buffers)
    q, v = rows["q"], rows["v"] if not quant.has_value_codes else None
    return Made(*groups, quant, q.dtype.name, q.shape[-1], coding.sequences, prepared, v)


def tiles_of(
    q: Described, quant: QuantConfig, tiles: Tiles | None, arch: str | None, backend: str
) -> Tiles:
    """Return the tiles of the attention kernel, checked against how V is quantised."""
    check_arch(arch)
    if tiles is not None:
        check_rows_of(tiles)
    arch = arch or own_arch(backend, q)
    if tiles is None:
        tiles = scale_tiles(ladder.lookup("fa_int8"), q.shape[3], quant, arch)
    check_value_tiles(quant, tiles, arch)
    return tiles


def check_rows_of(tiles: Tiles) -> None:
    """Raise unless the caller's tiles for quantising fit some INT8 kernel."""
    check_kind(tiles)
    if tiles.block_q % 16 or tiles.block_kv % 16:
        raise ValueError(
            f"fa_int8 does not take {tiles}: block_q and block_kv must be multiples of 16, the "
            "rows of a matrix product (tiles=None takes its own)"
        )


def coding_problem(
    rows: Mapping[str, Described],
    coding: Coding,
    backend: str,
    scales: Mapping[str, Described],
    chosen: Mapping[str, Described] | None = None,
) -> Problem:
    """Settle how the kernels of ``quantize*.cu`` make codes of arrays in place.

    With `chosen`, only the rows of k named by ``k_places`` become codes, as many as v has. Their
    mean comes from ``k_partial_sum``, as in `quantize_at`.
    """
    quant, tiles, sequences = coding.quant, coding.tiles, coding.sequences
    preparation, chosen = coding.preparation, chosen or {}
    arrays = {name: x.with_whole_rows() for name, x in rows.items()}
    places = {name: x.place for name, x in arrays.items()}
    if "k_places" in chosen:
        batch, heads, _, head_dim = places["k"].shape
        shape = (batch, heads, chosen["k_places"].shape[2], head_dim)
        places["k"] = replace(places["k"], shape=shape)
    packed = {n: None if sequences is None else sequences.packed(n) for n in arrays}
    found = operand_parts(quant, tiles, places, packed, prepares_of(preparation))
    if "k_places" in chosen:
        found["k"] = replace(found["k"], gathered=True)
        arrays["k_places"] = chosen["k_places"]
    if "k_partial_sum" in chosen and found["k"].sums_apart and preparation is None:
        sums = arrays["k_partial_sum"] = chosen["k_partial_sum"]
        found["k"] = replace(found["k"], summed=(sums.shape[2], rows["k"].shape[2]))
    if "v" not in found:
        del arrays["v"]
    if preparation is not None:
        arrays |= preparation.buffers
    if sequences is not None:
        arrays |= sequences.offsets
    arrays |= scales
    results = _results(found, scales, packed=sequences is not None)
    return Problem(
        what="quantize", backend=backend, operands=arrays, results=results,
        facts=made_of(coding, rows), settled=replace(coding, parts=found),
    )  # fmt: skip


def _results(
    found: Mapping[str, Part], given_scales: Mapping[str, Described], *, packed: bool
) -> dict[str, Result]:
    """Return the results of the kernels, with their first contents.

    These are given scales, zeros between packed sequences, and the values for zero keys and for a
    group of zeros."""
    results = {}
    for name, part in found.items():
        empty = not all(part.x.shape)
        of_nothing: dict[str, Any] = {}
        if empty and not packed and not part.static:
            of_nothing = {f"{name}_scale": 1, f"{name}_zero": -128}
        for buffer, (shape, dtype) in part.buffers(name).items():
            if buffer == f"{name}_static_scale":
                continue
            fill = of_nothing.get(buffer, 0 if packed or empty else None)
            if buffer == f"{name}_scale" and f"{name}_static_scale" in given_scales:
                fill = f"{name}_static_scale"
            results[buffer] = Result(shape, np.dtype(dtype), fill)
    return results
