"""Code that tests of cupyattn.interop.torch share, on CPU tensors and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import as_float64
from cupyattn.bounds import kernel as bounds
from cupyattn.gradients import backward_bound
from tests.support.runs import column_tables, normal

#: Options of `attention`, by what they are about; arrays are NumPy's.
Options = dict[str, Any]


def options_of(len_q: int, len_kv: int, head_dim: int, heads: int) -> dict[str, Options]:
    """Return options that change a call in every way, for tensors of these sizes."""
    rng = np.random.default_rng(5)
    angles = rng.uniform(0, 6, (max(len_q, len_kv) + 3, head_dim // 2))
    weights = rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32)
    return {
        "plain": {},
        "causal": {"causal": True},
        "top-left": {"causal": True, "causal_align": "top-left", "scale": 0.3},
        "window": {"window": (7, 3), "softcap": 5.0},
        "mask": {"mask": rng.random((heads, len_q, len_kv)) < 0.7},
        "bias": {"bias": rng.standard_normal((len_q, len_kv)).astype(np.float32)},
        "rope": {
            "rope": (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)),
            "rope_offset_q": 3, "rope_interleaved": True,
        },
        "rope by column": {"rope": column_tables(max(len_q, len_kv), head_dim)},
        "qk_norm": {"qk_norm": (weights[0], weights[1]), "qk_norm_eps": 1e-5},
    }  # fmt: skip


def problem(
    dtype: str, *, heads: int = 4, heads_kv: int = 2, len_q: int = 33, len_kv: int = 70
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k and v of N(0, 1), with grouped heads and lengths that no tile divides."""
    return normal((2, heads, len_q, 16), (2, heads_kv, len_kv, 16), dtype)


def through_the_forward_pass(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any
) -> dict[str, Any]:
    """Bound the gradients that autograd returns against those in exact arithmetic.

    `backward_bound` is about the O and lse that the kernels receive. These are off by at most e and
    f (`cupyattn.bounds`), so that what they make of P and Delta = rowsum(dO O) is off by

        |P' - P| <= P (e^f - 1) =: p        |Delta' - Delta| <= rowsum(|dO| e) =: d

    and dS = P (dP - Delta) by at most ``p (|dP - Delta| + d) + P d``. dV, dQ and dK are sums of P
    and dS with operands, and take these errors by their magnitudes.
    """
    kernel = backward_bound(d_out, q, k, v, out, lse, **options)
    forward = bounds.attention(q, k, v, variant="fa_tc", **options)
    heads_kv, head_dim = k.shape[1], q.shape[-1]
    sigma = options.get("scale") or head_dim**-0.5
    # Query heads by the key head that they share; one further axis in front of k and v.
    q, d_out, o_error = (split_heads(as_float64(x), heads_kv) for x in (q, d_out, forward.total))
    f = split_heads(forward.lse[..., None], heads_kv)
    k, v = (as_float64(x)[:, :, None] for x in (k, v))
    scores = sigma * q @ k.swapaxes(-1, -2)
    if options.get("causal"):
        i, j = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        shift = 0 if options.get("causal_align") == "top-left" else j.size - i.size
        scores = np.where(j <= i + shift, scores, -np.inf)
    P = np.exp(scores - scores.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    dP = d_out @ v.swapaxes(-1, -2)
    delta = (P * dP).sum(-1, keepdims=True)
    p, d = P * np.expm1(f), (abs(d_out) * o_error).sum(-1, keepdims=True)
    dS = p * (abs(dP - delta) + d) + P * d
    summed = {
        "dq": merge_heads(sigma * dS @ abs(k)),
        "dk": sigma * (dS.swapaxes(-1, -2) @ abs(q)).sum(axis=2),
        "dv": (p.swapaxes(-1, -2) @ abs(d_out)).sum(axis=2),
    }
    return {name: kernel.total(name) + x for name, x in summed.items()}


def tensor(x: Any) -> Any:
    """Return a tensor of an array's numbers; other things as they are."""
    from cupyattn.interop.torch import bridge

    if isinstance(x, tuple) and x and isinstance(x[0], np.ndarray):
        return tuple(map(tensor, x))
    if not isinstance(x, np.ndarray):
        return x
    return bridge.as_tensor(x.copy())


def tensors(options: Options) -> Options:
    return {name: tensor(x) for name, x in options.items()}


def leaves(*inputs: np.ndarray) -> list[Any]:
    return [tensor(x).requires_grad_() for x in inputs]


def array(x: Any) -> np.ndarray:
    from cupyattn.interop.torch import bridge

    found: np.ndarray = bridge.as_array(x)
    return found


def same_bits(x: Any, y: np.ndarray) -> bool:
    x = array(x)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def at_odd_address(x: Any) -> Any:
    """Return a copy of a CPU tensor whose address is one byte past a multiple of 16."""
    import torch

    memory = bytearray(x.numel() * x.element_size() + 32)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 16 + 1
    moved = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start)
    return moved.reshape(x.shape).copy_(x)


def compiled(function: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    """Compile a function or a module anew, into one graph."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)
