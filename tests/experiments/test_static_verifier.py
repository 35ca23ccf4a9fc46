"""experiments/accuracy/static_verifier.py: descriptions of launches, queries, and the table."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler import modules as compiler
from experiments._harness import recording
from experiments._harness import small_layers as layers
from experiments.accuracy import static_verifier
from experiments.accuracy.mutation_score import Call, reached

#: Says of PTX without a barrier that it has a race.
FAKE = f"""#!{sys.executable}
import json, sys
text, asked = (open(sys.argv[i]).read() for i in (1, 3))
assert json.loads(asked)["schema"] == "spverify.kernel-input/v1"
race = "bar.sync" not in text and "barrier.sync" not in text
found = [{{"message": "unordered"}}] if race else []
print(json.dumps({{"result": "potential_race" if race else "race_free", "diagnostics": found}}))
"""


def quantised_rows() -> str:
    return layers.codes(ca.act_quant, (3, 1283), "float16", "channel")


@pytest.fixture
def fake(tmp_path: Path) -> str:
    path = tmp_path / "sentryward"
    path.write_text(FAKE)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_launch_is_described_by_its_parameters() -> None:
    (launch,) = static_verifier.launches(quantised_rows)
    ptx = compiler.translate(launch.one.module, launch.arch).ptx
    found = static_verifier.described(launch, ptx)
    assert found["entry"] == "row_quant" and found["launch"]["grid_dim"] == [launch.one.grid, 1, 1]
    struct, values = launch.one.params[0]
    assert isinstance(struct, np.dtype)
    pointers = [name for name, value in values.items() if isinstance(value, str)]
    offsets = {struct.fields[name][1] for name in pointers}
    assert {x["offset"] for x in found["declarations"]} == offsets
    by_offset = {x["offset"]: x for x in found["arguments"]}
    assert len(found["arguments"]) == len(by_offset) and not offsets & by_offset.keys()
    channels = struct.fields["channels"][1]
    assert by_offset[channels]["value"] == 1283 and by_offset[channels]["type"] == "s32"


def test_both_are_asked_about_each_removal(fake: str) -> None:
    (launch,) = static_verifier.launches(quantised_rows)
    call = Call("rows", quantised_rows, 0.0, frozenset(), {})
    files = reached(launch.one.module)
    found = [
        static_verifier._mutant(fake, file, fault, launch, call, ask=True)
        for file, fault in static_verifier.removals(files)
        if file == "linear/row_quant.cu"
    ]
    (one,) = (x for x in found if x is not None)
    assert one["interpreter"].startswith("finding: ")
    assert one["sentryward"]["verdict"] == "potential_race"
    assert one["sentryward"]["message"] == "unordered"


def test_the_page_is_what_the_record_says() -> None:
    text = static_verifier.PAGE.read_text(encoding="utf-8")
    begin, end = static_verifier.BEGIN, static_verifier.END
    shown = text.partition(begin)[2].partition(end)[0].strip()
    record = recording.stored(static_verifier.NAME)
    assert shown == "\n".join(static_verifier.table(record))
    assert json.dumps(record["sentryward"]) == '"0.1.1"'
