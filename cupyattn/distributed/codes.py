"""Arrays that circulate in a ring of ``fa_int8``: codes, scales and means, not keys and values.

The rank that holds a contiguous range of keys quantises it once, with separate scales and a
separate mean. All ranks attend to the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.agreement import ShardedCall
from cupyattn.distributed.blocks import blocks
from cupyattn.distributed.partition import Range, places
from cupyattn.distributed.rank_calls import NO_SCORES, Calls, Scores, of_window, quantized
from cupyattn.distributed.ring import MessageForm, Part
from cupyattn.ops.attention import run_attention
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.quantizers import group_count, in_padded_rows, padded_length

#: Fields of `QuantizedQKV` that belong to the keys, and the axis that follows their number.
_AXES = {
    "k_codes": 2, "k_scale": 2, "k_zero": 2, "k_code_sum": 2, "k_mean": None, "v": 2,
    "v_codes": 3, "v_scale": 2, "v_zero": 2, "v_mean": None,
}  # fmt: skip


class TravellingCodes:
    """The operands of one rank, quantised for a ring.

    Parameters
    ----------
    call : ShardedCall
    calls : Calls
        Calls of these heads.
    q, k, v : array
        Some heads of the rows of this rank and its neighbours.
    scores : Scores
        Options of scores for these rows and all keys.
    """

    def __init__(
        self, call: ShardedCall, calls: Calls, q: Any, k: Any, v: Any, scores: Scores = NO_SCORES
    ) -> None:
        self._call, self._calls, self._q, self._k, self._v = call, calls, q, k, v
        self._scores = scores
        self._of_rows: dict[Range, QuantizedQKV] = {}
        self._template = calls.empty_codes(q, k, v)
        self._names = [name for name in _AXES if getattr(self._template, name) is not None]
        keys = call.keys[call.circle.index(call.group.rank)]
        #: Arrays that this rank contributes, one range of keys after another.
        self.own = [
            x for place in places(keys, keys) for x in self._fields(self._quantized((0, 0), place))
        ]

    def forms(self, owner: int) -> list[MessageForm]:
        """Return shape and dtype of the arrays of the rank at an index of the circle."""
        return [
            form
            for begin, end in self._call.keys[owner]
            for form in self._forms_of_length(end - begin)
        ]

    def results_of(self, owner: int, arrays: Sequence[Any]) -> Iterator[Part]:
        """Yield rows, O and lse of attention to the keys of one rank."""
        coded = self._calls.settings._replace(variant="auto", quant=None)
        count, rows_here = len(self._names), self._call.rows
        for index, keys in enumerate(self._call.keys[owner]):
            fields = dict(
                zip(self._names, arrays[count * index : count * (index + 1)], strict=True)
            )
            for rows, place in zip(rows_here, places(rows_here, rows_here), strict=True):
                for block in blocks([rows], [keys], self._call.spans):
                    some = place[0] + block.q[0], place[0] + block.q[1]
                    z = with_keys(self._query_codes(some), fields)
                    settings = of_window(coded, block.window)
                    of_keys = keys[0] + block.kv[0], keys[0] + block.kv[1]
                    scores = self._scores.cut([some], [of_keys])
                    named = {"q": z, "k": None, "v": None, **scores.arrays}
                    yield some, *run_attention(settings, named)

    def _quantized(self, rows: Range, keys: Range) -> QuantizedQKV:
        k, v = (x[:, :, slice(*keys)] for x in (self._k, self._v))
        return quantized(self._calls.settings, self._q[:, :, slice(*rows)], k, v)

    def _query_codes(self, rows: Range) -> QuantizedQKV:
        if rows not in self._of_rows:
            self._of_rows[rows] = self._quantized(rows, (0, 0))
        return self._of_rows[rows]

    def _fields(self, z: QuantizedQKV) -> list[Any]:
        contiguous = array_namespace(z.k_codes).ascontiguousarray
        return [contiguous(getattr(z, name)) for name in self._names]

    def _forms_of_length(self, length: int) -> Iterator[MessageForm]:
        z = self._template
        of_k = group_count(length, z.group_kv)
        of_v = group_count(length, z.group_v) if z.group_v else 0
        extents = {
            "k_scale": of_k, "k_zero": of_k, "v_scale": of_v, "v_zero": of_v,
            "v_codes": padded_length(length),
        }  # fmt: skip
        for name in self._names:
            x, axis = getattr(z, name), _AXES[name]
            shape = list(x.shape)
            if axis is not None:
                shape[axis] = extents.get(name, length)
            yield tuple(shape), x.dtype


def with_keys(z: QuantizedQKV, fields: dict[str, Any]) -> QuantizedQKV:
    """Return the queries of a record with other keys and values, given by their fields."""
    codes = fields["k_codes"]
    padded = in_padded_rows(codes) if codes.dtype.name == "int8" else codes
    return QuantizedQKV.of_buffers(z.facts, {**z.buffers, **fields, "k_codes": padded})


def with_keys_of(queries: QuantizedQKV, keys: QuantizedQKV) -> QuantizedQKV:
    """Return the queries of one record with the keys and values of another."""
    return with_keys(queries, {name: x for name, x in keys.buffers.items() if name in _AXES})
