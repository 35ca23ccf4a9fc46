"""The structure of the source tree: the place of each kind of file, and the allowed imports."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cupyattn.compiler.modules import KERNELS
from cupyattn.ops.attention import ATTENTION
from cupyattn.problem.resolve import resolve
from docs import write_api, write_house, write_tests
from docs.write_house import tree_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cupyattn"
CUDA = sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")])
PYTHON = sorted(PACKAGE.rglob("*.py"))

#: Which package may import which: one imports what stands above it, never what stands below or
#: beside it (on the same line). README.md and docs/DESIGN.md show the same list.
HOUSE: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "switches", "version", "collector"),
    ("lazy_face",),
    ("arrays",),
    ("distributions", "kernels"),
    ("quant",),
    ("compiler",),
    ("problem",),
    ("reference", "plans"),
    ("bounds", "runtime"),
    ("gradients",),
    ("interpret",),
    ("ops",),
    ("testing", "unfused"),
    ("strategies", "measure"),
    ("checkpoints",),
    ("distributed",),
    ("diffusion",),
    ("interop",),
    ("cli",),
    ("__main__",),
)
#: Files that are in no folder.
FLAT = {
    "errors", "files", "switches", "version", "collector", "lazy_face", "unfused",
    "distributions", "strategies", "__main__",
}  # fmt: skip
#: Packages whose public names are defined elsewhere: their faces import at first use, and name
#: modules below them for type checkers only.
FACES = {"quant", "interpret"}
#: Take the array namespace from their arguments, or know no arrays at all: never import CuPy.
NO_CUPY = {
    "errors", "files", "switches", "collector", "lazy_face", "distributions", "kernels", "quant",
    "problem", "reference", "plans", "bounds", "gradients", "testing", "strategies", "interpret",
}  # fmt: skip
#: Installed only with an extra: nothing in the core may need one to be imported.
EXTRAS = ("cupy", "torch", "jax", "diffusers", "matplotlib", "rich", "hypothesis", "pytest")


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Walk through a file once for all tests."""
    return tuple(ast.walk(tree_of(path)))


def place(path: Path) -> str:
    """``"quant"`` for cupyattn/quant/anything.py, ``"files"`` for cupyattn/files.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    """``"cupyattn.quant.config"`` for cupyattn/quant/config.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(nodes: Iterable[ast.AST]) -> set[int]:
    """Identities of the nodes, and of all nodes within them."""
    found: set[int] = set()
    for node in nodes:
        if id(node) not in found:  # otherwise a node around it has been walked through
            found |= {id(child) for child in ast.walk(node)}
    return found


