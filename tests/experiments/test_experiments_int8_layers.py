"""The experiment on INT8 layers of torch runs in small, and fails where a bound is missed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from experiments._harness.others_linear import COMFY
from experiments.speed import int8_layers
from experiments.speed import int8_layers_few_rows as few_rows


def test_layers_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "layers.json"
    assert int8_layers.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    for row in (*record["rows"], record["product"]):
        assert row["shares"].keys() == {"block", "channel"}
        assert 0.5 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    made = int8_layers.layers_of

    def wrong(weight, bias):  # type: ignore[no-untyped-def]
        layers = made(weight, bias)
        layers["channel"].forward = lambda x: made(weight.flip(0), bias)["channel"](x)
        return layers

    monkeypatch.setattr(int8_layers, "layers_of", wrong)
    assert int8_layers.main(["--quick"]) == 1


def comfy_kitchen(call: Callable[..., Any], *taken_on: str) -> ModuleType:
    """Return a stand-in for the library, with the names and arguments of its version 0.2.40."""

    def validate(backend: str, name: str, given: dict[str, Any]) -> SimpleNamespace:
        assert name == "int8_linear" and given["weight"].dtype == torch.int8
        return SimpleNamespace(
            success=backend in taken_on, failed_param="__backend__", failure_reason="not built"
        )

    module = ModuleType("comfy_kitchen")
    module.int8_linear = call  # type: ignore[attr-defined]
    module.registry = SimpleNamespace(  # type: ignore[attr-defined]
        validate_backend_for_call=validate
    )
    return module


def int8_linear(x: Any, weight: Any, weight_scale: Any, bias: Any, out_dtype: Any) -> Any:
    scale = x.float().abs().amax(1, keepdim=True) / 127
    product = (x / scale).round() @ weight.float().T
    return (product * scale * weight_scale.reshape(-1) + bias).to(out_dtype)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "comfy-kitchen is absent: "),
        (comfy_kitchen(int8_linear, "cuda"), "cannot run on eager: __backend__: not built"),
        (comfy_kitchen(lambda *x, **o: -int8_linear(*x, **o), "eager"), "relative error 2, "),
        (comfy_kitchen(lambda *x, **o: x[0] @ x[0], "eager"), "comfy-kitchen: mat1 and mat2 "),
        (comfy_kitchen(int8_linear, "eager"), None),
    ],
    ids=["absent", "without kernels", "wrong", "failing", "there"],
)
def test_a_layer_of_comfy_kitchen_takes_part_or_is_said_to_be_missing(
    module: ModuleType | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen", module)
    file = tmp_path / "layers.json"
    assert int8_layers.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    (row,) = record["rows"]
    assert record["host"]["refused"] == row["refused"]
    assert set(row["refused"]) == (set() if said is None else {COMFY})
    assert said is None or said in row["refused"][COMFY]
    assert (COMFY in capsys.readouterr().out.partition("product")[2]) == (said is not None)
    assert record["versions"].keys() == {COMFY}


def test_the_table_has_every_ratio() -> None:
    ratios = {f"{s} over {o}": [1.5, 1.4, 1.6] for s in ("block", "channel") for o in
              int8_layers.OTHERS}  # fmt: skip
    timed = {
        "label": "made up", "m": 1, "n": 2, "k": 3, "shares": {"block": 0.5}, "ratios": ratios,
        "seconds": {"channel": 1e-6, "block": 2e-6, int8_layers.BF16: 3e-6},
    }  # fmt: skip
    header, (line,) = int8_layers.table([timed])
    found = dict(zip(header, line, strict=True))
    assert found["channel x comfy-kitchen"] == found["channel x torch._int_mm"]
    assert found["block x comfy-kitchen"] == "1.500 [1.400, 1.600]"


def test_layers_of_few_rows_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "few.json"
    assert few_rows.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["m"] for row in rows] == list(few_rows.QUICK_ROWS)
    for row in rows:
        assert 0.2 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    timed = rows[0] | {
        "seconds": {"torch BF16": 3e-6, "block": 2e-6, "channel": 1e-6},
        "ratios": {"block": [1.5, 1.4, 1.6], "channel": [3.0, 2.9, 3.1]},
    }
    header, (line,) = few_rows.table([timed])
    assert dict(zip(header, line, strict=True))["channel x torch BF16"] == "3.000 [2.900, 3.100]"
