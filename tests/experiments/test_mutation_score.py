"""experiments/accuracy/mutation_score.py: the results of faults, their order, and the table."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret import Finding, KernelFault
from cupyattn.interpret.observer import observe
from cupyattn.testing.mutations import mutants
from experiments._harness import recording
from experiments.accuracy import mutation_score
from experiments.accuracy.mutation_score import Baseline, Call
from tests.support.interpreted import run_ptx

SOURCE = """#include "part.cuh"
extern "C" __global__ void f(float* x, int n) {
  const int unused = n - 1;
  if (threadIdx.x < n) x[threadIdx.x] = part(x[threadIdx.x]);
}
"""
PART = "__device__ inline float part(float x) { return x * 3.0f; }\n"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Baseline:
    (tmp_path / "f.cu").write_text(SOURCE)
    (tmp_path / "part.cuh").write_text(PART)
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    compiler.cache_clear(disk=False)
    module = ModuleSpec("f.cu"), "sm_80"
    files = {module: frozenset(mutation_score.reached(module[0]))}
    code, lines = mutation_score.code_of(module), mutation_score.lines_of(module)
    fast = mutation_score.fast_code(module)
    ran = {"f.cu": 1 << 4, "part.cuh": 1 << 1}
    call = Call("multiplies", multiplies, 0.1, frozenset({module}), ran)
    ptx = {module: mutation_score.ptx_of(module)}
    return Baseline((call,), {module: code}, {module: fast}, files, {module: lines}, ptx)


def multiplies() -> str:
    text = (compiler.KERNELS / "part.cuh").read_text()
    if "6.0f" in text:
        raise KernelFault(Finding("race", "a message", "f", None, 0, 0, 0, 1, None, ""))
    return "" if "3.0f" in text else "wrong"


def found(file: str, after: str, known: Baseline) -> dict[str, Any]:
    text = (compiler.KERNELS / file).read_text()
    (one,) = (x for x in mutants(text) if x.after.strip() == after)
    return mutation_score.became((file, one), known)


def compiled_fast(module: Any, _: None) -> str:
    return mutation_score.fast_code(module)


def own_process(*_: Any) -> str:
    return str(os.getpid())


def test_few_optimisations_do_not_stay_with_the_process(
    known: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC keeps the option: modules compiled later spilled registers, and a cache kept them."""
    (module,) = known.code
    monkeypatch.setattr(mutation_score, "_fast_code", own_process)
    monkeypatch.setattr(mutation_score, "_FAST_COMPILERS", {})
    assert mutation_score.fast_code(module) != str(os.getpid())


def test_processes_that_compiled_with_few_optimisations_end(known: Baseline) -> None:
    (module,) = known.code
    made = mutation_score._in_turn(compiled_fast, [module], None, 2)
    assert list(made) == [known.fast_code[module]]


def test_what_modules_are_without_a_fault_is_made_on_demand(known: Baseline) -> None:
    (module,) = known.code
    made = mutation_score.OnDemand(compiler.KERNELS, mutation_score.code_of)
    harmed = PART.replace("3.0f", "5.0f")
    with mutation_score.copied_sources("part.cuh", harmed):
        assert mutation_score.code_of(module) != made[module] == known.code[module]
        assert mutation_score.code_of(module) != known.code[module]


