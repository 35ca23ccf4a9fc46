"""Form and tiles of some 250 calls, and why a faster form is left out, as settled.json has them.

The table was written once, before form and tiles were settled in one place. A change of it is a
change of what users get.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.compiler.modules import KERNELS
from cupyattn.kernels import ladder
from cupyattn.ops.explain import kernel_form
from tests.problem.settled_calls import Call, calls

#: By the name of a call: form, tiles, note.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("settled.json").read_text())
CALLS = list(calls())


@pytest.fixture(autouse=True)
def own_rung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rung of one's own, which has one form."""
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    own = ca.Variant("settled_own", "one's own", "tensor_core", {256: ca.Tiles(64, 32, 4, 2)})
    ca.register(own, KERNELS / "attn_fa_tc.cu")
    yield


def test_the_table_has_every_form_and_a_line_for_each_call() -> None:
    assert [call.name for call in CALLS] == list(TABLE)
    found = Counter(form for form, *_ in TABLE.values())
    assert set(found) == set(ladder.FORM_SOURCES)
    assert len(TABLE) >= 200 and min(found.values()) >= 2


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_form_tiles_and_note(call: Call) -> None:
    """Those of the last plan: what `plan`, `explain` and `kernel_form` say."""
    form, tiles, note = TABLE[call.name]
    arrays, options = call.operands()
    plan = ca.plan(*arrays, **options).plans[-1]
    assert [plan.form, plan.tiles, plan.note] == [form, ca.Tiles(*tiles), note]
    assert kernel_form(*arrays, **options) == {"form": form, "tiles": plan.tiles}
    said = ca.explain(*arrays, **options)
    assert f"{call.variant} ({form}), {plan.tiles}" in said
    assert said.endswith(note)
