"""A handle to use in place of the pipeline or model whose layers were replaced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any, ClassVar, NoReturn


class Handle:
    """Forwards calls and attributes to the modified object; a context manager that restores it.

    Subclasses add `restore` and `report`. Names that a subclass defines cannot be set. They hide
    attributes of `target`, which are then read as ``handle.target.name``. All other attributes are
    read, set and deleted on `target`. Arguments of the replacement cannot be set, because that
    would have no effect, unless `target` has an attribute of that name.

    Parameters
    ----------
    target : object
        A pipeline or a model.

    Notes
    -----
    A method that returns `target`, such as ``to``, ``eval`` or ``half``, returns the handle. A
    handle is no instance of the target's class, and cannot be copied or pickled.

    Examples
    --------
    >>> class Model:
    ...     def __call__(self, x): return x + 1
    ...     def to(self, device): self.device = device; return self
    >>> handle = Handle(Model())
    >>> handle.to("cuda") is handle, handle.device, handle(1)
    (True, 'cuda', 2)
    """

    __slots__ = ("__weakref__", "_handle_target")

    #: The function that makes the handle, and its arguments except the first.
    _handle_maker: ClassVar[str] = ""
    _handle_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_handle_target", target)

    @property
    def target(self) -> Any:
        """The pipeline or the model that was modified."""
        return object.__getattribute__(self, "_handle_target")

    def restore(self) -> None:
        """Undo the replacement."""
        raise NotImplementedError(f"{type(self).__name__} does not define restore()")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    # ---- forwarded -------------------------------------------------------------------------------

    def _of_target(self, found: Any) -> Any:
        """Return a result of the target; if the result is the target, return the handle."""
        return self if found is self.target else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        return self._of_target(self.target(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        if not (isinstance(found, MethodType) and found.__self__ is self.target):
            return self._of_target(found)

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._of_target(found(*args, **kwargs))

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            raise AttributeError(
                f"{name!r} belongs to the {type(self).__name__}: set handle.target.{name} for the "
                f"attribute of the {type(self.target).__name__}"
            )
        if name in self._handle_arguments and not hasattr(self.target, name):
            raise AttributeError(
                f"{name!r} is settled when layers are replaced and cannot be set on the handle: "
                f"call restore(), then {self._handle_maker}(..., {name}=...)"
            )
        setattr(self.target, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            raise AttributeError(
                f"{name!r} belongs to the {type(self).__name__}: delete handle.target.{name} for "
                f"the attribute of the {type(self.target).__name__}"
            )
        delattr(self.target, name)

    @classmethod
    def _is_own(cls, name: str) -> bool:
        return any(name in kind.__dict__ for kind in cls.__mro__[:-1])

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.target)})

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.target!r}"

    def __bool__(self) -> bool:
        return bool(self.target)

    def __len__(self) -> int:
        return len(self.target)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.target)

    def __contains__(self, item: Any) -> bool:
        return item in self.target

    def __getitem__(self, key: Any) -> Any:
        return self.target[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.target[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.target[key]

    # ---- refused ---------------------------------------------------------------------------------

    def __copy__(self) -> NoReturn:
        self._refuse("copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be {what}, since one handle restores one "
            f"{type(self.target).__name__}: use handle.target, or call restore() first"
        )


def target_of(given: Any) -> Any:
    """Return the target of a handle; any other object unchanged."""
    return given.target if isinstance(given, Handle) else given


def is_pipeline(given: Any) -> bool:
    """Whether something is a pipeline of diffusers, which is not imported to find out."""
    # NOTE: its module takes seconds to import. If there is a pipeline, it has been imported.
    home = sys.modules.get("diffusers.pipelines.pipeline_utils")
    return home is not None and isinstance(given, home.DiffusionPipeline)


#: Reason that torch gives for not compiling a call of a handle.
NOT_COMPILED = "a handle is no module: give torch.compile handle.target, and call that in functions"
#: Name that ``torch.compile`` gives to a module within the returned module.
COMPILED = "_orig_mod."


def uncompiled(model: Any) -> Any:
    """Return the module behind a result of ``torch.compile``; any other object unchanged."""
    return getattr(model, COMPILED.removesuffix("."), model)
