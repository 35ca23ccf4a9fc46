"""Error-bound testing: draw inputs, judge outputs.

`judge` compares an output with exact attention as a fraction of a derived bound, element by
element. `assert_within_bound` raises where the fraction exceeds 1. `attention_inputs` draws arrays
with Hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn import lazy_face

if TYPE_CHECKING:
    from cupyattn.bounds.perturbation import ratio_to_bound
    from cupyattn.testing.strategies import REGIMES, attention_inputs, make_regime
    from cupyattn.testing.verdict import Report, assert_within_bound, judge, sample_rows

__all__ = [
    "REGIMES",
    "Report",
    "assert_within_bound",
    "attention_inputs",
    "judge",
    "make_regime",
    "ratio_to_bound",
    "sample_rows",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "bounds.perturbation": ("ratio_to_bound",),
        "testing.strategies": ("REGIMES", "attention_inputs", "make_regime"),
        "testing.verdict": ("Report", "assert_within_bound", "judge", "sample_rows"),
    },
)  # fmt: skip
