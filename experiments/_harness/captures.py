"""Q, K and V captured from models, in experiments/data: layers of a text encoder, and blocks and
steps of the diffusion transformer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.cli.inputs import SAMPLE
from experiments._harness.recording import ROOT

DATA = ROOT / "experiments" / "data"
#: File that `experiments.dit.capture` records from the diffusion transformer.
CAPTURED = DATA / "qkv_dit.npz"


def recorded(layer: int) -> tuple[Any, ...]:
    """Return Q, K and V of a layer of the text encoder, float16."""
    with np.load(DATA / SAMPLE) as file:
        return tuple(file[f"layer{layer}_{name}"] for name in "qkv")


def captured_steps(steps: int) -> tuple[int, int, int]:
    """Return the steps of a sampler that are recorded: an early one, the middle and a late one.

    Examples
    --------
    >>> captured_steps(50)
    (1, 25, 48)
    """
    return 1, steps // 2, steps - 2


def captured(layer: int, step: int) -> tuple[Any, ...]:
    """Return Q, K and V of a block and a step of the diffusion transformer, float16.

    Raises
    ------
    OSError
        Where nothing was recorded; the message says what does.
    """
    if not CAPTURED.is_file():
        raise OSError(f"there is no {CAPTURED}: python -m experiments.dit.capture makes it")
    with np.load(CAPTURED) as file:
        return tuple(file[f"layer{layer}_step{step}_{name}"] for name in "qkv")
