"""Registered rungs for `experiments.accuracy.fuzz`: copies of rungs under names of their own."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cupyattn as ca
from cupyattn.compiler.modules import KERNELS
from cupyattn.kernels import ladder

#: Names of registered rungs, and the rung that each is a copy of.
OWN = {"own_fa": "fa", "own_fa_tc": "fa_tc"}


@contextlib.contextmanager
def own_rungs() -> Iterator[None]:
    """Have all rungs of `OWN` registered."""
    _, made = _compiled()
    ladder.VARIANTS.update(made)
    try:
        yield
    finally:
        for name in OWN:
            ladder.VARIANTS.pop(name, None)


@functools.cache
def _compiled() -> tuple[tempfile.TemporaryDirectory[str], dict[str, ca.Variant]]:
    """Register and unregister all rungs, once in a process; return their sources and them."""
    folder = tempfile.TemporaryDirectory(prefix="cupyattn-own-")
    made = {}
    for name, of in OWN.items():
        text = (KERNELS / f"attn_{of}.cu").read_text(encoding="utf-8")
        path = Path(folder.name) / f"attn_{name}.cu"
        path.write_text(text.replace(f"void attn_{of}(", f"void attn_{name}("), encoding="utf-8")
        ca.register(replace(ca.VARIANTS[of], name=name, forms={}), path)
        made[name] = ca.unregister(name)
    return folder, made