def test_few_modules_say_that_the_code_is_the_same(
    known: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = "const int unused = n;"
    assert found("f.cu", after, known)["became"] == "same code"
    monkeypatch.setattr(mutation_score, "MODULES_OF_FAULT", 0)
    changes = PART.strip().replace("x * 3.0f", "x")
    assert found("part.cuh", changes, known)["became"] == "same code"
    assert found("part.cuh", changes, replace(known, thorough=True))["became"] == "noticed"


def test_faults_are_noticed_survive_or_are_put_aside(known: Baseline) -> None:
    assert known.files[next(iter(known.code))] == {"f.cu", "part.cuh"}
    survived = found("f.cu", "if (threadIdx.x <= n) x[threadIdx.x] = part(x[threadIdx.x]);", known)
    assert survived["became"] == "survived" and survived["calls"] == 1
    assert found("f.cu", "const int unused = n;", known)["became"] == "same code"
    wrong = found("part.cuh", PART.strip().replace("x * 3.0f", "x"), known)
    assert (wrong["became"], wrong["by"], wrong["why"]) == ("noticed", "multiplies", "wrong")
    fault = found("part.cuh", PART.strip().replace("3.0f", "6.0f"), known)
    assert fault["became"] == "noticed" and fault["why"] == "finding: race"


def test_a_call_that_does_not_end_is_stopped(known: Baseline, monkeypatch: Any) -> None:
    def endless() -> str:
        while True:
            pass

    monkeypatch.setattr(mutation_score, "SECONDS", 1)
    call = replace(known.calls[0], run=endless)
    wrong = replace(known, calls=(call,))
    after = PART.strip().replace("x * 3.0f", "x")
    assert found("part.cuh", after, wrong)["why"] == "does not end in 1 CPU seconds"


def test_a_fault_has_so_many_seconds(known: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that no call has noticed by then counts as survived."""
    says_nothing = replace(known.calls[0], run=str, seconds=0.0)
    slow = replace(known, calls=(says_nothing, *known.calls))
    after = PART.strip().replace("x * 3.0f", "x")
    assert found("part.cuh", after, slow)["calls"] == 2
    monkeypatch.setattr(mutation_score, "SECONDS_OF_FAULT", 0)
    spent = found("part.cuh", after, slow)
    assert (spent["became"], spent["calls"]) == ("survived", 1)
    assert found("part.cuh", after, replace(slow, thorough=True))["became"] == "noticed"


def test_calls_that_run_the_line_come_first(known: Baseline) -> None:
    """Then come all others whose code has changed, within the seconds of a fault."""
    slow = replace(known.calls[0], run=str, seconds=9.0)
    other = replace(known.calls[0], name="other", lines={})
    after = PART.strip().replace("x * 3.0f", "x")
    result = found("part.cuh", after, replace(known, calls=(other, slow)))
    assert (result["by"], result["calls"]) == ("other", 2)
    unchanged = replace(other, modules=frozenset())
    result = found("part.cuh", after, replace(known, calls=(unchanged, slow)))
    assert (result["became"], result["calls"]) == ("survived", 1)


def test_lines_are_collected_where_they_run() -> None:
    executed = mutation_score.Executed()
    y = np.zeros(32, np.int32)
    body = """
      .loc 1 3 1
      mov.u32 %r1, 1;
      setp.eq.u32 %p1, %r1, 1;
      @%p1 bra $done;
      .loc 1 4 1
      mov.u32 %r2, 2;
      $done:
      .loc 2 9 1
      mov.u32 %r3, 3;
    """
    with observe(executed):
        run_ptx(body, y=y)
    assert executed.lines == {"probe.cu": 1 << 3, "inner.cuh": 1 << 9}
    call = Call("", str, 0.0, frozenset(), executed.lines)
    assert [call.runs("probe.cu", n) for n in (3, 4)] == [True, False]
    assert not call.runs("other.cu", 3)


def test_a_module_that_is_gone_is_no_fault(known: Baseline) -> None:
    def gone() -> str:
        raise ModuleNotFoundError("No module named 'numpy.ma'")

    wrong = replace(known, calls=(replace(known.calls[0], run=gone),))
    with pytest.raises(RuntimeError, match="No module named"):
        found("part.cuh", PART.strip().replace("x * 3.0f", "x"), wrong)


def test_calls_are_read_again_if_no_source_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(
        mutation_score, "small_calls", lambda: {n: lambda n=n: ran.append(n) or "" for n in "ab"}
    )
    stamps = iter("1112")
    monkeypatch.setattr(mutation_score, "_stamp", lambda: next(stamps))
    for _ in range(3):
        mutation_score.baseline(tmp_path / "kept")
    assert sorted(ran) == ["a", "b"]
    mutation_score.baseline(tmp_path / "kept")
    assert sorted(ran) == ["a", "a", "b", "b"]


def test_faults_keep_their_order_in_several_processes(known: Baseline) -> None:
    text = (compiler.KERNELS / "part.cuh").read_text()
    order = [("part.cuh", one) for one in mutants(text)]
    alone, several = (
        list(mutation_score._in_turn(mutation_score.became, order, known, jobs)) for jobs in (1, 2)
    )
    assert [x["became"] for x in alone] == [x["became"] for x in several]
    assert {x["became"] for x in alone} == {"noticed"}


def test_the_seed_decides_the_order() -> None:
    first, again, other = (mutation_score.drawn({"attn_fa.cu"}, seed)[:5] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("name", [mutation_score.NAME, *mutation_score.EARLIER])
def test_a_record_is_of_mutants_that_its_sources_had(name: str) -> None:
    record = recording.stored(name)
    assert len(record["faults"]) == len({(x["file"], x["name"]) for x in record["faults"]})
    assert {x["file"] for x in record["faults"]} <= set(record["files"])


def test_the_page_is_what_the_record_says() -> None:
    text = mutation_score.PAGE.read_text(encoding="utf-8")
    shown = text.partition(mutation_score.BEGIN)[2].partition(mutation_score.END)[0].strip()
    assert shown == "\n".join(mutation_score.table(recording.stored("mutation_score")))


def test_survivors_are_explained_or_open() -> None:
    record = recording.stored("mutation_score")
    table = "\n".join(mutation_score.table(record))
    survivors = [x for x in record["faults"] if x["became"] == "survived"]
    assert all(f"`{x['file']}:{x['line']}`" in table for x in survivors)


def test_the_second_share_is_told_apart_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became = [{"became": "noticed"}] * 90 + [{"became": "survived"}] * 10
    record = {"seed": 4, "faults": became, "environment": {"revision": "1234567890abc"}}
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    assert mutation_score._again(record, 98) == []
    again = {**record, "faults": became[-4:] + [{"became": "noticed"}] * 6}
    (tmp_path / f"{mutation_score.AGAIN}.json").write_text(json.dumps(again))
    text = "".join(mutation_score._again(record, 98))
    assert "6 of the 10 that change a result are noticed (revision 1234567890)" in text
    assert "together 96 of 98 (98.0 %)" in text
    assert mutation_score._again({**record, "seed": 5}, 98) == []


def test_survivors_that_change_nothing_are_not_run_again() -> None:
    states = ("survived", "survived", "survived", "noticed")
    faults = [{"file": "a.cu", "name": str(n), "became": x} for n, x in enumerate(states)]
    why = {"a.cu 0": ["changes no result", ""], "a.cu 1": ["no call has the case", ""]}
    assert mutation_score.of_consequence(faults, why) == {"a.cu 1", "a.cu 2"}
