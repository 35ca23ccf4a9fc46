"""`cupyattn.interop.jax` on the device: XLA's buffers and stream, and the bits of CuPy's calls."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from tests.support.runs import bits

cupy = pytest.importorskip("cupy")
# Most of a device's memory otherwise, which tests in other processes need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax")
jnp = jax.numpy

try:
    DEVICE = jax.devices("gpu")[0]
except RuntimeError:
    pytest.skip("JAX has no CUDA here", allow_module_level=True)

from cupyattn.interop import jax as interop  # noqa: E402 - imports jax


def operands(dtype: str = "float16", length: int = 333, front: tuple[int, ...] = ()) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(*front, 2, heads, length, 64) for heads in (4, 2, 2)]
    made = [jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes, strict=True)]
    return jax.device_put(made, DEVICE)


def on_cupy(*arrays: Any) -> list[Any]:
    return [cupy.from_dlpack(x) for x in jax.block_until_ready(arrays)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["auto", "fa_int8"])
def test_jit_has_the_bits_of_the_same_call_on_cupy_arrays(variant: str, dtype: str) -> None:
    q, k, v = operands(dtype)
    options = {"variant": variant, "causal": True, "return_lse": True}
    found = jax.jit(lambda *x: interop.attention(*x, **options))(q, k, v)
    assert all(x.devices() == {DEVICE} for x in found)
    expected = ca.attention(*on_cupy(q, k, v), **options)
    assert [bits(x) for x in on_cupy(*found)] == [bits(x) for x in expected]


def test_kernels_wait_for_what_xla_computes_before_and_xla_for_them() -> None:
    """A long product before, a use after, many times over: all on one stream."""
    q, k, v = operands(length=1024)
    big = jax.device_put(jnp.eye(4096, dtype=jnp.float32), DEVICE)

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        late = q * (big @ big @ big @ big)[0, 0].astype(q.dtype)
        return interop.attention(late, k, v) + interop.attention(q, k, v)

    first = call(q, k, v)
    o = ca.attention(*on_cupy(q, k, v))
    assert bits(on_cupy(first)[0]) == bits(o + o)
    for _ in range(50):
        assert bool((call(q, k, v) == first).all())


def test_operands_are_not_written_to_and_turned_ones_are_copied() -> None:
    q, k, v = operands()
    turned = jax.jit(lambda x: x.swapaxes(2, 3))(k)
    before = [bits(x) for x in on_cupy(q, turned, v)]
    o = jax.jit(lambda q, t, v: interop.attention(q, t.swapaxes(2, 3), v))(q, turned, v)
    assert bits(on_cupy(o)[0]) == bits(ca.attention(*on_cupy(q, k, v)))
    assert [bits(x) for x in on_cupy(q, turned, v)] == before


def test_grad_is_deterministic_and_has_the_bits_of_the_backward_pass() -> None:
    q, k, v = operands("bfloat16")
    d_out = jax.random.normal(jax.random.key(9), q.shape).astype(q.dtype)

    def loss(*x: Any) -> Any:
        o = interop.attention(*x, variant="fa_tc", causal=True, deterministic=True)
        return (o * d_out).astype("float32").sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    host, options = on_cupy(q, k, v), {"causal": True}
    o, lse = ca.attention(*host, variant="fa_tc", return_lse=True, **options)
    expected = ca.attention_backward(*on_cupy(d_out), *host, o, lse, deterministic=True, **options)
    assert [bits(x) for x in on_cupy(*found)] == [bits(x) for x in expected]


def test_vmap_is_one_call_on_a_larger_batch() -> None:
    q, k, v = operands(front=(3,))
    call = jax.jit(jax.vmap(interop.attention, in_axes=(0, 0, None)))
    o = on_cupy(call(q, k, v[0]))[0]
    every = (x.reshape(-1, *x.shape[2:]) for x in on_cupy(q, k, jnp.stack([v[0]] * 3)))
    assert bits(o.reshape(-1, *o.shape[2:])) == bits(ca.attention(*every))


def test_a_failure_has_its_message() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="backend='mirror' takes NumPy"):
        jax.block_until_ready(interop.attention(*operands(), backend="mirror"))
    assert np.isfinite(np.asarray(interop.attention(*operands()))).all()
