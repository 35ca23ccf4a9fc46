"""Every feature with every rung, type and layout, in pairs, on the mirror and in the kernels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyattn import attention
from tests.cross_cases import AXES, CELLS, Case, cover, drawn, possible
from tests.runs import bits, run, run_packed


def test_every_two_values_meet() -> None:
    for a, b in itertools.combinations(AXES, 2):
        met = {(cell[a], cell[b]) for cell in CELLS}
        wanted = {(x, y) for x, y in itertools.product(AXES[a], AXES[b]) if possible({a: x, b: y})}
        assert met == wanted, (a, b)
    assert all(map(possible, CELLS)) and len(CELLS) < 60
    small = {"rung": ("fa", "fa_tc"), "dtype": ("float16", "float32"), "softcap": (0.0, 1.0)}
    found = {(c["rung"], c["dtype"]) for c in cover(small)}
    assert found == {("fa", "float16"), ("fa", "float32"), ("fa_tc", "float16")}


def test_drawn_cases_follow_their_seed() -> None:
    assert list(drawn(AXES, 3, 5)) == list(drawn(AXES, 3, 5)) != list(drawn(AXES, 4, 5))


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("number", range(len(CELLS)))
def test_every_pair_is_within_its_bound(number: int, backend: str) -> None:
    case = Case.of(CELLS[number], number)
    q, k, v = case.laid()
    before = [bits(x) for x in case.inputs]
    rung, options = case.cell["rung"], {"backend": backend, **case.options}
    if case.ends is None:
        found = [run(rung, (q, k, v), **options)]
    else:
        found = run_packed(rung, (q, k, v), case.ends, **options)
    for one in found:
        one.check()
    assert [bits(x) for x in (q, k, v)] == before, "an input was modified"
    if case.cell["layout"] == "BSHD" and case.ends is None:
        turned = (x.swapaxes(1, 2) for x in (q, k, v))
        o = attention(*turned, variant=rung, layout="BSHD", **options)
        assert bits(np.swapaxes(o, 1, 2)) == bits(found[0].o)
