"""Store the original of each INT8 layer in the layer itself, so that both move together."""

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
    """Facts shared by all layers that one call of `replace_linear_with_int8` replaced.

    Parameters
    ----------
    originals : {"cpu", "device", "drop"}
        The choice for the weights.
    trained : dict of Parameter to bool
        ``requires_grad`` of the model's parameters when the layers were replaced.
    missing : set of str
        Names of the replaced layers that are not yet restored.
    """

    originals: str
    trained: dict[nn.Parameter, bool] = field(repr=False)
    missing: set[str] = field(default_factory=set)

    def set_since(self, parameters: Iterable[nn.Parameter]) -> bool | None:
        """Return the value to which all ``requires_grad`` were set since the replacement, or None.

        Later parameters, such as adapters' parameters, do not count.
        """
        now = {p: p.requires_grad for p in parameters if p in self.trained}
        changed = any(self.trained[p] != trained for p, trained in now.items())
        return next(iter(now.values())) if changed and len({*now.values()}) == 1 else None


class Original:
    """The original of an INT8 layer or of an activation's module. Copies of the layer lack it.

    Parameters
    ----------
    layer : Int8Linear or ActivatedInt8Linear
        Copies of its scales and bias later show whether its memory was replaced.
    call : Call
    name : str
        Name of the layer in the model.
    module : Module, optional
        The replaced module; None if it was dropped.
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
    """Return the number of writes to a tensor, or None if torch does not count them."""
    return None if x is None or x.is_inference() else x._version


def _nothing() -> None:
    """Return None, which replaces the original in copies and saved files."""


def original_of(layer: Any) -> Original | None:
    """Return the original of a layer; None for layers without one and for other modules."""
    if not isinstance(layer, Int8Linear | ActivatedInt8Linear):
        return None
    found: Original | None = vars(layer).get(_ATTRIBUTE)
    return found


def keep_original(
    layer: nn.Module, call: Call, name: str, module: nn.Module, *, shared: bool = False
) -> None:
    """Store the original of a layer; its weight moves to the device that the call chose.

    Parameters
    ----------
    layer : Int8Linear or ActivatedInt8Linear
    call : Call
    name : str
        Name of the layer in the model.
    module : Module
    shared : bool
        Whether another module of the model still uses its weight, which then stays in place.
    """
    if call.originals == "cpu" and isinstance(module, nn.Linear) and not shared:
        module.weight.data = module.weight.data.to("cpu")  # not the bias, which both have
    kept = None if call.originals == "drop" else module
    setattr(layer, _ATTRIBUTE, Original(layer, call, name, kept))
