"""The experiments: each runs in small without a device, and holds to its rules."""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import compile as compiler
from cupyattn import device, measure, timing
from experiments import (
    backward,
    book_plots,
    diffusion_shapes,
    first_call,
    framework_costs,
    host_time,
    ladder,
    numerics_claims,
    others,
    peers,
    plots,
    precision_ablation,
    quantise,
    race,
    recording,
    tile_order,
    tile_sweep,
    timestep_ablation,
    token_pruning,
)  # fmt: skip
from experiments.cells import Cell, Problem, judge_cell, rung, time_cells

FOLDER = Path(ladder.__file__).parent
SHARED = (
    "book_plots", "captures", "cast_fp8", "cells", "graphs", "merging", "others", "others8",
    "patches", "plots", "recording",
)  # fmt: skip
EXPERIMENTS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in SHARED)
SMALL = Problem(1, 1, 40, 16)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_does(name: str) -> None:
    text = importlib.import_module(f"experiments.{name}").__doc__ or ""
    assert text.splitlines()[0].endswith("?")
    run = f"Run          python -m experiments.{name}"
    for word in ("Varies ", "Holds fixed ", "Measures ", run):
        assert word in text
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()


def test_the_ladder_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    assert ladder.main(["--quick", "--head-dims", "40", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and record["rounds"] == 0
    assert {"device", "nvrtc", "cupy", "numpy", "python"} <= set(record["environment"])
    for found in record["problems"]:
        assert [row["variant"] for row in found["rows"]] == list(ca.VARIANTS)
        assert all(row["ok"] and "seconds" not in row for row in found["rows"])


def test_the_order_of_tiles_is_modelled_without_a_device(tmp_path: Path) -> None:
    file = tmp_path / "tile_order.json"
    assert tile_order.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(x >= 1 for row in rows for x in row["imbalance"].values())
    assert sum(tile_order.work(100, ca.Tiles(50, 50, 4), [2, 1])) == 3 * (1 + 2) + 6 * 1.5


def test_scales_by_timestep_run_in_small(tmp_path: Path) -> None:
    """One scale for all steps loses late ones where activations fall; bins do not."""
    file, drawing = tmp_path / "timestep_ablation.json", tmp_path / "steps.svg"
    given = ["--quick", "--json", str(file), "--plot", str(drawing)]
    assert timestep_ablation.main(given) == 0
    rows = json.loads(file.read_text())["rows"]
    late = {(r["activations"], r["scales"]): r for r in rows if r["timestep"] == 42}
    assert (
        late["raw", "uniform static"]["range"] < 0.03 < 0.5 < late["raw", "static by bin"]["range"]
    )
    assert late["raw", "uniform static"]["error"] > 20 * late["raw", "static by bin"]["error"]
    assert late["raw", "dynamic, policy"]["mode"] == "precision"
    assert all(r["error"] < 0.05 for (_, name), r in late.items() if name == "dynamic")
    assert drawing.read_text().startswith("<?xml")


def test_what_pruning_loses_runs_in_small(tmp_path: Path) -> None:
    """On real data an estimate from rows chooses better than chance, and more rows better yet."""
    file = tmp_path / "token_pruning.json"
    assert token_pruning.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["operands"] for row in rows} == set(token_pruning.sources())
    mean = {
        kind: np.mean(
            [r["error"] for r in rows if r["rows"] == kind and r["operands"].startswith("encoder")]
        )
        for kind in (8, 128, token_pruning.RANDOM)
    }
    assert 0 < mean[128] < mean[8] < mean[token_pruning.RANDOM]


def test_host_times_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "host_time.json"
    assert host_time.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    of_torch = [row for row in rows if row["way"].startswith("torch")]
    assert len(of_torch) == (0 if find_spec("torch") is None else 3 * len(ca.VARIANTS))
    assert len(rows) - len(of_torch) == 4 * len(ca.VARIANTS)
    assert all(row["equal"] and not row["samples"] for row in rows)
    calls: list[int] = []
    assert host_time.sample(lambda: calls.append(1), 7, lambda: None) >= 0 and len(calls) == 7


@pytest.mark.slow
def test_costs_of_frameworks_run_in_small(tmp_path: Path) -> None:
    for library in ("jax", "diffusers"):
        pytest.importorskip(library)
    file = tmp_path / "framework_costs.json"
    assert framework_costs.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["framework"] for row in rows] == ["jax", "jax", "diffusers", "diffusers"]
    assert all(row["samples"][0] > 0 for row in rows)


