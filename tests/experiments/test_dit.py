"""The diffusion transformer, tiny and on the mirror: trained, killed, resumed, sampled, judged."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments._harness import captures
from experiments.accuracy import precision_ablation
from experiments.diffusion import timestep_ablation
from experiments.dit import (
    capture,
    checkpoint,
    features,
    fine_tune,
    memory,
    metrics,
    modes,
    pictures,
    quality,
    report,
    train,
)
from experiments.dit.attention import Kernels
from experiments.dit.checkpoint import State
from experiments.dit.model import Model, Shape, initial
from experiments.dit.optim import AdamW, LossScale
from experiments.dit.sample import main as sample_main
from experiments.dit.sampler import levels, sample, sample_all
from experiments.dit.train import QUICK, Settings, Trainer
from tests.experiments.test_dit_layers import differences

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(QUICK, batch=4, steps=6)


def start(settings: Settings = SETTINGS) -> State:
    return State.start(initial(settings.shape, settings.seed).flat)


def trained(settings: Settings = SETTINGS, state: State | None = None, until: int = 10**9) -> State:
    state = state or start(settings)
    train.train(
        Trainer(settings, np, Kernels()), state, lambda: state.step >= until, lambda state: None
    )
    return state


def equal(a: State, b: State) -> bool:
    vectors = ("weights", "first_moment", "second_moment", "average")
    same = all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in vectors)
    return same and (a.step, a.scale, a.losses) == (b.step, b.scale, b.losses)


# ---- training ------------------------------------------------------------------------------------


def test_a_step_lowers_the_loss_of_its_batch() -> None:
    """The first step moves the output off zero; a few more go on."""
    settings = replace(SETTINGS, batch=8, steps=1000, rate=3e-3)
    trainer, state, batch = Trainer(settings, np, Kernels()), start(), train.draw(settings, 0)
    before = trainer.loss(state.weights, batch)[0]
    losses = []
    for _ in range(12):
        trainer.step(state, batch)
        losses.append(trainer.loss(state.weights, batch)[0])
    assert losses[0] < before and losses[-1] < losses[0]
    assert state.losses[0] == before and state.step == 12


@pytest.mark.slow
def test_training_learns() -> None:
    state = trained(replace(SETTINGS, batch=32, steps=400, rate=3e-3))
    assert np.mean(state.losses[-40:]) < 0.7 * np.mean(state.losses[:10])


def test_the_same_seed_gives_the_same_bits_and_another_others() -> None:
    state = trained()
    assert equal(state, trained())
    assert not equal(state, trained(replace(SETTINGS, seed=1)))
    assert len(state.losses) == state.step == 6


def test_a_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Stopped after every step, written, read, continued."""
    path, settings = tmp_path / "training.npz", SETTINGS.to_dict()
    whole, state = trained(), start()
    for until in (1, 4, 6):
        state = trained(state=state, until=until)
        checkpoint.save(path, state, settings)
        state = checkpoint.load(path, settings, np)
    assert equal(whole, state)
    with pytest.raises(ValueError, match="of a training with seed=0: give the same options"):
        checkpoint.load(path, replace(SETTINGS, seed=2).to_dict(), np)


def test_a_training_that_was_killed_goes_on(tmp_path: Path) -> None:
    """A process is killed between checkpoints; the lost work is repeated with equal results."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    path, end = tmp_path / "training.npz", time.monotonic() + 60
    while not path.is_file() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was at work"
    state = checkpoint.load(path, SETTINGS_OF_KILLED.to_dict(), np)
    assert 0 < state.step < SETTINGS_OF_KILLED.steps
    assert equal(trained(SETTINGS_OF_KILLED, state), trained(SETTINGS_OF_KILLED))


#: Steps enough that it cannot end before it is killed; the tests then do as many in-process.
SETTINGS_OF_KILLED = Settings(QUICK, batch=2, steps=40)
#: Writes after every step, and waits, so that it is killed at work.
KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from experiments.dit import checkpoint, train
from experiments.dit.attention import Kernels
from experiments.dit.model import initial
from tests.experiments.test_dit import SETTINGS_OF_KILLED as settings

train.CHECKPOINT_SECONDS = 0.0
state = checkpoint.State.start(initial(settings.shape, settings.seed).flat)
path = Path(sys.argv[1]) / "training.npz"

def keep(state):
    checkpoint.save(path, state, settings.to_dict())
    time.sleep(0.2)

train.train(train.Trainer(settings, np, Kernels()), state, lambda: False, keep)
"""


