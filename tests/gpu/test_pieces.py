"""Tiles of the last wave cut along the keys, where a device has as many blocks as the plan."""

from __future__ import annotations

from typing import Any

import pytest

from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from tests.gpu.support import arch_of, attend, cupy, guarded, on_device, run
from tests.support.runs import Arrays, asked_for, bits, normal, variant_of

RUNGS = ("fa_tc@sm90", "fa_int8@sm90", "fa_int8@sm90_pv8")
#: batch, heads, heads_kv, len_q, len_kv, head_dim, dtype
CELLS = (
    (1, 3, 1, 700, 4000, 64, "float16"), (2, 5, 5, 193, 2500, 128, "bfloat16"),
    (1, 2, 1, 130, 5003, 72, "float32"), (1, 1, 1, 300, 4100, 256, "float16"),
    (1, 40, 8, 700, 4600, 40, "bfloat16"),
)  # fmt: skip


def inputs_of(cell: tuple[Any, ...]) -> Arrays:
    batch, heads, heads_kv, len_q, len_kv, head_dim, dtype = cell
    shapes = (batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim)
    return on_device(*normal(*shapes, dtype))


def entries(rung: str, inputs: Arrays) -> list[str]:
    asked = dict(**asked_for(rung), arch=arch_of(rung))
    return [one.entry for one in explain.plans(resolved(*inputs, **asked))[-1].launches]


@pytest.mark.parametrize(
    ("rung", "cell"), [(r, c) for r in RUNGS for c in CELLS if c[-1] in variant_of(r).dtypes],
    ids=str,
)  # fmt: skip
def test_within_the_bound(rung: str, cell: tuple[Any, ...]) -> None:
    inputs = inputs_of(cell)
    assert entries(rung, inputs)[1:] == ["merge_pieces"]
    run(rung, inputs).check()


@pytest.mark.parametrize("rung", RUNGS)
def test_a_thousand_calls_give_one_result(rung: str) -> None:
    inputs = inputs_of(CELLS[1])
    expected, expected_lse = attend(rung, *inputs, return_lse=True)
    for _ in range(1000):
        o, lse = attend(rung, *inputs, return_lse=True)
        assert bool((o == expected).all() and (lse == expected_lse).all())


@pytest.mark.parametrize("rung", RUNGS)
def test_every_element_is_written_and_nothing_beside_it(rung: str) -> None:
    inputs = inputs_of(CELLS[0])
    out = guarded(inputs[0].shape, "float16")
    attend(rung, *inputs, out=out.array)
    out.check()


@pytest.mark.parametrize("rung", RUNGS)
def test_two_streams_at_a_time(rung: str) -> None:
    """Each call has places of its own for its pieces."""
    inputs = [inputs_of(cell) for cell in CELLS[:2]]
    expected = [bits(attend(rung, *one)) for one in inputs]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in inputs]
    cupy.cuda.Device().synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, one, results in zip(streams, inputs, found, strict=True):
            with stream:
                results.append(attend(rung, *one))
    cupy.cuda.Device().synchronize()
    for results, one in zip(found, expected, strict=True):
        assert all(bits(o) == one for o in results)