@functools.cache
def guarded_and_delayed(path: Path) -> tuple[set[int], set[int]]:
    """Identities of the nodes of a file under TYPE_CHECKING, and of those inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    guards = (
        node for node in nodes_of(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )  # fmt: skip
    return inside(guards), inside(x for x in nodes_of(path) if isinstance(x, functions))


@functools.cache
def imports(path: Path, *, lazy: bool = True, types: bool = False) -> tuple[str, ...]:
    """Return the dotted names of the modules that a file imports.

    `lazy` includes imports inside functions, `types` gives those under TYPE_CHECKING instead. A
    name of a face counts for where it is defined; "cupyattn." is the package with all its names.
    """
    found = []
    guarded, delayed = guarded_and_delayed(path)
    for node in nodes_of(path):
        if (id(node) in guarded) != types or (id(node) in delayed and not lazy):
            continue
        if isinstance(node, ast.Call) and called(node).endswith("import_module"):
            constants = (one for one in ast.walk(node) if isinstance(one, ast.Constant))
            found.append("".join(str(one.value) for one in constants))
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found += ["cupyattn." if name == "cupyattn" else name for name in names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full not in NAMED and node.module in ("cupyattn", *OF_FACES):
                    found.append(home_of(node.module, alias.name))
                else:
                    found.append(full if full in NAMED else str(node.module))
    return tuple(found)


def called(node: ast.Call) -> str:
    """The last name of a called expression: of a function or of an attribute."""
    return str(getattr(node.func, "id", getattr(node.func, "attr", "")))


def home_of(face: str, name: str) -> str:
    """The module that defines a public name."""
    return getattr(getattr(importlib.import_module(face), name), "__module__", face)


NAMED = {dotted(path): path for path in PYTHON}
OF_FACES = tuple(f"cupyattn.{name}" for name in sorted(FACES))
MODULES = [path for path in PYTHON if path != PACKAGE / "__init__.py"]
RANK = {name: rank for rank, line in enumerate(HOUSE) for name in line}
#: The operations, all that they stand on, and what judges them.
CORE = {name for name in RANK if RANK[name] <= RANK["ops"]} | {"testing", "strategies"}
RANK[""] = len(HOUSE)  # the package itself


def packages_of(names: Iterable[str]) -> set[str]:
    """The packages or flat modules of the names that belong to cupyattn."""
    return {name.split(".")[1] for name in names if name.startswith("cupyattn.")}


def test_every_module_has_its_place() -> None:
    assert {place(path) for path in MODULES} == set(RANK) - {""}
    assert {path.stem for path in PACKAGE.glob("*.py")} == FLAT | {"__init__"}


def test_imports_point_up_the_list() -> None:
    """Also imports inside functions; under TYPE_CHECKING a package may name its own modules."""
    wrong = []
    for path in MODULES:
        own = place(path)
        named = packages_of(imports(path))
        if not (own in FACES and path.name == "__init__.py"):
            named |= packages_of(imports(path, types=True))
        below = {name for name in named if RANK[name] >= RANK[own]} - {own}
        below |= {"cupyattn"} & {*imports(path)}  # whose file imports from all of them
        wrong += [f"{dotted(path)}, a module of {own}, may not import {below}"] if below else []
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "import cupyattn", "import cupyattn as ca", "from cupyattn import quantize",
        "from cupyattn.quant import quantize", "from cupyattn.ops.quantize import quantize",
        "import cupyattn.ops.quantize", "importlib.import_module('cupyattn.ops.quantize')",
        "import_module(f'cupyattn.{name}')",
    ],
)  # fmt: skip
def test_a_late_import_of_what_stands_below_is_found(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "late.py").write_text(f"def late():\n    {text}\n")
    assert {RANK[name] >= RANK["ops"] for name in packages_of(imports(file))} == {True}


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {
        name: {other for other in imports(path) if other in NAMED} - {name, "cupyattn"}
        for name, path in NAMED.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the circle


@pytest.mark.parametrize("package", ["cupyattn", *sorted(FACES)])
def test_importing_a_face_imports_no_module_of_it(package: str) -> None:
    full = package if package == "cupyattn" else f"cupyattn.{package}"
    ground = {"cupyattn", *(f"cupyattn.{x}" for x in ("version", "collector", "lazy_face")), full}
    script = (
        f"import sys, {full}; own = {{n for n in sys.modules if n.startswith('cupyattn')}}; "
        f"own -= {ground}; sys.exit(repr(own) if own else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)


def test_extras_are_imported_only_when_asked_for() -> None:
    wrong = []
    for path in MODULES:
        own = place(path)
        core = own in CORE - {"testing"}
        top = {name.partition(".")[0] for name in imports(path, lazy=False)}
        forbidden = set(EXTRAS if core else ("cupy", "torch", "jax"))
        if own == "interop":  # each of its parts is for the library of its name
            forbidden = set(EXTRAS) - set(path.relative_to(PACKAGE).with_suffix("").parts[1:2])
            forbidden -= set() if "diffusers" in forbidden else {"torch"}  # which it is made of
        found = top & forbidden
        if own in NO_CUPY:
            found |= {name.partition(".")[0] for name in imports(path)} & {"cupy"}
        wrong += [f"{dotted(path)} imports {found}"] if found else []
    assert not wrong


def test_scipy_is_imported_where_it_is_needed() -> None:
    """Its import takes longer than all other imports of a command."""
    top = {dotted(path) for path in MODULES if any(
        name.partition(".")[0] == "scipy" for name in imports(path, lazy=False)
    )}  # fmt: skip
    assert not top, f"{top}: import scipy within the function that calls it"


def test_raw_module_is_mentioned_in_one_file() -> None:
    found = [path for path in PYTHON if "RawModule" in path.read_text()]
    assert found == [PACKAGE / "compiler" / "modules.py"]


def test_the_package_imports_where_no_extra_is_installed() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"
    core = [m for p, m in zip(MODULES, map(dotted, MODULES), strict=True)
            if place(p) in CORE - {"testing"}]  # fmt: skip
    script = "; ".join([blocked, "import cupyattn", *(f"import {m}" for m in core)])
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)


def test_the_picture_of_the_house_is_current() -> None:
    packages = tuple(name for line in HOUSE for name in line if name not in FLAT)
    assert packages == write_house.ORDER
    drawn = write_house.PICTURE.read_text()
    assert write_house.picture() == drawn, "run python -m docs.write_house"


def test_no_assert_and_no_leftovers_in_the_package() -> None:
    for path in PYTHON:
        assert not any(isinstance(node, ast.Assert) for node in nodes_of(path)), path
        assert not re.search(r"\bTO" + r"DO\b|\bFIX" + r"ME\b", path.read_text()), path


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of the parameters of a function, but for `self` and `cls`."""
    own = function.args
    named = [*own.posonlyargs, *own.args, own.vararg, *own.kwonlyargs, own.kwarg]
    return [one.arg for one in named if one is not None and one.arg not in ("self", "cls")]


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted name of each function in a module or class, and how much it takes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{child.name}", len(parameters(child))
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(child, f"{name}.{child.name}" if named else name)


