"""Softcap of the Hopper forms: the polynomial of tanh, and the error of both its branches."""

from __future__ import annotations

#: c_k of tanh(y) = y Σ c_k y^(2 k), minimax in relative error (2^-16.15) up to `LARGEST_Y`.
TANH_COEFFICIENTS = (0.9999862909, -0.3327365816, 0.1290488839, -0.0425835401, 0.0078722397)
LARGEST_Y = 1.08671
#: Relative error of ``prims/score/softcap.cuh``, roundings of float32 included
#: (docs/MATH_REFERENCE.md [L25]).
SOFTCAP_ERROR = 2.0**-16


def tanh_factors(unit: float) -> list[float]:
    """Return the factors of S, S^3, ... of unit * tanh(S / unit), for |S| up to LARGEST_Y * unit.

    Examples
    --------
    >>> [round(x, 4) for x in tanh_factors(2.0)]
    [1.0, -0.0832, 0.0081, -0.0007, 0.0]
    """
    return [c / unit ** (2 * k) for k, c in enumerate(TANH_COEFFICIENTS)]
