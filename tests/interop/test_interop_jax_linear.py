"""`cupyattn.interop.jax.Int8Linear`: the bits of `cupyattn.Int8Linear` under JAX's transforms."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import UnsupportedError
from cupyattn.quant.activation import GLU
from cupyattn.runtime.recent import CALLS
from tests.support.runs import bits

jax = pytest.importorskip("jax")
jnp = jax.numpy

from cupyattn.interop.jax import Int8Linear  # noqa: E402 - imports jax
from cupyattn.interop.jax import linear as module  # noqa: E402 - imports jax

OUT, IN = 40, 300
WAYS: dict[str, dict[str, Any]] = {
    "block": {},
    "channel": {"strategy": "channel"},
    "outliers": {"outlier_columns": [3, 200], "outlier_dtype": "float16"},
}


def normal(shape: tuple[int, ...], dtype: str = "float16", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(STORAGE[dtype])


def layers(dtype: str = "float16", **options: Any) -> tuple[Any, Any]:
    """A layer of JAX arrays, and the same layer of NumPy arrays."""
    weight, bias = normal((OUT, IN), dtype), normal((OUT,), dtype, 1)
    ours = Int8Linear.from_weight(jnp.asarray(weight), jnp.asarray(bias), **options)
    return ours, ca.Int8Linear.from_weight(weight, bias, **options)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of x in every product that XLA asks for."""
    shapes: list[tuple[int, ...]] = []
    own = module.linear.quantised_product

    def quantised_product(x: Any, *arrays: Any, **options: Any) -> Any:
        shapes.append(x.shape)
        return own(x, *arrays, **options)

    monkeypatch.setattr(module.linear, "quantised_product", quantised_product)
    return shapes


# ---- one signature -------------------------------------------------------------------------------


def test_factors_of_channels_are_refused() -> None:
    w = jnp.ones((8, 64))
    layer = Int8Linear.from_weight(w, strategy="channel")
    for call in (
        lambda: Int8Linear.from_weight(w, strategy="channel", smooth=jnp.ones(64)),
        lambda: Int8Linear(layer.codes, layer.scales, smooth=jnp.ones(64)),
    ):
        with pytest.raises(ca.UnsupportedError, match="smooth is not supported in a layer of JAX"):
            call()


