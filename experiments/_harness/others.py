"""Other libraries' attention as cells of an experiment, and how a time compares with theirs.

All of them round P to 16 bits and accumulate in float32, as fa_tc does: its bound is theirs. Each
takes part where it can be had.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cupyattn as ca
from cupyattn.measure import timing
from experiments._harness.cells import Cell, Problem

FLASH_2, CUDNN = "torch SDPA, FlashAttention-2", "torch SDPA, cuDNN"
FLASH_3, FLASH_4 = "FlashAttention-3", "FlashAttention-4"
#: Rivals of fa_tc on Hopper, for which FlashAttention-2 was not written.
RIVALS = (CUDNN, FLASH_3)
#: Variable with the path of vLLM's FlashAttention-3 extension (``_vllm_fa3_C.abi3.so``).
FLASH_3_LIBRARY = "CUPYATTN_FA3"


def sdpa(problem: Problem) -> list[Cell]:
    """Return torch's attention with two of its backends; nothing where torch is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []

    def cell(name: str, backend: Any) -> Cell:
        def run(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal
                )

        def prepare(*arrays: Any) -> tuple[Any, ...]:
            return tuple(torch.from_dlpack(array) for array in arrays)

        return _cell(name, run, prepare)

    return [cell(FLASH_2, SDPBackend.FLASH_ATTENTION), cell(CUDNN, SDPBackend.CUDNN_ATTENTION)]


def flash_attention_4() -> Callable[..., Any] | None:
    """Return the function of FlashAttention-4, of layout BSHD; None where it cannot be imported."""
    try:
        found: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return None
    return found


def flash_attention_3(problem: Problem) -> list[Cell]:
    """Return FlashAttention-3 in its packed form; nothing where its extension is not named.

    The rows are packed beforehand: only the kernel is timed.
    """
    if not load_flash_3():
        return []
    import torch

    batch, heads, len_q, head_dim = (
        problem.batch, problem.heads, problem.length, problem.head_dim,
    )  # fmt: skip

    def prepare(*arrays: Any) -> tuple[Any, ...]:
        packed = [torch.from_dlpack(x).transpose(1, 2).reshape(-1, heads, head_dim) for x in arrays]
        return (*(x.contiguous() for x in packed), *packed_ends(problem, packed[0]))

    def run(q: Any, k: Any, v: Any, *ends: Any) -> Any:
        out = flash_attention_3_forward(problem, (q, k, v), ends, torch.empty_like(q))
        return out.view(batch, len_q, heads, head_dim).transpose(1, 2)

    return [_cell(FLASH_3, run, prepare)]


def packed_ends(problem: Problem, like: Any) -> tuple[Any, Any]:
    """Return where the packed sequences of queries and of keys end, on the device of a tensor."""
    import torch

    ends_q, ends_kv = (
        torch.arange(0, (problem.batch + 1) * length, length, dtype=torch.int32, device=like.device)
        for length in (problem.length, problem.len_kv)
    )
    return ends_q, ends_kv


def flash_attention_3_forward(
    problem: Problem,
    operands: Sequence[Any],
    ends: Sequence[Any],
    out: Any,
    descale: Sequence[Any] = (None, None, None),
) -> Any:
    """Return O of FlashAttention-3's kernel.

    Parameters
    ----------
    problem : Problem
    operands : three torch.Tensor, (batch x length, heads, head_dim)
        Packed Q, K and V.
    ends : two torch.Tensor
        Of `packed_ends`.
    out : torch.Tensor
        Where O goes.
    descale : three torch.Tensor or None, (batch, heads)
        What a code of 1 stands for, of e4m3 operands.
    """
    import torch

    # q, k, v. k_new, v_new, q_v. out. Ends of q, of k, of k_new. Used lengths of q, of k.
    # Longest q, longest k. Page table, batch indices, left padding. Rotary cos, sin, lengths.
    # Scales of q, k, v. Scale, causal, window, softcap. Rotary interleaved.
    # Scheduler, splits, packing, SM margin, sink. Context parallel.
    o, *_ = torch.ops._vllm_fa3_C.fwd(
        *operands, None, None, None, out, *ends, None, None, None,
        problem.length, problem.len_kv, None, None, None, None, None, None, *descale,
        problem.head_dim**-0.5, problem.causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0,
        None,
    )  # fmt: skip
    return o


def load_flash_3() -> bool:
    """Load FlashAttention-3's extension; return whether it is named."""
    library = os.environ.get(FLASH_3_LIBRARY)
    if not library:
        return False
    import torch

    torch.ops.load_library(library)
    return True


def _cell(name: str, run: Callable[..., Any], prepare: Callable[..., tuple[Any, ...]]) -> Cell:
    return Cell(name, "fa_tc", refusing(name, run), prepare, peer=True)


def refusing(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a library's call so that its refusals are UnsupportedError."""

    def checked(*prepared: Any) -> Any:
        try:
            return run(*prepared)
        # "No available kernel", "head_size should be ...", "Unsupported head_dim: 256"
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ca.UnsupportedError(f"{name}: {error}") from error

    return checked


# ---- how a time compares -------------------------------------------------------------------------


def fastest(
    rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the row of the least time among those named; None where none has a time."""
    timed = [rows[name] for name in names if "seconds" in rows.get(name, {})]
    return min(timed, key=lambda row: float(row["seconds"]), default=None)


def ratio(over: Mapping[str, Any] | None, under: Mapping[str, Any] | None) -> list[float] | None:
    """Return how much faster `under` is than `over`, with its interval; None without both times."""
    if over is None or under is None or "samples" not in over or "samples" not in under:
        return None
    return timing.paired_ratio(over["samples"], under["samples"]).to_list()


def format_comparison(value: Sequence[float] | None) -> str:
    """Return what `ratio` found as text.

    Examples
    --------
    >>> format_comparison([1.05, 1.0, 1.125]), format_comparison(None)
    ('1.050 [1.000, 1.125]', '-')
    """
    return "-" if value is None else "{:.3f} [{:.3f}, {:.3f}]".format(*value)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of at least one ratio.

    Examples
    --------
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(x) for x in ratios]
    return math.exp(sum(logs) / len(logs))
