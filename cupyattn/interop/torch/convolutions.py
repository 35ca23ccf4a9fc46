"""`linear_convolutions`: convolutions without overlapping windows become linear layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cupyattn.interop.handle import NOT_COMPILED, Handle, target_of, uncompiled
from cupyattn.interop.selection import Patterns, Selection
from cupyattn.interop.torch.adapters import inner_of
from cupyattn.interop.torch.candidates import reason_unfit
from cupyattn.interop.torch.offloading import check_not_offloaded
from cupyattn.measure.words import printable

#: Supported convolutions of torch, by the number of axes of their windows.
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LinearConvolution(nn.Module):
    """A convolution of 1 x 1 windows or of patches, as a linear layer of each window's numbers.

    Parameters
    ----------
    convolution : Conv1d, Conv2d or Conv3d
        Its windows must not overlap or reach past the edge. The linear layer shares the memory of
        its weight, and has its bias.

    Attributes
    ----------
    linear : Linear
        An `Int8Linear` may take its place, as `replace_linear_with_int8` does it.

    Raises
    ------
    TypeError
        For another module.
    ValueError
        For a convolution with other windows.

    Examples
    --------
    >>> convolution = nn.Conv2d(4, 8, kernel_size=2, stride=2)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> layer = LinearConvolution(convolution)
    >>> layer.linear, bool((layer(x) - convolution(x)).abs().max() < 1e-5)
    (Linear(in_features=16, out_features=8, bias=True), True)
    """

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        if not isinstance(convolution, KINDS):
            raise TypeError(
                "convolution must be a torch.nn.Conv1d, Conv2d or Conv3d, got "
                f"{type(convolution).__name__}"
            )
        if reason := reason_unfit(convolution, KINDS) or overlap(convolution):
            raise ValueError(f"the convolution must stay as it is: {reason}")
        self.convolution = (convolution,)  # a tuple, so that its parameters are not listed twice
        self.kernel_size, self.stride = convolution.kernel_size, convolution.stride
        self.in_channels, self.out_channels = convolution.in_channels, convolution.out_channels
        weight, bias = convolution.weight, convolution.bias
        columns = self.in_channels * math.prod(self.kernel_size)
        linear = nn.Linear(columns, self.out_channels, bias=bias is not None, device="meta")
        rows = weight.detach().reshape(self.out_channels, columns)
        linear.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
        linear.bias = bias
        self.linear = linear
        self.train(convolution.training)

    @property
    def weight(self) -> Tensor:
        """The weight in the shape of the convolution's, for code that reads it."""
        return self.linear.weight.reshape(
            self.out_channels, self.in_channels, *self.kernel_size
        )

    @property
    def bias(self) -> Tensor | None:
        """The bias, for code that reads it."""
        found: Tensor | None = self.linear.bias
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Parameters
        ----------
        x : Tensor, (batch, in, ...) or (in, ...)
            As the convolution takes it.

        Returns
        -------
        Tensor, (batch, out, ...) or (out, ...)
            Contiguous.
        """
        axes = len(self.kernel_size)
        if x.dim() == axes + 1:
            return self.forward(x[None])[0]
        if x.dim() != axes + 2 or x.shape[1] != self.in_channels:
            sizes = ", ".join("*" * axes)
            raise RuntimeError(
                f"expected an input of shape (batch, {self.in_channels}, {sizes}), got "
                f"{tuple(x.shape)}"
            )
        for axis, (kernel, stride) in enumerate(
            zip(self.kernel_size, self.stride, strict=True), start=2
        ):
            if kernel == 1:
                x = x[(slice(None),) * axis + (slice(None, None, stride),)]
            elif x.shape[axis] < kernel:
                raise RuntimeError(
                    f"expected an input of at least one window, {tuple(self.kernel_size)}, got "
                    f"{tuple(x.shape[2:])}"
                )
            else:  # windows are adjacent; a remainder at the end belongs to none
                x = x.narrow(axis, 0, x.shape[axis] // kernel * kernel)
        batch, channels, *sizes = x.shape
        counts = [size // kernel for size, kernel in zip(sizes, self.kernel_size, strict=True)]
        split = [n for pair in zip(counts, self.kernel_size, strict=True) for n in pair]
        windows = x.reshape(batch, channels, *split)
        order = (0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2))
        rows = windows.permute(order).reshape(batch, *counts, self.linear.in_features)
        y: Tensor = self.linear(rows)
        return y.movedim(-1, 1).contiguous()

    def extra_repr(self) -> str:
        """Return the windows' sizes for ``repr``."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


