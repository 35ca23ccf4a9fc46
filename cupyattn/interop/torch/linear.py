"""`Int8Linear`: a linear layer of INT8 codes as a module, and as an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.described import Described
from cupyattn.checkpoints.schemes import ROTATION
from cupyattn.errors import UnsupportedError, shown
from cupyattn.interop.torch import epilogues, linear_parts
from cupyattn.interop.torch.bridge import as_array, as_tensor, dtype_of, on_device_of
from cupyattn.interop.torch.linear_parts import multiply, results_of
from cupyattn.interop.torch.offloading import check_readable, home_of, offload_codes
from cupyattn.interop.torch.ops import autograd_state, define, differentiate, is_exported
from cupyattn.interop.torch.read_only import ReadOnlyWeight, compiled_weight, refuse_write
from cupyattn.interop.torch.transforms import first_axis
from cupyattn.kernels.row_teams import RUN
from cupyattn.ops.linear import (
    LayerArrays,
    LayerSettings,
    check_given,
    check_layer,
    check_weight,
    quantised_weight,
    strategy_of_layer,
)
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of_weight
from cupyattn.quant.rotation import CONTIGUOUS, group_of, marker, matrix, unrotated
from cupyattn.quant.smoothing import check_powers


def run(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    arch: str | None,
    backend: str | None,
    rotate: str | None = None,
    smooth: Tensor | None = None,
) -> Tensor:
    """Quantise x and multiply: the operator's kernel on a CPU or a CUDA device."""
    own = (weight, weight_scale, bias),
    (y,) = multiply(x, own, (activation,), arch, backend, rotate, smooth)
    return y


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str, *_: Any
) -> Tensor:
    (y,) = results_of(x, ((weight,),), (activation,))
    return y


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, weight_scale, bias, activation, _, _, *rest = inputs  # without defaults
    if activation:
        raise UnsupportedError(
            f"the derivative for 'cupyattn::int8_linear' is not implemented with activation="
            f"{activation!r}: leave it out, and apply torch's own to the result"
        )
    ctx.rotate, smooth = (*rest, None, None)[:2]
    ctx.save_for_backward(weight, weight_scale, smooth)
    ctx.others = len(inputs) - 4
    ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype


