"""docs/timeline_fa_tc.svg: current, and in the order that the interpreter's traces have."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from docs import write_timeline
from docs.write_timeline import Event, events, first_tile, placed


@cache
def lanes() -> dict[str, list[Event]]:
    return {name: first_tile(events(text)) for name, text in write_timeline.traces().items()}


def test_the_picture_is_current() -> None:
    stored = write_timeline.PICTURE.read_text("utf-8")
    assert write_timeline.picture(placed(lanes())) == stored, "run python -m docs.write_timeline"


def test_a_turn_has_the_scores_of_a_step_and_the_output_of_the_one_before() -> None:
    for name in ("computes 1", "computes 2"):
        products = [event.kind for event in lanes()[name] if event.kind in ("scores", "output")]
        assert products == ["scores", *["scores", "output"] * 2, "output"]
        turns = [event.kind for event in lanes()[name] if event.kind in ("take", "pass")]
        assert turns[-8:] == ["take", "pass"] * 4


def test_what_stands_in_the_picture_keeps_its_order() -> None:
    boxes = placed(lanes())
    for name in write_timeline.WARPS:
        own = [box for box in boxes if box.lane == name]
        assert all(first.end <= second.start for first, second in pairwise(own))
    products = sorted(
        (box.start, box.end) for box in boxes if box.event.kind in ("scores", "output")
    )
    assert len(products) == 12
    assert all(first[1] <= second[0] for first, second in pairwise(products)), "one at a time"
    ends = {(box.event.name, box.event.number): box.end for box in boxes if box.lane == "copies"}
    for box in boxes:
        if box.event.kind in ("scores", "output"):
            operand = "K" if box.event.kind == "scores" else "V"
            assert box.start >= ends[operand, box.event.number]


@pytest.mark.parametrize(("lane", "kind"), [("computes 2", "pass"), ("computes 1", "arrive")])
def test_a_missing_signal_is_a_wait_without_end(lane: str, kind: str) -> None:
    fewer = {**lanes(), lane: [event for event in lanes()[lane] if event.kind != kind]}
    with pytest.raises(ValueError, match="waits without end"):
        placed(fewer)
