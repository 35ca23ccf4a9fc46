"""The split form of fa_tc on a device: bounds, determinism, guards, graphs of two launches.

`tests/kernels/test_splits.py` says the same of the mirror and the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

from cupyattn import Tiles, attention, plan
from cupyattn.compiler import modules as kc
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.problem.form import module_spec
from tests.gpu.support import Captured, arch_of, embedded, guarded, on_device
from tests.support import runs
from tests.support.runs import SPILLED_SPLIT, bits, normal, on_host

cupy = pytest.importorskip("cupy")

#: batch, heads, heads_kv, len_q, len_kv, head_dim, options
CELLS: tuple[tuple[Any, ...], ...] = (
    (1, 32, 8, 1, 8192, 128, {}),
    (2, 6, 2, 7, 1500, 40, {"causal": True}),
    (1, 2, 2, 16, 513, 7, {"window": (300, 3), "causal_align": "top-left"}),
    (1, 16, 1, 4, 20_001, 64, {"window": (9000, 0)}),
    (70, 8, 8, 1, 640, 256, {"causal": True}),
    (3, 40, 1, 3, 4096, 96, {"causal": True}),
)
#: Rows that take the wider tiles: 32, 44, 65 and 128 of them, with an odd number of slices where
#: blocks have two; 256, which are two tiles; and those of 16 rows to a warp.
WIDE_CELLS: tuple[tuple[Any, ...], ...] = (
    (17, 64, 8, 4, 2048, 128, {"causal": True}),
    (1, 8, 2, 11, 2600, 128, {"window": (999, 30)}),
    (2, 5, 1, 13, 1501, 40, {"causal": True}),
    (2, 16, 2, 16, 4099, 128, {"causal": True}),
    (3, 8, 1, 16, 2048, 64, {"window": (700, 3), "causal_align": "top-left"}),
    (1, 16, 1, 16, 5003, 64, {}),
    (2, 24, 4, 9, 1000, 256, {"causal": True}),
    (66, 8, 1, 8, 700, 136, {}),
)


def inputs_of(cell: tuple[Any, ...], dtype: str) -> tuple[Any, Any, Any]:
    batch, heads, heads_kv, len_q, len_kv, head_dim, _ = cell
    return normal((batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cell", [*CELLS, *WIDE_CELLS], ids=str)
def test_results_are_within_their_bound_and_the_same_each_time(
    cell: tuple[Any, ...], dtype: str
) -> None:
    host = inputs_of(cell, dtype)
    inputs, options = on_device(*host), cell[-1]
    before = [bits(x) for x in inputs]
    arch = arch_of("fa_tc")  # many rows are stacked on the Hopper form otherwise
    one = runs.run("fa_tc", inputs, arch=arch, **options)
    assert one.form == "split"
    one.check()
    for _ in range(3):
        again = runs.run("fa_tc", inputs, arch=arch, **options)
        assert bits(again.o) == bits(one.o) and bits(again.lse) == bits(one.lse)
    amid_nan = runs.run("fa_tc", tuple(embedded(x) for x in host), arch=arch, **options)
    assert bits(amid_nan.o) == bits(one.o) and bits(amid_nan.lse) == bits(one.lse)
    assert [bits(x) for x in inputs] == before


def test_results_are_written_in_full_and_nothing_beside_them() -> None:
    for cell in (*CELLS[:4], *WIDE_CELLS[1:4]):
        batch, heads, _, len_q, _, head_dim, options = cell
        o = guarded((batch, heads, len_q, head_dim), "float16")
        lse = guarded((batch, heads, len_q), "float32")
        inputs = on_device(*inputs_of(cell, "float16"))
        found = runs.run_into("fa_tc", inputs, o.array, lse.array, arch=arch_of("fa_tc"), **options)
        assert found.form == "split"
        o.check()
        lse.check()
        found.check()


@pytest.mark.parametrize("cell", [CELLS[0], WIDE_CELLS[5]], ids=str)
def test_both_forms_agree(cell: tuple[Any, ...]) -> None:
    inputs = on_device(*inputs_of(cell, "float16"))
    split = on_host(attention(*inputs, variant="fa_tc", arch=arch_of("fa_tc"))).astype("f4")
    portable = attention(*inputs, variant="fa_tc", tiles=Tiles(64, 32, 4, 2))
    assert abs(split - on_host(portable).astype("f4")).max() < 1e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_keep_everything_in_registers_or_nearly(head_dim: int) -> None:
    variant = VARIANTS["fa_tc"]
    own = variant.forms["split"].tiles
    for tiles in (own.default[head_dim], *own.more_rows[head_dim]):
        for dtype, causal in (("float16", True), ("bfloat16", False)):
            features = Features(dtype, head_dim, causal, lse=True, vec=8, window=causal)
            module = kc.load(module_spec(variant, features, tiles, "split"))
            allowed = 0 if tiles.block_q == 16 else -(-SPILLED_SPLIT // 8) * 8  # of a stack frame
            assert module.kernel("attn_fa_tc").local_size_bytes <= allowed, f"{tiles} {dtype}"


def test_a_graph_captures_both_launches() -> None:
    inputs = on_device(*inputs_of(CELLS[0], "float16"))
    o = cupy.empty_like(inputs[0])
    prepared = plan(*inputs, variant="fa_tc", out=o)
    expected = bits(prepared(*inputs, out=o))
    captured = Captured(lambda: prepared(*inputs, out=o))
    o.fill(0)
    captured.replay()
    assert bits(o) == expected


# ---- query heads stacked on the Hopper form ------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cell", [WIDE_CELLS[i] for i in (2, 3, 5, 7)], ids=str)
def test_stacked_heads_are_within_their_bound_and_the_same_each_time(
    cell: tuple[Any, ...], dtype: str
) -> None:
    arch = arch_of("fa_tc@sm90")
    host = inputs_of(cell, dtype)
    inputs, options = on_device(*host), cell[-1]
    one = runs.run("fa_tc", inputs, arch=arch, **options)
    assert one.form == "sm90"
    one.check()
    for _ in range(3):
        again = runs.run("fa_tc", inputs, arch=arch, **options)
        assert bits(again.o) == bits(one.o) and bits(again.lse) == bits(one.lse)
    o, shape = guarded(inputs[0].shape, dtype), inputs[0].shape[:3]
    lse = guarded(shape, "float32")
    runs.run_into("fa_tc", inputs, o.array, lse.array, arch=arch, **options).check()
    o.check()
    lse.check()
