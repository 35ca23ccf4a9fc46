"""Contracts of the kernels: their ``static_assert`` sentences, read before anything is compiled.

A kernel states the conditions for its tiles once, in its source. The compiler refuses tiles that
break a contract. The mirror compiles nothing, so the same sentences are evaluated here, for the
package's kernels and for registered ones alike.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.includes import headers_reached
from cupyattn.compiler.modules import ModuleSpec, read_source
from cupyattn.errors import KernelCompileError
from cupyattn.kernels.tiles import GemmTiles, Tiles

#: Contracts at the start of a line. The compiler checks the others, in functions and templates.
_ASSERT = re.compile(r'^static_assert\(\s*((?:[^;"])*?),\s*"([^"]*)"\s*\);', re.MULTILINE)
_CONSTANT = re.compile(r"^constexpr (?:int|bool) (\w+)\s*=\s*([^;{]*);", re.MULTILINE)
_MACRO = re.compile(r"^#define (CFG_\w+) (\d+)", re.MULTILINE)
#: The shared memory of a block, and in it the type and the extents of fields. Where it is a union
#: of what several kernels share, nothing is known.
_STORAGE = re.compile(r"^struct SharedStorage \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"(?:alignas\([^;]*?\)\s+)?(\w+)\s+(\w+\s*\[[^;]*\]);")
#: Bytes of the types of fields, beside that of the caller's arrays.
_SIZES_OF = {"int8_t": 1, "uint8_t": 1, "int": 4, "float": 4, "uint32_t": 4, "elem16_t": 2}
#: Macros in a sentence, which are fields of the tiles in lower case.
_SIZES = re.compile(r"\b(?:BLOCK_(?:Q|KV|M|N)|NUM_WARPS|NUM_STAGES|HEAD_DIM)\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Not: operator.not_, ast.USub: operator.neg,
}  # fmt: skip
#: Functions of ``prims/base.cuh``.
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "ceil_div": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b,
}  # fmt: skip


class _Unknown(Exception):
    """An expression holds what only the compiler knows."""


def check_tiles(spec: ModuleSpec, tiles: Tiles | GemmTiles, kernel: str) -> None:
    """Raise ValueError, with what `refused_tiles` says, unless a kernel takes tiles."""
    if reason := refused_tiles(spec, tiles, kernel):
        raise ValueError(reason)


def refused_tiles(spec: ModuleSpec, tiles: Tiles | GemmTiles, kernel: str) -> str:
    """Return why a kernel does not take tiles; "" if it does.

    Parameters
    ----------
    spec : ModuleSpec
        What would be compiled, with the macros of these tiles.
    tiles : Tiles or GemmTiles
        The caller's.
    kernel : str
        Name of the kernel in the message.

    Returns
    -------
    str
        The sentence of the first contract that the tiles break.

    Notes
    -----
    A contract with a term that only the compiler knows, such as a ``sizeof``, is left to it.
    """
    try:
        sentence = _broken(read_source(spec), spec)
    except KernelCompileError:  # a file is missing: plans are made without it, compiling says so
        return ""
    if sentence is None:
        return ""
    said = _SIZES.sub(lambda found: found[0].lower(), sentence)
    return f"{kernel} does not take {tiles}: {said} (tiles=None takes its own)"


def least_shared_bytes(spec: ModuleSpec) -> int:
    """Return how many bytes of shared memory a block of a module needs at least.

    Parameters
    ----------
    spec : ModuleSpec

    Returns
    -------
    int
        The fields of its ``SharedStorage`` whose sizes are constant expressions of known types;
        padding between them, and what only the compiler knows, is left out. 0 if the source has no
        such struct or cannot be read.
    """
    try:
        return _shared_bytes(read_source(spec), spec)
    except KernelCompileError:
        return 0


@functools.lru_cache(maxsize=256)
def _shared_bytes(text: str, spec: ModuleSpec) -> int:
    storage = _STORAGE.search(_COMMENT.sub("", text))
    if storage is None:
        return 0
    constants, _ = _read(text, spec.path)
    names = {**constants, **{name: str(value) for name, value in spec.defines}}
    values: dict[str, Any] = {"WARP_SIZE": 32}
    wide = names.get("CFG_DTYPE") == "2"  # float32
    sizes = _SIZES_OF | {"elem_t": 4 if wide else 2}
    total = 0
    for kind, declared in _FIELD.findall(storage[1]):
        for field in re.split(r",(?![^\[(]*[\])])", declared):
            count = sizes.get(kind, 0)
            try:
                for extent in re.findall(r"\[([^\]]*)\]", field):
                    count *= _evaluate(extent, names, values)
            except (_Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
                continue
            total += count
    return total


@functools.lru_cache(maxsize=256)
def _broken(text: str, spec: ModuleSpec) -> str | None:
    """Return the sentence of the first contract that a module breaks, None where it keeps all."""
    constants, contracts = _read(text, spec.path)
    names = {**constants, **{name: str(value) for name, value in spec.defines}}
    values: dict[str, Any] = {"WARP_SIZE": 32}
    for condition, sentence in contracts:
        try:
            if not _evaluate(condition, names, values):
                return sentence
        except (_Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
            continue  # what cannot be evaluated here is left to the compiler
    return None


@functools.lru_cache(maxsize=64)
def _read(text: str, path: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the constants and the contracts of the headers that a source reaches, and its own."""
    kernels = compiler.KERNELS
    toolkit = kernels / "no toolkit"  # its headers hold no contract
    headers = (content for _, content in headers_reached(path, text, kernels, toolkit))
    constants: dict[str, str] = {}
    contracts: list[tuple[str, str]] = []
    for content in (*headers, text):
        code = _COMMENT.sub("", content)
        for name, value in (*_CONSTANT.findall(code), *_MACRO.findall(code)):
            constants.setdefault(name, value)
        contracts += _ASSERT.findall(code)
    return constants, contracts


