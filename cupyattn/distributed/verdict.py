"""J2 of results that several ranks computed: as fractions of their bounds, element by element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host, take
from cupyattn.arrays.kinds import NEG_INF, Array, as_float64, as_host_array
from cupyattn.bounds import kernel
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.distributed.blocks import Span, blocks
from cupyattn.distributed.bounds import Expected, merged, summed
from cupyattn.distributed.codes import with_keys_of
from cupyattn.distributed.mesh import Heads, Mesh, shares_of_heads
from cupyattn.distributed.partition import Partition, Range
from cupyattn.distributed.scales import scales_of_heads
from cupyattn.distributed.ulysses import merged_ranges
from cupyattn.gradients.bounds import backward_bound, summed_rows
from cupyattn.gradients.exact import Gradients, backward_exact
from cupyattn.ops.quantize import quantize
from cupyattn.problem.checks import check_limits
from cupyattn.problem.settings import PLACES
from cupyattn.quant.config import QuantConfig
from cupyattn.reference.exact import attention_exact
from cupyattn.testing.expected import mean_score


@dataclass(frozen=True)
class Shared:
    """Description of a call that ranks shared.

    Parameters
    ----------
    mesh : Mesh
    rows_q, rows_kv : Partition
    cu_seqlens_q, cu_seqlens_k : array, optional
        Ends of packed sequences; arrays are then one entry (1, heads, total, head_dim).
    """

    mesh: Mesh
    rows_q: Partition
    rows_kv: Partition
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None

    def sequences(self) -> Iterator[tuple[Range, Range]]:
        """Yield rows and keys of every sequence."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            yield (0, self.rows_q.length), (0, self.rows_kv.length)
            return
        ends = (
            as_host_array(f"cu_seqlens_{n}", x).tolist()
            for n, x in (("q", self.cu_seqlens_q), ("k", self.cu_seqlens_k))
        )
        yield from zip(*map(pairwise, ends), strict=True)


@dataclass(frozen=True)
class _Piece:
    """One call: rows and keys as positions in the arrays of all ranks, and the options that place
    them."""

    rows: Array
    keys: Array
    options: dict[str, Any]


def judge(
    o: Array, q: Array, k: Array, v: Array, shared: Shared, *, variant: str,
    lse: Array | None = None, quant: QuantConfig | None = None, form: str | None = None,
    wide_sums: bool = True, **options: Any,
) -> float:  # fmt: skip
    """Return the largest error of a result of several ranks as a fraction of its bound (J2).

    Parameters
    ----------
    o : array, (batch, heads, len_q, head_dim)
        Results of all ranks, joined (`Partition.join`).
    q, k, v : array
        The operands of all ranks; arrays of any library, here and above.
    shared : Shared
        How the ranks shared the call.
    variant : str
        The rung that ran.
    lse : array, (batch, heads, len_q), optional
        If given, it is judged, too.
    quant : QuantConfig, optional
        For ``fa_int8``, whose codes each rank made from its rows and keys. A device adds up the
        mean of smoothed keys in another order than NumPy, so codes may differ: J2 of codes made on
        a device requires ``smooth_k=False``.
    form : str, optional
        As for `cupyattn.bounds.attention`.
    wide_sums : bool
        Whether a ring added up in float32; otherwise in the type of q.
    **options
        scale, causal, causal_align, window, softcap of the call.

    Returns
    -------
    float
        It must not exceed 1.
    """
    o, q, k, v, lse = _on_hosts(o=o, q=q, k=k, v=v, lse=lse)
    places_of = {name: options[name] for name in PLACES if name in options}
    rest = {name: value for name, value in options.items() if name not in PLACES}
    int8 = variant == "fa_int8"
    worst, dtype = 0.0, q.dtype.name
    exact_o, exact_lse = _exact(q, k, v, shared, options) if not int8 else (None, None)
    for number, (rows, blocks_of_rows) in enumerate(_pieces(shared, places_of, whole_keys=int8)):
        found = []
        own = quant if shared.cu_seqlens_q is None or quant is None else quant.of_entry(number)
        for piece in blocks_of_rows:
            some = q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys]
            how = {**rest, **piece.options}
            if int8:  # with granularity "tensor" the heads of one call share a scale
                each = [
                    _of_codes(_some_heads(some, h), scales_of_heads(own, h), form, how)
                    for h in _heads(shared, q, k)
                ]
                one = _beside(each) if each else _nothing(some[0].shape)
            else:
                one = _of_arrays(some, variant, form, how)
            found.append(_spread(one, piece.rows, rows, q.shape))
        if not found:
            found = [_nothing((*q.shape[:2], rows.size, q.shape[3]))]
        whole = merged(found, dtype, wide_sums)
        expected = whole.o if exact_o is None else exact_o[:, :, rows]
        expected_lse = whole.lse if exact_lse is None else exact_lse[:, :, rows]
        worst = max(worst, _worst(o[:, :, rows], expected, whole.bound))
        if lse is not None:
            worst = max(worst, _worst(lse[:, :, rows], expected_lse, whole.lse_bound))
    return worst


