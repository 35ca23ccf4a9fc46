"""`norm_quant` for JAX: rows normalised, modulated, activated, rotated, then codes; one call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cupyattn.errors import UnsupportedError
from cupyattn.interop.jax.calls import (
    as_array,
    check_backend,
    check_once,
    each_entry,
    foreign,
    register,
)
from cupyattn.ops.norm_quant import NormQuantSettings, checked_steps
from cupyattn.ops.norm_quant import norm_quant as of_arrays
from cupyattn.plans.norm_quant import VECTORS
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE

_NAME = "cupyattn_norm_quant"
#: Vectors that differ between groups of rows.
_BY_ROW = VECTORS[2:]


def norm_quant(
    x: Any,
    *,
    norm: str | None = None,
    weight: Any = None,
    bias: Any = None,
    scale: Any = None,
    shift: Any = None,
    activation: str | None = None,
    rotate: str | None = None,
    eps: float = EPS,
    strategy: str = "channel",
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalise, modulate, activate and rotate rows, and quantise them, as `cupyattn.norm_quant`.

    Parameters
    ----------
    x : jax.Array, (..., channels), float16, bfloat16 or float32
        May be traced, as all arrays here.
    norm, weight, bias, scale, shift, activation, rotate, eps, strategy, backend
        As for `cupyattn.norm_quant`.

    Returns
    -------
    codes : jax.Array, (..., channels), int8
    scales : jax.Array, (..., 1) or (..., blocks), float32

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `cupyattn.norm_quant`, while the call is traced. `UnsupportedError` also for
        gradients, which codes do not have.
    jax.errors.JaxRuntimeError
        For errors that show only when it runs, with the exception's type and message.

    Notes
    -----
    Under `jax.vmap` mapped axes of x are further rows. Mapped vectors, and `scale` and `shift`
    beside a mapped x, take a call for each entry.

    Examples
    --------
    >>> codes, scales = jax.jit(norm_quant, static_argnames="norm")(jnp.eye(2, 64), norm="rms")
    >>> codes.shape, codes.dtype.name, round(float(scales[0, 0]) * 127, 3)
    ((2, 64), 'int8', 8.0)
    """
    vectors = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    given = {"x": x} | {name: a for name, a in vectors.items() if a is not None}
    operands = {name: as_array(name, a) for name, a in given.items()}
    settings = NormQuantSettings(norm, activation, rotate, eps, strategy, backend)
    facts = ("jax, norm_quant", settings, type(eps))
    check_once(facts, operands, functools.partial(_check, settings))
    codes, scales = _apply(settings, operands)
    return codes, scales


def _check(settings: NormQuantSettings, known: dict[str, Any]) -> None:
    """Check a call by descriptions of its operands."""
    check_backend(settings.backend)
    checked_steps(settings, known)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    settings: NormQuantSettings, operands: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Run the pass as one foreign function."""
    x = operands["x"]
    channels = columns_of(x.shape[-1], settings.activation or "")
    blocks = 1 if settings.strategy == "channel" else -(-channels // BLOCK_SIZE)
    results = [
        jax.ShapeDtypeStruct((*x.shape[:-1], channels), jnp.int8),
        jax.ShapeDtypeStruct((*x.shape[:-1], blocks), jnp.float32),
    ]
    named = {name: "" if s is None else str(s) for name, s in settings._asdict().items()}
    axes = " ".join(str(one.ndim) for one in operands.values())
    call = foreign(_NAME, results)
    codes, scales = call(*operands.values(), operands=" ".join(operands), axes=axes, **named)
    return codes, scales


def _refuse(settings: NormQuantSettings, primals: dict[str, Any]) -> Any:
    if any(primal.perturbed for primal in primals.values()):
        raise UnsupportedError(
            "the derivative of norm_quant is not implemented, codes have none: pass "
            "jax.lax.stop_gradient of its arrays, or use JAX's own norm where a gradient is wanted"
        )
    return _apply(settings, {name: primal.value for name, primal in primals.items()}), None


def _no_derivative(settings: NormQuantSettings, _: None, d_results: Any) -> Any:
    raise UnsupportedError("codes have no derivative")


_apply.defvjp(_refuse, _no_derivative, symbolic_zeros=True)


# ---- the function that XLA calls -----------------------------------------------------------------


def _run(buffers: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, str]) -> None:
    """Write codes and scales of the buffers of a call."""
    names, axes = attributes["operands"].split(), map(int, attributes["axes"].split())
    operands, own = dict(zip(names, buffers, strict=True)), dict(zip(names, axes, strict=True))
    front = operands["x"].ndim - own["x"]
    if not results[0].size:
        return
    shared = all(
        x.shape[:front] == (1,) * front for name, x in operands.items() if name != "x"
    ) and not (front and operands.keys() & set(_BY_ROW))
    if not shared:
        for one, written in each_entry(operands, results, front):
            _quantise(one, written, attributes)
        return
    vectors = {n: x.reshape(x.shape[front:]) for n, x in operands.items() if n != "x"}
    _quantise({"x": operands["x"], **vectors}, results, attributes)


def _quantise(
    operands: Mapping[str, Any], results: Sequence[Any], attributes: Mapping[str, str]
) -> None:
    named = {name: attributes[name] or None for name in NormQuantSettings._fields}
    named["eps"] = float(attributes["eps"])  # type: ignore[assignment]
    x, vectors = operands["x"], {name: a for name, a in operands.items() if name != "x"}
    for result, made in zip(results, of_arrays(x, **vectors, **named), strict=True):  # type: ignore[arg-type]
        result[...] = made


register(_NAME, _run)
