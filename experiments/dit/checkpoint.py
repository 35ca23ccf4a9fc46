"""Files of a training: its state, to resume it to the bit, and weights to sample from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.files import replacing
from experiments.dit.model import Shape, initial
from experiments.dit.optim import LossScale
from experiments.dit.parameters import Parameters

Array = Any

_VECTORS = ("weights", "first_moment", "second_moment", "average")


@dataclass
class State:
    """A training between two steps.

    Parameters
    ----------
    weights, first_moment, second_moment, average : array, float32, (count,)
    step : int
        Steps done.
    seconds : float
        That they took.
    scale : LossScale
    losses : list of float
        Of every step.
    """

    weights: Array
    first_moment: Array
    second_moment: Array
    average: Array
    step: int = 0
    seconds: float = 0.0
    scale: LossScale = field(default_factory=LossScale)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, weights: Array) -> State:
        """Return the state before the first step."""
        zeros = weights * 0
        return cls(weights.copy(), zeros.copy(), zeros, weights.copy())


def save(path: Path, state: State, settings: Mapping[str, Any]) -> None:
    """Write a state, whole or not at all.

    Parameters
    ----------
    path : Path
    state : State
    settings : mapping
        JSON-ready: what the training depends on.
    """
    facts = {
        "settings": dict(settings), "step": state.step, "seconds": state.seconds,
        "scale": asdict(state.scale), "losses": state.losses,
    }  # fmt: skip
    vectors = {name: on_host(getattr(state, name)) for name in _VECTORS}
    with replacing(path) as file:
        np.savez(file, **vectors, facts=np.array(json.dumps(facts)))


def load(path: Path, settings: Mapping[str, Any], xp: Any) -> State:
    """Read a state.

    Parameters
    ----------
    path : Path
    settings : mapping
        As `save` was given.
    xp : module
        NumPy or CuPy.

    Raises
    ------
    ValueError
        If it is of other settings.
    OSError
        If it cannot be read.
    """
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        vectors = {name: xp.asarray(file[name]) for name in _VECTORS}
    if facts["settings"] != dict(settings):
        differ = {n for n, x in settings.items() if facts["settings"].get(n) != x}
        was = ", ".join(f"{n}={facts['settings'].get(n)!r}" for n in sorted(differ))
        raise ValueError(
            f"{path} is of a training with {was}: give the same options, or another --folder"
        )
    scale = LossScale(**facts["scale"])
    return State(**vectors, scale=scale, **{n: facts[n] for n in ("step", "seconds", "losses")})


# ---- weights -------------------------------------------------------------------------------------


def save_weights(path: Path, shape: Shape, flat: Array, note: Mapping[str, Any]) -> None:
    """Write weights as float16, the upper and the lower bytes apart, which compresses better.

    Parameters
    ----------
    path : Path
    shape : Shape
    flat : array, (shape.count,)
    note : mapping
        JSON-ready: where they are from.
    """
    halves = on_host(flat).astype("<f2").view(np.uint8).reshape(-1, 2).T
    facts = {"shape": asdict(shape), **note}
    with replacing(path) as file:
        np.savez_compressed(file, halves=halves, facts=np.array(json.dumps(facts)))


def load_weights(path: Path, xp: Any) -> tuple[Shape, Parameters]:
    """Read weights.

    Returns
    -------
    shape : Shape
    weights : Parameters
        float16, on the device where `xp` is CuPy.

    Raises
    ------
    OSError
        If there are none; the message says what makes them.
    """
    if not path.is_file():
        raise OSError(f"there are no weights at {path}: python -m experiments.dit.train makes them")
    with np.load(path) as file:
        shape = Shape(**json.loads(str(file["facts"]))["shape"])
        flat = np.ascontiguousarray(file["halves"].T).view("<f2").reshape(-1)
    return shape, Parameters(shape.parameters, xp.asarray(flat))


def untrained(shape: Shape, seed: int, xp: Any) -> Parameters:
    """Return float16 weights that no data has seen, no gate shut: for runs in small."""
    rng = np.random.default_rng(seed)
    found = initial(shape, seed)
    found.flat += 0.1 * rng.standard_normal(found.flat.size).astype(np.float32)
    return found.like(xp.asarray(found.flat.astype(np.float16)))
