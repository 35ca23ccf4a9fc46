"""`cupyattn.interop.jax`: the bits of `cupyattn.attention` under jit, grad and vmap; refusals."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.ops import attention as api
from cupyattn.ops import backward
from cupyattn.runtime.recent import CALLS
from tests.support.resolved import watch_calls, watch_running
from tests.support.runs import bits, column_tables

jax = pytest.importorskip("jax")
jnp = jax.numpy

from cupyattn.interop import jax as interop  # noqa: E402 - imports jax
from cupyattn.interop import xla_ffi  # noqa: E402 - as above
from cupyattn.interop.jax import calls, functional  # noqa: E402 - as above
from cupyattn.interop.jax import linear as layers  # noqa: E402 - as above

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV, HEAD_DIM = 2, 4, 2, 37, 70, 32


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(x.astype(STORAGE[dtype]))


def operands(dtype: str = "float16", seed: int = 0, front: tuple[int, ...] = ()) -> list[Any]:
    shapes = [(HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV)]
    return [
        normal((*front, BATCH, *shape, HEAD_DIM), dtype, seed + i) for i, shape in enumerate(shapes)
    ]


def on_host(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in arrays]


def added() -> dict[str, Any]:
    """A mask, a bias and tables, as JAX's arrays."""
    rng = np.random.default_rng(5)
    angles = np.arange(LEN_KV)[:, None] * 100.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    return {
        "mask": jnp.asarray(rng.random((LEN_Q, LEN_KV)) < 0.7),
        "bias": jnp.asarray(rng.standard_normal((HEADS, 1, LEN_KV)), jnp.float32),
        "rope": tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
    }


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(on_host(*x)) if isinstance(x, tuple) else np.asarray(x)
        for name, x in options.items()
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jit_has_the_bits_of_the_same_call_on_numpy_arrays(dtype: str) -> None:
    q, k, v = operands(dtype)
    call = jax.jit(lambda *x: interop.attention(*x, causal=True, return_lse=True))
    o, lse = call(q, k, v)
    expected = ca.attention(*on_host(q, k, v), causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == q.dtype and lse.dtype == jnp.float32
    assert [bits(x) for x in on_host(o, lse)] == [bits(x) for x in expected]


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "fa_int8", "quant": ca.QuantConfig(pv="int8", granularity_v="channel")},
        {"layout": "BSHD", "window": (9, 3), "softcap": 20.0, "scale": 0.3},
        {"block_mask": ca.BlockMask(np.array([[[[True, False]]]]), 64, 64)},
        added(),
        {"rope": tuple(map(jnp.asarray, column_tables(LEN_KV, HEAD_DIM)))},
        {"qk_norm": (jnp.ones(HEAD_DIM), jnp.ones((HEADS_KV, HEAD_DIM)))},
        {"qk_norm": tuple(jnp.ones(n * HEAD_DIM) for n in (HEADS, HEADS_KV))},
    ],
    ids=["int8", "scores", "blocks", "operands", "columns", "norm", "norm of tokens"],
)
def test_what_the_arguments_say_is_done(options: dict[str, Any]) -> None:
    q, k, v = operands()
    if options.get("layout") == "BSHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o = jax.jit(lambda *x: interop.attention(*x, **options))(q, k, v)
    arrays = {n: options[n] for n in ("mask", "bias", "rope", "qk_norm") if n in options}
    assert bits(np.asarray(o)) == bits(ca.attention(*on_host(q, k, v), **options | moved(arrays)))


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
@pytest.mark.parametrize("bias", ["float16", "bfloat16", "float32"])
def test_jit_takes_mask_bias_and_softcap(
    variant: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are operands of one compiled call; a mask of keys has one row for all queries."""
    shapes: list[tuple[int, ...]] = []
    own = functional.api.attention

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        shapes.append(options["mask"].shape)
        return own(q, k, v, **options)

    monkeypatch.setattr(functional.api, "attention", attention)
    traced: list[int] = []

    @jax.jit
    def call(q: Any, k: Any, v: Any, ends: Any, added: Any) -> Any:
        traced.append(1)
        mask = (jnp.arange(LEN_KV) < ends[:, None])[:, None, None]
        return interop.attention(q, k, v, mask=mask, bias=added, softcap=5.0, variant=variant)

    q, k, v = operands()
    for seed in range(2):
        ends, added = jnp.array([LEN_KV - seed, 9]), normal((HEADS, LEN_Q, LEN_KV), bias, seed)
        mask = (np.arange(LEN_KV) < np.asarray(ends)[:, None])[:, None, None]
        o = np.asarray(call(q, k, v, ends, added))
        given = {"mask": mask, "bias": np.asarray(added)}
        expected = own(*on_host(q, k, v), softcap=5.0, variant=variant, **given)
        assert bits(o) == bits(expected)
    assert shapes == [(BATCH, 1, 1, LEN_KV)] * 2 and len(traced) == 1


def test_an_operand_that_is_not_compact_is_copied_and_none_is_written_to() -> None:
    q, k, v = operands()
    turned = jax.jit(lambda x: x.swapaxes(2, 3))(k)
    before = [bits(x) for x in on_host(q, turned, v)]

    @jax.jit
    def call(q: Any, turned: Any, v: Any) -> Any:
        return interop.attention(q[:, :, ::-1], turned.swapaxes(2, 3), v)

    expected = ca.attention(np.asarray(q)[:, :, ::-1], *on_host(k, v))
    assert bits(np.asarray(call(q, turned, v))) == bits(expected)
    assert [bits(x) for x in on_host(q, turned, v)] == before


def test_xla_hands_over_its_own_buffers_and_they_cannot_be_written() -> None:
    """There is no copy: the addresses equal the addresses of JAX's arrays."""
    seen: list[tuple[int, bool]] = []

    def look(operands: Any, results: Any, attributes: Any) -> None:
        seen.extend((x.ctypes.data, x.flags.writeable) for x in operands)
        results[0][...] = 1

    version = xla_ffi.spoken_version(jax.ffi.include_dir())
    function = xla_ffi.handler(look, version, on_device=False)
    jax.ffi.register_ffi_target("cupyattn_test_look", jax.ffi.pycapsule(function), platform="cpu")
    x = jax.block_until_ready(jnp.zeros((64, 64), jnp.bfloat16))
    y = jax.ffi.ffi_call("cupyattn_test_look", jax.ShapeDtypeStruct((2,), jnp.float32))(x)
    assert y.tolist() == [1, 1]
    assert seen == [(x.unsafe_buffer_pointer(), False)]


def test_another_interface_of_xla_is_refused(tmp_path: Path) -> None:
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n\n#define XLA_FFI_API_MINOR 4\n")
    with pytest.raises(ca.UnsupportedError, match=r"speaks version 1\.4 of .* 0\.\* is supported"):
        xla_ffi.spoken_version(tmp_path)


def mapped(function: Callable[..., Any], arrays: list[Any], axes: tuple[Any, ...]) -> list[Any]:
    """The definition of `jax.vmap`: the function of each entry, stacked."""
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    entries = (
        [
            x if a is None else jnp.asarray(np.asarray(x).take(i, a))
            for x, a in zip(arrays, axes, strict=True)
        ]
        for i in range(size)
    )
    found = [on_host(*function(*entry)) for entry in entries]
    return [np.stack(parts) for parts in zip(*found, strict=True)]


TENSOR = ca.QuantConfig(granularity_q="tensor", granularity_k="tensor")


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ((0, 0, 0, None, None), {}),
        ((0, None, None, 0, None), {}),
        ((2, 1, 0, None, None), {"variant": "fa_int8"}),
        ((0, 0, 0, None, None), {"variant": "fa_int8", "quant": TENSOR}),
        ((0, None, 0, None, 0), {}),
    ],
    ids=["all", "some", "int8", "one-scale", "tables"],
)
def test_vmap_is_the_call_on_each_entry(axes: tuple[Any, ...], options: dict[str, Any]) -> None:
    q, k, v = operands(front=(3,))
    arrays = [x if a == 0 else x[0] if a is None else jnp.moveaxis(x, 0, a)
              for x, a in zip((q, k, v), axes, strict=False)]  # fmt: skip
    cos, sin = added()["rope"]
    mask = added()["mask"]
    cos, mask = np.asarray(cos), np.asarray(mask)
    arrays.append(jnp.asarray(mask if axes[3] is None else [mask, ~mask, mask[::-1]]))
    arrays.append(jnp.asarray(cos if axes[4] is None else [cos, cos * np.float32(0.5), -cos]))

    def call(q: Any, k: Any, v: Any, mask: Any, cos: Any) -> Any:
        given = {"rope": (cos, sin)} if axes[4] == 0 else {}
        return interop.attention(q, k, v, mask=mask, return_lse=True, **given, **options)

    together = jax.jit(jax.vmap(call, in_axes=axes))(*arrays)
    expected = mapped(call, arrays, axes)
    assert [bits(x) for x in on_host(*together)] == [bits(x) for x in expected]


