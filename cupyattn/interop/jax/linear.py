"""`Int8Linear` for JAX: a layer that is a pytree; its call is one foreign function of XLA."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import GetAttrKey

from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import array_namespace
from cupyattn.errors import UnsupportedError
from cupyattn.interop.jax.calls import (
    as_array,
    check_backend,
    check_once,
    each_entry,
    foreign,
    register,
)
from cupyattn.ops import linear
from cupyattn.ops.act_quant import places
from cupyattn.ops.gemm import GemmSettings, check_product
from cupyattn.plans.act_quant import padded
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, check_values, strategy_of_weight
from cupyattn.quant.rotation import group_of, matrix, unrotated

_NAME = "cupyattn_int8_linear"
#: Arrays of a layer, the leaves of its tree.
_LEAVES = ("codes", "scales", "bias", "outlier_weight", "places")


class _Call(NamedTuple):
    """The constants of a call."""

    activation: str
    columns: tuple[int, ...]
    out_dtype: str
    arch: str
    backend: str
    rotate: str
    #: Types of x and of the bias ("" without one), to which gradients are rounded.
    dtypes: tuple[str, str]


@jax.tree_util.register_pytree_with_keys_class
class Int8Linear:
    """A linear layer, ``activation(x W^T + bias)``, with W in INT8 and x quantised in each call.

    Parameters
    ----------
    codes : jax.Array, (out, in), int8
        Codes of W, as `cupyattn.weight_quant` makes them.
    scales : jax.Array, (ceil(out / 128), ceil(in / 128)) or (out, 1), any float type
        Scales of blocks, or of channels. With channels, x gets one scale for each row, and outliers
        are not supported.
    bias : jax.Array, (out,), float16, bfloat16 or float32, optional
    activation : {"gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}, optional
        The last three are gated linear units: the first half of W's rows is the gate. With
        ``"_gate_last"`` at the end of the name the gate comes second, as in diffusers. The result
        has ``out / 2`` columns, which is `out_features`.
    outlier_columns : sequence of int
        Columns of x, each once, that are multiplied in 16 bits instead of being quantised.
    outlier_weight : jax.Array, (out, outliers), float16 or bfloat16, optional
        These columns of W.
    rotate : {None, "hadamard", "hadamard_contiguous"}
        As for `cupyattn.Int8Linear`.
    block_size : int
        Rows and columns of W that share a scale: 128.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`; a call may name others.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `cupyattn.Int8Linear`.

    Notes
    -----
    A layer is a pytree: arrays are its leaves, everything else belongs to its structure. It passes
    through `jax.jit` as an argument or a constant, and layers that are stacked through
    `jax.lax.scan`. A call is one foreign function: codes and scales of x, then the product, on the
    stream of XLA and without a device synchronisation.

    x and the bias get gradients, through the dequantised weight; quantising x counts as the
    identity. With `activation` or `residual` there are no gradients.

    Under `jax.vmap` mapped axes of x, residual and gate are further rows of one product. A mapped
    weight or bias takes a product for each entry.

    Examples
    --------
    >>> keys = jax.random.split(jax.random.key(0))
    >>> w, x = (jax.random.normal(k, s) for k, s in zip(keys, ((40, 256), (3, 256))))
    >>> layer = Int8Linear.from_weight(w)
    >>> y = jax.jit(lambda layer, x: layer(x))(layer, x)
    >>> y.shape, bool(jnp.linalg.norm(y - x @ w.T) < 0.03 * jnp.linalg.norm(y))
    ((3, 40), True)
    """

    def __init__(
        self,
        codes: Any,
        scales: Any,
        bias: Any = None,
        *,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_weight: Any = None,
        rotate: str | None = None,
        block_size: int = BLOCK_SIZE,
        arch: str | None = None,
        backend: str | None = None,
    ) -> None:
        linear.check_given(linear.FROM_WEIGHT, codes, scales)
        codes, scales = as_array("codes", codes), as_array("scales", scales)
        if scales.dtype.name in linear.FLOATS:
            scales = scales.astype(jnp.float32)
        bias = None if bias is None else as_array("bias", bias)
        if outlier_weight is not None:
            outlier_weight = as_array("outlier_weight", outlier_weight)
        arrays = linear.LayerArrays(codes, scales, bias, outlier_weight)
        settings = linear.LayerSettings(
            activation, outlier_columns, block_size, arch, backend, rotate
        )
        columns = linear.check_layer(arrays, settings)
        self.codes, self.scales, self.bias = codes, scales, bias
        self.outlier_weight = self.places = None
        if outlier_weight is not None:  # as wide as the product reads it
            beside = padded(columns.size) - columns.size
            self.outlier_weight = jnp.pad(outlier_weight, ((0, 0), (0, beside)))
            self.places = jnp.asarray(places(columns, codes.shape[1]))
        self.outlier_columns: tuple[int, ...] = tuple(columns.tolist())
        self.activation, self.rotate = activation, rotate
        self.arch, self.backend = arch, backend

    @classmethod
    def from_weight(
        cls,
        weight: Any,
        bias: Any = None,
        *,
        strategy: str = "block",
        rotate: str | None = None,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_dtype: str | None = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> Int8Linear:
        """Quantise a weight, outside of a trace.

        Parameters
        ----------
        weight : array, (out, in), float16, bfloat16 or float32
            JAX, NumPy, CuPy, or anything with DLPack. Not modified.
        bias : jax.Array, (out,), optional
        strategy, rotate, activation, outlier_columns, outlier_dtype, arch, backend
            As for `cupyattn.Int8Linear.from_weight`.

        Returns
        -------
        Int8Linear

        Raises
        ------
        TypeError, ValueError
            As for `cupyattn.Int8Linear.from_weight`; `TypeError` also for a traced weight.
        """
        _, as_given = take("weight", weight)
        made = linear.Int8Linear.from_weight(
            weight, strategy=strategy, rotate=rotate, outlier_columns=outlier_columns,
            outlier_dtype=outlier_dtype,
        )  # fmt: skip
        columns, kept = made.outlier_columns.tolist(), made.outlier_weight
        if kept is not None:
            kept = _moved(kept[:, : len(columns)].copy(), as_given)
        return cls(
            _moved(made.codes, as_given), _moved(made.scales, as_given), bias,
            activation=activation, outlier_columns=columns, outlier_weight=kept, rotate=rotate,
            arch=arch, backend=backend,
        )  # fmt: skip

    @property
    def strategy(self) -> str:
        """The groups that share a scale: "block" or "channel"."""
        return linear.strategy_of_layer(self.codes.shape, self.scales.shape, self.rotate)

    @property
    def out_features(self) -> int:
        """Columns of a result."""
        return columns_of(self.codes.shape[-2], self.activation or "")

    def __call__(
        self,
        x: Any,
        *,
        out_dtype: str | None = None,
        residual: Any = None,
        gate: Any = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> jax.Array:
        """Apply the layer.

        Parameters
        ----------
        x : jax.Array, (..., in), float16, bfloat16 or float32
            May be traced. With outliers in 16 bits, x has their type or float32.
        out_dtype : {"float16", "bfloat16", "float32"}, optional
            The type of x when omitted.
        residual, gate : jax.Array, optional
            As for `cupyattn.int8_gemm`: the call returns ``residual + gate layer(x)``.
        arch, backend
            As for `cupyattn.int8_gemm`; those of the layer when omitted.

        Returns
        -------
        jax.Array, (..., out), out_dtype

        Raises
        ------
        TypeError, ValueError, UnsupportedError
            As for `cupyattn.Int8Linear`, while the call is traced. `UnsupportedError` also for a
            gradient with `activation` or `residual`, or of anything but x and the bias.
        jax.errors.JaxRuntimeError
            For errors that show only when it runs, with the exception's type and message.
        """
        given = {name: getattr(self, name) for name in _LEAVES}
        given = {"x": x, **given, "residual": residual, "gate": gate}
        operands = {name: as_array(name, a) for name, a in given.items() if a is not None}
        if "x" not in operands:
            raise TypeError("x must be a JAX array, got None")
        x, bias = operands["x"], operands.get("bias")
        call = _Call(
            self.activation or "", self.outlier_columns,
            x.dtype.name if out_dtype is None else out_dtype,
            (self.arch if arch is None else arch) or "",
            (self.backend if backend is None else backend) or "", self.rotate or "",
            (x.dtype.name, "" if bias is None else bias.dtype.name),
        )  # fmt: skip
        check_once(("jax, int8_linear", call), operands, functools.partial(_check_call, call))
        return _apply(call, operands)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return arrays with their names, and the constants of the structure."""
        leaves = tuple((GetAttrKey(name), getattr(self, name)) for name in _LEAVES)
        fixed = self.activation, self.outlier_columns, self.arch, self.backend, self.rotate
        return leaves, fixed

    @classmethod
    def tree_unflatten(cls, fixed: Any, leaves: Any) -> Int8Linear:
        """Return a layer of these leaves, which JAX may have replaced by other objects."""
        layer = object.__new__(cls)
        vars(layer).update(zip(_LEAVES, leaves, strict=True))
        layer.activation, layer.outlier_columns, layer.arch, layer.backend, layer.rotate = fixed
        return layer


def _moved(array: Any, as_given: Any) -> jax.Array:
    """Return a NumPy or CuPy array as a JAX array, on the device of its weight."""
    array = as_given(array)
    if isinstance(array, (np.ndarray, jax.Array)):
        return jnp.asarray(array)
    return jnp.from_dlpack(array)


def _check_call(call: _Call, known: Mapping[str, Any]) -> None:
    """Check a call by descriptions of its operands."""
    x, codes, scales = known["x"], known["codes"], known["scales"]
    linear.check_input(x, codes, known.get("outlier_weight"))
    check_values("x", x, least_axes=1)
    check_backend(call.backend or None)
    of_rows = 1 if strategy_of_weight(codes.shape, scales.shape) == "channel" else scales.shape[1]
    product = {
        "a": Described.contiguous("a", x.shape, "int8"),
        "a_scales": Described.contiguous("a_scales", (*x.shape[:-1], of_rows), "float32"),
        "b": codes, "b_scales": scales,
    }  # fmt: skip
    product |= {name: known[name] for name in ("bias", "residual", "gate") if name in known}
    asked = GemmSettings(call.out_dtype, call.activation, None, call.arch or None, "mirror")
    check_product(asked, product)


# ---- functions that JAX transforms ---------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(call: _Call, operands: dict[str, jax.Array]) -> jax.Array:
    """Run a layer as one foreign function."""
    columns = columns_of(operands["codes"].shape[0], call.activation)
    shape = (*operands["x"].shape[:-1], columns)
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(call.out_dtype))
    bind = foreign(_NAME, result)
    y: jax.Array = bind(
        *operands.values(), operands=" ".join(operands), activation=call.activation,
        columns=" ".join(map(str, call.columns)), arch=call.arch, backend=call.backend,
        rotate=call.rotate,
    )  # fmt: skip
    return y


def _apply_fwd(call: _Call, primals: dict[str, Any]) -> tuple[jax.Array, Any]:
    operands = {name: primal.value for name, primal in primals.items()}
    perturbed = [name for name, primal in primals.items() if primal.perturbed]
    if perturbed and call.activation:
        raise UnsupportedError(
            f"the derivative of Int8Linear is not implemented with activation="
            f"{call.activation!r}: leave it out, and apply JAX's own to the result"
        )
    if perturbed and "residual" in operands:
        raise UnsupportedError(
            "the derivative of Int8Linear is not implemented beside residual: leave it out, and "
            "add it to the result"
        )
    for name in perturbed:
        if name not in ("x", "bias"):
            raise UnsupportedError(
                f"Int8Linear has no gradient with respect to {name}: differentiate x and bias "
                "alone, or pass jax.lax.stop_gradient of it"
            )
    read = {name: x for name, x in operands.items() if name not in ("x", "bias")}
    return _apply(call, operands), read


def _apply_bwd(call: _Call, operands: dict[str, Any], d_y: Any) -> tuple[dict[str, Any]]:
    """Pass a gradient through the dequantised weight; quantising x counts as the identity."""
    of_x, of_bias = call.dtypes
    found = dict.fromkeys([*operands, "x", *(["bias"] if of_bias else [])])
    if not isinstance(d_y, SymbolicZero):
        weight = _dequantised(call, operands).astype(d_y.dtype)
        found["x"] = jnp.matmul(d_y, weight, preferred_element_type=jnp.float32).astype(of_x)
        if of_bias:
            rows = d_y.reshape(-1, d_y.shape[-1])
            found["bias"] = rows.sum(0, dtype=jnp.float32).astype(of_bias)
    return (found,)


_apply.defvjp(_apply_fwd, _apply_bwd, symbolic_zeros=True)


def _dequantised(call: _Call, operands: Mapping[str, jax.Array]) -> jax.Array:
    """Return codes times scales in float32, rotated back, with columns kept in 16 bits."""
    codes, scales = operands["codes"], operands["scales"]
    if strategy_of_weight(codes.shape, scales.shape) == "block":
        rows, columns = codes.shape
        scales = jnp.repeat(jnp.repeat(scales, BLOCK_SIZE, 0)[:rows], BLOCK_SIZE, 1)[:, :columns]
    weight = codes.astype(jnp.float32) * scales
    if call.columns:
        kept = operands["outlier_weight"][:, : len(call.columns)].astype(jnp.float32)
        weight = weight.at[:, np.array(call.columns)].set(kept)
    if call.rotate:
        signs = matrix(jnp.arange(group_of(weight.shape[1]))).astype(jnp.float32)
        weight = unrotated(weight, call.rotate, signs)
    return weight


# ---- functions that XLA calls --------------------------------------------------------------------


def _run(buffers: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, str]) -> None:
    """Run a layer on the buffers of a call."""
    (y,) = results
    if not y.size:
        return
    operands = dict(zip(attributes["operands"].split(), buffers, strict=True))
    front = operands["codes"].ndim - 2
    if all(math.prod(operands[n].shape[:front]) == 1 for n in _LEAVES if n in operands):
        _multiply(_joined(operands, y.shape[:front]), y, attributes)
        return
    for one, (of_one,) in each_entry(operands, results, front):
        _multiply(one, of_one, attributes)


def _multiply(operands: Mapping[str, Any], y: Any, attributes: Mapping[str, str]) -> None:
    """Quantise x and write the product to y."""
    outliers = None
    if "outlier_weight" in operands:
        columns = np.array(attributes["columns"].split(), np.int32)
        outliers = linear.Outliers(columns, operands["places"], operands["outlier_weight"])
    linear.quantised_product(
        operands["x"], operands["codes"], operands["scales"], y.dtype.name, outliers=outliers,
        bias=operands.get("bias"), activation=attributes["activation"] or None,
        residual=operands.get("residual"), gate=operands.get("gate"),
        rotate=attributes["rotate"] or None, arch=attributes["arch"] or None,
        backend=attributes["backend"] or None, out=y,
    )  # fmt: skip


def _joined(operands: Mapping[str, Any], whole: tuple[int, ...]) -> dict[str, Any]:
    """Return operands whose mapped axes precede the rows; the weight must not be mapped."""
    front, found = len(whole), {}
    for name, x in operands.items():
        own = x.shape[front:]
        if name in _LEAVES:
            found[name] = x.reshape(own)
        elif name == "gate" and front:  # groups of every entry, one after the other
            groups = array_namespace(x).broadcast_to(x, (*whole, *own))
            found[name] = groups.reshape(-1, own[-1])
        else:
            found[name] = array_namespace(x).broadcast_to(x, (*whole, *own))
    return found


register(_NAME, _run)
