"""Kernels of a user's own: copies of the library's under another name."""

from __future__ import annotations

from pathlib import Path

from cupyattn.compiler.modules import KERNELS


def renamed(folder: Path, name: str = "mine", of: str = "fa", kernels: Path = KERNELS) -> Path:
    """Copy the portable kernel of a rung, with the entry point ``attn_<name>``."""
    text = (kernels / f"attn_{of}.cu").read_text()
    path = folder / f"attn_{name}.cu"
    path.write_text(text.replace(f"void attn_{of}(", f"void attn_{name}("))
    return path
