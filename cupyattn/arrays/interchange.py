"""Arrays of any library in, arrays of the same library out.

NumPy and CuPy arrays are used unchanged. Other arrays are imported and returned through DLPack,
without a copy. An array that kernels cannot read in place is copied (`operand`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described, aligned_copy
from cupyattn.arrays.kinds import STORAGE, check_kind
from cupyattn.arrays.memory import is_aligned

_DLPACK_CPU, _DLPACK_CUDA = 1, 2


def is_cupy(array: Any) -> bool:
    """Whether `array` is a CuPy array, decided without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def device_of(array: Any) -> int:
    """Return the number of the device that holds a CuPy array, -1 for the host."""
    return int(array.data.device_id) if is_cupy(array) else -1


def unchanged(result: Any) -> Any:
    """Return a result unchanged: it already has the kind of the operands."""
    return result


#: The caller's names of arrays that have another name in plans.
_CALLED = {
    "o": "out", "c": "out", "rope_cos": "cos", "rope_sin": "sin", "q_norm_weight": "q_weight",
    "k_norm_weight": "k_weight",
}  # fmt: skip


def imported(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return a caller's arrays, of any library, as NumPy or CuPy arrays, without a copy.

    Parameters
    ----------
    arrays : mapping of str to array
        Keys are the buffers of a plan. Descriptions are returned unchanged.

    Returns
    -------
    arrays : dict of str to array
    restore : callable
        The function that `take` returns for the first array.

    Raises
    ------
    TypeError
        As `take`.
    """
    found: dict[str, Any] = {}
    ways: list[Callable[[Any], Any]] = []
    for name, array in arrays.items():
        if isinstance(array, Described):
            found[name] = array
            ways.append(unchanged)
            continue
        called = _CALLED.get(name, name)
        own, way = (array, unchanged) if isinstance(array, np.generic) else _imported(called, array)
        if not is_cupy(own):
            check_kind(called, own)
        found[name] = np.asarray(own) if isinstance(own, np.generic) else own
        ways.append(way)
    return found, ways[0]


def take(
    name: str, array: Any, *, of_parameter: bool = False
) -> tuple[Any, Callable[[Any], Any]]:
    """Take a caller's array.

    Parameters
    ----------
    name : str
        The caller's name of it, for the message.
    array : array
        NumPy, CuPy, or anything with ``__dlpack__`` on a CPU or a CUDA device.
    of_parameter : bool
        Whether it may be a tensor that requires a gradient. Results require none.

    Returns
    -------
    array : numpy.ndarray or cupy.ndarray
        The same memory, or an aligned copy: see `operand`.
    restore : callable
        Converts a NumPy or CuPy result to the kind of array that was taken. If that library has no
        ``from_dlpack``, the result stays unchanged.

    Raises
    ------
    TypeError
        If it is no such array, or its values cannot be read.
    """
    if isinstance(array, np.generic):  # a NumPy scalar, which checks of shapes refuse
        return np.asarray(array), unchanged
    array, restore = _imported(name, detached(array) if of_parameter else array)
    return operand(name, array), restore


def detached(array: Any) -> Any:
    """Return an array; a torch parameter comes back detached from its gradient."""
    return array.detach() if getattr(array, "requires_grad", False) else array


def taken(**named: Any) -> tuple[Any, ...]:
    """Return arrays as `take` does, in the order given; None stays None."""
    return tuple(None if a is None else take(name, a)[0] for name, a in named.items())


def taken_arrays(**named: Any) -> tuple[Any, ...]:
    """Return arrays as `take` does, in the order given; other values stay unchanged."""
    return tuple(
        take(name, x)[0] if hasattr(x, "dtype") or hasattr(x, "__dlpack__") else x
        for name, x in named.items()
    )


def taken_pair(names: tuple[str, str], given: Any) -> Any:
    """Return a pair of arrays as `take` does; any other argument stays unchanged."""
    if not isinstance(given, (tuple, list)):
        return given
    return tuple(take(name, array)[0] for name, array in zip(names, given, strict=False))


def operand(name: str, array: Any) -> Any:
    """Return a NumPy or CuPy array that kernels can read: the array itself, or an aligned copy.

    Raises
    ------
    TypeError
        If it is an array of another kind, such as a masked array.
    """
    if type(array).__module__.partition(".")[0] != "cupy":
        check_kind(name, array)
    if isinstance(array, np.generic):
        return np.asarray(array)
    return array if is_aligned(array) else aligned_copy(array)


def operands(**named: Any) -> tuple[Any, ...]:
    """Return arrays as `operand` does, in the order given; None stays None."""
    return tuple(None if a is None else operand(name, a) for name, a in named.items())


#: Message for an array under jax.jit or jax.vmap.
_TRACED = (
    ", which JAX traces: calls of attention and Int8Linear in cupyattn.interop.jax may be traced, "
    "other functions are called outside of jax.jit"
)


def check_untransformed(name: str, array: Any) -> None:
    """Raise TypeError for a tensor within a transform of torch, which may have no memory."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(array):
        raise TypeError(
            f"{name} is a tensor within torch.func or vmap, which only functions of "
            "cupyattn.interop.torch support: call this function outside of the transform"
        )


def _imported(name: str, array: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a NumPy or CuPy array of the same memory, and the way back, as `take` does."""
    if isinstance(array, np.ndarray) or is_cupy(array):
        return array, unchanged
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        kind = type(array)
        traced = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
        listed = f": give numpy.array({name}, dtype)" if kind in (list, tuple) else ""
        raise TypeError(
            f"{name} must be a NumPy or CuPy array, or have __dlpack__, got {kind.__name__}"
            + (_TRACED if traced else listed)
        )
    check_untransformed(name, array)
    if str(getattr(array, "layout", "")).startswith("torch.sparse"):
        raise TypeError(f"{name} is sparse ({array.layout}): give {name}.to_dense()")
    if getattr(array, "requires_grad", False):
        raise TypeError(
            f"{name} requires a gradient, which functions on NumPy and CuPy arrays do not record: "
            f"call attention or a module of cupyattn.interop.torch, or give {name}.detach()"
        )
    try:
        device = int(array.__dlpack_device__()[0])
    except (ValueError, TypeError, LookupError) as error:  # torch raises it for its meta tensors
        raise TypeError(
            f"{name} must lie on a CPU or a CUDA device, got one on "
            f"{getattr(array, 'device', 'no known device')}"
        ) from error
    if device == _DLPACK_CUDA:
        import cupy

        return cupy.from_dlpack(array), _importer(array)
    if device == _DLPACK_CPU:
        try:
            return _read_on_host(array), _importer(array)
        except (RuntimeError, BufferError) as error:
            raise TypeError(
                f"{name} on a CPU must be a dense array of a type that NumPy's from_dlpack reads, "
                f"got {getattr(array, 'dtype', type(array).__name__)}: convert {name} to float16 "
                "or float32, or to a NumPy array with bfloat16 as ml_dtypes has it"
            ) from error
    raise TypeError(f"{name} must lie on a CPU or a CUDA device, got DLPack device type {device}")


def _read_on_host(array: Any) -> np.ndarray:
    """Return a CPU array as a NumPy array; bfloat16, which NumPy lacks, is exchanged as bits."""
    if str(getattr(array, "dtype", "")).endswith("bfloat16") and hasattr(array, "view"):
        bits = np.from_dlpack(array.view(_library_of(array).int16))
        return bits.view(STORAGE["bfloat16"])
    return np.from_dlpack(array)


def _library_of(array: Any) -> Any:
    """Return the module of the library that an array with DLPack belongs to."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    libraries = [sys.modules[k.__module__.partition(".")[0]] for k in type(array).__mro__]
    # A subclass from another package belongs to the library of its base class.
    return next((one for one in libraries if hasattr(one, "from_dlpack")), libraries[0])


def _importer(array: Any) -> Callable[[Any], Any]:
    """Return the ``from_dlpack`` of the library that an array belongs to."""
    library = _library_of(array)
    if not hasattr(library, "from_dlpack"):
        return unchanged
    # NOTE: records that contain this are pickled, and modules cannot be pickled.
    module = library.__name__ if isinstance(library, ModuleType) else library
    return functools.partial(_handed_over, module)


def _handed_over(module: Any, result: Any) -> Any:
    """Convert a result by the ``from_dlpack`` of a library, a module or its name."""
    library = module
    if isinstance(module, str):
        library = sys.modules.get(module) or importlib.import_module(module)
    if not isinstance(result, np.ndarray) or result.dtype.name != "bfloat16":
        return library.from_dlpack(result)
    bits = library.from_dlpack(result.view(np.int16))
    if not (hasattr(library, "bfloat16") and hasattr(bits, "view")):
        raise TypeError(
            "a bfloat16 result on a CPU has no way back by DLPack, which NumPy's bfloat16 lacks: "
            "ask for float16 or float32, or give NumPy arrays"
        )
    return bits.view(library.bfloat16)


def on_host(array: Any) -> np.ndarray:
    """Return a NumPy array of the same numbers: a copy of a CuPy array, or the array itself."""
    return np.asarray(array.get() if hasattr(array, "get") else array)
