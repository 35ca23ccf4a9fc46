"""File format of a `QuantizedQKV`: NumPy's ``.npz`` with its arrays and a header in JSON."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import UnsupportedError
from cupyattn.files import read_npz, replacing
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantizers import in_padded_rows

_Record = TypeVar("_Record")
_KIND, _VERSION = "cupyattn.QuantizedQKV", 2
#: The record's arrays that a file has, under their names.
ARRAYS = (
    "q_codes", "k_codes", "v", "q_scale", "k_scale", "q_zero", "k_zero", "k_mean", "v_codes",
    "v_scale", "v_mean", "v_zero", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
#: Its other fields in the header, except its configuration.
_PLAIN = (
    "out_dtype", "group_q", "group_kv", "group_v", "max_len_q", "max_len_k", "prepared",
    "has_queries",
)  # fmt: skip


def write(record: Any, path: str | os.PathLike[str]) -> None:
    """Write a record to one file, whole or not at all."""
    arrays: dict[str, Any] = {}
    for name in ARRAYS:
        if getattr(record, name) is not None:
            arrays[name] = on_host(getattr(record, name))
    config = record.config
    if config.static:
        for name, scale in zip(("q", "k"), config.scales, strict=True):
            arrays[f"config_{name}_scale"] = on_host(scale)
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    header = {
        "kind": _KIND,
        "version": _VERSION,
        "config": {**settings, "scales": "static" if config.static else "dynamic"},
        "v_dtype": None if record.v is None else record.v.dtype.name,
        **{name: getattr(record, name) for name in _PLAIN},
    }
    if "v" in arrays:  # NumPy's format has no name for bfloat16, so V travels as bits
        arrays["v"] = arrays["v"].view(np.uint16)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, **arrays)


def read(record: type[_Record], path: str | os.PathLike[str], namespace: Any) -> _Record:
    """Return the record in a file, its arrays in a namespace, or raise `ValueError`."""
    from zipfile import BadZipFile  # here, because few calls read files

    try:
        return record(**_fields(path, namespace))
    # Exceptions of NumPy, zipfile, json and the record's checks for a damaged or foreign file.
    except (
        ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error,
        UnsupportedError,
    ) as error:  # fmt: skip
        what = f"{os.fspath(path)!r} holds no usable QuantizedQKV: {error}"
        raise ValueError(what) from error


def _fields(path: str | os.PathLike[str], namespace: Any) -> dict[str, Any]:
    """Return the fields of the record that a file has."""
    arrays = read_npz(path)
    if "header" not in arrays:
        raise ValueError(f"it has no header, but arrays called {', '.join(sorted(arrays)) or '-'}")
    header = json.loads(arrays.pop("header").tobytes())
    if header["kind"] != _KIND:
        raise ValueError(f"its kind is {header['kind']!r}")
    if header["version"] != _VERSION:
        raise ValueError(f"its version is {header['version']}, not {_VERSION}")
    if header["v_dtype"] is not None:
        arrays["v"] = arrays["v"].view(STORAGE[header["v_dtype"]])
    arrays = {name: namespace.asarray(array) for name, array in arrays.items()}
    for name in ("q_codes", "k_codes"):
        if arrays[name].dtype.name == "int8":
            arrays[name] = in_padded_rows(arrays[name])
    settings = header["config"]
    if settings["scales"] == "static":
        scales = arrays.pop("config_q_scale"), arrays.pop("config_k_scale")
        settings["scales"] = tuple(x if x.ndim else float(x) for x in scales)
    plain = {name: header[name] for name in _PLAIN if name in header}
    plain["prepared"] = tuple(plain.get("prepared", ()))
    return {"v": None, **arrays, **plain, "config": QuantConfig(**settings)}
