"""Write docs/API.md: the public names of the library, from their docstrings.

Sources are parsed, not imported, so the page is the same whatever is installed.

    python -m docs.write_api
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cupyattn
from cupyattn.files import replacing
from cupyattn.problem import settings

PACKAGE = Path(cupyattn.__file__).parent
PAGE = Path(__file__).with_name("API.md")
#: The modules whose public names the page has, in its order.
MODULES = (
    "cupyattn", "cupyattn.testing", "cupyattn.strategies", "cupyattn.bounds", "cupyattn.reference",
    "cupyattn.unfused", "cupyattn.gradients", "cupyattn.distributions", "cupyattn.quant",
    "cupyattn.diffusion", "cupyattn.checkpoints", "cupyattn.distributed", "cupyattn.interop",
    "cupyattn.interop.torch", "cupyattn.interop.jax", "cupyattn.interop.diffusers",
    "cupyattn.interpret",
)  # fmt: skip
#: Sections of a docstring that list names with what they are.
LISTS = ("Parameters", "Returns", "Yields", "Raises", "Warns", "Attributes")
PROSE = ("Notes", "See Also", "References")

HEAD = (
    "<!-- Written by python -m docs.write_api from the docstrings: change those, and run it. -->",
    "",
    "What `help(...)` says, on one page. Names of `cupyattn` are imported when they are first",
    "used; `interop` is imported by name, and needs the library that it is for.",
    "",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Found:
    """A public name: where it is defined, and as what; ``node`` is None for a module."""

    home: str
    name: str
    node: Node | None

    @property
    def rank(self) -> int:
        """Functions, then classes, then values, then errors."""
        if isinstance(self.node, ast.ClassDef):
            return 3 if self.name.endswith(("Error", "Fault")) else 1
        return 0 if isinstance(self.node, Function) else 2


def source(module: str) -> str:
    """Return the text of a module."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


@cache
def tree(module: str) -> ast.Module:
    """Return the parsed source of a module."""
    return ast.parse(source(module))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under ``if TYPE_CHECKING:`` among them."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements(statement.body)
        else:
            yield statement


