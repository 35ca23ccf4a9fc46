"""The exceptions that cupyattn raises beside ValueError and TypeError."""

from __future__ import annotations

from typing import Any


class UnsupportedError(NotImplementedError):
    """An unsupported request; the message names a replacement."""


class RenamedError(UnsupportedError, AttributeError):
    """A module has no such name; the message names its replacement."""


class RenamedImportError(UnsupportedError, ImportError):
    """The same where ``from module import name`` asks, whose own ImportError would say less."""


class KernelCompileError(RuntimeError):
    """NVRTC rejected a kernel; the message names source, options and the first error."""


class DeviceMemoryError(MemoryError):
    """Results and scratch memory of a call do not fit; the message says how much it needs."""


class KernelLaunchError(RuntimeError):
    """A kernel cannot be launched on this device; the message names the numbers and the way out."""


class RankError(RuntimeError):
    """A rank of a group ended, or asks for something else than the others; all ranks raise it.

    Parameters
    ----------
    rank : int
        Which one.
    cause : str
        Its failure, in words that follow ``"rank 3"``.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} {cause}")
        self.rank, self.cause = rank, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.cause), vars(self)  # notes are among them


def raised(error: BaseException, where: str = "") -> str:
    """Return the cause of a `RankError` that an exception of a rank is.

    Examples
    --------
    >>> raised(KeyError("a")), raised(KeyboardInterrupt(), " in attention")
    ("raised KeyError: 'a'", 'raised KeyboardInterrupt in attention')
    """
    try:
        said = str(error)
    except Exception as second:  # noqa: BLE001  an exception may fail to write itself
        said = f"(its text raises {type(second).__name__})"
    return f"raised {type(error).__name__}{where}" + (f": {said}" if said else "")


def shown(value: Any) -> str:
    """Return a caller's value for a message, in one line of 60 characters at most.

    An array is shown by its shape and dtype. Three dots mark a cut text.

    Examples
    --------
    >>> shown("a\\nb"), shown(range(3)), len(shown([0] * 100)), shown([0] * 100)[-4:]
    ("'a\\\\nb'", 'range(0, 3)', 60, ' ...')
    """
    if not isinstance(value, type) and getattr(value, "ndim", None) and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    try:
        text = repr(value)
    except ValueError:  # Python writes integers of at most 4300 digits
        return "a number of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:56]} ..."
