"""The deliberate mistakes still apply and still compile: only then do they test the tests.

That each one breaks a judgement on the device is tested in tests/gpu/test_faults.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyattn.compiler import modules as kc
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.problem import form as kernel_form_module
from cupyattn.testing import mutations
from tests.faults.fault_patches import FAULTS, FORMS, Fault, Hunk

#: Calls in which a mistake may show: features are compiled in or not at all.
CELLS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": True},
    {"causal": True, "varlen": True},
    {"causal": True, "padded": True},
    {"causal": True, "stacked": True},
    {"causal": True, "window": True, "softcap": True, "mask": True, "bias": "float32"},
    {"block_mask": (64, 64)},
    {"rope": "half_split"},
    {"rope": "interleaved"},
    {"rope": "half_split_by_column"},
)


def code_of_variant(folder: Path, variant: str, cell: dict[str, Any]) -> str:
    """PTX without file names, line numbers and debug sections."""
    name, _, form = variant.partition("@")
    rung = VARIANTS[name]
    group = 16 if rung.family == "int8" else 0
    group_v = {"pv8": 64, "pv8_whole": GROUP_ALL}.get(form)
    values = {"group_v": group_v, "p_type": "u8"} if group_v else {}
    features = Features(
        "float16", 64, lse=True, vec=8, group_q=group, group_kv=group, **values, **cell
    )
    tiles = rung.tiles_for(  # of the split form those of several warps to a slice
        64, form=form or "portable", block_mask=features.block_mask, rows=64
    )
    spec = kernel_form_module.module_spec(rung, features, tiles, form or "portable")
    sources = [spec.source, "merge/merge_splits.cu"] if form == "split" else [spec.source]
    arch = "sm_90a" if form == "sm90" else "sm_80"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kc, "KERNELS", folder)
        ptx = [kc.translate(kc.ModuleSpec(s, spec.defines), arch).ptx for s in sources]
    return "\n".join(map(mutations.machine_code, ptx))


def test_there_are_faults_for_every_variant() -> None:
    assert len(FAULTS) >= 12
    seen = {variant for fault in FAULTS for variant in fault.variants}
    assert seen == {*VARIANTS, *FORMS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_small_and_says_what_it_is(fault: Fault, tmp_path: Path) -> None:
    fault.check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if len(fault.variants) > 1], ids=lambda fault: fault.name
)
def test_a_fault_compiles_to_other_code(fault: Fault, tmp_path: Path) -> None:
    """In the first of its rungs it is noticed by tests/interpret/test_interpret_faults.py."""

    def telling(cell: dict[str, Any]) -> bool:
        needed = {"varlen": fault.of_packed, "padded": fault.of_padded}
        return fault.shown_by in cell or any(needed[name] for name in needed.keys() & cell.keys())

    copy = fault.plant(tmp_path)
    for variant in fault.variants[1:]:
        cells = sorted(CELLS, key=lambda cell: not telling(cell))
        cells = cells[:3] if "@" in variant else cells
        cells = ({"zero_points": True},) if fault.of_zero_points else cells
        assert any(
            code_of_variant(copy, variant, cell) != code_of_variant(kc.KERNELS, variant, cell)
            for cell in cells
        ), variant


def test_a_patch_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    stale = Hunk("attn_fa.cu", "no such line\n", "\n")
    fault = Fault("stale", "Nothing.", "J2", "", "", "", ("fa",), (stale,))
    with pytest.raises(
        LookupError, match=r"stale.patch no longer applies to attn_fa.cu: .* 0 times"
    ):
        fault.plant(tmp_path)
