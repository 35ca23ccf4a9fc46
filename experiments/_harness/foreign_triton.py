"""Triton kernels of other people, compiled without a device: from tutorials and from wheels."""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.interpret import TensorMap
from experiments._harness.foreign import Launcher, importing

#: Triton's names of NumPy's types.
TYPES = {
    "float16": "fp16", "float32": "fp32", "bfloat16": "bf16", "int8": "i8", "uint8": "u8",
    "int32": "i32", "int64": "i64",
}  # fmt: skip
HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
#: Functions of a folder that lives as long as the process: Triton reads a kernel's source again.
_FOLDER = tempfile.TemporaryDirectory()
_FILES: dict[Path, Any] = {}


def functions(path: Path, header: str = HEADER) -> Any:
    """Return a module with the kernels of a file, and nothing else of it.

    Tutorials measure when they are imported, and look for a device.
    """
    if path in _FILES:
        return _FILES[path]
    text = path.read_text(encoding="utf-8")
    kept = [header]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(one) == "triton.jit" for one in node.decorator_list
        ):
            node.decorator_list = []
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            kept.append("\n".join(["@triton.jit", *lines]))
    copy = Path(_FOLDER.name) / f"kernels_{path.stem.replace('-', '_')}_{len(_FILES)}.py"
    copy.write_text("\n\n".join(kept), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    if spec is None or spec.loader is None:
        raise ImportError(copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _FILES[path] = module
    return module


def launch(
    run: Launcher,
    kernel: Any,
    grid: int | tuple[int, ...],
    args: Mapping[str, Any],
    *,
    capability: int = 80,
    aligned: Sequence[str] = (),
    **options: Any,
) -> None:
    """Compile a kernel and run it.

    Parameters
    ----------
    run : Launcher
    kernel : triton.JITFunction
    grid : int or tuple of int
    args : mapping
        By name: arrays, NumPy scalars and tensor maps are passed. All else is constant.
    capability : int
    aligned : sequence of str
        Whole numbers that are multiples of 16. Arrays are aligned.
    **options
        As ``num_warps``.
    """
    with importing("triton"):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    signature, constants, attributes, passed = {}, {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = args[name]
        kind = _type(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
            continue
        passed[name] = value
        if kind.startswith("tensordesc"):  # shape and strides follow the map
            array = value.array
            numbers = [np.int32(n) for n in array.shape]
            numbers += [np.int64(n // array.itemsize) for n in array.strides]
            passed |= {f"{name}.{i}": number for i, number in enumerate(numbers)}
        elif kind.startswith("*") or name in aligned:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": 4, **options}
    compiled = triton.compile(source, target=target, options=options)
    warps = compiled.metadata.num_warps
    run(
        compiled.asm["ptx"], compiled.metadata.name, grid, 32 * warps, passed,
        compiled.metadata.shared,
    )  # fmt: skip


def _type(value: Any) -> str:
    if isinstance(value, TensorMap):
        box = ", ".join(map(str, value.box))
        return f"tensordesc<{TYPES[value.array.dtype.name]}[{box}]>"
    if isinstance(value, np.ndarray):
        return f"*{TYPES[value.dtype.name]}"
    return TYPES[value.dtype.name] if isinstance(value, np.generic) else "constexpr"


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float16) -> npt.NDArray[Any]:
    """Return normal numbers that a kernel must not write to."""
    found = rng.standard_normal(shape).astype(dtype)
    found.flags.writeable = False
    return found


def unset(*shape: int, dtype: Any = np.float16) -> npt.NDArray[Any]:
    """Return an array for results: NaN."""
    return np.full(shape, np.nan, dtype)
