"""Every planted mistake breaks a judgement: the tests are tested.

Those that a device shows only sometimes (a missing barrier, a wait that is too short) are left to
the interpreter, as their patches say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cupyattn.kernels.ladder import VARIANTS
from tests.faults.fault_patches import FAULTS, FORMS, Fault, put_in_place
from tests.gpu.support import (
    arch_of,
    embedded,
    moved,
    on_device,
    once,
    prebuild,
    run,
    run_packed,
    specs_of,  # fmt: skip
)
from tests.support.padded import padded, run_padded
from tests.support.runs import REVEALING, Run, packed, revealing, revealing_zero_points

cupy = pytest.importorskip("cupy")

CERTAIN = [fault for fault in FAULTS if fault.caught_by == "J2"]
SEEN = [(fault, variant) for fault in CERTAIN for variant in fault.variants]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the kernels for every mistake, compiled side by side, the same for all workers."""
    of_worker = tmp_path_factory.getbasetemp()
    folder = (of_worker.parent if "PYTEST_XDIST_WORKER" in os.environ else of_worker) / "faults"
    once(str(folder), lambda: [fault.plant(folder) for fault in CERTAIN])
    copies = {fault.name: folder / fault.name for fault in CERTAIN}
    specs = []
    for fault, variant in SEEN:
        for causal in (False, True):
            for spec in specs_of(variant, "float16", 64, causal):
                if str(spec.source).startswith("attn_"):
                    specs.append(replace(spec, source=copies[fault.name] / spec.source))
    prebuild(specs)
    return copies


def runs(variant: str) -> Iterator[Run]:
    form = variant.partition("@")[2]
    given = on_device if form == "sm90" else lambda *inputs: map(embedded, inputs)
    found = REVEALING[form]() if form in REVEALING else revealing(2, 2, ((70, 33), (150, 333)))
    for inputs, options in found:
        yield run(variant, tuple(given(*inputs)), **moved(options))


def zero_point_runs(variant: str) -> Iterator[Run]:
    for inputs, options in revealing_zero_points(variant):
        yield run(variant, on_device(*inputs), **options)


def packed_runs(variant: str) -> list[Run]:
    """A causal mask hides a key too many at the end, which the calls without it show."""
    inputs, ends = packed(((7, 130), (150, 200)), 4, 2)
    return [
        one
        for causal in (True, False)
        for one in run_packed(variant, on_device(*inputs), on_device(*ends), causal=causal)
    ]


def padded_runs(variant: str) -> list[Run]:
    inputs, lengths = padded(((7, 130), (150, 200)), (150, 200), 4, 2, 64)
    moved_lengths = {name: cupy.asarray(x) for name, x in lengths.items()}
    return run_padded(variant, on_device(*inputs), moved_lengths, arch=arch_of(variant))


@pytest.mark.parametrize("variant", [*VARIANTS, *FORMS])
def test_without_a_mistake_every_judgement_holds(variant: str) -> None:
    for one in runs(variant):
        one.check()
    if "@" not in variant:
        for one in (*packed_runs(variant), *padded_runs(variant)):
            one.check()
    if variant in ("fa_int8", "fa_int8@pv8"):
        for one in zero_point_runs(variant):
            one.check()


@pytest.mark.usefixtures("planted_kernels")
@pytest.mark.parametrize(
    ("fault", "variant"), SEEN, ids=[f"{fault.name}-{variant}" for fault, variant in SEEN]
)
def test_a_mistake_breaks_a_judgement(
    fault: Fault, variant: str, planted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(planted[fault.name], variant, monkeypatch)
    calls = packed_runs if fault.of_packed else padded_runs if fault.of_padded else runs
    calls = zero_point_runs if fault.of_zero_points else calls
    reports = [one.judge() for one in calls(variant)]
    assert not all(report.passed for report in reports), (
        f"{fault.sentence} Nothing noticed: " + "; ".join(map(str, reports))
    )
