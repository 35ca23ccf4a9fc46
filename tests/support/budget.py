"""A quick test costs little: one that takes too much CPU time fails, by its name.

The clock counts CPU seconds of this process and of the children that it waited for, so that other
work on the machine hardly matters. Compiling kernels does not count: a cache keeps them. One-time
work of a process (importing a framework, fixtures of a module) does not count either: `make test`
runs a test that fails with `OverBudget` twice more before it is reported.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from cupyattn.compiler.nvrtc import Nvrtc

#: CPU seconds that a quick test should take at most.
BUDGET = 1.0
#: CPU seconds beyond which it fails: hosts differ.
LIMIT = 2.0


class OverBudget(Exception):
    """A test took more CPU time than a quick one may."""


class Budget:
    """The pytest plugin.

    Parameters
    ----------
    limit : float
        CPU seconds beyond which a test fails.
    """

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self._compile = Nvrtc.compile
        self._compiling = 0.0
        self._lock = threading.Lock()
        self._start = 0.0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Begin to tell compiling apart."""
        Nvrtc.compile = self._apart(self._compile)  # type: ignore[method-assign]
        # NOTE: pytest-rerunfailures asks its server twice for each test of a worker. A second small
        # packet waits 40 ms for the first to be acknowledged, a third of the whole run.
        connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pytest_sessionfinish(self) -> None:
        """Put the compiler back."""
        Nvrtc.compile = self._compile  # type: ignore[method-assign]

    def _apart(self, compile_source: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Nvrtc.compile`, which several threads may call, so that its time does not count."""

        @functools.wraps(compile_source)
        def compile_apart(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return compile_source(*arguments, **options)
            finally:
                with self._lock:
                    self._compiling += time.thread_time() - start

        return compile_apart

    def _seconds(self) -> float:
        """Return the CPU seconds so far, compiling apart."""
        times = os.times()
        with self._lock:
            compiling = self._compiling
        return times.user + times.system + times.children_user + times.children_system - compiling

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        """Start the clock before the fixtures."""
        self._start = self._seconds()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Stop it after the test."""
        yield
        taken = self._seconds() - self._start
        longer = {"slow", "gpu"} & {marker.name for marker in item.iter_markers()}
        if taken > self.limit and not longer:
            raise OverBudget(
                f"{item.nodeid} took {taken:.1f} s of CPU, compiling apart; a quick test takes at "
                f"most {BUDGET:g} s and fails beyond {self.limit:g} s: make its input smaller, or "
                "mark it slow and keep a smaller one"
            )
