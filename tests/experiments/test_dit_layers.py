"""The diffusion transformer's layers: backward passes against central differences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn.gradients import backward_exact
from cupyattn.reference.exact import attention_exact
from experiments.dit import data, layers, model
from experiments.dit.attention import ByTimestep, Kernels
from experiments.dit.parameters import Parameters

#: Small in every way that there is.
TINY = model.Shape(size=8, patch=2, width=16, depth=2, heads=2, classes=3, mlp=2)
#: Step of the differences; their error is its square times the third derivative, about 1.
STEP = 1e-5
Array = Any


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def differences(function: Callable[[], float], x: np.ndarray, places: Any) -> np.ndarray:
    """Central differences of a function of x, changed in place, at some places."""
    found = []
    for place in places:
        kept = x[place]
        values = []
        for off in (STEP, -STEP):
            x[place] = kept + off
            values.append(function())
        x[place] = kept
        found.append((values[0] - values[1]) / (2 * STEP))
    return np.array(found)


def check(
    forward: Callable[..., Any], backward: Callable[..., Any], *arguments: np.ndarray
) -> None:
    """Compare every number of the gradient of ``sum(weights * forward(...))``."""
    y, saved = forward(*arguments)
    weights = numbers(*y.shape, seed=1)
    found = backward(weights, saved)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(arguments)
    for x, gradient in zip(arguments, found, strict=True):
        assert gradient.shape == x.shape
        expected = differences(
            lambda: float((weights * forward(*arguments)[0]).sum()), x, np.ndindex(x.shape)
        )
        np.testing.assert_allclose(gradient.reshape(-1), expected, rtol=1e-6, atol=1e-7)


LAYERS: dict[str, tuple[Any, Any, tuple[np.ndarray, ...]]] = {
    "linear": (
        layers.linear, layers.linear_backward, (numbers(2, 3, 4), numbers(4, 5), numbers(5))
    ),
    "layer_norm": (layers.layer_norm, layers.layer_norm_backward, (numbers(2, 3, 8),)),
    "rms_norm": (layers.rms_norm, layers.rms_norm_backward, (numbers(2, 3, 2, 8), numbers(8))),
    "gelu": (layers.gelu, layers.gelu_backward, (numbers(3, 5),)),
    "silu": (layers.silu, layers.silu_backward, (numbers(3, 5),)),
    "modulate": (
        layers.modulate, layers.modulate_backward, (numbers(2, 3, 4), numbers(2, 4), numbers(2, 4))
    ),
    "gated": (
        layers.gated, lambda d, saved: (d, *layers.gated_backward(d, saved)),
        (numbers(2, 3, 4), numbers(2, 4), numbers(2, 3, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_gradients_of_central_differences(name: str) -> None:
    forward, backward, arguments = LAYERS[name]
    check(forward, backward, *(x.copy() for x in arguments))


def test_rotating_back_is_the_gradient_of_rotating() -> None:
    angles = numbers(3, 4)
    cos, sin = np.cos(angles), np.sin(angles)
    check(
        lambda x: (layers.rotate(x, cos, sin), None),
        lambda d, _: layers.rotate(d, cos, -sin),
        numbers(2, 3, 2, 8),
    )


def test_patches_are_merged_and_split() -> None:
    x = numbers(2, 4, 6, 3)
    merged = layers.merge_patches(x, 2)
    assert merged.shape == (2, 2, 3, 12)
    np.testing.assert_array_equal(merged[1, 0, 2], x[1, :2, 4:].reshape(-1))
    np.testing.assert_array_equal(layers.split_patches(merged, 2), x)


def test_products_of_float16_are_summed_in_float32() -> None:
    a, b = (numbers(*s).astype(np.float16) for s in ((3, 500), (500, 2)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert layers.product(a, b).dtype == np.float16
    error = abs(layers.product(a, b) - exact)
    sums = abs(a).astype(np.float64) @ abs(b).astype(np.float64)
    assert (error <= 2.0**-11 * abs(exact) + 500 * 2.0**-23 * sums).all()


class Exact:
    """Attention and its gradients by their definitions, in float64."""

    dtype = "float64"

    def forward(self, q: Array, k: Array, v: Array, *, layer: int) -> tuple[Array, Any]:
        qkv = [x.swapaxes(1, 2) for x in (q, k, v)]
        return attention_exact(*qkv).swapaxes(1, 2), qkv

    def backward(self, d_o: Array, saved: Any) -> tuple[Array, ...]:
        return tuple(x.swapaxes(1, 2) for x in backward_exact(d_o.swapaxes(1, 2), *saved))


def test_the_model_has_the_gradients_of_central_differences() -> None:
    """Every parameter array, at a few places; weights are random, so that no gate is shut."""
    rng = np.random.default_rng(2)
    network = model.Model(TINY, np, "float64")
    flat = 0.3 * rng.standard_normal(TINY.count)
    parameters = Parameters(TINY.parameters, flat)
    x, target = rng.standard_normal((2, 2, 8, 8, 3))
    sigma, labels = np.array([0.2, 0.9]), np.array([2, 0])

    def loss() -> tuple[float, Any, Any]:
        velocity, tape = network.forward(parameters, parameters, x, sigma, labels, Exact())
        error, d_velocity = model.squared_error(velocity, target)
        return float(error), d_velocity, tape

    _, d_velocity, tape = loss()
    gradients = parameters.like(np.full(TINY.count, np.nan))
    network.backward(d_velocity, tape, gradients)
    assert np.isfinite(gradients.flat).all(), "every number is written"
    for name, view in parameters.items():
        places = [tuple(int(rng.integers(n)) for n in view.shape) for _ in range(3)]
        expected = differences(lambda: loss()[0], view, places)
        found = np.array([gradients[name][place] for place in places])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9, err_msg=name)


def test_the_kernels_gradients_are_near_those_in_float64() -> None:
    """16-bit products and attention, on the mirror.

    A number on its way through two blocks and back is rounded at most 40 times, by 2^-11 each.
    """
    rng = np.random.default_rng(2)
    flat = (0.3 * rng.standard_normal(TINY.count)).astype(np.float32)
    x, target = rng.standard_normal((2, 2, 8, 8, 3)).astype(np.float32)
    sigma, labels = np.float32([0.2, 0.9]), np.array([2, 0])
    found = []
    for wide, product, attention in (
        ("float64", "float64", Exact()), ("float32", "float16", Kernels())
    ):  # fmt: skip
        network = model.Model(TINY, np, wide)
        parameters = Parameters(TINY.parameters, flat.astype(wide))
        rounded = parameters.like(flat.astype(product))
        velocity, tape = network.forward(parameters, rounded, x, sigma, labels, attention)
        gradients = parameters.like(np.empty(TINY.count, wide))
        network.backward(1024 * model.squared_error(velocity, target)[1], tape, gradients)
        assert velocity.dtype == wide
        found.append((velocity, gradients.flat / 1024))
    for exact, near in zip(*found, strict=True):
        assert np.linalg.norm(near - exact) <= 40 * 2.0**-11 * np.linalg.norm(exact)


def test_blocks_are_the_identity_at_first() -> None:
    parameters = model.initial(TINY, 3)
    network = model.Model(TINY, np)
    x = numbers(1, 8, 8, 3).astype(np.float32)
    args = x, np.float32([0.5]), np.array([1])
    velocity, tape = network.forward(parameters, parameters, *args, Kernels(), keep=False)
    assert not velocity.any() and tape is None
    assert (model.initial(TINY, 3).flat == parameters.flat).all()
    assert (model.initial(TINY, 4).flat != parameters.flat).any()


def test_positions_tell_rows_from_columns() -> None:
    angles = model.positions(model.Shape())
    assert angles.shape == (1024, 32) and len(np.unique(angles.round(6), axis=0)) == 1024
    np.testing.assert_array_equal(angles[33], np.concatenate([angles[32, :16], angles[1, 16:]]))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="patch must divide size"):
        model.Model(model.Shape(size=9), np)
    with pytest.raises(ValueError, match="parameters of 6 numbers"):
        Parameters({"a": (2, 3)}, np.zeros(5))
    with pytest.raises(NotImplementedError, match="train with Kernels"):
        ByTimestep((), 0).backward(None, None)


def test_crops_are_of_the_photographs_and_of_their_seed() -> None:
    images, labels = data.crops(np.random.default_rng(1), 5, 16)
    again, _ = data.crops(np.random.default_rng(1), 5, 16)
    np.testing.assert_array_equal(images, again)
    assert images.shape == (5, 16, 16, 3) and abs(images).max() <= 1
    assert len(set(labels.tolist())) > 2
    for image, label in zip(data.as_pixels(images), labels, strict=True):
        whole = data.photographs()[data.NAMES[label]]
        windows = np.lib.stride_tricks.sliding_window_view(whole[..., 0], (16, 16))
        same = [(windows == x).all(axis=(2, 3)).any() for x in (image[..., 0], image[:, ::-1, 0])]
        assert any(same)


def test_the_photographs_are_those_of_the_packages() -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    found = data.from_packages()
    for name, pixels in data.photographs().items():
        np.testing.assert_array_equal(pixels, found[name])


