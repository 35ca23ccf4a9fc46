"""Other queries for keys and values that are codes already: what `QuantizedQKV.with_q` does.

Codes are made by an operation, which stands below this package: `cupyattn.ops.quantize` gives its
function to `quantise_with` when it is imported. Public names of the record import it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import array_namespace
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.config import QuantConfig

#: Arguments of `cupyattn.quantize` that say where and how queries are quantised.
OPTIONS = ("backend", "rope", "rope_interleaved", "rope_offset_q", "qk_norm", "qk_norm_eps")
#: The function of `quantise_with`, by the name that it has there.
_GIVEN: dict[str, Callable[..., Any]] = {}


def quantise_with(quantize: Callable[..., Any]) -> None:
    """Let records quantise with this function, `cupyattn.quantize`."""
    _GIVEN["quantize"] = quantize


def with_queries(z: Any, q: Any, options: Mapping[str, Any]) -> Any:
    """Return a `QuantizedQKV` with other queries: see `QuantizedQKV.with_q`."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"with_q() got an unexpected keyword argument {name!r}: it takes q and "
                f"{', '.join(OPTIONS)}"
            )
    if z.cu_seqlens_q is not None:
        raise UnsupportedError(
            "with_q takes no packed sequences: call quantize with cu_seqlens_q and cu_seqlens_k"
        )
    rows, as_given = take("q", q)
    array_namespace(rows, z.k_codes)
    batch, heads_kv, head_dim = z.shape[0], z.heads_kv, z.head_dim
    fits = rows.ndim == 4 and (rows.shape[0], rows.shape[3]) == (batch, head_dim)
    if not fits or rows.shape[1] % max(heads_kv, 1):
        raise ValueError(
            f"q must be (batch, heads, len_q, head_dim) = ({batch}, a multiple of {heads_kv}, *, "
            f"{head_dim}) for these keys, got shape {tuple(rows.shape)}"
        )
    if rows.dtype.name != z.out_dtype:
        raise TypeError(
            f"q must be {z.out_dtype}, the type of what was quantised, got {rows.dtype.name}"
        )
    if "quantize" not in _GIVEN:
        raise RuntimeError("with_q quantises q by cupyattn.ops.quantize: import that module first")
    no_keys = rows[:, :heads_kv, :0]
    tiles = Tiles(z.group_q, 64, 4) if z.config.granularity_q == "block" else None
    coded = _GIVEN["quantize"](
        rows, no_keys, no_keys, quant=of_queries(z.config), tiles=tiles, **options
    )
    names = ("q_codes", "q_scale", "q_zero", "q_code_sum", "group_q")
    return replace(z, as_given=as_given, **{name: getattr(coded, name) for name in names})


def of_queries(quant: QuantConfig) -> QuantConfig:
    """Return how Q is quantised, with the least work for K and V.

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
