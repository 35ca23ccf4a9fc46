"""The mirror of the quantising kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.row_preparation import Preparation
from cupyattn.problem.sequences import Sequences
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.packed import join
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import (
    channel_mean,
    in_padded_rows,
    quantize_affine,
    quantize_symmetric,
    quantize_values,
    quantize_values_affine,
)
from cupyattn.quant.static_scales import static_scales


def quantize_mirror(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    *,
    k_mean: Array | None = None,
    v_mean: Array | None = None,
    preparation: Preparation | None = None,
) -> QuantizedQKV:
    """Quantise NumPy arrays as the kernel quantises CuPy arrays.

    Parameters
    ----------
    q, k, v, quant, tiles
        As for `quantize`.
    k_mean, v_mean : array, (batch, heads_kv, head_dim), float32, optional
        The means to subtract where `quant` smooths; computed when omitted. The kernel sums in
        another order, so a comparison to the bit hands its means over.
    preparation : Preparation, optional
        Preparation of the rows of q and k.

    Returns
    -------
    QuantizedQKV
    """
    out_dtype = q.dtype.name
    if preparation is not None:
        prepare = preparation.stored if quant.fused else preparation.in_float32
        q, k = prepare(q, k)
    if quant.smooth_k and k_mean is None:
        k_mean = channel_mean(k)
    fields: dict[str, Any] = {"group_v": quant.group_v(tiles)}
    groups = {"q": quant.group_q(tiles), "k": quant.group_kv(tiles)}
    granularities = {"q": quant.granularity_q, "k": quant.granularity_k}
    static = static_scales(quant, q.shape, k.shape, tiles)
    for name, x in (("q", q), ("k", k)):
        how: dict[str, Any] = {
            "per_tensor": granularities[name] == "tensor",
            "mean": k_mean if name == "k" and quant.smooth_k else None,
        }
        if quant.zero_points:
            coded: tuple[Array, ...] = quantize_affine(x, groups[name], **how)
        else:
            how |= {"static_scale": static[name], "largest": quant.largest_code}
            coded = quantize_symmetric(x, groups[name], **how)
        coded = (in_padded_rows(coded[0]), *coded[1:])
        fields |= zip((f"{name}_codes", f"{name}_scale", f"{name}_zero"), coded, strict=False)
    if quant.has_value_codes:
        if quant.smooth_v:
            fields["v_mean"] = channel_mean(v) if v_mean is None else v_mean
        of_v: tuple[Any, ...] = v, fields["group_v"], fields.get("v_mean")
        whole = quant.granularity_v == "tensor"
        if quant.value_zero_points:
            coded = quantize_values_affine(*of_v, per_tensor=whole)
        else:
            coded = quantize_values(*of_v, per_tensor=whole, e4m3=quant.pv == "fp8")
        fields |= zip(("v_codes", "v_scale", "v_zero"), coded, strict=False)
    return QuantizedQKV(
        v=None if quant.has_value_codes else value_operand(v), group_q=groups["q"],
        group_kv=groups["k"], config=quant, out_dtype=out_dtype,
        k_mean=k_mean if quant.smooth_k else None, **fields,
    )  # fmt: skip


def _quantize_sequences(
    q: Array,
    k: Array,
    v: Array,
    quant: QuantConfig,
    tiles: Tiles,
    sequences: Sequences,
    preparation: Preparation | None,
) -> QuantizedQKV:
    """Quantise packed sequences one by one, and lay the results as the kernels lay theirs."""
    ends = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    coded = []
    for number, (of_q, of_k) in enumerate(zip(*map(pairwise, ends), strict=True)):
        rows, keys = slice(*of_q), slice(*of_k)
        one = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        coded.append(quantize_mirror(*one, quant.of_entry(number), tiles, preparation=preparation))
    nothing = q[:, :, :0], k[:, :, :0], v[:, :, :0]
    template = quantize_mirror(*nothing, quant.of_entry(0), tiles)
    joined: QuantizedQKV = replace(join(coded, template, sequences), config=quant)
    return joined


def value_operand(v: Array) -> Array:
    """Return V as the second product takes it: its own 16-bit type, float16 for float32.

    Numbers past float16 become infinities without a warning, as on a device.
    """
    if v.dtype.name != "float32":
        return v
    with np.errstate(over="ignore"):
        return v.astype(np.float16)
