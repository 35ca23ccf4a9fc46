"""On a device: the steps of unfused attention alone, the ladder, the commands that need one."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli, unfused
from cupyattn.distributions import make
from cupyattn.measure import device, timing
from experiments._harness import graphs
from experiments._harness.cells import rotating

cupy = pytest.importorskip("cupy")
SMALL = ["--batch", "1", "--heads", "2", "--len", "256", "--head-dim", "64"]


def on_device(*arrays: Any) -> list[Any]:
    return [cupy.asarray(array) for array in arrays]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 256])
def test_the_steps_alone_are_attention(dtype: str, causal: bool, head_dim: int) -> None:
    host = make("normal", 2, 4, 45, 70, head_dim, dtype, heads_kv=2)
    q, k, v = on_device(*host)
    S = unfused.scores(q, k, causal=causal)
    kept = S.copy()
    P, lse = unfused.softmax(S, return_lse=True)
    o = unfused.weighted_sum(P, v)
    assert (kept == S).all(), "softmax changed its argument"
    want = unfused.scores(*host[:2], causal=causal)
    np.testing.assert_allclose(S.get(), want, rtol=1e-5, atol=1e-4)
    ca.testing.assert_within_bound(o, q, k, v, variant="unfused", lse=lse, causal=causal)


def test_the_steps_take_strided_arrays() -> None:
    host = make("normal", 1, 2, 33, 50, 32)
    q, k, v = (cupy.asarray(a).swapaxes(1, 2).copy().swapaxes(1, 2) for a in host)
    P = unfused.softmax(unfused.scores(q, k))
    wide = cupy.zeros((*P.shape[:3], 2 * P.shape[3]), P.dtype)
    wide[..., ::2] = P
    o = unfused.weighted_sum(wide[..., ::2], v)
    ca.testing.assert_within_bound(o, q, k, v, variant="unfused")


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 3, 0), (0, 2, 3, 4)])
def test_the_steps_on_empty_axes(shape: tuple[int, int, int, int]) -> None:
    q, k, v = on_device(*make("normal", *shape, 8))
    o = unfused.weighted_sum(unfused.softmax(unfused.scores(q, k)), v)
    assert o.shape == q.shape and not o.any()


def test_the_ladder_judges_and_times_every_rung() -> None:
    q, k, v = on_device(*make("normal", 2, 4, 512, 512, 64))
    table = ca.ladder(q, k, v, rounds=3)
    assert table.ok and table.backend == "cuda"
    for rung in table.rungs:
        assert rung.seconds is not None and rung.seconds > 0 and rung.seconds_interval is not None
        assert rung.seconds_interval[0] <= rung.seconds <= rung.seconds_interval[1]
        assert rung.share is None or 0 < rung.share < 1


def test_inputs_rotate_past_the_cache() -> None:
    q, k, v = on_device(*make("normal", 1, 2, 128, 128, 64))
    sets = timing.rotated((q, k, v))
    size = sum(array.nbytes for one in sets for array in one)
    assert size >= 2 * cupy.cuda.Device().attributes["L2CacheSize"]


def test_a_graph_of_calls_is_what_they_are() -> None:
    q, k, v = on_device(*make("normal", 1, 8, 4, 2048, 64, heads_kv=1))
    sets = [(q, k, v), (q * 2, k, v)]
    results = [cupy.empty_like(q) for _ in sets]
    prepared = ca.plan(q, k, v, variant="fa_tc", out=results[0])
    expected = [prepared(*one, out=o).get() for one, o in zip(sets, results, strict=True)]
    graph = timing.captured(lambda i: prepared(*sets[i], out=results[i]), len(sets))
    for o in results:
        o.fill(0)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        graph(0)
        stream.synchronize()
    assert all((o.get() == x).all() for o, x in zip(results, expected, strict=True))
    with pytest.raises(ZeroDivisionError):
        timing.captured(lambda i: 1 // i, 1)
    assert (prepared(q, k, v, out=results[0]).get() == expected[0]).all()


def test_a_graph_of_an_experiment_has_memory_of_its_own() -> None:
    """Results and scratch memory of its calls overlap no other memory, neither ours nor torch's."""
    sets = [on_device(*make("normal", 1, 8, 300, 300, 64, seed=seed)) for seed in range(3)]
    calls: dict[str, Callable[..., Any]] = {
        rung: functools.partial(ca.attention, variant=rung) for rung in ("unfused", "fa_int8")
    }
    torch = None if importlib.util.find_spec("torch") is None else importlib.import_module("torch")
    if torch is not None:
        calls["torch"] = lambda *arrays: torch.nn.functional.scaled_dot_product_attention(
            *map(torch.from_dlpack, arrays)
        )
    made = graphs.of_calls({n: rotating(c, sets) for n, c in calls.items()}, len(sets))
    assert made.keys() == calls.keys()
    filled = [cupy.full(2**n, 0xFF, cupy.uint8) for n in range(10, 24)]
    for graph in made.values():
        graph(0)
    assert all(bool((x == 0xFF).all()) for x in filled)


def test_work_on_another_stream_is_not_in_a_graph() -> None:
    x, other = cupy.zeros(100, "float32"), cupy.cuda.Stream(non_blocking=True)

    def call(i: int) -> Any:
        with other:
            result = cupy.add(x, 1)
        other.synchronize()
        return result

    with pytest.raises(RuntimeError, match="does not compute what the call does"):
        graphs.recorded(call, 2)


def test_the_environment_describes_the_device() -> None:
    facts = device.environment()
    assert facts["device"]["name"] and facts["device"]["capability"] >= 80
    assert facts["device"]["l2_bytes"] > 2**20
    for family in ("float32", "tensor_core", "int8"):
        ceiling = device.device_ceiling(family)
        assert ceiling is None or 1e12 < ceiling < 1e16 and math.isfinite(ceiling)


def test_profile_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    for variant in ca.VARIANTS:
        options = ["--random", "--energy", "--nvtx", "--runs=2", "--json", str(file)]
        assert cli.main(["profile", variant, *SMALL, *options]) == 0
        record = json.loads(file.read_text())
        assert len(record["seconds"]) == 2 and record["j2"] <= 1
        assert "run 2: " in capsys.readouterr().out


def test_verify_and_ladder_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "fa_int8", "--distribution", "normal"]) == 0
    assert "equal" in capsys.readouterr().out  # J1
    file = tmp_path / "ladder.json"
    assert cli.main(["ladder", *SMALL, "--rounds", "3", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed and "No device" not in printed
    (table,) = json.loads(file.read_text())["ladders"]
    assert table["backend"] == "cuda" and all(rung["seconds"] for rung in table["rungs"])
