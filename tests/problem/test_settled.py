"""Form and tiles of some 250 calls, and why a faster form is left out, as settled.json has them.

The table was written once, before form and tiles were settled in one place. A change of it is a
change of what users get. Plans, mirror, bounds and judge must see the same.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.bounds import kernel as kernel_bounds
from cupyattn.kernels import ladder
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import kernel_form
from cupyattn.problem.attention import KernelCall
from cupyattn.problem.form import Kernel
from cupyattn.problem.settings import Settings
from cupyattn.problem.support import SUPPORTED, Support
from cupyattn.reference import attention as mirror
from cupyattn.testing import judged, verdict
from tests.problem.settled_calls import Call, calls
from tests.support.own_kernels import renamed

#: Form, tiles and note, by the name of a call.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("settled.json").read_text())
CALLS = list(calls())


@pytest.fixture(autouse=True)
def own_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rung of one's own, which has one form."""
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    own = ca.Variant("settled_own", "one's own", "tensor_core", {256: ca.Tiles(64, 32, 4, 2)})
    ca.register(own, renamed(tmp_path, "settled_own", "fa_tc"))
    yield


def test_the_table_has_every_form_and_a_line_for_each_call() -> None:
    assert [call.name for call in CALLS] == list(TABLE)
    found = Counter(form for form, *_ in TABLE.values())
    assert set(found) == {form for rung in ladder.VARIANTS.values() for form in rung.forms}
    assert len(TABLE) >= 200 and min(found.values()) >= 2


of_each_rung = pytest.mark.parametrize("rung", sorted({call.variant for call in CALLS}))


@of_each_rung
def test_form_tiles_and_note(rung: str) -> None:
    """They belong to the last plan; `plan`, `explain` and `kernel_form` agree."""
    for call in CALLS:
        if call.variant == rung:
            check_form_tiles_and_note(call)


def check_form_tiles_and_note(call: Call) -> None:
    form, tiles, note = TABLE[call.name]
    arrays, options = call.operands()
    plan = ca.plan(*arrays, **options).plans[-1]
    assert [plan.form, plan.tiles, plan.note] == [form, ca.Tiles(*tiles), note], call.name
    assert kernel_form(*arrays, **options) == {"form": form, "tiles": plan.tiles}, call.name
    said = ca.explain(*arrays, **options)
    sizes = ", ".join(f"{name}={size}" for name, size in asdict(plan.tiles).items())
    assert f"{call.variant} ({form})\n  tiles     {sizes}\n" in said, call.name
    assert said.endswith(note), call.name


# ---- one record ----------------------------------------------------------------------------------


