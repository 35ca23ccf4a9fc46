"""Which rung ``variant="auto"`` takes: the fastest that an accuracy class allows, as measured.

`cupyattn.measured` holds the times, written by ``python -m experiments.fastest`` from committed
records. Where nothing was measured a rule decides, and `Choice.why` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cupyattn.errors import UnsupportedError
from cupyattn.measured import MEASURED, MEASURED_8_BIT, RECORD, RECORD_8_BIT, Rows
from cupyattn.quant.config import QuantConfig
from cupyattn.registry import VARIANTS

#: Families of kernels in the input's own 16/32-bit arithmetic, the one that the rule prefers first.
FULL = ("tensor_core", "float32", "unfused")
#: How the other accuracy classes quantise: "balanced" in INT8 Q.K^T and 16-bit P.V, "aggressive" in
#: 8-bit P.V too. A scale of K for a tile, and one for a channel of V, as its Hopper form asks.
QUANT = {
    "balanced": QuantConfig(granularity_k="block"),
    "aggressive": QuantConfig("token", "block", pv="int8", granularity_v="channel"),
}
#: Accuracy classes: each allows what those before it allow.
CLASSES = ("full", *QUANT)


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
        Of every rung, in the form that it takes by itself; or of `MEASURED_8_BIT`, of fa_tc and of
        fa_int8 as the classes of `QUANT` quantise, that included.
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
    """A rung, why it was chosen, in one clause, and how it quantises, None in 16 or 32 bits."""

    variant: str
    why: str
    quant: QuantConfig | None = None


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
        in head_dim, then in length. Where there is no measurement: of class "full" tensor cores
        before FMA, fewer passes over memory before more, in the order of `FULL`, later rungs first;
        of the others fa_int8 in the class's own bits.

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
    >>> choose("aggressive", "float16", 128, 4096, False).quant.pv
    'int8'
    """
    if accuracy not in CLASSES:
        raise ValueError(f"accuracy must be 'full', 'balanced' or 'aggressive', got {accuracy!r}")
    why = f"the fastest rung of accuracy class {accuracy!r} for {dtype}"
    if accuracy == "full":
        rungs = _full_rungs(dtype)
        rows, record = MEASURED, RECORD
        choices = {name: Choice(name, why) for name in rungs}
        by_rule = rungs[0]
    else:
        rows, record = MEASURED_8_BIT, RECORD_8_BIT
        allowed = CLASSES[1 : CLASSES.index(accuracy) + 1]
        choices = {"fa_tc": Choice("fa_tc", why)}
        choices |= {name: Choice("fa_int8", why, QUANT[name]) for name in allowed}
        by_rule = accuracy
    found = nearest(rows, dtype, head_dim, len_kv, causal, capability)
    if found is None:
        lacking = "it runs on no device"
        if capability is not None:
            lacking = f"nothing was measured on compute capability {capability / 10:.1f} in {dtype}"
        return replace(choices[by_rule], why=f"{why}, by rule: {lacking}")
    best = min((n for n in choices if n in found.microseconds), key=found.microseconds.__getitem__)
    return replace(
        choices[best],
        why=f"{why}, {found.microseconds[best]:.0f} us at {found.name} on compute capability "
        f"{found.capability / 10:.1f} in {record}",
    )


def _full_rungs(dtype: str) -> list[str]:
    rungs = [
        name
        for family in FULL
        for name, variant in reversed(VARIANTS.items())
        if variant.family == family and variant.source is None and dtype in variant.dtypes
    ]
    if not rungs:
        raise UnsupportedError(f"no rung of accuracy class 'full' takes {dtype}")
    return rungs


def nearest(
    rows: Rows, dtype: str, head_dim: int, len_kv: int, causal: bool, capability: int | None
) -> Measurement | None:
    """Return the measurement next to a shape, None where this device and type has none.

    float16 stands for bfloat16, whose instructions take the same time.
    """
    measured_as = "float16" if dtype == "bfloat16" else dtype
    same = [
        m
        for m in (Measurement(*row) for row in rows)
        if m.capability == capability and m.dtype == measured_as
    ]

    def distance(m: Measurement) -> tuple[float, float, bool]:
        return (
            abs(math.log2(m.head_dim / head_dim)),
            abs(math.log2(m.length / max(len_kv, 1))),
            m.causal != causal,
        )

    return min(same, key=distance, default=None)
