"""The definition of attention (`attention_exact`, in float64), and the mirror of the kernels.

`attention_mirror` follows the kernels step by step, with their blocks and rounding points. Both run
on the kind of array that they are given, NumPy's or CuPy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.reference.attention import attention_mirror
    from cupyattn.reference.exact import ScoreBlock, attention_exact, score_blocks, softmax_exact
    from cupyattn.reference.softmax_state import Step
    from cupyattn.reference.unfused import scores_mirror, softmax_mirror, weighted_sum_mirror

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
        "reference.attention": ("attention_mirror",),
        "reference.exact": ("ScoreBlock", "attention_exact", "score_blocks", "softmax_exact"),
        "reference.softmax_state": ("Step",),
        "reference.unfused": ("scores_mirror", "softmax_mirror", "weighted_sum_mirror"),
    },
)  # fmt: skip
