"""Faults of a size that is given, planted in copies of the kernels' sources."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from cupyattn.compiler import modules as compiler
from experiments._harness import patches


@dataclass(frozen=True)
class Patch:
    """A fault that is planted in kernels: ``SIZE`` in its lines is the size.

    `kind` is that of the fault in `FAULTS` that it makes.
    """

    name: str
    sentence: str
    kind: str
    forms: tuple[str, ...]
    hunks: tuple[patches.Hunk, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Read a file: a sentence, ``kind: NAME``, ``forms: NAME, NAME`` and a unified diff."""
        sentence, kind, forms, *diff = path.read_text(encoding="utf-8").splitlines(keepends=True)
        names = tuple(forms.removeprefix("forms:").strip().split(", "))
        kind = kind.removeprefix("kind:").strip()
        return cls(path.stem, sentence.strip(), kind, names, patches.hunks_of(diff))

    @contextmanager
    def plant(self, size: float) -> Iterator[None]:
        """Let kernels be compiled from a copy of the sources with this fault."""
        sized = [replace(h, new=h.new.replace("SIZE", f"{size:.9e}f")) for h in self.hunks]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(compiler.KERNELS, Path(folder) / "kernels"))
            patches.apply(self.name, sized, copy)
            # What was loaded, and calls that are remembered, are of the sources as they are.
            compiler.cache_clear(disk=False)
            try:
                with mock.patch.object(compiler, "KERNELS", copy):
                    yield
            finally:
                compiler.cache_clear(disk=False)
