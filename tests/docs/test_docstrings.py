"""Examples in docstrings are true, in the package, the experiments and the scripts for pages."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Libraries of extras that a module needs, by the beginning of its name.
NEEDS = {
    "cupyattn.interop.torch": "torch", "cupyattn.interop.jax": "jax",
    "cupyattn.interop.diffusers": "diffusers", "cupyattn.interop.restoring": "torch",
}  # fmt: skip


def modules() -> list[Any]:
    """Return the modules with examples by name; modules of frameworks have their mark."""
    found = []
    for path in sorted(ROOT.joinpath(top) for top in ("cupyattn", "experiments", "docs")):
        for file in sorted(path.rglob("*.py")):
            if re.search(r"^ *>>> ", file.read_text(encoding="utf-8"), re.MULTILINE):
                name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                found.append(name.removesuffix(".__init__"))
    return [
        pytest.param(x, marks=pytest.mark.frameworks if x.startswith(tuple(NEEDS)) else [])
        for x in found
    ]


@pytest.mark.parametrize("name", modules())
def test_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for beginning, library in NEEDS.items():
        if name.startswith(beginning):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    extra = {"np": np, "ca": ca}  # as the documents call them
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=FLAGS, extraglobs=extra)
    assert found.attempted and not found.failed
