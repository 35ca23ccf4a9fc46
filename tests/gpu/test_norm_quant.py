"""The pass in front of a product on a device: the bits of NumPy, its bound, any rows, a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.quant.blocks import STRATEGIES
from tests.gpu.support import arch_of, cupy, on_device
from tests.gpu.test_gemm import FORMS
from tests.quant.gemm_cases import product
from tests.quant.norm_quant_cases import ACTIVATED, CASES, WIDE
from tests.quant.quant_inputs import same_bytes
from tests.quant.test_joint_rows import CASES as ROW_CASES
from tests.quant.test_joint_rows import rows
from tests.quant.test_norm_quant import REGIMES, fractions


def device_arrays(arrays: dict) -> dict:
    return dict(zip(arrays, on_device(*arrays.values()), strict=True))


@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_device_makes_the_bits_of_numpy(name: str, regime: str) -> None:
    one = {**CASES, **WIDE}[name]
    arrays = one.arrays(seed=4, regime=regime)
    expected = ca.norm_quant(**arrays, **one.options)
    given = device_arrays(arrays)
    for _ in range(2):  # the second call is one that came again
        found = ca.norm_quant(**given, **one.options)
        for mine, theirs in zip(found, expected, strict=True):
            assert isinstance(mine, cupy.ndarray) and mine.shape == theirs.shape
            assert mine.get().tobytes() == theirs.tobytes()
    assert all(given[name].get().tobytes() == x.tobytes() for name, x in arrays.items())


@pytest.mark.parametrize(
    "name",
    [
        "layer, modulated", "rotated by 256", "rotated by 64", "blocks",
        "rotated, factors of a block", "rotated, one warp of three sets",
        "rotated, one warp of five sets", "layer, four warps", "layer, modulated by token",
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 1584, 3171, 4099, 9000])
def test_any_number_of_rows(name: str, rows: int) -> None:
    """One for each team, several, and teams that run past the last row.

    Several rows of lanes with many channels wait in shared memory.
    """
    groups = 3 if rows % 3 == 0 else 1
    one = dataclasses.replace(CASES[name], shape=(rows, CASES[name].shape[-1]), groups=groups)
    arrays = one.arrays(seed=5)
    found = ca.norm_quant(**device_arrays(arrays), **one.options)
    for mine, theirs in zip(found, ca.norm_quant(**arrays, **one.options), strict=True):
        assert mine.get().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", ACTIVATED)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_device_holds_the_bound_behind_an_activation(name: str, regime: str) -> None:
    one = ACTIVATED[name]
    arrays = one.arrays(seed=6, regime=regime)
    found = [x.get() for x in ca.norm_quant(**device_arrays(arrays), **one.options)]
    assert fractions(one, arrays, found).max() <= 1
    differ = found[0].astype(int) - ca.norm_quant(**arrays, **one.options)[0]
    assert np.abs(differ).max() <= 1


def test_rotated_codes_multiply_as_the_rows_do() -> None:
    """A product of rotated rows and a rotated weight errs by a fifth of that without."""
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((256, 3072)), rng.standard_normal((384, 3072))
    x[:, rng.choice(3072, 15, replace=False)] *= 30
    exact, errors = x @ w.T, []
    for rotate in (None, "hadamard"):
        weight = ca.quant.rotated(w) if rotate else w
        layer = ca.Int8Linear.from_weight(
            cupy.asarray(weight.astype(np.float32)), strategy="channel"
        )
        codes, scales = ca.norm_quant(cupy.asarray(x.astype(np.float32)), rotate=rotate)
        found = ca.int8_gemm(codes, scales, layer.codes, layer.scales, "float32").get()
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert errors[1] <= 0.0135 and errors[1] < errors[0] / 4


def in_two(whole: np.ndarray, split: int) -> list[tuple[Any, Any]]:
    """Return slices of one array on a device, and two arrays."""
    (moved,) = on_device(whole)
    slices = moved[:, :split], moved[:, split:]
    return [slices, (slices[0].copy(), slices[1].copy())]


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows_of_two_tensors_are_their_concatenation(name: str) -> None:
    """Codes, and the product that is added to such rows; a first and a repeated call."""
    channels, dtype, steps, types = ROW_CASES[name]
    if "activation" in steps:
        pytest.skip("a device approximates activations")
    for batch, count, split in ((1, 4608, 512), (2, 300, 77), (3, 133, 132), (2, 9, 0)):
        whole = rows(batch, count, channels, dtype=dtype)
        vectors = {
            n: rows(*((batch, 1, channels) if n in ("scale", "shift") else (channels,)), dtype=t)
            for n, t in types.items()
        }
        expected = ca.norm_quant(whole, **steps, **vectors)
        given = device_arrays(vectors)
        for first, below in in_two(whole, split):
            for _ in range(2):
                found = ca.norm_quant(first, below=below, **steps, **given)
                assert same_bytes(tuple(x.get() for x in found), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_added_to_rows_of_two_tensors(form: str, strategy: str) -> None:
    arch = arch_of("gemm@sm90" if form == "sm90" else "gemm")
    for batch, count, split, n in ((1, 300, 37, 256), (2, 150, 77, 192), (3, 100, 1, 40)):
        p = product(
            batch, (batch * count, n, 512), out_dtype="bfloat16", bias=True, strategy=strategy,
            gates=batch,
        )  # fmt: skip
        by_batch = [x.reshape(batch, count, -1) for x in (p.a, p.a_scales)]
        moved = p.but(**dict(zip(
            ("a", "a_scales", "b", "b_scales", "bias", "gate"),
            on_device(*by_batch, p.b, p.b_scales, p.bias, p.gate), strict=True,
        )))  # fmt: skip
        for first, below in in_two(p.residual.reshape(batch, count, n), split):
            for _ in range(2):
                c = moved.but(residual=first).run(residual_below=below, arch=arch).get()
                assert p.share_of_bound(c.reshape(batch * count, n)) <= 1
                if strategy == "channel":
                    assert c.tobytes() == p.mirror().tobytes()