def _evaluate(expression: str, names: Mapping[str, str], values: dict[str, Any]) -> Any:
    """Return the value of a constant expression of C++.

    Parameters
    ----------
    expression : str
    names : mapping of str to str
        Expressions of the constants.
    values : dict
        Values of those that are known; others are added.
    """
    try:
        tree = ast.parse(_as_python(" ".join(expression.split())), mode="eval")
    except SyntaxError:
        raise _Unknown(expression) from None

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in values:
                if node.id not in names:
                    raise _Unknown(node.id)
                values[node.id] = _evaluate(names[node.id], names, values)
            return values[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0]))
        if isinstance(node, ast.BoolOp):
            short = isinstance(node.op, ast.Or)
            return next((x for x in map(value, node.values) if bool(x) == short), not short)
        if isinstance(node, ast.IfExp):
            return value(node.body if value(node.test) else node.orelse)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _FUNCTIONS:
            return _FUNCTIONS[ast.unparse(node.func)](*map(value, node.args))
        raise _Unknown(expression)

    return value(tree.body)


def _as_python(text: str) -> str:
    """Return an expression of C++ as one of Python.

    Examples
    --------
    >>> _as_python("A && !B ? C / 2 : (D || E)")
    '(C / 2 if A and not B else (D or E))'
    """
    depth, question = 0, None
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character == "?" and question is None:
            question = at
        if depth == 0 and character == ":" and question is not None:
            parts = text[:question], text[question + 1 : at], text[at + 1 :]
            test, yes, no = (_as_python(part.strip()) for part in parts)
            return f"({yes} if {test} else {no})"
    inside = re.search(r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", text)
    if inside is not None:
        before, after = text[: inside.start()], text[inside.end() :]
        return f"{_as_python(before)}({_as_python(inside[0][1:-1])}){_as_python(after)}"
    return re.sub(r"!(?!=)", "not ", text.replace("&&", "and").replace("||", "or"))
