"""``cupyattn interpret``, and the ladder's run of the kernels in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.cli import verify
from cupyattn.compiler import modules as kc
from cupyattn.compiler import target
from cupyattn.kernels import ladder
from cupyattn.measure import device
from cupyattn.measure import rungs as measure
from cupyattn.measure.rungs import Judgement
from tests.faults.fault_patches import FAULTS

SMALL = ["--len", "40", "--head-dim", "16"]
no_device = pytest.mark.skipif(not device.device_missing(), reason="there is a device")


def status(*arguments: str) -> int:
    return cli.main(list(arguments))


def plant(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels with a deliberate mistake in them."""
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    monkeypatch.setattr(kc, "KERNELS", fault.plant(folder))


@pytest.mark.parametrize("variant", ladder.VARIANTS)
def test_a_rung_is_run_judged_and_counted(
    variant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "counts.json"
    arguments = [*SMALL, "--len-kv", "50", "--causal", "--dtype", "bfloat16", "--seed", "2"]
    assert status("interpret", variant, *arguments, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "normal, seed 2: (1, 1, 40, 16) over (1, 1, 50, 16), bfloat16" in printed
    for words in ("No findings.", "J2 0.", "warp instructions", "global load", "Shared memory:"):
        assert words in printed
    record = json.loads(file.read_text())
    assert record["variant"] == variant and 0 < record["j2"] <= 1
    assert (record["j3"] is not None) == (variant == "fa_int8")
    for kernel in record["kernels"].values():
        assert sum(kernel["instructions"].values()) > 0 and kernel["bytes"]["global load"] > 0
    entries = set(record["kernels"])
    assert f"attn_{variant}" in entries or variant == "unfused"
    if variant == "fa_int8":
        assert entries == {"quantize", "attn_fa_int8"}


@pytest.mark.skipif("sm_90a" not in target.supported_architectures(), reason="NVRTC is too old")
def test_the_hopper_form_runs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("interpret", "fa_tc", *SMALL, "--arch", "sm_90a") == 0
    printed = capsys.readouterr().out
    assert "fa_tc (sm90)" in printed and "No findings." in printed and "\nwgmma " in printed


def test_a_file_of_operands_can_be_interpreted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 2, 9, 8)).astype(np.float16) for name in "qkv"}
    np.savez(tmp_path / "x.npz", **arrays)
    assert status("interpret", "fa", "--qkv", str(tmp_path / "x.npz")) == 0
    assert "(1, 2, 9, 8) over (1, 2, 9, 8), float16" in capsys.readouterr().out


