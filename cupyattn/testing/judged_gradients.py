"""Gradients of any library, of packed, padded and grouped batches, with softcaps and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cupyattn.arrays.interchange import on_host, taken
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.errors import shown
from cupyattn.gradients.block_sums import GradientBounds
from cupyattn.gradients.exact import Gradients, GradientsWithBias, backward_exact
from cupyattn.gradients.foreign import backward_bound_foreign
from cupyattn.gradients.judge import GradientReport, GradientShare, report_of
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.settings import (
    PaddedOptions,
    Unpack,
    check_settings,
    of_arguments,
    takes_options,
)
from cupyattn.testing.foreign import check_no_codes
from cupyattn.testing.parts import Part, parts_of, with_longest


@takes_options
def judge_backward(
    gradients: Sequence[Array],
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    numerics: Numerics,
    d_lse: Array | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: str = "BHSD",
    sinks: Array | None = None,
    **options: Unpack[PaddedOptions],
) -> GradientReport:
    """Compare gradients of another library with the gradients of exact attention.

    The bound includes what the library's forward pass rounds, so neither O nor lse is needed.

    Parameters
    ----------
    gradients : (dq, dk, dv) or (dq, dk, dv, dbias)
        Shaped as q, k, v and the bias. All arrays: NumPy, CuPy, or anything with DLPack.
    d_out : array
        The gradient with respect to O, shaped as O.
    q, k, v : array
    numerics
        What the library rounds, as `cupyattn.testing.numerics` makes it. dS is rounded as P is.
        With `qk` and `v` the backward pass may multiply codes or what it received.
    d_lse : array, optional
        The gradient with respect to lse, (batch, heads, len_q), or (heads, total_q) if packed.
    cu_seqlens_q, cu_seqlens_k, layout, sinks
        As for `cupyattn.testing.judge`.
    lengths_q, lengths_kv
        As for `cupyattn.attention`. Gradients behind the lengths must be 0.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for the call.

    Returns
    -------
    GradientReport
        The first index of a share is the packed sequence, or the batch entry.

    Raises
    ------
    TypeError
        If `numerics` is not that of another library.
    UnsupportedError
        For `numerics` with P in 8 bits, as dS would be.
    ValueError
        For shapes that do not fit together, or a gradient of the bias beside packed sequences or
        sinks.

    Examples
    --------
    >>> from cupyattn.gradients import backward_exact
    >>> from cupyattn.testing import numerics
    >>> x = np.ones((1, 1, 4, 8), np.float16)
    >>> exact = [g.astype(np.float16) for g in backward_exact(x, x, x, x)]
    >>> judge_backward(exact, x, x, x, x, numerics=numerics("fp16 P")).passed
    True
    """
    if not isinstance(numerics, Numerics) or numerics.foreign is None:
        raise TypeError(
            "numerics must be what cupyattn.testing.numerics returns, such as "
            f"numerics('bf16 P'), got {shown(numerics)}"
        )
    check_no_codes(q=q, k=k, v=v)
    with_bias = len(gradients) == len(GradientsWithBias._fields)
    packed = not (cu_seqlens_q is None and cu_seqlens_k is None)
    if with_bias and (packed or sinks is not None):
        beside = "packed sequences" if packed else "sinks"
        raise ValueError(f"a gradient of the bias cannot be judged beside {beside}: leave it out")
    names = (GradientsWithBias if with_bias else Gradients)._fields
    if len(gradients) != len(names):
        raise ValueError(f"gradients must be {', '.join(names)}, got {len(gradients)} of them")
    if packed and (cu_seqlens_q is None or cu_seqlens_k is None):
        raise TypeError("packed sequences need cu_seqlens_q and cu_seqlens_k: give both")
    cu_seqlens_q, cu_seqlens_k = taken(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    gradients = taken(**dict(zip(names, gradients, strict=True)))
    d_out, q, k, v, d_lse, sinks = taken(d_out=d_out, q=q, k=k, v=v, d_lse=d_lse, sinks=sinks)
    options["mask"], options["bias"] = taken(mask=options.get("mask"), bias=options.get("bias"))
    if sinks is not None:
        numerics = replace(numerics, foreign=replace(numerics.foreign, sinks=True))
    settings, arrays = of_arguments(locals())
    check_settings(settings)
    if packed:
        for name, found, like in zip(names, gradients, (q, k, v), strict=True):
            if found.shape != like.shape:
                raise ValueError(f"{name} must have shape {like.shape}, got {found.shape}")
        settings = with_longest(settings, arrays)
    shares: list[tuple[GradientShare, ...]] = []
    for part in parts_of(settings, arrays, None, d_out, d_lse, sinks):
        own = _of_part(part, gradients, layout, arrays)
        shares.append(_judged(part, own, names, numerics, sinks).shares)
    if packed:
        shares += _without_rows(names, gradients, arrays)
    worst = (max(of_one, key=lambda share: share.ratio) for of_one in zip(*shares, strict=True))
    return GradientReport(tuple(worst))


def _of_part(
    part: Part, gradients: Sequence[Array], layout: str, arrays: dict[str, Any]
) -> list[Array]:
    """Return the gradients of a part, (batch, heads, len, head_dim)."""
    if part.entry is None:
        return [*(to_bhsd(x, layout) for x in gradients[:3]), *gradients[3:]]
    found = []
    for x, name in zip(gradients, ("q", "k", "k"), strict=True):
        ends = on_host(arrays[f"cu_seqlens_{name}"]).tolist()
        found.append(x[ends[part.entry] : ends[part.entry + 1]].swapaxes(0, 1)[None])
    return found


def _judged(
    part: Part, gradients: Sequence[Array], names: Sequence[str], numerics: Numerics,
    sinks: Array | None,
) -> GradientReport:  # fmt: skip
    """Judge the gradients of one part."""
    settings, arrays = part.settings, part.arrays
    d_out, d_lse, mask = part.o, part.lse, arrays.get("mask")
    if mask is not None:  # rows without keys, such as those behind the lengths, may hold anything
        xp = array_namespace(d_out)
        kept = xp.asarray(mask).any(axis=-1)
        zero = d_out.dtype.type(0)
        d_out = xp.where(kept[..., None], d_out, zero).astype(d_out.dtype, copy=False)
        d_lse = None if d_lse is None else xp.where(kept, d_lse, d_lse.dtype.type(0))
    asked = {
        "scale": settings.scale, "d_lse": d_lse, "grad_bias": len(names) == 4,
        **settings.scores(arrays),
    }  # fmt: skip
    q, k, v = (arrays[name] for name in "qkv")
    exact: Sequence[Array] = backward_exact(d_out, q, k, v, **asked)
    bound = backward_bound_foreign(d_out, q, k, v, numerics, **asked)
    if sinks is not None:  # the last key has no operand
        dq, dk, dv = exact
        exact = dq, dk[:, :, :-1], dv[:, :, :-1]
        of_k, of_v = ({tag: x[:, :, :-1] for tag, x in one.items()} for one in (bound.dk, bound.dv))
        bound = GradientBounds(bound.dq, of_k, of_v)
    report = report_of(names, gradients, exact, bound)
    if part.entry is None:
        return report
    entry = part.entry
    return GradientReport(
        tuple(replace(one, index=(entry, *one.index[1:])) for one in report.shares)
    )


def _without_rows(
    names: Sequence[str], gradients: Sequence[Array], arrays: dict[str, Any]
) -> list[tuple[GradientShare, ...]]:
    """Judge packed sequences without rows, whose gradients of k and v must be 0."""
    of_q, of_k = (on_host(arrays[f"cu_seqlens_{name}"]).tolist() for name in "qk")
    found = []
    for entry, (a, b, c, d) in enumerate(zip(of_q, of_q[1:], of_k, of_k[1:], strict=False)):
        if a != b or c == d:
            continue
        own = [x[a:b] if name == "dq" else x[c:d] for name, x in zip(names, gradients, strict=True)]
        own = [x.swapaxes(0, 1)[None] for x in own]
        zeros = [array_namespace(x).zeros(x.shape) for x in own]
        bound = GradientBounds(*({"R12": x} for x in zeros))
        report = report_of(names, own, zeros, bound)
        found.append(tuple(replace(one, index=(entry, *one.index[1:])) for one in report.shares))
    return found
