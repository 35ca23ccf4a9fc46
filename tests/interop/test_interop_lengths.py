"""Padded batches with lengths of their entries, as torch and JAX bring them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import attention
from cupyattn.errors import UnsupportedError
from tests.support.padded import LENGTHS, NAMES, SIZES, padded
from tests.support.runs import bits

pytestmark = pytest.mark.frameworks


def mirrored() -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Return operands, lengths, and O and lse of `cupyattn.attention`."""
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    return inputs, lengths, attention(*inputs, causal=True, return_lse=True, **lengths)


def tensors(arrays: Any) -> Any:
    import torch

    return [torch.from_numpy(x) for x in arrays]


def named(arrays: Any) -> dict[str, Any]:
    return dict(zip(NAMES, arrays, strict=True))


def test_tensors_and_modules_of_them() -> None:
    pytest.importorskip("torch")
    from cupyattn.interop import torch as interop

    inputs, lengths, expected = mirrored()
    q, k, v = tensors(inputs)
    layer = interop.Attention(causal=True, return_lse=True, backend="mirror")
    for dtype in (np.int32, np.int64):
        own = named(tensors(x.astype(dtype) for x in lengths.values()))
        for found in (
            interop.attention(q, k, v, causal=True, return_lse=True, backend="mirror", **own),
            layer(q, k, v, **own),
        ):
            assert [bits(x) for x in found] == [bits(x) for x in expected]


def test_the_operator_and_a_mapped_axis() -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop import torch as interop

    inputs, lengths, expected = mirrored()
    layer = interop.Attention(causal=True, backend="mirror")
    given = *tensors(inputs), *tensors(lengths.values())

    def call(q: Any, k: Any, v: Any, lengths_q: Any, lengths_kv: Any) -> Any:
        return layer(q, k, v, lengths_q=lengths_q, lengths_kv=lengths_kv)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert bits(compiled(*given)) == bits(expected[0])
    twice = [torch.stack([x, x]) for x in given]
    assert bits(torch.func.vmap(call)(*twice)) == bits(np.stack([expected[0]] * 2))
    axes = (0, 0, 0, None, None)
    assert bits(torch.func.vmap(call, axes)(*twice[:3], *given[3:])) == bits(
        np.stack([expected[0]] * 2)
    )


def test_no_gradient_beside_lengths() -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop import torch as interop

    inputs, lengths, _ = mirrored()
    q, k, v = tensors(inputs)
    own = {"lengths_kv": torch.from_numpy(lengths["lengths_kv"])}
    with pytest.raises(UnsupportedError, match="derivative beside lengths_kv is not implemented"):
        interop.attention(q.requires_grad_(), k, v, backend="mirror", **own)
    with pytest.raises(TypeError, match="argument 'lengths_kv' must be Tensor, not list"):
        interop.attention(q.detach(), k, v, lengths_kv=[1] * 5)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    from cupyattn.interop import jax as interop

    inputs, lengths, expected = mirrored()
    given = *map(jax.numpy.asarray, inputs), *map(jax.numpy.asarray, lengths.values())

    def call(q: Any, k: Any, v: Any, lengths_q: Any, lengths_kv: Any) -> Any:
        return interop.attention(q, k, v, causal=True, lengths_q=lengths_q, lengths_kv=lengths_kv)

    assert bits(np.asarray(jax.jit(call)(*given))) == bits(expected[0])
    twice = [jax.numpy.stack([x, x]) for x in given]
    found = jax.vmap(call, (0, 0, 0, 0, None))(*twice[:4], given[4])
    assert bits(np.asarray(found)) == bits(np.stack([expected[0]] * 2))
    with pytest.raises(UnsupportedError, match="the backward pass takes no lengths_q or lengths"):
        jax.grad(lambda q: call(q, *given[1:]).astype("float32").sum())(given[0])