class Seen(Exception):
    """Carries the record that the core function of mirror, bounds or judge was given."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelCall]:
    """The record that a function hands to the core."""

    def stop(received: KernelCall, *args: Any, **options: Any) -> None:
        raise Seen(received)

    monkeypatch.setattr(mirror, "run_kernel", stop)
    monkeypatch.setattr(kernel_bounds, "bound_kernel", stop)
    monkeypatch.setattr(judged, "expectation", stop)

    def of(function: Callable[..., Any], *args: Any, **options: Any) -> KernelCall:
        with pytest.raises(Seen) as seen:
            function(*args, **options)
        found: KernelCall = seen.value.args[0]
        return found

    return of


def key(kernel: Kernel) -> tuple[Any, ...]:
    return kernel.variant, kernel.form, kernel.tiles


@of_each_rung
def test_plan_mirror_bounds_and_judge_take_one_record(rung: str, records: Any) -> None:
    for call in CALLS:
        if call.variant == rung:
            check_that_one_record_is_taken(call, records)


def check_that_one_record_is_taken(call: Call, records: Any) -> None:
    arrays, keywords = call.operands()
    q, k, v = (*arrays, None, None)[:3]
    request = resolved(q, k, v, **keywords)
    form, tiles, note = TABLE[call.name]
    settled = request.kernel
    assert [settled.form, settled.tiles, settled.note] == [form, ca.Tiles(*tiles), note], call.name
    assert ca.plan(*arrays, **keywords).kernel == settled, call.name

    packed = request.call.packed is not None
    run = (lambda **x: ca.attention_varlen(q, k, v, **x)) if packed else ca.attention
    given = () if packed else arrays
    received = records(run, *given, **keywords, backend="mirror")
    kernel, inputs, z = received.kernel, received.rows, received.quantized
    assert key(kernel) == key(settled) and (packed or kernel == settled), call.name

    # By name, and by themselves where they know as much: not of the device, of strides and of
    # other sequences.
    options = {**received.scores, "variant": call.variant}
    if settled.stacks or packed or not settled.own_tiles:
        options["tiles"] = settled.tiles
    by_itself = not form.startswith("sm90") and form != "fused" and not packed
    o = np.zeros(kernel.call.output_shape, np.float16)
    for name in (form, None) if by_itself else (form,):
        named = {**options, "form": name}
        mirrored = records(mirror.attention_mirror, *(inputs if z is None else (z,)), **named)
        bounded = records(kernel_bounds.attention, *inputs, quantized=z, **named)
        held = records(verdict.judge, o, *inputs, quantized=z, **named)
        for found in (mirrored, bounded, held):
            assert key(found.kernel) == key(settled), call.name


def test_a_judge_takes_the_record_of_a_prepared_call() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 16, 8, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 1, 640, 64)).astype(np.float16)
    prepared = ca.plan(q, k, v, variant="fa_tc", arch="sm_90a", return_lse=True)
    assert prepared.kernel.stacks and prepared.kernel.call.heads == 16
    o, lse = prepared(q, k, v)
    received = KernelCall(prepared.kernel, Settings(), {"q": q, "k": k, "v": v})
    report = judged.judge_kernel(received, o, lse)
    assert report.passed and report.variant == "fa_tc"
    assert not judged.judge_kernel(received, 1.1 * o, lse).passed


def test_form_and_tiles_are_chosen_in_one_place() -> None:
    """`choose_form` alone asks for tiles, and which forms take a call; `settle` asks it."""
    package = Path(ca.__file__).parent
    found = Counter(
        (name, path.relative_to(package).as_posix())
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (name := ast.unparse(node.func).rpartition(".")[2])
        in ("tiles_for", "takes", "candidates", "choose_form")
    )  # fmt: skip
    times = {"tiles_for": 1, "takes": 2, "candidates": 2}  # with heads stacked, too
    wanted = {(name, "problem/support.py"): count for name, count in times.items()}
    assert found == {**wanted, ("choose_form", "problem/form.py"): 1}


def test_who_asks_for_form_and_tiles() -> None:
    """Each of these has one way in: a call, operands beside a rung's name, unfused steps, products,
    layers of the same codes, and gradients."""
    package = Path(ca.__file__).parent
    found = Counter(
        (node.func.id, path.relative_to(package).as_posix())
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and node.func.id.startswith("settle")
    )  # fmt: skip
    wanted = {
        "settle": 2 * ["problem/attention.py"] + ["problem/form.py", "unfused.py"],
        "settle_each": ["problem/attention.py", "testing/parts.py"],
        "settle_gemm": ["ops/gemm.py"],
        "settle_layers": ["ops/gemm.py"], "settle_together": ["ops/layers.py"],
        "settle_backward": ["gradients/problem.py", "ops/backward.py", "ops/part_sums.py"],
    }  # fmt: skip
    assert found == Counter((name, place) for name, places in wanted.items() for place in places)


def test_what_a_kernel_does_not_take_is_known_before_it_is_planned() -> None:
    """The record of a call says so, which the mirror reads as well: no plan is asked."""
    package = Path(ca.__file__).parent
    found = Counter(
        (name, path.relative_to(package).parts[0])
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and (name := node.func.id) in ("check_kernel", "refused_tiles", "check_tiles")
    )  # fmt: skip
    assert found == {
        ("check_kernel", "problem"): 2, ("refused_tiles", "problem"): 1,
        ("refused_tiles", "compiler"): 1,  # by `check_tiles`
        ("check_tiles", "problem"): 1, ("check_tiles", "diffusion"): 1,  # products, and a layer
    }  # fmt: skip


def test_an_operation_is_three_files_of_one_name() -> None:
    """But the mirror of the backward pass is in gradients/, beside what gradients are.

    Layers are made of two operations, which plan and have mirrors. Sums over the keys of a rank are
    a pass of the backward pass.
    """
    package = Path(ca.__file__).parent
    operations = {
        path.name
        for path in (package / "ops").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and path.name not in ("operation.py", "layers.py", "part_sums.py")
        and {"plan", "mirror"} <= {getattr(one, "name", "") for one in node.body}
    }  # fmt: skip
    assert len(operations) >= 6
    plans, mirrors = (
        {path.name for path in (package / name).glob("*.py")} for name in ("plans", "reference")
    )
    assert operations <= plans and operations - mirrors == {"backward.py"}
    assert {"unfused.py"} <= plans & mirrors  # whose steps stand below ops/


def test_support_says_why_not() -> None:
    assert SUPPORTED.supported and SUPPORTED.note == ""
    missing = Support(False, "the Hopper form takes no mask")
    assert missing.note == "portable form: the Hopper form takes no mask"
