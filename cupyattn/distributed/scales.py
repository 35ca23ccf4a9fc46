"""Given scales of ``fa_int8`` on several ranks, which are those of the whole call: all ranks must
have the same, and each takes those of the heads that it computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.compiler.target import own_arch
from cupyattn.distributed.mesh import Heads
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.resolve import Description
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.static_scales import check_packed_quant, static_scales


def compared_scales(quant: QuantConfig | None) -> dict[str, str]:
    """Return the scales of Q and K as ranks compare them and as messages show them.

    A number and an array of one element count as the same.

    Examples
    --------
    >>> config = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.02, 1))
    >>> compared_scales(config), compared_scales(None)["q_scale"]
    ({'q_scale': '0.02', 'k_scale': '1.0'}, 'dynamic')
    """
    given = quant.scales if quant is not None and quant.static else ("dynamic", "dynamic")
    return {f"{name}_scale": _in_words(x) for name, x in zip("qk", given, strict=True)}


def _in_words(scale: Any) -> str:
    if isinstance(scale, str):
        return scale
    with np.errstate(over="ignore"):  # a number past float32 is refused as infinite
        x = np.asarray(on_host(scale), np.float32)
    if x.size == 1:
        return str(x.reshape(-1)[0])
    ends = f"{x.min():g} to {x.max():g}, " if x.size else ""
    digest = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]
    return f"{ends}float32 {x.shape}, sha256 {digest}"


def check_scales(
    described: Description, call: AttentionSpec, offsets: Mapping[str, np.ndarray]
) -> None:
    """Raise for given scales that the call does not take, as `cupyattn.attention` does.

    Parameters
    ----------
    described : Description
        This rank's call.
    call : AttentionSpec
        Of the rows of all ranks.
    offsets : mapping
        Of packed sequences ``cu_seqlens_q``, (batch + 1,); empty otherwise.

    Raises
    ------
    ValueError, UnsupportedError
        As `cupyattn.quant.static_scales.static_scales`.
    """
    settings, quant = described.settings, described.settings.quant
    if quant is None or not quant.static:
        return
    sequences = None
    if offsets:
        check_packed_quant(quant)
        sequences = offsets["cu_seqlens_q"].size - 1
    tiles = settings.tiles
    if tiles is None:
        arch = settings.arch or own_arch(described.backend, described.q)
        tiles = scale_tiles(described.variant, call.head_dim, quant, arch)
    q = call.batch, call.heads, call.len_q, call.head_dim
    k = call.batch, call.heads_kv, call.len_kv, call.head_dim
    with on_device_of(described.q):
        static_scales(array_namespace(described.q), quant, q, k, tiles, sequences)


def scales_of_heads(quant: QuantConfig | None, heads: Heads) -> QuantConfig | None:
    """Return how some heads are quantised: `quant` itself, or of scales per head with theirs."""
    if quant is None or not quant.static or not any(map(_of_heads, quant.scales)):
        return quant
    cuts = zip(quant.scales, (heads.q, heads.kv), strict=True)
    scales = tuple(x[:, slice(*some)] if _of_heads(x) else x for x, some in cuts)
    return replace(quant, scales=scales)


def _of_heads(scale: Any) -> bool:
    """Whether a given scale is an array (batch or 1, heads, groups) of several heads."""
    return hasattr(scale, "shape") and scale.shape[1] != 1
