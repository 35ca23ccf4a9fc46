"""Error-bound testing: judge outputs, of this library's kernels and of others'.

`judge` compares an output with exact attention as a fraction of a derived bound, element by
element. `assert_within_bound` raises where the fraction exceeds 1; under pytest it keeps the
counterexample. `numerics` says what a kernel of another library rounds, and `judge_backward` holds
gradients to it. `cupyattn.strategies` draws inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.bounds.perturbation import ratio_to_bound
    from cupyattn.testing.counterexamples import Counterexample, load_counterexample
    from cupyattn.testing.expected import sample_rows
    from cupyattn.testing.foreign import numerics
    from cupyattn.testing.judged_gradients import judge_backward
    from cupyattn.testing.verdict import Report, assert_within_bound, judge

__all__ = [
    "Counterexample",
    "Report",
    "assert_within_bound",
    "judge",
    "judge_backward",
    "load_counterexample",
    "numerics",
    "ratio_to_bound",
    "sample_rows",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "bounds.perturbation": ("ratio_to_bound",),
        "testing.counterexamples": ("Counterexample", "load_counterexample"),
        "testing.expected": ("sample_rows",),
        "testing.foreign": ("numerics",),
        "testing.judged_gradients": ("judge_backward",),
        "testing.verdict": ("Report", "assert_within_bound", "judge"),
    },
)  # fmt: skip
