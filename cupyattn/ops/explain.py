"""Descriptions of the kernels and launches of a call, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cupyattn.kernels.features import BY_COLUMN
from cupyattn.ops.attention import ATTENTION, resolved
from cupyattn.ops.backward import plan_of, resolved_backward
from cupyattn.plans.records import Plan
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.settings import CallOptions, Unpack, takes_options


@explains_foreign_arguments
@takes_options
def explain(q: Any, k: Any = None, v: Any = None, **options: Unpack[CallOptions]) -> str:
    """Describe the call of `attention` with the same arguments, without running it.

    Parameters
    ----------
    q, k, v, **options
        As for `attention`, or with `cu_seqlens_q` and `cu_seqlens_k` for `attention_varlen`.

    Returns
    -------
    str
        The rung and the reason, its device, the sizes, and the results of earlier passes with their
        bytes. For every plan: form, tiles, features, launches with grid and block, workspace bytes.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 4, 8), np.float16)
    >>> print(explain(q, q, q).splitlines()[0])
    fa_tc: the fastest rung of accuracy class 'full' for float16, by rule: no times without a device
    """
    problem = resolved(q, k, v, function="explain", **options)
    where = {
        "cuda": "runs on the device",
        "mirror": "runs in NumPy, with the blocks and the rounding of these launches",
        "interpret": "runs these launches in the interpreter, on NumPy",
    }
    lines = [f"{problem.variant.name}: {problem.why}", where[problem.backend]]
    if problem.backend != "cuda":
        lines[1] += f", within the limits of {problem.limited_by}"
    lines += [_sizes(problem), *score_lines(problem, options)]
    found = ATTENTION.plan(problem)
    return "\n".join([*lines, *found.memory, *map(str, found.plans)])


def _sizes(problem: AttentionProblem) -> str:
    """Return which size is taken for what: arrays with their axes swapped may be no error."""
    call = problem.call
    longest = ", the lengths of the longest sequences" if call.packed else ""
    return (
        f"sizes: batch={call.batch}, heads={call.heads}, heads_kv={call.heads_kv}, "
        f"len_q={call.len_q}, len_kv={call.len_kv}, head_dim={call.head_dim}{longest}"
    )


def score_lines(problem: AttentionProblem, options: Mapping[str, Any]) -> list[str]:
    """Describe changes of the scores and of the rows of Q and K, a line each.

    `options` are the options of the call.
    """
    call, said = problem.call, []
    if call.causal or call.window:
        own = call.own_lengths
        aligned = own is not None and own.bottom_right
        row = "i + len_kv - len_q " if aligned else "i"
        ends = [f"{row}{call.window_shift:+d} <= j"] if call.window else []
        ends += [f"j <= {row}{call.causal_shift:+d}"] if call.causal else []
        where = " of its sequence" if call.packed else " of its entry" if call.padded else ""
        said += [f"row i attends key j{where} where {' and '.join(ends)}"]
    if call.padded is not None:
        named = " and ".join(name for name in call.lengths_in.values() if name)
        said += [f"rows of an entry count up to its {named}"]
    said += [f"softcap {call.softcap:g}"] if call.softcap else []
    for name in ("mask", "bias"):
        array = options.get(name)
        if array is not None:
            padded = problem.operands[name].is_padded
            copied = ", copied into rows of whole 16 bytes" if padded else ""
            said += [f"{name} of shape {tuple(array.shape)}{copied}"]
    block_mask = options.get("block_mask")
    if block_mask is not None:
        said += [
            f"block mask of {block_mask.block_q} x {block_mask.block_kv} blocks, "
            f"{block_mask.density:.1%} of them kept"
        ]
    lines = ["scores: " + "; ".join(said)] if said else []
    where = problem.prepared_when
    if call.qk_norm:
        norm = problem.preparation and problem.preparation.norm
        by_token = norm is not None and norm.by_token
        whose = "the root mean square of all heads" if by_token else "their root mean square"
        parts = f", with other weights from row {norm.split} on" if norm and norm.split else ""
        lines += [f"qk_norm: rows of q and k are divided by {whose} {where}{parts}"]
    if call.rope:
        pairing = call.rope.removesuffix(BY_COLUMN)
        numbers = "" if pairing == call.rope else ", by a cosine and a sine for each"
        lines += [
            f"rope: {pairing.replace('_', '-')} channels of q and k are turned {where}{numbers}; "
            f"query row i has the position i+{call.rope_offset_q}"
        ]
    if problem.preparation is not None and problem.preparation.rotate:
        lines += [f"rotate: rows of q and k are multiplied by a Hadamard matrix {where}"]
    return lines


def plans(problem: AttentionProblem) -> list[Plan]:
    """Plan a call from shapes and strides alone: the quantising passes, then attention."""
    return ATTENTION.plan(problem).plans


@explains_foreign_arguments
@takes_options
def kernel_form(
    q: Any, k: Any = None, v: Any = None, **options: Unpack[CallOptions]
) -> dict[str, Any]:
    """Return which form of a rung `attention` runs with the same arguments, and on which tiles.

    Parameters
    ----------
    q, k, v, **options
        As for `attention`, or with `cu_seqlens_q` and `cu_seqlens_k` for `attention_varlen`;
        ``variant="auto"`` included.

    Returns
    -------
    dict
        ``form``, a str, and ``tiles``, a `Tiles`: keywords of `cupyattn.testing.judge` and
        `cupyattn.bounds.attention`, whose default is a portable form. `explain` says why this form
        runs. With ``variant="auto"``, `judge` finds both itself.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = np.ones((1, 1, 4, 8), np.float16)
    >>> form = ca.kernel_form(q, q, q, variant="fa_tc")
    >>> form["form"], form["tiles"].block_q
    ('portable', 128)
    >>> o = ca.attention(q, q, q, variant="fa_tc")
    >>> ca.testing.judge(o, q, q, q, variant="fa_tc", **form).passed
    True
    """
    kernel = resolved(q, k, v, function="kernel_form", **options).kernel
    return {"form": kernel.form, "tiles": kernel.tiles}


@explains_foreign_arguments
def explain_backward(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> str:
    """Describe the call of `attention_backward` with the same arguments, without running it.

    Parameters
    ----------
    d_out, q, k, v, out, lse, **options
        As for `attention_backward`, or with `cu_seqlens_q` and `cu_seqlens_k` for
        `attention_varlen_backward`.

    Returns
    -------
    str
        The form and the reason, changes of the scores, and the plan: tiles, launches, workspace.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention_backward`.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> x = np.ones((1, 1, 4, 8), np.float16)
    >>> o, lse = ca.attention(x, x, x, return_lse=True)
    >>> print(ca.explain_backward(x, x, x, x, o, lse).splitlines()[0])
    atomic: blocks of keys add up dQ in memory; deterministic=True has the same bits on every run
    """
    deterministic = options.get("deterministic")
    problem = resolved_backward("explain_backward", d_out, q, k, v, out, lse, options)
    plan = plan_of(problem)
    if plan.form.endswith("atomic"):
        why = (
            "blocks of keys add up dQ in memory; deterministic=True has the same bits on every run"
        )
    else:
        in_turns = any(work.name == "turns" for work in plan.workspace)
        how = "blocks of keys take turns at dQ" if in_turns else "a separate kernel makes dQ"
        reason = "past head_dim 128 Hopper has no other form"
        if deterministic:
            reason = "asked for"
        elif in_turns:
            reason = "faster here"
        why = f"{reason}; {how}"
    forward = replace(problem.settled.forward, operands=problem.operands)
    lines = score_lines(forward, options)
    return "\n".join([f"{plan.form}: {why}", *lines, str(plan)])