def overlap(convolution: Any) -> str:
    """Return why a convolution is no linear layer of its windows; "" if it is one."""
    kernel, stride = convolution.kernel_size, convolution.stride
    if convolution.groups != 1:
        return f"it has {convolution.groups} groups of channels"
    padding = convolution.padding
    if any(padding if isinstance(padding, tuple) else _padded(padding, kernel)):
        return f"its windows reach past the edge, padding={convolution.padding!r}"
    pairs = [*zip(kernel, stride, convolution.dilation, strict=True)]
    if any(k > 1 and d > 1 for k, _, d in pairs):
        return f"its windows have gaps, dilation={convolution.dilation}"
    if any(k not in (1, s) for k, s, _ in pairs):
        times = math.prod(kernel) / math.prod(min(s, k) for k, s, _ in pairs)
        shown = " x ".join(map(str, kernel))
        return f"its {shown} windows overlap, and rows of them take {times:.3g} times the input"
    return ""


def _padded(padding: str, kernel: tuple[int, ...]) -> list[bool]:
    return [padding == "same" and size > 1 for size in kernel]


class Convolutions(Handle):
    """A model in which some convolutions are linear layers, until they are restored.

    `linear_convolutions` makes it. Calls and attributes go to the model; `target`, `replaced`,
    `kept`, `report` and `restore` belong to the handle. As a context manager it restores at the
    end.
    """

    __slots__ = ("_handle_kept", "_handle_replaced")
    _handle_maker = "linear_convolutions"
    _handle_arguments = ("include", "exclude")
    _handle_replaced: tuple[str, ...]
    _handle_kept: dict[str, str]

    def __init__(self, target: nn.Module, replaced: tuple[str, ...], kept: dict[str, str]) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_replaced", replaced)
        object.__setattr__(self, "_handle_kept", kept)

    @property
    def replaced(self) -> tuple[str, ...]:
        """Convolutions that became linear layers; a layer's name is theirs with ``.linear``."""
        return self._handle_replaced

    @property
    def kept(self) -> dict[str, str]:
        """Convolutions that did not become linear layers, each with the reason."""
        return self._handle_kept

    # If torch compiles a function that calls the handle, the error gives this reason.
    __call__ = torch.compiler.disable(Handle.__call__, recursive=False, reason=NOT_COMPILED)

    def report(self) -> str:
        """Return numbers, and for each convolution its new name, or the reason why it stays."""
        lines = [f"{len(self.replaced)} linear, {len(self.kept)} kept"]
        lines += [f"{name}: {name}.linear" for name in self.replaced]
        lines += [f"{name}: kept, {why}" for name, why in self.kept.items()]
        return "\n".join(map(printable, lines))

    def restore(self) -> None:
        """Put the convolutions back, with the weights and biases of the linear layers.

        A second call does nothing.

        Raises
        ------
        RuntimeError
            If a layer is still INT8: restore it first. Nothing is then restored.
        """
        model = uncompiled(self.target)
        found = _places(model, (LinearConvolution,))
        for name, _, _, layer in found:
            if type(layer.linear) is not nn.Linear:
                raise RuntimeError(
                    f"{printable(name)}.linear is a {type(layer.linear).__name__}: "
                    "call cupyattn.interop.restore(model) first"
                )
        for _, parent, part, layer in found:
            (convolution,) = layer.convolution
            convolution.weight = nn.Parameter(
                layer.weight.detach(), requires_grad=layer.linear.weight.requires_grad
            )
            convolution.bias = layer.linear.bias
            parent._modules[part] = convolution.train(layer.training)


