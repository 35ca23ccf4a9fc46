"""Operations on a row before it is quantised for a product."""

from __future__ import annotations

from typing import NamedTuple

#: Choices for the first step: none, or division of a row by its deviation or root mean square.
NORMS = (None, "layer", "rms")


class RowSteps(NamedTuple):
    """The steps of `cupyattn.norm_quant`, in their order, by its arguments' names."""

    norm: str | None
    activation: str
    rotate: str | None
    eps: float
    strategy: str
