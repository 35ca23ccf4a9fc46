"""The experiment on blocks of diffusers' models: in small, its page, and what it refuses."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyattn.measure.words import format_seconds
from experiments._harness.others import format_comparison
from experiments.diffusion import diffusers_blocks as experiment
from experiments.diffusion import torchao_blocks
from experiments.diffusion.diffusers_blocks import (
    COMPILED,
    DEFAULT,
    MODELS,
    NATIVE,
    QUICK_MODELS,
    WAYS,
)


def test_what_blocks_win_is_what_its_record_says() -> None:
    inside = experiment.PAGE.read_text().split(experiment.BEGIN)[1].split(experiment.END)[0]
    assert inside == f"\n{experiment.section(experiment.recording.stored('diffusers_blocks'))}\n", (
        "run python -m experiments.diffusion.diffusers_blocks --stored"
    )


def test_models_are_of_real_size_and_have_small_ones() -> None:
    assert set(DEFAULT) < set(MODELS) == set(QUICK_MODELS)
    assert MODELS["Flux"].tokens == 4096 and MODELS["Wan 14B"].tokens == 32_760
    for name, small in QUICK_MODELS.items():
        assert (small.family, len(small.grid)) == (MODELS[name].family, len(MODELS[name].grid))
        assert small.tokens >= 128 <= small.prompt  # fewer would stay native


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert experiment.main(["--quick"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("this needs torch and diffusers with what they need (")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("libraries")
@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is there")
def test_torchao_is_asked_for_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchao_blocks.main(["--quick"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("this needs torchao (") and said[-1].endswith("pip install torchao")


@pytest.mark.usefixtures("libraries")
def test_ways_of_torchaos_blocks_are_judged_by_native(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    file = tmp_path / "record.json"
    assert torchao_blocks.main(["--quick", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert [*row["ways"]][0] == torchao_blocks.NATIVE and tuple(row["ways"]) == torchao_blocks.WAYS
    changed = {name: way["to_native"] for name, way in row["ways"].items()}
    assert changed.pop(torchao_blocks.NATIVE) == 0
    assert all(0 < x < CLOSE for x in changed.values())


@pytest.fixture
def libraries() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")


#: What INT8 may change, as docs/INTEROP.md has it of attention: a share of the output here, of
#: which what was replaced is a part.
CLOSE = 0.02


def judge_record(
    record: dict[str, Any], names: tuple[str, ...], ways: dict[str, tuple[Any, bool, bool]]
) -> None:
    assert tuple(row["model"] for row in record["rows"]) == names
    for row in record["rows"]:
        found = row["ways"]
        assert row["ok"] and set(found) == set(ways)
        assert found[NATIVE]["to_native"] == 0 < found[NATIVE]["to_float32"] < CLOSE
        for name, (policy, linear, compiled) in ways.items():
            way = found[name]
            assert way["refused"] == "" and way["to_native"] < CLOSE and way["to_float32"] < CLOSE
            native = policy is None and not linear
            assert (way["to_native"] > 0) == (way["steps_to_native"] > 0) == (not native)
            assert set(way.get("modes", ())) == ({policy} if policy and not compiled else set())
            assert way.get("compiled", []) == ([policy] if policy and compiled else [])
            eager = found[name.removesuffix(COMPILED)]  # what is traced is not changed
            assert way["to_native"] == eager["to_native"]
            assert (way["weight_bytes"] < found[NATIVE]["weight_bytes"]) == linear
            assert (way.get("int8_layers", 0) > 4) == linear
        bits, int8 = (found[n]["to_native"] for n in ("attention in 16 bits", "both INT8"))
        assert bits < int8


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("names", "compiled"),
    [
        (("Wan 14B",), False),
        pytest.param(("Flux", "Wan 14B", "Kandinsky 5 Lite"), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_runs_in_small(
    names: tuple[str, ...],
    compiled: bool,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {name: way for name, way in WAYS.items() if compiled or not way[2]}
    monkeypatch.setattr(experiment, "WAYS", ways)
    file = tmp_path / "blocks.json"
    assert experiment.main(["--quick", "--json", str(file), "--models", *names]) == 0
    record = json.loads(file.read_text())
    judge_record(record, names, ways)
    assert "both INT8" in capsys.readouterr().out
    timed = copy.deepcopy(record)
    timed["environment"] |= {"device": {"name": "some device"}, "revision": "0123456789abcdef"}
    for row in timed["rows"]:
        for way in row["ways"].values():
            way |= {"seconds": 0.01, "steps_seconds": 0.1, "peak_bytes": 2**30}
            way |= {"ratio": [1.25, 1.24, 1.26], "steps_ratio": [1.2, 1.19, 1.21]}
    said = experiment.section(timed)
    assert f"{names[0]} (`" in said and "on some device, revision 0123456789, torch " in said
    lines = [line for line in said.splitlines() if line.startswith("| both INT8 | ")]
    cells = [format_seconds(0.01), format_comparison([1.25, 1.24, 1.26]), format_seconds(0.1)]
    assert len(lines) == len(names)
    assert all(line.startswith(f"| both INT8 | {' | '.join(cells)} | ") for line in lines)
    assert said.count("| of native, compiled |") == 2 * compiled * len(names)
    if compiled:
        assert said.index("| both INT8, compiled | ") < said.index("| both INT8 | ")


@pytest.mark.usefixtures("libraries")
def test_a_way_that_is_not_what_it_says_is_refused() -> None:
    import torch

    def way(**said: Any) -> Any:
        found = experiment.Way(None, attention=object())
        good = {"modes": {"balanced": 2}, "native": {}, "fallbacks": {}, "compiled": []}
        found.said = lambda: good | said  # type: ignore[method-assign]
        return found

    good, name = (torch.ones(3),), "both INT8"
    assert experiment.judged(name, way(), good) == ""
    for said in ({"native": {"attention mask": 1}}, {"fallbacks": {"float32": 1}}, {"modes": {}}):
        assert "left attention to others" in experiment.judged(name, way(**said), good)
    assert "not finite" in experiment.judged(name, way(), (*good, torch.tensor([torch.nan])))
    compiled = f"{name}{COMPILED}"
    assert experiment.judged(compiled, way(compiled=["balanced"]), good) == ""
    for ran in ([], ["balanced", "native: attention mask"]):
        assert "left attention to others" in experiment.judged(compiled, way(compiled=ran), good)


@pytest.mark.usefixtures("libraries")
def test_ways_share_what_they_have_in_common() -> None:
    made = experiment.make(QUICK_MODELS["Wan 14B"], "cpu", 0)
    before = {name: x.clone() for name, x in made.named_parameters()}
    found = experiment.ways(made, {"backend": "eager"})
    own = {x.data_ptr() for x in made.parameters()}
    for name, (_, linear, _) in WAYS.items():
        tensors = {x.data_ptr() for x in found[name].transformer.parameters()}
        assert (tensors < own) if linear else (tensors == own)
    assert all(bool((x == before[name]).all()) for name, x in made.named_parameters())
    codes = [
        {x.data_ptr() for x in found[name].transformer.buffers()}
        for name in ("INT8 linear layers", "both INT8")
    ]
    assert codes[0] == codes[1]


@pytest.mark.usefixtures("libraries")
def test_what_is_timed_takes_turns_and_what_was_refused_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import diffusers
    import torch

    calls: dict[str, list[int]] = {}

    def turns(given: dict[str, Any], *, rounds: int, **_: Any) -> dict[str, list[float]]:
        for call in given.values():
            call(0)
        return {name: [2.0 if name == NATIVE else 1.0] * rounds for name in given}

    def model(name: str) -> Any:
        def run(x: Any, t: Any, return_dict: bool) -> tuple[Any]:
            calls.setdefault(name, []).append(int(t[0]))
            return (x,)

        return run

    monkeypatch.setattr(experiment.timing, "time_interleaved", turns)
    monkeypatch.setattr(experiment.device, "clocks", dict)
    found = {name: experiment.Way(model(name)) for name in WAYS}
    row = {"ways": {name: {"refused": ""} for name in WAYS}}
    row["ways"]["INT8 attention"]["refused"] = "why"
    x = torch.ones(2)
    experiment.timed(
        found, diffusers.FlowMatchEulerDiscreteScheduler(), x, lambda x, t: {"x": x, "t": t},
        {"x": x, "t": torch.ones(1)}, row, argparse.Namespace(rounds=15, loop_rounds=5),
    )  # fmt: skip
    assert set(calls) == set(WAYS) - {"INT8 attention"}
    assert all(len(steps) == 1 + experiment.STEPS for steps in calls.values())
    assert all(steps[1:] == sorted(steps[1:], reverse=True) for steps in calls.values())
    assert "ratio" not in row["ways"][f"{NATIVE}{COMPILED}"]
    assert row["ways"][f"both INT8{COMPILED}"]["ratio"] == [1.0, 1.0, 1.0]  # native compiled's time
    both = row["ways"]["both INT8"]
    assert both["ratio"] == both["steps_ratio"] == [2.0, 2.0, 2.0]
    assert "ratio" not in row["ways"][NATIVE] and len(both["steps_samples"]) == 5
    assert "seconds" not in row["ways"]["INT8 attention"]
