"""Images as PNG files, and many of them in a grid, with NumPy and zlib alone."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cupyattn.files import replacing

UInt8 = npt.NDArray[np.uint8]


def grid(images: UInt8, columns: int, gap: int = 2) -> UInt8:
    """Lay images out in rows, white between them.

    Parameters
    ----------
    images : array, uint8, (count, rows, columns, 3)
    columns : int
        Images in a row.
    gap : int
        Pixels between them.

    Returns
    -------
    array, uint8, (rows, columns, 3)

    Examples
    --------
    >>> sheet = grid(np.zeros((3, 2, 2, 3), np.uint8), 2, gap=1)
    >>> (sheet[:, :, 0] // 255).tolist()
    [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    """
    count, high, wide, _ = images.shape
    rows = -(-count // columns)
    shape = rows * (high + gap) - gap, columns * (wide + gap) - gap, 3
    sheet = np.full(shape, 255, np.uint8)
    for i, image in enumerate(images):
        top, left = (high + gap) * (i // columns), (wide + gap) * (i % columns)
        sheet[top : top + high, left : left + wide] = image
    return sheet


def write_png(path: Path, image: UInt8) -> None:
    """Write an image of three channels.

    Parameters
    ----------
    path : Path
    image : array, uint8, (rows, columns, 3)

    Notes
    -----
    Rows are stored as differences from the row above (filter 2), which compresses photographs.
    """
    rows, columns, _ = image.shape
    above = np.concatenate([np.zeros_like(image[:1]), image[:-1]])
    filtered = np.full((rows, 1 + 3 * columns), 2, np.uint8)
    filtered[:, 1:] = (image - above).reshape(rows, -1)
    header = struct.pack(">2I5B", columns, rows, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b"")
    with replacing(path) as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, content in chunks:
            check = zlib.crc32(name + content)
            file.write(struct.pack(">I", len(content)) + name + content + struct.pack(">I", check))