def public_functions() -> Iterator[str]:
    """Yield the functions that docs/API.md shows, and the methods of the classes that it shows."""
    for module in write_api.MODULES:
        for found in (write_api.find(module, name) for name in write_api.public(module)):
            full = f"{found.home}.{found.name}"
            yield full
            if isinstance(found.node, ast.ClassDef):
                methods = (m.name for m in found.node.body if isinstance(m, ast.FunctionDef))
                yield from (f"{full}.{m}" for m in methods if m[0] != "_" or m == "__init__")


def test_functions_of_the_core_take_eight_parameters_at_most() -> None:
    """Public ones aside, whose options are many. What belongs together is one record."""
    core = [path for path in MODULES if place(path) in CORE]
    many = {
        name for path in core
        for name, count in functions(tree_of(path), dotted(path)) if count > 8
    }  # fmt: skip
    assert "cupyattn.ops.attention.attention" in many
    assert many <= set(public_functions())


def callers(name: str) -> list[str]:
    """The modules that call a function by its name, once for each call: alone, behind a module, or
    as a method. ``resolve()`` without arguments is a path's method."""
    return [
        dotted(path)
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and (node.args or node.keywords) and called(node) == name
    ]


def test_a_method_that_is_called_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PACKAGE / "ops" / "operation.py"
    tree = ast.parse("OP.resolve(a, b)\nmodules[0].resolve(*a)\nresolve(a)\nPath(a).resolve()")
    monkeypatch.setattr(sys.modules[__name__], "MODULES", [file])
    monkeypatch.setattr(sys.modules[__name__], "nodes_of", lambda _: tuple(ast.walk(tree)))
    assert callers("resolve") == ["cupyattn.ops.operation"] * 3


