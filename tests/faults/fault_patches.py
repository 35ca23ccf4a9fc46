"""Deliberate mistakes: read the files in tests/faults, and plant them in a copy.

A patch is a unified diff against ``kernels_cu`` after a few lines: what goes wrong, in one
sentence; ``caught-by: J2`` (the result leaves its bound) or ``caught-by: interpreter`` (a hazard
that a device shows only sometimes), in either case ``on`` what shows it where not every call does,
an option of `attention`, ``lengths``, ``far_apart`` or ``stacked`` (heads as the rows of one); for
the latter
``finding: KIND at CODE``, what the interpreter must report and the line of the source that it must
name; and the ``variants:`` in which it must be seen, ``fa_int8@pv8`` being a form of one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import KERNELS
from cupyattn.interpret import KernelFault
from cupyattn.interpret.findings import KINDS
from cupyattn.kernels import ladder
from experiments._harness import patches
from experiments._harness.patches import Hunk

FOLDER = Path(__file__).parent
#: Forms that mistakes are planted in, beside the portable one of every rung.
FORMS = ("fa_tc@sm90", "fa_tc@split", "fa_int8@pv8", "fa_int8@pv8_whole", "fa_int8@fused")


@dataclass(frozen=True)
class Fault:
    """One patch."""

    name: str
    sentence: str
    caught_by: str
    shown_by: str
    kind: str
    line: str
    variants: tuple[str, ...]
    hunks: tuple[Hunk, ...]

    @property
    def of_padded(self) -> bool:
        """Whether it is compiled for padded entries with lengths of their own alone."""
        return self.shown_by == "lengths"

    @property
    def of_packed(self) -> bool:
        """Whether it is compiled for packed sequences, and not for plain calls."""
        files = {hunk.file for hunk in self.hunks}
        return files == {"prims/io/varlen.cuh"} and not self.of_padded

    @property
    def of_zero_points(self) -> bool:
        """Whether it is compiled for codes with zero points alone."""
        return all("zero" in hunk.file for hunk in self.hunks)

    def plant(self, folder: Path) -> Path:
        """Copy the kernels to `folder` with this mistake in them; return the copy.

        Raises
        ------
        LookupError
            If the lines to change are not there exactly once: the sources have moved on.
        """
        copy = Path(shutil.copytree(KERNELS, folder / self.name))
        patches.apply(self.name, self.hunks, copy)
        return copy

    def check(self, folder: Path) -> None:
        """Assert that the patch has a description, changes three lines, and applies."""
        assert re.fullmatch(r"[A-Z][^.]+\.", self.sentence), "one sentence"
        assert self.caught_by in ("J2", "interpreter")
        assert (self.kind in KINDS and self.line != "") == (self.caught_by == "interpreter")
        for hunk in self.hunks:
            old, new = set(hunk.old.splitlines()), set(hunk.new.splitlines())
            assert max(len(old - new), len(new - old)) <= 3
        self.plant(folder)


def put_in_place(folder: Path, rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rung run from a copy of the kernels; ``"fa_tc@split"`` is a form of fa_tc."""
    variant, _, form = rung.partition("@")
    if form:
        monkeypatch.setattr(compiler, "KERNELS", folder)
        return
    source = folder / f"attn_{variant}.cu"
    wrong = replace(ladder.VARIANTS[variant], source=source)
    monkeypatch.setitem(ladder.VARIANTS, variant, wrong)


def check_found(run: Callable[[], bool], finding: str) -> None:
    """Assert that a mistake is found: a hazard, or "": `run` returns that the result is wrong."""
    if finding:
        with pytest.raises(KernelFault, match=finding):
            run()
    else:
        assert run()


def put_a_line_in_place(
    source: str, line: str, instead: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the kernels be compiled from a copy whose `source` has something else for a line."""
    copy = Path(shutil.copytree(KERNELS, folder / "kernels")) / source
    assert copy.read_text().count(line) == 1, "the source has moved on"
    copy.write_text(copy.read_text().replace(line, instead))
    monkeypatch.setattr(compiler, "KERNELS", folder / "kernels")


def parse(path: Path) -> Fault:
    """Read one patch."""
    sentence, caught_by, *rest = path.read_text().splitlines(keepends=True)
    by, _, shown_by = _value("caught-by", caught_by, path).partition(" on ")
    finding = _value("finding", rest.pop(0), path) if by == "interpreter" else ""
    variants, *diff = rest
    return Fault(
        path.stem,
        sentence.strip(),
        by,
        shown_by,
        *finding.partition(" at ")[::2],
        tuple(_value("variants", variants, path).split()),
        patches.hunks_of(diff),
    )


def _value(key: str, line: str, path: Path) -> str:
    match = re.fullmatch(rf"{key}: (.+)\n", line)
    if match is None:
        raise ValueError(f"{path.name} must say '{key}: ...', got {line!r}")
    return match[1]


FAULTS = [parse(path) for path in sorted(FOLDER.glob("*.patch"))]
