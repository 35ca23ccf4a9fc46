"""Block-wise INT8 of CuPy arrays: the codes, scales and weights of NumPy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.quant import weight_error
from tests.gpu.support import on_device
from tests.quant_inputs import DTYPES, operand

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", ["normal", "outlier channel", "huge", "signed zeros"])
@pytest.mark.parametrize("block", [16, 128])
def test_a_device_quantises_as_numpy_does(dtype: np.dtype, regime: str, block: int) -> None:
    w = operand(0, dtype, (1, 1, 300, 200), regime)[0, 0]
    (x,) = on_device(w)
    codes, scales = ca.weight_quant(w, block)
    weight = ca.weight_dequant(codes, scales, block, dtype.name)
    found = ca.weight_quant(x, block)
    assert isinstance(found[0], cupy.ndarray)
    for mine, host in ((found[0], codes), (found[1], scales)):
        assert mine.get().tobytes() == host.tobytes()
    assert ca.weight_dequant(*found, block, dtype.name).get().tobytes() == weight.tobytes()
    for mine, host in zip(ca.act_quant(x, block), ca.act_quant(w, block), strict=True):
        assert mine.get().tobytes() == host.tobytes()
    bound = weight_error(x, found[1], block, dtype.name).get()
    np.testing.assert_allclose(bound, weight_error(w, scales, block, dtype.name), rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_on_a_device(value: float) -> None:
    w = operand(1, DTYPES[2], (1, 1, 40, 40))[0, 0]
    w[17, 3] = value
    codes, scales = ca.weight_quant(w, 16)
    found_codes, found_scales = ca.weight_quant(on_device(w)[0], 16)
    assert found_codes.get().tobytes() == codes.tobytes()
    np.testing.assert_array_equal(found_scales.get(), scales)