def test_a_call_is_resolved_in_one_place() -> None:
    """In `cupyattn.ops.operation`, whatever runs, prepares, explains, shares or judges it."""
    assert ATTENTION.resolve is resolve
    assert callers("resolve") == ["cupyattn.ops.operation"]
    # A prepared call is resolved when it is made; again where arrays have to be copied or their
    # values checked, or are not CuPy's.
    # Gradients, and sums over the keys of a rank, are of a forward pass, whose record theirs holds.
    # Layers are two operations. A judge asks which kernels a call may run, and ranks that agree
    # whether there will be codes.
    # Inductor has shapes alone, and what they launch is compiled.
    ask = ("interop.torch.precompile", "ops.attention", "ops.backward", "ops.backward",
           "ops.layers", "ops.layers", "ops.operation", "ops.part_sums", "ops.prepared",
           "ops.prepared", "ops.quantize", "ops.quantize")  # fmt: skip
    assert callers("problem_of") == [f"cupyattn.{module}" for module in ask]
    # Ranks that agree, JAX that traces, plans and judges ask with descriptions or with arrays.
    explained = ["cupyattn.interop.jax.functional", "cupyattn.ops.explain"]
    assert callers("resolved_backward") == explained
    assert callers("check_product") == ["cupyattn.interop.jax.linear", "cupyattn.ops.gemm"]
    # All calls, of arrays and of torch's tensors, are found and made in one place; beside it JAX
    # keeps what was checked, and ranks what they agreed on.
    keep = "distributed.agreement", "interop.jax.calls", "ops.operation"
    assert callers("remember") == [f"cupyattn.{module}" for module in keep]
    assert callers("make_ready") == ["cupyattn.ops.operation", "cupyattn.ops.prepared"]
    # Mirror, bounds and judge take a record, which their public functions ask for.
    assert callers("KernelCall") == ["cupyattn.problem.attention", "cupyattn.reference.problem"]
    assert callers("kernel_call_of") == ["cupyattn.bounds.kernel", "cupyattn.reference.attention"]
    assert callers("kernel_call") == ["cupyattn.problem.attention", "cupyattn.testing.parts"]
    # The record of pruning says how keys are read, and the plan is made from it.
    assert callers("reads_keys_once") == ["cupyattn.diffusion.pruning"]


def depth(node: ast.AST) -> int:
    """Return the depth of nested blocks of a function."""
    blocks = ast.If | ast.For | ast.While | ast.With | ast.Try
    return max(
        (depth(child) + isinstance(child, blocks) for child in ast.iter_child_nodes(node)),
        default=0,
    )  # fmt: skip


def test_a_prepared_call_reads_straight() -> None:
    """The arrays as given, or arrays that are examined, copied or imported first."""
    (prepared,) = (node for _, node in classes() if node.name == "Prepared")
    own = {node.name: node for node in prepared.body if isinstance(node, ast.FunctionDef)}
    assert depth(own["__call__"]) == 2 and depth(own["_otherwise"]) == 2


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes of the package, each with the dotted name of its module."""
    for path in PYTHON:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                yield dotted(path), node


def test_an_option_of_a_call_is_written_once() -> None:
    """Functions with more arguments than attention contain its settings, and repeat no option."""
    assert [module for module, node in classes() if node.name == "Settings"] == [
        "cupyattn.problem.settings"
    ]
    own = "cupyattn.problem.settings.Settings"
    of_attention = {"variant", "accuracy", "causal_align", "softcap", "return_lse", "check_finite"}
    fields = {
        f"{module}.{node.name}": {
            ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)
        }
        for module, node in classes()
    }
    assert of_attention < fields[own]
    # Type checkers read the classes of keyword arguments, which have no defaults.
    kinds = [name for name in fields if ".problem.settings." in name and name.endswith("Options")]
    typed = {name: fields.pop(name) for name in kinds}
    assert sum(map(len, typed.values())) == len(set().union(*typed.values()))
    assert {name for name, some in fields.items() if len(some & of_attention) > 2} == {own}
    holders = {"problem.settings", "ops.backward", "distributed.agreement", "interop.torch.calls"}
    assert {f"cupyattn.{name}" for name in holders} == {
        module for module, node in classes()
        if any(
            isinstance(one, ast.AnnAssign) and ast.unparse(one).startswith("of_call: Settings")
            for one in node.body
        )
    }  # fmt: skip


def reads_a_form(node: ast.AST) -> bool:
    """Whether a display has shape, strides and dtype of an array: a part of a key."""
    if not isinstance(node, ast.Tuple):
        return False
    read = {
        one.attr
        for part in node.elts
        for one in ast.walk(part)
        if isinstance(one, ast.Attribute)
    }
    return {"shape", "dtype"} < read and bool(read & {"strides", "stride"})


def test_calls_are_known_in_one_way() -> None:
    """`Recent.find` looks calls up by forms, of arrays and of torch's tensors."""
    readers = [dotted(path) for path in PYTHON if any(map(reads_a_form, nodes_of(path)))]
    assert readers == ["cupyattn.arrays.form", "cupyattn.interop.torch.bridge"]
    made = {
        dotted(path): ast.unparse(node)
        for path in PYTHON
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and called(node) == "Recent"
    }
    assert made == {
        "cupyattn.distributed.group": "Recent(MOST)",
        "cupyattn.runtime.recent": "Recent(MOST_REMEMBERED)",
    }  # fmt: skip
    texts = {dotted(path): "".join(path.read_text().split()) for path in PYTHON}
    makes_room = [name for name, text in texts.items() if ".pop(next(iter(" in text]
    assert makes_room == ["cupyattn.runtime.recent"]
    generations = [name for name, text in texts.items() if "generation()" in text]
    assert set(generations) == {
        "cupyattn.compiler.modules", "cupyattn.runtime.ready", "cupyattn.runtime.recent"
    }  # fmt: skip