def test_grad_has_the_bits_of_the_backward_pass() -> None:
    q, k, v = operands("bfloat16")
    weights = normal(q.shape, "float32", 9)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (
            interop.attention(q, k, v, causal=True, **added()).astype("float32") * weights
        ).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    host, d_out = on_host(q, k, v), np.asarray(weights.astype(q.dtype))
    options = {"causal": True, **moved(added())}
    o, lse = ca.attention(*host, return_lse=True, **options)
    expected = ca.attention_backward(d_out, *host, o, lse, **options)
    assert [bits(np.asarray(x)) for x in found] == [bits(x) for x in expected]


@pytest.mark.parametrize("of_o", [True, False])
def test_grad_goes_through_lse(of_o: bool) -> None:
    q, k, v = operands("bfloat16")

    def loss(q: Any, k: Any, v: Any) -> Any:
        o, lse = interop.attention(q, k, v, causal=True, return_lse=True)
        return 0.75 * lse.sum() + (o.astype("float32").sum() if of_o else 0)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    host = on_host(q, k, v)
    o, lse = ca.attention(*host, causal=True, return_lse=True)
    d_out, d_lse = np.full_like(o, of_o), np.full_like(lse, 0.75)
    expected = ca.attention_backward(d_out, *host, o, lse, d_lse=d_lse, causal=True)
    assert [bits(np.asarray(x)) for x in found] == [bits(x) for x in expected]


