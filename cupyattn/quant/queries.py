"""Quantise other queries for existing codes of keys and values, for `QuantizedQKV.with_q`.

The method needs `cupyattn.ops.quantize`, which imports this package and so cannot be imported
here. That module adds the method to the record when it is imported. Public names of the record
import it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.config import QuantConfig

#: Keywords of `QuantizedQKV.with_q`, which say where and how queries are quantised.
OPTIONS = (
    "backend", "cu_seqlens_q", "max_len_q", "rope", "rope_interleaved", "rope_offset_q", "qk_norm",
    "qk_norm_eps", "qk_norm_split",
)  # fmt: skip
_OF_Q = ("q_codes", "q_scale", "q_zero", "q_code_sum", "group_q", "cu_seqlens_q", "max_len_q")


def of_call(
    z: Any, q: Any, options: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return the call of `cupyattn.quantize` that makes codes of other queries.

    Parameters
    ----------
    z : QuantizedQKV
        The record of keys and values.
    q : array
    options : mapping
        Keywords of `QuantizedQKV.with_q`.

    Returns
    -------
    arguments : dict
        Arguments of `cupyattn.quantize` for these queries, without keys.
    as_given : callable
        Turns a result into the kind of array that q is.

    Raises
    ------
    ValueError, TypeError
        As `QuantizedQKV.with_q`.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"with_q() got an unexpected keyword argument {name!r}: it takes q and "
                f"{', '.join(OPTIONS)}"
            )
    rows, as_given = take("q", q)
    array_namespace(rows, z.k_codes)
    asked = {name: value for name, value in options.items() if value is not None}
    _check(z, rows)
    for name in z.prepared:
        if name not in asked:
            raise ValueError(f"with_q needs {name}=, as the keys had it before they became codes")
    if z.cu_seqlens_q is None:
        no_keys = rows[:, : z.heads_kv, :0]
        for name in ("cu_seqlens_q", "max_len_q"):
            if name in asked:
                raise TypeError(
                    f"{name} goes with packed keys, and these are not packed: leave it out, or "
                    "give cu_seqlens_k to quantize_kv"
                )
    else:
        no_keys = rows[:0, : z.heads_kv]
        if "cu_seqlens_q" not in asked:
            asked = _packed_as_before(z, rows) | asked
        with on_device_of(z.k_codes):
            asked["cu_seqlens_k"] = array_namespace(z.k_codes).zeros(z.batch + 1, np.int32)
        asked["max_len_k"] = 0
    asked["tiles"] = Tiles(z.group_q, 64, 4) if z.config.granularity_q == "block" else None
    of_rows = {"q": rows, "k": no_keys, "v": no_keys, "quant": of_queries(z.config)}
    return of_rows | asked, as_given


def with_codes(z: Any, coded: Any, as_given: Callable[[Any], Any]) -> Any:
    """Return a `QuantizedQKV` with another's queries; `as_given` converts its results."""
    of_q = {name: getattr(coded, name) for name in _OF_Q}
    return replace(z, as_given=as_given, has_queries=True, **of_q)


def _check(z: Any, rows: Any) -> None:
    """Raise unless queries fit the keys and have the type of the quantised arrays."""
    multiple = f"a multiple of {z.heads_kv}"
    names, wanted = "(total_q, heads, head_dim)", ["*", multiple, z.head_dim]
    if z.cu_seqlens_q is None:
        names, wanted = "(batch, heads, len_q, head_dim)", [z.shape[0], multiple, "*", z.head_dim]
    fits = rows.ndim == len(wanted) and all(
        size % max(z.heads_kv, 1) == 0 if want == multiple else want in ("*", size)
        for size, want in zip(rows.shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"q must be {names} = ({', '.join(map(str, wanted))}) for these keys, got shape "
            f"{tuple(rows.shape)}"
        )
    if rows.dtype.name != z.out_dtype:
        raise TypeError(
            f"q must be {z.out_dtype}, the type of the quantised arrays, got {rows.dtype.name}"
        )


def _packed_as_before(z: Any, rows: Any) -> dict[str, Any]:
    """Return the offsets of a record's queries, for the same number of rows."""
    if rows.shape[0] != z.len_q:
        raise ValueError(
            f"q has {rows.shape[0]} rows, and these codes are of {z.len_q} packed rows: give "
            "cu_seqlens_q and max_len_q of the new queries"
        )
    return {"cu_seqlens_q": z.cu_seqlens_q, "max_len_q": z.max_len_q}


def of_queries(quant: QuantConfig) -> QuantConfig:
    """Return a configuration that quantises Q unchanged, with the least work for K and V.

    Examples
    --------
    >>> of_queries(QuantConfig("token", "block", pv="int8"))
    QuantConfig(granularity_q='token', granularity_k='block', granularity_v='none', ...)
    """
    alone: dict[str, Any] = {
        "pv": "16bit", "granularity_v": None, "smooth_v": None, "p_type": None, "smooth_k": False,
    }  # fmt: skip
    if quant.static:
        alone |= {"scales": (quant.scales[0], 1.0), "granularity_k": "tensor"}
    return replace(quant, **alone)
