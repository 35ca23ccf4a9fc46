"""Where a call runs: kernels on a device or in the interpreter, or the mirror in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.runtime import ready
from cupyattn.runtime.ready import Runnable


def run(backend: str, plan: Runnable, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan with `cupyattn.runtime.ready.run` or `cupyattn.interpret.run`, which say how.

    Parameters
    ----------
    backend : {"cuda", "interpret"}
    plan : Runnable
    buffers : mapping of str to array or None
    arch : str, optional
    """
    if backend == "cuda":
        ready.run(plan, buffers, arch)
    else:
        from cupyattn import interpret

        interpret.run(plan, buffers, arch)
