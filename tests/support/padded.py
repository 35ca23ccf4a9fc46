"""Code for tests of padded batches: padding of NaN, entries alone, and runs that can be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn import attention
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from tests.support import runs
from tests.support.runs import Arrays, Run, asked_for, bits, of_sequence, on_host

#: Queries and keys of each entry: all, none of either, more than there are, fewer than none.
LENGTHS = ((40, 70), (0, 33), (17, 0), (5, 99), (33, -3))
SIZES = (40, 70)
NAMES = ("lengths_q", "lengths_kv")


def padded(
    lengths: Sequence[tuple[int, int]],
    sizes: tuple[int, int],
    heads: int,
    heads_kv: int,
    head_dim: int = 32,
    dtype: str = "float16",
    seed: int = 0,
) -> tuple[Arrays, dict[str, Any]]:
    """N(0, 1) for entries of these lengths of q and k, and NaN behind them; and the lengths."""
    batch = len(lengths)
    inputs = runs.normal(
        (batch, heads, sizes[0], head_dim), (batch, heads_kv, sizes[1], head_dim), dtype, seed
    )
    numbers = np.array(lengths, np.int32).T
    for x, own in zip(inputs, (numbers[0], numbers[1], numbers[1]), strict=True):
        for entry, length in zip(x, own, strict=True):
            entry[:, max(length, 0) :] = np.nan
    return inputs, dict(zip(NAMES, map(np.ascontiguousarray, numbers), strict=True))


def entries(inputs: Arrays, lengths: dict[str, Any]) -> Iterator[tuple[int, Arrays]]:
    """Yield the number of every entry that has queries, and its operands cut to its lengths."""
    q, k, v = inputs
    sizes = {"lengths_q": q.shape[2], "lengths_kv": k.shape[2]}
    for number in range(q.shape[0]):
        of_q, of_kv = (
            min(max(int(on_host(lengths[name])[number]), 0), longest)
            if name in lengths
            else longest
            for name, longest in sizes.items()
        )
        if of_q:
            one = slice(number, number + 1)
            yield number, (q[one, :, :of_q], k[one, :, :of_kv], v[one, :, :of_kv])


def assert_as_alone(
    inputs: Arrays,
    lengths: dict[str, Any],
    options: dict[str, Any],
    alone: Callable[[Arrays], dict[str, Any]] = lambda one: {},
) -> None:
    """Every entry has the bits that it has when cut to its lengths, and 0 and -inf behind them.

    `alone` returns options of the call on an entry in place of the batch's.
    """
    o, lse = attention(*inputs, return_lse=True, **options, **lengths)
    rows = dict.fromkeys(range(o.shape[0]), 0)
    for number, one in entries(inputs, lengths):
        own = {**of_sequence(options, number, one), **alone(one)}
        expected, expected_lse = attention(*one, return_lse=True, **own)
        rows[number] = count = one[0].shape[2]
        assert bits(o[number, :, :count]) == bits(expected), (number, options)
        assert bits(lse[number, :, :count]) == bits(expected_lse), (number, options)
    for number, count in rows.items():
        assert not on_host(o[number, :, count:]).view("u2" if o.itemsize == 2 else "u4").any()
        assert (on_host(lse[number, :, count:]) == -np.inf).all()


def run_padded(
    rung: str, inputs: Arrays, lengths: dict[str, Any], *, arch: str | None = None,
    backend: str | None = None, **options: Any,
) -> list[Run]:  # fmt: skip
    """Call `attention` on a padded batch; return what came of every entry that has queries."""
    asked = {**asked_for(rung), "arch": arch, "backend": backend, **options, **lengths}
    o, lse = attention(*inputs, return_lse=True, **asked)
    plan = explain.plans(resolved(*inputs, **asked))[-1]
    found = []
    for number, one in entries(inputs, lengths):
        own = of_sequence({**options, "tiles": plan.tiles}, number, one)
        z = runs.quantized(rung, one, backend, options, own.get("quant"), arch)
        at = slice(number, number + 1), slice(None), slice(one[0].shape[2])
        found.append(Run(rung, plan.form, one, own, z, o[at], lse[at]))
    return found