def test_infinite_gradients_are_left_out_and_the_loss_scaled_less() -> None:
    state = start()
    state.scale = LossScale(2.0**60)
    before = state.weights.copy()
    Trainer(SETTINGS, np, Kernels()).step(state, train.draw(SETTINGS, 0))
    assert state.scale == LossScale(2.0**59) and (state.weights == before).all()
    assert state.step == 1 and math.isfinite(state.losses[0])
    scale = LossScale(8.0, LossScale.PATIENCE - 1)
    assert scale.judge(1.0) and scale == LossScale(16.0, 0)
    with pytest.raises(FloatingPointError, match="whatever the loss is multiplied by"):
        for _ in range(100):
            scale.judge(math.nan)


def test_the_optimiser_is_adamw() -> None:
    """Against its definition (Loshchilov and Hutter 2019, algorithm 2), number by number."""
    rng = np.random.default_rng(0)
    optimiser = AdamW(rate=0.1, steps=5, warmup=1, decay=0.2, average=0.5)
    weights, matrices = rng.standard_normal(4), np.array([1.0, 0.0, 1.0, 0.0])
    mine, average = weights.copy(), weights.copy()
    moments = np.zeros(4), np.zeros(4)
    m, v = np.zeros(4), np.zeros(4)
    mean = weights.copy()
    for t in range(1, 5):
        g = rng.standard_normal(4)
        optimiser.update(t - 1, mine, g, moments, average, matrices)
        rate = optimiser.rate_at(t - 1)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        weights = weights - rate * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        weights = weights - rate * 0.2 * matrices * weights
        keep = min(0.5, t / (9 + t))
        mean = keep * mean + (1 - keep) * weights
        np.testing.assert_allclose(mine, weights, rtol=1e-12)
        np.testing.assert_allclose(average, mean, rtol=1e-12)
    assert optimiser.clipped(4.0) == pytest.approx(0.25) and optimiser.clipped(0.1) == 1


def test_the_command_trains_resumes_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dit_train.json"
    given = ["--quick", "--batch", "4", "--steps", "30", "--folder", str(tmp_path)]
    given += ["--json", str(file)]
    assert train.main([*given, "--minutes", "1e-9"]) == 0
    assert "1 of 30 steps are done: the same command goes on" in capsys.readouterr().out
    assert train.main(given) == 0
    assert "goes on from step 1" in capsys.readouterr().err
    record = json.loads(file.read_text())
    assert record["parameters"] == QUICK.count and len(record["losses"]) == 1
    shape, weights = checkpoint.load_weights(tmp_path / "weights.npz", np)
    state = checkpoint.load(tmp_path / "training.npz", record["settings"], np)
    assert shape == QUICK and (weights.flat == state.average.astype(np.float16)).all()
    assert train.main([*given, "--seed", "3"]) == 2
    assert "another --folder" in capsys.readouterr().err
    assert train.main([*given, "--steps", "0"]) == 2
    drawing = tmp_path / "samples.png"
    small = ["--quick", "--images", "9", "--steps", "4", "--plot", str(drawing)]
    found = []
    for mode in (modes.FULL, modes.BY_STEP):
        assert sample_main([*small, "--mode", mode]) == 0
        found.append(drawing.read_bytes())
        assert found[-1].startswith(b"\x89PNG")
    assert sample_main([*small, "--images", "0"]) == 2
    with pytest.raises(OSError, match="experiments.dit.train makes them"):
        checkpoint.load_weights(tmp_path / "none.npz", np)


def test_the_model_is_of_the_size_that_was_asked_for() -> None:
    shape = Shape()
    assert 5e6 < shape.count < 8e6 and shape.tokens >= 1024
    assert 2 * shape.count < 16e6, "bytes in float16"


# ---- sampling ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> tuple[Model, Any]:
    return Model(QUICK, np), checkpoint.untrained(QUICK, 0, np)


