"""Generate Inductor's code for our operators: calls made for their place (`places`).

Inductor's table of generators is private (torch 2.11 to 2.13 have it). Inductor still decides
scheduling, aliasing, strides and asserts: a generator writes one line, and one into the header.
Without the table, operators are called through torch's dispatcher, and reports say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

#: Operators with generated calls, by their names in ``torch.ops.cupyattn``.
OPERATORS = (
    "int8_linear", "int8_layer", "int8_layers", "int8_normed_layers", "int8_normed_layers_into",
    "diffusers_attention", "attention", "attention_qkv",
)  # fmt: skip
#: Reason if operators use the dispatcher with this version of torch; "" if they do not, or if
#: nothing was compiled yet.
obstacle = ""

_IMPORT = "from cupyattn.interop.torch.places import place as cupyattn_place"
_log = logging.getLogger("cupyattn")


def register() -> None:
    """Put our generators into Inductor's table, or store in `obstacle` that there is no table."""
    global obstacle
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import (
            CUSTOM_EXTERN_KERNEL_CODEGEN,
            CustomCodegen,
        )
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine  # noqa: F401

        made = CustomCodegen(python=_generate)
        for name in OPERATORS:
            CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.cupyattn.{name}.default"] = made
        obstacle = ""
    except (ImportError, AttributeError, TypeError) as error:
        _refuse(error)


def _refuse(error: Exception) -> None:
    global obstacle
    obstacle = f"torch {torch.__version__} has another table of generators ({error})"
    _log.warning("compiled code calls operators by torch's dispatcher: %s", obstacle)


def _generate(node: Any, writeline: Callable[[Any], None]) -> None:
    """Write the call of an operator."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    device = node.get_device()
    # Code in C++, and wrappers that are graphs themselves, have no lines of Python.
    plain = V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False)
    if not plain and device is not None and device.type in ("cpu", "cuda"):
        try:
            made, operands = _texts(node, wrapper, device)
            root = wrapper
            while hasattr(root, "parent_wrapper"):
                root = root.parent_wrapper
            name = node.get_name()
            root.add_import_once(_IMPORT)
            root.header.writeline(f"cupyattn_{name} = cupyattn_place({made})")
        except (AttributeError, TypeError) as error:
            _refuse(error)
        else:
            writeline(f"{name} = cupyattn_{name}({operands})")
            return
    writeline(ExternKernelAllocLine(wrapper, node))


def _texts(node: Any, wrapper: Any, device: Any) -> tuple[str, str]:
    """Return the texts of the arguments of `places.place`, and of a call at the place."""
    references = [x.codegen_reference() for x in node.inputs]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(references))}
    given, named = node.unflatten_args(
        [_Name(f"t{numbers[text]}") for text in references], node.constant_args
    )
    names = [one.name for one in node.op_overload._schema.arguments[len(given) :]]
    given = [*given, *(named.pop(name) for name in names if name in named)]  # defaults
    if named:
        raise TypeError(f"arguments by keyword: {', '.join(named)}")
    arguments = "".join(f"{wrapper.val_to_arg_str(x)}, " for x in given)
    outputs = [one for one in getattr(node, "outputs", ()) or [node] if one is not None]
    layouts = [one.get_layout() for one in outputs]
    shapes = wrapper.codegen_python_shape_tuple
    results = [f"{shapes(one.size)}, {shapes(one.stride)}, {one.dtype}" for one in layouts]
    lengths = [n for one in layouts for n in (*one.size, *one.stride)]
    lengths += [n for x in node.inputs for n in (*x.get_size(), *x.get_stride())]
    symbols = sorted({f"{s}" for x in (lengths, given) for s in _symbols(x)})
    made = [f"y{number}" for number in range(len(results))]
    kind = node.op_overload._schema.returns
    returned = made[0] if made else "None"
    if len(kind) > 1 or (kind and not isinstance(kind[0].type, torch.TensorType)):
        returned = f"[{', '.join(made)}]"
    name = node.op_overload._schema.name.removeprefix("cupyattn::")
    texts = (
        name, (device.type, device.index or 0), len(numbers), symbols, results, f"({arguments})",
        returned,
    )  # fmt: skip
    return ", ".join(map(repr, texts)), ", ".join([*numbers, *symbols])


class _Name:
    """Placeholder of a tensor among arguments."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _symbols(x: Any) -> set[Any]:
    """Return the free symbols of lengths, and of arguments that may contain symbols."""
    if isinstance(x, (list, tuple)):
        return set().union(*map(_symbols, x))
    node = getattr(x, "node", None)  # of a torch.SymInt
    return set(getattr(x if node is None else node.expr, "free_symbols", ()))
