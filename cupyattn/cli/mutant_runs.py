"""Run a command on mutants of a source file, each in a copy of its folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelCompileError
from cupyattn.interpret.own_kernels import compiled
from cupyattn.testing.mutations import Mutant, machine_code

#: Environment variable that names the mutant for the command.
MUTANT = "CUPYATTN_MUTANT"
#: Placeholder of the mutant's path in the command.
PLACE = "{}"
#: Results of a mutant.
NOT_COMPILED, SAME_CODE, NOTICED, SURVIVED = "does not compile", "same code", "noticed", "survived"
#: A source that no compiler accepts. If a command succeeds with it, the command reads another file.
UNUSABLE = "#error this is no kernel: does the command read the mutant?\n"
#: Characters of the command's last line that a record keeps.
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Ended:
    """The end of a command: its status (None if it ran too long), seconds, and last line."""

    status: int | None
    seconds: float
    last_line: str


@dataclass(frozen=True)
class Copy:
    """A copy of a source file in a separate folder, with links to all neighbours of the original.

    Parameters
    ----------
    path : Path
        Path of the copy. Each mutant overwrites it.
    defines : mapping of str to int
    arch : str
        Architecture for which machine code is compared.
    """

    path: Path
    defines: Mapping[str, int]
    arch: str

    def code(self, text: str) -> str | None:
        """Return a text's machine code as PTX without line numbers; None if it does not compile."""
        if self.path.suffix == ".ptx":
            return machine_code(text)
        self.path.write_text(text, encoding="utf-8")
        spec = ModuleSpec(self.path, tuple(self.defines.items()))
        try:
            return machine_code(compiled(spec, self.arch, text, compiler.translate).ptx)
        except KernelCompileError:
            return None

    def run(self, text: str, command: Sequence[str], timeout: float | None) -> Ended:
        """Run the command on a text."""
        self.path.write_text(text, encoding="utf-8")
        words = [word.replace(PLACE, str(self.path)) for word in command]
        start = time.monotonic()
        with subprocess.Popen(
            words, env={**os.environ, MUTANT: str(self.path)}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            status: int | None = None
            try:
                printed, _ = process.communicate(timeout=timeout)
                status = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with its children
                printed, _ = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        lines = [x for x in printed.decode(errors="replace").splitlines() if x.strip()]
        last = lines[-1].strip()[:MOST_CHARACTERS] if lines else ""
        return Ended(status, round(time.monotonic() - start, 2), last)


@contextlib.contextmanager
def copied(source: Path, defines: Mapping[str, int], arch: str) -> Iterator[Copy]:
    """Yield a copy of a source file that may be overwritten."""
    with tempfile.TemporaryDirectory(prefix="cupyattn-mutants-") as folder:
        for beside in source.resolve().parent.iterdir():
            if beside.name != source.name:
                Path(folder, beside.name).symlink_to(beside)
        yield Copy(Path(folder, source.name), defines, arch)


def tried(copy: Copy, mutant: Mutant, original: str | None, command: Sequence[str],
          timeout: float) -> dict[str, Any]:  # fmt: skip
    """Return the result of one mutant.

    Parameters
    ----------
    copy : Copy
    mutant : Mutant
    original : str or None
        Machine code of the source; If None, it is unknown, and every mutant runs.
    command, timeout
        As for `Copy.run`.
    """
    found: dict[str, Any] = {"line": mutant.line, "kind": mutant.kind}
    found |= {"before": mutant.before.strip(), "after": mutant.after.strip()}
    if original is not None:
        code = copy.code(mutant.text)
        if code is None or code == original:
            return {**found, "became": NOT_COMPILED if code is None else SAME_CODE}
    ended = copy.run(mutant.text, command, timeout)
    became = SURVIVED if ended.status == 0 else NOTICED
    why = f"stopped after {timeout:g} s" if ended.status is None else ended.last_line
    return {**found, "became": became, "status": ended.status, "seconds": ended.seconds, "why": why}


def lines_given(text: str) -> range:
    """Return the lines of ``"FIRST-LAST"``, or of one number."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ValueError(f"--lines takes FIRST-LAST, such as 20-40, got {text!r}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
