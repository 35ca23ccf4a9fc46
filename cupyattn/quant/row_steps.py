"""What happens to a row in front of a product, before it is quantised."""

from __future__ import annotations

from typing import NamedTuple

#: What may come first: nothing, or the division of a row by its deviation or root mean square.
NORMS = (None, "layer", "rms")


class RowSteps(NamedTuple):
    """The steps of `cupyattn.norm_quant`, in their order, by its arguments' names."""

    norm: str | None
    activation: str
    rotate: str | None
    eps: float
    strategy: str