def test_no_file_is_much_longer_than_600_lines() -> None:
    folders = [PACKAGE, KERNELS, ROOT / "tests", ROOT / "experiments"]
    paths = [p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".cu", ".cuh")]
    long = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in paths}
    assert not {name: count for name, count in long.items() if count > 640}


def test_the_mathematics_names_what_there_is() -> None:
    """Its contents are its headings, and a name in brackets is one in the code beside it."""
    text = (ROOT / "docs" / "MATH_REFERENCE.md").read_text()
    headings = re.findall(r"^## (\d+\. .*)$", text, re.M)
    assert re.findall(r"^- \[(\d+\. .*)\]\(#", text, re.M) == headings
    named = {
        n for names in re.findall(r"\[(`[\w.`, ]+`)\]", text) for n in re.findall(r"\w+", names)
    }
    code = "\n".join(path.read_text() for path in [*PYTHON, *CUDA])
    assert len(named) > 20 and not {n for n in named if not re.search(rf"\b{n}\b", code)}


def test_what_needs_a_framework_is_run_where_there_is_one() -> None:
    """`make test` has none; `make test-interop` runs tests/interop, and elsewhere the marked."""
    asks = re.compile(r"(importorskip|find_spec)\(.(torch|jax|diffusers|transformers)\b")
    marked = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = path.relative_to(ROOT / "tests").parts[0]
        if folder in ("interop", "gpu"):
            continue
        text = path.read_text()
        if "mark.frameworks" not in text and not asks.search(text):
            continue
        lines = text.splitlines()
        for test in ast.parse(text).body:
            if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
                continue
            is_marked = any("mark.frameworks" in ast.unparse(one) for one in test.decorator_list)
            code = "\n".join(lines[test.lineno - 1 : test.end_lineno])
            assert is_marked or not asks.search(code), f"{path.name}: {test.name}"
            marked |= {folder} if is_marked else set()
    run = (ROOT / "Makefile").read_text().split("-m frameworks ")[1].split("\n")[0].split()
    assert run == [f"tests/{folder}" for folder in sorted(marked)]


def test_the_tests_for_a_device_import() -> None:
    """They are not collected where there is none."""
    modules = sorted(Path(__file__).with_name("gpu").glob("test_*.py"))
    assert len(modules) > 15
    for path in modules:
        with contextlib.suppress(pytest.skip.Exception):  # a library or its device is not there
            importlib.import_module(f"tests.gpu.{path.stem}")


def test_every_file_of_tests_is_listed() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert folders == set(write_tests.FOLDERS)
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == {
        "__init__.py", "conftest.py", "test_budget.py", "test_structure.py",
    }  # fmt: skip
    assert write_tests.page() == write_tests.PAGE.read_text(), "run python -m docs.write_tests"
