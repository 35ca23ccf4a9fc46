"""Where a call runs: kernels on a device or in the interpreter, or the mirror in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn import executor
from cupyattn.compile import HOPPER_CAPABILITY
from cupyattn.executor import Runnable
from cupyattn.rounding import array_namespace
from cupyattn.switches import is_on

BACKENDS = ("cuda", "mirror", "interpret")
#: Libraries by the backends that take their arrays.
_KIND = {"cuda": "CuPy", "mirror": "NumPy", "interpret": "NumPy"}


def choose(backend: str | None, array: Any) -> str:
    """Return the backend of a call.

    Parameters
    ----------
    backend : {"cuda", "mirror", "interpret"} or None
        What the caller asks for. None: ``cuda`` for CuPy arrays; for NumPy arrays ``mirror``, or
        ``interpret`` where the environment says ``CUPYATTN_INTERPRET=1``.
    array : numpy.ndarray or cupy.ndarray

    Raises
    ------
    ValueError
        For another name, or one that does not take arrays of that kind.
    """
    kind = array_namespace(array).__name__
    check_backend(backend)
    if backend is None:
        if kind == "cupy":
            return "cuda"
        return "interpret" if is_on("CUPYATTN_INTERPRET") else "mirror"
    if _KIND[backend].lower() != kind:
        raise ValueError(
            f"backend={backend!r} takes {_KIND[backend]} arrays, got "
            f"{'CuPy' if kind == 'cupy' else 'NumPy'} arrays"
        )
    return backend


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless there is a backend of that name, or None is named."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be 'cuda', 'mirror' or 'interpret', got {backend!r}")


def own_arch(backend: str, array: Any) -> str | None:
    """Return ``"sm_90a"`` where an array lies on a device that runs the Hopper forms, else None."""
    hopper = backend == "cuda" and int(array.device.compute_capability) == HOPPER_CAPABILITY
    return "sm_90a" if hopper else None


def run(backend: str, plan: Runnable, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan with `cupyattn.executor.run` or `cupyattn.interpret.run`, which say how.

    Parameters
    ----------
    backend : {"cuda", "interpret"}
    plan : Runnable
    buffers : mapping of str to array or None
    arch : str, optional
    """
    if backend == "cuda":
        executor.run(plan, buffers, arch)
    else:
        from cupyattn import interpret

        interpret.run(plan, buffers, arch)


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new arrays lie, and kernels run, where `array` lies."""
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = array.device
    return device


def as_input(array: Any) -> Any:
    """Return an operand as a kernel gets it: the interpreter holds it to reading alone."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