def test_the_gradients_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "backward.json"
    assert backward.main(["--quick", "--head-dims", "64", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and len(record["problems"]) == 2
    for found in record["problems"]:
        assert [row["variant"] for row in found["rows"]] == [
            backward.ATOMIC, backward.DETERMINISTIC
        ]  # fmt: skip
        assert all(row["ok"] and 0 < row["j2"] <= 1 for row in found["rows"])
        assert found["deterministic beside atomic"] is None
    lengths = [found["problem"]["length"] for found in record["problems"]]
    assert found["operations"] == 5 * 64 * 2 * lengths[1] * (lengths[1] + 1)


def test_another_library_is_held_to_the_gradients_of_exact_attention() -> None:
    given = backward.received(SMALL, on_device=False)
    exact = ca.gradients.backward_exact(*given[:4])
    assert backward.judge(SMALL, others.CUDNN, exact, given)["ok"]
    assert not backward.judge(SMALL, others.CUDNN, [1.02 * x for x in exact], given)["ok"]


def test_gradients_are_compared_in_pairs_of_the_same_rounds_and_drawn(tmp_path: Path) -> None:
    times = [1.0, 2.0, 4.0]
    rows = [timed(others.CUDNN, *times), timed(backward.ATOMIC, *(x / 1.25 for x in times))]
    rows.append(timed(backward.DETERMINISTIC, *(x / 1.25 / 0.8 for x in times)))
    found = backward.compared(rows, backward.ATOMIC)
    assert found["beside cuDNN"] == pytest.approx([1.25] * 3)
    assert found["deterministic beside cuDNN"] == pytest.approx([1.0] * 3)
    assert found["deterministic beside atomic"] == pytest.approx([0.8] * 3)
    other = backward.compared(rows, backward.DETERMINISTIC)
    assert other["beside cuDNN"] == other["deterministic beside cuDNN"]
    pytest.importorskip("matplotlib")
    for row in rows:
        row["tflops"] = 1 / row["seconds"]
    problems = [
        {"problem": vars(Problem(1, 1, n, 64, c)), "rows": rows, **found}
        for n in (512, 1024)
        for c in (False, True)
    ]
    environment = {"device": {"name": "none", "driver": "0"}}
    record = {"backend": "cuda", "environment": environment, "problems": problems}
    (file,) = plots.draw_by_length(record, tmp_path, "backward", plots.BACKWARD_LINES)
    assert file.name == "backward_hd64.svg" and "deterministic" in file.read_text()


def test_the_peers_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    assert peers.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror"
    sizes = [(p["problem"]["head_dim"], p["problem"]["causal"]) for p in record["problems"]]
    assert sizes == [(d, c) for d in (64, 128, 256) for c in (False, True)]
    found = record["against_rival"]
    assert len(found["cells"]) == 6 and found["geometric_mean"] == {}
    assert not any(cell["ratio"] or cell["lost"] for cell in found["cells"])


def timed(variant: str, *samples: float) -> dict[str, Any]:
    return {"variant": variant, "seconds": float(np.median(samples)), "samples": list(samples)}


def test_fa_tc_is_held_to_its_faster_rival_in_pairs_of_the_same_rounds() -> None:
    rival = [1.0, 2.0, 4.0]
    some = {
        "won": [1.25, timed(others.FLASH_3, *rival), timed(others.CUDNN, 9.0, 9.0, 9.0)],
        "lost": [0.8, timed(others.FLASH_3, 9.0, 9.0, 9.0), timed(others.CUDNN, *rival)],
        "even": [0.98, timed(others.CUDNN, *rival)],
        "not judged fit": [None, timed(others.CUDNN, *rival)],
        "alone": [1.0, timed(others.FLASH_2, *rival)],
    }
    problems = []
    for name, (speed, *rows) in some.items():
        own = timed("fa_tc", *(x / speed for x in rival)) if speed else {"variant": "fa_tc"}
        facts = {"name": name, "head_dim": 64 if name == "won" else 128}
        problems.append({"problem": facts, "rows": [own, *rows]})
    found = peers.compared(problems)
    cells = {cell.pop("problem"): cell for cell in found["cells"]}
    assert [cells[name]["rival"] for name in some] == [
        others.FLASH_3, others.CUDNN, others.CUDNN, others.CUDNN, None
    ]  # fmt: skip
    assert [name for name in some if cells[name]["lost"]] == ["lost"]
    assert cells["won"]["ratio"] == pytest.approx([1.25] * 3), "in pairs, so without spread"
    assert cells["not judged fit"]["ratio"] is None and cells["alone"]["ratio"] is None
    assert found["geometric_mean"] == pytest.approx({
        "head_dim 64": 1.25, "head_dim 128": (0.8 * 0.98) ** 0.5,
        "all": (1.25 * 0.8 * 0.98) ** (1 / 3),
    })  # fmt: skip
    text = peers.summary(peers.compared(problems), lambda name: f"the {name}")
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "0.800 [0.800, 0.800]  lost" in lines["the lost"]
    assert lines["the won"].endswith("1.250 [1.250, 1.250]")
    assert lines["the not judged fit"].endswith("not timed")
    assert lines["geometric mean, all"].endswith("0.993")
    assert text.endswith("1 of 3 cells lost (interval below 0.98)")


def test_a_cell_is_lost_only_where_its_whole_interval_is_below() -> None:
    own = timed("fa_tc", *[1.0] * 15)
    for slow, fast, lost in ((8, 7, False), (15, 0, True)):
        rival = timed(others.CUDNN, *[0.9] * slow, *[1.1] * fast)
        problem = {"name": "one", "head_dim": 64}
        (cell,) = peers.compared([{"problem": problem, "rows": [own, rival]}])["cells"]
        assert cell["ratio"][0] == pytest.approx(0.9) and cell["lost"] is lost


def test_the_committed_race_is_reported_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        assert peers.main(["--stored", "--plot", str(folder)]) == 0
    record = recording.stored("peers")
    head_dims = {found["problem"]["head_dim"] for found in record["problems"]}
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert set(first) == {f"peers_hd{d}.svg" for d in head_dims} and first == second
    printed = capsys.readouterr().out
    assert printed.count(" hd128 ") == 2 * 12 and "geometric mean, all" in printed
    assert peers.main(["--stored", "--plot", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_plots_in_docs_are_of_the_committed_record() -> None:
    record = recording.stored("peers")
    for head_dim in {found["problem"]["head_dim"] for found in record["problems"]}:
        text = plots.path_of(FOLDER.parent / "docs", head_dim).read_text()
        told = "run python -m experiments.peers --stored --plot docs"
        assert f"<dc:source>{plots.source(record)}</dc:source>" in text, told


def test_a_plot_has_a_line_for_each_library_in_each_panel() -> None:
    pytest.importorskip("matplotlib")
    some = [p for p in recording.stored("peers")["problems"] if p["problem"]["head_dim"] == 128]
    plain, causal = plots._figure(some, "").axes
    for axis, masked in ((plain, False), (causal, True)):
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert set(lines) == set(plots.LINES)
        for name, line in lines.items():
            want = {
                p["problem"]["length"]: row["tflops"]
                for p in some
                for row in p["rows"]
                if p["problem"]["causal"] == masked and row["variant"] == name
            }
            assert dict(zip(*line.get_data(), strict=True)) == want and len(want) == 6


def test_a_record_without_times_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert peers.main(["--quick", "--head-dims", "64", "--plot", str(tmp_path)]) == 2
    assert "only a device's record can be drawn" in capsys.readouterr().err


def test_plots_are_seen_on_white_and_on_black() -> None:
    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    drawn = {plots.TEXT, *plots.COLOURS, *book_plots.COLOURS, book_plots.PEER}
    drawn |= {*precision_ablation.COLOURS.values(), *timestep_ablation.ARMS.values()}
    for lines in (plots.LINES, plots.BACKWARD_LINES):
        drawn |= {colour for colour, *_ in lines.values()}
    for colour in sorted(drawn):
        for page in ("#FFFFFF", "#0D1117"):
            dark, light = sorted(luminance(x) + 0.05 for x in (colour, page))
            assert light / dark > 3, f"{colour} on {page}: WCAG asks 3 of graphics"


def test_the_diffusion_shapes_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "diffusion_shapes.json"
    assert diffusion_shapes.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert all(row["ok"] for found in record["problems"] for row in found["rows"])
    sizes = {(p["problem"]["length_kv"], p["problem"]["head_dim"]) for p in record["problems"]}
    assert sizes == {(None, d) for d in (40, 64, 72, 96, 128)} | {(77, 64)}
    labels = ", ".join(record["models"].values()).split(", ")
    assert sorted(labels) == sorted(label for label, *_ in diffusion_shapes.SHAPES)
    assert [p["problem"]["name"] for p in record["problems"]] == list(record["models"])


def test_every_diffusion_shape_is_drawn_as_it_is_and_judged_in_part() -> None:
    found = diffusion_shapes.problems(argparse.Namespace(quick=False, seed=0))
    for problem, shape in zip(found, diffusion_shapes.SHAPES, strict=True):
        assert found[problem] == [shape[0]]
        call = problem.call
        sizes = call.batch, call.heads, call.len_q, call.len_kv, call.head_dim
        assert sizes == shape[1:] and not problem.causal and call.dtype == "float16"
        rows = measure.judged_rows(call)
        assert {0, call.len_q - 1} <= set(rows.tolist()) and rows.size >= 40
        assert call.batch * call.heads * rows.size * call.len_kv < 1.1 * measure.SAMPLED_SCORES


def test_a_problem_may_have_two_lengths() -> None:
    problem = Problem(1, 2, 40, 16, length_kv=24)
    assert problem.name == "B1 H2 40x24 hd16 float16 normal" and SMALL.len_kv == 40
    q, k, v = problem.draw(on_device=False)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (40, 24, 24)
    assert problem.operations == 4 * 16 * 2 * 40 * 24
    with pytest.raises(ValueError, match="must have one length, got 40 and 24"):
        Problem(1, 2, 40, 16, causal=True, length_kv=24)


@pytest.mark.parametrize("problem", [Problem(3, 2, 40, 16, length_kv=24), Problem(3, 2, 40, 16)])
def test_flash_attention_3_gets_packed_rows_and_both_ends(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    def fwd(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
        out, ends_q, ends_kv, (longest_q, longest_kv) = rest[3], rest[4], rest[5], rest[9:11]
        assert (longest_q, longest_kv) == (problem.length, problem.len_kv)
        for i in range(problem.batch):
            rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_kv[i : i + 2])
            per_head = (x.transpose(0, 1).float() for x in (q[rows], k[keys], v[keys]))
            o = torch.nn.functional.scaled_dot_product_attention(*per_head)
            out[rows] = o.transpose(0, 1).half()
        return [out]

    monkeypatch.setenv(others.FLASH_3_LIBRARY, "somewhere.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    (cell,) = others.flash_attention_3(problem)
    row = judge_cell(problem, cell, problem.draw(on_device=False))
    assert row["ok"] and row["peer"] and 0 < row["judgement"]["j2"] <= 1


def test_a_shape_that_a_library_refuses_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")

    def fwd(*_: Any) -> None:
        raise RuntimeError("this build takes head_dim 64\nat somewhere.cpp:1")

    monkeypatch.setenv(others.FLASH_3_LIBRARY, "somewhere.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    row = judge_cell(SMALL, *others.flash_attention_3(SMALL), SMALL.draw(on_device=False))
    assert row["unsupported"] == "FlashAttention-3: this build takes head_dim 64"
    assert row["judgement"] is None


def test_the_claims_are_those_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of mathematics quotes the record, and the record is what the code gives today."""
    record = json.loads((FOLDER / "results" / "numerics_claims.json").read_text())
    text = " ".join((FOLDER.parent / "docs" / "MATH_REFERENCE.md").read_text().split())
    quoted = [r["bound_over_rms"] for r in record["bounds"]] + [
        r["scores"] for r in record["codes"]
    ]
    quoted += [r["codes"] for r in record["codes"] if r["distribution"] == "normal"]
    for value in quoted:
        assert any(f"{100 * value:.{digits}g} %" in text for digits in (1, 2)), value
    first = record["bounds"][1]
    again = numerics_claims.sharpness(first["variant"], first["dtype"], 256, record["seed"])
    assert again == pytest.approx(first["bound_over_rms"], rel=1e-3)
    assert numerics_claims.main(["--quick"]) == 0 and "scores" in capsys.readouterr().out


def test_the_second_first_call_reads_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    assert first_call.main(["--quick", "--json", str(file)]) == 0
    empty, filled = json.loads(file.read_text())["rows"]
    assert (empty["filled"], filled["filled"]) == (False, True)
    assert filled["first"] < empty["first"] / 3  # it compiled nothing


def test_quantising_runs_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quantise.json"
    assert quantise.main(["--quick", "--json", str(file)]) == 0
    balanced, aggressive = json.loads(file.read_text())["rows"]
    rows, size = 2 * 150 * 16, 2
    scales = 4 * (2 * 75 + 2 * 5 + 2 * 16)  # of Q, of K for tiles of 32 keys, and the mean
    assert balanced["bytes"] == 3 * rows * size + 2 * rows + scales
    more = 2 * rows * size + 2 * 16 * 256 + 4 * (2 * 16 + 2 * 16)  # padded codes of V, scales, mean
    more += 4 * 2 * 75  # a scale of Q for each row, not for two
    more -= 4 * 2 * 2  # tiles of 64 keys
    assert aggressive["bytes"] == balanced["bytes"] + more
    assert balanced["launches"] == aggressive["launches"] == 1
    # A code that is not the mirror's fails the run.
    quantize = ca.quantize
    wrong = lambda *x, **options: quantize(x[0] * np.float16(2), *x[1:], **options)  # noqa: E731
    monkeypatch.setattr(ca, "quantize", wrong)
    assert quantise.main(["--quick"]) == 1


def test_the_tile_sweep_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiles.json"
    arguments = ["fa_tc", "--quick", "--head-dims", "64", "--json", str(file)]
    assert tile_sweep.main(arguments) == 0
    (found,) = json.loads(file.read_text())["problems"]
    own, *others = found["rows"]
    assert own["variant"] == "own tiles" and others
    assert own["tiles"] == vars(ca.VARIANTS["fa_tc"].default_tiles(64))
    assert all(row["registers"] > 0 and row["shared_bytes"] > 0 for row in found["rows"])
    assert "tiles hold their bound" in capsys.readouterr().out


def test_the_race_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sm90").mkdir()
    kernel = compiler.KERNELS / "sm90" / "attn_fa_tc.cu"
    changed = kernel.read_text() + 'static_assert(BLOCK_KV != 64, "not 64");\n'
    (tmp_path / "sm90" / kernel.name).write_text(changed)
    file = tmp_path / "race.json"
    candidates = ["now", f"new={tmp_path}", "narrow@192x64w16s2", f"both={tmp_path}@192x64w16s2"]
    cells = ["--cells", "64:512", "128:512c"]
    assert race.main([*candidates, *cells, "--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [found["problem"]["causal"] for found in record["problems"]] == [False, True]
    for found in record["problems"]:
        assert record["rejected"][found["problem"]["name"]] == {"both": "not 64"}
        assert [row["variant"] for row in found["rows"]] == ["now", "new", "narrow"]
        sizes = {x: found["problem"][x] for x in ("batch", "heads", "length", "head_dim")}
        own = race.tiles_of(race.parse_candidate("now", tmp_path), Problem(**sizes)).block_kv
        assert [row["tiles"]["block_kv"] for row in found["rows"]] == [own, own, 64]
        assert all(row["ok"] and row["spill_bytes"] == 0 for row in found["rows"])
    assert "192x64 w16 s2: 128 registers, 0 bytes spilled" in capsys.readouterr().out


def test_a_candidate_brings_its_own_headers(tmp_path: Path) -> None:
    prims = tmp_path / "changes" / "prims"
    prims.mkdir(parents=True)
    (prims / "warp.cuh").write_text("#error mine\n")
    candidate = race.parse_candidate(f"new={tmp_path / 'changes'}", tmp_path / "stage")
    problem = race.parse_cell("64:512")
    assert "not found" not in str(race.compiled(candidate, problem))
    assert "mine" in str(race.compiled(candidate, problem))
    assert isinstance(race.compiled(race.parse_candidate("now", tmp_path), problem), Cell)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["now@192x96"], "a candidate looks like"),
        (["now=nowhere"], "now: nowhere is not a folder"),
        (["now", "now@192x96w16s2"], "two candidates have one name: now, now"),
        (["now", "--cells", "128x512"], "a cell looks like 128:512"),
    ],
)
def test_a_race_says_what_it_did_not_understand(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race.main([*arguments, "--quick"]) == 2
    assert message in capsys.readouterr().err


def test_a_race_is_told_in_pairs_of_the_same_rounds() -> None:
    rows = [
        {"variant": "now", "seconds": 2.0, "samples": [2.0, 4.0]},
        {"variant": "new", "seconds": 1.0, "samples": [1.0, 2.0]},
        {"variant": "wrong"},
        {"variant": others.CUDNN, "seconds": 8.0, "samples": [8.0, 16.0]},
        {"variant": others.FLASH_3, "seconds": 1.5, "samples": [1.5, 3.0]},
    ]
    record = {"problems": [{"problem": {"name": "one"}, "rows": rows}]}
    names = ["now", "new", "wrong", "absent"]
    (found,) = race.compared(record, names)
    assert found["first"] == {"now": [1.0] * 3, "new": [2.0] * 3, "wrong": None, "absent": None}
    assert found["rival"] == {"now": [0.75] * 3, "new": [1.5] * 3, "wrong": None, "absent": None}
    header, first, mean, rival, _ = race.summary([found], names).splitlines()
    assert header.split() == ["against", *names]
    assert first.split()[:2] == ["one", "now"] and "2.000 [2.000, 2.000]" in first
    assert "2.000 (1)" in mean and rival.split()[:2] == ["one", "rival"]


def test_tiles_that_do_not_compile_are_reported_with_the_reason() -> None:
    cell = rung("fa_tc", SMALL, tiles=ca.Tiles(24, 32, 4, 2))
    reason = tile_sweep.compiled(SMALL, cell, "sm_90")
    assert reason == "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma"


def fake_times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the harness believe that there is a device; return the names of what it times."""
    timed: list[str] = []

    def time_interleaved(calls: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        timed.extend(calls)
        for call in calls.values():
            call(0), call(1)
        return {name: [1e-3 * (i + 1)] * 15 for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)] * 2)
    monkeypatch.setattr(device, "clocks", lambda *_: {})
    monkeypatch.setattr(device, "device_ceiling", lambda family: 1e12)
    return timed


def test_a_cell_that_misses_its_bound_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = fake_times(monkeypatch)
    problem = Problem(1, 1, 40, 16, dtype="float32")
    inputs = problem.draw(on_device=False)
    good, absent = rung("fa", problem), rung("fa_tc", problem)
    wrong = Cell("wrong", "fa", lambda q, k, v: np.float32(1.01) * good.run(q, k, v))
    cells = [good, wrong, absent]
    rows = [judge_cell(problem, cell, inputs) for cell in cells]
    time_cells(problem, cells, rows, inputs, 15, "fa", in_graphs=False)
    assert timed == ["fa"]
    assert rows[0]["seconds"] == 1e-3 and rows[0]["speed_ratio"] == [1.0, 1.0, 1.0]
    assert rows[1]["judgement"]["j2"] > 1 and "seconds" not in rows[1]
    assert "takes float16, bfloat16" in rows[2]["unsupported"]
    header, printed = recording.table({"rows": rows}, "fa")
    assert all(len(row) == len(header) for row in printed)
    assert "not timed" in " ".join(printed[1]) and "not supported" in printed[2]
    assert not recording.passed({"problems": [{"rows": rows}]})


def test_codes_are_given_before_the_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = rung("fa_int8", SMALL, codes_given=True)
    (codes,) = cell.prepare(*SMALL.draw(on_device=False))
    monkeypatch.setattr(ca, "quantize", None)  # would raise if run called it
    assert isinstance(codes, ca.QuantizedQKV)
    assert cell.run(codes).shape == codes.shape


def test_operations_count_admitted_pairs_only() -> None:
    assert Problem(2, 3, 10, 8).operations == 4 * 8 * 2 * 3 * 100
    assert Problem(2, 3, 10, 8, causal=True).operations == 4 * 8 * 2 * 3 * 55


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if not device.device_missing():
        pytest.skip("there is a device")
    assert ladder.main([]) == 2
    assert "--quick runs without" in capsys.readouterr().err


def made_up(record: dict[str, Any]) -> dict[str, Any]:
    """Give a mirror's record the times of a device."""
    facts = {"name": "Made up", "driver": "1.2", "power_w": 70.0}
    record = {**record, "backend": "cuda"}
    record["environment"] = {**record["environment"], "device": facts}
    for found in record["problems"]:
        found["rows"] = [
            {**row, "seconds": 1e-3, "tflops": 7.0 + i, "share": 0.1}
            for i, row in enumerate(found["rows"])
        ]
        found["rows"].append({**found["rows"][3], "variant": others.FLASH_2, "peer": True})
        found["rows"].append({"variant": others.CUDNN, "judgement": None, "peer": True})
    return record


def test_the_readme_table_of_a_device_has_times_and_peers(tmp_path: Path) -> None:
    table = ladder.readme_table(made_up(recording.stored("ladder")))
    lines = table.splitlines()
    assert "Made up, driver 1.2" in lines[0]
    assert (
        "| rung | the one idea | form | J2 | J3 | rel. error | time | TFLOP/s | ceiling |" in lines
    )
    assert any(line.startswith("| `fa_tc` |") and " | sm90 | " in line for line in lines)
    assert any(line.startswith(f"| {others.FLASH_2} |") and "10 % |" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("| `")}
    assert widths == {10}
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{ladder.BEGIN}\nold\n{ladder.END}\nbelow\n")
    ladder.update_readme(made_up(recording.stored("ladder")), readme)
    assert readme.read_text() == f"above\n{ladder.BEGIN}\n{table}\n{ladder.END}\nbelow\n"


@pytest.mark.parametrize("text", ["nothing", f"{ladder.BEGIN} only", f"{ladder.END}{ladder.BEGIN}"])
def test_a_readme_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        ladder.update_readme(recording.stored("ladder"), readme)
    assert readme.read_text() == text


def test_the_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ladder.draw(made_up(recording.stored("ladder")), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_ladder_that_was_cut_off_takes_what_it_lacks_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(revision: str, *head_dims: int) -> dict[str, Any]:
        problems = [
            {"problem": {"name": f"hd{d}", "head_dim": d}, "rows": [], "of": revision}
            for d in head_dims
        ]
        environment = {"revision": revision}
        return {
            "experiment": "ladder", "command": "run", "environment": environment,
            "problems": problems,
        }  # fmt: skip

    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    (tmp_path / "ladder.json").write_text(json.dumps(record("later", 64, 256)))
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(record("earlier", 64, 128)))
    assert ladder.main(["--stored", "--merge", str(earlier)]) == 0
    found = json.loads((tmp_path / "ladder.json").read_text())
    assert [(p["of"], p.get("revision")) for p in found["problems"]] == [
        ("later", None), ("earlier", "earlier"), ("later", None)
    ]  # fmt: skip
    assert found["environment"] == {"revision": "later"}
