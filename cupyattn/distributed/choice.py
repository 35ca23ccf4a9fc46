"""Which mesh a call runs on: the one asked for, or the one that the model of the costs prefers."""

from __future__ import annotations

from collections.abc import Sequence

from cupyattn.checks import AttentionCall
from cupyattn.distributed.mesh import Mesh


def choose_mesh(
    method: str,
    ulysses: int | None,
    call: AttentionCall,
    variant: str,
    hosts: Sequence[str],
    *,
    causal_balanced: bool,
) -> Mesh:
    size = len(hosts)
    if method == "mixed":
        return Mesh(size, int(ulysses or 0))
    if method == "ring":
        return Mesh(size, 1)
    return Mesh(size, size)