def _targets(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def public(module: str) -> list[str]:
    """Return the names of a module: its ``__all__``, or the functions and classes it defines."""
    for statement in tree(module).body:
        if "__all__" in _targets(statement) and isinstance(statement, ast.Assign):
            return [name for name in ast.literal_eval(statement.value) if name[0] != "_"]
    defined = (n for n in tree(module).body if isinstance(n, Function | ast.ClassDef))
    return sorted(node.name for node in defined if not node.name.startswith("_"))


def find(module: str, name: str) -> Found:
    """Follow a name from where it is public to where it is defined.

    Raises
    ------
    LookupError
        If the module does not have it.
    """
    for statement in _statements(tree(module).body):
        if isinstance(statement, Function | ast.ClassDef) and statement.name == name:
            return Found(module, name, statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in _targets(statement):
            return Found(module, name, statement)
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    if f"{statement.module}.{name}" in MODULES:
                        return Found(f"{statement.module}.{name}", name, None)
                    return find(statement.module, alias.name)
    raise LookupError(f"{module} has no {name}")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _written(name: str, default: ast.expr | None, module: str) -> str:
    """Return an argument with its default, a constant of the module by its value."""
    if isinstance(default, ast.Name):
        with contextlib.suppress(LookupError):
            found = find(module, default.id).node
            if isinstance(found, ast.Assign | ast.AnnAssign):
                plain = isinstance(found.value, ast.Constant | ast.Tuple)
                default = found.value if plain else default
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        given = {keyword.arg: keyword.value for keyword in default.keywords}
        default = given.get("default")
        if "default_factory" in given:
            return f"{name}={ast.unparse(given['default_factory'])}()"
    return name if default is None else f"{name}={ast.unparse(default)}"


def _arguments(node: Function, module: str) -> list[str]:
    """Return the arguments with their defaults, without types, `self` and `cls`."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    written = [
        _written(argument.arg, default, module)
        for argument, default in zip(positional, defaults, strict=True)
    ]
    written = [text for text in written if text not in ("self", "cls")]
    last = rest(given.kwarg) if given.kwarg else []
    if given.vararg or given.kwonlyargs or "=" in "".join(last[:1]):
        written.append(f"*{given.vararg.arg}" if given.vararg else "*")
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        written.append(_written(argument.arg, default, module))
    return written + last


def rest(kwarg: ast.arg) -> list[str]:
    """Return the last argument, or the options that it stands for with their defaults."""
    kind = ast.unparse(kwarg.annotation) if kwarg.annotation else ""
    if not kind.startswith("Unpack["):
        return [f"**{kwarg.arg}"]
    return [f"{one.name}={one.default!r}" for one in settings.parameters(kind)]


def arguments(found: Found) -> list[str]:
    """Return what a function or a class is called with; fields, where a class is made of them."""
    node = found.node
    if isinstance(node, Function):
        return _arguments(node, found.home)
    if not isinstance(node, ast.ClassDef):
        return []
    for method in node.body:
        if isinstance(method, Function) and method.name == "__init__":
            return _arguments(method, found.home)
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    return [
        _written(target, field.value, found.home)
        for field in fields
        for target in _targets(field)
        if _is_dataclass(node)
        and "ClassVar" not in ast.unparse(field.annotation)
        and "init=False" not in ast.unparse(field)
    ]


def signature(found: Found) -> str:
    """Return a call of a function or class with its defaults, broken at 100 columns."""
    written, name = arguments(found), found.name
    lines, indent = [f"{name}("], " " * (len(name) + 1)
    for i, text in enumerate(written):
        text += ", " if i + 1 < len(written) else ""
        if len(lines[-1]) + len(text.rstrip()) > 98 and lines[-1].strip():
            lines.append(indent)
        lines[-1] += text
    return "\n".join(line.rstrip() for line in lines) + ")"


def _code(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    """Yield a section of a docstring as Markdown."""
    if title == "Examples":
        yield from ("", "```pycon", *lines, "```")
        return
    yield from ("", f"**{title}**", "")
    if title not in LISTS:
        yield from map(_code, lines)
        return
    for line in lines:
        if line.startswith(" "):
            yield f"  {_code(line.strip())}"
        elif line:
            name, _, kind = line.partition(" : ")
            plain = title in ("Raises", "Warns") or not kind
            yield f"- `{name}`" + ("" if plain else f": {_code(kind)}") + "  "


def docstring(node: ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield a docstring in the style of numpydoc as Markdown."""
    lines = inspect.cleandoc(ast.get_docstring(node) or "").splitlines()
    title, kept = "", []
    for line in [*lines, "", ""]:
        kept.append(line)
        if len(kept) > 1 and re.fullmatch("-{3,}", line):
            heading = kept[-2]
            if heading not in (*LISTS, *PROSE, "Examples"):
                raise ValueError(f"{node.name}: unknown section {heading!r}")
            yield from _part(title, kept[:-2])
            title, kept = heading, []
    yield from _part(title, kept)


def _part(title: str, lines: list[str]) -> Iterator[str]:
    lines = "\n".join(lines).strip("\n").splitlines()
    if title:
        yield from _section(title, lines)
        return
    # Examples may also stand in the text, as doctests do.
    inside = False
    for line in lines:
        if line.startswith(">>>") and not inside:
            inside = True
            yield "```pycon"
        elif inside and not line:
            inside = False
            yield "```"
        yield line if inside else _code(line)
    if inside:
        yield "```"


def _summary(node: Function | ast.ClassDef) -> str:
    text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return _code(text)


def _methods(node: ast.ClassDef, module: str) -> Iterator[str]:
    """Yield a list of what a class can do: a line for each public method and property."""
    for method in node.body:
        if not isinstance(method, Function):
            continue
        if method.name.startswith("_") and method.name != "__call__":
            continue
        written = [ast.unparse(decorator) for decorator in method.decorator_list]
        if "overload" in written or any(".setter" in text for text in written):
            continue
        call = (
            ""
            if any("property" in t for t in written)
            else f"({', '.join(_arguments(method, module))})"
        )
        yield f"- `.{method.name}{call}`: {_summary(method)}"


def _comment(found: Found) -> str:
    """Return the lines that begin with ``#:`` above a value."""
    assert found.node is not None  # noqa: S101  a value has one
    above = source(found.home).splitlines()[: found.node.lineno - 1]
    kept = itertools.takewhile(lambda line: line.startswith("#:"), reversed(above))
    return " ".join(line.removeprefix("#:").strip() for line in reversed([*kept]))


def entry(found: Found, shown: str) -> Iterator[str]:
    """Yield the entry of one name."""
    node = found.node
    yield from ("", f"### `{shown}`", "")
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield _code(_comment(found))
        return
    assert node is not None  # noqa: S101  modules have sections
    yield from ("```py", signature(found), "```", "")
    yield from docstring(node)
    if isinstance(node, ast.ClassDef):
        methods = list(_methods(node, found.home))
        if methods:
            yield from ("", "**Methods and properties**", "", *methods)


def page() -> str:
    """Return the whole page."""
    lines = ["# Public names", "", *HEAD]
    for module in MODULES:
        lines.append(f"- [`{module}`](#{module.replace('.', '')}): {_module_summary(module)}")
    places: dict[tuple[str, str], str] = {}
    for module in MODULES:
        lines += ["", f"## {module}", "", _module_summary(module)]
        found = [find(module, name) for name in public(module)]
        again = []
        for one in sorted(found, key=lambda one: one.rank):
            if one.node is None:
                continue
            shown = f"{module.removeprefix('cupyattn.')}.{one.name}"
            known = places.setdefault((one.home, one.name), shown)
            if known == shown:
                lines += entry(one, shown)
            else:
                again.append(f"`{one.name}`")
        if again:
            lines += ["", f"Also here: {', '.join(again)}, described above."]
    return "\n".join(lines) + "\n"


def _module_summary(module: str) -> str:
    return _code((ast.get_docstring(tree(module)) or "").split("\n\n")[0].replace("\n", " "))


def main() -> None:
    """Write the page."""
    with replacing(PAGE) as file:
        file.write(page().encode())


if __name__ == "__main__":
    main()