def _derivative(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    """Pass a gradient through the dequantised weight; quantising x counts as the identity."""
    d_x = d_bias = None
    if ctx.needs_input_grad[0]:
        weight, weight_scale, smooth = ctx.saved_tensors
        read = dequantised(weight, weight_scale, d_y.dtype, ctx.rotate, smooth)
        d_x = (d_y @ read).to(ctx.dtype)
    if ctx.needs_input_grad[3]:
        rows = d_y if d_y.dim() > 1 else d_y[None]
        d_bias = rows.sum(tuple(range(rows.dim() - 1)), dtype=torch.float32).to(ctx.bias)
    return d_x, None, None, d_bias, *[None] * ctx.others


def _join(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
    """Run a layer on an x with a mapped axis, which counts as a further leading axis."""
    x_axis, *others = in_dims
    if x_axis is None or any(axis is not None for axis in others):
        return None
    x, *rest = arguments
    return int8_linear(first_axis(x, x_axis), *rest)


def dequantised(
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    rotate: str | None = None,
    smooth: Tensor | None = None,
) -> Tensor:
    """Return codes times scales, bit for bit as `cupyattn.weight_dequant` does.

    A rotated weight is rotated back, in float32. Factors of channels multiply its numbers.
    """
    rows, columns = weight.shape
    if rotate is not None or smooth is not None:
        numbers = weight.float() * weight_scale
        if rotate is not None:
            signs = matrix(torch.arange(group_of(columns), device=weight.device)).float()
            numbers = unrotated(numbers, rotate, signs)
        return (numbers if smooth is None else numbers * smooth).to(dtype)
    if strategy_of_weight(weight.shape, weight_scale.shape) == "channel":
        return (weight.to(torch.float32) * weight_scale).to(dtype)
    scale = weight_scale.repeat_interleave(BLOCK_SIZE, 0)[:rows]
    scale = scale.repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
    return (weight.to(torch.float32) * scale).to(dtype)


def _refuse_outliers(columns: list[int]) -> None:
    if columns:
        raise UnsupportedError(
            f"outlier_columns are not supported in a module, got {columns}: leave them out, or use "
            "cupyattn.Int8Linear, which takes tensors without gradients"
        )


def _form(name: str, tensor: Tensor | None) -> Described | None:
    """Describe a tensor by its shape and type; refuse other objects."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
    return Described.contiguous(name, tuple(tensor.shape), dtype_of(name, tensor.dtype))


int8_linear = define(
    "int8_linear",
    "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, str activation, str? arch, "
    "str? backend, str? rotate=None, Tensor? smooth=None",
    "Tensor", run, _fake,
)  # fmt: skip
differentiate(int8_linear, _derivative, _save, _join)


#: The present and the former name of a layer's codes in a state dict.
CODES, FORMER_CODES = "weight_codes", "weight"
#: The name of a layer's factors of channels, if it has any.
SMOOTH = "weight_smooth"
#: A layer's buffers that keep their type when the module is converted.
_OWN = (CODES, "weight_scale", ROTATION, SMOOTH)


class Int8Linear(torch.nn.Linear):
    """A linear layer, ``activation(x W^T + bias)``, with W in INT8 and x quantised in each call.

    Parameters
    ----------
    codes : Tensor, (out, in), int8
        Codes of W, as `cupyattn.weight_quant` makes them.
    scales : Tensor, (ceil(out / 128), ceil(in / 128)) or (out, 1)
        Of blocks, or of channels: then x gets a scale for each row. Of any float type; the layer
        keeps float32.
    bias : Tensor or Parameter, (out,), float16, bfloat16 or float32, optional
        A parameter stays one, and may be trained.
    activation : {"gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"}, optional
        The last three are gated linear units: W has the rows of the gate, then as many others. With
        ``"_gate_last"`` behind these names the gate's rows come second, as in diffusers. The result
        has ``out / 2`` columns, which is `out_features`.
    outlier_columns : sequence of int
        Empty: `cupyattn.Int8Linear` keeps columns in 16 bits, and takes tensors.
    outlier_weight : None
        Goes with `outlier_columns`.
    rotate : {None, "hadamard", "hadamard_contiguous"}
        As for `cupyattn.Int8Linear`.
    smooth : Tensor, (in,), float32, optional
        Factors of the channels of x, as for `cupyattn.Int8Linear`. Layers of one input that are
        compiled share a pass over it if they have the same tensor.
    block_size : int
        Rows and columns of W that share a scale: 128.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.

    Raises
    ------
    TypeError, ValueError
        For tensors that do not fit together.
    UnsupportedError
        For another `block_size`, and for `outlier_columns`.

    Notes
    -----
    Constructor, `from_weight`, and `residual` and `gate` of a call are those of
    `cupyattn.Int8Linear` and `cupyattn.interop.jax.Int8Linear`. Codes and scales are the buffers
    `weight_codes` and `weight_scale`; the scales stay float32 when the module is converted. A state
    dict with the codes under ``weight``, as in compressed-tensors, is loaded, too. Of a rotated
    weight it has `weight_rotation`, which only a layer of that rotation loads. A gradient goes
    to x and to the bias, through the weight that the codes stand for. `smooth` is the buffer
    `weight_smooth`.

    `weight` is what other libraries read: a tensor of the type `weight_dtype`, whose numbers are
    made of the codes whenever something reads them. Every write to it is refused, in
    compiled code as well. Under ``torch.export`` it is a copy.

    Examples
    --------
    >>> linear = torch.nn.Linear(256, 40, dtype=torch.bfloat16)
    >>> layer = Int8Linear.from_linear(linear, backend="mirror")
    >>> x = torch.randn(3, 256, dtype=torch.bfloat16)
    >>> layer(x).shape, bool((layer(x) - linear(x)).norm() < 0.03 * linear(x).norm())
    (torch.Size([3, 40]), True)
    """

    weight_codes: Tensor
    weight_scale: Tensor
    weight_smooth: Tensor | None
    #: The type of `weight`: that of the quantised weight, converted with the module.
    weight_dtype: torch.dtype

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_weight: Tensor | None = None,
        rotate: str | None = None,
        smooth: Tensor | None = None,
        block_size: int = BLOCK_SIZE,
        arch: str | None = None,
        backend: str | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)  # a Linear would make a weight
        check_given("from_linear(linear) makes them of a torch.nn.Linear", codes, scales)
        given = getattr(scales, "dtype", None)
        if isinstance(scales, Tensor) and scales.is_floating_point():
            scales = scales.detach().float()
        arrays = LayerArrays(
            _form("codes", codes), _form("scales", scales), _form("bias", bias),
            _form("outlier_weight", outlier_weight), _form("smooth", smooth),
        )  # fmt: skip
        settings = LayerSettings(activation, outlier_columns, block_size, arch, backend, rotate)
        _refuse_outliers(check_layer(arrays, settings).tolist())
        self.register_buffer(CODES, codes)
        self.register_buffer("weight_scale", scales)
        if smooth is not None and not smooth.is_meta:
            check_powers(as_array(smooth.detach().cpu()))
        self.register_buffer(SMOOTH, smooth)
        self.rotate = rotate
        if rotate is not None:
            mark = torch.tensor(marker(rotate, codes.shape[1]), dtype=torch.int32)
            self.register_buffer(ROTATION, mark.to(codes.device))
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        self.out_features = columns_of(codes.shape[0], activation or "")
        self.in_features = codes.shape[1]
        self.strategy = strategy_of_layer(codes.shape, scales.shape, rotate, smooth)
        self.activation, self.arch, self.backend = activation, arch, backend
        like_scales = given if given in (torch.float16, torch.bfloat16) else None
        self.weight_dtype = like_scales or torch.get_default_dtype()
        if bias is not None:
            self.weight_dtype = bias.dtype

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, (rows of the codes, in), made when it is read.

        Raises
        ------
        RuntimeError
            For every write, and when numbers are read of codes that are offloaded.
        """
        codes, scales, dtype = self.weight_codes, self.weight_scale, self.weight_dtype
        how = self.rotate, self.weight_smooth
        if torch.compiler.is_compiling():
            check_readable(self, codes)
            numbers = dequantised(codes, scales, dtype, *how)
            return numbers if is_exported() else compiled_weight(numbers)
        like = torch.empty(codes.shape, dtype=dtype, device="meta")

        def read() -> Tensor:
            check_readable(self, codes)
            return dequantised(codes, scales, dtype, *how)

        found = ReadOnlyWeight(like, home_of(self, codes), read)
        found.codes = codes
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another weight, but accept the same one from PEFT; let accelerate move codes."""
        if name == "weight":
            if getattr(value, "codes", None) is not self.weight_codes:
                refuse_write()
            return
        super().__setattr__(name, value)
        if name == "_hf_hook":
            offload_codes(self, value)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, strategy: str = "block", **options: Any
    ) -> Int8Linear:
        """Quantise the weight of a layer on its device; the bias is the same parameter.

        Parameters
        ----------
        linear : Linear
            Weight in float16, bfloat16 or float32. Not modified.
        strategy : {"block", "channel"}
            As for `from_weight`.
        **options
            As for `from_weight`.

        Returns
        -------
        Int8Linear

        Raises
        ------
        TypeError
            If `linear` is not a linear layer, or already INT8.
        ValueError, UnsupportedError
            As for `from_weight`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(
                f"linear must be a torch.nn.Linear, got {type(linear).__name__}: "
                "replace_linear_with_int8 takes a whole model"
            )
        if isinstance(linear, Int8Linear):
            raise TypeError("linear is an Int8Linear already: use it as it is")
        return cls.from_weight(linear.weight, linear.bias, strategy=strategy, **options)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        strategy: str = "block",
        rotate: str | None = None,
        smooth: Tensor | None = None,
        activation: str | None = None,
        outlier_columns: Sequence[int] = (),
        outlier_dtype: str | None = None,
        arch: str | None = None,
        backend: str | None = None,
    ) -> Int8Linear:
        """Quantise a weight on its device.

        Parameters
        ----------
        weight : Tensor, (out, in), float16, bfloat16 or float32
            Not modified.
        bias : Tensor or Parameter, (out,), optional
        strategy, rotate, smooth, activation, arch, backend
            As for `cupyattn.Int8Linear.from_weight`.
        outlier_columns, outlier_dtype
            Left out, as for `Int8Linear`.

        Returns
        -------
        Int8Linear

        Raises
        ------
        TypeError, ValueError
            For a weight that is no tensor, or of another type or shape.
        UnsupportedError
            For `outlier_columns`.
        """
        _refuse_outliers(list(outlier_columns))
        if outlier_dtype is not None:
            raise ValueError(
                f"outlier_dtype goes with outlier_columns, got {outlier_dtype!r}: leave it out"
            )
        if not isinstance(weight, Tensor):
            raise TypeError(f"weight must be a tensor, got {shown(weight)}")
        check_weight(weight)
        if smooth is not None and not isinstance(smooth, Tensor):
            raise TypeError(f"smooth must be a tensor, got {shown(smooth)}")
        # Tensors of inference mode allow neither gradients nor loading.
        with on_device_of(weight), torch.inference_mode(mode=False):
            factors = None if smooth is None else as_array(smooth)
            made = quantised_weight(as_array(weight), strategy, rotate, factors)
            codes, scales = map(as_tensor, made)
            made = cls(
                codes, scales, bias, activation=activation, rotate=rotate, smooth=smooth,
                arch=arch, backend=backend,
            )  # fmt: skip
        made.weight_dtype = weight.dtype
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Int8Linear:
        """Move tensors, and convert all but codes and scales, as ``to`` does."""
        scale: Tensor = self.weight_scale
        kept = {name: self._buffers[name] for name in _OWN if name in self._buffers}
        super()._apply(fn, *args, **kwargs)
        for name, x in kept.items():
            now = self._buffers[name]
            if x is not None and now is not None and now.dtype != x.dtype:
                self._buffers[name] = x.to(now.device)
        like = torch.empty(0, dtype=self.weight_dtype, device=scale.device)
        self.weight_dtype = fn(like).dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load codes with their scales; report unsuitable tensors, and then copy nothing."""
        former = prefix + FORMER_CODES
        if former in state_dict and prefix + CODES not in state_dict:
            state_dict = {
                prefix + CODES if name == former else name: x for name, x in state_dict.items()
            }
        if refusal := self._unfit(state_dict, prefix):
            error_msgs.append(refusal)
            return
        for name in (prefix + "weight_scale", prefix + SMOOTH):
            given = state_dict.get(name)
            if isinstance(given, Tensor) and given.dtype != torch.float32:  # assign=True keeps it
                state_dict = {**state_dict, name: given.float()}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _unfit(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Return why a state dict's tensors are no codes and scales of this layer, or ""."""
        codes, scales = (state_dict.get(prefix + name) for name in (CODES, "weight_scale"))
        if isinstance(codes, Tensor) and codes.dtype != torch.int8:
            return (
                f"{prefix}weight must be INT8 codes of shape {tuple(self.weight_codes.shape)}, got "
                f"{codes.dtype} of shape {tuple(codes.shape)}: load weights that are no codes "
                "before replace_linear_with_int8, or after restore()"
            )
        if isinstance(scales, Tensor) and not scales.is_floating_point():
            return f"{prefix}weight_scale must be of a float type, got {scales.dtype}"
        if (codes is None) != (scales is None):
            present, absent = CODES, "weight_scale"
            if codes is None:
                present, absent = absent, present
            return f"{prefix}{present} needs {prefix}{absent} beside it: load both, or neither"
        if {prefix + CODES, prefix + ROTATION} & state_dict.keys() and (
            refusal := self._otherwise_rotated(state_dict, prefix)
        ):
            return refusal
        own_smooth, other_smooth = self.weight_smooth, state_dict.get(prefix + SMOOTH)
        if {prefix + CODES, prefix + SMOOTH} & state_dict.keys() and (
            (own_smooth is None) != (other_smooth is None)
        ):
            marks = ["no factors" if x is None else "factors" for x in (other_smooth, own_smooth)]
            return (
                f"{prefix}{CODES} have {marks[0]} of channels, the layer has {marks[1]}: load them "
                "into a layer that was made with smooth alike"
            )
        if isinstance(other_smooth, Tensor) and not other_smooth.is_meta:
            try:
                check_powers(as_array(other_smooth.detach().to("cpu", torch.float32)))
            except ValueError as error:
                return f"{prefix}{SMOOTH}: {error}"
        for name, own, given in (
            (CODES, self.weight_codes, codes), ("weight_scale", self.weight_scale, scales)
        ):  # fmt: skip
            if isinstance(given, Tensor) and given.shape != own.shape:
                return (
                    f"{prefix}{name} must have shape {tuple(own.shape)}, as the layer has with "
                    f"strategy={self.strategy!r}, got {tuple(given.shape)}: load it into a layer "
                    "of that size and strategy"
                )
        return ""

    def _otherwise_rotated(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Return that the codes' rotation differs from the layer's, or ""."""
        given = state_dict.get(prefix + ROTATION)
        own = None if self.rotate is None else [*marker(self.rotate, self.in_features)]
        if given is not None and given.is_meta:  # its numbers come later, with the codes
            given = torch.tensor(own or [])
        marks = [None if given is None else given.tolist(), own]
        texts = ["not rotated" if mark is None else f"rotated as {mark}" for mark in marks]
        if marks[0] == marks[1]:
            return ""
        return (
            f"{prefix}{CODES} are {texts[0]}, the layer is {texts[1]} (rotate={self.rotate!r}): "
            "load them into a layer that was made with the same rotate"
        )

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Apply the layer.

        Parameters
        ----------
        x : Tensor, (..., in), float16, bfloat16 or float32
            Under ``torch.autocast`` it gets its type first.
        residual, gate : Tensor, optional
            As for `cupyattn.int8_gemm`: the call returns ``residual + gate layer(x)``.
        activation : str, optional
            For this call, in place of the layer's own.

        Returns
        -------
        Tensor, (..., out)
            Type of x, on its device.

        Raises
        ------
        RuntimeError
            For an x of another shape, or on another device.
        TypeError
            For another type, and if an argument is not a tensor.
        UnsupportedError
            For a gradient with `activation` or beside `residual`, and for forward-mode derivatives.
        """
        traced = isinstance(x, torch.fx.Proxy)  # which has neither shape nor type
        if not traced:
            x = self._checked(x)
        smooth = self.weight_smooth
        if self.rotate == CONTIGUOUS:
            x, smooth = self._spread(x), None if smooth is None else self._spread(smooth)
        given = x, self.weight_codes, self.weight_scale, self.bias
        rotate = None if self.rotate is None else "hadamard"
        where = self.arch, self.backend, rotate, smooth
        options: tuple[Any, ...] = activation or self.activation or "", *where
        if torch.compiler.is_compiling():
            epilogues.register()
        y: Tensor
        if residual is not None or gate is not None:
            if residual is None:
                raise ValueError(
                    "gate goes with residual, got residual=None: give zeros to add nothing"
                )
            beside = *given, residual, gate
            seen = traced or any(autograd_state(beside))
            operator = linear_parts.layer if seen else linear_parts.run_layer
            y = operator(*beside, *options)
            return y
        if traced or any(autograd_state(given)):
            y = int8_linear(*given, *options)
            return y
        return run(*given, *options)

    def _spread(self, x: Tensor) -> Tensor:
        """Move channels as `cupyattn.quant.rotation.spread` does."""
        group = group_of(self.in_features)
        runs = x.unflatten(-1, (self.in_features // group, group // RUN, RUN))
        return runs.transpose(-3, -2).flatten(-3)

    def _checked(self, x: Any) -> Tensor:
        """Return a valid input, in the type of an autocast region."""
        if not isinstance(x, Tensor):
            raise TypeError(f"Int8Linear(): argument 'x' must be Tensor, not {type(x).__name__}")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"expected an input of shape (..., {self.in_features}), got {tuple(x.shape)}"
            )
        if x.device != self.weight_codes.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but x is on "
                f"{x.device}, weight is on {self.weight_codes.device}"
            )
        place = x.device.type
        if place != "meta" and torch.is_autocast_enabled(place) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(place))
        return x

    def extra_repr(self) -> str:
        """Return sizes, strategy of scales, type of the weight, and settings for ``repr``."""
        named = {
            "in_features": self.in_features, "out_features": self.out_features,
            "bias": self.bias is not None, "strategy": self.strategy, "rotate": self.rotate,
            "smooth": None if self.weight_smooth is None else True,
            "weight_dtype": self.weight_dtype, "activation": self.activation, "arch": self.arch,
            "backend": self.backend,
        }  # fmt: skip
        return ", ".join(f"{name}={x!r}" for name, x in named.items() if x is not None)
