"""Draw problems for ``cupyattn judge``, judge the outputs, and shrink the first that fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn.errors import UnsupportedError
from cupyattn.interop.callables import Called
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.strategies import HEAD_DIMS, REGIMES, attention_inputs
from cupyattn.testing import judge, judge_backward
from cupyattn.testing.counterexamples import Counterexample, keep

#: Seconds after which a failing problem is no longer made smaller.
SHRINK_SECONDS = 60.0
#: Kinds of values. Half of all problems are ordinary, because they show small rounding errors best.
VALUE_KINDS = ("normal",) * (len(REGIMES) - 2) + REGIMES
#: Kinds of failures.
OUTSIDE, RAISED = "outside its bound", "the function failed"


@dataclass(frozen=True)
class Failure:
    """The smallest problem found whose output is wrong.

    Parameters
    ----------
    kind : str
        `OUTSIDE` or `RAISED`.
    problem : str
        Sizes and options in one line.
    message : str
        The report, or the traceback.
    case : Counterexample
    device : str
    """

    kind: str
    problem: str
    message: str
    case: Counterexample
    device: str

    def to_dict(self) -> dict[str, str]:
        """Return the entry for a record."""
        return {"kind": self.kind, "problem": self.problem, "message": self.message}


@dataclass
class Search:
    """Result of a search: a record of each judged problem, the number of refusals, the failure."""

    judged: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    failure: Failure | None = None


class _Case:
    """A problem without a representation: Hypothesis would print all numbers of its arrays."""

    def __init__(self, drawn: tuple[Any, Any, Any, dict[str, Any]]) -> None:
        self.drawn = drawn


class _FoundError(Exception):
    """A problem fails; Hypothesis shrinks it."""


def search(
    function: Called,
    dtype: str,
    said: Numerics,
    *,
    count: int,
    seed: int,
    block: int,
    multiple: int,
    head_dims: Sequence[int] | None,
    square: bool,
    grouped: bool,
    empty: bool,
    gradients: bool,
    advance: Callable[[str], None],
) -> Search:
    """Judge a function on problems of one type.

    Parameters
    ----------
    function : Called
    dtype : str
    said : Numerics
        The numerics to which the function is held.
    count, seed : int
        Problems, and the seed of the draw.
    block, multiple, head_dims, square, grouped, empty
        As `cupyattn.strategies.attention_inputs` takes them; both tiles are `block`.
    gradients : bool
        Whether to judge the gradients instead of the output.
    advance : callable
        Called for each problem.

    Raises
    ------
    UnsupportedError
        If Hypothesis is not installed.
    """
    try:
        import hypothesis
    except ImportError:
        raise UnsupportedError("cupyattn judge needs Hypothesis: pip install hypothesis") from None
    features = [n for n in function.taken if n in ("window", "softcap", "mask", "bias", "sinks")]
    cases = attention_inputs(
        dtypes=[dtype], tiles=Tiles(block, block, 4), features=features,
        head_dims=HEAD_DIMS if head_dims is None else head_dims, square=square, grouped=grouped,
        multiple=multiple, empty=empty, regimes=VALUE_KINDS,
    )  # fmt: skip
    found = Search()
    smallest: tuple[Any, ...] = ()
    until = 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, derandomize=False,
        report_multiple_bugs=False, print_blob=False, verbosity=hypothesis.Verbosity.quiet,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(cases.map(_Case))
    def look(case: _Case) -> None:
        nonlocal smallest, until
        if found.failure is not None and time.monotonic() > until:
            return
        q, k, v, drawn = case.drawn
        options = function.options(drawn, q.dtype)
        problem = described(q, k, options)
        try:
            judged = _judged_gradients if gradients else _judged
            failure, ratio = judged(function, q, k, v, options, said, problem)
        except NotImplementedError:
            found.refused += found.failure is None
            return
        if found.failure is None:
            found.judged.append({"problem": problem, "ratio": ratio})
            advance(problem)
        if failure is None or (found.failure is not None and failure.kind != found.failure.kind):
            return
        size = (q.size + k.size, len(options), problem)
        if found.failure is None or size < smallest:
            until = until or time.monotonic() + SHRINK_SECONDS
            found.failure, smallest = failure, size
        raise _FoundError

    try:
        look()
    except (_FoundError, hypothesis.errors.HypothesisException):
        if found.failure is None:
            raise
    return found


def _judged(
    function: Called, q: Any, k: Any, v: Any, options: Mapping[str, Any], said: Numerics,
    problem: str,
) -> tuple[Failure | None, float]:  # fmt: skip
    """Return the failure of one problem if there is one, and the largest error / bound."""
    asked = {"numerics": said, **options}
    o = q
    try:
        o, lse = function(q, k, v, options)
        report = judge(o, q, k, v, lse=lse, **asked)
    except NotImplementedError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - a failure of the function, whatever it is
        kind, message, ratio = RAISED, traceback.format_exc(), float("inf")
    else:
        ratio = max(report.ratio, report.lse_ratio or 0.0)
        if report.passed:
            return None, ratio
        kind, message = OUTSIDE, str(report)
        asked["lse"] = lse
    case = keep(o, q, k, v, asked, test="", message=message)
    return Failure(kind, problem, message, case, function.device), ratio


def _judged_gradients(
    function: Called, q: Any, k: Any, v: Any, options: Mapping[str, Any], said: Numerics,
    problem: str,
) -> tuple[Failure | None, float]:  # fmt: skip
    """Return the same for gradients. The case has the gradient with respect to O in place of O."""
    d_out = np.random.default_rng(q.size + k.size).standard_normal(q.shape).astype(q.dtype)
    asked = {"numerics": said, **options}
    try:
        found = function.gradients(d_out, q, k, v, options)
        report = judge_backward(found, d_out, q, k, v, **asked)
    except NotImplementedError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - a failure of the function, whatever it is
        kind, message, ratio = RAISED, traceback.format_exc(), float("inf")
    else:
        ratio = report.ratio
        if report.passed:
            return None, ratio
        name = "" if said.foreign is None else said.foreign.name
        kind, message = OUTSIDE, f"{name}:\n{report}"
    case = keep(d_out, q, k, v, asked, test="", message=message)
    return Failure(kind, problem, message, case, function.device), ratio


def described(q: Any, k: Any, options: Mapping[str, Any]) -> str:
    """Return sizes and options of a problem in one line."""
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype.name}"
    placed = bool(options.get("causal")) or "window" in options
    scalars = [
        f"{n}={x}" for n, x in options.items()
        if not hasattr(x, "shape") and x is not False and (n != "causal_align" or placed)
    ]  # fmt: skip
    arrays = [f"{n} {tuple(x.shape)}" for n, x in options.items() if hasattr(x, "shape")]
    return ", ".join([sizes, *scalars, *arrays])
