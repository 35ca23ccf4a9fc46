"""Random signs before the values of each key: a call that shows errors of P which V hides.

The signs are exact: values keep their magnitudes, and nothing is quantised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.bounds.perturbation import ratio_to_bound, worst_of
from cupyattn.bounds.signed import FAILURE, signed_bound
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.attention import KernelCall

#: Runs the judged call on other values: ``run(v) -> o``, or ``run(quantized) -> o`` if the operands
#: were quantised. O may be any array with DLPack.
SignedRun = Callable[[Any], Array]


@dataclass(frozen=True)
class SignedRatio:
    """The largest error of an output with signed values.

    Parameters
    ----------
    ratio : float
        As a fraction of its bound; it must not exceed 1.
    index : tuple of int
        Place of the error: (draw of signs, batch, head, row, channel).
    value, expected, bound : float
        At that place.
    """

    ratio: float
    index: tuple[int, ...]
    value: float
    expected: float
    bound: float

    def __str__(self) -> str:
        return (
            f"  signed values: O is {'within' if self.ratio <= 1 else 'OUTSIDE'} its bound, error "
            f"/ bound = {self.ratio:.3g} at {self.index}: value {self.value:.9g}, expected "
            f"{self.expected:.9g}, bound {self.bound:.3g} (random, fails with {FAILURE:g})"
        )


def draw_signs(v: Array, rng: np.random.Generator) -> Array:
    """Return -1 or 1 for each key and kv head [L76]: (batch, heads_kv, len_kv, 1), v's type."""
    xp = array_namespace(v)
    drawn = rng.integers(0, 2, size=(*v.shape[:3], 1)) * 2 - 1
    return xp.asarray(drawn.astype(np.float32)).astype(v.dtype)


def with_signs(received: KernelCall, rng: np.random.Generator) -> tuple[KernelCall, Any]:
    """Return what a kernel receives where values have signs, and the operand for `SignedRun`."""
    quantized = received.quantized
    if quantized is not None:
        if quantized.v is None:
            raise ValueError(
                "signed needs values in 16 bits, and these operands have V as codes: "
                "leave signed out"
            )
        signed = replace(quantized, v=quantized.v * draw_signs(quantized.v, rng))
        # NOTE: the caller's arrays serve J3, the error of quantising, which signs do not change.
        unknown = {**received.arrays, **dict.fromkeys("qkv")}
        return replace(received, arrays=unknown, quantized=signed), signed
    v = received.arrays["v"]
    signed = v * draw_signs(v, rng)
    return replace(received, arrays={**received.arrays, "v": signed}), signed


def judge_signed(
    received: KernelCall,
    run: SignedRun,
    rows: Array,
    exact: Callable[[KernelCall], Array],
    *,
    draws: int = 1,
    numerics: Numerics | None = None,
    seed: int = 0,
) -> SignedRatio:
    """Run a call on values with random signs, and judge its output by `signed_bound`.

    Parameters
    ----------
    received : KernelCall
        The call with its original values.
    run : callable
        As `SignedRun`.
    rows : 1-D integer array
        Query rows that are judged.
    exact : callable
        Returns exact attention of these rows for the operands that a kernel received.
    draws : int
        How many times signs are drawn.
    numerics, seed
        As for `cupyattn.testing.judge`.

    Returns
    -------
    SignedRatio
        Ratio of the worst element of all draws.

    Raises
    ------
    ValueError
        Where P or V are codes, `run` returns another shape, or `draws` is not at least 1.
    """
    if not isinstance(draws, int | np.integer) or draws < 1:
        raise ValueError(f"draws must be an integer of at least 1, got {draws!r}")
    worst = SignedRatio(0.0, (), 0.0, 0.0, 0.0)
    rng = np.random.default_rng([seed, 0x51])
    for draw in range(draws):
        signed, operand = with_signs(received, rng)
        o = take("what signed returns", run(operand))[0]
        expected = exact(signed)
        batch, heads, _, head_dim = expected.shape
        shape = (batch, heads, received.kernel.call.len_q, head_dim)
        if tuple(o.shape) != shape:
            raise ValueError(
                f"signed must return O of shape {shape}, got {tuple(o.shape)}: run the call with "
                "the operand that it is given in the place of v, or of quantized"
            )
        bound = signed_bound(
            signed, rows=rows, elements=draws * expected.size, numerics=numerics
        ).total
        value = as_float64(o[:, :, rows])
        most, at = worst_of(ratio_to_bound(value, expected, bound))
        if at and (worst.index == () or most > worst.ratio):
            where = (draw, at[0], at[1], int(rows[at[2]]), at[3])
            worst = SignedRatio(most, where, *(float(x[at]) for x in (value, expected, bound)))
    return worst