def documented(what: Any) -> list[str]:
    """The parameters that a docstring names, in order."""
    section = inspect.getdoc(what).split("Parameters\n----------\n")[1].split("\n\n")[0]
    lines = re.findall(r"^(\w.*?) : ", section, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def same_but_types(what: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(what).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_cupy_torch_and_jax_have_one_signature() -> None:
    core = ca.Int8Linear
    found: list[Any] = [Int8Linear]
    if importlib.util.find_spec("torch"):
        found.append(importlib.import_module("cupyattn.interop.torch").Int8Linear)
    names = list(inspect.signature(core).parameters)
    assert documented(core) == names and "backend" in names
    for layer in found:
        assert same_but_types(layer) == same_but_types(core)
        assert documented(layer) == names
    assert same_but_types(Int8Linear.from_weight) == same_but_types(core.from_weight)
    assert same_but_types(Int8Linear.__call__) == same_but_types(core.__call__)
    assert documented(Int8Linear.__call__) == documented(core.__call__)


CODES, SCALES = (jnp.asarray(x) for x in ca.weight_quant(normal((OUT, IN))))
ROWS = ca.weight_quant(normal((OUT, IN)), strategy="channel")[1]
KEPT = normal((OUT, 1))
X = normal((3, IN))
#: Arguments of a layer that do not fit.
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sizes": ((128, 128), {}),
    "nothing": ((CODES, None), {}),
    "types": ((CODES.astype(jnp.float32), SCALES), {}),
    "axes": ((CODES[0], SCALES), {}),
    "scales": ((CODES, SCALES[:, :2]), {}),
    "bias": ((CODES, SCALES, np.ones(3, np.float32)), {}),
    "activation": ((CODES, SCALES), {"activation": "relu"}),
    "odd rows": ((CODES[:5], SCALES), {"activation": "swiglu"}),
    "blocks": ((CODES, SCALES), {"block_size": 64}),
    "arch": ((CODES, SCALES), {"arch": "foo"}),
    "backend": ((CODES, SCALES), {"backend": "gpu"}),
    "column": ((CODES, SCALES), {"outlier_columns": [IN]}),
    "columns alone": ((CODES, SCALES), {"outlier_columns": [1]}),
    "channels": ((CODES, ROWS), {"outlier_columns": [1], "outlier_weight": KEPT}),
    "outliers": ((CODES, SCALES), {"outlier_columns": [1], "outlier_weight": KEPT[:3]}),
}  # fmt: skip


def as_tensor(x: Any) -> Any:
    torch = importlib.import_module("torch")
    return torch.from_numpy(np.array(x)) if hasattr(x, "dtype") else x


def said_of(layer: Any, case: str, make: Callable[[Any], Any]) -> tuple[type, str]:
    positional, named = WRONG[case]
    with pytest.raises((TypeError, ValueError, ca.UnsupportedError)) as caught:
        layer(*map(make, positional), **{name: make(x) for name, x in named.items()})
    said = str(caught.value)
    assert "\n" not in said
    return caught.type, said.split("Int8Linear.from")[0]  # how a layer is made differs


@pytest.mark.parametrize("case", WRONG)
def test_cupy_torch_and_jax_refuse_in_the_same_words(case: str) -> None:
    def on_host(x: Any) -> Any:
        return np.asarray(x) if hasattr(x, "dtype") else x

    expected = said_of(ca.Int8Linear, case, on_host)
    assert said_of(Int8Linear, case, lambda x: x) == expected
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("cupyattn.interop.torch")
        assert said_of(torch.Int8Linear, case, as_tensor) == expected


def test_arch_and_backend_of_the_layer_hold_for_its_calls() -> None:
    for layer in (ca.Int8Linear(*map(np.asarray, (CODES, SCALES)), backend="cuda"),
                  Int8Linear(CODES, SCALES, backend="cuda")):  # fmt: skip
        x = normal((3, IN))
        with pytest.raises(Exception, match="backend='cuda' takes CuPy"):
            jax.block_until_ready(layer(x))
        assert layer(x, backend="mirror").shape == (3, OUT)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_jit_and_eager_calls_have_the_bits_of_numpy(
    way: str, dtype: str, runs: list[tuple[int, ...]]
) -> None:
    ours, core = layers(activation="gelu", **WAYS[way])
    x = normal((2, 5, IN), dtype, 2)
    expected = bits(core(x))
    assert bits(np.asarray(jax.jit(lambda layer, x: layer(x))(ours, jnp.asarray(x)))) == expected
    runs.clear()
    assert bits(np.asarray(jax.jit(ours)(x))) == expected
    assert bits(np.asarray(ours(x))) == expected
    assert runs == [x.shape] * 2


def test_bfloat16_and_one_row() -> None:
    ours, core = layers("bfloat16")
    x = normal((IN,), "bfloat16", 2)
    y = jax.jit(ours)(x)
    assert y.dtype == jnp.bfloat16 and y.shape == (OUT,)
    assert bits(np.asarray(y)) == bits(core(x))
    assert ours(jnp.zeros((0, 7, IN))).shape == (0, 7, OUT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_residual_gate_and_type_of_the_result(way: str, out_dtype: str) -> None:
    ours, core = layers(**WAYS[way])
    x, residual = normal((2, 5, IN), seed=2), normal((2, 5, OUT), out_dtype, 3)
    gate = normal((2, OUT), out_dtype, 4)
    for beside in ({}, {"residual": residual}, {"residual": residual, "gate": gate}):
        call = jax.jit(lambda x, beside: ours(x, out_dtype=out_dtype, **beside))
        expected = core(x, out_dtype=out_dtype, **beside)
        assert bits(np.asarray(call(x, beside))) == bits(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", GLU)
def test_gated_linear_units_have_half_as_many_columns(way: str, activation: str) -> None:
    ours, core = layers(activation=activation, **WAYS[way])
    assert ours.out_features == OUT // 2 and layers()[0].out_features == OUT
    x, residual = normal((2, 5, IN), seed=2), normal((2, 5, OUT // 2), seed=3)
    beside = {"residual": residual, "gate": normal((OUT // 2,), seed=4)}
    for added in ({}, beside):
        expected = core(x, **added)
        assert expected.shape == (2, 5, OUT // 2)
        call = jax.jit(lambda x, added: ours(x, **added))
        assert bits(np.asarray(call(x, added))) == bits(expected)
        mapped = jax.vmap(lambda x, added: ours(x, **added), (0, {"residual": 0, "gate": None}))
        if added:
            assert bits(np.asarray(mapped(x, added))) == bits(expected)


def test_the_kernels_run_in_the_interpreter() -> None:
    ours, core = layers(backend="interpret", strategy="channel")
    x = normal((2, IN), seed=2)
    assert bits(np.asarray(jax.jit(ours)(x))) == bits(core(x))


def test_weights_of_every_kind_make_a_layer() -> None:
    weight = normal((OUT, IN), "bfloat16")
    ours = Int8Linear.from_weight(weight, outlier_columns=[5])
    same = Int8Linear.from_weight(jnp.asarray(weight), outlier_columns=[5])
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(same), strict=True):
        assert isinstance(one, jax.Array) and isinstance(other, jax.Array)
        assert bits(np.asarray(one)) == bits(np.asarray(other))
    assert ours.outlier_weight.dtype == jnp.bfloat16


# ---- the tree ------------------------------------------------------------------------------------


def test_a_layer_is_a_tree_whose_leaves_have_names() -> None:
    ours, _ = layers(activation="silu", backend="mirror", **WAYS["outliers"])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ours)]
    assert paths == [".codes", ".scales", ".bias", ".outlier_weight", ".places"]
    same = jax.tree.map(lambda x: x, ours)
    assert (same.activation, same.backend, same.outlier_columns) == ("silu", "mirror", (3, 200))
    assert jax.tree.structure(same) == jax.tree.structure(ours)
    assert jax.tree.structure(layers(**WAYS["outliers"])[0]) != jax.tree.structure(ours)


def test_jit_traces_layers_of_one_structure_once() -> None:
    traced: list[int] = []

    @jax.jit
    def call(layer: Any, x: Any) -> Any:
        traced.append(1)
        return layer(x)

    x = normal((3, IN), seed=2)
    weights = [normal((OUT, IN), seed=seed) for seed in range(2)]
    for weight in weights:
        y = call(Int8Linear.from_weight(weight), x)
        assert bits(np.asarray(y)) == bits(ca.Int8Linear.from_weight(weight)(x))
    assert len(traced) == 1


def test_scan_goes_through_stacked_layers() -> None:
    made = [normal((IN, IN), "float32", seed) / np.float32(17) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(Int8Linear.from_weight, made))
    x = normal((4, IN), "float32", 9)
    found, _ = jax.jit(lambda s, x: jax.lax.scan(lambda x, one: (one(x), None), x, s))(stacked, x)
    for weight in made:
        x = ca.Int8Linear.from_weight(weight)(x)
    assert bits(np.asarray(found)) == bits(x)


#: Run in a process of its own: layers by the programs that JAX keeps on disk, and their names.
CACHED = """
import os, sys
import jax, numpy as np
import cupyattn as ca
from cupyattn.interop.jax import Int8Linear

for name, x in (("compilation_cache_dir", sys.argv[1]),
                ("persistent_cache_min_compile_time_secs", 0),
                ("persistent_cache_min_entry_size_bytes", -1)):
    jax.config.update(f"jax_{name}", x)
weight, x = np.random.default_rng(0).standard_normal((2, 40, 300)).astype(np.float16)
for activation in sys.argv[2:]:
    layer = Int8Linear.from_weight(weight, activation=activation)
    y = np.asarray(jax.jit(lambda layer, x: layer(x))(layer, x))
    assert y.tobytes() == ca.Int8Linear.from_weight(weight, activation=activation)(x).tobytes()
    print(*sorted(name for name in os.listdir(sys.argv[1]) if name.endswith("-cache")))
"""


@pytest.mark.slow
def test_a_program_that_jax_kept_on_disk_runs_in_another_process(tmp_path: Path) -> None:
    """The second process finds all that it needs; another activation is another program."""
    lines: list[str] = []
    for activations in (("gelu",), ("gelu", "silu")):
        command = [sys.executable, "-c", CACHED, str(tmp_path), *activations]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        lines += done.stdout.splitlines()
    first, second, third = (set(line.split()) for line in lines)
    assert first and first == second and second < third, lines


def test_a_call_is_one_foreign_function() -> None:
    for way in WAYS.values():
        ours, _ = layers(activation="gelu", **way)
        text = jax.jit(lambda layer, x: layer(x)).lower(ours, jnp.asarray(X)).as_text()
        assert text.count("custom_call") == text.count("cupyattn_int8_linear") == 1


# ---- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate_shape", [None, (OUT,), (5, OUT)])
@pytest.mark.parametrize(
    "axes", [(0, None, None), (1, 0, None), (None, 0, None), (0, 0, 0), (None, 0, 0)]
)
def test_vmap_of_activations_is_one_product(
    axes: tuple[Any, ...], gate_shape: Any, runs: list[tuple[int, ...]]
) -> None:
    ours, core = layers()
    shapes = [(5, IN), (5, OUT), gate_shape or (OUT,)]
    arrays = [
        normal(shape if axis is None else (*shape[:axis], 3, *shape[axis:]), seed=seed)
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    ]

    def call(layer: Any, x: Any, residual: Any, gate: Any) -> Any:
        return layer(x, residual=residual, **({} if gate_shape is None else {"gate": gate}))

    found = jax.jit(jax.vmap(lambda *x: call(ours, *x), in_axes=axes))(*arrays)
    assert len(runs) == 1 and len(found) == 3
    for i in range(3):
        one = (x if a is None else x.take(i, a) for x, a in zip(arrays, axes, strict=True))
        assert bits(np.asarray(found[i])) == bits(call(core, *one))


@pytest.mark.parametrize("way", WAYS)
def test_vmap_of_layers_is_a_product_for_each(way: str, runs: list[tuple[int, ...]]) -> None:
    made = [normal((OUT, IN), seed=seed) for seed in range(3)]
    each = [Int8Linear.from_weight(weight, **WAYS[way]) for weight in made]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    x = normal((2, 3, 4, IN), seed=9)
    over_both = jax.vmap(jax.vmap(lambda layer, x: layer(x)), in_axes=(None, 0))
    found = np.asarray(jax.jit(over_both)(stacked, x))
    assert runs == [(4, IN)] * 6
    for i, weight in enumerate(made):
        core = ca.Int8Linear.from_weight(weight, **WAYS[way])
        assert all(bits(found[n, i]) == bits(core(x[n, i])) for n in range(2))


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_go_through_the_weight_of_the_codes(way: str, dtype: str) -> None:
    ours, core = layers(dtype, **WAYS[way])
    x, d_y = normal((2, 7, IN), dtype, 2), normal((2, 7, OUT), dtype, 3)

    @jax.jit
    def gradients(x: Any, bias: Any) -> Any:
        def call(x: Any, bias: Any) -> Any:
            layer = jax.tree.map(lambda leaf: leaf, ours)
            layer.bias = bias
            return layer(x)

        return jax.vjp(call, x, bias)[1](jnp.asarray(d_y))

    d_x, d_bias = (np.asarray(g) for g in gradients(x, ours.bias))
    assert d_x.dtype == d_bias.dtype == STORAGE[dtype]
    w = ca.weight_dequant(core.codes, core.scales, strategy=core.strategy).astype(np.float64)
    if core.outlier_weight is not None:
        w[:, [3, 200]] = core.outlier_weight[:, :2]
    w, wide = w.astype(STORAGE[dtype]).astype(np.float64), d_y.astype(np.float64)
    unit = 2.0**-11 if dtype == "float16" else 2.0**-24
    # XLA sums 40 products, and 14 gradients, in float32 in whatever order, and rounds once.
    exact, size = wide @ w, abs(wide) @ abs(w)
    assert (abs(d_x - exact) <= unit * abs(exact) + 41 * 2.0**-24 * size).all()
    exact, size = wide.sum((0, 1)), abs(wide).sum((0, 1))
    assert (abs(d_bias - exact) <= unit * abs(exact) + 15 * 2.0**-24 * size).all()


def test_a_gradient_of_vmap_is_that_of_each_entry() -> None:
    ours, _ = layers()
    x = normal((3, 5, IN), seed=2)

    def loss(x: Any) -> Any:
        return jnp.square(ours(x).astype("float32")).sum()

    together = jax.jit(jax.vmap(jax.grad(loss)))(x)
    whole = jax.jit(jax.grad(lambda x: jax.vmap(loss)(x).sum()))(x)
    alone = np.stack([np.asarray(jax.grad(loss)(one)) for one in x])
    for found in (together, whole):
        # Two sums of 40 products in other orders, each rounded to float16.
        np.testing.assert_allclose(np.asarray(found), alone, rtol=2.0**-9, atol=2.0**-9)


def loss_of(layer: Any, **beside: Any) -> Callable[..., Any]:
    return lambda x, **more: layer(x, **beside, **more).sum()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: jax.grad(loss_of(layers(activation="gelu")[0]))(x),
         "not implemented with activation='gelu': leave it out, and apply JAX's own"),
        (lambda x: jax.grad(loss_of(layers(activation="swiglu")[0]))(x),
         "not implemented with activation='swiglu': leave it out, and apply JAX's own"),
        (lambda x: jax.grad(loss_of(layers()[0], residual=jnp.zeros((3, OUT), x.dtype)))(x),
         "not implemented beside residual: leave it out, and add it to the result"),
        (lambda x: jax.grad(lambda layer: layer(x).sum(), allow_int=True)(layers()[0]),
         "Int8Linear has no gradient with respect to scales: differentiate x and bias alone"),
    ],
    ids=["activation", "gated", "residual", "scales"],
)  # fmt: skip
def test_a_gradient_that_there_is_none_of_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ca.UnsupportedError, match=says):
        call(jnp.asarray(normal((3, IN))))


# ---- refusals of calls ---------------------------------------------------------------------------

@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer(X[:, :9]),
        lambda layer: layer(X[0, 0]),
        lambda layer: layer(X.astype(np.int32)),
        lambda layer: layer(X, out_dtype="int8"),
        lambda layer: layer(X, gate=KEPT[:, 0]),
        lambda layer: layer(X, residual=np.zeros((3, 9), np.float16)),
        lambda layer: layer(X, residual=np.zeros((3, OUT), np.float32)),
        lambda layer: layer(X, arch="foo"),
        lambda layer: layer(X, backend="gpu"),
    ],
)
def test_a_wrong_call_has_the_words_of_numpy_while_it_is_traced(call: Any) -> None:
    ours, core = layers()
    said = []
    for layer in (core, ours):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(layer)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]
    with pytest.raises(said[0][0]):
        jax.eval_shape(lambda layer: call(layer), ours)