def test_a_finding_is_status_1_and_names_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant("no_barrier_between_softmax_and_output", tmp_path, monkeypatch)
    files = tmp_path / "x.json", tmp_path / "x.txt"
    arguments = ["--json", str(files[0]), "--trace", str(files[1])]
    assert status("interpret", "fa", *SMALL, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == "" and "No findings" not in captured.out
    lines = [line.split("  ", 1) for line in captured.out.splitlines()]
    facts = {name: value.strip() for name, *(value,) in [x for x in lines if len(x) == 2]}
    assert "FINDING: race: shared memory is read, and nothing orders" in captured.out
    assert facts["kernel"] == "attn_fa" and facts["line"].startswith("attn_fa.cu:")
    assert facts["instruction"].startswith("ld.shared.f32")
    assert facts["who"].startswith("block 0, warp 0, lane 1 and ")
    assert facts["address"].endswith("alpha[0]")
    assert json.loads(files[0].read_text())["finding"].startswith("race: ")
    assert files[1].read_text().splitlines()[-1].startswith("# finding: race: ")


def test_a_result_out_of_its_bound_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant("P_halves_exchanged", tmp_path, monkeypatch)
    assert status("interpret", "fa_tc", "--len", "200", "--head-dim", "16") == 1
    printed = capsys.readouterr().out
    assert "> 1, relative error" in printed and "FAILED: no findings" in printed


def test_a_trace_of_another_warp(tmp_path: Path) -> None:
    file = tmp_path / "trace.txt"
    arguments = ["--trace", str(file), "--trace-of", "1:2:3", "--trace-lines", "30"]
    assert status("interpret", "fa", *SMALL, *arguments) == 0
    head, *lines = file.read_text().splitlines()
    assert head.endswith("block 1, warp 2, lane 3") and len(lines) == 30
    assert lines[-1].startswith("# cut here, after 30 lines")


def test_stops_show_registers_and_members(capsys: pytest.CaptureFixture[str]) -> None:
    source = (kc.KERNELS / "attn_fa.cu").read_text().splitlines()
    (line,) = [i for i, text in enumerate(source, 1) if "state.advance(" in text]
    arguments = ["--break", f"attn_fa.cu:{line}", "--stops", "2"]
    assert status("interpret", "fa", *SMALL, *arguments) == 0
    printed = capsys.readouterr().out
    stops = printed.count(f"\nattn_fa at attn_fa.cu:{line}: block 0-1, warp 0, lane 0-31")
    assert stops == 2
    for name in ("Q", "K", "V", "S", "alpha"):
        assert f"\n{name} " in printed.replace(f"\n{name}  ", f"\n{name} ")
    assert printed.index("registers") < printed.index("No findings.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fb"], "variant must be one of"),
        (["mine.cu"], "cannot read mine.cu"),
        (["mine.ptx"], "no mine.toml, which describes the launch"),
        (["fa", "--len", "-1"], "--len must be at least 1, got -1"),
        (["fa", *SMALL, "--break", "attn_fa.cu"], "takes FILE:LINE"),
        (["fa", *SMALL, "--break", "attn_fa.cu:1"], "no instruction comes from attn_fa.cu:1"),
        (["fa", *SMALL, "--break", "fa.cu:40"], "no kernel has instructions of 'fa.cu'"),
        (["fa", *SMALL, "--trace", "x.txt", "--trace-of", "0"], "takes BLOCK:WARP:LANE"),
        (["fa", *SMALL, "--trace", "/nowhere/x.txt"], "--trace: there is no folder '/nowhere'"),
        (["fa", *SMALL, "--arch", "sm_7"], "sm_7"),
        (["fa_tc", *SMALL, "--dtype", "float32"], "float32"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("interpret", *arguments) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("cupyattn: ") and captured.count("\n") == 1 and message in captured


# ---- the ladder ----------------------------------------------------------------------------------


@no_device
def test_the_ladder_interprets_every_rung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ladder.json"
    assert status("ladder", "--heads", "2", *SMALL, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    (header,) = [line.split() for line in printed.splitlines() if line.startswith("rung ")]
    assert header[7:12] == ["PTX", "J2", "instructions", "global", "shared"]
    assert "the kernels themselves, run by the interpreter" in printed
    (table,) = json.loads(file.read_text())["ladders"]
    assert table["interpreted"] and table["backend"] == "mirror"
    counts = {r["variant"]: r["interpreted"] for r in table["rungs"]}
    assert list(counts) == list(ladder.VARIANTS)
    for found in counts.values():
        assert 0 < found["judgement"]["j2"] <= 1
        assert found["global_bytes"] >= 3 * 40 * 16 * 2 and found["shared_bytes"] > 0
    # Each idea of the ladder, as counts.
    assert counts["unfused"]["global_bytes"] > 2 * counts["fa"]["global_bytes"]
    assert counts["fa"]["shared_bytes"] > 2 * counts["fa_warps"]["shared_bytes"]
    assert counts["fa_warps"]["instructions"] > 2 * counts["fa_tc"]["instructions"]


@no_device
def test_the_ladder_fails_where_a_kernel_has_a_hazard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant("no_barrier_between_softmax_and_output", tmp_path, monkeypatch)
    assert status("ladder", *SMALL, "--variants", "fa") == 1
    assert "FINDING: race: shared memory is read" in capsys.readouterr().out


def test_a_kernel_that_misses_its_bound_fails_the_ladder() -> None:
    good, bad = Judgement(0.5, None, 0.1), Judgement(1.5, None, 0.1)
    rungs = [
        measure.Rung("fa", "", good, interpreted=measure.Interpreted(judged, 1, 2, 3))
        for judged in (good, bad)
    ]
    x = np.ones((1, 1, 4, 8), np.float16)
    table = measure.ladder(x, x, x, variants=["fa"])
    assert table.ok and not table.interpreted
    for rung, ok in zip(rungs, (True, False), strict=True):
        assert measure.Ladder((rung,), table.call, "mirror", interpreted=True).ok == ok
    assert "1.5 > 1" in str(measure.Ladder((rungs[1],), table.call, "mirror", interpreted=True))


@no_device
def test_the_ladder_runs_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "compiler_missing", lambda: "NVRTC was not found: install it")
    assert status("ladder", *SMALL) == 0
    printed = capsys.readouterr().out
    assert "The kernels are not interpreted: NVRTC was not found: install it." in printed
    assert "instructions" not in printed


# ---- verify --------------------------------------------------------------------------------------


@no_device
def test_verify_judges_the_kernels_where_the_environment_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [verify.Shape("ragged", 4, 2, 30, 45, 24, True)]
    monkeypatch.setattr(verify, "SHAPES", shapes)
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    arguments = ["verify", "fa_int8", "--distribution", "normal", "--dtype", "float16"]
    assert status(*arguments) == 0
    printed = capsys.readouterr().out
    assert "Running in the interpreter" in printed and " equal " in printed  # J1
    plant("Q_scale_of_another_row", tmp_path, monkeypatch)
    assert status(*arguments) == 1
    assert "FAILED: fa_int8, normal, float16, ragged: J2" in capsys.readouterr().out
