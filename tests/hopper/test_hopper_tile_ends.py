"""The end of a tile of the Hopper forms of fa_int8: O leaves while the next tile is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyattn.interpret import KernelFault
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.support import runs
from tests.support.marks import slow_unless
from tests.support.runs import normal

INT8, PV8, FP8, BY_TILE = "fa_int8@sm90", *cases.RUNGS
PV8_KERNEL, OUTPUT = "sm90/attn_fa_int8_pv8.cu", "prims/io/output.cuh"
BY_TILE_KERNEL = "sm90/attn_fa_int8_pv8_by_tile.cu"

pytestmark = pytest.mark.usefixtures("one_block")


def run(rung: str, length: int = 200, **options: Any) -> runs.Run:
    return cases.run(
        rung, normal((1, 2, length, 64), (1, 2, 70, 64)), backend="interpret", **options
    )


@pytest.mark.parametrize(
    ("options", "rung"),
    [
        pytest.param(options, rung, marks=[] if i == j % 2 else [pytest.mark.slow])
        for i, options in enumerate(({}, {"causal": True}))
        for j, rung in enumerate((INT8, PV8, BY_TILE, FP8))
    ],
)
def test_one_tile_after_another(rung: str, options: dict[str, Any]) -> None:
    run(rung, **options).check()


AT_THE_END = "  if (O_STAGED && lane_id() == 0) cp_async_bulk_wait_group_read();"
#: Changes of sources, and the interpreter's finding for each.
HAZARDS = {
    "scales that another thread loads": (
        PV8, PV8_KERNEL, "    named_barrier_sync(CONSUMERS + warpgroup, WARPGROUP);\n", "race"),
    "scales under way": (PV8, PV8_KERNEL, "    cp_async_wait_group<0>();\n", "in flight"),
    "scales under way, P in e4m3": (
        FP8, "sm90/attn_fa_int8_fp8.cu", "    cp_async_wait_group<0>();\n", "in flight"),
    "means under way, scales by tile": (
        BY_TILE, BY_TILE_KERNEL, "    cp_async_wait_group<0>();\n", "in flight"),
    "scales of a step that nobody counts": (
        BY_TILE, BY_TILE_KERNEL, " + V_SCALE_BYTES", "deadlock"),
    **{
        f"the block ends while the copy engine reads O, {form}": (
            rung, f"sm90/attn_fa_int8{form}.cu", AT_THE_END, "in flight")
        for rung, form in ((INT8, ""), (PV8, "_pv8"), (BY_TILE, "_pv8_by_tile"), (FP8, "_fp8"))
    },
    "the block ends while the copy engine reads O, fa_tc": (
        "fa_tc@sm90", "sm90/attn_fa_tc.cu",
        "  if (leaving && lane_id() == 0) cp_async_bulk_wait_group_read();", "in flight"),
    "O over what the copy engine reads": (
        INT8, OUTPUT, "      if (lane_id() == 0) cp_async_bulk_wait_group_read();\n", "in flight"),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_unless(lambda i, _: not i % 2, HAZARDS))
def test_hazards_are_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung, source, line, kind = HAZARDS[what]
    put_a_line_in_place(source, line, "", tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match=kind):
        run(rung)
