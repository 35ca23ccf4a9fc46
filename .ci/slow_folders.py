"""Which slow tests a change asks for: folders of tests/, one a line, from the files that differ.

usage: git diff --name-only BASE | python .ci/slow_folders.py

Folders of tests mirror packages. What a kernel does is tested in several of them, and a file that
no rule knows asks for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
#: Folders whose tests compile kernels or run them in the interpreter.
KERNELS = (
    "backward", "compiler", "diffusion", "faults", "hopper", "interpret", "kernels", "prims",
    "quant",
)  # fmt: skip
#: Where packages and modules are tested that have no folder of their name.
ELSEWHERE = {
    "arrays": ("interop", "problem"),
    "collector": ("interpret",),
    "compiler": KERNELS,
    "distributions": ("problem",),
    "errors": ("problem",),
    "files": ("checkpoints", "problem"),
    "gradients": ("backward",),
    "interpret": KERNELS,
    "lazy_face": ("problem",),
    "py.typed": ("docs",),
    "ops": ("backward", "diffusion", "kernels", "quant"),
    "strategies": ("testing",),
    "switches": ("problem",),
    "unfused": ("kernels",),
    "version": ("docs",),
    "__init__": ("docs", "problem"),
    "__main__": ("cli",),
}
#: What else lies at the top of the checkout.
TOP = {
    ".ci": ("docs",), "docs": ("docs",), "examples": ("docs",), "experiments": ("experiments",),
    "kernels_cu": KERNELS, "Makefile": ("docs",), "pyproject.toml": ("docs",),
    "ruff.toml": (), "setup.cfg": ("docs",), "setup.py": ("docs",), "Dockerfile": ("docs",),
    "Dockerfile.cpu": ("docs",), "MANIFEST.in": ("docs",), "LICENSE": (), "CITATION.cff": (),
    ".clang-format": (), ".dockerignore": (), ".gitignore": (),
}  # fmt: skip


def all_folders(tests: Path = TESTS) -> tuple[str, ...]:
    """Return the folders of tests that run without a device."""
    found = {path.parent.name for path in tests.glob("*/test_*.py")}
    return tuple(sorted(found - {"gpu"}))


def folders_of(path: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that a changed file asks for, all of them if no rule knows it."""
    top, *rest = Path(path).parts
    if top == "tests" and len(rest) > 1:
        return (rest[0],) if rest[0] in known else () if rest[0] == "gpu" else known
    if top == "tests" and rest == ["README.md"]:
        return ()
    if top == "cupyattn" and rest:
        package = rest[0].removesuffix(".py")
        return ELSEWHERE.get(package, (package,) if package in known else known)
    if path.endswith(".md"):
        return ("docs",)
    return TOP.get(top, known)


def asked_for(paths: Iterable[str], tests: Path = TESTS) -> list[str]:
    """Return the folders that changed files ask for, sorted."""
    known = all_folders(tests)
    return sorted({folder for path in paths for folder in folders_of(path, known)})


if __name__ == "__main__":
    print("\n".join(asked_for(line.strip() for line in sys.stdin if line.strip())))
