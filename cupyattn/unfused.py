"""The three steps of attention, each alone: scores, softmax, weighted sum.

NumPy arrays run the pieces of the mirror (or, with ``CUPYATTN_INTERPRET=1``, the kernels in the
interpreter), CuPy arrays the three kernels of ``attn_unfused.cu``.
S and P are ordinary float32 arrays: look at them, mask them, add to them between the steps.

>>> import numpy as np
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 16)).astype(np.float16)
>>> o = weighted_sum(softmax(scores(q, k)), v)
>>> o.shape, str(o.dtype)
((1, 2, 5, 16), 'float16')
"""

from __future__ import annotations

from typing import Any

from cupyattn.arrays import interchange, memory
from cupyattn.arrays.kinds import array_namespace
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import target
from cupyattn.kernels import ladder, limits
from cupyattn.ops import run
from cupyattn.plans import attention
from cupyattn.problem import checks
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import settle
from cupyattn.reference import mirror


def scores(
    q: Any,
    k: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    block_mask: BlockMask | None = None,
) -> Any:
    """Step 1: ``S = scale * Q K^T``.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        float16, bfloat16 or float32: CuPy, NumPy, or anything with DLPack.
    k : array, (batch, heads_kv, len_kv, head_dim)
        Of q's type; `heads_kv` divides `heads`.
    scale : float, optional
        ``head_dim ** -0.5`` when omitted.
    causal : bool
        Query i attends key j only where ``j <= i + shift``.
    causal_align : {"bottom-right", "top-left"}
        ``shift = len_kv - len_q``, or 0.
    window, softcap, mask, bias, block_mask
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
    (q, restore), (k, _) = interchange.take("q", q), interchange.take("k", k)
    added = {name: a for name, a in (("mask", mask), ("bias", bias)) if a is not None}
    added = {name: interchange.take(name, array)[0] for name, array in added.items()}
    xp, backend = array_namespace(q, k, *added.values()), target.choose(None, q)
    options: dict[str, Any] = {
        "scale": scale, "causal": causal, "causal_align": causal_align, "window": window,
        "softcap": softcap, "block_mask": block_mask, **added,
    }  # fmt: skip
    call = checks.check_attention(q, k, k, **options)
    if backend == "mirror":
        return restore(mirror.scores_mirror(q, k, **options))
    q, k = interchange.contiguous_last_axis(q), interchange.contiguous_last_axis(k)
    added = {name: interchange.broadcast(array, call.score_shape) for name, array in added.items()}
    with memory.on_device_of(q):
        S = xp.empty(call.score_shape, "float32")
        if block_mask is not None:
            added["kept_blocks"] = block_mask.kept_blocks(q)
        _run("scores", backend, call, {"q": q, "k": k, **added}, {"S": S})
    return restore(S)


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
    S, restore = interchange.take("S", S)
    _check_float32("S", S)
    xp, backend = array_namespace(S), target.choose(None, S)
    if backend == "mirror":
        P, lse = mirror.softmax_mirror(S)
        return (restore(P), restore(lse)) if return_lse else restore(P)
    # NOTE: the kernel reads only S; head_dim and dtype say nothing here.
    call = AttentionSpec(
        S.shape[0], S.shape[1], S.shape[1], S.shape[2], S.shape[3], 1, "float32", 1.0,
        return_lse=return_lse,
    )  # fmt: skip
    with memory.on_device_of(S):
        P = xp.array(S, order="C", copy=True)
        lse = xp.empty(call.lse_shape, "float32")
        _run("softmax", backend, call, {}, {"S": P, "lse": lse} if return_lse else {"S": P})
    return (restore(P), restore(lse)) if return_lse else restore(P)


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
        Of v's type.

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
    (P, _), (v, restore) = interchange.take("P", P), interchange.take("v", v)
    _check_float32("P", P)
    dtype = checks.check_dtype(v, v, v)
    if P.ndim != 4 or v.ndim != 4 or P.shape[0] != v.shape[0] or P.shape[3] != v.shape[2]:
        raise ValueError(
            "P (batch, heads, len_q, len_kv) and v (batch, heads_kv, len_kv, head_dim) must agree "
            f"on batch and len_kv, got P.shape={P.shape} v.shape={v.shape}"
        )
    q_shape = (*P.shape[:3], v.shape[3])
    sizes = limits.check_shapes(q_shape, v.shape, v.shape)
    xp, backend = array_namespace(P, v), target.choose(None, v)
    if backend == "mirror":
        return restore(mirror.weighted_sum_mirror(P, v))
    call = AttentionSpec(*sizes, dtype, 1.0)
    v = interchange.contiguous_last_axis(v)
    with memory.on_device_of(v):
        o = xp.empty(q_shape, v.dtype)
        S = memory.as_input(xp.ascontiguousarray(P))
        _run("weighted_sum", backend, call, {"v": v, "o": o}, {"S": S})
    return restore(o)


def _check_float32(name: str, array: Any) -> None:
    if str(array.dtype) != "float32":
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    if array.ndim != 4:
        raise ValueError(
            f"{name} must have four axes (batch, heads, len_q, len_kv), got shape {array.shape}"
        )


def _run(
    step: str,
    backend: str,
    call: AttentionSpec,
    operands: dict[str, Any],
    others: dict[str, Any],
) -> None:
    """Run one kernel of ``attn_unfused.cu``."""
    described = {name: Operand.of(array) for name, array in operands.items()}
    kernel = settle(ladder.lookup("unfused"), call)
    plan = attention.plan_unfused_step(step, kernel, described)
    inputs = {name: memory.as_input(operands[name]) for name in operands if name != "o"}
    run.run(backend, plan, {**operands, **inputs, **others})
