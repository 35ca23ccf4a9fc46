"""Linear layers with zero points on the device: codes of the mirror, results within the bound."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn as ca
from tests.quant.test_affine_linear import DTYPES, drawn

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_a_layer_holds_its_bound(dtype: str, offset: float) -> None:
    x, w, bias = drawn(0, dtype, offset)
    host = ca.AffineInt8Linear.from_weight(w, bias)
    layer = ca.AffineInt8Linear.from_weight(cupy.asarray(w), cupy.asarray(bias))
    for name in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(layer, name).get(), getattr(host, name))
    y = layer(cupy.asarray(x)).get().astype(np.float64)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    assert (np.abs(y - exact) <= host.error(x, w)).all()
