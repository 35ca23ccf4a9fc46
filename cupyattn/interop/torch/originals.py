"""What INT8 layers of a model replaced: each keeps it, wherever it stands in the model by now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cupyattn.interop.torch.activated import ActivatedInt8Linear
from cupyattn.interop.torch.linear import Int8Linear

#: The attribute of a layer or of an activation's module that holds its `Original`.
_ATTRIBUTE = "_original"


@dataclass(eq=False)
class Call:
    """What the layers that one call of `replace_linear_with_int8` replaced have in common.

    Parameters
    ----------
    originals : {"cpu", "device", "drop"}
        What became of the weights.
    trained : dict of Parameter to bool
        ``requires_grad`` of the model's parameters when the layers were replaced.
    missing : set of str
        Names of the layers that were replaced and not put back yet.
    """

    originals: str
    trained: dict[nn.Parameter, bool] = field(repr=False)
    missing: set[str] = field(default_factory=set)

    def set_since(self, parameters: Iterable[nn.Parameter]) -> bool | None:
        """Return to what ``requires_grad`` of all these was set since replacing, None if not.

        Parameters that came later, as those of adapters, do not count.
        """
        now = {p: p.requires_grad for p in parameters if p in self.trained}
        changed = any(self.trained[p] != trained for p, trained in now.items())
        return next(iter(now.values())) if changed and len({*now.values()}) == 1 else None


class Original:
    """What an INT8 layer or an activation's module replaced. Copies of the layer do not have it.

    Parameters
    ----------
    layer : Int8Linear or ActivatedInt8Linear
        Copies of its scales and its bias tell later whether its memory was exchanged.
    call : Call
    name : str
        Of the layer in the model.
    module : Module, optional
        What was replaced; None where it was dropped.
    """

    def __init__(
        self, layer: nn.Module, call: Call, name: str, module: nn.Module | None
    ) -> None:
        self.call, self.name, self.module = call, name, module
        bias, scale = (getattr(layer, name, None) for name in ("bias", "weight_scale"))
        self.bias = None if bias is None else bias.detach().to("cpu", copy=True)
        self.bias_version = version_of(bias)
        self.scale = None if scale is None else scale.to("cpu", copy=True)

    def __reduce__(self) -> Any:
        return _nothing, ()


def version_of(x: Tensor | None) -> int | None:
    """Return how often a tensor was written, None where torch does not count it."""
    return None if x is None or x.is_inference() else x._version


def _nothing() -> None:
    """Return what copies and files have in the place of an original."""


def original_of(layer: Any) -> Original | None:
    """Return what a layer replaced, None of those that replaced nothing and of other modules."""
    if not isinstance(layer, Int8Linear | ActivatedInt8Linear):
        return None
    found: Original | None = vars(layer).get(_ATTRIBUTE)
    return found


def keep_original(
    layer: nn.Module, call: Call, name: str, module: nn.Module, *, shared: bool = False
) -> None:
    """Let a layer know what it replaced; the weight moves to where the call wants it.

    Parameters
    ----------
    layer : Int8Linear or ActivatedInt8Linear
    call : Call
    name : str
        Of the layer in the model.
    module : Module
    shared : bool
        Another module of the model still has its weight, which stays where that module needs it.
    """
    if call.originals == "cpu" and isinstance(module, nn.Linear) and not shared:
        module.weight.data = module.weight.data.to("cpu")  # not the bias, which both have
    kept = None if call.originals == "drop" else module
    setattr(layer, _ATTRIBUTE, Original(layer, call, name, kept))
