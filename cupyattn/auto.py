"""Which rung ``variant="auto"`` takes: the fastest of an accuracy class, as measured.

`cupyattn.measured` holds the times, written by ``python -m experiments.fastest`` from a committed
record. Where nothing was measured a rule decides, and `Choice.why` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupyattn.errors import UnsupportedError
from cupyattn.measured import MEASURED, RECORD
from cupyattn.registry import VARIANTS

#: Families of kernels by accuracy class, the one that the rule prefers first. "full": the input's
#: own 16/32-bit arithmetic; "balanced": INT8 Q.K^T and 16-bit P.V; "aggressive": 8-bit P.V too.
CLASSES = {
    "full": ("tensor_core", "float32", "unfused"),
    "balanced": ("int8",),
    "aggressive": ("int8",),
}


@dataclass(frozen=True)
class Measurement:
    """Times of the rungs on one shape.

    Parameters
    ----------
    capability : int
        Compute capability of the device times ten.
    dtype : str
    head_dim, length : int
        Of queries and keys.
    causal : bool
    microseconds : mapping of str to float
        Of every rung, in the form that it takes by itself.
    """

    capability: int
    dtype: str
    head_dim: int
    length: int
    causal: bool
    microseconds: dict[str, float]

    @property
    def name(self) -> str:
        """The shape in a few characters."""
        return f"hd{self.head_dim} {self.length}{' causal' if self.causal else ''}"


@dataclass(frozen=True)
class Choice:
    """A rung, and why it was chosen, in one clause."""

    variant: str
    why: str


def choose(
    accuracy: str,
    dtype: str,
    head_dim: int,
    len_kv: int,
    causal: bool,
    capability: int | None = None,
) -> Choice:
    """Choose the rung of a call that names none.

    Parameters
    ----------
    accuracy : {"full", "balanced", "aggressive"}
    dtype : str
        Storage type of the operands.
    head_dim, len_kv : int
    causal : bool
    capability : int, optional
        Compute capability of the device times ten; None where the call runs on none.

    Returns
    -------
    Choice
        The rung with the least time in the measurement of this capability and dtype that is next
        in head_dim, then in length. Where there is no measurement: tensor cores before FMA, fewer
        passes over memory before more, in the order of `CLASSES`, later rungs first.

    Raises
    ------
    ValueError
        For another accuracy class.
    UnsupportedError
        If no rung of the class takes the dtype.

    Examples
    --------
    >>> choose("full", "float32", 128, 4096, False).variant
    'fa_warps'
    """
    if accuracy not in CLASSES:
        raise ValueError(f"accuracy must be 'full', 'balanced' or 'aggressive', got {accuracy!r}")
    rungs = [
        name
        for family in CLASSES[accuracy]
        for name, variant in reversed(VARIANTS.items())
        if variant.family == family and variant.source is None and dtype in variant.dtypes
    ]
    if not rungs:
        raise UnsupportedError(f"no rung of accuracy class {accuracy!r} takes {dtype}")
    why = f"the fastest rung of accuracy class {accuracy!r} for {dtype}"
    if len(rungs) == 1:
        return Choice(rungs[0], f"{why}, and the only one")
    found = nearest(dtype, head_dim, len_kv, causal, capability)
    if found is None:
        lacking = "it runs on no device"
        if capability is not None:
            lacking = f"nothing was measured on compute capability {capability / 10:.1f} in {dtype}"
        return Choice(rungs[0], f"{why}, by rule: {lacking}")
    best = min((n for n in rungs if n in found.microseconds), key=found.microseconds.__getitem__)
    return Choice(
        best,
        f"{why}, {found.microseconds[best]:.0f} us at {found.name} on compute capability "
        f"{found.capability / 10:.1f} in {RECORD}",
    )


def nearest(
    dtype: str, head_dim: int, len_kv: int, causal: bool, capability: int | None
) -> Measurement | None:
    """Return the measurement next to a shape, None where this device and type has none.

    float16 stands for bfloat16, whose instructions take the same time.
    """
    measured_as = "float16" if dtype == "bfloat16" else dtype
    same = [
        m
        for m in (Measurement(*row) for row in MEASURED)
        if m.capability == capability and m.dtype == measured_as
    ]

    def distance(m: Measurement) -> tuple[float, float, bool]:
        return (
            abs(math.log2(m.head_dim / head_dim)),
            abs(math.log2(m.length / max(len_kv, 1))),
            m.causal != causal,
        )

    return min(same, key=distance, default=None)
