"""Keyword arguments of `cupyattn.attention`, for functions that take them as ``**options``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.settings import Settings
from cupyattn.quant.config import QuantConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = Any  # annotations are not evaluated, and Python 3.10 has none

P = ParamSpec("P")
R = TypeVar("R")


class PlaceOptions(TypedDict, total=False):
    """Options that need no arrays: factor and cap of the scores, and the keys of a row."""

    scale: float | None
    causal: bool
    causal_align: str
    window: tuple[int, int]
    softcap: float


class MaskedOptions(PlaceOptions, total=False):
    """Options that change or mask scores."""

    mask: Any
    bias: Any
    block_mask: BlockMask | None


class TurnedOptions(MaskedOptions, total=False):
    """Options of scores whose queries and keys may be turned by their positions."""

    rope: Any
    rope_interleaved: bool
    rope_offset_q: int


class ProblemOptions(TurnedOptions, total=False):
    """Options that decide the exact result."""

    qk_norm: Any
    qk_norm_eps: float
    lengths_q: Any
    lengths_kv: Any
    layout: str


class RunOptions(TypedDict, total=False):
    """Options that say where a call runs."""

    arch: str | None
    backend: str | None


class KernelOptions(RunOptions, total=False):
    """Options that choose the kernel, and what it returns."""

    variant: str
    accuracy: str
    return_lse: bool
    quant: QuantConfig | None
    tiles: Tiles | None


class AttentionOptions(ProblemOptions, KernelOptions, total=False):
    """All options of `cupyattn.attention`."""

    out: Any
    check_finite: bool


class CallOptions(AttentionOptions, total=False):
    """All options of `cupyattn.attention` and of `cupyattn.attention_varlen`."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_len_q: int | None
    max_len_k: int | None


class ShardedGradientOptions(PlaceOptions, RunOptions, total=False):
    """Options of the gradients of attention on several ranks."""


class ShardedOptions(PlaceOptions, KernelOptions, total=False):
    """Options of attention on several ranks."""


def parameters(options: str) -> list[inspect.Parameter]:
    """Return the keyword arguments that an annotation stands for, with the defaults of `Settings`.

    Parameters
    ----------
    options : str
        Annotation of ``**options``, such as "Unpack[MaskedOptions]".

    Examples
    --------
    >>> print(*parameters("Unpack[PlaceOptions]")[-2:], sep=", ")
    window: 'tuple[int, int]' = (-1, -1), softcap: 'float' = 0.0
    """
    fields = globals()[options.removeprefix("Unpack[").removesuffix("]")].__annotations__
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=Settings._field_defaults.get(name),
            annotation=kind.__forward_arg__,
        )
        for name, kind in fields.items()
    ]  # fmt: skip


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Show the options of a function one by one in its signature, and refuse all others.

    Parameters
    ----------
    function : callable
        Its last argument is ``**options``, annotated with `Unpack` of a class of this module.
    """
    signature = inspect.signature(function)
    *own, options = signature.parameters.values()
    shown = signature.replace(parameters=[*own, *parameters(options.annotation)])

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in shown.parameters:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                )
        return function(*args, **kwargs)

    called.__signature__ = shown  # type: ignore[attr-defined]
    return called
