"""Every primitive's tiny kernel, run on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from cupyattn.plans.records import TensorMap
from cupyattn.runtime import tensor_map
from tests.interpret.ptx_cases import PTX
from tests.prims.prim import Prim
from tests.prims.prims_cases import PRIMS

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("prim", [*PRIMS, *PTX], ids=lambda prim: prim.name)
def test_primitive(prim: Prim) -> None:
    capability = int(cupy.cuda.Device().compute_capability)
    if prim.hopper and capability != 90:
        pytest.skip(f"runs on compute capability 9.0 alone, this device has {capability / 10}")
    if capability < prim.since:
        pytest.skip(f"needs compute capability {prim.since / 10}, this is {capability / 10}")
    arguments = prim.arguments()
    arrays = {
        name: cupy.asarray(value)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and not value.dtype.fields
    }

    def passed(name: str) -> Any:
        """Structs and tensor maps travel by value, everything else as an array on the device."""
        value = arguments[name]
        if isinstance(value, TensorMap):
            address = arrays[value.buffer].data.ptr
            return tensor_map.encode(address, value.dtype, value.shape, value.strides, value.box)
        return arrays.get(name, value)

    module = kc.load(prim.spec, "sm_90a" if prim.hopper else None)
    parameters = tuple(passed(name) for name in prim.parameters(arguments))
    module.kernel(prim.entry)(
        (prim.grid,), (prim.block,), parameters, shared_mem=module.binary.smem_bytes
    )
    prim.check({name: array.get() for name, array in arrays.items()})
