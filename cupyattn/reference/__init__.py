"""What attention is (`attention_exact`, in float64), and the mirror of the kernels.

`attention_mirror` follows the kernels step by step, with their blocks and rounding points. Both run
on the kind of array that they are given, NumPy's or CuPy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn import lazy_face

if TYPE_CHECKING:
    from cupyattn.reference.exact import ScoreBlock, attention_exact, score_blocks, softmax_exact
    from cupyattn.reference.mirror import (
        attention_mirror,
        scores_mirror,
        softmax_mirror,
        weighted_sum_mirror,
    )
    from cupyattn.reference.softmax_state import Step

__all__ = [
    "ScoreBlock",
    "Step",
    "attention_exact",
    "attention_mirror",
    "score_blocks",
    "scores_mirror",
    "softmax_exact",
    "softmax_mirror",
    "weighted_sum_mirror",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "reference.exact": ("ScoreBlock", "attention_exact", "score_blocks", "softmax_exact"),
        "reference.mirror": (
            "attention_mirror", "scores_mirror", "softmax_mirror", "weighted_sum_mirror",
        ),
        "reference.softmax_state": ("Step",),
    },
)  # fmt: skip
