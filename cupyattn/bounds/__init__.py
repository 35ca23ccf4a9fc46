"""Bounds of the errors of kernels and of quantisation, element by element, in float64.

`attention` bounds the error of a kernel on the operands that it received (J2, rounding points R2
to R7). `quantisation` bounds the error of INT8 operands relative to the caller's arrays (J3, R1).
Both are computed from the actual inputs and scales, never from an output. docs/MATH_REFERENCE.md
has the proofs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.bounds.bound import Bound
    from cupyattn.bounds.kernel import TERMS, attention
    from cupyattn.bounds.perturbation import gamma, half_ulp, softmax_perturbation
    from cupyattn.bounds.prepared import preparation, rotation
    from cupyattn.bounds.quantised import quantisation

__all__ = [
    "TERMS",
    "Bound",
    "attention",
    "gamma",
    "half_ulp",
    "preparation",
    "quantisation",
    "rotation",
    "softmax_perturbation",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "bounds.kernel": ("TERMS", "attention"),
        "bounds.bound": ("Bound",),
        "bounds.perturbation": ("gamma", "half_ulp", "softmax_perturbation"),
        "bounds.prepared": ("preparation", "rotation"),
        "bounds.quantised": ("quantisation",),
    },
)  # fmt: skip
