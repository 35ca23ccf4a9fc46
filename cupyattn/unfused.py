"""The three steps of attention, each alone: scores, softmax, weighted sum.

NumPy arrays run the pieces of the mirror (or, with ``CUPYATTN_INTERPRET=1``, the kernels in the
interpreter), CuPy arrays the three kernels of ``attn_unfused.cu``. S and P are ordinary float32
arrays: look at them, mask them, add to them between the steps. Calls are not remembered
(`cupyattn.runtime.recent`): softmax begins with a copy of its argument.

>>> import numpy as np
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 16)).astype(np.float16)
>>> o = weighted_sum(softmax(scores(q, k)), v)
>>> o.shape, str(o.dtype)
((1, 2, 5, 16), 'float16')
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import imported
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import target
from cupyattn.kernels import ladder, limits
from cupyattn.kernels.limits import check_grid
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.records import Work
from cupyattn.plans.unfused import plan_unfused_step
from cupyattn.problem import checks
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.form import Kernel, settle
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.settings import MaskedOptions, Unpack, check_attention, takes_options
from cupyattn.reference import unfused as mirror


@explains_foreign_arguments
@takes_options
def scores(q: Any, k: Any, **options: Unpack[MaskedOptions]) -> Any:
    """Step 1: ``S = scale * Q K^T``.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32: CuPy, NumPy, or anything with DLPack.
    k : array, (batch, heads_kv, len_kv, head_dim)
        Same type as q; `heads_kv` divides `heads`.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `cupyattn.attention`.

    Returns
    -------
    S : array, (batch, heads, len_q, len_kv), float32
        -inf where masked.

    Raises
    ------
    TypeError, ValueError
        For arrays or options that do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.full((1, 1, 2, 4), 0.5, np.float16)
    >>> scores(x, x, causal=True)[0, 0].tolist()
    [[0.5, -inf], [0.5, 0.5]]
    """
    added = {"mask": options.pop("mask", None), "bias": options.pop("bias", None)}
    arrays = {"q": q, "k": k} | {n: x for n, x in added.items() if x is not None}
    block_mask = options.get("block_mask")
    if isinstance(block_mask, BlockMask):
        arrays["kept_blocks"] = block_mask.kept_blocks(imported({"q": q})[0]["q"])
    return run(SCORES, options, arrays, None)["S"]


def softmax(S: Any, *, return_lse: bool = False) -> Any:
    """Step 2: ``P = softmax(S)`` over the keys.

    Parameters
    ----------
    S : array, (batch, heads, len_q, len_kv), float32
        Scores; -inf masks a key. Not modified.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    P : array, (batch, heads, len_q, len_kv), float32
        Rows sum to 1; a row of -inf is 0.
    lse : array, (batch, heads, len_q), float32
        With `return_lse`: natural logarithm of the sum of ``exp(S)``.

    Raises
    ------
    TypeError
        If S is not float32.
    ValueError
        If it has not four axes.

    Examples
    --------
    >>> import numpy as np
    >>> softmax(np.zeros((1, 1, 1, 4), np.float32)).tolist()
    [[[[0.25, 0.25, 0.25, 0.25]]]]
    """
    made = run(SOFTMAX, return_lse, {"S_in": S}, None)
    return (made["S"], made["lse"]) if return_lse else made["S"]


def weighted_sum(P: Any, v: Any) -> Any:
    """Step 3: ``O = P V``.

    Parameters
    ----------
    P : array, (batch, heads, len_q, len_kv), float32
    v : array, (batch, heads_kv, len_kv, head_dim)
        float16, bfloat16 or float32; `heads_kv` divides `heads`.

    Returns
    -------
    o : array, (batch, heads, len_q, head_dim)
        Same type as v.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> v = np.arange(4, dtype=np.float16).reshape(1, 1, 4, 1)
    >>> weighted_sum(np.full((1, 1, 1, 4), 0.25, np.float32), v).item()
    1.5
    """
    return run(WEIGHTED_SUM, None, {"v": v, "S": P}, None)["o"]


def _check_float32(name: str, array: Any) -> None:
    if str(array.dtype) != "float32":
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    if array.ndim != 4:
        raise ValueError(
            f"{name} must have four axes (batch, heads, len_q, len_kv), got shape {array.shape}"
        )


class _Step(Operation):
    """One kernel of ``attn_unfused.cu`` as an operation."""

    name = ""

    def settled(self, call: AttentionSpec) -> Kernel:
        """Return the rung's kernel for a step of a call; UnsupportedError past a grid's limit."""
        kernel = settle(ladder.lookup("unfused"), call)
        check_grid(kernel.variant.name, *kernel.blocks[self.name])
        return kernel

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        names = ("q", "k", "v", "o", "mask", "bias", "kept_blocks")
        described = {n: x.place for n, x in problem.operands.items() if n in names}
        if "o" in problem.results:
            o = problem.results["o"]
            described["o"] = Operand.contiguous(o.shape, o.dtype.itemsize)
        return Work.of(plan_unfused_step(self.name, problem.settled, described))


class _Scores(_Step):
    name = "scores"

    def resolve(self, settings: Mapping[str, Any], arrays: Mapping[str, Described]) -> Problem:
        """Check queries, keys and the options that change scores."""
        q, k = arrays["q"], arrays["k"]
        added: dict[str, Any] = {n: arrays[n] for n in ("mask", "bias") if n in arrays}
        check_together(**arrays)
        backend = target.choose(None, q.device >= 0)
        call = check_attention(q, k, k, **settings, **added)
        if backend == "mirror":
            operands = {n: x for n, x in arrays.items() if n != "kept_blocks"}
            return Problem(
                what=self.name, backend=backend, operands=operands, results={}, settled=settings
            )
        operands = {"q": q.with_whole_rows(), "k": k.with_whole_rows()}
        operands |= {n: x.broadcast_to(call.score_shape) for n, x in added.items()}
        if "kept_blocks" in arrays:
            operands["kept_blocks"] = arrays["kept_blocks"]
        return Problem(
            what=self.name, backend=backend, operands=operands,
            results={"S": Result(call.score_shape, STORAGE["float32"])},
            settled=self.settled(call),
        )  # fmt: skip

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return S from NumPy."""
        return {"S": mirror.scores_mirror(**arrays, **problem.settled)}


