"""The stages of a call: plans that run one after another, and the buffers between them."""

from __future__ import annotations

from cupyattn.plans.attention import plan_attention
from cupyattn.plans.records import Stage, Work
from cupyattn.problem.attention import AttentionProblem


def stages(problem: AttentionProblem) -> Work:
    """Plan a call from shapes and strides alone.

    First come passes that rotate and quantise the operands, if needed, then attention.
    """
    if problem.prepares_before or problem.variant.family == "int8":
        # NOTE: a call without passes answers 5 ms sooner without their plans.
        from cupyattn.plans.passes import stages_with_passes

        return stages_with_passes(problem)
    return Work((Stage(plan_attention(problem.kernel, problem.places)),))