def test_grad_of_a_bias() -> None:
    """It has the bits of the backward pass, and mapped entries that share a bias have their own."""
    q, k, v = operands()
    bias = normal((LEN_Q, LEN_KV), "float32", 5)

    def loss(q: Any, bias: Any) -> Any:
        return interop.attention(q, k, v, bias=bias).astype("float32").sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, bias)
    host, of_bias = on_host(q, k, v), np.asarray(bias)
    o, lse = ca.attention(*host, bias=of_bias, return_lse=True)
    expected = ca.attention_backward(
        np.ones_like(o), *host, o, lse, bias=of_bias, grad_bias=True
    )
    assert bits(np.asarray(found[0])) == bits(expected[0])
    assert bits(np.asarray(found[1])) == bits(expected[3])
    each = jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None))(jnp.stack([q, q]), bias)
    assert [bits(np.asarray(x)) for x in each] == [bits(expected[3])] * 2


def test_grad_of_the_weights_of_a_norm() -> None:
    """It has the bits of the backward pass; mapped entries that share weights have their own."""
    q, k, v = operands()
    weights = normal((32,), "float32", 5), normal((q.shape[1], 32), "float16", 6)

    def loss(q: Any, *weights: Any) -> Any:
        return interop.attention(q, k, v, qk_norm=weights[::-1], qk_norm_eps=0.5).astype("f4").sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, *weights)
    host, (of_k, of_q) = on_host(q, k, v), on_host(*weights)
    options = {"qk_norm": (of_q, of_k), "qk_norm_eps": 0.5}
    o, lse = ca.attention(*host, return_lse=True, **options)
    expected = ca.attention_backward(np.ones_like(o), *host, o, lse, **options)
    for x, y in zip(found, (expected[0], expected[4], expected[3]), strict=True):
        assert bits(np.asarray(x)) == bits(y)
    each = jax.vmap(jax.grad(loss, argnums=2), in_axes=(0, None, None))(jnp.stack([q, q]), *weights)
    assert [bits(np.asarray(x)) for x in each] == [bits(expected[3])] * 2


