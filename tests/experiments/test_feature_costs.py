"""experiments/speed/feature_costs.py: runs in small, and writes its page from a record alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.ops.attention import resolved
from experiments._harness import merging, recording
from experiments._harness.cells import Problem
from experiments.speed import feature_costs, scores


def test_it_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    small = ["--quick", "--head-dims", "16", "--rungs", "fa_tc", "fa_int8"]
    assert feature_costs.main([*small, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    (found,) = record["problems"]
    assert record["backend"] == "mirror"
    cells = {(row["rung"], row["feature"]) for row in found["rows"]}
    assert cells == {
        (rung, name) for rung in ("fa_tc", "fa_int8") for name in feature_costs.FEATURES
    }
    assert all(row["ok"] and "seconds" not in row for row in found["rows"])
    assert "rope interleaved" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the record has no times"):
        feature_costs.page(record)


def test_each_feature_is_the_only_one() -> None:
    problem = Problem(1, 2, 64, 16)
    inputs = problem.draw(on_device=False)
    seen = set()
    for feature in feature_costs.FEATURES:
        options = feature_costs.options_of(feature, problem, np)
        operands = feature_costs.operands_of(feature, inputs)
        call = resolved(*operands, **options).call
        plain = resolved(*inputs).call
        changed = {n for n, x in vars(call).items() if x != getattr(plain, n)}
        assert changed or feature == feature_costs.PLAIN, feature
        seen.add((tuple(sorted(changed)), call.rope, call.mask, str(options.get("mask"))))
    assert len(seen) == len(feature_costs.FEATURES)


def rows_with_times() -> list[dict[str, Any]]:
    rows = []
    for rung in feature_costs.RUNGS:
        plain = 1e-3 if rung == "fa_tc" else 2e-3
        for i, (name, text) in enumerate(feature_costs.FEATURES.items()):
            form = "sm90" if rung == "fa_tc" and name not in ("mask", "bias") else "portable"
            row = {"rung": rung, "feature": name, "description": text, "form": form,
                   "ok": (rung, name) != ("fa", "causal"),
                   "j2": 0.1, "seconds": plain * (1 + i / 10), "samples": []}  # fmt: skip
            if i:
                row["ratio"] = [1 + i / 10, 1 + i / 10 - 0.01, 1 + i / 10 + 0.02]
            rows.append(row)
    return rows


def record_with_times(*head_dims: int, revision: str = "0123456789abcdef") -> dict[str, Any]:
    device = {"name": "A device", "driver": "1.2", "capability": 90}
    return {
        "experiment": "feature_costs", "backend": "cuda", "rounds": 30, "command": "measure",
        "environment": {"device": device, "nvrtc": "13.0", "revision": revision},
        "problems": [
            {
                "problem": {"name": f"B4 H16 4096 hd{d} float16 normal", "head_dim": d},
                "rows": rows_with_times(),
            }
            for d in head_dims
        ],
    }  # fmt: skip


def written(path: Path, record: dict[str, Any]) -> str:
    path.write_text(json.dumps(record), encoding="utf-8")
    return str(path)


def test_the_page_is_written_from_the_record(tmp_path: Path) -> None:
    file = tmp_path / "FEATURES.md"
    feature_costs.update_page(record_with_times(64, 128), file)
    text = file.read_text()
    assert "A device, driver 1.2, NVRTC 13.0, revision 0123456789." in text
    assert text.count("|  | unfused | fa | fa_warps | fa_tc | fa_int8 |") == 2
    assert "| plain | 2 ms | 2 ms | 2 ms | 1 ms | 2 ms |" in text
    ratio = "x 1.10 [1.09, 1.12]"
    assert f"| lse |{f' {ratio} |' * 5}" in text
    assert "| causal | x 1.20 [1.19, 1.22] | misses its bound | x 1.20" in text
    assert "| x 1.50 [1.49, 1.52] † | x 1.50 [1.49, 1.52] |" in text
    assert text.count("| rope interleaved |") == 3
    assert "† marks calls that run in another form" in text


def test_the_page_explains_a_mark_only_where_there_is_one() -> None:
    record = record_with_times(64, 128)
    for found in record["problems"]:
        for row in found["rows"]:
            row["form"] = "portable"
    assert "†" not in feature_costs.page(record)


def test_a_column_says_which_card_it_is_of() -> None:
    record = record_with_times(64, 128)
    record["environment"]["device"]["name"] = "NVIDIA H100 80GB HBM3"
    for found in record["problems"]:
        for row in found["rows"]:
            row |= {"device": "NVIDIA H200"} if row["rung"] == "fa_tc" else {}
    header = "|  | unfused (H100) | fa (H100) | fa_warps (H100) | fa_tc (H200) | fa_int8 (H100) |"
    assert feature_costs.page(record).count(header) == 2


def test_the_page_describes_features_as_they_are_described_now() -> None:
    """A sentence may be mended without measuring again."""
    record = record_with_times(64, 128)
    record["problems"][0]["rows"][1]["description"] = "as it was"
    text = feature_costs.page(record)
    assert "as it was" not in text and feature_costs.FEATURES["lse"] in text


# ---- what is compiled beforehand -----------------------------------------------------------------


def test_everything_is_compiled_beforehand_for_the_device() -> None:
    """The Hopper forms, which take every feature, and the passes before."""
    problem = Problem(1, 2, 192, 64)
    inputs = problem.draw(on_device=False)
    options = {f: feature_costs.options_of(f, problem, np) for f in feature_costs.FEATURES}
    found = feature_costs.kernels(("fa_tc", "fa_int8"), inputs, options, "sm_90a")
    assert len(found) == len(set(found))
    of = {arch: {str(m.source) for m, a in found if a == arch} for arch in ("sm_90", "sm_90a")}
    assert of["sm_90a"] >= {"sm90/attn_fa_tc.cu", "sm90/attn_fa_int8.cu"}
    assert of["sm_90"] == {"prepare/pack_mask.cu", "prepare/quantize.cu", "prepare/rope.cu"}
    with_lse = [m for m, _ in found if dict(m.defines)["CFG_LSE"]]
    assert {str(m.source) for m in with_lse} == {"sm90/attn_fa_tc.cu", "sm90/attn_fa_int8.cu"}
    portable = feature_costs.kernels(("fa_tc",), inputs, options, "sm_89")
    assert {arch for _, arch in portable} == {"sm_89"}


@pytest.mark.parametrize("feature", feature_costs.FEATURES)
def test_quantising_for_the_judge_compiles_nothing_more(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(1, 2, 192, 64)
    inputs = problem.draw(on_device=False)
    options = {f: feature_costs.options_of(f, problem, np) for f in feature_costs.FEATURES}
    compiled = feature_costs.kernels(("fa_int8",), inputs, options, "sm_90a")
    run = []

    def quantize(*operands: Any, **given: Any) -> Any:
        return ca.quantize(*operands, **given, arch="sm_90a", backend="interpret")

    def stop(plan: Any, *_: Any) -> None:
        run.extend(launch.module for launch in plan.launches)
        raise InterruptedError

    monkeypatch.setattr("cupyattn.interpret.run", stop)
    given = feature_costs.quantising(options[feature])
    with pytest.raises(InterruptedError):
        quantize(*inputs, **given)
    assert run and {(module, "sm_90") for module in run} <= set(compiled)


# ---- records in parts ----------------------------------------------------------------------------


def test_a_run_that_is_cut_off_leaves_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = feature_costs.measure_rung

    def cut_off(rung: str, problem: Problem, *args: Any, **given: Any) -> Any:
        if problem.head_dim == 24:
            raise KeyboardInterrupt
        return measure(rung, problem, *args, **given)

    monkeypatch.setattr(feature_costs, "measure_rung", cut_off)
    file = tmp_path / "record.json"
    small = ["--quick", "--rungs", "fa_tc", "--head-dims", "16", "24", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        feature_costs.main(small)
    record = merging.record_of("feature_costs", file)
    assert [found["problem"]["head_dim"] for found in record["problems"]] == [16]
    assert "rope interleaved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ("head_dim", "lacks head_dim 128: measure"),
        ("rung", "lacks head_dim 64 of fa_tc: measure"),
        ("all", "lacks head_dim 64 and head_dim 128: measure"),
    ],
)
def test_no_page_has_holes(
    change: str, lacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    record = record_with_times(64, 128)
    problems = record["problems"]
    if change == "rung":
        problems[0]["rows"] = [row for row in problems[0]["rows"] if row["rung"] != "fa_tc"]
    record["problems"] = {"head_dim": problems[:1], "all": []}.get(change, problems)
    written(tmp_path / "feature_costs.json", record)
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(feature_costs, "PAGE", tmp_path / "FEATURES.md")
    assert feature_costs.main(["--stored"]) == 2
    error = capsys.readouterr().err
    assert lacks in error and error.count("\n") == 1
    assert not (tmp_path / "FEATURES.md").exists()


def test_a_feature_that_was_not_measured_says_so(tmp_path: Path) -> None:
    """An example is a feature that is newer than the run of a rung."""
    record = record_with_times(64, 128)
    for found in record["problems"]:
        found["rows"] = [
            row for row in found["rows"] if (row["rung"], row["feature"]) != ("unfused", "mask")
        ]
    file = tmp_path / "FEATURES.md"
    feature_costs.update_page(record, file)
    assert file.read_text().count("| mask | not measured | x 1.") == 2


def test_a_run_of_a_part_does_not_begin_to_write_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(feature_costs, "measure_problem")
    assert feature_costs.main(["--quick", "--update-docs", "--head-dims", "64"]) == 2
    assert "lacks head_dim 128" in capsys.readouterr().err


def test_a_merged_record_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scores", scores.WITH_FLASH_4):  # of which the page has a part
        shutil.copy(recording.RESULTS / f"{name}.json", tmp_path)
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(feature_costs, "PAGE", tmp_path / "FEATURES.md")
    written(tmp_path / "feature_costs.json", record_with_times(128))
    other = written(tmp_path / "other.json", record_with_times(64, revision="f" * 40))
    assert feature_costs.main(["--merge", other]) == 0
    record = recording.stored("feature_costs")
    assert [found["problem"]["head_dim"] for found in record["problems"]] == [64, 128]
    assert [row["rung"] for row in record["problems"][0]["rows"][::12]] == [*feature_costs.RUNGS]
    text = (tmp_path / "FEATURES.md").read_text()
    where = ", ".join(f"{rung} at head_dim 64" for rung in feature_costs.RUNGS)
    assert f"revision ffffffffff ({where}) and revision 0123456789 (unfused" in text


def test_a_rung_of_another_device_says_so() -> None:
    record, part = record_with_times(64, 128), record_with_times(64, 128, revision="f" * 40)
    part["environment"]["device"]["name"] = "Another"
    for found in part["problems"]:
        found["rows"] = [row for row in found["rows"] if row["rung"] == "fa_tc"]
    text = feature_costs.page(feature_costs.merged(record, part))
    assert "(unfused, fa, fa_warps, fa_int8) and revision ffffffffff on Another (fa_tc)" in text


def test_a_rung_is_merged_alone() -> None:
    record, part = record_with_times(64, 128), record_with_times(64, revision="f" * 40)
    part["problems"][0]["rows"] = part["problems"][0]["rows"][:12]
    found = feature_costs.merged(record, part)["problems"][0]["rows"]
    assert [row.get("revision", "")[:1] for row in found] == ["f"] * 12 + [""] * 48
    assert "f" * 10 + " (unfused at head_dim 64) and" in feature_costs.page(
        feature_costs.merged(record, part)
    )


def test_records_that_one_page_cannot_describe_are_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was written")

    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(feature_costs.output, "write_json", refuse)
    written(tmp_path / "feature_costs.json", record_with_times(64))
    mirror = record_with_times(128) | {"backend": "mirror"}
    mirror["environment"]["device"] = None
    cases = [
        (record_with_times(128) | {"experiment": "ladder"}, "a record of 'ladder'"),
        (record_with_times(128) | {"rounds": 15}, "must have one number of rounds, got 30 and 15"),
        (mirror, "must have one backend, got cuda and mirror"),
    ]
    for record, why in cases:
        assert feature_costs.main(["--merge", written(tmp_path / "part.json", record)]) == 2
        assert why in capsys.readouterr().err


def test_the_committed_page_is_what_the_committed_record_says() -> None:
    """Neither is there without the other."""
    record = recording.RESULTS / "feature_costs.json"
    assert record.exists() == feature_costs.PAGE.exists()
    if record.exists():
        assert feature_costs.PAGE.read_text(encoding="utf-8") == feature_costs.page(
            recording.stored("feature_costs")
        )
