"""docs/API.md is current and complete, and docstrings describe the arguments that there are."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest

import cupyattn as ca
from docs import write_api

PAGE = write_api.PAGE.read_text(encoding="utf-8")
#: Modules that need another library to be imported.
OTHERS = tuple(module for module in write_api.MODULES if ".interop." in module)
FOUND = [
    (module, write_api.find(module, name))
    for module in write_api.MODULES
    for name in write_api.public(module)
]
CALLABLE = {
    f"{found.home}.{found.name}": found
    for _, found in FOUND
    if isinstance(found.node, ast.FunctionDef | ast.ClassDef)
}


def test_the_page_is_current() -> None:
    assert write_api.page() == PAGE, "run python -m docs.write_api"


@pytest.mark.parametrize("module", [m for m in write_api.MODULES if m not in OTHERS])
def test_what_is_parsed_is_what_is_imported(module: str) -> None:
    imported = importlib.import_module(module)
    if hasattr(imported, "__all__"):
        assert {name for name in imported.__all__ if name[0] != "_"} == {
            found.name for at, found in FOUND if at == module
        }
    for at, found in FOUND:
        if at == module and isinstance(found.node, ast.FunctionDef | ast.ClassDef):
            value = getattr(imported, found.name)
            assert value is getattr(importlib.import_module(found.home), found.name)
            assert ast.get_docstring(found.node) == inspect.cleandoc(value.__doc__)


def test_every_module_with_public_names_has_a_section() -> None:
    """These are the modules named by the package, and every package with a list of public names."""
    modules = {
        f"cupyattn.{name}" for name in ca.__all__ if inspect.ismodule(getattr(ca, name, None))
    }
    packages = {
        ".".join(path.parent.relative_to(write_api.PACKAGE.parent).parts)
        for path in write_api.PACKAGE.rglob("__init__.py")
        if "__all__" in path.read_text(encoding="utf-8")
    }
    assert modules | packages <= set(write_api.MODULES)
    titles = re.findall(r"^## (\S+)$", PAGE, re.MULTILINE)
    assert titles == list(write_api.MODULES)


def test_every_name_stands_on_the_page_once() -> None:
    titles = re.findall(r"^### `(?:[\w.]+\.)?(\w+)`$", PAGE, re.MULTILINE)
    homes = {(found.home, found.name) for _, found in FOUND if found.node is not None}
    assert sorted(titles) == sorted(name for _, name in homes)
    assert not re.search(r"^### .*\n\n+(###|##)", PAGE, re.MULTILINE), "nothing is said of one"


def test_docstrings_name_arguments_that_exist() -> None:
    wrong = []
    for name, found in sorted(CALLABLE.items()):
        assert isinstance(found.node, ast.FunctionDef | ast.ClassDef)
        text = ast.get_docstring(found.node) or ""
        wrong += [] if text else [f"{name} has no docstring"]
        part = re.search(
            r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", text, re.DOTALL | re.MULTILINE
        )
        named = set()
        for line in part[1].splitlines() if part else ():
            if re.match(r"\*{0,2}\w", line):
                named |= set(re.findall(r"\w+", line.partition(" : ")[0]))
        kwarg = getattr(getattr(found.node, "args", None), "kwarg", None)
        if kwarg is not None and kwarg.arg in named:  # one entry describes all options
            each = {text.strip("*").partition("=")[0] for text in write_api.rest(kwarg)}
            named = named - {kwarg.arg} | each
        existing = {re.match(r"\**(\w*)", text)[1] for text in write_api.arguments(found)}  # type: ignore[index]
        wrong += [f"{name} describes {one}, which is no argument" for one in named - existing]
        if part:
            wrong += [f"{name} does not describe {one}" for one in existing - {""} - named]
    assert not wrong
