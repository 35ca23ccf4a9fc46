"""Prediction of a diffusion transformer's gain, from its shapes and stored rates.

A pass has three parts. Linear layers take time by their operations. Attention takes time by
operations, head_dim and number of keys, the rest by elements that layers read and write. INT8
layers and our attention save a time for each operation. In a model our attention also saves copies
of Q, K, V and O. Rates of attention were measured in single calls. The others were fitted to whole
models; ``python -m experiments.tuning.advice_rates`` writes them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.diffusion.work import Work

FILE = Path(__file__).with_name("advice_rates.json")
#: Gains below this are indistinguishable from the error of a prediction.
LEAST_GAIN = 1.02
#: Sizes of the models that rates were fitted to, with some room: beyond them nothing is advised.
LEAST_WIDTH, LEAST_TOKENS = 1024, 2048
#: Passes below this many seconds may wait for the host unless they are CUDA graphs.
HOST_SECONDS = 0.1


@dataclass(frozen=True)
class Rates:
    """Seconds per 10^12 operations, and per 10^9 elements that layers read and write.

    Parameters
    ----------
    device : str
    linear, saved_linear : float
        Linear layers in 16 bits, and the share of it that INT8 saves.
    attention : mapping of str to float
        Torch's attention, by kind.
    saved_attention : mapping of str to mapping
        Savings of our attention, by accuracy class and kind.
    saved_copies : mapping of str to float
        Savings for each element of Q, K, V and O, by accuracy class.
    traffic : float
    """

    device: str
    linear: float
    saved_linear: float
    attention: Mapping[str, float]
    saved_attention: Mapping[str, Mapping[str, float]]
    saved_copies: Mapping[str, float]
    traffic: float


@dataclass(frozen=True)
class Advice:
    """Predicted time of a pass, and savings of each part.

    Parameters
    ----------
    seconds : float
        Time of a compiled native pass.
    saved : mapping of str to float
        Seconds, by part: ``"linear"``, and ``"attention"`` of the accuracy class.
    refusal : str
        Reason why nothing is advised; "" if something is.
    """

    seconds: float
    saved: Mapping[str, float]
    refusal: str = ""

    def gain(self, *parts: str) -> float:
        """Return how many times as fast a pass is with these parts replaced, all if none is named.

        Examples
        --------
        >>> Advice(0.1, {"linear": 0.02, "attention": 0.03}).gain()
        2.0
        """
        return self.seconds / (self.seconds - sum(self.saved[p] for p in parts or self.saved))

    def replaces(self, *parts: str) -> bool:
        """Whether these parts together are worth replacing, all if none is named."""
        return not self.refusal and self.gain(*parts) >= LEAST_GAIN


@functools.cache
def stored_rates() -> dict[str, Rates]:
    """Return all rates, by the short names of devices."""
    found = json.loads(FILE.read_text(encoding="utf-8"))["rates"]
    return {name: Rates(**row) for name, row in found.items()}


def advise(
    work: Work, tokens: int, accuracy: str = "full", device: str = "h200", *,
    rates: Mapping[str, Rates] | None = None,
) -> Advice:  # fmt: skip
    """Predict the gain of a model.

    Parameters
    ----------
    work : Work
    tokens : int
        Patches of the picture or video.
    accuracy : {"full", "balanced", "aggressive"}
    device : str
        A name of `rates`.
    rates : mapping of str to Rates, optional
        `stored_rates` when omitted.

    Returns
    -------
    Advice

    Raises
    ------
    ValueError
        For a device that was not measured.
    """
    known = stored_rates() if rates is None else rates
    if device not in known:
        raise ValueError(f"device must be {' or '.join(known)}, got {device!r}")
    of = known[device]

    def time(per: Mapping[str, float]) -> float:
        return sum(per.get(kind, 0.0) * flops for kind, flops in work.attention.items()) / 1e12

    seconds = of.linear * work.linear / 1e12 + time(of.attention) + of.traffic * work.traffic / 1e9
    saved = {
        "linear": of.saved_linear * work.linear / 1e12,
        "attention": time(of.saved_attention[accuracy])
        + of.saved_copies[accuracy] * work.copies / 1e9,
    }
    refusal = ""
    small = [f"{tokens:,} tokens are below {LEAST_TOKENS:,}"] * (tokens < LEAST_TOKENS)
    small += [f"width {work.width:,} is below {LEAST_WIDTH:,}"] * (work.width < LEAST_WIDTH)
    if small:
        refusal = (
            f"{' and '.join(small)}, the least that was measured, where the host and small kernels "
            "decide"
        )
    return Advice(seconds, saved, refusal)


def as_rows(advice: Advice) -> list[dict[str, Any]]:
    """Return a row for each part and for all of them, JSON-ready."""
    rows = [
        {"part": part, "gain": advice.gain(part), "replace": advice.replaces(part)}
        for part in advice.saved
    ]
    return [*rows, {"part": "both", "gain": advice.gain(), "replace": advice.replaces()}]