def test_sampling_is_deterministic_and_an_image_is_that_of_its_seed(
    network: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = network
    attention = Kernels()
    whole = sample_all(model, weights, range(5), lambda step: attention, steps=3)
    again = sample_all(model, weights, range(5), lambda step: attention, steps=3)
    assert whole.tobytes() == again.tobytes() and whole.dtype == np.float32
    monkeypatch.setattr("experiments.dit.sampler.BATCH", 2)
    parts = sample_all(model, weights, range(5), lambda step: attention, steps=3)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-3 * abs(whole).max())
    assert levels(3).tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_a_perfect_velocity_leads_to_the_image(network: tuple[Model, Any]) -> None:
    """Euler's steps are exact along a straight line."""
    model, weights = network
    image = np.random.default_rng(1).uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)

    class Straight:
        xp, shape, wide = model.xp, model.shape, model.wide

        def forward(self, p: Any, r: Any, x: Any, sigma: Any, *_: Any, **__: Any) -> Any:
            return (x - image) / sigma[:, None, None, None], None

    found = sample(Straight(), weights, [3], lambda step: Kernels(), steps=7)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, image, atol=1e-5)


def test_every_mode_runs_its_arithmetic(network: tuple[Model, Any]) -> None:
    model, weights = network
    steps = 50
    calibrations = modes.calibrate(model, weights, 8, range(2))
    assert len(calibrations) == QUICK.depth and calibrations[0].bins.count == 4
    at = modes.attentions(model, 8, calibrations)
    assert tuple(at) == modes.NAMES
    layers = {name: at[name](0).layers for name in modes.INT8}
    of_step = {
        name: {one.mode(step) for one in layers[name] for step in range(8)} for name in layers
    }
    for name in (modes.UNIFORM, modes.BY_STEP, modes.DYNAMIC, modes.INT4):
        assert of_step[name] == {"balanced"}
    assert of_step[modes.AGGRESSIVE] == {"aggressive"}
    for name in (modes.UNIFORM, modes.BY_STEP, modes.LATE):
        assert all(one.calibration is not None for one in layers[name])
    assert not layers[modes.UNIFORM][0].use_adaptive_scaling
    assert layers[modes.INT4][0].quant.qk_bits == 4
    late = modes.layers_of(modes.LATE, model, steps, calibrations)[0]
    found = [late.mode(step) for step in range(steps)]
    assert found == ["balanced"] * 46 + ["precision"] * 4


# ---- what images are held to ---------------------------------------------------------------------


def test_similarity_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(2, 16, 16, 3))
    assert metrics.psnr(x, x).tolist() == [math.inf] * 2
    np.testing.assert_allclose(metrics.ssim(x, x), 1, rtol=1e-12)
    # A constant off: the variances agree, the luminance term is left.
    flat, off = np.full((1, 16, 16, 3), 0.5), 0.1
    expected = (2 * 0.5 * 0.6 + 1e-4) / (0.25 + 0.36 + 1e-4)
    assert metrics.ssim(flat, flat + off)[0] == pytest.approx(expected)
    noise = rng.standard_normal(x.shape)
    near, far = (metrics.ssim(x, x + s * noise).mean() for s in (0.01, 0.3))
    assert 1 > near > 0.99 and far < 0.9


def test_the_distance_of_distributions_is_that_of_normal_ones() -> None:
    """For N(0, A) and N(0, B) with A B = B A, it is the sum of (sqrt a - sqrt b)^2."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5000, 3))
    x = (x - x.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    a, b = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 1.0])
    of_x, of_a, of_b = (metrics.Moments.of(y) for y in (x, x * a, x * b + 1))
    assert metrics.frechet(of_a, of_b) == pytest.approx(((a - b) ** 2).sum() + 3)
    assert metrics.frechet(of_x, of_x) == pytest.approx(0, abs=1e-9)


def test_distances_to_real_images_do_not_depend_on_the_units_of_features() -> None:
    rng = np.random.default_rng(0)
    real, x = rng.standard_normal((2, 400, 4)) + [[[0.0]], [[0.5]]]
    real[:, 3] = x[:, 3] = 7.0  # says nothing
    every, units = [np.arange(400), np.arange(200)], np.array([1.0, 10.0, 0.01, 3.0])
    found = metrics.ToReal(real)(x, every)
    assert found == pytest.approx(metrics.ToReal(real * units)(x * units, every))
    assert found.shape == (2,) and 0.5 < found[0] < 1.2 and found[0] != found[1]


def test_intervals_cover() -> None:
    """With a hundred samples of known mean, 95 % of intervals contain it; 5 sigma below is 84 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        _, low, high = metrics.mean_interval(rng.standard_normal(60))
        hits += low <= 0 <= high
    assert hits >= 84


def test_the_network_of_features_has_the_gradients_of_central_differences() -> None:
    sizes = features.Stages(size=8, stages=((4, 5), (2, 3)), classes=3)
    rng = np.random.default_rng(0)
    count = sum(math.prod(shape) for shape in sizes.parameters.values())
    weights = features.Parameters(sizes.parameters, rng.standard_normal(count))
    images, labels = rng.standard_normal((2, 8, 8, 3)), np.array([2, 0])
    net = features.FeatureNet(sizes, weights)

    def loss() -> float:
        return features.cross_entropy(net.forward(images)[0], labels)[0]

    logits, _, tape = net.forward(images)
    gradients = weights.like(np.full(count, np.nan))
    net.backward(features.cross_entropy(logits, labels)[1], tape, gradients)
    expected = differences(loss, weights.flat, range(count))
    np.testing.assert_allclose(gradients.flat, expected, rtol=1e-5, atol=1e-8)


def test_the_network_of_features_learns_to_tell_photographs_apart() -> None:
    net, right = features.train(quality.QUICK_STAGES, np, steps=150, batch=32)
    assert right > 0.3, "chance is one in eight"
    again, _ = features.train(quality.QUICK_STAGES, np, steps=150, batch=32)
    assert net.weights.flat.tobytes() == again.weights.flat.tobytes()


# ---- the experiments -----------------------------------------------------------------------------


def test_quality_and_fine_tuning_run_in_small_and_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, page, grid and curves of a tiny one; the page's numbers are the records'."""
    pytest.importorskip("matplotlib")
    files = {n: tmp_path / f"dit_{n}.json" for n in ("train", "quality", "fine_tune")}
    grid = tmp_path / report.GRID.name
    monkeypatch.setattr(quality, "DISTANCE_RESAMPLES", 20)
    given = ["--quick", "--images", "12", "--steps", "4", "--grid", str(grid)]
    assert quality.main([*given, "--json", str(files["quality"])]) == 0
    tune = ["--quick", "--steps", "2", "--batch", "2", "--json", str(files["fine_tune"])]
    assert fine_tune.main(tune) == 0
    assert (
        memory.main(["--quick", "--images", "1", "--json", str(tmp_path / "dit_memory.json")]) == 0
    )
    short = ["--quick", "--steps", "2", "--batch", "2", "--folder", str(tmp_path)]
    assert train.main([*short, "--json", str(files["train"])]) == 0
    record = json.loads(files["quality"].read_text())
    rows = {row["mode"]: row for row in record["rows"]}
    assert tuple(rows) == tuple(n for n in modes.NAMES) and record["images"] == 12
    assert record["frechet of real crops"][0] > 0
    psnr = {n: row[f"psnr to {modes.FULL}"][0] for n, row in rows.items() if n != modes.FULL}
    assert psnr[modes.INT4] < psnr[modes.DYNAMIC] < psnr[modes.REFERENCE]
    for name, row in rows.items():
        assert row["fallbacks"] == 0 and row["seconds of an image"] is None
        assert len(row["latent error"]) == (0 if name == modes.FULL else 4)
        assert row["frechet"][1] <= row["frechet"][2]
    assert grid.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert report.write(tmp_path, tmp_path) == 0
    page = (tmp_path / "QUALITY.md").read_text()
    for name in modes.INT8:
        figure = report.with_interval(rows[name][f"psnr to {modes.REFERENCE}"], 2)
        assert f"| {name} | {figure} |" in page
    assert "It is not the FID" in page and "LPIPS" in page and page.count("hold") > 4
    tuned = json.loads(files["fine_tune"].read_text())
    assert len(report.claims(record, tuned, None)) == 1 + len(report.claims(record, None, None))
    assert (tmp_path / report.CURVES.name).read_text().startswith("<?xml")
    with pytest.raises(OSError, match="experiments.dit.train makes it"):
        report.write(tmp_path / "nowhere", tmp_path)


def test_the_page_is_what_the_records_say() -> None:
    if not report.PAGE.is_file():
        pytest.skip("nothing was trained on a device yet")
    trained, record = report.stored("train"), report.stored("quality")
    others = map(report.optional, ("fine_tune", "memory", "linear"))
    found = report.page(trained, record, *others)
    told = "run python -m experiments.dit.quality --stored"
    assert report.PAGE.read_text(encoding="utf-8") == found, told


def test_claims_are_judged_by_their_intervals() -> None:
    """Made-up records give each verdict once."""
    rng = np.random.default_rng(0)
    base = 40 + rng.standard_normal(50)
    by = {
        modes.FULL: 8.0,
        modes.UNIFORM: 0.0,
        modes.BY_STEP: 2.0,
        modes.LATE: 2.0,
        modes.INT4: -6.0,
    }
    rows = [
        {
            "mode": name, f"psnrs to {modes.REFERENCE}": list(base + off),
            f"psnr to {modes.REFERENCE}": [float(np.mean(base + off)), 0, 0],
            "frechet over 16-bit": [0.1, 0.05, 0.2], "seconds of an image": [1.0 + off, 0, 0],
        }
        for name, off in by.items()
    ]  # fmt: skip
    memory = {"peak_bytes": {modes.FULL: 100, modes.BY_STEP: 80}}
    found = {text: verdict for text, _, verdict in report.claims({"rows": rows}, None, memory)}
    expected = ["holds", "does not hold", "holds", "holds", "does not hold"]
    assert list(found.values())[:5] == expected
    assert found["INT8 is 1.7 times as fast"] == "holds"
    assert found["INT8 takes 35 % less memory"] == "does not hold"


def test_what_is_captured_is_what_attention_gets(
    tmp_path: Path, network: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "qkv_dit.npz"
    assert capture.main(["--quick", "--output", str(file)]) == 0
    monkeypatch.setattr(captures, "CAPTURED", file)
    for layer in capture.blocks_of(QUICK.depth):
        for step in captures.captured_steps(50):
            q, k, v = captures.captured(layer, step)
            assert q.shape == k.shape == v.shape == (1, 2, QUICK.tokens, QUICK.head_dim)
            assert q.dtype == np.float16
            square = (q.astype(np.float64) ** 2).mean(axis=-1)
            assert square.min() > 0.5 and square.max() < 2, "normalised"
    monkeypatch.setattr(captures, "CAPTURED", tmp_path / "none.npz")
    with pytest.raises(OSError, match="experiments.dit.capture makes it"):
        captures.captured(0, 1)


def test_what_was_captured_is_the_input_of_ablations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of the shapes that are committed; q grows as noise goes, which bins follow."""
    rng = np.random.default_rng(0)
    arrays = {
        f"layer{layer}_step{step}_{name}": (
            (1 + 7 * step / 50) * rng.standard_normal((1, 2, 1024, 64))
        ).astype(np.float16)
        for layer in (1, 4)
        for step in captures.captured_steps(50)
        for name in "qkv"
    }
    monkeypatch.setattr(captures, "CAPTURED", tmp_path / "qkv_dit.npz")
    np.savez(captures.CAPTURED, **arrays)
    name = precision_ablation.TRANSFORMER
    args = argparse.Namespace(quick=False, seed=0, distributions=[name])
    (problem,) = precision_ablation.problems(args)
    assert all(x.shape == problem.call.output_shape for x in problem.draw(on_device=False))
    steps = timestep_ablation.judged_steps(name, 7)
    found = list(timestep_ablation.rows(name, steps, (2, 128), 0))
    assert {row["timestep"] for row in found} == {1, 25, 48}
    range_ = {(row["scales"], row["timestep"]): row.get("range") for row in found}
    assert range_["uniform static", 1] < 0.3 < 0.9 < range_["static by bin", 1]
    header, cells = timestep_ablation.table(found, steps, "range", "{:.0%}")
    assert header[2:] == ["t = 1", "t = 25", "t = 48"] and len(cells) == len(timestep_ablation.ARMS)


def test_pictures_are_what_was_written(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = tmp_path / "image.png"
    pictures.write_png(file, image)
    content = file.read_bytes()
    size = int.from_bytes(content[33:37], "big")
    rows = np.frombuffer(zlib.decompress(content[41 : 41 + size]), np.uint8).reshape(5, 22)
    assert (rows[:, 0] == 2).all()
    decoded = np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).reshape(image.shape)
    np.testing.assert_array_equal(decoded, image)


