"""Write tests/README.md: what each file of tests holds, from the first lines of their docstrings.

    python -m docs.write_tests
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cupyattn.files import replacing

TESTS = Path(__file__).parents[1] / "tests"
PAGE = TESTS / "README.md"
#: Folders in reading order, and what they are about.
FOLDERS = {
    "prims": "primitives of `kernels_cu/prims/`, each by a small kernel of its own",
    "compiler": "sources to kernels without a device, and the cache that keeps them",
    "reference": "the definition and the mirror: what the kernels are compared with",
    "bounds": "how far off a kernel may be",
    "kernels": "the rungs: compiled, interpreted, mirrored, within their bounds",
    "hopper": "their Hopper forms",
    "problem": "what a call accepts, refuses and remembers",
    "plans": "what is launched: parameter structs, grids, access widths",
    "runtime": "what the host does for a call on CuPy arrays",
    "testing": "the judge and its strategies",
    "quant": "INT8 operands, products of codes, linear layers",
    "backward": "gradients",
    "interpret": "the interpreter, instruction by instruction",
    "faults": "faults planted in the kernels, each of which a test must find",
    "diffusion": "`cupyattn.diffusion`",
    "checkpoints": "`cupyattn.checkpoints`",
    "distributed": "`cupyattn.distributed`",
    "interop": "torch, JAX and diffusers",
    "measure": "times, tables and facts about a device",
    "cli": "the `cupyattn` command, its records and reports",
    "experiments": "the experiments, in small",
    "docs": "pages, examples, packages and CI against the code",
    "gpu": "twins of the above on a device",
    "support": "what several folders share",
}
HEAD = """<!-- Written by python -m docs.write_tests: change the docstrings, and run it. -->
# Tests

Folders mirror the packages of `cupyattn/`; `test_structure.py` holds the shape of the source tree,
`test_budget.py` what a quick test may cost.
Tests of `gradients` stand in backward/. Those of `ops` stand where the subject of a function does,
and those of `arrays` in problem/ and interop/, with the calls that take arrays.
Cases stand beside the test that uses them. `make test` runs everything that takes seconds.
"""


def rows(folder: str) -> Iterator[str]:
    """Yield a row of the table for each file of tests in a folder."""
    for path in sorted((TESTS / folder).glob("*.py")):
        if path.stem == "__init__":
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(text.split("\n\n")[0].split()).rstrip(".:")
        yield f"| [`{path.name}`]({folder}/{path.name}) | {first.replace('|', chr(92) + '|')} |"


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for folder, about in FOLDERS.items():
        parts.append(f"## {folder}/\n\n{about[0].upper()}{about[1:]}.\n")
        parts.append("\n".join(["| file | what it holds |", "|---|---|", *rows(folder), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    with replacing(PAGE) as file:
        file.write(page().encode("utf-8"))
