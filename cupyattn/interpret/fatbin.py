"""Read the PTX in a fatbin written by ``nvcc -fatbin``.

A fatbin is a header of 16 bytes and entries, each with a header. Entries are PTX text, possibly
compressed with LZ4 or Zstandard, or machine code. The layout is the one of CUDA 11 to 13.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

_MAGIC = b"\x50\xed\x55\xba"
_ELF = b"\x7fELF"
_PTX = 1  # kind of an entry
_LZ4, _ZSTD = 0x2000, 0x8000  # flags of an entry
#: Refusal of a cubin.
NO_CUBIN = (
    "a cubin holds machine code, and the interpreter reads PTX: pass the source, or a fatbin that "
    "nvcc made with -gencode arch=compute_80,code=compute_80"
)


def is_binary(data: bytes) -> bool:
    """Return whether bytes are a fatbin or a cubin rather than text."""
    return data.startswith((_MAGIC, _ELF))


def embedded_ptx(data: bytes) -> str:
    """Return the PTX text for the highest architecture in a fatbin.

    Parameters
    ----------
    data : bytes
        The file's contents.

    Raises
    ------
    ValueError
        For a cubin, a fatbin without PTX, or a compression that cannot be undone here.
    """
    if data.startswith(_ELF):
        raise ValueError(NO_CUBIN)
    try:
        _, header, size = struct.unpack_from("<HHQ", data, 4)
        texts = _texts(data, header, min(header + size, len(data)))
    except (struct.error, IndexError):
        raise ValueError("the fatbin is truncated: make it again") from None
    if not texts:
        raise ValueError(
            "the fatbin holds machine code alone, and the interpreter reads PTX: add "
            "-gencode arch=compute_80,code=compute_80 to nvcc"
        )
    return max(texts.items())[1]


def _texts(data: bytes, offset: int, end: int) -> dict[int, str]:
    """Return the PTX texts by architecture."""
    found = {}
    while offset < end:
        kind, _, header, padded, packed = struct.unpack_from("<HHIQI", data, offset)
        arch, _, _, flags, _, size = struct.unpack_from("<IIIQQQ", data, offset + 28)
        if kind == _PTX:
            start = offset + header
            text = data[start : start + (packed or padded)]
            if flags & _ZSTD:
                text = _from_zstd(text, size)
            elif flags & _LZ4:
                text = _from_lz4(text)
            found[arch] = text.rstrip(b"\0").decode()
        offset += header + padded
    return found


def _from_zstd(packed: bytes, size: int) -> bytes:
    """Decompress with Python's module (3.14 and later) or the package zstandard."""
    for module, name in (("compression.zstd", "decompress"), ("zstandard", "decompress")):
        try:
            decompress: Any = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        text: bytes = decompress(packed)
        return text[:size]
    raise ValueError(
        "the PTX of the fatbin is compressed with Zstandard, which this Python does not read: "
        "pass --no-compress to nvcc, or install the package zstandard"
    )


def _from_lz4(packed: bytes) -> bytes:
    """Decompress a block of LZ4.

    Examples
    --------
    >>> _from_lz4(bytes([0x34, *b"abc", 3, 0, 0x10, *b"!"]))
    b'abcabcabcab!'
    """
    out = bytearray()
    at = 0
    while at < len(packed):
        token = packed[at]
        count, at = _length(packed, at + 1, token >> 4)
        out += packed[at : at + count]
        at += count
        if at >= len(packed):
            break
        distance = packed[at] | packed[at + 1] << 8
        count, at = _length(packed, at + 2, token & 15)
        start = len(out) - distance
        if distance == 0 or start < 0:
            raise IndexError("a distance before the start")
        for index in range(start, start + count + 4):
            out.append(out[index])
    return bytes(out)


def _length(packed: bytes, at: int, count: int) -> tuple[int, int]:
    """Return a length of LZ4, whose low bits are `count`, and the offset of the next byte."""
    if count == 15:
        while packed[at] == 255:
            count, at = count + 255, at + 1
        count, at = count + packed[at], at + 1
    return count, at
