"""The comparison of fa_int8 with other 8-bit kernels, without a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn.measure import device, timing
from experiments._harness import graphs, others8, recording
from experiments._harness.cells import Problem, judge_cell, judge_problem, rung, time_cells
from experiments.diffusion.diffusion_shapes import SHAPES
from experiments.speed import peers_int8


def test_8_bit_peers_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "peers_int8.json"
    assert peers_int8.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    ((found,), (compared,)) = record["problems"], record["compared"]
    assert record["backend"] == "mirror" and all(row["ok"] for row in found["rows"])
    ours = {f"{name}{given}" for name in peers_int8.QUANT for given in ("", others8.GIVEN)}
    assert set(compared["errors"]) == {peers_int8.FULL, *ours}
    errors = [compared["errors"][name] for name in (peers_int8.FULL, *peers_int8.QUANT)]
    assert errors == sorted(errors)  # 16 bits, balanced, by tile, aggressive
    assert all(one["ratio"] is None for one in compared["ratios"].values())


def test_accuracy_of_8_bits_runs_in_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = peers_int8.DISTRIBUTIONS[::2]
    monkeypatch.setattr(peers_int8, "DISTRIBUTIONS", some)
    assert peers_int8.main(["--quick", "--accuracy"]) == 0
    table = capsys.readouterr().out
    assert len(some) == 3 and all(name in table for name in some)


def test_every_shape_of_a_model_takes_part_and_short_calls_in_graphs() -> None:
    """Calls of at most two milliseconds, at the rate of fa_tc there, are short."""
    args = recording.parser("").parse_args([])
    args.accuracy, args.cells, args.models = (
        False,
        ["128:4096", "128:8192"],
        [n for n, *_ in SHAPES],
    )
    found = peers_int8.problems(args)
    assert len(found) == 2 + len(SHAPES)
    short = {p.name for p in found if p.operations < peers_int8.GRAPH_OPERATIONS}
    assert {"B2 H10 4096 hd64 float16 normal", "B2 H24 4096x77 hd64 float16 normal"} < short
    assert found[0].name in short and found[1].name not in short


def test_parts_of_a_record_are_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part's problems are compared with the others', and say of which run they are."""
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    files = [tmp_path / name for name in ("peers_int8.json", "part.json")]
    for file, seed in zip(files, "12", strict=True):
        assert peers_int8.main(["--quick", "--seed", seed, "--json", str(file)]) == 0
    part = json.loads(files[1].read_text())
    part["problems"][0]["problem"] |= {"name": "a model", "head_dim": 40}
    files[1].write_text(json.dumps(part))
    assert peers_int8.main(["--stored", "--merge", str(files[1])]) == 0
    record = json.loads(files[0].read_text())
    assert [p["problem"]["name"] for p in record["problems"]][0] == "a model"
    assert [one["problem"] for one in record["compared"]][0] == "a model"
    assert ["command" in p for p in record["problems"]] == [True, False]
    assert "a model" in capsys.readouterr().out


# ---- in CUDA graphs ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The work that a stand-in for a stream collects while it is captured."""
    cupy = pytest.importorskip("cupy")
    work: list[Callable[[], None]] = []

    def captured(call: Callable[[int], object], count: int) -> Callable[[int], object]:
        for i in range(count):
            call(i)
        held = list(work)
        return lambda _: [one() for one in held]

    nothing = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: nothing)
    monkeypatch.setattr(graphs, "as_bytes", lambda result: result)
    monkeypatch.setattr(graphs, "numbers", np.copy)
    monkeypatch.setitem(graphs.sys.modules, "torch", None)
    return work


def test_a_graph_is_held_to_what_the_calls_compute(launched: list[Callable[[], None]]) -> None:
    """Work that ran during the capture, and is not in the graph, must not be timed."""
    out = np.zeros(3)
    held = [False]

    def in_order(i: int) -> Any:
        work = lambda: np.copyto(out, i + 1.0)  # noqa: E731
        work()
        if held[0]:
            launched.append(work)
        return out

    held[0] = True
    graph = graphs.recorded(in_order, 2)
    out.fill(0)
    graph(0)
    assert (out == 2).all()
    held[0] = False
    launched.clear()
    with pytest.raises(RuntimeError, match="does not compute what the call does"):
        graphs.recorded(in_order, 2)


def test_times_of_graphs_are_those_of_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be captured has none, and its row says why."""
    problem = Problem(1, 1, 40, 16)
    inputs = problem.draw(on_device=False)
    cells = [rung("fa", problem), rung("fa_tc", problem)]
    rows = [judge_cell(problem, cell, inputs) for cell in cells]

    def recorded(call: Callable[[int], Any], count: int) -> Callable[[int], object]:
        assert count == 3
        if len(seen) == 1:
            raise RuntimeError("it waits\nfor the device")
        seen.append(call)
        return call

    seen: list[Any] = []
    monkeypatch.setattr(graphs, "recorded", recorded)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)] * 3)
    monkeypatch.setattr(
        timing, "time_interleaved", lambda calls, **_: {name: [3e-3] * 15 for name in calls}
    )
    monkeypatch.setattr(device, "clocks", lambda *_: {})
    monkeypatch.setattr(device, "device_ceiling", lambda family: 1e12)
    time_cells(problem, cells, rows, inputs, 15, "fa", in_graphs=True)
    assert rows[0]["seconds"] == pytest.approx(1e-3) and rows[0]["samples"] == [1e-3] * 15
    assert "seconds" not in rows[1] and "fa_tc: no CUDA graph: it waits for the device" in (
        capsys.readouterr().err
    )
    _, printed = recording.table({"rows": rows}, "fa")
    assert "no CUDA graph: not timed" in printed[1]


# ---- SageAttention 2, from a folder that is named -----------------------------------------------

#: A stand-in of its package, with scales of whole tensors and a kernel for head_dim 64.
SAGE_2 = {
    "__init__.py": "from .core import sageattn",
    "kernels.py": """
