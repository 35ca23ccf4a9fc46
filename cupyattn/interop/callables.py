"""Attention of any library, and its gradients, behind one call: its arrays, layout and arguments.

``cupyattn judge`` calls functions this way, and so do the scripts that it leaves.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import detached, on_host, take
from cupyattn.errors import UnsupportedError

#: Options of a call that a library may support, by cupyattn's names.
OPTIONS = ("scale", "causal", "causal_align", "window", "softcap", "mask", "bias", "sinks")
#: Options that are arrays.
_ARRAYS = ("mask", "bias", "sinks")


@dataclass(frozen=True)
class Library:
    """How to call a library's functions.

    Parameters
    ----------
    arrays : {"numpy", "cupy", "torch", "jax"}
    layout : {"BHSD", "BSHD"}
        Layout of q, k, v and O.
    names : mapping
        Names of its arguments, by the names in `OPTIONS`.
    dtypes : tuple of str
        Storage types that it accepts.
    causal_align : str
        Alignment of a causal mask, unless it takes that as an argument.
    """

    arrays: str
    layout: str
    names: Mapping[str, str]
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    causal_align: str = "bottom-right"


_OURS = {name: name for name in OPTIONS}
#: Libraries by the word that selects them.
LIBRARIES = {
    "numpy": Library("numpy", "BHSD", _OURS),
    "cupy": Library("cupy", "BHSD", _OURS),
    "torch": Library("torch", "BHSD", _OURS),
    "sdpa": Library(
        "torch", "BHSD",
        {"scale": "scale", "causal": "is_causal", "mask": "attn_mask", "bias": "attn_mask"},
        causal_align="top-left",
    ),
    "flash-attn": Library(
        "torch", "BSHD",
        {"scale": "softmax_scale", "causal": "causal", "window": "window_size",
         "softcap": "softcap"},
        dtypes=("float16", "bfloat16"),
    ),
    "jax": Library(
        "jax", "BSHD",
        {"scale": "scale", "causal": "is_causal", "mask": "mask", "bias": "bias"},
        causal_align="top-left",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Called:
    """A function, and how to call it.

    Parameters
    ----------
    function : callable
        Takes q, k, v, and options by name; returns O, or a tuple of O and lse, (batch, heads,
        len_q), the natural logarithm.
    library : str
        One of `LIBRARIES`.
    device : str
        "cpu" or "cuda", for torch.
    taken : tuple of str
        The options out of `OPTIONS` that it takes.
    """

    function: Callable[..., Any]
    library: str = "numpy"
    device: str = "cpu"
    taken: tuple[str, ...] = field(default=())

    def limited(self, options: Collection[str] | None) -> Called:
        """Return the same function restricted to these options; None allows all."""
        if options is None:
            return self
        return replace(self, taken=tuple(name for name in self.taken if name in options))

    def options(self, options: Mapping[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return a problem's options as arguments that this function takes.

        Parameters
        ----------
        options : mapping
            As `cupyattn.strategies.attention_inputs` draws them.
        dtype : dtype
            Type of q.
        """
        library = LIBRARIES[self.library]
        kept = {n: x for n, x in options.items() if n in self.taken and x is not None}
        kept.setdefault("causal_align", library.causal_align)
        if self.library == "sdpa":  # which has one argument for three options
            if kept.get("causal"):
                kept = {n: x for n, x in kept.items() if n not in ("mask", "bias")}
            if "bias" in kept:
                kept.pop("mask", None)
        for name in ("mask", "bias"):
            if name in kept and self.library in ("sdpa", "jax"):  # which take them in four axes
                x = kept[name]
                kept[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
        if "bias" in kept and self.library == "sdpa":  # which takes it in q's type
            with np.errstate(over="ignore"):
                kept["bias"] = kept["bias"].astype(dtype)
        return kept

    def arguments(self, options: Mapping[str, Any], grouped: bool) -> dict[str, Any]:
        """Return the keyword arguments of the call; torch's SDPA is told if heads are `grouped`."""
        names = LIBRARIES[self.library].names
        given = {
            names[name]: self._array(x) if name in _ARRAYS else x
            for name, x in options.items()
            if name in self.taken
        }
        if grouped and self.library == "sdpa":
            given["enable_gqa"] = True
        return given

    def __call__(
        self, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Call the function.

        Parameters
        ----------
        q, k, v : (batch, heads, len, head_dim) array
            NumPy.
        options : mapping
            As `options` returns them.

        Returns
        -------
        o : (batch, heads, len_q, head_dim) array
        lse : (batch, heads, len_q) array or None
            NumPy.
        """
        made = self._made([self._operand(x) for x in (q, k, v)], q, k, options)
        o, lse = made[:2] if isinstance(made, (tuple, list)) else (made, None)
        o, lse = (self._on_host(name, x) for name, x in (("o", o), ("lse", lse)))
        return self._turned(o), lse

    def gradients(
        self, d_out: Any, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of the function, by the autograd of torch or JAX.

        A function of NumPy's or CuPy's arrays returns them itself: it takes d_out before q, k and
        v, and returns dq, dk and dv.

        Parameters
        ----------
        d_out : (batch, heads, len_q, head_dim) array
            The gradient with respect to O, NumPy.
        q, k, v, options
            As for a call.

        Returns
        -------
        dq, dk, dv : arrays, shaped as q, k and v
            NumPy.

        Raises
        ------
        ValueError
            If a function of NumPy's or CuPy's arrays does not return three arrays.
        """
        grad, *operands = (self._operand(x) for x in (d_out, q, k, v))
        kind = LIBRARIES[self.library].arrays
        if kind == "torch":
            for x in operands:
                x.requires_grad_()
            made = self._made(operands, q, k, options)
            (made[0] if isinstance(made, (tuple, list)) else made).backward(grad)
            found = [x.grad for x in operands]
        elif kind == "jax":
            import jax

            def output(*arrays: Any) -> Any:
                made = self._made(arrays, q, k, options)
                return made[0] if isinstance(made, (tuple, list)) else made

            found = jax.vjp(output, *operands)[1](grad)
        else:
            found = self._made([grad, *operands], q, k, options)
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise ValueError(f"the function must return dq, dk and dv, got {type(found).__name__}")
        if any(one is None for one in found):
            raise ValueError("the output does not depend on all of q, k and v: one has no gradient")
        dq, dk, dv = (
            self._turned(self._on_host(name, x))
            for name, x in zip(("dq", "dk", "dv"), found, strict=True)
        )
        return dq, dk, dv

    def _made(self, operands: Sequence[Any], q: Any, k: Any, options: Mapping[str, Any]) -> Any:
        """Return what the function returns for arrays of its library."""
        return self.function(*operands, **self.arguments(options, q.shape[1] != k.shape[1]))

    def _turned(self, x: Any) -> Any:
        """Convert an array from layout BHSD to the library's layout, or back."""
        return np.swapaxes(x, 1, 2) if LIBRARIES[self.library].layout == "BSHD" else x

    def _operand(self, x: Any) -> Any:
        return self._array(self._turned(x))

    @staticmethod
    def _on_host(name: str, x: Any) -> Any:
        """Return a result as an array of NumPy, None as it is."""
        if x is None:
            return None
        x = detached(x)
        return on_host(take(name, x.cpu() if hasattr(x, "cpu") else x)[0])

    def _array(self, x: Any) -> Any:
        """Return a copy of an array of NumPy as one of the library."""
        kind = LIBRARIES[self.library].arrays
        x = np.array(x, order="C")
        if kind == "torch":
            import torch

            if x.dtype.name == "bfloat16":
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(self.device)
            return torch.from_numpy(x).to(self.device)
        if kind == "jax":
            import jax.numpy as jnp

            return jnp.asarray(x)
        if kind == "cupy":
            import cupy

            return cupy.asarray(x)
        return x


def called(text: str, library: str = "numpy", device: str = "cpu") -> Called:
    """Return ``MODULE:NAME`` or ``FILE.py:NAME`` as a function of a library.

    Parameters
    ----------
    text : str
    library : str
        One of `LIBRARIES`.
    device : {"cpu", "cuda"}

    Raises
    ------
    ValueError
        If there is no such function, or the library is not known.
    UnsupportedError
        If the library or the module cannot be imported, or the library's device is missing.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}, got {library!r}")
    kind = LIBRARIES[library].arrays
    try:
        importlib.import_module(kind)
        function: Any = _module(text)
    except ImportError as error:
        raise UnsupportedError(f"{text} as {library} cannot be imported: {error}") from error
    for part in text.rpartition(":")[2].split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ValueError(f"{text} is no function: give MODULE:NAME or FILE.py:NAME")
    made = Called(function, library, device, _taken(function, LIBRARIES[library]))
    try:
        made._array(np.zeros(1, np.float16))
    except Exception as error:  # each library has others
        raise UnsupportedError(
            f"{library} needs a device for its arrays, and this machine has none ({error}): take "
            "another library, or a device that the library sees"
        ) from error
    return made


def _module(text: str) -> ModuleType:
    """Import the module of ``MODULE:NAME``, which may be in the working directory."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"give MODULE:NAME or FILE.py:NAME, got {text!r}")
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and Triton look their module up there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"line {last.lineno} of {Path(last.filename).name} raised "
        raise ValueError(
            f"{place} cannot be imported: {'' if isinstance(error, SyntaxError) else where}"
            f"{type(error).__name__}: {error}"
        ) from error
    return module


def _taken(function: Callable[..., Any], library: Library) -> tuple[str, ...]:
    """Return the options that a function takes: all of its library if its signature hides them."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a built-in function
        return tuple(library.names)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tuple(library.names)
    return tuple(ours for ours, theirs in library.names.items() if theirs in parameters)
