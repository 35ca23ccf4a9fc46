"""Compilations begun before a launch asks for them, side by side: each takes NVRTC a second."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cupyattn.compiler.modules import Binary, ModuleSpec, build

#: Compilations at a time.
THREADS = 4


def begin(jobs: Iterable[tuple[ModuleSpec, str]]) -> None:
    """Start to compile sources, and return; a thread that needs a module waits for the rest.

    Parameters
    ----------
    jobs : iterable of (ModuleSpec, str)
        Sources, each with the architecture.

    Notes
    -----
    What does not compile is told by the call that needs it. The interpreter ends when all that was
    begun is compiled. A process that forks waits for what is under way, and drops the rest: a child
    would find the locks of the compiler taken by threads that it does not have.
    """
    global _pool
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and takes no more work
        for spec, arch in jobs:
            if _pool is None:
                _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="cupyattn-compile")
            _begun.append(_pool.submit(build, spec, arch))
    _begun[:] = [one for one in _begun if not one.done()]


_pool: ThreadPoolExecutor | None = None
_begun: list[Future[Binary]] = []


def _before_fork() -> None:
    wait([one for one in _begun if not one.cancel()])


def _in_child() -> None:
    global _pool
    _pool = None  # whose threads are the parent's
    _begun.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
