"""The experiment on models with INT8 layers: fifty of its sequences, and faults that it finds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from experiments._harness import recording
from experiments.diffusion import replaced_models as experiment

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch")
for name in ("diffusers", "peft", "accelerate"):
    pytest.importorskip(name)
restoring = importlib.import_module("cupyattn.interop.torch.restoring")
linear = importlib.import_module("cupyattn.interop.torch.linear")
worlds = importlib.import_module("experiments._harness.model_worlds")


#: Seed of the sequences of the suite; the record has others.
SEED = 1


def sequences(count: int) -> list[Any]:
    """Return numbers of sequences; compiled sequences take seconds."""
    compiled = [
        any(kind == "compiled" for kind, _ in experiment.draw(SEED, number).steps)
        for number in range(count)
    ]
    return [
        pytest.param(number, marks=[pytest.mark.slow] if slow else [])
        for number, slow in enumerate(compiled)
    ]


@pytest.mark.parametrize("number", sequences(50))
def test_layers_stay_in_their_bounds_and_come_back(number: int) -> None:
    outcome = experiment.run(SEED, number)
    assert outcome.kind in ("right", "native"), outcome.said
    assert outcome.worst <= 1 or outcome.kind == "native"


def sequence(*steps: tuple[str, dict[str, Any]]) -> experiment.Sequence:
    return experiment.Sequence("wan", "float32", 0, list(steps))


REPLACE = "replace", {"part": 0, "strategy": "block", "originals": "cpu", "again": False}
#: Codes that are multiples of this are off by half of it in the mean: more than the bound allows.
COARSE = 8
LOAD = "load", {"rank": 16, "part": 0, "dora": False, "from_file": False, "seed": 3}
SWAP = "swap", {"chosen": 0, "weight": 1.0}
RUN = "run", {}
RESTORE = "restore", {"by_handle": True}


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse codes, an adapter that counts twice, a rounded weight, a refusal without a way."""
    steps = sequence(LOAD, SWAP, REPLACE, RUN, RESTORE, RUN)
    assert experiment.Run(steps).go().kind == "right"

    def found(name: str, home: Any, changed: Any) -> experiment.Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(home, name, changed)
            return experiment.Run(steps).go()

    replace = worlds.World.replace

    def coarse(self: Any, **options: Any) -> None:
        replace(self, **options)
        for layer in self.model.modules():
            if isinstance(layer, linear.Int8Linear):
                layer.weight_codes.copy_(layer.weight_codes // COARSE * COARSE)

    outcome = found("replace", worlds.World, coarse)
    assert outcome.kind == "failed" and "times its bound off" in outcome.said
    swap = worlds.World.swap

    def twice(self: Any, chosen: int, weight: float) -> None:
        swap(self, chosen, weight * (2 if self.int8 else 1))

    outcome = found("swap", worlds.World, twice)
    assert outcome.kind == "failed" and "times its bound off" in outcome.said
    restored = restoring._restored

    def rounded(*given: Any) -> Any:
        module = restored(*given)
        module.weight.data = module.weight.data.bfloat16().float()
        return module

    outcome = found("_restored", restoring, rounded)
    assert outcome.kind == "failed" and ".weight is not what it was" in outcome.said

    def refused(*_: Any) -> None:
        raise RuntimeError("no")

    outcome = found("restore_linear", importlib.import_module("cupyattn.interop.torch.models"),
                    refused)  # fmt: skip
    assert outcome.kind == "failed" and "RuntimeError: no" in outcome.said


def test_a_run_goes_on_from_its_record(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "record.json"
    assert experiment.main(["--sequences", "2", "--minutes", "0", "--json", str(file)]) == 0
    assert experiment.main(["--resume", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["complete"] and record["done"] == 2 and not record["failed"]
    assert set(record["versions"]) == set(experiment.LIBRARIES)
    assert "weights came back to the bit" in capsys.readouterr().out
    assert experiment.draw(0, 7) == experiment.draw(0, 7) != experiment.draw(1, 7)


def test_the_record_has_two_thousand_sequences_and_no_failure() -> None:
    record = recording.stored("replaced_models")
    assert record["done"] == record["sequences"] == 2000 and record["complete"]
    assert record["failed"] == [] and record["worst"] <= 1
    assert record["restored"] > 10_000 and record["steps"].keys() == experiment.WEIGHTS.keys()
    said = {key.partition(":")[0] for key in record["refusals"]}
    assert said <= experiment.REFUSALS.keys()
