"""One block of a Hopper kernel takes five tiles or more, and every ring of stages wraps twice.

A block of few tiles never comes back to a stage with the first phase, and small inputs have as many
blocks as tiles: mistakes in phases, and stages that are released too early, do not show there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans import gemm
from cupyattn.problem import gemm_form
from tests.backward.backward_cases import HOPPER_FORMS, interpreted_as, received, run_backward
from tests.faults.fault_patches import FOLDER, Fault, parse
from tests.interpret.test_interpret_faults import check_noticed
from tests.quant.gemm_cases import product
from tests.support.runs import Run, asked_for, hopper_blocks, normal, run

#: Hopper forms of attention.
RUNGS = (
    "fa_tc@sm90", "fa_int8@sm90", "fa_int8@sm90_pv8", "fa_int8@sm90_fp8",
    "fa_int8@sm90_pv8_by_tile",
)  # fmt: skip
FAULTS = [parse(path) for path in sorted((FOLDER / "rings").glob("*.patch"))]
#: Faults that are planted in a quick run.
AT_ONCE = ("phase_bit_set_and_not_flipped", "last_V_given_back_before_it_was_read")
#: Five heads of one tile of rows each.
TILES = 5
GEMM_TILES = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)


def in_one_block(rung: str, **options: Any) -> Run:
    """Let one block take all tiles; every ring of it wraps twice or more."""
    inputs = normal((1, TILES, 40, 64), (1, 1, 200, 64))
    with hopper_blocks(1):
        asked = {**asked_for(rung), "arch": "sm_90a", "backend": "interpret", **options}
        plan = explain.plans(resolved(*inputs, **asked))[-1]
        steps = -(-inputs[1].shape[2] // plan.tiles.block_kv)
        loads = TILES * (steps + 1)  # K of a step and V of the one before
        assert plan.form == rung.partition("@")[2] and plan.launches[0].grid == 1
        assert loads > 2 * plan.tiles.num_stages, (loads, plan.tiles)
        return run(rung, inputs, arch="sm_90a", backend="interpret", **options)


@contextmanager
def products_in_one_block() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_form, "HOPPER_BLOCKS", 1)
        gemm.plan_gemm.cache_clear()
        yield
    gemm.plan_gemm.cache_clear()


class Held:
    """A product, judged by its bound."""

    def __init__(self, share: float) -> None:
        self.passed = share <= 1

    def judge(self) -> Held:
        """Return itself."""
        return self


def multiply(rows: int = 64 * TILES) -> Held:
    """Multiply tiles of 64 rows, three slices each."""
    p = product(4, (rows, 64, 400), bias=True)
    found = p.run(backend="interpret", tiles=GEMM_TILES, arch="sm_90a")
    return Held(p.share_of_bound(found))


def many_tiles(variant: str) -> Any:
    if variant == "gemm":
        with products_in_one_block():
            return multiply()
    return in_one_block(variant)


def few_tiles(variant: str) -> Any:
    """Do what other tests do: small inputs, and as many blocks as tiles."""
    if variant == "gemm":
        return multiply(40)
    return run(
        variant, normal((1, 2, 35, 64), (1, 2, 33, 64)), arch="sm_90a", backend="interpret"
    )  # fmt: skip


# ---- without a mistake ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "options"),
    [
        pytest.param(
            rung, options, marks=[pytest.mark.slow] if options or rung not in RUNGS[:2] else []
        )
        for options in ({}, {"causal": True})
        for rung in RUNGS
    ],
)
def test_attention(rung: str, options: dict[str, Any]) -> None:
    in_one_block(rung, **options).check()


def test_products_of_codes() -> None:
    assert many_tiles("gemm").passed


@pytest.mark.slow
@pytest.mark.parametrize("form", HOPPER_FORMS)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_gradients(form: str, head_dim: int) -> None:
    """A block of keys takes five tiles of rows, and a block of queries five tiles of keys."""
    inputs = received(*normal((1, 1, 340, head_dim), (1, 1, 340, head_dim)))
    run_backward(inputs, **interpreted_as(form)).check()


# ---- with a mistake ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_small_and_says_what_it_is(fault: Fault, tmp_path: Path) -> None:
    assert fault.caught_by == "interpreter"
    assert set(fault.variants) <= {*RUNGS, "gemm"}
    fault.check(tmp_path)


@pytest.mark.parametrize(
    ("fault", "variant"),
    [
        pytest.param(
            fault,
            variant,
            marks=[] if number == 0 and fault.name in AT_ONCE else [pytest.mark.slow],
            id=f"{fault.name}-{variant}",
        )
        for fault in FAULTS
        for number, variant in enumerate(fault.variants)
    ],
)
def test_a_mistake_shows_in_many_tiles_alone(
    fault: Fault, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fault.plant(tmp_path)
    monkeypatch.setattr(compiler, "KERNELS", folder)
    assert few_tiles(variant).judge().passed
    check_noticed((many_tiles(variant) for _ in range(1)), fault, folder)
