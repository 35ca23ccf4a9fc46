"""What a call on JAX arrays refuses while it is traced: what `cupyattn.attention` refuses of CuPy's
and NumPy's arrays, by the same sentence, whatever was called before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.runtime.recent import CALLS

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - after importorskip

from cupyattn.interop import jax as interop  # noqa: E402 - imports jax

X = np.random.default_rng(0).standard_normal((1, 2, 40, 16)).astype(np.float16)


def static(granularity: str, *scales: Any, **options: Any) -> dict[str, Any]:
    quant = ca.QuantConfig(granularity, granularity, scales=scales, **options)
    return {"variant": "fa_int8", "quant": quant}


def filled(*shape: int, value: float = 0.1) -> Any:
    return np.full(shape, value, np.float32)


REFUSED: dict[str, dict[str, Any]] = {
    "no answer": {"return_lse": "no"},
    "a number for a switch": {"return_lse": 1},
    "no backend": {"backend": "nonsense"},
    "a list for a backend": {"backend": ["mirror"]},
    "tiles of no mma": {"variant": "fa_tc", "tiles": ca.Tiles(33, 64, 4)},
    "tiles for three warps": {"variant": "fa_tc", "tiles": ca.Tiles(64, 64, 3)},
    "huge tiles": {"variant": "fa", "tiles": ca.Tiles(4096, 4096, 4)},
    "Hopper tiles": {"variant": "fa_tc", "tiles": ca.Tiles(64, 64, 4), "arch": "sm_90a"},
    "tiles of values": {
        "variant": "fa_int8", "tiles": ca.Tiles(64, 16, 4), "quant": ca.QuantConfig(pv="int8"),
    },
    "tiles of codes in the kernel": {
        "variant": "fa_int8", "tiles": ca.Tiles(64, 64, 4, 2),
        "quant": ca.QuantConfig(fused=True, smooth_k=False),
    },
    "seven scales of a tensor": static("tensor", *(filled(1, 1, 7),) * 2),
    "scales of three heads": static("head", *(filled(1, 3, 1),) * 2),
    "scales of four batch entries": static("head", filled(4, 2, 1), filled(1, 2, 1)),
    "scales of nine blocks": static("block", *(filled(1, 2, 9),) * 2),
    "scales that are infinite": static("head", *(filled(1, 2, 1, value=np.inf),) * 2),
    "a scale that is too small": static("tensor", 1e-40, 0.1),
    "scales and zero points": static("head", *(filled(1, 2, 1),) * 2, symmetric=False),
}  # fmt: skip


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[type, str]:
    """What a call raises."""
    with pytest.raises((TypeError, ValueError, ca.UnsupportedError)) as error:
        call(*args, **options)
    return error.type, str(error.value)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    CALLS.clear()


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_as_it_is_traced(name: str) -> None:
    options = REFUSED[name]
    expected = refused(ca.attention, X, X, X, **options)
    x = jnp.asarray(X)
    for _ in range(2):
        assert refused(interop.attention, x, x, x, **options) == expected
    traced = jax.jit(lambda x: interop.attention(x, x, x, **options)).lower
    assert refused(traced, x) == expected


def test_a_device_that_there_is_not_is_refused_as_a_call_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def devices(platform: str) -> None:
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    expected = refused(ca.attention, X, X, X, backend="cuda")
    x = jnp.asarray(X)
    traced = jax.jit(lambda x: interop.attention(x, x, x, backend="cuda")).lower
    for call, arrays in ((interop.attention, (x, x, x)), (traced, (x,))):
        assert refused(call, *arrays, **({} if call is traced else {"backend": "cuda"})) == expected


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("name", [n for n in REFUSED if "scale" in n])
def test_given_scales_are_refused_by_plan_and_explain(name: str, backend: str) -> None:
    """As the call does, whatever runs it."""
    options = {**REFUSED[name], "backend": backend}
    expected = refused(ca.attention, X, X, X, **options)
    for function in (ca.plan, ca.explain, ca.kernel_form):
        assert refused(function, X, X, X, **options) == expected


@pytest.mark.parametrize("given", ["no", 1, 0.0])
def test_deterministic_is_an_answer(given: Any) -> None:
    lse = np.zeros(X.shape[:3], np.float32)
    expected = refused(ca.attention_backward, X, X, X, X, X, lse, deterministic=given)
    x = jnp.asarray(X)
    assert refused(interop.attention, x, x, x, deterministic=given) == expected
    for taken in (True, np.False_):
        interop.attention(x, x, x, deterministic=taken)


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("causal", True, 1), ("window", (3, 1), (3.0, 1.0)), ("scale", 1.0, 1 + 0j),
        ("softcap", 0.0, 0j), ("rope_offset_q", 0, 0.0), ("rope_interleaved", False, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_a_refusal_does_not_depend_on_the_call_before(
    name: str, usual: Any, other: Any, gradient: bool
) -> None:
    def call(x: Any, **options: Any) -> Any:
        return interop.attention(x, x, x, **options).astype(jnp.float32).sum()

    run, x = jax.grad(call) if gradient else call, jnp.asarray(X)
    expected = refused(run, x, **{name: other})
    jax.block_until_ready(run(x, **{name: usual}))
    assert refused(run, x, **{name: other}) == expected


@pytest.mark.parametrize(
    "options",
    [
        static("tensor", 0.1, 0.2), static("head", filled(1, 2, 1), filled(1, 1, 1)),
        static("thread", filled(1, 2, 20), filled(1, 2, 3)),
        {"variant": "fa", "tiles": ca.Tiles(32, 32, 4)},
        {"return_lse": np.True_},
    ],
)  # fmt: skip
def test_what_fits_runs(options: dict[str, Any]) -> None:
    x = jnp.asarray(X)
    found, expected = interop.attention(x, x, x, **options), ca.attention(X, X, X, **options)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_scales_of_blocks_wait_for_the_device_that_says_how_large_they_are(monkeypatch) -> None:
    """The Hopper form and the portable form have different blocks."""
    x, options = jax.ShapeDtypeStruct(X.shape, X.dtype), REFUSED["scales of nine blocks"]
    trace = jax.jit(lambda x: interop.attention(x, x, x, **options)).trace
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    trace(x)
    named = {**options, "arch": "sm_90a"}
    with pytest.raises(ValueError, match="static q_scale must have shape"):
        jax.jit(lambda x: interop.attention(x, x, x, **named)).trace(x)


@pytest.mark.parametrize("given", [(None, filled(16)), (filled(16), None)])
@pytest.mark.parametrize("name", ["qk_norm", "rope"])
def test_half_a_pair_is_refused_and_not_left_out(name: str, given: Any) -> None:
    x = jnp.asarray(X)
    with pytest.raises(TypeError, match=r"^\w+ must be a JAX array, got None$"):
        interop.attention(x, x, x, **{name: given})


def test_a_key_of_random_numbers_is_no_array() -> None:
    x, key = jnp.asarray(X), jax.random.key(0)
    for call in (lambda: interop.attention(x, key, x), lambda: interop.norm_quant(key)):
        with pytest.raises(TypeError, match=r"^[kx] must be an array of numbers, got key<fry>$"):
            call()
