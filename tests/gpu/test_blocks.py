"""Block-wise INT8 of CuPy arrays: the codes, scales and weights of NumPy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.quant import weight_error
from tests.gpu.support import Captured, on_device
from tests.quant.quant_inputs import DTYPES, operand

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", ["wide", "subnormal", "huge"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((1024, 3072), 128), ((300, 257), 128), ((129, 1022), 128), ((33, 5, 3, 3), 45), ((3, 5), 1)],
)
def test_weights_are_quantised_as_numpy_does(
    dtype: np.dtype, regime: str, shape: tuple[int, ...], block: int
) -> None:
    """The kernels: any width of access, any edge, numbers that CuPy's functions would flush."""
    flat = shape[0], int(np.prod(shape[1:]))
    w = operand(2, dtype, (1, 1, *flat), regime)[0, 0].reshape(shape)
    expected = ca.weight_quant(w, block)
    (x,) = on_device(w)
    found = ca.weight_quant(x, block)
    for _ in range(2):  # the second call is one that came again
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.shape == theirs.shape and mine.get().tobytes() == theirs.tobytes()
        found = ca.weight_quant(x, block)
    assert x.get().tobytes() == w.tobytes()
    for out in STORAGE:
        back = ca.weight_dequant(*found, block, out)
        assert back.get().tobytes() == ca.weight_dequant(*expected, block, out).tobytes()


def test_strided_weights_on_a_device() -> None:
    w = operand(3, DTYPES[1], (1, 1, 300, 301))[0, 0]
    (x,) = on_device(w)
    for view in (np.s_[:, :256], np.s_[:, 1:], np.s_[::-3], np.s_[:, ::2]):
        for mine, theirs in ((x[view], w[view]), (x[view].T, w[view].T)):
            found, expected = ca.weight_quant(mine), ca.weight_quant(theirs)
            assert [a.get().tobytes() for a in found] == [a.tobytes() for a in expected]
    codes, scales = ca.weight_quant(w)
    wide = cupy.zeros((600, 304), np.int8)
    wide[::2, 3:] = cupy.asarray(codes)
    apart = cupy.repeat(cupy.asarray(scales), 2, axis=0)[::2]
    back = ca.weight_dequant(wide[::2, 3:], apart)
    assert back.get().tobytes() == ca.weight_dequant(codes, scales).tobytes()


def test_larger_blocks_are_cupys() -> None:
    w = operand(4, DTYPES[2], (1, 1, 300, 301))[0, 0]
    found, expected = ca.weight_quant(on_device(w)[0], 200), ca.weight_quant(w, 200)
    assert [a.get().tobytes() for a in found] == [a.tobytes() for a in expected]


def test_weights_on_a_stream_that_is_captured() -> None:
    w = operand(5, DTYPES[0], (1, 1, 256, 384))[0, 0]
    (x,) = on_device(w)
    back = Captured(lambda: ca.weight_dequant(*ca.weight_quant(x))).replay()
    assert back.get().tobytes() == ca.weight_dequant(*ca.weight_quant(w)).tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_on_a_device(value: float) -> None:
    w = operand(1, DTYPES[2], (1, 1, 40, 40))[0, 0]
    w[17, 3] = value
    codes, scales = ca.weight_quant(w, 16)
    found_codes, found_scales = ca.weight_quant(on_device(w)[0], 16)
    assert found_codes.get().tobytes() == codes.tobytes()
    np.testing.assert_array_equal(found_scales.get(), scales)
