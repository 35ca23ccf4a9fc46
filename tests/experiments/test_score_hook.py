"""The hook before the softmax: what is to become a kernel compiles well and is right."""

from __future__ import annotations

import numpy as np

from experiments.tuning.score_hook.checks import Case, check_case, make
from experiments.tuning.score_hook.hook_plans import CANDIDATES, plan_of, resources


def test_a_mask_in_bits_spills_nothing_and_is_right() -> None:
    """On tiles of keys that the mask leaves full, empty and mixed, of the first choice of tiles."""
    tiles = CANDIDATES["mask"][128][0].tiles
    case = Case("rows", 128, tiles, "rows", lengths=(20, 200), batch=1, heads=1)
    q, k, v, call, hook = make(case)
    first, second, third = (hook.mask[0, 0, 9, i : i + 40] for i in (0, 80, 160))
    assert first.all() and not second.any() and 0 < third.sum() < third.size
    taken = resources(plan_of(call, hook, tiles, q, k, v, np.empty(call.output_shape, q.dtype)))
    assert taken["spill_bytes"] == 0 and not taken["serialised"]
    assert check_case(case, on_device=False) <= 1