def judge_backward(
    gradients: Any, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    shared: Shared, wide_sums: bool = True, d_lse: Array | None = None, **options: Any,
) -> float:  # fmt: skip
    """Return the largest error of gradients of several ranks as a fraction of its bound (J2).

    Parameters
    ----------
    gradients : (dq, dk, dv)
        Results of all ranks, joined.
    d_out, q, k, v, out, lse : array
        Arguments of all ranks, joined: the gradients are those at this O and lse.
    shared : Shared
    wide_sums : bool
        As for `judge`.
    d_lse : array, optional
        As `lse`, the gradient with respect to it.
    **options
        As for the call: scale, causal, causal_align, window, softcap.

    Returns
    -------
    float
        It must not exceed 1.
    """
    d_out, q, k, v, out, lse, d_lse = _on_hosts(
        d_out=d_out, q=q, k=k, v=v, out=out, lse=lse, d_lse=d_lse
    )
    gradients = _on_hosts(**dict(zip(Gradients._fields, gradients, strict=True)))
    places_of = {name: options[name] for name in PLACES if name in options}
    rest = {name: value for name, value in options.items() if name not in PLACES}
    exact = {name: np.zeros(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    true_lse, row_errors = (np.zeros(lse.shape) for _ in range(2))
    errors, sizes = ({n: np.zeros(x.shape) for n, x in exact.items()} for _ in range(2))
    terms, ends = ({n: np.zeros(x.shape, int) for n, x in exact.items()} for _ in range(2))
    for of_q, of_kv in shared.sequences():
        one = [x[:, :, slice(*of_q)] for x in (d_out, q, out, lse)]
        some = one[0], one[1], *(x[:, :, slice(*of_kv)] for x in (k, v)), one[2], one[3]
        here = slice(None), slice(None), slice(*of_q)
        true_lse[here], row_errors[here] = summed_rows(*some, **options)
        some = *some[:5], true_lse[here]
        of_lse = None if d_lse is None else d_lse[here]
        found = backward_exact(*some, all_keys=False, d_lse=of_lse, **options)
        for name, span in (("dq", of_q), ("dk", of_kv), ("dv", of_kv)):
            exact[name][:, :, slice(*span)] = getattr(found, name)
    for heads in _heads(shared, q, k):
        for _, blocks_of_rows in _pieces(shared, places_of):
            for piece in blocks_of_rows:
                at = _cell(heads.q, piece.rows), _cell(heads.kv, piece.keys)
                where = {"dq": at[0], "dk": at[1], "dv": at[1]}
                rows = d_out[at[0]], q[at[0]], k[at[1]], v[at[1]], out[at[0]]
                how = {**rest, **piece.options}
                how["d_lse"] = None if d_lse is None else d_lse[at[0]]
                found = backward_exact(*rows, true_lse[at[0]], all_keys=False, **how)
                own = row_errors[at[0]] if shared.mesh.ring > 1 else None
                bound = backward_bound(
                    *rows, lse[at[0]], summed_errors=own, all_keys=False, **how
                )
                for name, place in where.items():
                    total = bound.total(name)
                    errors[name][place] += total
                    sizes[name][place] += np.abs(getattr(found, name)) + total
                    terms[name][place] += 1
        for name, span, count in (("dq", heads.q, shared.rows_q.length),
                                  ("dk", heads.kv, shared.rows_kv.length),
                                  ("dv", heads.kv, shared.rows_kv.length)):  # fmt: skip
            ends[name][_cell(span, np.arange(count))] += 1
    worst = 0.0
    for name, value in zip(exact, gradients, strict=True):
        # A ring rounds the sum of each rank's heads, and sums over several ranks again.
        rounded = ends[name] * (shared.mesh.ring > 1) + (ends[name] > 1)
        rounded = rounded if wide_sums else rounded + terms[name]  # each term is added and rounded
        bound = summed(errors[name], sizes[name], terms[name], rounded, q.dtype.name)
        worst = max(worst, _worst(value, exact[name], bound))
    return worst


def _heads(shared: Shared, q: Array, k: Array) -> Iterator[Heads]:
    """Yield the heads that are computed together."""
    if shared.mesh.ulysses == 1:
        yield Heads((0, q.shape[1]), (0, k.shape[1]))
        return
    for of_rank in shares_of_heads(q.shape[1], k.shape[1], shared.mesh.ulysses):
        yield from (heads for heads in of_rank if heads.q[0] < heads.q[1])


def _cell(heads: Range, rows: Array) -> Any:
    """Index some heads of some rows."""
    return slice(None), slice(*heads), rows


def _pieces(
    shared: Shared, places_of: dict[str, Any], *, whole_keys: bool = False
) -> Iterator[tuple[Array, list[_Piece]]]:
    """Yield rows that are computed together, and the calls that they take part in.

    With `whole_keys` no call has keys of several ranges.
    """
    sequences = list(shared.sequences())
    if shared.mesh.ring == 1:
        for of_q, of_kv in sequences:
            yield np.arange(*of_q), [_Piece(np.arange(*of_q), np.arange(*of_kv), places_of)]
        return
    spans = []
    placing = {"causal": False, "causal_align": "bottom-right", "window": (-1, -1), **places_of}
    for of_q, of_kv in sequences:
        limits = check_limits(**placing, len_q=of_q[1] - of_q[0], len_kv=of_kv[1] - of_kv[0])
        spans.append(Span(of_q, of_kv, limits))
    groups = [shared.mesh.neighbours(first) for first in shared.mesh.circle(0)]
    for index in range(len(groups)):
        rows = merged_ranges(shared.rows_q, groups[index])
        found = []
        for step in range(len(groups)):
            keys = merged_ranges(shared.rows_kv, groups[(index - step) % len(groups)])
            each = [(rows, keys)] if not whole_keys else [((x,), (y,)) for y in keys for x in rows]
            for some_rows, some_keys in each:
                for block in blocks(some_rows, some_keys, spans):
                    options = {"window": block.window, "causal_align": "top-left"}
                    numbers = _numbers(some_rows)[slice(*block.q)]
                    found.append(_Piece(numbers, _numbers(some_keys)[slice(*block.kv)], options))
        yield _numbers(rows), found


def _numbers(ranges: tuple[Range, ...]) -> Array:
    return np.concatenate([np.arange(0), *(np.arange(*r) for r in ranges)])


def _exact(q: Array, k: Array, v: Array, shared: Shared, options: Any) -> tuple[Array, Array]:
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], NEG_INF)
    for rows, keys in shared.sequences():
        here, there = slice(*rows), slice(*keys)
        o[:, :, here], lse[:, :, here] = attention_exact(
            q[:, :, here], k[:, :, there], v[:, :, there], return_lse=True, **options
        )
    return o, lse