def linear_convolutions(
    model: nn.Module, include: Patterns = None, exclude: Patterns = None
) -> Convolutions:
    """Make linear layers of the convolutions of a model whose windows do not overlap.

    Convolutions of 1 x 1 windows and embeddings of patches are products of rows.
    `replace_linear_with_int8` then takes each under its name with ``.linear`` behind it. All other
    convolutions stay. Rows of windows that overlap take several times the memory of their input,
    nine times for 3 x 3.

    Parameters
    ----------
    model : Module
        Modified in place. Results differ only by the order of sums.
    include, exclude : str or sequence of str, optional
        Regular expressions, searched in the names of convolutions: only those that match one of
        `include`, and none of `exclude`.

    Returns
    -------
    Convolutions
        A handle to use like the model, with `restore()` and `report()`.

    Raises
    ------
    TypeError
        If `model` is not a module: give a pipeline's transformer. For patterns that are not text.
    ValueError
        If no convolution becomes a linear layer, and for a pattern that is not a regular expression
        or matches no name. For a model whose weights are offloaded: remove the hooks first.

    Notes
    -----
    In a state dict ``weight`` and ``bias`` of such a layer are ``linear.weight``, with two axes,
    and ``linear.bias``: load weights before, or restore. By their names embeddings of patches keep
    16 bits in `replace_linear_with_int8`; ``model.proj.linear =
    Int8Linear.from_linear(model.proj.linear)`` makes one INT8 all the same.

    Examples
    --------
    >>> from cupyattn.interop.torch import replace_linear_with_int8
    >>> model = nn.Sequential(nn.Conv2d(256, 256, 1), nn.Conv2d(256, 8, 3))
    >>> with linear_convolutions(model) as handle:
    ...     print(handle.report())
    ...     with replace_linear_with_int8(model, backend="mirror") as int8:
    ...         print([*int8.replaced], model(torch.randn(1, 256, 4, 4)).shape)
    1 linear, 1 kept
    0: 0.linear
    1: kept, its 3 x 3 windows overlap, and rows of them take 9 times the input
    ['0.linear'] torch.Size([1, 8, 2, 2])
    """
    model = target_of(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: of a pipeline give the "
            "transformer"
        )
    selection, own = Selection.of(include, exclude), uncompiled(model)
    places = _places(own, KINDS)
    names = [*dict.fromkeys(name for name, *_ in places)]
    if names:
        selection.check(names, "convolution")
    check_not_offloaded(own)
    made: dict[nn.Module, tuple[str, LinearConvolution]] = {}
    kept: dict[str, str] = {}
    for name, parent, _, convolution in places:
        if convolution in made or name in kept:
            continue
        if name not in selection:
            kept[name] = "excluded"
        elif reason := _obstacle(parent, convolution):
            kept[name] = reason
        else:
            made[convolution] = name, LinearConvolution(convolution)
    if not made:
        why = "; ".join(printable(f"{n}: {reason}") for n, reason in [*kept.items()][:3])
        raise ValueError(
            f"no convolution of the model becomes a linear layer ({why or 'it has none'})"
        )
    for _, parent, part, convolution in places:
        if convolution in made:
            parent._modules[part] = made[convolution][1]
            convolution.weight = convolution.bias = None  # or they would stay on their device
    return Convolutions(model, tuple(name for name, _ in made.values()), kept)


def _obstacle(parent: nn.Module, convolution: nn.Module) -> str:
    """Return why a convolution of a model must stay; "" if it need not."""
    if inner_of(parent):
        return "it has an adapter"
    return reason_unfit(convolution, KINDS) or overlap(convolution)


def _places(
    model: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module, str, Any]]:
    """Return all places of modules of these kinds: name, parent, name in the parent, module."""
    return [
        (f"{name}.{part}" if name else part, parent, part, child)
        for name, parent in model.named_modules()
        for part, child in parent._modules.items()
        if isinstance(child, kinds)
    ]
