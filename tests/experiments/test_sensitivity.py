"""Faults on outputs are as described, and their record is continued and shown."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.compiler import modules as compiler
from cupyattn.testing.expected import expectation
from experiments._harness import recording
from experiments._harness.output_faults import CAUSAL_ALONE, FAULTS, rounded
from experiments._harness.planted import Patch
from experiments.accuracy import sensitivity

QUICK = ["--forms", "fa", "--trials", "2"]


def ground(name: str = "fa", number: int = 1) -> Any:
    trial = sensitivity.Trial(sensitivity.FORMS[name], "mirror", number, 0)
    kernel, known, o, lse = trial.run()
    return known, sensitivity.ground_of(trial, kernel, o, lse)


def test_there_are_thirty_kinds() -> None:
    assert len(FAULTS) == 30 and set(CAUSAL_ALONE) <= set(FAULTS)


@pytest.mark.parametrize(
    "name",
    ["fa", "fa_tc Hopper, bfloat16", "u8 by tile", "FP8 Hopper", "fa, signed", "fa_int8, signed"],
)
def test_the_ground_is_what_the_kernel_is_held_to(name: str) -> None:
    """Its own attention agrees with the judge's, and its output is a number of its type."""
    known, here = ground(name)
    assert np.allclose(here.exact, known.o, rtol=1e-12, atol=1e-14)
    assert (rounded(here.o, here.dtype) == here.o).all()
    assert max(sensitivity.leaves(known, here.o, here.lse)) <= 1


def test_signed_values_are_held_to_their_own_bound() -> None:
    known, here = ground("fa_tc, signed")
    plain, drawn = ground("fa_tc")
    assert (np.abs(here.v) == np.abs(drawn.v)).all() and (here.v != drawn.v).any()
    assert set(known.bound.terms) == {"P", "R4", "R6", "R7"} != set(plain.bound.terms)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_grows_with_its_size_and_a_large_one_is_seen(fault: str) -> None:
    known, here = ground()

    def laid(size: float) -> tuple[Any, Any]:
        with np.errstate(invalid="ignore"):
            o, lse = FAULTS[fault](here, size, np.random.default_rng(0))
        return o, 0.0 if lse is None else lse

    small, large = (sum(np.abs(x).sum() for x in laid(size)) for size in (1e-3, 1e-1))
    assert 0 <= small < large
    o, lse = laid(0.1)
    assert max(sensitivity.leaves(known, here.stored(o), here.lse + lse)) > 1


@pytest.mark.parametrize(
    "name", [name for name, form in sensitivity.FORMS.items() if not form.signed]
)
def test_a_key_that_weighs_a_thousandth_is_missed_in_every_row(name: str) -> None:
    """In O, except with bfloat16 P, whose rounding hides it; and in lse of every form."""
    known, here = ground(name, number=0)
    candidates = np.where(here.weights > 1e-3, here.weights, np.inf)
    factor = np.ones_like(candidates)
    np.put_along_axis(factor, candidates.argmin(axis=-1)[..., None], 0.0, axis=-1)
    o, lse = here.reweighted(factor)
    of_o = known.ratios(here.stored(o)).max(axis=-1)
    of_lse = ratio_to_bound(here.lse + lse, known.lse, known.bound.lse)
    assert (of_lse > 1).all()
    assert (of_o > 1).all() or name.endswith("bfloat16")


def test_stored_numbers_are_those_of_the_mirror() -> None:
    x = np.random.default_rng(0).standard_normal(4096) * 10.0 ** np.arange(-4, 4).repeat(512)
    for dtype in ("float16", "bfloat16", "float32"):
        assert (rounded(x, dtype) == ca.reference.rounding.round_to(x, dtype)).all()