@pytest.mark.slow
def test_grad_agrees_with_jax_itself() -> None:
    """That it is the gradient of this function; how exact it is, is tested elsewhere.

    Eight roundings to float16, each of 2^-11 at most, are 2^-8 of the norm.
    """
    q, k, v = (x[:, :2] for x in operands())
    d_out = normal(q.shape, "float16", 9)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return (interop.attention(q, k, v) * d_out).astype("float32").sum()

    def theirs(*x: Any) -> Any:
        q, k, v = (y.astype("float32").swapaxes(1, 2) for y in x)
        o = jax.nn.dot_product_attention(q, k, v).swapaxes(1, 2)
        return (o * d_out.astype("float32")).sum()

    found = jax.grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected = jax.grad(theirs, argnums=(0, 1, 2))(*(x.astype("float32") for x in (q, k, v)))
    for x, y in zip(found, expected, strict=True):
        difference = np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y))
        assert difference <= 2.0**-8 * np.linalg.norm(y)


def test_grad_of_vmap_and_vmap_of_grad() -> None:
    q, k, v = operands(front=(3,))
    k = k[0]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return interop.attention(q, k, v, window=(20, 20)).astype("float32").sum()

    axes = (0, None, 0)
    each = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=axes)(q, k, v)
    alone = mapped(jax.grad(loss, argnums=(0, 1, 2)), [q, k, v], axes)
    assert [bits(x) for x in on_host(*each)] == [bits(x) for x in alone]
    whole = jax.grad(lambda *x: jax.vmap(loss, in_axes=axes)(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    assert bits(np.asarray(whole[0])) == bits(np.asarray(each[0]))
    assert whole[1].shape == k.shape
    assert bits(np.asarray(whole[1])) == bits(np.asarray(each[1].sum(0)))


def test_nothing_is_computed_of_arrays_without_elements() -> None:
    q, k, v = operands()
    o, lse = interop.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not o.any() and bool((lse == -jnp.inf).all())
    assert interop.attention(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])


Q, K, V = operands()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: interop.attention(Q, K[:, :, :9], V), ValueError, "agree on length"),
        (lambda: interop.attention(Q, K, V.astype("float32")), TypeError, "dtype"),
        (lambda: interop.attention(Q, "k", V), TypeError, "k must be a JAX array, got str"),
        (lambda: interop.attention(Q, K, V, dropout=0.1), ca.UnsupportedError, "dropout"),
        (lambda: interop.attention(Q, K, V, out=Q), TypeError, "immutable"),
        (lambda: interop.attention(Q, K, V, check_finite=True), TypeError, "jax_debug_nans"),
        (lambda: interop.attention(Q, K, V, casual=True), TypeError, "'casual'"),
        (lambda: interop.attention(Q, K, V, rope=Q), TypeError, "rope must be a pair"),
        (lambda: interop.attention(Q, K, V, variant="fa9"), ValueError, "fa9"),
        (lambda: jax.jit(interop.attention)(Q, K, V[..., :8]), ca.UnsupportedError, "head_dim"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_so_while_it_is_traced(call: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def loss_of(**options: Any) -> Callable[..., Any]:
    return lambda x: interop.attention(x, x, x, **options).astype("float32").sum()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: jax.grad(loss_of())(Q.astype("float32")), "float16 and bfloat16"),
        (
            lambda: jax.grad(lambda c: interop.attention(Q, K, V, rope=(c, c)).sum())(
                jnp.ones((LEN_KV, HEAD_DIM // 2), jnp.float32)
            ),
            "respect to cos",
        ),
        (
            lambda: jax.grad(lambda x: jax.grad(loss_of())(x)[0, 0, 0, 0])(Q),
            "no second derivative: differentiate it once",
        ),
    ],
    ids=["float32", "tables", "second"],
)
def test_a_gradient_that_there_is_none_of_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ca.UnsupportedError, match=says):
        call()


