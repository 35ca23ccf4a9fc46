"""Target of coverage-guided fuzzing, which reads bytes as the header of a file.

``python -m tests.checkpoints.fuzz_header CORPUS -max_total_time=600`` runs it alone; it needs
atheris.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["cupyattn.checkpoints.header"]):
    from cupyattn.checkpoints.header import DTYPES, encode_header, parse_header

#: Bytes in front of a header that say how long the file is.
SIZE_BYTES = 2


def one(data: bytes) -> None:
    """Parse a header.

    Exceptions other than a ValueError with the file's name are findings. So are accepted headers
    whose tensors do not fill the file, or that change when they are written again.
    """
    size, text = int.from_bytes(data[:SIZE_BYTES], "little"), data[SIZE_BYTES:]
    try:
        found = parse_header(text, 8 + len(text) + size, "some file")
    except ValueError as error:
        assert "some file" in str(error), error
        return
    assert sum(info.nbytes for info in found.tensors.values()) == size
    assert all(info.dtype in DTYPES for info in found.tensors.values())
    start, placed = encode_header(found.tensors, found.metadata)
    again = parse_header(start[8:], len(start) + size, "some file")
    assert again.tensors == placed and again.metadata == found.metadata
    assert set(placed) == set(found.tensors)


def main() -> None:
    """Fuzz until a finding or a limit of the command line."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
