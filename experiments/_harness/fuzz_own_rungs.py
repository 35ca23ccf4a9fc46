"""Registered rungs for `experiments.accuracy.fuzz`: copies of rungs under names of their own."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import cupyattn as ca
from cupyattn.compiler.modules import KERNELS

#: Names of registered rungs, and the rung that each is a copy of.
OWN = {"own_fa": "fa", "own_fa_tc": "fa_tc"}


@functools.cache
def register_own() -> tempfile.TemporaryDirectory[str]:
    """Register all rungs of `OWN`, once in a process; return the folder of their sources."""
    folder = tempfile.TemporaryDirectory(prefix="cupyattn-own-")
    for name, of in OWN.items():
        text = (KERNELS / f"attn_{of}.cu").read_text(encoding="utf-8")
        path = Path(folder.name) / f"attn_{name}.cu"
        path.write_text(text.replace(f"void attn_{of}(", f"void attn_{name}("), encoding="utf-8")
        ca.register(replace(ca.VARIANTS[of], name=name, forms={}), path)
    return folder
