"""A call that was checked and settled: what plans, kernels and mirror are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described, bound_to


class Result(NamedTuple):
    """An array that a call makes, contiguous, and what is in it before: None for anything, a
    number, or the buffer whose numbers it gets."""

    shape: tuple[int, ...]
    dtype: Any
    fill: Any = None


class Look(NamedTuple):
    """A look at the values of arrays, before a launch: what it refuses, it raises.

    Parameters
    ----------
    check : callable
        Takes the arrays and `arguments`.
    arrays : tuple of Described
    arguments : tuple
    """

    check: Callable[..., None]
    arrays: tuple[Described, ...]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, settled: what follows from settings and forms, with no array.

    Parameters
    ----------
    what : str
        Who needs memory, for the message where it cannot be had.
    backend : {"cuda", "interpret", "mirror"}
        Where it runs.
    arch : str, optional
        Architecture to compile for; the device's own when None.
    operands : mapping of str to Described
        What is read, by the buffers of the plan, in its layout; all on one device. Views and copies
        of the caller's arrays are made by `bound`.
    results : mapping of str to Result
        What is made, by the buffers of the plan, in the caller's layout.
    received : mapping of str to Described
        What the caller gives to be written to, by the buffers of the plan, in its layout.
    looks : tuple of Look
        What is looked at before the launch. A call that looks is not remembered.
    facts : object
        What `restore` of the operation wants to know.
    settled : object
        What the operation's `plan` and `mirror` want to know.
    """

    what: str
    backend: str
    arch: str | None = None
    operands: Mapping[str, Described] = field(hash=False)
    results: Mapping[str, Result] = field(hash=False)
    received: Mapping[str, Described] = field(default_factory=dict, hash=False)
    looks: tuple[Look, ...] = ()
    facts: Any = field(default=None, hash=False)
    settled: Any = field(default=None, hash=False)

    def bound(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is read and written to, by buffer, of the caller's arrays by name."""
        return bound_to({**self.operands, **self.received}, arrays)

    def look(self, arrays: Mapping[str, Any]) -> None:
        """Look at the values of the caller's arrays; raise for what the call does not take."""
        for one in self.looks:
            one.check(*(x.bound(arrays[x.name]) for x in one.arrays), *one.arguments)

    @property
    def copies(self) -> dict[str, Described]:
        """The operands that a call copies, by buffer."""
        return {buffer: x for buffer, x in self.operands.items() if x.is_copied}

    @property
    def like(self) -> str:
        """The name of a caller's array that lies where the call runs."""
        return next(iter(self.operands.values())).name

    @property
    def long_run(self) -> str:
        """What a call says before it runs in the interpreter for long; "" if it need not."""
        return ""

    def needs_none_fused(self, work: Any) -> bool:
        """Whether a form of the rung would need none of the scratch memory of its work."""
        return False
