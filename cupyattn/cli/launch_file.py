"""Read the TOML file that describes the launch of a kernel in a file.

docs/YOUR_KERNEL.md lists its fields. Every error names the file and the field.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
import numpy.typing as npt

from cupyattn.interpret.own_kernels import TensorMap

#: Fields of the file, of an argument, and of the table [judge].
TOP = (
    "entry", "grid", "block", "cluster", "shared_bytes", "arch", "seed", "defines", "args", "judge",
)  # fmt: skip
ARRAY = ("name", "array", "dtype", "fill", "input", "box", "swizzle")
OF = ("name", "of", "box", "swizzle")
SCALAR = ("name", "scalar", "dtype")
NULL = ("name", "null")
TENSORS = ("o", "q", "k", "v", "lse", "sinks")
NUMERICS = (
    "p", "accumulate", "promote", "scores", "exponential", "order", "qk", "v_codes", "out", "tanh",
    "scaled_q",
)  # fmt: skip
OPTIONS = ("scale", "causal", "causal_align", "window", "softcap", "layout")
FILLS = ("normal", "uniform", "arange", "zeros", "ones", "nan")


@dataclass(frozen=True)
class LaunchFile:
    """The contents of a description.

    Parameters
    ----------
    entry : str
    grid, block : int or tuple of int
    args : dict of str
        Arguments by name, in order.
    settings : dict
        Keyword arguments of `cupyattn.interpret.launch`.
    arrays : dict of str to numpy.ndarray
        The arrays among the arguments.
    judged : dict of str or None
        The table ``[judge]``: names of arrays, words of the numerics, options of the call.
    """

    entry: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    args: dict[str, Any]
    settings: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    judged: dict[str, Any] | None


def read(path: Path) -> LaunchFile:
    """Read a description.

    Raises
    ------
    ValueError
        If it cannot be read, or naming the field that is wrong.
    """
    return _Reader(path, _parse(path)).read()


def _parse(path: Path) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):
        try:
            toml: Any = importlib.import_module(name)
        except ImportError:
            continue
        try:
            parsed: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"there is no {path}, which describes the launch: write it "
                "(`cupyattn docs your_kernel` has its fields), or name another with --launch"
            ) from None
        except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        return parsed
    raise ValueError(f"reading {path} takes Python 3.11, or the package tomli: install one of them")


class _Reader:
    """Reads one file; `_at` is the current field, for error messages."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path = path
        self._table = table
        self._at = ""
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def read(self) -> LaunchFile:
        table = self._table
        self._only(table, TOP)
        self._random = np.random.default_rng(self._whole(table, "seed", 0))
        given = self._field(table, "args", list, [])
        settings = {
            "cluster": self._whole(table, "cluster", None),
            "shared_bytes": self._whole(table, "shared_bytes", 0),
            "arch": self._field(table, "arch", str, None),
            "defines": self._field(table, "defines", dict, None),
        }
        entry = self._field(table, "entry", str)
        grid, block = self._extents("grid"), self._extents("block")
        args: dict[str, Any] = {}
        for index, one in enumerate(given):
            self._at = f"args[{index}]."
            if not isinstance(one, dict):
                self._fail("", "be a table, [[args]]", one)
            name = self._field(one, "name", str)
            self._at = f"args[{index}] ({name})."
            if name in args:
                self._fail("name", "be different from the names of other arguments", name)
            args[name] = self._argument(name, one)
        self._at = ""
        return LaunchFile(entry, grid, block, args, settings, self._arrays, self._judged())

    # ---- arguments -------------------------------------------------------------------------------

    def _argument(self, name: str, one: dict[str, Any]) -> Any:
        kinds = {"array": ARRAY, "of": OF, "scalar": SCALAR, "null": NULL}
        found = [kind for kind in kinds if kind in one]
        if len(found) != 1:
            self._fail("", "have one of array, of, scalar and null", " and ".join(found) or "none")
        self._only(one, kinds[found[0]])
        if "null" in one:
            return None
        if "scalar" in one:
            value = self._field(one, "scalar", (int, float))
            return self._converted("scalar", value, self._dtype(one))
        if "array" in one:
            array = self._arrays[name] = self._array(one)
        else:
            of = self._field(one, "of", str)
            if of not in self._arrays:
                self._fail("of", f"name an array before it ({self._listed()})", of)
            array = self._arrays[of]
        if "box" not in one:
            return array
        box = self._numbers(one, "box")
        try:
            return TensorMap(array, box, self._whole(one, "swizzle", 128))
        except ValueError as error:
            raise ValueError(f"{self._path}: {self._at}box: {error}") from None

    def _array(self, one: dict[str, Any]) -> npt.NDArray[Any]:
        shape, dtype = self._numbers(one, "array"), self._dtype(one)
        fill = self._field(one, "fill", (str, int, float), "zeros")
        if isinstance(fill, str) and fill.endswith(".npy"):
            array = self._loaded(fill, shape, dtype)
        elif isinstance(fill, str):
            array = self._filled(fill, shape, dtype)
        else:
            array = np.full(shape, self._converted("fill", fill, dtype))
        if self._field(one, "input", bool, False):
            array.flags.writeable = False
        return array

    def _filled(self, fill: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if fill not in FILLS:
            self._fail("fill", f"be a number, a .npy file or one of {', '.join(FILLS)}", fill)
        if fill in ("normal", "nan") and dtype.kind in "iub":
            self._fail("fill", f"be another one for integers of type {dtype}", fill)
        if fill == "normal":
            return self._random.standard_normal(shape).astype(dtype)
        if fill == "uniform":
            low, high = (-128, 128) if dtype.kind in "iub" else (0.0, 1.0)
            return self._random.uniform(low, high, shape).astype(dtype)
        if fill == "arange":
            return np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        return np.full(shape, {"zeros": 0, "ones": 1, "nan": np.nan}[fill]).astype(dtype)

    def _loaded(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        path = self._path.parent / name
        try:
            array: npt.NDArray[Any] = np.load(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path}: {self._at}fill: cannot read {path}: {error}") from None
        if array.shape != shape or array.dtype != dtype:
            holds = f"{array.shape} of {array.dtype}"
            self._fail("fill", f"name a file with {shape} of {dtype}", f"{name} with {holds}")
        return array

    # ---- the judge -------------------------------------------------------------------------------

    def _judged(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._field(self._table, "judge", dict, None)
        if found is None:
            return None
        self._at = "judge."
        self._only(found, (*TENSORS, *NUMERICS, *OPTIONS))
        for name in (*TENSORS[:4], "p"):
            self._field(found, name, str)
        self._field(found, "causal", bool, None)
        for name in ("scale", "softcap"):
            self._field(found, name, (int, float), None)
        for name in TENSORS:
            if name in found and found[name] not in self._arrays:
                self._fail(name, f"name an array ({self._listed()})", found[name])
        return found

    # ---- fields ----------------------------------------------------------------------------------

    def _listed(self) -> str:
        return ", ".join(self._arrays) or "there is none"

    def _only(self, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for name in table:
            if name not in known:
                self._fail(name, f"be left out: fields here are {', '.join(known)}", table[name])

    def _field(self, table: Mapping[str, Any], name: str, kind: Any, *default: Any) -> Any:
        if name not in table:
            if default:
                return default[0]
            raise ValueError(f"{self._path}: {self._at}{name} is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = table[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            words = {str: "text", int: "a whole number", float: "a number", bool: "true or false",
                     dict: "a table", list: "a list"}  # fmt: skip
            self._fail(name, f"be {' or '.join(words[k] for k in kinds)}", value)
        return value

    def _whole(self, table: Mapping[str, Any], name: str, default: int | None) -> Any:
        value = self._field(table, name, int, default)
        if value is not None and value < 0:
            self._fail(name, "be 0 or more", value)
        return value

    def _numbers(self, table: Mapping[str, Any], name: str) -> tuple[int, ...]:
        value = self._field(table, name, list)
        if not value or not all(type(n) is int and n > 0 for n in value):
            self._fail(name, "be a list of whole numbers above 0", value)
        return tuple(value)

    def _extents(self, name: str) -> int | tuple[int, ...]:
        if isinstance(self._table.get(name), list):
            found = self._numbers(self._table, name)
            if len(found) > 3:
                self._fail(name, "have 1 to 3 numbers", list(found))
            return found
        value: int = self._field(self._table, name, int)
        if value < 1:
            self._fail(name, "be 1 or more", value)
        return value

    def _dtype(self, one: Mapping[str, Any]) -> np.dtype[Any]:
        name = self._field(one, "dtype", str)
        try:
            dtype: np.dtype[Any] = np.dtype(name)
        except TypeError:
            self._fail("dtype", "be NumPy's name of a type, such as float16 or bfloat16", name)
        return dtype

    def _converted(self, name: str, value: float, dtype: np.dtype[Any]) -> Any:
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if not limits.min <= value <= limits.max or value != int(value):
                self._fail(name, f"be a whole number of type {dtype}", value)
        return dtype.type(value)

    def _fail(self, name: str, must: str, got: Any) -> NoReturn:
        where = f"{self._at}{name}".rstrip(".")
        shown = repr(got) if len(repr(got)) < 60 else f"{repr(got)[:60]}..."
        raise ValueError(f"{self._path}: {where} must {must}, got {shown}")
