"""`attention` on JAX arrays: a custom call of XLA, under `jax.jit`, `jax.grad` and `jax.vmap`.

The call is a typed FFI target (`cupyattn.interop.xla_ffi`): the kernels read XLA's buffers on XLA's
stream. XLA passes compact row-major buffers and copies other buffers first.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace
from cupyattn.errors import UnsupportedError, shown
from cupyattn.interop.jax.calls import (
    as_array,
    check_backend,
    check_once,
    each_entry,
    foreign,
    register,
)
from cupyattn.interop.mapped import joins_the_batch
from cupyattn.kernels import ladder
from cupyattn.ops import attention as api
from cupyattn.ops import backward
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import NOT_OFFERED, instead_of
from cupyattn.problem.sequences import LENGTHS
from cupyattn.problem.settings import ARRAYS, Settings, parse
from cupyattn.quant.config import QuantConfig

#: Operands by the argument that has them; other arguments of `attention` are constants of a trace.
_PAIRS = {"rope": ("cos", "sin"), "qk_norm": ("q_weight", "k_weight")}
_TABLES = tuple(name for names in _PAIRS.values() for name in names)
#: Arguments of `cupyattn.attention` that are not supported for JAX, each with advice.
_NOT_IN_JAX = {
    "out": "JAX arrays are immutable: take the result",
    "check_finite": "a traced call cannot look at values: set jax_debug_nans",
}
#: Arguments of `cupyattn.attention`, except the ones for packed sequences.
_KNOWN = {
    name for name in (*ARRAYS, *Settings._fields) if not name.startswith(("cu_seqlens", "max_len"))
}
#: Arguments that do not change the gradient, such as the rung of the forward pass.
_OF_FORWARD = ("variant", "accuracy", "quant", "tiles")
#: Operands with a gradient, by the gradient's name.
_GRADIENTS = {
    "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dq_weight": "q_weight",
    "dk_weight": "k_weight",
}  # fmt: skip
_FORWARD, _BACKWARD = "cupyattn_attention", "cupyattn_attention_backward"


@dataclass(frozen=True)
class _Call:
    """The constants of a call; calls are equal if `key`, a digest of the constants, is equal."""

    key: str
    layout: str
    return_lse: bool
    deterministic: bool


#: Options by key. A process that reuses code compiled by another process has also traced the call.
_options: dict[str, dict[str, Any]] = {}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    qk_norm: Any = None,
    lengths_q: Any = None,
    lengths_kv: Any = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> Any:
    """Attention on JAX arrays.

    Parameters
    ----------
    q, k, v : jax.Array
        As for `cupyattn.attention`: (batch, heads, len, head_dim), or (batch, len, heads, head_dim)
        with ``layout="BSHD"``, the order of `jax.nn.dot_product_attention`; float16, bfloat16 or
        float32. They may be traced.
    mask, bias : jax.Array, optional
        As for `cupyattn.attention`.
    rope, qk_norm : (jax.Array, jax.Array), optional
        As for `cupyattn.attention`.
    lengths_q, lengths_kv : jax.Array, (batch,), optional
        As for `cupyattn.attention`. There is no gradient with them.
    layout, return_lse
        As for `cupyattn.attention`. Gradients go through the log-sum-exp, too.
    deterministic : bool
        For the gradient, as for `cupyattn.attention_backward`.
    **options
        The other arguments of `cupyattn.attention`, constants of the trace: variant, accuracy,
        scale, causal, causal_align, window, softcap, rope_interleaved, rope_offset_q, qk_norm_eps,
        qk_norm_split, block_mask, quant, tiles, arch, backend.

    Returns
    -------
    o : jax.Array
        Shape and dtype of q.
    lse : jax.Array, float32, (batch, heads, len_q)
        With `return_lse`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention`, while the call is traced. `UnsupportedError` also for a missing
        gradient: of float32, with lengths, or of a table.
    jax.errors.JaxRuntimeError
        For errors that show only when it runs, with the exception's type and message.

    Notes
    -----
    The gradient is `cupyattn.attention_backward`, straight-through if the forward pass is INT8.
    Second derivatives and forward mode are not supported.

    Under `jax.vmap` the mapped axis joins the batch, in one call. Scales of a whole tensor, given
    scales, block masks of several entries, and mapped tables or weights depend on the entry. Each
    entry then runs as a separate call.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 4, 8), jnp.float16)
    >>> jax.jit(lambda x: attention(x, x, x, causal=True))(x)[0, 0, :, 0]
    Array([1., 1., 1., 1.], dtype=float16)
    """
    _check_names(options)
    optional = {"mask": mask, "bias": bias, "lengths_q": lengths_q, "lengths_kv": lengths_kv}
    arrays = {"q": q, "k": k, "v": v} | {n: x for n, x in optional.items() if x is not None}
    for argument, pair in (("rope", rope), ("qk_norm", qk_norm)):
        if pair is not None:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise TypeError(f"{argument} must be a pair of arrays, got {shown(pair)}")
            arrays |= dict(zip(_PAIRS[argument], pair, strict=True))
    operands = {name: as_array(name, x) for name, x in arrays.items()}
    backward.check_deterministic(deterministic)
    options |= {"layout": layout, "return_lse": return_lse}
    _check_call(operands, options)
    for name in ("mask", "bias"):
        if name in operands:
            x = operands[name]
            operands[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    results = _attend(_remember(options, deterministic), operands)
    return results if return_lse else results[0]


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise for arguments that `cupyattn.attention` lacks, or that are not supported for JAX."""
    for name in options:
        if name in NOT_OFFERED:
            raise UnsupportedError(instead_of(name, "attention"))
        if name in _NOT_IN_JAX:
            raise TypeError(f"{name} is not for JAX arrays: {_NOT_IN_JAX[name]}")
        if name not in _KNOWN:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")


def _paired(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return all operands except q, k and v as arguments of the call."""
    found = {name: operands[name] for name in ("mask", "bias", *LENGTHS) if name in operands}
    for argument, names in _PAIRS.items():
        if names[0] in operands:
            found[argument] = tuple(operands[name] for name in names)
    return found


def _check_call(operands: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check a call by its shapes and types."""

    def check(known: dict[str, Any]) -> None:
        check_backend(options.get("backend"))
        constants = {**_constants(options), **_paired(known)}
        given = parse("attention", known["q"], known["k"], known["v"], constants)
        problem = api.described(*given)
        if problem.settings.tiles is not None:
            problem.kernel  # noqa: B018  refuses tiles

    check_once(("jax, attention", *_facts(options)), operands, check)


def _constants(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's options for a check of descriptions on the host.

    The number of rows that share a scale of a block depends on the device, so given scales are
    checked there.
    """
    known = {name: x for name, x in options.items() if name != "backend"}
    quant, named = known.get("quant"), known.get("tiles") or known.get("arch")
    if named or not isinstance(quant, QuantConfig) or jax.default_backend() == "cpu":
        return known
    if "block" in (quant.granularity_q, quant.granularity_k):
        known["quant"] = replace(quant, scales="dynamic")
    return known


def _facts(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return everything that a check depends on besides operands: options, and the rung."""
    settings, arrays = parse("attention", None, None, None, options)
    mask, variant = arrays.get("block_mask"), settings.variant
    if isinstance(mask, BlockMask):
        mask = mask.blocks, mask.mask.shape  # remembered facts keep no array alive
    rung = ladder.VARIANTS.get(variant) if isinstance(variant, str) else None
    return settings, settings.types, mask, rung


def _remember(options: dict[str, Any], deterministic: bool) -> _Call:
    digested = dict(sorted(options.items()))
    block_mask = options.get("block_mask")
    if block_mask is not None:
        digested["block_mask"] = on_host(block_mask.mask), block_mask.blocks
    key = hashlib.sha256(pickle.dumps(digested)).hexdigest()
    _options[key] = options
    return _Call(key, options["layout"], bool(options["return_lse"]), bool(deterministic))


# ---- functions that JAX transforms ---------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Return (o,) or (o, lse)."""
    return _bind_forward(call, operands, with_lse=call.return_lse)


def _attend_fwd(call: _Call, primals: dict[str, Any]) -> tuple[tuple[jax.Array, ...], Any]:
    operands = {name: primal.value for name, primal in primals.items()}
    for name, primal in primals.items():
        if primal.perturbed and name not in _GRADIENTS.values():
            raise UnsupportedError(
                f"attention has no gradient with respect to {name}: differentiate q, k, v, bias "
                "and weights of qk_norm alone, or pass jax.lax.stop_gradient of it"
            )
    bind = _differentiated_once(functools.partial(_bind_forward, call, with_lse=True))
    o, lse = bind(operands)
    _check_gradient(call, operands, o, lse)
    # The structure of residuals is constant in a trace: it says whether bias gets a gradient.
    of_bias = {"bias": ()} if "bias" in primals and primals["bias"].perturbed else {}
    return (o, lse) if call.return_lse else (o,), (operands, o, lse, of_bias)


def _attend_bwd(call: _Call, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[dict[str, Any]]:
    operands, o, lse, of_bias = residuals
    weights = [name for name in _PAIRS["qk_norm"] if name in operands]
    wanted = ("q", "k", "v", *of_bias, *weights)
    named = zip(("d_out", "d_lse"), cotangents, strict=False)
    given = {name: x for name, x in named if not isinstance(x, SymbolicZero)}
    if not given:
        return (dict.fromkeys(operands),)
    if "d_out" not in given:  # only lse has a gradient
        given["d_out"] = jnp.zeros_like(o)
    read = {**operands, **given, "out": o, "lse": lse}
    shapes = [jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in wanted]
    attributes = {
        "operands": " ".join(read), "deterministic": str(call.deterministic),
        "gradients": " ".join(wanted),
    }  # fmt: skip
    bind = functools.partial(foreign(_BACKWARD, shapes), call=call.key, **attributes)
    gradients = _differentiated_once(bind)(*read.values())
    return (dict.fromkeys(operands) | dict(zip(wanted, gradients, strict=True)),)


def _differentiated_once(function: Callable[..., Any]) -> Any:
    """Return a function of a gradient, whose own derivative raises UnsupportedError."""

    def refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            "attention has no second derivative: differentiate it once, or take "
            "jax.nn.dot_product_attention for a second derivative"
        )

    once: Any = jax.custom_jvp(function)
    once.defjvp(refuse)
    return once


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _bind_forward(
    call: _Call, operands: dict[str, jax.Array], *, with_lse: bool
) -> tuple[jax.Array, ...]:
    q = operands["q"]
    batch, length, heads = q.shape[0], q.shape[2], q.shape[1]
    if call.layout == "BSHD":
        length, heads = heads, length
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if with_lse:
        shapes.append(jax.ShapeDtypeStruct((batch, heads, length), jnp.float32))
    bind = foreign(_FORWARD, shapes)
    return tuple(bind(*operands.values(), call=call.key, operands=" ".join(operands)))


def _check_gradient(call: _Call, operands: Mapping[str, Any], o: Any, lse: Any) -> None:
    """Check by shapes and types that there is a gradient."""
    options = _options_of_backward(_options[call.key])

    def check(known: dict[str, Any]) -> None:
        constants = {**_constants(options), **_paired(known)}
        q, k, v, o, lse = (known[name] for name in ("q", "k", "v", "o", "lse"))
        backward.resolved_backward("attention_backward", o, q, k, v, o, lse, constants)

    facts = ("jax, gradients", *_facts(options))
    check_once(facts, {**operands, "o": o, "lse": lse}, check)


def _options_of_backward(options: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in options.items() if n not in _OF_FORWARD and n != "return_lse"}


# ---- functions that XLA calls --------------------------------------------------------------------


def _run_forward(
    buffers: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, str]
) -> None:
    """Run attention on the buffers of a call."""
    options = {**_recall(attributes["call"]), "return_lse": len(results) > 1}
    for operands, (o, *lse) in _entries(buffers, results, attributes, options):
        q, k, v = (operands[name] for name in "qkv")
        found = api.attention(q, k, v, **_paired(operands), **options)
        if lse:
            found, lse[0][...] = found
        o[...] = found


def _run_backward(
    buffers: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, str]
) -> None:
    """Run the backward pass on the buffers of a call."""
    options = _options_of_backward(_recall(attributes["call"]))
    options["deterministic"] = attributes["deterministic"] == "True" or None  # None: the faster
    wanted = attributes["gradients"].split()
    options["grad_bias"] = "bias" in wanted
    alone = options["grad_bias"] or "q_weight" in wanted
    for operands, gradients in _entries(buffers, results, attributes, options, alone=alone):
        d_out, q, k, v, out, lse = (operands[n] for n in ("d_out", "q", "k", "v", "out", "lse"))
        found = backward.attention_backward(
            d_out, q, k, v, out, lse, d_lse=operands.get("d_lse"), **_paired(operands), **options
        )
        for gradient, one in zip(gradients, found, strict=True):
            gradient[...] = one


def _recall(key: str) -> dict[str, Any]:
    if key not in _options:
        raise ValueError(
            "this call was traced in another process: trace it here, cupyattn's calls cannot be "
            "exported"
        )
    return _options[key]


def _entries(
    buffers: Sequence[Any],
    results: Sequence[Any],
    attributes: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    alone: bool = False,
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield operands by name and results, without the leading axes that `jax.vmap` added.

    They join the batch if one call on all entries equals separate calls, and never if `alone`.
    """
    operands = dict(zip(attributes["operands"].split(), buffers, strict=True))
    front = operands["q"].ndim - 4
    if not front:
        yield operands, list(results)
        return
    mapped = {name: x.shape[:front] for name, x in operands.items()}
    whole, batch = results[0].shape[:front], operands["q"].shape[front]
    tables = any(math.prod(mapped[name]) > 1 for name in _TABLES if name in mapped)
    joins = joins_the_batch(options.get("quant"), options.get("block_mask"))
    # An entry has its own gradient of a bias or weights, also where all entries share them.
    if joins and not tables and not alone:
        joined = {name: _joined(name, x, whole, batch) for name, x in operands.items()}
        yield joined, [x.reshape(math.prod(whole) * batch, *x.shape[front + 1 :]) for x in results]
        return
    yield from each_entry(operands, results, front)


def _joined(name: str, x: Any, whole: tuple[int, ...], batch: int) -> Any:
    """Return an operand with the mapped axes in its batch, copied if its strides require it."""
    rest = x.shape[len(whole) :]
    of_all = name in ("mask", "bias") and math.prod(x.shape[: len(whole)]) == rest[0] == 1
    if of_all or name in _TABLES:
        return x.reshape(rest)
    rest = rest[1:]
    every = array_namespace(x).broadcast_to(x, (*whole, batch, *rest))
    return every.reshape(math.prod(whole) * batch, *rest)


register(_FORWARD, _run_forward)
register(_BACKWARD, _run_backward)
