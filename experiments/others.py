"""Other libraries' attention as cells of an experiment, each where it can be had.

All of them round P to 16 bits and accumulate in float32, as fa_tc does: its bound is theirs.
"""

from __future__ import annotations

import os
from typing import Any

import cupyattn as ca
from experiments.common import Cell, Problem

FLASH_2, CUDNN = "torch SDPA, FlashAttention-2", "torch SDPA, cuDNN"
FLASH_3 = "FlashAttention-3"
#: Where the FlashAttention-3 extension of vLLM lies (``_vllm_fa3_C.abi3.so``).
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
            try:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=problem.causal
                    )
            except RuntimeError as error:  # "No available kernel"
                raise ca.UnsupportedError(f"{name}: {error}") from error

        def prepare(*arrays: Any) -> tuple[Any, ...]:
            return tuple(torch.from_dlpack(array) for array in arrays)

        return Cell(name, "fa_tc", run, prepare, peer=True)

    return [cell(FLASH_2, SDPBackend.FLASH_ATTENTION), cell(CUDNN, SDPBackend.CUDNN_ATTENTION)]


def flash_attention_3(problem: Problem) -> list[Cell]:
    """Return FlashAttention-3 in its packed form; nothing where its extension is not named.

    The rows are packed beforehand: only the kernel is timed.
    """
    library = os.environ.get(FLASH_3_LIBRARY)
    if not library:
        return []
    import torch

    torch.ops.load_library(library)
    batch, heads, length, head_dim = (
        problem.batch, problem.heads, problem.length, problem.head_dim,
    )  # fmt: skip

    def prepare(*arrays: Any) -> tuple[Any, ...]:
        packed = [
            torch.from_dlpack(x).transpose(1, 2).reshape(batch * length, heads, head_dim)
            for x in arrays
        ]
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device="cuda")
        return (*(x.contiguous() for x in packed), ends)

    def run(q: Any, k: Any, v: Any, ends: Any) -> Any:
        # k_new, v_new, q_v | out | ends of q, of k, of k_new | lengths used of q, of k
        # | longest q, longest k | page table, batch indices, left padding
        # | rotary cos, sin, lengths | scales of q, k, v | scale, causal, window, softcap
        # | rotary interleaved | scheduler, splits, packing, SM margin, sink | context parallel
        out, *_ = torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, torch.empty_like(q), ends, ends, None, None, None,
            length, length, None, None, None, None, None, None, None, None, None,
            head_dim**-0.5, problem.causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out.view(batch, length, heads, head_dim).transpose(1, 2)

    return [Cell(FLASH_3, "fa_tc", run, prepare, peer=True)]