def test_a_failure_of_the_call_itself_has_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may run the call, as far as tracing knows."""
    monkeypatch.setattr(jax, "devices", lambda _: ["a device"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: backend='cuda' takes CuPy"):
        jax.block_until_ready(interop.attention(Q, K, V, backend="cuda"))


# ---- checked and resolved ------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks by shapes and types alone, none of which was made before the test."""
    CALLS.clear()
    return watch_calls(
        monkeypatch, (api, "described"), (backward, "resolved_backward"),
        (layers, "check_product"),
    )  # fmt: skip


def test_an_eager_call_is_checked_and_resolved_once(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shapes before XLA has it, so that a refusal is an exception; on its buffers as it runs."""
    resolved = watch_running(monkeypatch)
    for turn in range(2):
        jax.block_until_ready(interop.attention(Q, K, V, causal=True))
        assert checked == ["described"] and resolved == ["attention"] * (turn + 1)
    jax.block_until_ready(interop.attention(*operands("bfloat16"), causal=True))
    assert len(checked) == 2 and len(resolved) == 3


def test_a_traced_call_is_resolved_when_it_runs(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = watch_running(monkeypatch)
    run = jax.jit(lambda *x: interop.attention(*x, causal=True)).lower(Q, K, V).compile()
    assert checked == ["described"] and not resolved
    jax.block_until_ready(run(Q, K, V))
    assert checked == ["described"] and resolved == ["attention"]


def test_an_eager_gradient_is_resolved_once(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass holds the record of its forward pass."""
    resolved, whole = watch_running(monkeypatch), ["attention", "attention_backward"]
    for turn in range(2):
        jax.block_until_ready(jax.grad(loss_of(causal=True))(Q))
        assert checked == ["described", "resolved_backward"]
        assert resolved == whole * (turn + 1)


def test_an_eager_layer_is_resolved_once(
    checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It quantises and multiplies."""
    layer, x = layers.Int8Linear.from_weight(np.ones((8, 128), np.float16)), jnp.ones((3, 128))
    resolved = watch_running(monkeypatch)
    for turn in range(2):
        jax.block_until_ready(layer(x))
        assert checked == ["check_product"]
        assert Counter(resolved) == dict.fromkeys(("act_quant", "int8_gemm"), turn + 1)


def test_what_was_refused_is_refused_again_and_what_differs_is_checked(checked: list[str]) -> None:
    kept = ca.BlockMask.from_window(LEN_Q, LEN_KV, (-1, -1))
    other = ca.BlockMask.from_window(5 * LEN_Q, LEN_KV, (-1, -1))
    interop.attention(Q, K, V, block_mask=kept)
    for options, says in (({"block_mask": other}, "block mask"), ({"variant": "fa9"}, "fa9")):
        for _ in range(2):
            with pytest.raises(ValueError, match=says):
                interop.attention(Q, K, V, **options)
    assert checked == ["described"] * 5
    for _ in range(2):  # a list is no part of a key: the call is checked every time
        interop.attention(Q, K, V, window=[9, 3])
    assert checked == ["described"] * 7


def blocks_of_the_page() -> tuple[str, str]:
    page = Path(__file__).parents[2] / "docs" / "INTEROP.md"
    section = page.read_text(encoding="utf-8").split("## JAX\n")[1].split("\n## ")[0]
    attend, multiply = (block.split("```")[0] for block in section.split("```python\n")[1:])
    return attend, multiply


def test_the_example_of_the_page_attends() -> None:
    names: dict[str, Any] = {}
    exec(blocks_of_the_page()[0], names)
    assert names["dk"].shape == names["k"].shape and names["each"].shape == (2, 1, 4, 128, 64)
    assert names["o"].dtype == names["int8"].dtype == jnp.bfloat16


def test_the_example_of_the_page_multiplies() -> None:
    """With the imports and keys of the one before."""
    attend, multiply = blocks_of_the_page()
    names: dict[str, Any] = {}
    exec(attend.partition("\no = ")[0] + multiply, names)
    assert names["y"].shape == names["z"].shape == names["dx"].shape == names["x"].shape


def test_on_a_device_the_buffers_are_cupy_arrays_on_the_stream_of_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame made by hand, buffers of the host, and stand-ins for what needs a driver."""
    cupy = pytest.importorskip("cupy")
    ffi, entered, seen = xla_ffi, [], []
    owned = cupy.cuda.UnownedMemory
    monkeypatch.setattr(cupy.cuda, "UnownedMemory", lambda at, n, owner: owned(at, n, owner, 0))

    @contextlib.contextmanager
    def enter(name: str, *given: int) -> Any:
        entered.append((name, *given))
        yield
        entered.append(f"left {name}")

    for name in ("Device", "ExternalStream"):
        monkeypatch.setattr(cupy.cuda, name, functools.partial(enter, name))

    def target(operands: Any, results: Any, attributes: Any) -> None:
        seen.extend((x.data.ptr, x.shape, str(x.dtype)) for x in (*operands, *results))
        assert len(entered) == 2

    @ffi._StreamGet
    def stream_get(arguments: Any) -> None:
        assert arguments.contents.context == 77
        arguments.contents.stream = 1234

    memory = np.zeros(24, ml_dtypes.bfloat16)
    dims = (ctypes.c_int64 * 2)(4, 6)
    buffer = ffi._Buffer(ctypes.sizeof(ffi._Buffer), None, 16, memory.ctypes.data, 2, dims)
    places = (ctypes.POINTER(ffi._Buffer) * 1)(ctypes.pointer(buffer))
    one = ffi._Buffers(ctypes.sizeof(ffi._Buffers), None, 1, (ctypes.c_int * 1)(1), places)
    api = ffi._Api(stream_get=ctypes.cast(stream_get, ctypes.c_void_p))
    frame = ffi._Frame(api=ctypes.pointer(api), context=77, stage=3, operands=one, results=one)
    function = ffi.handler(target, (0, 3), on_device=True)
    assert function(ctypes.pointer(frame)) is None
    assert seen == [(memory.ctypes.data, (4, 6), "bfloat16")] * 2
    assert entered[:2] == [("Device", 0), ("ExternalStream", 1234, 0)] and len(entered) == 4


UNAWAITED = """
import jax, numpy as np
from cupyattn.interop.jax import attention
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 256, 64)).astype(np.float16)
{}jax.jit(attention)(q, k, v)
"""


@pytest.mark.parametrize(
    "kept",
    [pytest.param("o = ", id="kept", marks=pytest.mark.slow), pytest.param("", id="dropped")],
)
def test_a_script_ends_without_waiting_for_its_results(kept: str) -> None:
    """A thread of XLA that came to Python as Python ended would be waited for without end."""
    subprocess.run([sys.executable, "-c", UNAWAITED.format(kept)], check=True, timeout=120)


def test_a_process_does_not_wait_for_a_thread_that_calls_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xla_ffi, "LONGEST_WAIT", 0.2)
    monkeypatch.setitem(xla_ffi._inside, 0, True)
    xla_ffi.wait_for_calls()


def test_a_platform_that_is_not_there_is_no_reason_not_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As "cpu" is not where JAX was told to know a device alone."""
    waited: list[bool] = []

    def missing(platform: str) -> Any:
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "live_arrays", missing)
    monkeypatch.setattr(xla_ffi, "wait_for_calls", lambda: waited.append(True))
    calls._finish()
    assert waited == [True]
