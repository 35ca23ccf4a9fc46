"""Given scales of ``fa_int8`` on several ranks.

Scales belong to the whole call. All ranks must have the same scales, and each uses the scales of
the heads that it computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import device_of, on_host
from cupyattn.arrays.memory import on_device_of
from cupyattn.compiler.target import own_arch
from cupyattn.distributed.mesh import Heads
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.form import scale_tiles
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.static_scales import check_packed_quant, check_static_scales


def compared_scales(quant: QuantConfig) -> dict[str, str]:
    """Return the scales of Q and K as ranks compare them and as messages show them.

    A number and an array of one element count as the same.

    Examples
    --------
    >>> config = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.02, 1))
    >>> compared_scales(config), compared_scales(QuantConfig())["q_scale"]
    ({'q_scale': '0.02', 'k_scale': '1.0'}, 'dynamic')
    """
    given = quant.scales if quant.static else ("dynamic", "dynamic")
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


def tiles_of_scales(described: AttentionProblem, quant: QuantConfig) -> Tiles:
    """Return the tiles whose sizes granularity "block" uses on the device of this rank.

    UnsupportedError if no form of the rung is for such codes.
    """
    settings = described.settings
    arch = settings.arch or own_arch(described.backend, described.rows["q"])
    head_dim = described.call.head_dim
    return settings.tiles or scale_tiles(described.variant, head_dim, quant, arch)


def check_scales(
    quant: QuantConfig, tiles: Tiles, call: AttentionSpec, offsets: Mapping[str, np.ndarray]
) -> None:
    """Raise for given scales that the call does not take, as `cupyattn.attention` does.

    Parameters
    ----------
    quant : QuantConfig
        Values are read on any device, so ranks with equal scales raise equal errors.
    tiles : Tiles
        As `tiles_of_scales` returns them.
    call : AttentionSpec
        The call of all ranks' rows.
    offsets : mapping
        ``cu_seqlens_q``, (batch + 1,), for packed sequences; empty otherwise.

    Raises
    ------
    ValueError, UnsupportedError
        As `cupyattn.quant.static_scales.check_static_scales` and `QuantConfig.check_scales`.
    """
    if not quant.static:
        return
    sequences = None
    if offsets:
        check_packed_quant(quant)
        sequences = offsets["cu_seqlens_q"].size - 1
    q = call.batch, call.heads, call.len_q, call.head_dim
    k = call.batch, call.heads_kv, call.len_kv, call.head_dim
    on_hosts = (on_host(x) if hasattr(x, "shape") else x for x in quant.scales)
    quant = replace(quant, scales=tuple(on_hosts))
    check_static_scales(quant, q, k, tiles, sequences)
    quant.check_scales()


def scales_beside(quant: QuantConfig, q: Any) -> QuantConfig:
    """Return how a rank quantises, with given scales on the device of its q: ranks that are threads
    may share one configuration."""
    if not quant.static or {device_of(x) for x in quant.scales} <= {-1, device_of(q)}:
        return quant
    with on_device_of(q):  # where a configuration makes its copies of arrays
        return replace(quant, scales=quant.scales)


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
