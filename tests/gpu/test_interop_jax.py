"""`cupyattn.interop.jax` on the device: XLA's buffers and stream, and the bits of CuPy's calls."""

from __future__ import annotations

import os
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn.ops import attention as api
from cupyattn.ops.attention import resolved
from cupyattn.runtime.recent import CALLS
from tests.support.resolved import watch_calls, watch_running
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


def test_an_eager_call_is_resolved_the_first_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs; later calls are known, and not checked by shapes either."""
    CALLS.clear()
    resolved = watch_running(monkeypatch)
    checked = watch_calls(monkeypatch, (api, "described"))
    for _ in range(3):
        jax.block_until_ready(interop.attention(*operands(), causal=True))
        assert resolved == ["attention"] and checked == ["described"]


def test_a_failure_has_its_message() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="backend='mirror' takes NumPy"):
        jax.block_until_ready(interop.attention(*operands(), backend="mirror"))
    assert np.isfinite(np.asarray(interop.attention(*operands()))).all()


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "fa_tc", "tiles": ca.Tiles(33, 64, 4)},
        {"variant": "fa_tc", "tiles": ca.Tiles(64, 64, 4), "arch": "sm_90a"},
        {"return_lse": 1},
        {"variant": "fa_int8", "quant": ca.QuantConfig(
            "head", "head", scales=(np.full((1, 3, 1), 0.1, np.float32),) * 2
        )},
    ],
)  # fmt: skip
def test_a_refusal_has_the_sentence_of_the_call_on_cupy_arrays(options: dict[str, Any]) -> None:
    q, k, v = operands()
    with pytest.raises((TypeError, ValueError)) as expected:
        ca.attention(*on_cupy(q, k, v), **options)
    with pytest.raises(expected.type) as found:
        jax.jit(lambda *x: interop.attention(*x, **options)).trace(q, k, v)
    assert str(found.value) == str(expected.value)


def test_given_scales_of_blocks_are_those_of_the_device() -> None:
    """The number of blocks is known when the call runs."""
    inputs = on_cupy(*operands())
    dynamic = {"variant": "fa_int8", "quant": ca.QuantConfig("block", "block")}
    tiles = resolved(*inputs, **dynamic).scale_tiles
    groups = (-(-333 // n) for n in (tiles.block_q, tiles.block_kv))
    scales = tuple(
        np.full((1, heads, n), 0.05, np.float32) for heads, n in zip((4, 2), groups, strict=True)
    )
    options = {**dynamic, "quant": ca.QuantConfig("block", "block", scales=scales)}
    (found,) = on_cupy(interop.attention(*operands(), **options))
    assert bits(found) == bits(ca.attention(*inputs, **options))


# ---- linear layers -------------------------------------------------------------------------------

#: Ways to make a layer of a weight.
LAYERS: dict[str, dict[str, Any]] = {
    "block": {},
    "channel": {"strategy": "channel"},
    "outliers": {"outlier_columns": [3, 700]},
}


def layer_operands(dtype: str, rows: tuple[int, ...] = (2, 150)) -> list[Any]:
    """A weight, a bias and activations, on the device."""
    keys = jax.random.split(jax.random.key(1), 3)
    made = (jax.random.normal(k, s) for k, s in zip(keys, ((304, 1024), (304,), (*rows, 1024)),
                                                    strict=True))  # fmt: skip
    return jax.device_put([x.astype(dtype) for x in made], DEVICE)


def both_layers(weight: Any, bias: Any, **options: Any) -> tuple[Any, Any]:
    """A layer of JAX arrays, and the same of CuPy arrays."""
    ours = interop.Int8Linear.from_weight(weight, bias, **options)
    return ours, ca.Int8Linear.from_weight(*on_cupy(weight, bias), **options)


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_layer_has_the_bits_of_cupy_eager_and_under_jit(way: str, dtype: str) -> None:
    weight, bias, x = layer_operands(dtype)
    ours, core = both_layers(weight, bias, activation="gelu", **LAYERS[way])
    assert all(leaf.devices() == {DEVICE} for leaf in jax.tree.leaves(ours))
    expected = bits(core(*on_cupy(x)))
    call = jax.jit(lambda layer, x: layer(x))
    for _ in range(2):  # the second is a call that came again
        for y in (call(ours, x), ours(x)):
            assert y.devices() == {DEVICE} and y.dtype == x.dtype
            assert bits(on_cupy(y)[0]) == expected


@pytest.mark.parametrize("way", LAYERS)
def test_residual_and_gate_of_a_layer(way: str) -> None:
    weight, bias, x = layer_operands("bfloat16")
    ours, core = both_layers(weight, bias, **LAYERS[way])
    keys = jax.random.split(jax.random.key(2))
    shapes = ((*x.shape[:-1], 304), (2, 304))
    residual, gate = (
        jax.device_put(jax.random.normal(k, s).astype(x.dtype), DEVICE)
        for k, s in zip(keys, shapes, strict=True)
    )
    before = bits(on_cupy(residual)[0])
    y = jax.jit(lambda x, r, g: ours(x, residual=r, gate=g))(x, residual, gate)
    on_device = on_cupy(x, residual, gate)
    expected = core(on_device[0], residual=on_device[1], gate=on_device[2])
    assert bits(on_cupy(y)[0]) == bits(expected)
    assert bits(on_cupy(residual)[0]) == before


def test_a_layer_waits_for_what_xla_computes_before_and_xla_for_it() -> None:
    weight, bias, x = layer_operands("float16")
    ours, core = both_layers(weight, bias)
    big = jax.device_put(jnp.eye(4096, dtype=jnp.float32), DEVICE)

    @jax.jit
    def call(x: Any) -> Any:
        late = x * (big @ big @ big @ big)[0, 0].astype(x.dtype)
        return ours(late) + ours(x)

    first = call(x)
    y = core(*on_cupy(x))
    assert bits(on_cupy(first)[0]) == bits(y + y)
    for _ in range(50):
        assert bool((call(x) == first).all())


def test_a_layer_does_not_wait_for_the_device() -> None:
    """The call returns while the products before it still run, of 11 TFLOP in float32."""
    weight, bias, x = layer_operands("float16")
    ours, _ = both_layers(weight, bias)
    big = jax.device_put(jnp.ones((8192, 8192), jnp.float32), DEVICE)

    @jax.jit
    def long(big: Any, x: Any) -> Any:
        late = big
        for _ in range(10):
            late = (late @ big) * 0
        return x * (1 + late[0, 0].astype(x.dtype))

    call = jax.jit(ours)
    jax.block_until_ready(call(long(big, x)))
    start = time.perf_counter()
    late = long(big, x)
    y = call(late)
    handed_over = time.perf_counter() - start
    jax.block_until_ready(y)
    whole = time.perf_counter() - start
    assert handed_over < whole / 2


def test_vmap_of_a_layer_is_one_product_and_of_layers_one_for_each() -> None:
    weight, bias, x = layer_operands("float16", (3, 2, 150))
    ours, core = both_layers(weight, bias)
    together = jax.jit(jax.vmap(ours))(x)
    assert bits(on_cupy(together)[0]) == bits(core(*on_cupy(x)))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), ours)
    each = on_cupy(jax.jit(jax.vmap(lambda layer, x: layer(x)))(stacked, x))[0]
    for found, one in zip(each, on_cupy(x)[0], strict=True):
        assert bits(found) == bits(core(one))


@pytest.mark.parametrize("way", LAYERS)
def test_gradients_of_a_layer_are_those_of_its_weight(way: str) -> None:
    weight, bias, x = layer_operands("bfloat16")
    ours, core = both_layers(weight, bias, **LAYERS[way])
    d_y = jax.random.normal(jax.random.key(3), (*x.shape[:-1], 304)).astype(x.dtype)
    d_x = jax.jit(lambda x, d: jax.vjp(ours, x)[1](d)[0])(x, d_y)
    assert d_x.dtype == x.dtype and d_x.devices() == {DEVICE}
    w = ca.weight_dequant(core.codes, core.scales, strategy=core.strategy).get()
    if core.outlier_weight is not None:
        w[:, [3, 700]] = core.outlier_weight[:, :2].get().astype(np.float32)
    w = w.astype(ml_dtypes.bfloat16).astype(np.float64)
    wide = np.asarray(d_y).astype(np.float64)
    exact, size = wide @ w, abs(wide) @ abs(w)
    # 304 products in float32, in whatever order, then one rounding to bfloat16. XLA may leave out
    # that of the weight (xla_allow_excess_precision), at most 2^-8 of each.
    error = abs(np.asarray(d_x).astype(np.float64) - exact)
    assert (error <= 2.0**-8 * abs(exact) + (2.0**-8 + 305 * 2.0**-23) * size).all()


@pytest.mark.parametrize("way", LAYERS)
def test_a_bound_of_a_layer_on_the_device_is_an_array_of_the_callers_kind(way: str) -> None:
    weight, bias, x = layer_operands("float16")
    _, core = both_layers(weight, bias, **LAYERS[way])
    on_device, w = on_cupy(x, weight)
    host = ca.Int8Linear.from_weight(w.get(), np.asarray(bias), **LAYERS[way])
    expected = host.error(on_device.get(), w.get())
    found = core.error(on_device, w)
    assert isinstance(found, cupy.ndarray) and found.dtype == np.float64
    np.testing.assert_array_equal(found.get(), expected)
    y, bias_of_rows = core(on_device).astype(np.float64), on_cupy(bias)[0].astype(np.float64)
    exact = on_device.astype(np.float64) @ w.astype(np.float64).T + bias_of_rows
    assert isinstance(core.error(x, weight), jax.Array) and bool((abs(y - exact) <= found).all())