import torch

def {kernel}(q, k, v, o, q_scale, k_scale, v_scale, layout, causal, granularity, scale, lse):
    assert o.shape[-1] == 64 and (layout, granularity, lse) == (1, 3, 0)
    q, k, v = q.float() * q_scale, k.float() * k_scale, v.float() * v_scale
    o.copy_(torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=bool(causal), scale=scale))
""",
    "core.py": """
import torch
{imported}
quantised = []

def sageattn(q, k, v, tensor_layout, is_causal):
    head_dim = q.shape[-1]
    if head_dim > 64:
        raise ValueError(f"Unsupported head_dim: {{head_dim}}")
    q, k, v = (torch.nn.functional.pad(x, (0, 64 - head_dim)) for x in (q, k, v))
    quantised.append(1)
    scales = [x.abs().amax() / 127 for x in (q, k, v)]
    codes = [(x / scale).round().to(torch.int8) for x, scale in zip((q, k, v), scales)]
    o = torch.empty_like(q)
    {called}(*codes, o, *scales, 1, int(is_causal), 3, head_dim**-0.5, 0)
    return o[..., :head_dim]
""",
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Return what writes the stand-in, with a module imported as a name, and names its folder."""
    pytest.importorskip("torch")

    def write(imported: str, called: str) -> None:
        kernel = others8.SAGE_2_KERNEL
        for name, text in SAGE_2.items():
            said = text.format(kernel=kernel, imported=imported, called=f"{called}.{kernel}")
            (tmp_path / name).write_text(said)
        monkeypatch.setenv(others8.SAGE_2_PACKAGE, str(tmp_path))

    yield write
    for name in [n for n in sys.modules if n.partition(".")[0] == "sageattention2"]:
        del sys.modules[name]


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_sage_attention_2_is_timed_as_it_is_called_and_its_kernel_alone(
    named: Callable[[str, str], None], head_dim: int, causal: bool
) -> None:
    named("from . import kernels as sm90_compile", "sm90_compile")
    problem = Problem(1, 2, 40, head_dim, causal=causal)
    cells = others8.sage_2(problem)
    assert [cell.name for cell in cells] == [f"{others8.SAGE_2}{others8.GIVEN}", others8.SAGE_2]
    inputs = problem.draw(on_device=False)
    rows = judge_problem(problem, cells, inputs)["rows"]
    assert all(row["ok"] and row["peer"] for row in rows)
    assert rows[0]["judgement"] == rows[1]["judgement"]
    assert 1e-3 < rows[0]["judgement"]["relative_error"] < 0.05  # of codes

    core = others8.load_sage_2().core
    assert core.__name__ == "sageattention2.core" and "sageattention" not in sys.modules
    alone, whole = (cell.prepare(*inputs) for cell in cells)
    before, k = len(core.quantised), whole[1].clone()
    first, again = cells[0].run(*alone), cells[0].run(*alone)
    assert len(core.quantised) == before and first is not again
    assert (cells[1].run(*whole) == first).all() and (again == first).all()
    assert len(core.quantised) == before + 1 and (whole[1] == k).all()


def test_what_sage_attention_2_does_not_take_is_said(
    named: Callable[[str, str], None],
) -> None:
    named("from . import kernels as sm90_compile", "sm90_compile")
    problem = Problem(1, 1, 40, 128)
    cells = others8.sage_2(problem)
    rows = judge_problem(problem, cells, problem.draw(on_device=False))["rows"]
    assert [row["unsupported"] for row in rows] == [
        f"{cell.name}: Unsupported head_dim: 128" for cell in cells
    ]


def test_sage_attention_2_without_hopper_s_kernel_has_no_codes_given(
    named: Callable[[str, str], None],
) -> None:
    named("from . import kernels as sm89_compile", "sm89_compile")
    problem = Problem(1, 1, 40, 64)
    cells = others8.sage_2(problem)
    given, whole = judge_problem(problem, cells, problem.draw(on_device=False))["rows"]
    assert whole["ok"] and "runs another kernel than Hopper's" in given["unsupported"]


def test_sage_attention_2_takes_part_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(others8.SAGE_2_PACKAGE, raising=False)
    assert others8.sage_2(Problem(1, 1, 40, 64)) == []
    monkeypatch.setenv(others8.SAGE_2_PACKAGE, str(tmp_path))
    for _ in range(2):  # a package that cannot be loaded is not there half
        with pytest.raises(FileNotFoundError):
            others8.sage_2(Problem(1, 1, 40, 64))
    assert others8.SAGE_2 in peers_int8.PEERS
