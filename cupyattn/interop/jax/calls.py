"""Code that all calls from JAX share: traced arrays, mapped axes, and XLA's registry."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.compiler import target
from cupyattn.interop import xla_ffi
from cupyattn.runtime.recent import CALLS


def as_array(name: str, x: Any) -> jax.Array:
    """Return a JAX array of numbers, traced or not; raise TypeError for other objects."""
    if x is None:
        raise TypeError(f"{name} must be a JAX array, got None")
    try:
        array = jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{name} must be a JAX array, got {type(x).__name__}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must be an array of numbers, got {array.dtype}")
    return array


def check_backend(backend: str | None) -> None:
    """Raise for a backend that cannot run a call, on any platform of JAX.

    Parameters
    ----------
    backend : {"cuda", "mirror", "interpret"} or None

    Raises
    ------
    ValueError
        As `cupyattn.compiler.target.choose`.
    """
    try:
        jax.devices("cuda")
    except RuntimeError:  # without such a device, arrays are NumPy arrays
        target.choose(backend, False)
    else:
        target.check_backend(backend)


def check_once(
    facts: tuple[Any, ...], operands: Mapping[str, Any], check: Callable[[dict[str, Any]], object]
) -> None:
    """Check a call by shapes and types, unless an equal call has passed before.

    The call is resolved later, when it runs with XLA's buffers on their device.

    Parameters
    ----------
    facts : tuple
        The function, and everything else that the check depends on, besides shapes and types.
        Numbers carry their types, because an equal number of another type may be refused.
    operands : mapping of str to jax.Array
        They may be traced.
    check : callable
        Called with descriptions of the operands; its exceptions propagate.
    """
    forms = tuple((name, x.shape, x.dtype) for name, x in operands.items())
    key, passed = CALLS.find(facts, forms)
    if passed is None:
        check({n: Described.contiguous(n, x.shape, x.dtype) for n, x in operands.items()})
        if key is not None:
            CALLS.remember(key, True)


def each_entry(
    operands: Mapping[str, Any], results: Sequence[Any], front: int
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield the operands and results of every entry of the leading axes that `jax.vmap` added.

    Parameters
    ----------
    operands : mapping of str to array
        They have `front` more axes than the call; an axis has length 1 if the operand is not
        mapped.
    results : sequence of array
    front : int
    """
    for entry in np.ndindex(results[0].shape[:front]):
        one = {
            name: x[tuple(i if n > 1 else 0 for i, n in zip(entry, x.shape, strict=False))]
            for name, x in operands.items()
        }
        yield one, [x[entry] for x in results]


def register(name: str, target: xla_ffi.Target) -> None:
    """Register a foreign function for CPUs and CUDA devices."""
    version = xla_ffi.spoken_version(jax.ffi.include_dir())
    for platform, on_device in (("cpu", False), ("CUDA", True)):
        function = xla_ffi.handler(target, version, on_device=on_device)
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(function), platform=platform, api_version=1
        )


def foreign(name: str, results: Any) -> Callable[..., Any]:
    """Return a registered function as JAX calls it.

    Parameters
    ----------
    name : str
    results : jax.ShapeDtypeStruct or sequence of them
        Results that the function writes.
    """
    _finish_at_exit()
    function: Callable[..., Any] = jax.ffi.ffi_call(name, results, vmap_method="expand_dims")
    return function


@functools.cache
def _finish_at_exit() -> None:
    """Delay the end of Python until calls of XLA have ended, because their handlers are Python."""
    atexit.register(_finish)


def _finish() -> None:
    for backend in {jax.default_backend(), "cpu"}:
        arrays: list[jax.Array] = []
        with contextlib.suppress(RuntimeError):  # JAX has no such platform here
            arrays = jax.live_arrays(backend)
        for array in arrays:
            with contextlib.suppress(Exception):  # deleted, or of a call that failed
                array.block_until_ready()
    xla_ffi.wait_for_calls()