def _on_hosts(**named: Any) -> tuple[Any, ...]:
    """Return arrays of any library as NumPy arrays, in the order given; None stays None."""
    return tuple(
        None if x is None else on_host(take(name, x, of_parameter=True)[0])
        for name, x in named.items()
    )


def _of_arrays(some: Any, variant: str, form: str | None, options: dict[str, Any]) -> Expected:
    o, lse = attention_exact(*some, return_lse=True, **options)
    bound = kernel.attention(*some, variant=variant, form=form, **options)
    return Expected(o, lse, bound.total, bound.lse)


def _of_codes(
    some: Any, quant: QuantConfig | None, form: str | None, options: dict[str, Any]
) -> Expected:
    """Attention of the codes that ranks made of rows and of keys."""
    q, k, v = some
    if options.get("softcap"):  # the calls of ranks, too, then smooth no keys
        quant = replace(quant or QuantConfig(), smooth_k=False)
    no_rows, no_keys = q[:, :, :0], (k[:, :, :0], v[:, :, :0])
    z = with_keys_of(quantize(q, *no_keys, quant=quant), quantize(no_rows, k, v, quant=quant))
    operands = kernel.kernel_operands(z)
    o, lse = attention_exact(*operands, return_lse=True, **options)
    if z.k_mean is not None:
        lse = lse + mean_score(operands[0], z, np.arange(q.shape[2]), options.get("scale"))
    bound = kernel.attention(None, None, None, variant="fa_int8", quantized=z, form=form, **options)
    return Expected(o, lse, bound.total, bound.lse)


def _some_heads(some: Any, heads: Heads) -> Any:
    q, k, v = some
    return q[:, slice(*heads.q)], k[:, slice(*heads.kv)], v[:, slice(*heads.kv)]


def _beside(each: list[Expected]) -> Expected:
    """Return the results of all heads, joined from results of some heads each."""
    names = ("o", "lse", "bound", "lse_bound")
    return Expected(*(np.concatenate([getattr(one, n) for one in each], axis=1) for n in names))


def _nothing(shape: tuple[int, ...]) -> Expected:
    return Expected(
        np.zeros(shape), np.full(shape[:3], NEG_INF), np.zeros(shape), np.zeros(shape[:3])
    )


def _spread(one: Expected, some: Array, rows: Array, shape: tuple[int, ...]) -> Expected:
    """Return results of some rows as results of all rows; the other rows count as masked."""
    found = _nothing((*shape[:2], rows.size, shape[3]))
    at = np.searchsorted(rows, some)
    for name in ("o", "lse", "bound", "lse_bound"):
        getattr(found, name)[:, :, at] = getattr(one, name)
    return found


def _worst(value: Array, expected: Array, bound: Array) -> float:
    return float(ratio_to_bound(as_float64(value), expected, bound).max(initial=0.0))
