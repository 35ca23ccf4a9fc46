"""Reports of the interpreter: a hazard with its place and its cause."""

from __future__ import annotations

from dataclasses import dataclass

from cupyattn.interpret.ptx import Location

#: Kinds of findings, each with its meaning.
KINDS = {
    "out of bounds": "an access outside the array, parameter or shared storage it aims at",
    "misaligned": "an address that is no multiple of the width of its access",
    "read-only": "a write to an operand that the kernel must not change",
    "never written": "a read of memory or of a register that nothing has written",
    "in flight": "an access to what an asynchronous copy or matrix product is still at work on",
    "race": "two threads touch one word, one of them writes, and nothing orders them",
    "invalid operand": "a barrier, count of threads or registers, or divisor that is not allowed",
    "divergence": "a warp instruction that not all the lanes it names execute together",
    "deadlock": "lanes that wait for others which never come",
    "no end": "a launch that goes on past the limit of steps",
    "trap": "the kernel stopped itself",
}


@dataclass(frozen=True)
class Finding:
    """One hazard.

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    message : str
        What happened, with the values.
    kernel : str
        Entry point.
    location : Location or None
        Source line, and the lines into which it was inlined.
    block, warp, lane : int
        The first of the `lanes` that caused it.
    lanes : int
        Number of lanes that did the same in that instruction.
    address : int or None
        Offset in bytes from the start of the array that `message` names.
    instruction : str
        PTX text.
    """

    kind: str
    message: str
    kernel: str
    location: Location | None
    block: int
    warp: int
    lane: int
    lanes: int = 1
    address: int | None = None
    instruction: str = ""

    def __str__(self) -> str:
        others = f" and {self.lanes - 1} more lanes" if self.lanes > 1 else ""
        where = "at an unknown line" if self.location is None else f"at {describe(self.location)}"
        address = "" if self.address is None else f", byte {self.address}"
        return (
            f"{self.kind}: {self.message} ({self.kernel} {where}, block {self.block}, "
            f"warp {self.warp}, lane {self.lane}{others}{address}): {self.instruction}"
        )


def describe(location: Location) -> str:
    """Return a location on one line: ``attn_fa.cu:51, in prims/io/tile_io.cuh:40``."""
    *inner, outer = (f"{short(x.file)}:{x.line}" for x in location.chain())
    return ", in ".join([outer, *reversed(inner)])


def short(file: str) -> str:
    """Return the part of a path that tells kernel sources apart.

    Examples
    --------
    >>> short("/a/kernels_cu/prims/io/tile_io.cuh"), short("/a/kernels_cu/attn_fa.cu")
    ('prims/io/tile_io.cuh', 'attn_fa.cu')
    """
    *folders, name = file.replace("\\", "/").split("/")
    known = [i for i, folder in enumerate(folders) if folder in ("prims", "sm90", "split")]
    return "/".join([*folders[known[-1] :], name]) if known else name


class KernelFault(RuntimeError):
    """The interpreter found a hazard; ``.finding`` describes it and its place."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding
