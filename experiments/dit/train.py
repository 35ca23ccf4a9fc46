"""Train a diffusion transformer on photographs, its attention cupyattn's, forwards and backwards.

    python -m experiments.dit.train [--minutes 8] [--steps N] [--batch N] [--seed N] [--folder DIR]

Stops after so many minutes and prints its progress. The same command resumes from there, to the
bit, also after a kill. At the end the averaged weights go to experiments/dit/weights.npz in
float16, and the record of the losses to experiments/results/dit_train.json. Every number follows
from the seed: crops, noise and noise levels of a step are drawn from (seed, step), sums have a
fixed order. ``--quick`` trains a tiny one on the mirror, without a device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from cupyattn.measure import device
from experiments._harness import recording
from experiments.dit import checkpoint, data
from experiments.dit.attention import Attention, Kernels
from experiments.dit.checkpoint import State
from experiments.dit.model import Model, Shape, initial, squared_error
from experiments.dit.optim import AdamW
from experiments.dit.parameters import Parameters

FOLDER = recording.ROOT / ".cache" / "dit"
WEIGHTS = Path(__file__).with_name("weights.npz")
#: Small enough for the mirror: 16 tokens.
QUICK = Shape(size=8, patch=2, width=16, depth=2, heads=2, mlp=2)
#: Seconds between two checkpoints, and steps that a figure of the record stands for.
CHECKPOINT_SECONDS, STEPS_OF_A_FIGURE = 60.0, 50
Array = Any


@dataclass(frozen=True)
class Settings:
    """Settings of a training; equal settings give equal weights.

    Parameters
    ----------
    shape : Shape
    seed, batch, steps : int
    rate : float
    """

    shape: Shape = Shape()
    seed: int = 0
    batch: int = 64
    steps: int = 4000
    rate: float = 1e-3

    def to_dict(self) -> dict[str, Any]:
        """Return them JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class Batch:
    """Noisy images and what the model should say of them, on the host."""

    x: np.ndarray
    sigma: np.ndarray
    labels: np.ndarray
    target: np.ndarray


def draw(settings: Settings, step: int) -> Batch:
    """Draw the batch of a step: it depends on the seed and the step alone.

    Notes
    -----
    Noise levels are logit-normal (Esser et al. 2024): few are near 0 or 1.
    """
    rng = np.random.default_rng([settings.seed, step])
    images, labels = data.crops(rng, settings.batch, settings.shape.size)
    noise = rng.standard_normal(images.shape, np.float32)
    sigma = 1 / (1 + np.exp(-rng.standard_normal(len(images), np.float32)))
    level = sigma[:, None, None, None]
    return Batch((1 - level) * images + level * noise, sigma, labels, noise - images)


class Trainer:
    """Takes steps.

    Parameters
    ----------
    settings : Settings
    xp : module
        NumPy or CuPy.
    attention : Attention
    """

    def __init__(self, settings: Settings, xp: Any, attention: Attention) -> None:
        self.settings, self.xp, self.attention = settings, xp, attention
        self.model = Model(settings.shape, xp)
        self.optimiser = AdamW(settings.rate, settings.steps, min(200, 1 + settings.steps // 10))
        shapes = settings.shape.parameters
        self._gradients = Parameters(shapes, xp.empty(settings.shape.count, "float32"))
        matrices = Parameters(shapes, np.zeros(settings.shape.count, np.float32))
        for view in matrices.values():
            view[...] = view.ndim > 1
        self._matrices = xp.asarray(matrices.flat)

    def loss(self, weights: Array, batch: Batch) -> tuple[Array, Array, Any]:
        """Return the loss of a batch, its gradient by the velocity, and the tape."""
        xp = self.xp
        parameters = self._gradients.like(weights)
        rounded = parameters.like(weights.astype("float16"))
        x, sigma, labels = (xp.asarray(a) for a in (batch.x, batch.sigma, batch.labels))
        velocity, tape = self.model.forward(parameters, rounded, x, sigma, labels, self.attention)
        return *squared_error(velocity, xp.asarray(batch.target)), tape

    def step(self, state: State, batch: Batch) -> None:
        """Take one step: state is changed in place.

        Raises
        ------
        FloatingPointError
            If gradients stay infinite or NaN.
        """
        gradient, scale = self._gradients.flat, state.scale.value
        with np.errstate(over="ignore", invalid="ignore"):  # infinite numbers are left out
            loss, d_velocity, tape = self.loss(state.weights, batch)
            self.model.backward(scale * d_velocity, tape, self._gradients)
            gradient /= scale
            norm = float(self.xp.sqrt((gradient * gradient).sum()))
        if state.scale.judge(norm):
            gradient *= self.optimiser.clipped(norm)
            moments = state.first_moment, state.second_moment
            self.optimiser.update(
                state.step, state.weights, gradient, moments, state.average, self._matrices
            )
        state.step += 1
        state.losses.append(float(loss))


def train(
    trainer: Trainer,
    state: State,
    stop: Callable[[], bool],
    keep: Callable[[State], None],
    advance: Callable[[str], None] = lambda done: None,
) -> bool:
    """Take steps until all are done, or it is time to stop.

    Parameters
    ----------
    trainer : Trainer
    state : State
        Changed in place.
    stop : callable
        Asked after every step.
    keep : callable
        Called with the state every `CHECKPOINT_SECONDS`, and at the end.
    advance : callable
        Told of every step.

    Returns
    -------
    bool
        Whether all steps are done.
    """
    settings, before = trainer.settings, time.monotonic()
    kept = before
    with ThreadPoolExecutor(1) as pool:  # draws the next batch while the device computes
        following = pool.submit(draw, settings, state.step)
        while state.step < settings.steps:
            batch = following.result()
            following = pool.submit(draw, settings, state.step + 1)
            trainer.step(state, batch)
            now = time.monotonic()
            state.seconds, before = state.seconds + now - before, now
            advance(f"loss {np.mean(state.losses[-STEPS_OF_A_FIGURE:]):.4f}")
            if stop():
                break
            if now - kept > CHECKPOINT_SECONDS:
                keep(state)
                kept = now
    keep(state)
    return state.step >= settings.steps


def curve(losses: Sequence[float], steps: int = STEPS_OF_A_FIGURE) -> list[float]:
    """Return the means of groups of losses, and separately of the rest at the end.

    Examples
    --------
    >>> curve([1.0, 3.0, 2.0, 2.0, 5.0], 2)
    [2.0, 2.0, 5.0]
    """
    return [float(np.mean(losses[i : i + steps])) for i in range(0, len(losses), steps)]


def array_module(*, quick: bool) -> Any:
    """Return NumPy for a run in small, else CuPy."""
    if quick:
        return np
    import cupy

    return cupy


def loaded(args: argparse.Namespace, seed: int = 0) -> tuple[Any, Shape, Parameters]:
    """Return the array module, and the stored weights of ``args.weights``, float16.

    For a small run, random weights of a tiny transformer, drawn by the seed.
    """
    xp = array_module(quick=args.quick)
    if args.quick:
        return xp, QUICK, checkpoint.untrained(QUICK, seed, xp)
    return xp, *checkpoint.load_weights(args.weights, xp)


def _until(minutes: float) -> Callable[[], bool]:
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= end


def run(args: argparse.Namespace) -> int:
    """Train as far as the time goes; write weights and record at the end."""
    if args.minutes <= 0 or args.steps < 1 or args.batch < 1:
        raise ValueError(
            f"--minutes, --steps and --batch must be positive, got {args.minutes}, {args.steps} "
            f"and {args.batch}"
        )
    xp = array_module(quick=args.quick)
    settings = Settings(seed=args.seed, batch=args.batch, steps=args.steps, rate=args.rate)
    if args.quick:
        settings = replace(settings, shape=QUICK)
    trainer = Trainer(settings, xp, Kernels())
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "training.npz"
    if path.is_file():
        state = checkpoint.load(path, settings.to_dict(), xp)
        print(f"goes on from step {state.step} of {path}", file=sys.stderr)
    else:
        state = State.start(xp.asarray(initial(settings.shape, settings.seed).flat))
    stop = _until(args.minutes)

    def keep(state: State) -> None:
        checkpoint.save(path, state, settings.to_dict())
        told = f"step {state.step} of {settings.steps}, {state.seconds:.0f} s"
        loss = np.mean(state.losses[-STEPS_OF_A_FIGURE:])
        print(f"{told}, loss {loss:.4f}, loss scale {state.scale.value:g}", file=sys.stderr)

    with output.progress("training", settings.steps - state.step) as advance:
        done = train(trainer, state, stop, keep, advance)
    if not done:
        print(f"{state.step} of {settings.steps} steps are done: the same command goes on")
        return 0
    weights = args.folder / WEIGHTS.name if args.quick else WEIGHTS
    note = {"settings": settings.to_dict(), "revision": device.environment().get("revision")}
    checkpoint.save_weights(weights, settings.shape, state.average, note)
    print(f"wrote {weights}, {weights.stat().st_size:,} bytes")
    content = {
        "settings": settings.to_dict(), "parameters": settings.shape.count,
        "seconds": state.seconds, "steps_of_a_figure": STEPS_OF_A_FIGURE,
        "losses": curve(state.losses),
    }  # fmt: skip
    recording.keep(args, "dit_train", "mirror" if args.quick else "cuda", content)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    default = Settings()
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--minutes", type=float, default=8.0, help="stops after so many")
    found.add_argument("--steps", type=int, default=default.steps, help="of the whole training")
    found.add_argument("--batch", type=int, default=default.batch, help="crops in a step")
    found.add_argument("--rate", type=float, default=default.rate, help="highest learning rate")
    found.add_argument("--seed", type=int, default=default.seed)
    found.add_argument("--folder", type=Path, default=FOLDER, help="where checkpoints go")
    found.add_argument("--json", metavar="FILE", type=Path, help="where to write the record")
    found.add_argument("--quick", action="store_true", help="a tiny one, without a device")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
