"""Measured gains and losses of attention and linear layers in whole models.

The file beside this one has the figures; ``python -m experiments.tuning.whole_gains`` writes it.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.measure.timing import UNDECIDED, Estimate, judged

FILE = Path(__file__).with_suffix(".json")
#: Ways of compiling models: block by block, or all of a pass as one CUDA graph.
COMPILED = ("blocks", "graphs")
#: Largest factor between the widths of a model and of the measured model used in its place.
MOST_FACTOR = 1.5


@dataclass(frozen=True)
class WholeModel:
    """A whole model that was measured.

    Parameters
    ----------
    name : str
        Name of its family.
    cls : str
        Class in diffusers.
    width : int
        Input channels of most of its linear layers.
    tokens, prompt : int
    device : str
    capability : int
        Compute capability of the device times ten.
    channel_error, native_error, fp8_error : float
        Relative L2 error to float32 of one block of each kind: with INT8 layers by channel, native,
        and with FP8 layers by row.
    native_seconds : mapping of str to float
        Seconds of a native pass, by `COMPILED`.
    gains : mapping of str to mapping
        By `COMPILED`, as far as measured: ``"linear"``, and ``"attention"`` and ``"both"`` by
        accuracy class. Each is a speed relative to native, with the ends of its 95 % interval.
    """

    name: str
    cls: str
    width: int
    tokens: int
    prompt: int
    device: str
    capability: int
    channel_error: float
    native_error: float
    fp8_error: float
    native_seconds: Mapping[str, float]
    gains: Mapping[str, Any]

    @property
    def allows_channel(self) -> bool:
        """Whether INT8 layers by channel erred no more than FP8 layers by row."""
        return self.channel_error <= self.fp8_error

    def gain(self, part: str, accuracy: str, how: str = "blocks") -> Estimate:
        """Return how many times as fast as native a part was.

        Parameters
        ----------
        part : {"linear", "attention", "both"}
        accuracy : {"full", "balanced", "aggressive"}
            Class of the attention; INT8 layers are the same in all.
        how : {"blocks", "graphs"}
            How the model was compiled; by blocks if it was not measured as a graph.
        """
        found = self.gains.get(how, self.gains["blocks"])[part]
        return Estimate(*(found if part == "linear" else found[accuracy]))


def said(gain: Estimate) -> str:
    """Return a ratio with its interval, and "undecided" if that includes 1.

    Examples
    --------
    >>> said(Estimate(1.03, 0.98, 1.09))
    '1.03 [0.98, 1.09] times as fast, undecided'
    """
    found = f"{gain.median:.2f} [{gain.low:.2f}, {gain.high:.2f}] times as fast"
    return f"{found}, {UNDECIDED}" if judged(gain) == UNDECIDED else found


@functools.cache
def measured() -> tuple[WholeModel, ...]:
    """Return all models that were measured."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        WholeModel(
            row["model"], row["class"], row["width"], row["tokens"], row["prompt"], row["device"],
            table["capability"], row["error"]["channel"], row["error"]["native"],
            row["error"]["fp8"], row["native_seconds"], row["gains"],
        )
        for row in table["models"]
    )  # fmt: skip


def usual_width(widths: Iterable[int]) -> int:
    """Return how many channels most layers take, 0 without one.

    Examples
    --------
    >>> usual_width([8, 4, 8]), usual_width([])
    (8, 0)
    """
    counts = Counter(widths)
    return max(counts, key=lambda width: (counts[width], width), default=0)


def nearest(cls: str, width: int) -> WholeModel | None:
    """Return the measured model to use in place of another, or None if there is none.

    Parameters
    ----------
    cls : str
        Name of the model's class.
    width : int
        Input channels of most of its linear layers.

    Returns
    -------
    WholeModel or None
        A model of the same class with the nearest width, at most `MOST_FACTOR` times as large or
        small. Its gains were measured on its device.
    """
    found = [one for one in measured() if one.cls == cls]
    if not found or width < 1:
        return None
    best = min(found, key=lambda one: abs(math.log(one.width / width)))
    return best if 1 / MOST_FACTOR <= best.width / width <= MOST_FACTOR else None
