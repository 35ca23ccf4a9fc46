"""A checked and settled call, as plans, kernels and the mirror receive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described, bound_to


class Result(NamedTuple):
    """A contiguous array that a call makes, and its first contents.

    They are None (undefined), a number, or the name of a buffer to copy."""

    shape: tuple[int, ...]
    dtype: Any
    fill: Any = None


class ValueCheck(NamedTuple):
    """A check of the values of arrays before a launch; it raises if it refuses them.

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
    """One settled call of an operation: all that follows from settings and forms, without arrays.

    Parameters
    ----------
    what : str
        Name of the operation, for the message if memory cannot be allocated.
    backend : {"cuda", "interpret", "mirror"}
        The backend that runs it.
    arch : str, optional
        Architecture to compile for; the device's own when None.
    operands : mapping of str to Described
        Arrays that are read, by the buffers of the plan, in its layout, all on one device. `bound`
        makes the views and copies of the caller's arrays.
    results : mapping of str to Result
        Arrays that are made, by the buffers of the plan, in the caller's layout.
    received : mapping of str to Described
        The caller's arrays that are written to, by the buffers of the plan, in its layout.
    looks : tuple of ValueCheck
        Checks of values before the launch. A call with such checks is not remembered.
    facts : object
        Facts for the operation's `restore`.
    settled : object
        The settled record for the operation's `plan` and `mirror`.
    """

    what: str
    backend: str
    arch: str | None = None
    operands: Mapping[str, Described] = field(hash=False)
    results: Mapping[str, Result] = field(hash=False)
    received: Mapping[str, Described] = field(default_factory=dict, hash=False)
    looks: tuple[ValueCheck, ...] = ()
    facts: Any = field(default=None, hash=False)
    settled: Any = field(default=None, hash=False)

    def bound(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays to read and write, by buffer, from the caller's arrays by name."""
        return bound_to({**self.operands, **self.received}, arrays)

    def look(self, arrays: Mapping[str, Any]) -> None:
        """Check the values of the caller's arrays; raise if the call does not accept them."""
        for one in self.looks:
            one.check(*(x.bound(arrays[x.name]) for x in one.arrays), *one.arguments)

    @property
    def copies(self) -> dict[str, Described]:
        """The operands that a call copies, by buffer."""
        return {buffer: x for buffer, x in self.operands.items() if x.is_copied}

    @property
    def like(self) -> str:
        """Name of one of the caller's arrays on the device of the call."""
        return next(iter(self.operands.values())).name

    @property
    def long_run(self) -> str:
        """The warning before a long run in the interpreter; "" if none is due."""
        return ""

    def fused_form_needs_no_scratch(self, work: Any) -> bool:
        """Whether another form of the rung would avoid the scratch memory of this form."""
        return False
