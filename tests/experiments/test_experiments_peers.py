"""The comparisons with other libraries, forward and backward, without a device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.measure import energy, rungs
from experiments._harness import joules, others, plots, recording
from experiments._harness.cells import Problem, judge_cell
from experiments.diffusion import diffusion_shapes
from experiments.speed import backward, peers

SMALL = Problem(1, 1, 40, 16)


def test_the_gradients_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "backward.json"
    asked = ["--head-dims", "64", "--dtypes", "float16", "--json", str(file)]
    assert backward.main(["--quick", *asked]) == 0
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


@pytest.mark.frameworks
def test_flash_attention_4_is_given_rows_first_and_compared() -> None:
    """Here torch's own function of that layout stands in for it."""
    torch = pytest.importorskip("torch")

    def attend(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        assert q.is_contiguous() and q.shape == (1, 40, 1, 16) and causal
        x = (y.transpose(1, 2) for y in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)
        return o.transpose(1, 2), None

    problem = Problem(1, 1, 40, 16, causal=True)
    given = backward.received(problem, on_device=False)
    prepared = backward.rows_first(others.FLASH_4, attend, torch, causal=True)(*given)
    for found in (prepared(), prepared()):
        result = [x.contiguous().numpy() for x in found]
        assert backward.judge(problem, others.FLASH_4, result, given)["ok"]
    rows = [timed(others.FLASH_4, 1.0, 2.0), timed(backward.ATOMIC, 0.5, 1.0)]
    found = backward.compared(rows, backward.ATOMIC)
    assert found[backward.BESIDE_FLASH_4] == pytest.approx([2.0] * 3)
    assert found[backward.BESIDE_BEST] == found[backward.BESIDE_FLASH_4]
    assert found["beside cuDNN"] is None
    rows.append(timed(backward.FLASH_4_DETERMINISTIC, 3.0, 3.0))
    rows.append(timed(backward.DETERMINISTIC, 2.0, 2.0))
    found = backward.compared(rows, backward.DETERMINISTIC)
    assert found[backward.BESIDE_DETERMINISTIC] == pytest.approx([1.5] * 3)


def test_energy_of_passes_is_counted_in_turns() -> None:
    """The meter reads 300 J and 500 J for windows of the first and the second pass."""
    seen: list[str] = []

    def window(work: Callable[[], int], _: Any, seconds: float) -> energy.Window:
        calls = work()
        seen.append("first" if calls == 10 else "second")
        return energy.Window({10: 300.0, 20: 500.0}[calls], seconds, calls)

    clocks = iter(range(1000, 2000))
    found = joules.in_turns(
        {"first": lambda: 10, "second": lambda: 20}, None, 2.0, 3, 10**12,
        window=window, clocks=lambda: {"sm_clock_mhz": next(clocks)},
    )  # fmt: skip
    assert seen == ["first", "second", "second", "first", "first", "second"]
    first, second = found["first"], found["second"]
    assert (first["joules_per_call"], second["joules_per_call"]) == (30.0, 25.0)
    assert (first["watts"], first["calls"], second["sustained_tflops"]) == (150.0, 30, 10.0)
    assert [x["sm_clock_mhz"] for x in second["clocks_of_turns"]] == [1001, 1002, 1005]
    assert backward.of_energy({"energy": second}) == ["25", "250", "1005"]
    assert backward.of_energy({}) == ["-"] * 3


def test_types_and_shapes_of_wan_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "backward.json"
    arguments = ["--quick", "--head-dims", "64", "--dtypes", "bfloat16", "--wan"]
    assert backward.main([*arguments, "--json", str(file)]) == 0
    found = [one["problem"] for one in json.loads(file.read_text())["problems"]]
    assert [x["head_dim"] for x in found] == [64, 64, 128, 128]
    assert {x["dtype"] for x in found} == {"bfloat16"}


def test_gradients_of_heads_that_share_keys_are_of_one_key_head(tmp_path: Path) -> None:
    file = tmp_path / "backward.json"
    asked = ["--quick", "--head-dims", "64", "--dtypes", "float16", "--grouped"]
    assert backward.main([*asked, "--json", str(file)]) == 0
    *_, found = json.loads(file.read_text())["problems"]
    assert (found["problem"]["heads"], found["problem"]["heads_kv"]) == (16, 2)
    assert "H16/2" in found["problem"]["name"] and all(row["ok"] for row in found["rows"])
    x = np.zeros((2, 6, 5, 4))
    q, k = backward.one_head([x, x[:, :2]], np)
    assert q.shape == (1, 3, 5, 4) and k.shape == (1, 1, 5, 4)


def test_short_windows_are_refused() -> None:
    arguments = ["--quick", "--head-dims", "64"]
    assert backward.main([*arguments, "--joules", "--seconds", "1"]) == 2


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
        text = plots.path_of(recording.ROOT / "docs", head_dim).read_text()
        told = "run python -m experiments.speed.peers --stored --plot docs"
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
        rows = rungs.judged_rows(call)
        assert {0, call.len_q - 1} <= set(rows.tolist()) and rows.size >= 40
        assert call.batch * call.heads * rows.size * call.len_kv < 1.1 * rungs.SAMPLED_SCORES


@pytest.mark.frameworks
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


@pytest.mark.frameworks
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
