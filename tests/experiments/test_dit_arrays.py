"""No array of the host meets one of the device: the transformer on arrays that refuse to mix.

CuPy's arrays raise where a NumPy array stands beside one. These do so too, without a device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.dit import checkpoint, features, metrics, quality, train
from experiments.dit.attention import Kernels
from experiments.dit.checkpoint import State
from experiments.dit.model import Model, initial
from experiments.dit.sampler import sample_all
from experiments.dit.train import QUICK, Settings, Trainer


class OnDevice(np.ndarray):
    """Stands in for CuPy's array: mixed with one of the host, a function of arrays raises."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.get("out", ())
        found = getattr(ufunc, method)(
            *map(unwrapped, inputs),
            **{**options, **({"out": tuple(map(unwrapped, out))} if out else {})},
        )
        return out[0] if out else wrapped(found)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(function(*deep(args), **{n: deep(x) for n, x in kwargs.items()}))

    def __setitem__(self, place: Any, value: Any) -> None:
        np.asarray(self)[place] = unwrapped(value)

    def get(self) -> np.ndarray:
        """Copy to the host."""
        return np.array(self.view(np.ndarray))


# The library knows kinds of arrays by the module of their class.
OnDevice.__module__ = "numpy"


def unwrapped(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.view(np.ndarray)
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("an array of the host meets one of the device")
    return x


def deep(x: Any) -> Any:
    return type(x)(map(deep, x)) if isinstance(x, (tuple, list)) else unwrapped(x)


def wrapped(x: Any) -> Any:
    return x.view(OnDevice) if isinstance(x, np.ndarray) else x


class HostKernels(Kernels):
    """The mirror, which takes plain arrays."""

    def forward(self, q: Any, k: Any, v: Any, *, layer: int) -> Any:
        o, saved = super().forward(*(x.get() for x in (q, k, v)), layer=layer)
        return wrapped(o), saved

    def backward(self, d_o: Any, saved: Any) -> Any:
        return tuple(map(wrapped, super().backward(d_o.get(), saved)))


def made(name: str) -> Any:
    return lambda *args, **kwargs: wrapped(getattr(np, name)(*args, **kwargs))


#: Stands in for CuPy: what makes arrays makes those; the rest comes from them.
XP = SimpleNamespace(
    **{
        n: made(n)
        for n in ("empty", "zeros", "full", "arange", "empty_like", "zeros_like", "ones_like")
    },
    asarray=lambda x: wrapped(np.array(x)),
    **{n: getattr(np, n) for n in ("concatenate", "cos", "sin", "sqrt", "mean", "linalg")},
)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that ask for the library of an array get the stand-in."""
    for module in ("layers", "optim", "features", "quality"):
        monkeypatch.setattr(f"experiments.dit.{module}.array_namespace", namespace)
    monkeypatch.setattr("experiments.dit.layers.product", lambda a, b: wrapped(
        (unwrapped(a).astype("f4") @ unwrapped(b).astype("f4")).astype(a.dtype)))  # fmt: skip


def namespace(*arrays: Any) -> Any:
    assert all(isinstance(x, OnDevice) for x in arrays), "an array of the host"
    return SimpleNamespace(**{**vars(np), **vars(XP)})


def test_the_stand_in_refuses_what_cupy_refuses() -> None:
    x, host = wrapped(np.ones(3)), np.ones(3)
    for mix in (
        lambda: x + host, lambda: host * x, lambda: np.concatenate([x, host]), lambda: x @ host,
    ):  # fmt: skip
        with pytest.raises(TypeError, match="meets one of the device"):
            mix()
    with pytest.raises(TypeError, match="meets one of the device"):
        x[...] = host
    with pytest.raises(TypeError, match="meets one of the device"):
        x += host
    assert isinstance(x + 1, OnDevice) and isinstance(x[:2].reshape(1, 2), OnDevice)
    assert type(x.get()) is np.ndarray and float((x * x).sum()) == 3


def test_a_training_step_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(QUICK, batch=2, steps=3)
    state = State.start(XP.asarray(initial(QUICK, 0).flat))
    train.train(Trainer(settings, XP, HostKernels()), state, lambda: False, lambda state: None)
    monkeypatch.undo()
    plain = State.start(initial(QUICK, 0).flat)
    train.train(Trainer(settings, np, Kernels()), plain, lambda: False, lambda state: None)
    assert all(isinstance(x, OnDevice) for x in (state.weights, state.average, state.first_moment))
    assert state.weights.get().tobytes() == plain.weights.tobytes()


def test_sampling_and_judging_stay_on_the_device() -> None:
    weights = checkpoint.untrained(QUICK, 0, XP)
    assert isinstance(weights.flat, OnDevice)
    attention = HostKernels()
    images = sample_all(Model(QUICK, XP), weights, range(3), lambda step: attention, steps=2)
    assert type(images) is np.ndarray
    network, _ = features.train(quality.QUICK_STAGES, XP, steps=3, batch=4)
    found = features.features_of(network, images)
    assert type(found) is np.ndarray and found.shape == (3, quality.QUICK_STAGES.features)
    errors: list[Any] = []
    path = [wrapped(images)]
    quality.comparing(path, errors)(0, wrapped(images * 1.5))
    assert float(errors[0]) == pytest.approx(0.5)
    assert metrics.psnr(images, images).shape == (3,)
