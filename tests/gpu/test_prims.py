"""Every primitive's tiny kernel, run on the device."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn import compile as kc
from tests.prims_cases import PRIMS, Prim

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("prim", PRIMS, ids=lambda prim: prim.name)
def test_primitive(prim: Prim) -> None:
    arguments = prim.arguments()
    # A parameter struct travels by value, everything else as an array.
    passed = {
        name: value if value.dtype.fields else cupy.asarray(value)
        for name, value in arguments.items()
    }
    kc.load(prim.spec).kernel(prim.entry)((1,), (prim.block,), tuple(passed.values()))
    written = {n: x if isinstance(x, np.ndarray) else x.get() for n, x in passed.items()}
    prim.check(written)
