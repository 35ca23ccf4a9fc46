"""Code that replaces a module's ``forward`` until it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Substitute:
    """Replaces a module's ``forward`` by other code. Copies and saved files have the original code.

    Parameters
    ----------
    module : Module
    make : callable
        Receives the current code, and returns the code to run.
    below_hooks : bool
        Place the code below the module's hooks of diffusers, which then decide on the host whether
        it runs. Later hooks are above it in any case.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[Forward], Forward], *, below_hooks: bool = False
    ) -> None:
        self._module = module
        place, name = _lowest(module) if below_hooks else (module, "forward")
        own: Forward = getattr(place, name)
        while isinstance(own, Substitute) and not own.is_active:  # a hook had it when it was undone
            own = own._own
        # NOTE: pipelines and hooks ask for the signature of forward.
        functools.update_wrapper(self, own, updated=())
        self._own: Forward = own
        self._call = make(own)
        setattr(place, name, self)

    @property
    def is_active(self) -> bool:
        """Whether the replacement has not been undone."""
        return self._call is not self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own, (self._module,)

    def undo(self) -> None:
        """Run the original code again, even if a hook still calls this object."""
        self._call = self._own
        place, name = _lowest(self._module)
        if place is not self._module and getattr(place, name) is self:  # a hook came later
            setattr(place, name, self._own)
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own != self._module.forward:
                self._module.forward = self._own


def _own(module: nn.Module) -> Forward:
    """Return the ``forward`` of a module's class."""
    return MethodType(type(module).forward, module)


def substitute_of(module: nn.Module) -> Substitute | None:
    """Return the replacement of a module's ``forward``, below hooks of diffusers."""
    found = getattr(*_lowest(module))
    return found if isinstance(found, Substitute) and found.is_active else None


def _lowest(module: nn.Module) -> tuple[Any, str]:
    """Return the object and the attribute that hold a module's ``forward`` below its hooks."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None or not registry.hooks:
        return module, "forward"
    first = registry._fn_refs[0]
    return first, "forward" if first.original_forward is None else "original_forward"
