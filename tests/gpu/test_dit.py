"""The diffusion transformer on a device: near its mirror, the same bits again, every mode."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from cupyattn.arrays.interchange import on_host
from experiments.dit import checkpoint, features, linear, memory, modes, quality, train
from experiments.dit.attention import Kernels
from experiments.dit.checkpoint import State
from experiments.dit.model import Model, Shape, initial
from experiments.dit.parameters import Parameters
from experiments.dit.sampler import sample_all
from experiments.dit.train import Settings, Trainer

SHAPE = Shape(size=16, patch=2, width=64, depth=2, heads=2, mlp=2)
SETTINGS = Settings(SHAPE, batch=4, steps=6)


def trained(settings: Settings = SETTINGS, state: State | None = None, until: int = 10**9) -> State:
    start = cupy.asarray(initial(settings.shape, settings.seed).flat)
    state = state or State.start(start)
    train.train(
        Trainer(settings, cupy, Kernels()), state, lambda: state.step >= until, lambda state: None
    )
    return state


def numbers(state: State) -> list[Any]:
    vectors = state.weights, state.first_moment, state.second_moment, state.average
    return [*(cupy.asnumpy(x).tobytes() for x in vectors), state.step, state.losses]


def test_both_passes_are_near_those_of_the_mirror() -> None:
    """A number on its way is rounded at most 40 times, by 2^-11 each, on either side."""
    weights = checkpoint.untrained(SHAPE, 0, np)
    batch = train.draw(SETTINGS, 0)
    found = []
    for xp in (np, cupy):
        trainer = Trainer(SETTINGS, xp, Kernels())
        flat = xp.asarray(weights.flat.astype(np.float32))
        loss, d_velocity, tape = trainer.loss(flat, batch)
        gradients = Parameters(SHAPE.parameters, xp.zeros(SHAPE.count, np.float32))
        trainer.model.backward(2.0**12 * d_velocity, tape, gradients)
        found.append((float(loss), *map(on_host, (d_velocity, gradients.flat))))
    for mirror, device in zip(*found, strict=True):
        assert np.linalg.norm(np.subtract(device, mirror)) <= 80 * 2.0**-11 * np.linalg.norm(mirror)


def test_a_training_has_the_same_bits_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, path, settings = trained(), tmp_path / "training.npz", SETTINGS.to_dict()
    assert numbers(whole) == numbers(trained())
    state = trained(until=3)
    checkpoint.save(path, state, settings)
    assert numbers(trained(state=checkpoint.load(path, settings, cupy))) == numbers(whole)


def test_training_learns() -> None:
    state = trained(replace(SETTINGS, batch=32, steps=300, rate=3e-3))
    assert np.mean(state.losses[-30:]) < 0.8 * np.mean(state.losses[:10])


def test_sampling_is_deterministic_and_every_mode_stays_itself() -> None:
    model, weights = Model(SHAPE, cupy), checkpoint.untrained(SHAPE, 0, cupy)
    calibrations = modes.calibrate(model, weights, 8, range(2))
    at = modes.attentions(model, 8, calibrations)
    images = {n: sample_all(model, weights, range(8), a, steps=8) for n, a in at.items()}
    for name, found in images.items():
        again = sample_all(model, weights, range(8), at[name], steps=8)
        assert found.tobytes() == again.tobytes() and np.isfinite(found).all(), name
        assert modes.fallbacks(at[name]) == 0, name
    off = {n: np.linalg.norm(x - images[modes.FULL]) for n, x in images.items()}
    assert 0 < off[modes.DYNAMIC] < off[modes.INT4]


def test_rows_of_quality_have_times() -> None:
    model, weights = Model(SHAPE, cupy), checkpoint.untrained(SHAPE, 0, cupy)
    sizes = features.Stages(size=16, stages=((4, 8), (2, 6)))
    network, _ = features.train(sizes, cupy, steps=10, batch=16)
    args = argparse.Namespace(quick=True, seed=0, steps=8, images=8)
    at = modes.attentions(model, 8, modes.calibrate(model, weights, 8, range(2)))
    of_modes = dict.fromkeys(at, model)
    rows, least, _ = quality.compared(of_modes, weights, network, at, args)
    assert [row["mode"] for row in rows] == list(modes.NAMES)
    for row in rows:
        assert row["seconds of an image"][0] > 0
    assert least[1] < least[2]


def test_int8_linear_layers_sample_images() -> None:
    """Near the images of 16 bits, and not the same."""
    model, weights = Model(SHAPE, cupy), checkpoint.untrained(SHAPE, 0, cupy)
    models = linear.models_of(model, weights)
    images = {
        name: sample_all(one, weights, range(8), lambda step: Kernels(), steps=8)
        for name, one in models.items()
    }
    off = {n: np.linalg.norm(x - images[modes.FULL]) for n, x in images.items()}
    size = np.linalg.norm(images[modes.FULL])
    for name, (strategy, _) in linear.MODES.items():
        assert (0 < off[name] < 0.05 * size) == (strategy is not None), name


def test_memory_is_what_is_in_use() -> None:
    with memory.counted() as found:
        x = cupy.empty(1 << 20, "uint8")
        del x
        y = cupy.empty(1 << 19, "uint8")
    assert found == [y.nbytes, 1 << 20]
    model, weights = Model(SHAPE, cupy), checkpoint.untrained(SHAPE, 0, cupy)
    peaks = [memory.peak_bytes(model, weights, n, lambda step: Kernels(), 4) for n in (1, 2, 2)]
    assert None not in peaks and peaks[0] < peaks[1] == peaks[2]
