"""Bounds of attention kernels of other people: outputs by the judge, gradients by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.testing import judge
from experiments._harness.foreign import APPROXIMATE, CUT, HALF, HALF_STEP, SINGLE, TINY, share

Array = npt.NDArray[Any]


def judged(
    o: Array, q: Array, k: Array, v: Array, numerics: Any, *, lse: Array | None = None
) -> float:
    """Return the largest error of O and lse as a share of its bound; all (batch, heads, ...)."""
    report = judge(o, q, k, v, lse=lse, numerics=numerics)
    return max(float(report.ratio), float(report.lse_ratio or 0.0))


@dataclass(frozen=True)
class Gradients:
    """Exact gradients of attention in float64, and how far a kernel may be off.

    The kernel is given O and lse. It rounds P and dS to 16 bits where they are multiplied, sums in
    float32, and rounds its results to 16 bits. `delta` is the sum over channels of dO times O.
    """

    delta: Array
    dq: Array
    dk: Array
    dv: Array
    bound_delta: Array
    bound_dq: Array
    bound_dk: Array
    bound_dv: Array

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, scale: float,
        *, causal: bool = False,
    ) -> Gradients:  # fmt: skip
        """Return the gradients; first-order bounds are widened by a hundredth for the rest."""
        q, k, v, o, lse, do = (x.astype(np.float64) for x in (q, k, v, o, lse[..., None], do))
        keys, channels = k.shape[-2:]
        s = scale * q @ _t(k)
        p = np.exp(s - lse)
        if causal:
            p = np.tril(p)
        delta = (do * o).sum(-1, keepdims=True)
        dp = do @ _t(v)
        ds = p * (dp - delta)
        # Relative error of P: products, the rounded exponent, the exponential itself.
        exponent = 4 * SINGLE * (np.abs(s) + np.abs(lse))
        in_p = channels * CUT * scale * np.abs(q) @ _t(np.abs(k)) + exponent + APPROXIMATE
        in_delta = 2 * channels * SINGLE * (np.abs(do) * np.abs(o)).sum(-1, keepdims=True)
        in_dp = channels * CUT * np.abs(do) @ _t(np.abs(v))
        in_ds = p * (in_p * np.abs(dp - delta) + in_dp + in_delta) + HALF * np.abs(ds) + HALF_STEP
        in_p = p * (in_p + HALF) + HALF_STEP
        sums = max(keys, q.shape[-2]) * CUT
        dq, dk, dv = scale * ds @ k, scale * _t(ds) @ q, _t(p) @ do

        def bound(left: Array, error: Array, right: Array, exact: Array, factor: float) -> Array:
            right = np.abs(right)
            total = factor * (error @ right + sums * np.abs(left) @ right)
            return 1.01 * (total + HALF * np.abs(exact) + HALF_STEP)

        return cls(
            delta[..., 0], dq, dk, dv, in_delta[..., 0] + TINY,
            bound(ds, in_ds, k, dq, scale),
            bound(_t(ds), _t(in_ds), q, dk, scale),
            bound(_t(p), _t(in_p), do, dv, 1.0),
        )  # fmt: skip

    def share(self, dq: Array, dk: Array, dv: Array) -> float:
        """Return the largest error of gradients as a share of its bound."""
        return max(
            share(dq, self.dq, self.bound_dq),
            share(dk, self.dk, self.bound_dk),
            share(dv, self.dv, self.bound_dv),
        )


def _t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def attention(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Return O in the type of q, and lse in float32."""
    s = scale * q.astype(np.float64) @ _t(k.astype(np.float64))
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    o = (p / total @ v.astype(np.float64)).astype(q.dtype)
    return o, (m + np.log(total))[..., 0].astype(np.float32)
