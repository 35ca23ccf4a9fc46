"""`ReadOnlyWeight`: the dequantised weight of an INT8 layer, computed when it is read.

Other libraries read ``layer.weight``: its type and device, or its numbers. They also write to it.
Such a write would be lost, because the layer computes with its codes, so every write is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree

#: Error message for a write.
_WRITE = (
    "the weight of an Int8Linear cannot be written, since the layer computes with INT8 codes: call "
    "restore(), then write it or fuse the adapter, then replace_linear_with_int8 again"
)
#: Error message for a request of gradients.
_TRAIN = (
    "the weight of an Int8Linear cannot be trained, since the layer computes with INT8 codes: "
    "train an adapter or the bias, or a copy, weight.clone()"
)
#: Error message for a request of the data pointer.
_MEMORY = (
    "the weight of an Int8Linear has no memory, since it is made of INT8 codes when it is read: "
    "take a copy, weight.clone()"
)


class ReadOnlyWeight(Tensor):
    """A tensor whose numbers are computed each time an operator reads them.

    Its views are such tensors, too; results of other operators are plain tensors.

    Parameters
    ----------
    like : Tensor
        On the meta device: shape, strides and type.
    device : device
        Where `read` makes the numbers.
    read : callable
        Returns them as a plain tensor of the form of `like`.

    Examples
    --------
    >>> w = ReadOnlyWeight(torch.empty(2, 3, device="meta"), torch.device("cpu"),
    ...                    lambda: torch.ones(2, 3))
    >>> (torch.ones(1, 3) @ w.T).tolist(), w.shape, w.dtype
    ([[3.0, 3.0]], torch.Size([2, 3]), torch.float32)
    """

    _like: Tensor
    _device: torch.device
    _read: Callable[[], Tensor]
    #: The codes of a whole weight, which identify its layer; None for views.
    codes: Tensor | None = None

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, read: Callable[[], Tensor]) -> Any:
        """Make a tensor that has a form and no memory."""
        # The dispatch key is that of the meta device: ``other.data = made`` would otherwise give
        # `other` a null pointer.
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(),
            dtype=like.dtype, device="meta", dispatch_device=True,
        )  # fmt: skip
        torch._C._set_throw_on_mutable_data_ptr(made)  # C++ would read at the address 0
        made._like, made._device, made._read = like, device, read
        return made

    def __init__(self, *_: Any) -> None:
        """Accept the arguments of ``__new__``."""

    def _use_count(self) -> NoReturn:
        """Refuse ``torch.utils.swap_tensors``, which asks this before it modifies anything."""
        refuse_write()

    def __repr__(self, **_: Any) -> str:
        return f"read from INT8 codes: {self._read()!r}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse writes that are no operators; read where a method needs memory."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func in _REFUSED:
            said, refuses = _REFUSED[func]
            if refuses(*args[1:], **kwargs):
                raise RuntimeError(said)
        elif own is not None and func in _OF_MEMORY:
            return _OF_MEMORY[func](own._read(), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the numbers; return views without reading, and refuse writes."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0]._device
        if any(isinstance(x, cls) for x in _written(func, args, kwargs)):
            refuse_write()
        if func.is_view and isinstance(args[0], cls):
            return args[0]._view(functools.partial(_call, func, args[1:], kwargs))

        def plain(x: Any) -> Any:
            return x._read() if isinstance(x, cls) else x

        args, kwargs = _pytree.tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)

    def _view(self, function: Callable[[Tensor], Any]) -> Any:
        """Return the views that a function makes of a tensor, without reading numbers."""
        found = function(self._like)
        if isinstance(found, Tensor):
            return type(self)(found, self.device, lambda: function(self._read()))
        return [
            type(self)(one, self.device, lambda number=number: function(self._read())[number])
            for number, one in enumerate(found)
        ]


class CompiledWeight(Tensor):
    """A weight in code that torch traces, where writes are refused, too.

    Parameters
    ----------
    numbers : Tensor
        The dequantised weight, or a view of it. A compiler removes it if nothing reads it.
    """

    _numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Any:
        """Make a tensor of the form of the numbers."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=numbers.device,
        )  # fmt: skip
        made._numbers = numbers
        return made

    def __init__(self, *_: Any) -> None:
        """Accept the arguments of ``__new__``."""

    def __repr__(self, **_: Any) -> str:
        return f"read from INT8 codes: {self._numbers!r}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the tensor within."""
        return ["_numbers"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, size: Any, stride: Any
    ) -> Tensor:
        """Make the tensor from its inner tensors."""
        return _read_only(inner["_numbers"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the numbers; return views that are read-only, and refuse writes."""
        kwargs = kwargs or {}
        if any(isinstance(x, cls) for x in _written(func, args, kwargs)):
            refuse_write()
        is_view = func.is_view and isinstance(args[0], cls)
        args, kwargs = _pytree.tree_map_only(cls, lambda x: x._numbers, (args, kwargs))
        found = func(*args, **kwargs)
        return _pytree.tree_map_only(Tensor, cls, found) if is_view else found


def _read_only(numbers: Tensor) -> Tensor:
    """Return numbers, traced or not, as a tensor that cannot be written."""
    if isinstance(numbers, FakeTensor | FunctionalTensor):
        return CompiledWeight(numbers)
    return ReadOnlyWeight(numbers.to("meta"), numbers.device, lambda: numbers)


#: Returns a dequantised weight that cannot be written. Code that is compiled may call it.
compiled_weight = torch._dynamo.allow_in_graph(_read_only)


def _call(func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Any:
    return func(x, *rest, **kwargs)


def refuse_write() -> NoReturn:
    """Raise the error of a write."""
    raise RuntimeError(_WRITE)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, flat."""
    found = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    leaves: list[Any] = _pytree.tree_leaves(found)
    return leaves


def _true(*_: Any, **__: Any) -> bool:
    return True


def _numpy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the numbers as a read-only array."""
    found = x.numpy(*args, **kwargs)
    found.flags.writeable = False
    return found


def _array(x: Tensor, dtype: Any = None) -> Any:
    found = _numpy(x)
    return found if dtype is None else found.astype(dtype)


def _dlpack(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a copy by DLPack; raise if the consumer refuses copies."""
    if kwargs.pop("copy", None) is False:
        raise BufferError("the weight of an Int8Linear is made when it is read: allow a copy")
    return x.__dlpack__(*args, **kwargs)


#: Refused functions that are not operators: the error's sentence, and a test for refused arguments.
_REFUSED: dict[Any, tuple[str, Callable[..., bool]]] = {
    Tensor.data.__set__: (_WRITE, _true),
    Tensor.grad.__set__: (_TRAIN, lambda grad: grad is not None),
    Tensor.requires_grad.__set__: (_TRAIN, bool),
    Tensor.requires_grad_: (_TRAIN, lambda requires_grad=True: bool(requires_grad)),
    Tensor.share_memory_: (_MEMORY, _true),
    Tensor.storage: (_MEMORY, _true),
    Tensor.untyped_storage: (_MEMORY, _true),
    Tensor.data_ptr: (_MEMORY, _true),
}
#: Functions that read memory and are not operators, each with its result for a plain tensor.
_OF_MEMORY: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _numpy,
    Tensor.tolist: Tensor.tolist,
    Tensor.__format__: Tensor.__format__,
    Tensor.new_tensor: Tensor.new_tensor,
    Tensor.__array__: _array,
    Tensor.__dlpack__: _dlpack,
    Tensor.__deepcopy__: lambda x, memo: x,
    Tensor.__reduce_ex__: lambda x, protocol: x.__reduce_ex__(protocol),
}
