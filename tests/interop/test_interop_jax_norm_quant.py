"""The pass in front of a product on JAX arrays: NumPy's bits, under jit and vmap, no gradient."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.errors import UnsupportedError
from tests.quant.norm_quant_cases import ACTIVATED, CASES

jax = pytest.importorskip("jax")
jnp = jax.numpy
norm_quant = importlib.import_module("cupyattn.interop.jax").norm_quant


def same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, jax.Array) and mine.dtype == theirs.dtype
        assert np.array_equal(np.asarray(mine), theirs)


@pytest.mark.parametrize("name", [*CASES, *ACTIVATED])
def test_jax_arrays_have_the_codes_of_arrays(name: str) -> None:
    one = {**CASES, **ACTIVATED}[name]
    arrays = one.arrays()
    given = {name: jnp.asarray(x) for name, x in arrays.items()}
    same(norm_quant(**given, **one.options), ca.norm_quant(**arrays, **one.options))


def test_a_program_has_one_call() -> None:
    x, w = jnp.ones((3, 64)), jnp.arange(64.0)

    def function(x: Any, w: Any) -> Any:
        return norm_quant(2 * x, norm="layer", bias=w, rotate="hadamard")

    lowered = jax.jit(function).lower(x, w)
    assert lowered.as_text().count("cupyattn_norm_quant") == 1
    expected = ca.norm_quant(np.asarray(2 * x), norm="layer", bias=np.asarray(w), rotate="hadamard")
    same(jax.jit(function)(x, w), expected)


@pytest.mark.parametrize("mapped", ["x", "x shift", "weight", "x weight shift"])
def test_mapped_axes_are_calls_of_their_entries(mapped: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 64), "weight": (64,), "shift": (2, 64)}
    names = [n for n in shapes if n in mapped or n == "x" or "shift" in mapped or n == "weight"]
    arrays = {
        n: rng.standard_normal((3, *shapes[n]) if n in mapped.split() else shapes[n], np.float32)
        for n in names
    }

    def function(given: Any) -> Any:
        return norm_quant(norm="rms", **given)

    axes = {n: 0 if n in mapped.split() else None for n in names}
    given = {n: jnp.asarray(x) for n, x in arrays.items()}
    found = jax.vmap(function, in_axes=(axes,))(given)
    for entry in range(3):
        one = {n: x[entry] if n in mapped.split() else x for n, x in arrays.items()}
        same([y[entry] for y in found], ca.norm_quant(norm="rms", **one))


def test_what_it_refuses() -> None:
    x = jnp.ones((2, 100))
    with pytest.raises(UnsupportedError, match="takes a multiple of 64 channels, got 100"):
        norm_quant(x, rotate="hadamard")
    with pytest.raises(ValueError, match="norm must be None or 'layer' or 'rms'"):
        jax.jit(lambda x: norm_quant(x, norm="batch"))(x)
    with pytest.raises(UnsupportedError, match="the derivative of norm_quant is not implemented"):
        jax.grad(lambda x: norm_quant(x)[1].sum())(x)
    with pytest.raises(TypeError, match="x must be a JAX array, got None"):
        norm_quant(None)
    assert norm_quant(jnp.ones((0, 64)))[0].shape == (0, 64)
