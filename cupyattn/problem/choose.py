"""Choose the rung of ``variant="auto"``: the fastest that an accuracy class allows, as measured.

`cupyattn.kernels.measured_times` holds the times, written from committed records by
``python -m experiments.tuning.fastest``. If nothing was measured, a rule decides, and `Choice.why`
says so. The gain of 8 bits must exceed the cost of quantising, and it grows with both lengths. So a
call uses 8 bits if a measured call, with no more queries and no more keys, gained from them
(`supporting`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cupyattn.errors import UnsupportedError
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.measured_times import MEASURED, MEASURED_8_BIT, RECORD, RECORD_8_BIT, Rows
from cupyattn.problem.settings import ACCURACIES, check_accuracy
from cupyattn.quant.config import QuantConfig

#: Families of kernels in the 16/32-bit arithmetic of the input; the rule prefers the first.
FULL = ("tensor_core", "float32", "unfused")
#: Quantisation of the other accuracy classes: "balanced" in INT8 Q.K^T and 16-bit P.V, "aggressive"
#: in 8-bit P.V too. A scale of K for a tile, and one for a channel of V, as its Hopper form asks.
QUANT = {
    "balanced": QuantConfig(granularity_k="block"),
    "aggressive": QuantConfig("token", "block", pv="int8", granularity_v="channel"),
}


class Measurement(NamedTuple):
    """Times of the rungs on one shape.

    Parameters
    ----------
    capability : int
        Compute capability of the device times ten.
    dtype : str
    head_dim : int
    len_q, len_kv : int
        Number of queries, and of keys.
    causal : bool
    microseconds : mapping of str to float
        Times of every rung, in its default form. In `MEASURED_8_BIT`: of fa_tc, and of fa_int8 as
        the classes of `QUANT` quantise, including the time to quantise.
    """

    capability: int
    dtype: str
    head_dim: int
    len_q: int
    len_kv: int
    causal: bool
    microseconds: dict[str, float]

    @property
    def name(self) -> str:
        """The shape in a few characters."""
        lengths = f"{self.len_q}" if self.len_q == self.len_kv else f"{self.len_q}x{self.len_kv}"
        return f"hd{self.head_dim} {lengths}{' causal' if self.causal else ''}"


@dataclass(frozen=True)
class Choice:
    """A rung, a clause that says why, and its quantisation, which is None in 16 or 32 bits."""

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
    len_q: int | None = None,
) -> Choice:
    """Choose the rung of a call that names none.

    Parameters
    ----------
    accuracy : {"full", "balanced", "aggressive"}
    dtype : str
        Storage type of the operands.
    head_dim : int
    len_kv : int
        Number of keys, or of keys that a row attends to.
    causal : bool
    capability : int, optional
        Compute capability of the device times ten; None if the call runs on no device.
    len_q : int, optional
        Number of queries; as many as keys when omitted.

    Returns
    -------
    Choice
        The fastest rung in one measurement of this capability and dtype. Class "full" uses the
        measurement that is `nearest`. The other classes use the measurement that is `supporting`;
        without one, they choose fa_tc. If this device or type was not measured, class "full"
        prefers tensor cores to FMA and fewer passes over memory, in the order of `FULL`, later
        rungs first. The other classes then choose fa_int8 with the bits of the class.

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
    >>> choose("aggressive", "float16", 128, 77, False, 90).variant
    'fa_tc'
    """
    len_q = len_kv if len_q is None else len_q
    check_accuracy(accuracy)
    why = f"the fastest rung of accuracy class {accuracy!r} for {dtype}"
    if accuracy == "full":
        rungs = _full_rungs(dtype)
        rows, record = MEASURED, RECORD
        choices = {name: Choice(name, why) for name in rungs}
        by_rule = rungs[0]
    else:
        rows, record = MEASURED_8_BIT, RECORD_8_BIT
        allowed = ACCURACIES[1 : ACCURACIES.index(accuracy) + 1]
        choices = {"fa_tc": Choice("fa_tc", why)}
        choices |= {name: Choice("fa_int8", why, QUANT[name]) for name in allowed}
        by_rule = accuracy
    same = _measured(rows, dtype, capability)
    if not same:
        lacking = "no times without a device"
        if capability is not None:
            lacking = f"nothing was measured on compute capability {capability / 10:.1f} in {dtype}"
        return replace(choices[by_rule], why=f"{why}, by rule: {lacking}")
    if accuracy == "full":
        found = nearest(same, head_dim, len_kv, causal)
    elif (held := supporting(same, head_dim, len_q, len_kv, causal)) is not None:
        found = held
    else:
        asked = Measurement(capability or 0, dtype, head_dim, len_q, len_kv, causal, {})
        return replace(
            choices["fa_tc"],
            why=f"{why}, by rule: nothing up to {asked.name} is in {record}, and quantising has to "
            "be paid back",
        )
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


def _measured(rows: Rows, dtype: str, capability: int | None) -> list[Measurement]:
    """Return the measurements of a device and type.

    Those in float16 also serve bfloat16, whose instructions take the same time."""
    measured_as = "float16" if dtype == "bfloat16" else dtype
    return [Measurement(*row) for row in rows if row[:2] == (capability, measured_as)]


def _apart(one: int, other: int) -> float:
    return abs(math.log2(one / max(other, 1)))


def nearest(
    measured: Sequence[Measurement], head_dim: int, len_kv: int, causal: bool
) -> Measurement:
    """Return the measurement next to a shape: in head_dim, then in keys, then of the same mask."""

    def distance(m: Measurement) -> tuple[float, float, bool]:
        return _apart(m.head_dim, head_dim), _apart(m.len_kv, len_kv), m.causal != causal

    return min(measured, key=distance)


def supporting(
    measured: Sequence[Measurement], head_dim: int, len_q: int, len_kv: int, causal: bool
) -> Measurement | None:
    """Return the largest measurement that asks no more of a call than the call has.

    It has the nearest head_dim, and no more queries or keys than the call. The relative cost of
    quantising falls with either length, so a longer call gains at least as much. A causal
    measurement supports only causal calls. A measurement without a mask supports causal calls of
    twice its lengths, in which a row attends to as many keys on average.

    Returns
    -------
    Measurement or None
        None if all measurements at that head_dim have more queries or more keys.
    """
    next_to = min((m.head_dim for m in measured), key=lambda d: _apart(d, head_dim))

    def lengths(m: Measurement) -> tuple[int, int]:
        times = 2 if causal and not m.causal else 1
        return times * m.len_q, times * m.len_kv

    def size(m: Measurement) -> tuple[int, bool]:
        return math.prod(lengths(m)), m.causal == causal

    held = [
        m
        for m in measured
        if m.head_dim == next_to
        and (causal or not m.causal)
        and lengths(m)[0] <= len_q
        and lengths(m)[1] <= len_kv
    ]
    return max(held, key=size, default=None)
