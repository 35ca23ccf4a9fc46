"""Codes of a checkpoint as numbers, and a second way to the same numbers that checks the first."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds.perturbation import half_ulp
from cupyattn.checkpoints.comfy import our_codes
from cupyattn.checkpoints.rotated import check_unrotated, unrotated_weight
from cupyattn.checkpoints.schemes import WORD_BITS, Codes
from cupyattn.checkpoints.shards import Array, Source
from cupyattn.quant.blocks import strips

#: Elements that are in work at a time.
_PART = 2**17
#: The same for the check, whose numbers take more room.
_CHECKED = 2**15


def unpack(words: Array, bits: int, count: int) -> Array:
    """Return the codes in rows of int32 words.

    Parameters
    ----------
    words : array, (rows, words of a row), int32
    bits : {2, 4, 8}
    count : int
        Codes of a row.

    Returns
    -------
    array, (rows, count), int8
        The first code lies in the lowest bits; each was stored with ``2^(bits - 1)`` added.

    Examples
    --------
    >>> unpack(np.array([[0x89]], np.int32), 4, 2)
    array([[1, 0]], dtype=int8)
    """
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    fields = words.view(np.uint32)[:, :, None] >> shifts & np.uint32(2**bits - 1)
    fields = fields.reshape(words.shape[0], words.shape[1] * shifts.size)[:, :count]
    return (fields.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def scales_of(source: Source, codes: Codes) -> Array:
    """Return the scales of a weight as (blocks down, blocks across), float32.

    Raises
    ------
    ValueError
        If one is NaN or infinite.
    """
    scales = source.read(codes.scales).astype(np.float32).reshape(codes.scale_shape)
    if not np.isfinite(scales).all():
        raise ValueError(f"{source.path}: {codes.scales!r} is not finite")
    return scales


def stored_codes(source: Source, codes: Codes) -> Array:
    """Return the codes of a weight as files have them, rotated ones in our order.

    Returns
    -------
    array, int8 or int32 words
        int16 where a code of ComfyUI's has no counterpart in int8.
    """
    stored = source.read(codes.codes)
    return our_codes(stored) if codes.rotate is not None and codes.of_comfy else stored


def dequantize_codes(source: Source, codes: Codes, dtype: str) -> Array:
    """Return a weight as numbers: ``(codes - zero points) * scales``, in float32, then rounded.

    Numbers of a rotated weight are rotated back before they are rounded.

    Parameters
    ----------
    source : Source
    codes : Codes
    dtype : {"float32", "bfloat16", "float16"}

    Raises
    ------
    ValueError
        If a scale is not finite, or a number does not fit into `dtype`.
    """
    stored, scales = stored_codes(source, codes), scales_of(source, codes)
    zeros = None
    if codes.zero_points is not None:
        zeros = source.read(codes.zero_points)
        if codes.scheme.packed_zeros:  # packed along the rows
            words = np.ascontiguousarray(zeros.T)
            zeros = unpack(words, codes.scheme.bits, codes.scale_shape[0]).T
        zeros = zeros.reshape(codes.scale_shape)
    if codes.rotate is not None:
        name = f"{source.path}: {codes.weight!r}"
        return unrotated_weight(stored, scales, codes.rotate, dtype, name)
    rows, columns = codes.shape
    w = np.empty(codes.shape, STORAGE[dtype])
    for line in strips(rows, max(1, _PART // max(1, columns))):
        down = np.arange(line.start, line.stop) // codes.block[0]
        for part in strips(columns, _PART):
            across = np.arange(part.start, part.stop) // codes.block[1]
            here = np.ix_(down, across)
            if codes.scheme.packed:
                each = WORD_BITS // codes.scheme.bits  # _PART is a multiple of it
                words = stored[line, part.start // each : -(-part.stop // each)]
                values = unpack(words, codes.scheme.bits, part.stop - part.start)
            else:
                values = stored[line, part]
            values = values.astype(np.float32)
            if zeros is not None:
                values -= zeros[here]
            values *= scales[here]
            with np.errstate(over="ignore"):
                w[line, part] = values.astype(STORAGE[dtype], copy=False)
            if not np.isfinite(w[line, part]).all():
                raise ValueError(f"{source.path}: {codes.weight!r} does not fit into {dtype}")
    return w


def check_codes(source: Source, codes: Codes, w: Array) -> str | None:
    """Describe an error of a dequantised weight, or return None.

    Nothing of `dequantize_codes` is used: packed codes are assembled bit by bit, and scales and
    zero points are repeated block by block. The product is exact in float64.

    Parameters
    ----------
    source : Source
    codes : Codes
    w : array
        The weight that was written.

    Notes
    -----
    The difference that is allowed is that of two roundings: to float32 by 2^-24 of the number or
    2^-150, and to the type of `w` by half a unit in its last place.
    """
    if w.shape != codes.shape:
        return f"its shape is {w.shape}, not {codes.shape}"
    stored, bits = stored_codes(source, codes), codes.scheme.bits
    if codes.rotate is not None:
        return check_unrotated(stored, scales_of(source, codes), codes.rotate, w)
    scales = source.read(codes.scales).astype(np.float64).reshape(codes.scale_shape)
    zeros = np.zeros(codes.scale_shape)
    if codes.zero_points is not None:
        points = source.read(codes.zero_points)
        if codes.scheme.packed_zeros:
            points = _fields(np.ascontiguousarray(points.T), bits)[:, : scales.shape[0]].T
        zeros[...] = points.reshape(codes.scale_shape)
    rows, columns = codes.shape
    for line in strips(rows, max(1, _CHECKED // max(1, columns))):
        down, heights = _repeats(line, codes.block[0])
        for part in strips(columns, _CHECKED):
            across, widths = _repeats(part, codes.block[1])
            factor, shift = (
                x[down, across].repeat(heights, axis=0).repeat(widths, axis=1)
                for x in (scales, zeros)
            )
            if codes.scheme.packed:  # the strips begin with a word
                words = stored[line, part.start * bits // WORD_BITS :]
                words = words[:, : -(-(part.stop - part.start) * bits // WORD_BITS)]
                q = _fields(words, bits)[:, : part.stop - part.start]
            else:
                q = stored[line, part].astype(np.float64)
            exact = (q - shift) * factor
            size = np.abs(exact)
            rounded = 2.0**-24 * size + 2.0**-150
            allowed = rounded + half_ulp(size + rounded, w.dtype.name)
            if not (np.abs(w[line, part].astype(np.float64) - exact) <= allowed).all():
                return "it is not (codes - zero points) * scales"
    return None


def _repeats(span: slice, block: int) -> tuple[slice, list[int]]:
    """Return the blocks that a span touches, and how much of the span lies in each."""
    first, end = span.start // block, -(-span.stop // block)
    return slice(first, end), [
        min(span.stop, (i + 1) * block) - max(span.start, i * block) for i in range(first, end)
    ]


def _fields(words: Array, bits: int) -> Array:
    """Return the codes in rows of int32 words as float64, the lowest bits first."""
    single = np.unpackbits(
        np.ascontiguousarray(words).astype("<i4").view(np.uint8), axis=1, bitorder="little"
    )
    fields = single.reshape(words.shape[0], words.shape[1] * (WORD_BITS // bits), bits)
    return fields @ 2.0 ** np.arange(bits) - 2.0 ** (bits - 1)
