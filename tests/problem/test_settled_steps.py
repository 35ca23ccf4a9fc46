"""Form and tiles of 239 products and backward passes, and why a faster form is left out.

settled_steps.json was written once, when plans still chose both, and again for pairs of blocks,
turns of causal pairs, and biases past head_dim 128. A change of it is a change of what users get.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.ops import gemm
from tests.problem.settled_steps import Product, steps

#: Form, tiles and note, by the name of a call.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("settled_steps.json").read_text())
STEPS = list(steps())


def test_the_table_has_every_form_and_a_line_for_each_call() -> None:
    assert [step.name for step in STEPS] == list(TABLE)
    found = Counter(form for form, *_ in TABLE.values())
    assert set(found) == {
        "portable", "sm90", "atomic", "deterministic", "sm90_atomic", "sm90_deterministic"
    }  # fmt: skip
    assert min(found.values()) > 5


@pytest.mark.parametrize("kind", ["Product", "Gradient"])
def test_the_record_says_form_and_tiles_and_the_plan_has_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_device = gemm.own_arch
    for step in STEPS:
        if type(step).__name__ != kind:
            continue
        hopper = step.arch == "hopper"
        monkeypatch.setattr(gemm, "own_arch", (lambda *_: "sm_90a") if hopper else of_device)
        problem = step.problem()
        kernel, plan = problem.settled[1], step.plan(problem)
        tiles = kernel.tiles if isinstance(step, Product) else kernel.keys_tiles
        assert [kernel.form, list(astuple(tiles)), kernel.note] == TABLE[step.name], step.name
        assert (plan.form, plan.tiles, plan.note) == (kernel.form, tiles, kernel.note), step.name


def test_form_and_tiles_are_chosen_in_one_place() -> None:
    """By `settle_gemm`, `settle_layers` and `settle_backward`.

    Mirror and bound of gradients take the record.
    """
    package = Path(ca.__file__).parent
    choices = {
        "choose_tiles", "on_hopper", "order_is_faster", "backward_support", "_hopper_support",
        "backward_tiles", "hopper_backward_tiles",
    }  # fmt: skip
    found = Counter(
        (name, path.relative_to(package).as_posix())
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (name := ast.unparse(node.func).rpartition(".")[2]) in choices
    )
    assert {name for name, _ in found} == choices
    assert {name for name, count in (+found).items() if count > 1} == {
        ("choose_tiles", "problem/gemm_form.py")  # of a product, and of several together
    }
    assert found["choose_tiles", "problem/gemm_form.py"] == 2
    assert {place for _, place in found} == {"problem/gemm_form.py", "problem/backward_form.py"}
