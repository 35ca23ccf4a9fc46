"""Scales that are given before the operands: their shapes and arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import Array
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantizers import group_count


def check_packed_quant(quant: QuantConfig) -> None:
    """Raise UnsupportedError unless entries of different lengths can have such scales."""
    granularities = quant.granularity_q, quant.granularity_k
    if quant.static and not {*granularities} <= {"tensor", "head"}:
        raise UnsupportedError(
            "given scales of packed sequences, and beside lengths_q or lengths_kv, are supported "
            "for granularity 'tensor' and 'head', "
            f"got {granularities[0]!r} and {granularities[1]!r}: use one of these, or "
            "scales='dynamic'"
        )


def scale_shape(x: tuple[int, ...], group: int, granularity: str) -> tuple[int, int, int]:
    """Return the shape of the scales of an operand of shape (batch, heads, length, head_dim)."""
    groups = group_count(x[2], group)
    return (1, 1, groups) if granularity == "tensor" else (x[0], x[1], groups)


def check_static_scales(
    quant: QuantConfig,
    q: tuple[int, ...],
    k: tuple[int, ...],
    tiles: Tiles,
    sequences: int | None = None,
) -> None:
    """Raise for given scales of Q and K that do not fit the operands; arguments of `static_scales`.

    Raises
    ------
    ValueError
        If a shape does not fit the operand.
    UnsupportedError
        For given scales with zero points.
    """
    if quant.zero_points:
        raise UnsupportedError(
            "given scales quantise without zero points: use symmetric=True or scales='dynamic', or "
            "QuantizedQKV.from_codes for codes with scales and zero points of your own"
        )
    for name, given, wanted in wanted_scales(quant, q, k, tiles, sequences):
        if given is None:
            continue
        have = _shape(given)
        if not _fits(have, wanted):
            granularity = getattr(quant, f"granularity_{name}")
            raise ValueError(
                f"the static {name}_scale must have shape ({wanted[0]} or 1, {wanted[1]} or 1, "
                f"{wanted[2]}) for granularity_{name}={granularity!r}, got {have}"
            )


def wanted_scales(
    quant: QuantConfig, q: tuple[int, ...], k: tuple[int, ...], tiles: Tiles, sequences: int | None
) -> Iterator[tuple[str, Any, tuple[int, int, int]]]:
    """Yield for Q and K the name, the given scales, and the shape that dynamic scales would have.

    None stands for scales of queries that will be given later.
    """
    for name, given, shape, group in (
        ("q", quant.scales[0], q, quant.group_q(tiles)),
        ("k", quant.scales[1], k, quant.group_kv(tiles)),
    ):
        batch = shape[0] if sequences is None else sequences
        granularity = getattr(quant, f"granularity_{name}")
        wanted = scale_shape((batch, *shape[1:]), group, granularity)
        if name == "q" and not shape[2] and not _fits(_shape(given), wanted):
            given = None  # only keys: queries are checked against the scales when they are given
        yield name, given, wanted


def _shape(given: Any) -> tuple[int, ...]:
    """Return the shape of given scales; a number counts as one scale."""
    return tuple(given.shape) if hasattr(given, "shape") else (1, 1, 1)


def _fits(have: tuple[int, ...], wanted: tuple[int, int, int]) -> bool:
    return len(have) == 3 and all(
        mine in (1, want) and (mine == want or axis < 2)
        for axis, (mine, want) in enumerate(zip(have, wanted, strict=True))
    )


def static_scales(
    quant: QuantConfig, q: tuple[int, ...], k: tuple[int, ...], tiles: Tiles
) -> dict[str, Array | None]:
    """Return the given scales of Q and K in the shapes of dynamic scales; None if dynamic.

    Parameters
    ----------
    quant : QuantConfig
        With scales on the host.
    q, k : tuple of int
        Shapes of the operands.
    tiles : Tiles

    Raises
    ------
    ValueError, UnsupportedError
        As `check_static_scales`.
    """
    if not quant.static:
        return {"q": None, "k": None}
    check_static_scales(quant, q, k, tiles)
    found: dict[str, Array | None] = {}
    for name, given, wanted in wanted_scales(quant, q, k, tiles, None):
        array = np.float32(1 if given is None else given)
        found[name] = np.ascontiguousarray(np.broadcast_to(array, wanted))
    return found


def described_scales(
    quant: QuantConfig,
    arrays: Mapping[str, Described],
    rows: Mapping[str, Described],
    tiles: Tiles,
    *,
    sequences: int | None = None,
    entries: int = 1,
) -> dict[str, Described]:
    """Return given scales by buffer in the shapes of dynamic ones, as kernels read them.

    Parameters
    ----------
    quant : QuantConfig
    arrays : mapping of str to Described
        Includes the scales of `QuantConfig.scales_beside`.
    rows : mapping of str to Described
        Q and K.
    tiles : Tiles
    sequences : int, optional
        Number of packed sequences: scales are given for a batch of this size, and returned as
        (1, heads or 1, sequences).
    entries : int
        Number of copies of a scale that all batch entries share.

    Raises
    ------
    ValueError, UnsupportedError
        As `check_static_scales`.
    """
    shapes = rows["q"].shape, rows["k"].shape
    check_static_scales(quant, *shapes, tiles, sequences)
    found = {}
    for name, given, wanted in wanted_scales(quant, *shapes, tiles, sequences):
        x = arrays[f"{name}_static_scale"]
        if given is None:  # of queries that are given later
            x, wanted = x.filled(1.0, (1, 1, wanted[2])), (1, 1, wanted[2])
        wanted = (max(wanted[0], entries), *wanted[1:])
        x = x if x.shape == wanted else x.broadcast_to(wanted)
        if sequences is not None:
            x = x.broadcast_to((sequences, *wanted[1:])).swapaxes(0, 2)
        found[f"{name}_static_scale"] = x.whole()
    return found
