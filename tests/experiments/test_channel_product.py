"""Candidates for a product with a scale for each row and column: a pair of blocks is exact."""

from __future__ import annotations

from experiments.tuning.channel_product.candidates import CANDIDATES
from experiments.tuning.channel_product.channel_race import resources
from experiments.tuning.channel_product.exact_products import Case
from experiments.tuning.channel_product.interpreted_products import holds


def test_a_pair_spills_nothing_and_is_exact() -> None:
    """On two pairs of tiles, one after the other, ragged at the end of every axis."""
    (one,) = (x for x in CANDIDATES if x.name == "128x256 pair s4 g8")
    case = Case(140, 264, 272, "float16", bias="float32")
    taken = resources(one.spec(case.dtype, case.n, case.bias))
    assert taken["spill_stores"] == taken["spill_loads"] == 0
    assert taken["warnings"] == []  # none of ptxas about products that are serialised
    assert one.units(case.m, case.n) == 2
    assert holds(one, case, blocks=2) == "exact"
