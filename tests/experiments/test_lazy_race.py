"""The race of a lazy M in the portable fa_tc: the candidate is right, its checks find faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.tuning.lazy_maximum import contestants
from experiments.tuning.lazy_maximum.contestants import CONTESTANTS
from experiments.tuning.lazy_maximum.lazy_checks import Case, check_case, rows_keep_to_themselves
from experiments.tuning.lazy_maximum.lazy_race import cells

#: Candidates that keep all they have in registers.
WITHOUT_SPILLS = {64: (1, 2), 128: (2, 3), 256: (1, 2)}


@pytest.mark.parametrize("head_dim", CONTESTANTS)
def test_a_choice_of_tiles_spills_nothing(head_dim: int) -> None:
    (cell,) = (
        one for one in cells([head_dim])
        if one.causal and (one.length, one.data, one.dtype) == (4096, "normal", "float16")
    )  # fmt: skip
    for i in WITHOUT_SPILLS[head_dim]:
        taken = contestants.resources(cell.plan(CONTESTANTS[head_dim][i]))
        assert taken["spill_bytes"] == 0 and taken["registers"] <= 255


@pytest.mark.parametrize("data", ["rising 0.5", "huge"])
def test_a_small_call_keeps_the_bound(data: str) -> None:
    case = Case(data, "causal", 64, "float16", CONTESTANTS[64][1], lengths=(70, 140), heads=1)
    assert check_case(case, on_device=False) <= 1


#: What may be wrong with a lazy M, as (text of the candidate, what stands there instead).
WRONG = {
    "M never rises again": ("LARGEST_SUM = 256.0f", "LARGEST_SUM = 3e38f"),
    "only the first of the two rows is asked": ("small[0] && small[1]", "small[0]"),
    "O is not rescaled": ("O_acc[r][c][2 * h] *= alpha", "O_acc[r][c][2 * h] *= 1.0f"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = contestants.LAZY.read_text()
    line, instead = WRONG[what]
    assert text.count(line) == 1
    changed = tmp_path / contestants.LAZY.name
    changed.write_text(text.replace(line, instead))
    monkeypatch.setattr(contestants, "LAZY", changed)
    case = Case("half of the rows rising", "", 64, "float16", CONTESTANTS[64][1], heads=1)
    assert check_case(case, on_device=False) > 1


def test_a_row_that_follows_its_neighbours_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_keep_to_themselves(CONTESTANTS[64][1], 64, on_device=False)
    text = contestants.LAZY.read_text()
    assert text.count("small[h] ? NEG_INF : ") == 1
    changed = tmp_path / contestants.LAZY.name
    changed.write_text(text.replace("small[h] ? NEG_INF : ", ""))
    monkeypatch.setattr(contestants, "LAZY", changed)
    assert not rows_keep_to_themselves(CONTESTANTS[64][1], 64, on_device=False)
