"""The experiment on whole models: families in small, cells written one by one, its pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments._harness import recording, whole_families
from experiments.diffusion import whole_models
from experiments.diffusion.whole_models import BALANCED, FP8_OURS, NATIVE, WAYS
from tests.support.marks import slow_unless


def test_what_whole_models_win_is_what_the_record_says() -> None:
    page = whole_models.blocks.PAGE.read_text(encoding="utf-8")
    inside = page.split(whole_models.BEGIN)[1].split(whole_models.END)[0]
    assert inside == f"\n{whole_models.section(recording.stored(whole_models.NAME))}\n", (
        "run python -m experiments.diffusion.whole_models --stored"
    )


def test_an_interval_with_one_is_undecided_in_every_table() -> None:
    record = recording.stored(whole_models.NAME)
    row = record["rows"][0]
    row["cells"]["passes"]["ways"][BALANCED]["ratio"] = [1.2345, 0.99, 1.5]
    for header, lines in (whole_models.overview(record), whole_models.table(row)):
        said = " ".join(cell for line in lines for cell in line)
        assert "undecided [0.990, 1.500]" in said and "1.234" not in said
        assert all(len(line) == len(header) for line in lines)


def test_kernels_are_counted_by_kind_and_shown_once_measured() -> None:
    kinds = {
        "gemm_int8_channel": "products", "nvjet_sm90_tst_192x192": "products",
        "attn_fa_int8": "attention", "cudnn_generated_fort_native_sdpa_sm90": "attention",
        "norm_quant": "codes and norms before them", "quantize": "codes and norms before them",
        "triton_red_fused__fused_rms_norm_diffusers_attention": whole_models.OTHER,
        "Memset (Device)": whole_models.OTHER,
    }  # fmt: skip
    assert {name: whole_models.part_of(name) for name in kinds} == kinds
    host = {"ways": {BALANCED: {"parts": dict.fromkeys([*whole_models.PARTS, "other"], 0.002)}}}
    record = {"rows": [{"model": "Flux", "cells": {"host": host}}, {"model": "LTX", "cells": {}}]}
    header, lines = whole_models.parts_table(record)
    assert lines == [["Flux", BALANCED, *["2 ms"] * 4]] and len(header) == len(lines[0])


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("diffusers")
    return pytest.importorskip("torch")


#: The others take seconds to make.
QUICK = ("Wan 2.1 14B", "LTX")


@pytest.mark.parametrize(
    "name", slow_unless(lambda _, name: name in QUICK, whole_families.FAMILIES)
)
def test_every_family_is_called_as_its_pipeline_calls_it(name: str, torch: Any) -> None:
    family = whole_families.small(name)
    assert set(family.blocks.values()) == {2} and len(family.grid) == len(
        whole_families.FAMILIES[name].grid
    )
    model = whole_families.make(family, "cpu", 0)
    latents, arguments = whole_families.inputs(family, "cpu", 0)
    with torch.no_grad():
        found = family.call(model, arguments(latents, torch.tensor([700.0])))
    assert found.shape == latents.shape and bool(found.isfinite().all())


def test_fp8_layers_err_as_e4m3_does(torch: Any) -> None:
    from experiments._harness.fp8_rows import replace

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 8)).bfloat16()
    x = torch.randn(2, 5, 256).bfloat16()
    with torch.no_grad():
        before = model[0](x).float()
        replace(model, {"0"})
        error = (model[0](x).float() - before).norm() / before.norm()
    assert type(model[1]) is torch.nn.Linear
    assert model[0](x).shape == before.shape and 0.01 < error < 0.06


def fakes(calls: list[str], fails: str = "") -> dict[str, Callable[[Any], dict[str, Any]]]:
    def cell(name: str) -> Callable[[Any], dict[str, Any]]:
        def measure(stage: Any) -> dict[str, Any]:
            calls.append(name)
            if name == fails:
                raise KeyboardInterrupt
            return {way: {"seconds": 1.0, "refused": "", "weight_bytes": 1} for way in WAYS}

        return measure

    return {name: cell(name) for name in ("replace", "errors", "first")}


def test_what_stops_it_loses_one_cell_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    calls: list[str] = []
    file = tmp_path / "record.json"
    command = ["--quick", "--json", str(file), "--models", "LTX", "--cells", "replace", "first"]
    monkeypatch.setattr(whole_models, "_CELLS", fakes(calls, fails="first"))
    with pytest.raises(KeyboardInterrupt):
        whole_models.main(command)
    assert [*json.loads(file.read_text())["rows"][0]["cells"]] == ["replace"]
    monkeypatch.setattr(whole_models, "_CELLS", fakes(calls))
    assert whole_models.main(command) == 0
    assert calls == ["replace", "first", "first"]
    (row,) = json.loads(file.read_text())["rows"]
    assert [*row["cells"]] == ["replace", "first"] and row["model"] == "LTX"
    assert {"revision", "device", "rounds"} <= set(row["cells"]["first"])


def test_cells_of_other_files_take_the_place_of_older_ones() -> None:
    def record(model: str, **cells: str) -> dict[str, Any]:
        return {"rows": [{"model": model, "cells": cells}]}

    old = record("Flux", errors="old", first="old")
    merged = whole_models.with_cells(old, record("Flux", first="new", host="new"))
    assert merged["rows"][0]["cells"] == {"errors": "old", "first": "new", "host": "new"}
    merged = whole_models.with_cells(record("LTX"), old)
    assert [row["model"] for row in merged["rows"]] == ["Flux", "LTX"]


def test_ratios_are_those_of_rounds() -> None:
    samples = {NATIVE: [4.0, 2.0, 8.0], FP8_OURS: [2.0, 1.0, 4.0], BALANCED: [1.0, 0.5, 2.0]}
    found = whole_models.compared(samples)
    assert "ratio" not in found[NATIVE] and found[BALANCED]["ratio"] == [4.0, 4.0, 4.0]
    assert found[BALANCED]["to_fp8"] == [2.0, 2.0, 2.0] and found[BALANCED]["seconds"] == 1.0


@pytest.mark.slow
def test_it_runs_in_small(tmp_path: Path, torch: Any) -> None:
    file = tmp_path / "record.json"
    assert whole_models.main(["--quick", "--json", str(file), "--models", "Wan 2.1 14B"]) == 0
    cells = json.loads(file.read_text())["rows"][0]["cells"]
    assert [*cells] == ["replace", "errors", "first"]
    assert all(0 < error < 0.02 for error in cells["errors"]["ways"].values())
    ways = cells["first"]["ways"]
    assert [*ways] == [*WAYS] and not any(way["refused"] for way in ways.values())
    changed = {name: way["to_native"] for name, way in ways.items()}
    assert changed.pop(NATIVE) == 0 < min(changed.values())
    native = ways[NATIVE]["weight_bytes"]
    assert all(way["weight_bytes"] < native for name, way in ways.items() if name != NATIVE)
