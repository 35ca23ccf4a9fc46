"""`cupyattn.ablate`: the points of every part, their judgements, and the refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.cli import main
from cupyattn.diffusion import ablation, ablation_ways
from cupyattn.measure import timing
from cupyattn.quant.choices import CHOICES
from tests.support.foreign import ForeignWithNamespace
from tests.support.runs import normal

SHAPES = (1, 1, 160, 8), (1, 1, 160, 8)


def test_the_ways_of_diffusion_are_points() -> None:
    """Given and static scales, by timestep, pruning, local, block-sparse; beside the default."""
    found = ca.ablate(*normal(*SHAPES), ["diffusion"])
    rows = {row["variant"]: row for row in found.rows}
    assert list(rows) == [
        "fa_int8", "given scales of a tensor", "static scales of a head",
        "the same by timestep, 2 times the noise", "pruned, 20% of the keys",
        "local, 25% of the keys", "block-sparse, 25% of the keys",
    ]  # fmt: skip
    assert found.ok and found.backend == "mirror"
    for name, row in rows.items():
        j2 = row["judgement"]["j2"]
        assert row["ok"] and (j2 is None if name.startswith("pruned") else 0 < j2 <= 1)
        assert row["error_over_default"] == pytest.approx(
            row["judgement"]["relative_error"] / rows["fa_int8"]["judgement"]["relative_error"]
        )
    assert rows["fa_int8"]["error_over_default"] == 1
    given = rows["given scales of a tensor"]["judgement"]["relative_error"]
    assert rows["static scales of a head"]["judgement"]["relative_error"] <= given
    lines = str(found).splitlines()
    assert "rel. error" in lines[0] and lines[1 + len(rows)] == ""
    assert "\n".join(lines[2 + len(rows) :]) == ablation.LEGEND


def test_every_choice_of_a_part_is_a_point() -> None:
    points = ablation.points(ablation.PARTS, *normal(*SHAPES)[:2])
    names = [point.name for point in points]
    assert len(names) == len({*names}) and {*ca.VARIANTS} < {*names}
    for part, kind in ablation.KINDS.items():
        some = {point.name for point in ablation.points([part], *normal(*SHAPES)[:2])}
        assert some == {ablation.DEFAULT, *CHOICES[kind]}
    assert {"INT8 V, P in 16 bits", "INT8 P and V, V per tensor"} < {*names}
    assert {point.kind for point in points} >= {*CHOICES, ablation_ways.KIND}


def test_arrays_of_any_library_are_taken() -> None:
    q, k, v = normal((1, 1, 9, 8), (1, 1, 20, 8))
    plain = ca.ablate(q, k, v, ["bits"], causal=True)
    foreign = ca.ablate(*map(ForeignWithNamespace, (q, k, v)), ["bits"], causal=True)
    assert plain.rows == foreign.rows and plain.call.causal


def test_times_are_of_points_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as on a device, by a made-up clock: the default's ratio to itself is 1."""
    monkeypatch.setattr(ablation.interchange, "is_cupy", lambda x: True)

    def samples(calls: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        return {name: [1.0 + i] * 3 for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "time_interleaved", samples)
    monkeypatch.setattr(timing, "rotated", lambda qkv: [qkv])
    found = ca.ablate(*normal(*[(1, 1, 40, 64)] * 2), ["bits"])
    assert [row["seconds"] for row in found.rows] == [1, 2, 3, 4, 5]
    assert found.rows[0]["speed_ratio"][0] == 1 and found.rows[1]["speed_ratio"][0] == 0.5
    assert "x speed" in str(found) and "0.50" in str(found)
    untimed = ca.ablate(*normal(*SHAPES), ["bits"], rounds=0)
    assert "not timed" in str(untimed)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"parts": ["speed"]}, ValueError, "parts must be out of rungs, granularity, .*'speed'"),
        ({"parts": "rungs"}, TypeError, r"names of parts, as \['rungs'\], got 'rungs'"),
        ({"parts": 3}, TypeError, "got 3"),
        ({"k": np.zeros((1, 1, 0, 8), np.float16)}, ValueError, "must hold 1 or more of every"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = normal((1, 1, 9, 8), (1, 1, 9, 8))
    call = {"q": q, "k": k, "v": v, **given}
    if given.get("k") is not None:
        call["v"] = given["k"]
    with pytest.raises(error, match=message):
        ca.ablate(**call)


def test_the_command_prints_what_the_function_finds(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--distribution", "normal", "--len", "9", "--heads", "1", "--head-dim", "8"]
    assert main(["ablate", "bits", *shape, "--batch", "1"]) == 0
    told = capsys.readouterr().out
    assert "4 bits, Q and K per token" in told and "x error" in told
    assert ablation.LEGEND in told
