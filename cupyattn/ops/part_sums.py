"""Maxima and sums of exponentials of coarse rows over some of their keys, for gradients in a ring.

If abs(lse) of a row is large, float32 has lost the logarithm of its sum. A backward pass with all
keys sums such rows again. In a ring each rank sums over the keys that come by, the parts are
merged, and the gradients of all blocks take the result.
"""

# ruff: noqa: E741  (l is the paper's letter)

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import NEG_INF, STORAGE, array_namespace
from cupyattn.gradients.mirror import part_sums
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.call_operands import arguments_of
from cupyattn.ops.operation import Operation, problem_of, run
from cupyattn.plans.backward import plan_part_sums
from cupyattn.plans.records import Work
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.sequences import SEQUENCES
from cupyattn.problem.settings import Asked, Settings
from cupyattn.reference.problem import corner_of, masks_of


def run_part_sums(settings: Settings, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return M and the sum of the exponentials of each coarse row, over the keys given.

    Parameters
    ----------
    settings : Settings
        Settings of the gradients, with layout BHSD.
    arrays : mapping
        q, k, lse and the arrays of scores and sequences, as for `run_backward`.

    Returns
    -------
    M, l : array, float32, shaped as lse
        -inf and 0 for coarse rows without keys; undefined for other rows.
    """
    given = {name: x for name, x in arrays.items() if name not in ("d_out", "out")}
    asked, own, facts = arguments_of(settings, {**given, "v": given["k"]})
    found: dict[str, Any] = run(_PART_SUMS, asked, own, facts)
    return found["part_M"], found["part_l"]


def added_sums(
    sums: tuple[Any, Any], part: tuple[Any, Any], *, natural: bool
) -> tuple[Any, Any]:
    """Return M and l of rows over the keys of both; -inf and 0 stand for no keys.

    M is a natural exponent if `natural`, as with softcap or bias, otherwise one of 2.
    """
    xp = array_namespace(sums[0])
    power = xp.exp if natural else xp.exp2
    top = xp.fmax(sums[0], part[0])
    with np.errstate(invalid="ignore"):
        each = (xp.where(M == NEG_INF, 0, l * power(M - top)) for M, l in (sums, part))
        return top, sum(each).astype(np.float32)


def all_keys_sums(M: Any, l: Any) -> tuple[Any, Any]:
    """Return M and the factor of rows from M and l over all their keys, as kernels read them.

    They are +inf and 0 for rows without keys."""
    xp = array_namespace(M)
    none = l == 0
    factor = xp.where(none, 0, 1 / xp.where(none, 1, l))
    return xp.where(none, np.inf, M).astype(np.float32), factor.astype(np.float32)


class _PartSums(Operation):
    """Sums of coarse rows as an operation; its problem has the operands of a forward pass."""

    name = "part_sums"

    def resolve(self, asked: Asked, arrays: Mapping[str, Described]) -> Problem:
        """Check the forward pass."""
        own = {name: x for name, x in arrays.items() if name != "lse"}
        forward: AttentionProblem = problem_of(ATTENTION, asked, own)
        lse = arrays["lse"].whole()
        shape, dtype = forward.call.lse_shape, STORAGE["float32"]
        return Problem(
            what=self.name, backend=forward.backend, arch=forward.arch,
            operands={
                **{name: forward.rows[name] for name in "qk"}, "lse": lse,
                **forward.of_scores, **forward.sequences,
            },
            results={"part_M": Result(shape, dtype, NEG_INF), "part_l": Result(shape, dtype, 0.0)},
            looks=forward.looks, settled=forward,
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        places = (problem.operands.get(name) for name in ("q", "k", "mask", "bias"))
        q, k, mask, bias = (x if x is None else x.place for x in places)
        return Work.of(plan_part_sums(problem.settled.call, q, k, mask, bias))

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Sum on NumPy, every packed sequence by itself; of all rows."""
        forward: AttentionProblem = problem.settled
        settings, masks = forward.settings, masks_of(forward, arrays)
        kernel = settle_backward(forward.call, {}, deterministic=True)
        nothing: Any = None

        def sums(q: Any, k: Any, masks: Mapping[str, Any]) -> tuple[Any, Any]:
            given = nothing, q, k, k, nothing, nothing
            options = settings.scores(masks)
            return part_sums(BackwardProblem(*given, settings.scale, options), kernel)

        if forward.call.packed is None:
            M, l = sums(arrays["q"], arrays["k"], masks)
            return {"part_M": M, "part_l": l}
        made = {n: np.full(x.shape, x.fill, x.dtype) for n, x in problem.results.items()}
        pairs = zip(*(pairwise(arrays[name]) for name in SEQUENCES), strict=True)
        for number, (rows, keys) in enumerate(pairs):
            q, k = arrays["q"][:, :, slice(*rows)], arrays["k"][:, :, slice(*keys)]
            own = corner_of(masks, number, q.shape[2], k.shape[2])
            for name, x in zip(made, sums(q, k, own), strict=True):
                made[name][:, slice(*rows)] = x[0]
        return made


_PART_SUMS = _PartSums()
