"""Rotary embeddings on the device: J1 of the pass, every rung within its bound, recent calls.

`tests/problem/test_rope.py` tests the mirror and the interpreter, and explains each test.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, plan
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.features import BY_COLUMN, ROPE_PAIRS
from cupyattn.plans.prepare_rows import Prepares, plan_preparation
from cupyattn.problem.row_preparation import Rope
from cupyattn.runtime import ready
from tests.gpu.support import Captured, arch_of, attend, embedded, on_device, run
from tests.support.runs import (
    CELLS,
    RUNGS,
    bits,
    column_tables,
    normal,
    on_host,
    quantized,
    rope_tables,
    variant_of,
)

cupy = pytest.importorskip("cupy")

SHAPE_Q, SHAPE_KV = (2, 4, 150, 64), (2, 2, 333, 64)
TABLES = rope_tables(400, 64)


@pytest.mark.parametrize("pairs", ROPE_PAIRS)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "pad"),
    [
        ("float16", 64, 8), ("bfloat16", 128, 0), ("float32", 128, 0), ("float16", 36, 2),
        ("bfloat16", 6, 1), ("float32", 2, 1), ("float16", 256, 8),
    ],
)  # fmt: skip
def test_the_pass_turns_to_the_bit(dtype: str, head_dim: int, pad: int, pairs: str) -> None:
    x = normal((3, 4, 300, head_dim), (1, 1, 1, 1), dtype)[0]
    given = embedded(x, pad) if pad else on_device(x)[0]
    tables = (column_tables if pairs.endswith(BY_COLUMN) else rope_tables)(310, head_dim)
    rope = Rope.of_arrays(tables, pairs.startswith("interleaved"), 9, 300, 0, head_dim)
    assert rope.pairs == pairs
    turned = cupy.empty(x.shape, x.dtype)
    cos, sin = on_device(rope.cos, rope.sin)
    buffers = {"x": given, "turned": turned, "rope_cos": cos, "rope_sin": sin}
    ready.run(plan_preparation(Operand.of(given), dtype, Prepares("q", rope.pairs, 9)), buffers)
    assert bits(turned) == bits(rope.turned(x, x[:, :, :0])[0])


@pytest.mark.parametrize(("rung", "dtype"), CELLS)
def test_every_rung_attends_with_turned_operands(rung: str, dtype: str) -> None:
    """fa_int8 rounds nothing to 16 bits between: as with operands that `quantize` turned."""
    inputs = normal(SHAPE_Q, SHAPE_KV, dtype)
    q, k, v = on_device(*inputs)
    arch = arch_of(rung)
    given = [(on_device(*x), x) for x in (TABLES, column_tables(400, 64))]
    tables = [x for moved, _ in given for x in moved]
    before = [bits(x) for x in (q, k, v, *tables)]
    for (own, rope), interleaved in itertools.product(given, (False, True)):
        options: dict[str, Any] = {
            "rope": own, "rope_interleaved": interleaved, "rope_offset_q": 183,
        }  # fmt: skip
        host = Rope.of_arrays(rope, interleaved, 183, 150, 333, 64).turned(*inputs[:2])
        operands: tuple[Any, ...] = (*on_device(*host), v)
        if variant_of(rung).family == "int8":
            operands = (quantized(rung, (q, k, v), None, options, arch=arch),)
        o = attend(rung, q, k, v, causal=True, **options)
        assert bits(o) == bits(attend(rung, *operands, causal=True))
        run(rung, (q, k, v), causal=True, **options).check()
    assert [bits(x) for x in (q, k, v, *tables)] == before, "an input was modified"


@pytest.mark.parametrize("rung", RUNGS)
def test_calls_of_late_see_the_tables_that_they_are_given(rung: str) -> None:
    q, k, v = on_device(*normal((1, 2, 40, 64), (1, 2, 70, 64)))
    options = {"variant": variant_of(rung).name, "arch": arch_of(rung)}
    found = set()
    for first in (0, 3, 0):
        tables = on_device(*(np.ascontiguousarray(x[first : first + 90]) for x in TABLES))
        for _ in range(2):  # planned, then found again
            o = attention(q, k, v, rope=tables, rope_offset_q=first, **options)
            found.add(bits(o))
        prepared = plan(q, k, v, rope=tables, rope_offset_q=first, **options)
        assert bits(prepared(q, k, v)) == bits(o)
        plain = tuple(np.asarray(on_host(x)) for x in tables)
        sixteen = on_device(*(x.astype(np.float16) for x in plain))
        rounded = on_device(*(x.astype(np.float16).astype(np.float32) for x in plain))
        by_16 = attention(q, k, v, rope=sixteen, **options)
        assert bits(by_16) == bits(attention(q, k, v, rope=rounded, **options))
    assert len(found) == 2


@pytest.mark.parametrize("rung", RUNGS)
def test_a_captured_call_turns_new_data(rung: str) -> None:
    q, k, v = on_device(*normal((1, 2, 40, 64), (1, 2, 70, 64)))
    tables = on_device(*TABLES)
    options = {"variant": variant_of(rung).name, "arch": arch_of(rung), "rope": tables}
    out = cupy.empty_like(q)
    prepared = plan(q, k, v, out=out, **options)
    captured = Captured(lambda: prepared(q, k, v, out=out))
    fresh = on_device(*normal((1, 2, 40, 64), (1, 2, 70, 64), seed=5))
    for x, new in zip((q, k, v), fresh, strict=True):
        x[...] = new
    captured.replay()
    assert bits(out) == bits(attention(q, k, v, **options))
