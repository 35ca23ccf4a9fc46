"""Compilations begun before a launch asks for them, side by side: each takes NVRTC a second."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cupyattn.compiler.modules import ModuleSpec, build

#: Compilations at a time.
THREADS = 4


def begin(jobs: Iterable[tuple[ModuleSpec, str]]) -> None:
    """Begin to compile sources, and return; whoever needs one waits for what is left of it.

    Parameters
    ----------
    jobs : iterable of (ModuleSpec, str)
        Sources, each with the architecture.

    Notes
    -----
    What does not compile is told by the call that needs it. At exit the interpreter waits for
    compilations that are under way.
    """
    for spec, arch in jobs:
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and takes no more work
            _pool(os.getpid()).submit(build, spec, arch)


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process: a child that was forked has none of its parent's."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="cupyattn-compile")
