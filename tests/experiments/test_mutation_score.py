"""experiments/accuracy/mutation_score.py: what became of faults, its order, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret import Finding, KernelFault
from cupyattn.testing.mutations import machine_code, mutants
from experiments._harness import recording
from experiments.accuracy import mutation_score
from experiments.accuracy.mutation_score import Baseline, Call

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
    ptx = compiler.translate(*module).ptx
    files = {module: frozenset(mutation_score.reached(module[0]))}
    lines = {module: mutation_score.lines_with_code(ptx)}
    call = Call("multiplies", multiplies, 0.1, frozenset({module}))
    return Baseline((call,), {module: machine_code(ptx)}, files, lines)


def multiplies() -> str:
    text = (compiler.KERNELS / "part.cuh").read_text()
    if "6.0f" in text:
        raise KernelFault(Finding("race", "a message", "f", None, 0, 0, 0, 1, None, ""))
    return "" if "3.0f" in text else "wrong"


def found(file: str, after: str, known: Baseline) -> dict[str, Any]:
    text = (compiler.KERNELS / file).read_text()
    (one,) = (x for x in mutants(text) if x.after.strip() == after)
    return mutation_score.became(file, one, known)


def test_faults_are_noticed_survive_or_are_put_aside(known: Baseline) -> None:
    assert known.files[next(iter(known.code))] == {"f.cu", "part.cuh"}
    survived = found("f.cu", "if (threadIdx.x <= n) x[threadIdx.x] = part(x[threadIdx.x]);", known)
    assert survived["became"] == "survived" and survived["calls"] == 1
    assert found("f.cu", "const int unused = n;", known)["became"] == "same code"
    wrong = found("part.cuh", PART.strip().replace("x * 3.0f", "x"), known)
    assert (wrong["became"], wrong["by"], wrong["why"]) == ("noticed", "multiplies", "wrong")
    fault = found("part.cuh", PART.strip().replace("3.0f", "6.0f"), known)
    assert fault["became"] == "noticed" and fault["why"] == "finding: race"


def test_the_seed_decides_the_order() -> None:
    first, again, other = (mutation_score.drawn({"attn_fa.cu"}, seed)[:5] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("name", ["mutation_score", "mutation_score_first"])
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
