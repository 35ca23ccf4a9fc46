"""Every primitive's tiny kernel, run in the interpreter: what tests/gpu/test_prims.py runs too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from cupyattn.interpret.executor import run_kernel
from cupyattn.plans.records import TensorMap
from tests.faults.fault_patches import put_a_line_in_place
from tests.interpret.ptx_cases import PTX
from tests.prims.prim import Prim
from tests.prims.prims_cases import PRIMS

#: The oldest architecture of each, and for some another, where the compiler writes other PTX.
CELLS = [(prim, prim.architectures[0]) for prim in (*PRIMS, *PTX)]
FIRST = len(CELLS)  # of the others, which are slow
CELLS += [(prim, "sm_90") for prim in PRIMS if prim.differs_on_sm_90]


@pytest.mark.parametrize(
    ("prim", "arch"),
    [
        pytest.param(*cell, id="-".join((cell[0].name, cell[1])),
                     marks=[pytest.mark.slow] if cell[0].late or number >= FIRST else [])
        for number, cell in enumerate(CELLS)
    ],
)  # fmt: skip
def test_primitive(prim: Prim, arch: str) -> None:
    arguments = prim.arguments()
    expected = prim.expected(**arguments)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and not value.dtype.fields:
            arguments[name] = np.array(value)
            arguments[name].flags.writeable = name in expected
    mapped = {a.buffer: arguments[a.buffer] for a in arguments.values() if isinstance(a, TensorMap)}
    passed = [arguments[name] for name in prim.parameters(arguments)]
    ptx = kc.translate(prim.spec, arch).ptx
    run_kernel(ptx, prim.entry, passed, block=prim.block, grid=prim.grid, mapped=mapped)
    prim.check({name: a for name, a in arguments.items() if isinstance(a, np.ndarray)})


def test_a_number_that_is_not_awaited_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first warp is the last to publish, so it reads words that are not written."""
    wait = "if (word != 0) return"
    put_a_line_in_place("prims/schedule/counter.cuh", wait, "return", tmp_path, monkeypatch)
    (prim,) = (prim for prim in PRIMS if prim.name == "published")
    with pytest.raises(AssertionError, match="published"):
        test_primitive(prim, "sm_80")
