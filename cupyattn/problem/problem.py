"""A call that was checked and settled: what plans, kernels and mirror are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cupyattn.arrays.interchange import as_it_is


class Result(NamedTuple):
    """An array that a call makes, contiguous, and what is in it before: None for anything."""

    shape: tuple[int, ...]
    dtype: Any
    fill: Any = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, settled.

    Parameters
    ----------
    what : str
        Who needs memory, for the message where it cannot be had.
    backend : {"cuda", "interpret", "mirror"}
        Where it runs.
    arch : str, optional
        Architecture to compile for; the device's own when None.
    operands : mapping of str to array
        What is read, by the buffers of the plan, in its layout; all on one device.
    results : mapping of str to Result
        What is made, by the buffers of the plan, in the caller's layout.
    received : mapping of str to array
        What the caller gives to be written to, by the buffers of the plan, in its layout.
    kept : mapping of str to array
        What every call with these settings reads beside operands, by the buffers of the plan.
    as_given : callable
        Turns a result into the kind of array that the caller's operands are.
    facts : object
        What `restore` of the operation wants to know; no arrays of the caller's.
    settled : object
        What the operation's `plan` and `mirror` want to know.
    """

    what: str
    backend: str
    arch: str | None = None
    operands: Mapping[str, Any]
    results: Mapping[str, Result]
    received: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    as_given: Callable[[Any], Any] = as_it_is
    facts: Any = None
    settled: Any = None

    @property
    def like(self) -> Any:
        """An array that lies where the call runs."""
        return next(iter(self.operands.values()))

    @property
    def long_run(self) -> str:
        """What a call says before it runs in the interpreter for long; "" if it need not."""
        return ""

    def needs_none_fused(self, work: Any) -> bool:
        """Whether a form of the rung would need none of the scratch memory of its work."""
        return False
