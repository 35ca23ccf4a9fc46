"""The gradients of attention: definition, mirror of the kernels, and bound of their errors.

`backward_exact` is the definition in float64. `backward_mirror` follows the kernels' blocks and
rounding points. `backward_bound` bounds the distance of a kernel from the definition, element by
element, and `judge_backward` checks gradients against it. `cupyattn.attention_backward` runs the
kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.gradients.block_sums import GradientBounds
    from cupyattn.gradients.bounds import backward_bound
    from cupyattn.gradients.exact import (
        Gradients,
        GradientsWithBias,
        GradientsWithBiasAndNorm,
        GradientsWithNorm,
        backward_exact,
    )
    from cupyattn.gradients.judge import GradientReport, judge_backward
    from cupyattn.gradients.mirror import backward_mirror

__all__ = [
    "GradientBounds",
    "GradientReport",
    "Gradients",
    "GradientsWithBias",
    "GradientsWithBiasAndNorm",
    "GradientsWithNorm",
    "backward_bound",
    "backward_exact",
    "backward_mirror",
    "judge_backward",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "gradients.block_sums": ("GradientBounds",),
        "gradients.bounds": ("backward_bound",),
        "gradients.exact": (
            "Gradients", "GradientsWithBias", "GradientsWithBiasAndNorm", "GradientsWithNorm",
            "backward_exact",
        ),
        "gradients.judge": ("GradientReport", "judge_backward"),
        "gradients.mirror": ("backward_mirror",),
    },
)  # fmt: skip
