"""Deliberate mistakes in the backward kernels, tests/faults/backward: small, and noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.interpret import schedule
from tests.backward.backward_cases import (
    FORMS,
    HOPPER_FORMS,
    BackwardRun,
    file_of,
    interpreted_as,
    persistent_backward,
    received,
    revealing_of,
    run_backward,
    run_packed_backward,
)
from tests.faults.fault_patches import FOLDER, Fault, parse
from tests.interpret.test_interpret_faults import check_noticed
from tests.support.runs import normal

FAULTS = [parse(path) for path in sorted((FOLDER / "backward").glob("*.patch"))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_small_and_says_what_it_is(fault: Fault, tmp_path: Path) -> None:
    assert fault.variants
    assert set(fault.variants) <= set(FORMS) or set(fault.variants) <= set(HOPPER_FORMS)
    fault.check(tmp_path)


def test_there_are_faults_for_all_forms_and_every_kernel() -> None:
    assert {form for fault in FAULTS for form in fault.variants} == {*FORMS, *HOPPER_FORMS}
    files = {hunk.file for fault in FAULTS for hunk in fault.hunks}
    kernels = {
        str(x.relative_to(compiler.KERNELS)) for x in compiler.KERNELS.rglob("backward_*.cu")
    }
    assert kernels <= files


#: Names of faults whose inputs take long in the interpreter.
LONG = re.compile("_wide_|bias|_turn_|_masked_")


def interpreted(fault: Fault, form: str) -> Iterator[BackwardRun]:
    how = interpreted_as(form)
    if fault.shown_by == "varlen":
        yield from run_packed_backward(((5, 9), (70, 140), (40, 20)), **how)
        return
    if fault.shown_by == "persistent":
        yield persistent_backward()
        return
    if fault.shown_by.startswith("schedule "):  # over many steps, with a warp that falls behind
        with schedule(int(fault.shown_by.removeprefix("schedule "))):
            yield run_backward(received(*normal((1, 1, 900, 64), (1, 1, 100, 64))), **how)
        return
    problems = revealing_of(file_of(fault), form)
    for inputs, options in sorted(problems, key=lambda x: fault.shown_by not in x[1]):
        yield run_backward(inputs, **how, **options)


@pytest.mark.parametrize(
    ("fault", "form"),
    [
        pytest.param(
            fault, fault.variants[-(number % 2)], id=fault.name,
            marks=[pytest.mark.slow] if number % 24 or LONG.search(fault.name) else [],
        )
        for number, fault in enumerate(FAULTS)
    ],
)  # fmt: skip
def test_a_mistake_is_noticed(
    fault: Fault, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fault.plant(tmp_path)
    monkeypatch.setattr(compiler, "KERNELS", folder)
    check_noticed(interpreted(fault, form), fault, folder)
