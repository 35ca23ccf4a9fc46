"""Schedules of the interpreter: warps that fall behind change no bit, and reveal possible hangs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantConfig, attention, interpret
from cupyattn.interpret.executor import run_kernel
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans import gemm
from cupyattn.problem import gemm_form
from tests.backward.backward_cases import interpreted_as, received, run_backward
from tests.interpret.raw_kernels import arrays, source, spec
from tests.quant.gemm_cases import product
from tests.support.runs import normal

#: Calls of the Hopper kernels, whose warps wait for each other in many ways.
CALLS: dict[str, dict[str, Any]] = {
    "fa_tc": {"variant": "fa_tc"},
    "fa_tc, tiles by a counter": {"variant": "fa_tc", "causal": True},
    "fa_int8": {"variant": "fa_int8"},
    "8-bit P and V": {
        "variant": "fa_int8", "quant": QuantConfig(pv="int8", granularity_v="channel")
    },
    "8-bit floats": {
        "variant": "fa_int8", "quant": QuantConfig(pv="fp8", granularity_v="channel")
    },
}  # fmt: skip

#: One place that two warps share: the second says that it has read, and the first must hear it.
TWO_STEPS = """
  __shared__ Mbarrier full, empty;
  __shared__ int s;
  if (i == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int n = 0; n < 4; ++n) {
    if (i == 0) {
#ifdef MENDED
      mbarrier_wait_parity(empty, n % 2 ^ 1);
#endif
      s = x[n];
      mbarrier_arrive(full);
    } else if (i == 32) {
      mbarrier_wait_parity(full, n % 2);
      y[n] = s;
      mbarrier_arrive(empty);
    }
  }
"""


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("fa_tc", 1), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in CALLS)],
)
def test_bits_do_not_depend_on_who_comes_first(name: str, seeds: int) -> None:
    q, k, v = normal((1, 3, 200, 64), (1, 3, 330, 64))
    options = {**CALLS[name], "arch": "sm_90a", "backend": "interpret"}
    expected = attention(q, k, v, **options)
    for seed in range(seeds):
        with interpret.schedule(seed):
            found = attention(q, k, v, **options)
        assert np.array_equal(found, expected), seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "head_dim", "lengths"), [(3, 64, (500, 300)), (1, 192, (200, 200))]
)
def test_nor_do_those_of_gradients(seeds: int, head_dim: int, lengths: tuple[int, int]) -> None:
    """Blocks of keys take turns at dQ, or two kernels past head_dim 128 make dQ, dK and dV."""
    inputs = received(*normal(*((1, 1, n, head_dim) for n in lengths)))
    how = interpreted_as("sm90_deterministic")
    expected = run_backward(inputs, **how).gradients
    for seed in range(seeds):
        with interpret.schedule(seed):
            found = run_backward(inputs, **how).gradients
        same = [np.array_equal(x, y) for x, y in zip(found, expected, strict=True)]
        assert all(same), seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_nor_do_products_of_codes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block has several tiles, whose ring of stages continues."""
    monkeypatch.setattr(gemm_form, "HOPPER_BLOCKS", 2)
    gemm.plan_gemm.cache_clear()
    p, tiles = product(3, (200, 190, 400), bias=True), GemmTiles(64, 64, 8, 2)
    with interpret.schedule(seed):
        found = p.run(backend="interpret", tiles=tiles, arch="sm_90a")
    assert found.tobytes() == p.mirror().tobytes()
    gemm.plan_gemm.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nor_do_products_whose_tiles_are_shared(seed: int) -> None:
    p, tiles = product(4, (70, 100, 784), bias=True), GemmTiles(64, 64, 8, 2, splits=4)
    with interpret.schedule(seed):
        found = p.run(backend="interpret", tiles=tiles, arch="sm_90a")
    assert found.tobytes() == p.mirror(4).tobytes()


def two_steps(folder: Path, **macros: int) -> list[int]:
    x, y = arrays()
    text = '#include "prims/instructions/mbarrier.cuh"\n' + source(TWO_STEPS)
    module = spec(folder, text, **macros)
    run_kernel(module, "kernel", [x, y], block=64, arch="sm_90a")
    return y[:4].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_wait_that_is_missing_shows(seed: int, tmp_path: Path) -> None:
    with interpret.schedule(seed):
        assert two_steps(tmp_path, MENDED=1) == [1, 2, 3, 4]
        with pytest.raises(interpret.KernelFault):
            two_steps(tmp_path)


class Order(interpret.Observer):
    """Where the machine was, and with which warps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes]] = []

    def before(self, machine: Any, lanes: Any) -> None:
        self.seen.append((machine.place, lanes.mask.tobytes()))


def test_a_schedule_is_repeatable_and_ends_with_its_block() -> None:
    q, k, v = normal((1, 1, 20, 8), (1, 1, 40, 8))
    orders = []
    for seed in (None, 5, 5, 6, None):
        order = Order()
        with interpret.observe(order), nullcontext() if seed is None else interpret.schedule(seed):
            attention(q, k, v, variant="fa_warps", backend="interpret")
        orders.append(order.seen)
    assert orders[1] == orders[2] and orders[0] == orders[-1]
    assert orders[0] != orders[1] != orders[3] != orders[0]
