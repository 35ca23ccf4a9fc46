"""Counterexamples: files with the inputs of an output outside its bound, to replay it."""

from __future__ import annotations

import functools
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host, take
from cupyattn.arrays.kinds import STORAGE
from cupyattn.files import read_npz, replacing
from cupyattn.kernels.numerics import Foreign, Numerics, Shifts
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask

#: Largest total size of kept arrays, in bytes.
MOST_BYTES = 2**28
#: Options of `judge` that are not stored.
_LEFT_OUT = ("quantized", "exact")
#: Errors that reading a damaged file raises. zipfile raises RuntimeError for unknown flag bits.
_DAMAGE = (
    ValueError, TypeError, EOFError, LookupError, AttributeError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
#: Entry with all values that are not arrays, as JSON.
_NOTES = "notes"


@dataclass(frozen=True, eq=False)
class Counterexample:
    """An output outside its bound, with all arguments of `judge`.

    ``judge(c.o, c.q, c.k, c.v, **c.options)`` judges it again.

    Parameters
    ----------
    o : array
        The output that was refused.
    q, k, v : array or None
    options : mapping
        Other arguments of `judge`, `seed` among them; `lse` and masks are NumPy arrays. Quantised
        operands are left out, as is `exact`.
    test : str
        The test that failed, as pytest names it.
    message : str
        Message of the judge.
    """

    o: Any
    q: Any
    k: Any
    v: Any
    options: Mapping[str, Any]
    test: str = ""
    message: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all.

        Raises
        ------
        ValueError
            If its arrays are larger than 256 MiB.
        OSError
            If the file cannot be written.
        """
        arrays: dict[str, Any] = {}
        notes = _encoded(vars(self), "", arrays)
        size = sum(int(array.nbytes) for array in arrays.values())
        if size > MOST_BYTES:
            raise ValueError(
                f"the counterexample must not exceed {MOST_BYTES} bytes, got {size}: draw smaller "
                "inputs, or call numpy.savez in the test"
            )
        arrays[_NOTES] = np.array(json.dumps(notes))
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)


def keep(
    o: Any, q: Any, k: Any, v: Any, options: Mapping[str, Any], *, test: str, message: str
) -> Counterexample:
    """Return a counterexample of a caller's arrays, copied to the host as they are now."""
    kept = {name: x for name, x in options.items() if name not in _LEFT_OUT}
    kept = {"seed": 0} | {name: _on_host(name, x) for name, x in kept.items()}
    arrays = {"o": o, "q": q, "k": k, "v": v}
    o, q, k, v = (_on_host(name, x) for name, x in arrays.items())
    return Counterexample(o, q, k, v, kept, test, message)


def load_counterexample(path: str | os.PathLike[str]) -> Counterexample:
    """Read a file that the pytest plugin wrote.

    Parameters
    ----------
    path : path

    Returns
    -------
    Counterexample
        With NumPy arrays.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If the file is not a counterexample.

    Examples
    --------
    >>> import tempfile
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Counterexample(0 * x, x, x, x, {"variant": "fa"}).save(f"{folder}/zeros.npz")
    ...     found = load_counterexample(f"{folder}/zeros.npz")
    >>> found.options, bool((found.q == x).all())
    ({'variant': 'fa'}, True)
    """
    try:
        arrays = read_npz(path)
        fields = _decoded(json.loads(str(arrays[_NOTES])), arrays)
        return Counterexample(**fields)
    except _DAMAGE as error:
        raise ValueError(
            f"{os.fspath(path)!r} must be a counterexample that cupyattn's pytest plugin wrote, "
            f"got another or a damaged file ({error})"
        ) from error


@functools.lru_cache(maxsize=1)
def replayed(path: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return q, k, v and the options of attention of a file, as `attention_inputs` draws them."""
    found = load_counterexample(path)
    drawn = ("scale", "causal", "causal_align", "window", "softcap", "mask", "bias", "block_mask",
             "sinks")  # fmt: skip
    default = {"scale": None, "causal": False, "causal_align": "bottom-right"}
    given = {name: x for name, x in found.options.items() if name in drawn and x is not None}
    return found.q, found.k, found.v, default | given


def _on_host(name: str, value: Any) -> Any:
    """Return arrays, also in a pair, as NumPy copies, and anything else unchanged."""
    if isinstance(value, tuple | list):
        return tuple(_on_host(name, x) for x in value)
    if isinstance(value, BlockMask):
        return BlockMask(np.array(on_host(value.mask)), value.block_q, value.block_kv)
    if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
        return np.array(on_host(take(name, value)[0]))
    return value


def _encoded(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Return a value as JSON. Its arrays go to `arrays`, and the JSON holds their names."""

    def inner(fields: Mapping[str, Any]) -> dict[str, Any]:
        prefix = f"{name}." if name else ""
        return {key: _encoded(x, f"{prefix}{key}", arrays) for key, x in fields.items()}

    if isinstance(value, np.ndarray):
        bits = value.view(np.uint16) if value.dtype == STORAGE["bfloat16"] else value
        arrays[name] = bits
        return {"array": name, "dtype": value.dtype.name}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(x, f"{name}.{i}", arrays) for i, x in enumerate(value)]}
    if isinstance(value, BlockMask):
        return {"BlockMask": inner(_block_mask(value))}
    if isinstance(value, Tiles | Numerics):
        return {type(value).__name__: inner(asdict(value))}
    if isinstance(value, Mapping):
        return {"fields": inner(value)}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _block_mask(mask: BlockMask) -> dict[str, Any]:
    return {"mask": mask.mask, "block_q": mask.block_q, "block_kv": mask.block_kv}


def _decoded(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Undo `_encoded`."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        return array.view(STORAGE["bfloat16"]) if value["dtype"] == "bfloat16" else array
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(x, arrays) for x in content)
    fields = {key: _decoded(x, arrays) for key, x in content.items()}
    if kind == "Numerics":
        parts = {"shifts": Shifts, "foreign": Foreign}
        made = {n: make(**fields[n]) for n, make in parts.items() if fields[n] is not None}
        return Numerics(**fields | made)
    return {"BlockMask": BlockMask, "Tiles": Tiles, "fields": dict}[kind](**fields)
