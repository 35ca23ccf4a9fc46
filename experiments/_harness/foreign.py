"""Kernels of other people in the interpreter: their launches, and how far off results are."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn import interpret
from cupyattn.interpret.program import entry_points
from cupyattn.interpret.ptx import parse

#: Unit roundoff of types, and twice that of float32 for a tensor core that cuts sums off.
HALF, BF16, SINGLE, CUT = 2.0**-11, 2.0**-8, 2.0**-24, 2.0**-22
#: Largest relative errors of ``ex2.approx.ftz.f32``, ``rcp``, ``sqrt``, ``rsqrt`` and ``div.full``.
APPROXIMATE = 2.0**-22
#: Subnormal results that are flushed, and the smallest steps of 16-bit numbers.
TINY, HALF_STEP = 2.0**-126, 2.0**-25
LOG2_E = float(np.log2(np.e))
Floats = npt.NDArray[Any]


class Missing(Exception):
    """A package or a checkout that a kernel needs and that is not there."""


@dataclass
class Sources:
    """The folders of checkouts that the command line names, by repository."""

    folders: Mapping[str, Path | None]

    def path(self, repository: str, *parts: str) -> Path:
        """Return the path of a file of a checkout."""
        folder = self.folders.get(repository)
        if folder is None:
            raise Missing(f"no checkout of {repository} is given")
        path = folder.joinpath(*parts)
        if not path.exists():
            raise Missing(f"{path} does not exist")
        return path

    def version(self, repository: str) -> str:
        """Return the origin's name and the revision of a checkout."""
        folder = self.path(repository)
        asked = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
        return found.stdout.strip() or "no repository"


@dataclass
class Launcher:
    """Launches kernels one after the other, and counts.

    Parameters
    ----------
    sources : Sources
    keep : Path or None
        A folder for the PTX.
    """

    sources: Sources
    keep: Path | None = None
    name: str = ""
    digest: Any = field(default_factory=hashlib.sha256)
    instructions: int = 0
    seconds: float = 0.0
    launches: int = 0
    findings: list[str] = field(default_factory=list)
    #: Findings that are noted, and then mended so that the rest runs: a part of the message, a
    #: regular expression, and what replaces it.
    mends: Sequence[tuple[str, str, str]] = ()

    def __call__(
        self,
        ptx: str,
        entry: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Mapping[str, Any],
        shared_bytes: int = 0,
        cluster: int | None = None,
    ) -> None:
        """Run a kernel once. Pointers to scratch memory behind the arguments are null."""
        self.digest.update(code_of(ptx).encode())
        if self.keep is not None:
            (self.keep / f"{self.name}.{self.launches}.ptx").write_text(ptx)
        self.launches += 1
        entry = entry or entry_points(ptx)[0]
        (full,) = [name for name in entry_points(ptx) if entry in name][:1]
        count = len(parse(ptx).kernels[full].parameters)
        passed = {**args, **{f"scratch{i}": None for i in range(count - len(args))}}
        start = time.process_time()
        try:
            while not self._ran(ptx, full, grid, block, passed, shared_bytes, cluster):
                ptx = self._mended(ptx)
        finally:
            self.seconds += time.process_time() - start

    def _ran(
        self, ptx: str, entry: str, grid: Any, block: Any, args: Any, shared: int, cluster: Any
    ) -> bool:
        """Return whether a kernel ran to its end; after a finding that has a mend, False."""
        profile = interpret.Profile()
        try:
            with interpret.observe(profile):
                interpret.launch(
                    ptx, entry, grid, block, args, shared_bytes=shared, cluster=cluster
                )
        except interpret.KernelFault as fault:
            message = f"{fault.finding.kind}: {fault.finding.message}"
            if not any(pattern in message for pattern, _, _ in self.mends):
                raise
            self.findings.append(message)
            return False
        self.instructions += sum(sum(x.instructions.values()) for x in profile.kernels.values())
        return True

    def _mended(self, ptx: str) -> str:
        """Return PTX with the last finding mended."""
        for pattern, old, new in self.mends:
            if pattern in self.findings[-1]:
                changed = re.sub(old, new, ptx, flags=re.MULTILINE)
                assert changed != ptx, f"nothing is mended: {self.findings[-1]}"
                self.mends = [x for x in self.mends if x[0] != pattern]
                return changed
        raise AssertionError(self.findings[-1])


def code_of(ptx: str) -> str:
    """Return PTX without comments and without what names files, lines and processes.

    Examples
    --------
    >>> code_of('.file 1 "/a/b.py"\\n// made today\\n ret; // end\\n.loc 1 2 3')
    'ret;'
    """
    code = ptx.partition("\t.section")[0]
    own = r"\d+(_INTERNAL|_GLOBAL__N_)(_\d+_\d+_\w+?_cu)_[0-9a-f]{8}_\d+"  # names by NVRTC
    code = re.sub(own, r"\1\2", code)
    lines = (line.partition("//")[0].strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\.(file|loc)\b", line))


@dataclass(frozen=True)
class Case:
    """A kernel that no one here wrote.

    Parameters
    ----------
    name : str
    package : str
        A distribution of Python, or a repository in `Sources`.
    run : callable
        Makes the PTX, launches it, and returns the largest error as a share of its bound.
    """

    name: str
    package: str
    run: Callable[[Launcher, np.random.Generator], float]

    def version(self, sources: Sources) -> str:
        """Return the version of the package, or the revision of the checkout."""
        if self.package in sources.folders:
            return sources.version(self.package)
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise Missing(f"{self.package} is not installed") from None


def share(found: Floats, exact: Floats, bound: Floats | float) -> float:
    """Return the largest error of results as a share of their bounds."""
    error = np.abs(found.astype(np.float64) - exact)
    if not np.isfinite(error).all():
        return float("inf")
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.max(np.where(error == 0, 0.0, error / np.broadcast_to(bound, error.shape))))


def equal(found: Floats, exact: Floats) -> float:
    """Return 0 for equal arrays, and infinity for others."""
    return 0.0 if np.array_equal(found, exact) else float("inf")


@contextmanager
def importing(package: str) -> Iterator[None]:
    """Turn a missing module into `Missing`."""
    try:
        yield
    except ImportError as error:
        raise Missing(f"{package}: {error}") from None
