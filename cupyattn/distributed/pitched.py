"""Arrays that are contiguous except along outer axes, as rows at a pitch for copy engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.distributed.group import Message

#: Most bytes from one row to the next (the device attribute ``maxPitch`` of all devices).
MAX_PITCH = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """The rows of one copy.

    Parameters
    ----------
    target, source : int
        Offsets in bytes from the start of each array.
    target_pitch, source_pitch : int
        Bytes from one row to the next.
    width, height : int
        Bytes of a row, and number of rows.
    """

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


def as_rows(
    shape: Sequence[int],
    itemsize: int,
    outer: int,
    target: Sequence[int],
    source: Sequence[int],
    max_pitch: int = MAX_PITCH,
) -> Iterator[Rows]:
    """Yield the copies that move one array to another: one, where strides allow it.

    Parameters
    ----------
    shape : sequence of int
    itemsize : int
        Bytes of an element.
    outer : int
        Number of leading axes that may have any strides; the rest of an array is contiguous.
    target, source : sequence of int
        Strides of the two arrays, in bytes.
    max_pitch : int
        Rows at a larger pitch are copied one by one.

    Examples
    --------
    >>> list(as_rows((2, 3, 8), 2, 2, (96, 32, 2), (48, 16, 2)))  # twice as far apart
    [Rows(target=0, target_pitch=32, source=0, source_pitch=16, width=16, height=6)]
    """
    width = itemsize * math.prod(shape[outer:])
    axes: list[tuple[int, int, int]] = []
    for extent, to, of in zip(shape[:outer], target, source, strict=False):
        if extent == 1:
            continue
        if axes and axes[-1][1:] == (extent * to, extent * of):
            axes[-1] = axes[-1][0] * extent, to, of
        else:
            axes.append((extent, to, of))
    if axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    height, to, of = axes.pop() if axes else (1, width, width)
    if max(to, of) > max_pitch:
        axes.append((height, to, of))
        height, to, of = 1, width, width
    for place in np.ndindex(*(extent for extent, _, _ in axes)):
        there, here = (
            sum(i * axis[which] for i, axis in zip(place, axes, strict=True)) for which in (1, 2)
        )
        yield Rows(there, to, here, of, width, height)


def copy(runtime: Any, target: Any, source: Any, outer: int, stream: Any) -> None:
    """Copy one CuPy array to another of its shape on a stream, each on any device.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    target, source : array
    outer : int
        As for `as_rows`.
    stream : cupy.cuda.Stream
    """
    to, of = target.data.ptr, source.data.ptr
    kind = runtime.memcpyDefault
    strides = target.strides, source.strides
    for rows in as_rows(target.shape, target.itemsize, outer, *strides):
        there, here = to + rows.target, of + rows.source
        if rows.height == 1:
            runtime.memcpyAsync(there, here, rows.width, kind, stream.ptr)
        else:
            pitches = rows.target_pitch, rows.source_pitch
            runtime.memcpy2DAsync(
                there, pitches[0], here, pitches[1], rows.width, rows.height, kind, stream.ptr
            )


def copy_all(cuda: Any, pairs: Iterable[tuple[Message, Message]]) -> None:
    """Copy arrays of the current device to other arrays on it, on the current stream.

    Parameters
    ----------
    cuda : module
        ``cupy.cuda``.
    pairs : iterable of (Message, Message)
        Where to, and where from.
    """
    for target, source in pairs:
        stream = cuda.get_current_stream()
        copy(cuda.runtime, target.array, source.array, target.outer, stream)