def test_a_run_goes_on_from_its_record(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    assert sensitivity.main([*QUICK, "--json", str(whole)]) == 0
    assert sensitivity.main(["--forms", "fa", "--trials", "1", "--json", str(part)]) == 0
    record = json.loads(part.read_text())
    assert record["found"]["fa"]["trials"] == 1
    part.write_text(json.dumps({**record, "trials": 2}))
    assert sensitivity.main(["--resume", str(part)]) == 0
    assert json.loads(part.read_text())["found"] == json.loads(whole.read_text())["found"]


@pytest.mark.parametrize("pool", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_two_processes_find_what_one_finds(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order that they end: parts are added in the order of the trials."""
    if pool == "threads":  # in the place of processes, each of which imports everything
        monkeypatch.setattr(sensitivity, "ProcessPoolExecutor", lambda n, _: ThreadPoolExecutor(n))
    found = []
    for number in ("1", "2"):
        record = tmp_path / f"{number}.json"
        forms = ["--forms", "fa", "u8 by tile", "--trials", "1"]
        assert sensitivity.main([*forms, "--processes", number, "--json", str(record)]) == 0
        found.append(json.loads(record.read_text())["found"])
    assert found[0] == found[1] and list(found[0]) == ["fa", "u8 by tile"]


def test_a_patch_is_a_part_of_its_own() -> None:
    trial = sensitivity.Trial(sensitivity.FORMS["fa"], "interpret", 0, 0)
    patches = sensitivity.planted()
    first, *rest = sensitivity.parts_of(trial, "fa", patches)
    assert first.patch is None and not first.laid
    of_fa = {p.name for p in patches if "fa" in p.forms and p.kind not in CAUSAL_ALONE}
    assert {part.patch for part in rest} == of_fa and len(rest) == len(of_fa) > 1
    assert [part.laid for part in sensitivity.parts_of(trial, "fa", None)] == [True]


def test_a_false_alarm_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sensitivity.call

    def wrong(*args: Any) -> tuple[Any, Any]:
        o, lse = right(*args)
        return o * o.dtype.type(2), lse

    monkeypatch.setattr(sensitivity, "call", wrong)
    assert sensitivity.main(["--forms", "fa", "--trials", "1"]) == 1


def test_faults_in_kernels_need_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert sensitivity.main(["--planted"]) == 2
    assert "give --backend interpret or cuda" in capsys.readouterr().err


def test_patches_apply_and_name_forms() -> None:
    for patch in sensitivity.planted():
        assert set(patch.forms) <= set(sensitivity.FORMS)
        before, loaded = compiler.KERNELS, compiler.generation()
        with patch.plant(1e-3):
            assert compiler.generation() > loaded, "a device would run what it has"
            loaded = compiler.generation()
            changed = [
                (compiler.KERNELS / hunk.file).read_text() for hunk in patch.hunks
            ]
        assert all("1.000000000e-03f" in text for text in changed)
        assert before == compiler.KERNELS and compiler.generation() > loaded


def test_a_run_in_which_no_fault_has_a_place_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sensitivity, "FAULTS", {})
    options = ["--forms", "fa", "--trials", "1", "--json", str(tmp_path / "record.json")]
    assert sensitivity.main(options) == 1
    assert "no fault changed a bit of fa: the run says nothing" in capsys.readouterr().out


def test_kernels_can_be_given_a_fault_of_every_kind() -> None:
    """One patch for each, and each in a form that the interpreter takes."""
    assert sorted(patch.kind for patch in sensitivity.planted()) == sorted(FAULTS)
    for patch in sensitivity.planted():
        assert set(patch.forms) & set(sensitivity.INTERPRETED), patch.name


@pytest.mark.parametrize("form", sensitivity.INTERPRETED)
def test_a_call_of_the_interpreter_has_more_than_one_step(form: str) -> None:
    """Faults in the rescaling between two steps have a place then."""
    trial = sensitivity.Trial(sensitivity.FORMS[form], "interpret", 0, 0)
    arrays, codes = trial.operands()
    known = ca.kernel_form(*(arrays if codes is None else (codes,)), **trial.options)
    assert trial.problem.length > known["tiles"].block_kv


def test_a_fault_without_a_place_does_not_count() -> None:
    """In a causal call of this seed no maximum grows after the first 64 keys."""
    patch = next(p for p in sensitivity.planted() if p.kind == "earlier keys in O alone")
    trial = sensitivity.Trial(sensitivity.FORMS["u8 by tile"], "interpret", 1, 0)
    assert sensitivity.seen_in_kernels(trial, patch) is None
    assert not sensitivity.run_part(sensitivity.Part(trial, False, patch.name)).faults


def seen_in_kernel(patch: Patch, form: str, size: float) -> bool:
    number = int(patch.kind in CAUSAL_ALONE)
    trial = sensitivity.Trial(sensitivity.FORMS[form], "interpret", number, 0)
    arrays, codes = trial.operands()
    known = expectation(sensitivity.received(trial, arrays, codes))
    with patch.plant(size):
        o, lse = sensitivity.call(trial, arrays, codes)
    return max(sensitivity.leaves(known, o.astype(np.float64), lse)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("patch", sensitivity.planted(), ids=lambda patch: patch.name)
def test_a_fault_in_a_kernel_is_seen(patch: Patch) -> None:
    """In the first form that the interpreter takes, and not where it is next to nothing."""
    form = next(name for name in patch.forms if name in sensitivity.INTERPRETED)
    assert seen_in_kernel(patch, form, 0.1)
    assert not seen_in_kernel(patch, form, 1e-9)


def test_page_and_plot_are_those_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = sensitivity.DOCUMENT.read_text(encoding="utf-8")
    assert sensitivity.page(*map(recording.stored, sensitivity.RECORDS)) == committed
    monkeypatch.setattr(sensitivity, "DOCUMENT", tmp_path / "page.md")
    monkeypatch.setattr(sensitivity, "PLOT", tmp_path / "plot.svg")
    assert sensitivity.main(["--stored", "--update-docs"]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == committed
    assert "<svg" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