class _Softmax(_Step):
    name = "softmax"

    def resolve(self, return_lse: bool, arrays: Mapping[str, Described]) -> Problem:
        """Check the scores."""
        S = arrays["S_in"]
        _check_float32("S", S)
        # NOTE: the kernel reads only S; head_dim and dtype say nothing here.
        call = AttentionSpec(
            S.shape[0], S.shape[1], S.shape[1], S.shape[2], S.shape[3], 1, "float32", 1.0,
            return_lse=return_lse,
        )  # fmt: skip
        results = {"S": Result(S.shape, STORAGE["float32"], fill="S_in")}  # P in its place
        if return_lse:
            results["lse"] = Result(call.lse_shape, STORAGE["float32"])
        return Problem(
            what=self.name, backend=target.choose(None, S.device >= 0), operands={"S_in": S},
            results=results, settled=self.settled(call),
        )  # fmt: skip

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return P and the log-sum-exp from NumPy."""
        P, lse = mirror.softmax_mirror(arrays["S_in"])
        return {"S": P, "lse": lse}


class _WeightedSum(_Step):
    name = "weighted_sum"

    def resolve(self, settings: None, arrays: Mapping[str, Described]) -> Problem:
        """Check weights and values."""
        v, P = arrays["v"], arrays["S"]
        _check_float32("P", P)
        dtype = checks.check_dtype(v, v, v)
        if P.ndim != 4 or v.ndim != 4 or P.shape[0] != v.shape[0] or P.shape[3] != v.shape[2]:
            raise ValueError(
                "P (batch, heads, len_q, len_kv) and v (batch, heads_kv, len_kv, head_dim) must "
                f"agree on batch and len_kv, got P.shape={P.shape} v.shape={v.shape}"
            )
        q_shape = (*P.shape[:3], v.shape[3])
        sizes = limits.check_shapes(q_shape, v.shape, v.shape)
        check_together(P=P, v=v)
        return Problem(
            what=self.name, backend=target.choose(None, v.device >= 0),
            operands={"v": v.with_whole_rows(), "S": P.whole()},
            results={"o": Result(q_shape, v.dtype)},
            settled=self.settled(AttentionSpec(*sizes, dtype, 1.0)),
        )  # fmt: skip

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return O from NumPy."""
        return {"o": mirror.weighted_sum_mirror(arrays["S"], arrays["v"])}


SCORES, SOFTMAX, WEIGHTED_SUM = _Scores(), _Softmax(), _WeightedSum()
