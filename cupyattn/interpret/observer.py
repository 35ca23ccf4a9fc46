"""Observers of running kernels: their methods, and the context in which they are called.

>>> import numpy as np, cupyattn as ca
>>> from cupyattn import interpret
>>> q = np.ones((1, 1, 16, 16), np.float16)
>>> profile = interpret.Profile()
>>> with interpret.observe(profile):
...     o = ca.attention(q, q, q, variant="fa_tc", backend="interpret")
>>> profile.kernels["attn_fa_tc"].blocks
1

Without an observer there is no cost: the machine checks once for each segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from cupyattn.interpret.findings import Finding

if TYPE_CHECKING:
    from cupyattn.compiler.modules import ModuleSpec
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.program import Program


class Started(Protocol):
    """The description of a launch for observers, such as `cupyattn.plans.records.Launch`."""

    @property
    def entry(self) -> str:
        """Name of the kernel."""

    @property
    def grid(self) -> int:
        """Blocks of the launch."""

    @property
    def block(self) -> int:
        """Threads of each block."""

    @property
    def module(self) -> ModuleSpec | None:
        """The source file and its macros, None for a text or PTX."""


class Observer:
    """Receives events of the interpreter. Subclasses define the methods that they need."""

    def start(self) -> None:
        """Called when `observe` begins; raises if the observer's arguments are invalid."""

    def launch(self, one: Started, program: Program, arch: str) -> None:
        """Called before a kernel is launched."""

    def before(self, machine: Machine, lanes: Lanes) -> None:
        """Called before lanes run the instruction at ``machine.place``."""

    def after(self, machine: Machine, lanes: Lanes) -> None:
        """Called after lanes ran that instruction."""

    def batch(self, machine: Machine) -> None:
        """Called when the blocks of a machine have ended, or a finding has stopped them."""

    def finding(self, finding: Finding) -> None:
        """Called with a hazard, before it is raised."""

    def finish(self) -> None:
        """Called when `observe` ends without an exception."""

    def close(self) -> None:
        """Called last when `observe` ends, even after an exception."""


_ACTIVE: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


def active() -> tuple[Observer, ...]:
    """Return the observers of this thread's current calls."""
    return _ACTIVE.get()


@contextlib.contextmanager
def observe(*observers: Observer) -> Iterator[None]:
    """Let observers watch every kernel that this thread interprets within the ``with`` block.

    Parameters
    ----------
    *observers : Observer
        `Profile`, `Trace`, `Break`, or your subclass. Observers of an outer block stay active.

    Raises
    ------
    ValueError
        At the end, if a `Break` names a line without instructions in any kernel.
    OSError
        At the start, if a `Trace` cannot write its file.
    """
    with contextlib.ExitStack() as stack:
        for observer in observers:
            observer.start()
            stack.callback(observer.close)
        token = _ACTIVE.set((*active(), *observers))
        stack.callback(_ACTIVE.reset, token)
        yield
        for observer in observers:
            observer.finish()