def test_outliers_want_their_own_type() -> None:
    ours, _ = layers(**WAYS["outliers"])
    with pytest.raises(TypeError, match="^x must be float16 or float32, as outliers are kept"):
        ours(normal((3, IN), "bfloat16"))


def test_what_is_no_array_is_one_line() -> None:
    ours, _ = layers()
    for x in ("x", None):
        with pytest.raises(TypeError, match="^x must be a JAX array, got "):
            ours(x)
    with pytest.raises(TypeError, match="weight must be .*, which JAX traces: "):
        jax.jit(Int8Linear.from_weight)(X)


def test_a_failure_of_the_call_itself_has_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may run the call, as far as tracing knows."""
    ours, _ = layers()
    monkeypatch.setattr(jax, "devices", lambda _: ["a device"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: backend='cuda' takes CuPy"):
        jax.block_until_ready(ours(X, backend="cuda"))


def test_a_device_that_there_is_not_is_refused_as_a_call_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, core = layers()
    CALLS.clear()  # of the test above
    monkeypatch.setattr(jax, "devices", on_a_host)
    with pytest.raises(ValueError, match="backend='cuda' takes CuPy arrays, got NumPy") as alone:
        core(np.asarray(X), backend="cuda")
    with pytest.raises(ValueError) as traced:
        jax.jit(lambda x: ours(x, backend="cuda")).lower(X)
    assert str(traced.value) == str(alone.value)


def on_a_host(platform: str) -> None:
    raise RuntimeError(f"Unknown backend {platform}")


def test_a_bound_comes_back_as_a_jax_array_that_is_not_below_it() -> None:
    _, core = layers()
    weight = normal((OUT, IN))
    exact = core.error(X, weight)
    found = core.error(jnp.asarray(X), weight)
    assert isinstance(found, jax.Array) and found.dtype == jnp.float32
    wide = np.asarray(found, np.float64)
    assert (wide >= exact).all() and (wide <= exact * (1 + 2.0**-22)).all()


@pytest.mark.parametrize("rotate", ["hadamard", "hadamard_contiguous"])
def test_a_rotated_layer_is_that_of_numpy(rotate: str) -> None:
    """Its gradient is of the weight before it was rotated; its tree keeps the rotation."""
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((24, 512), (3, 512)))
    x[:, 5] *= 30
    layer = Int8Linear.from_weight(jnp.asarray(w), strategy="channel", rotate=rotate)
    plain = ca.Int8Linear.from_weight(w, strategy="channel", rotate=rotate)
    y = jax.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x))
    assert np.array_equal(np.asarray(y), plain(x))
    again = jax.tree_util.tree_map(lambda leaf: leaf, layer)
    assert again.rotate == rotate and again.strategy == "channel"
    d_x = jax.grad(lambda x: layer(x).sum())(jnp.asarray(x))
    assert np.linalg.norm(d_x[0] - w.sum(0)) < 0.02 * np.linalg.norm(w.sum(0))
    with pytest.raises(UnsupportedError, match="goes with strategy='channel'"):
        Int8Linear.from_weight(jnp.asarray(w), rotate=rotate)
