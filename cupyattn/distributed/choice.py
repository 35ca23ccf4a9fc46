"""Mesh of a call: the requested mesh, or the fastest by the model of costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.model import H200, Machine, fastest
from cupyattn.problem.checks import AttentionSpec

#: The rung by whose rate a variant without one is judged: all meshes compute the same.
_STAND_IN = "fa_tc"


def choose_mesh(
    method: str,
    ulysses: int | None,
    call: AttentionSpec,
    variant: str,
    hosts: Sequence[str],
    *,
    balanced: bool,
    without_ring: bool = False,
    machine: Machine = H200,
) -> Mesh:
    """Return the mesh of a call.

    Parameters
    ----------
    method : {"auto", "ulysses", "ring", "mixed"}
    ulysses : int or None
        With ``"mixed"``.
    call : AttentionSpec
        The call of the whole sequence.
    variant : str
        The rung.
    hosts : sequence of str
        Name of the host of every rank.
    balanced : bool
        Rows are shared so that all ranks of a ring have the same work under a causal mask.
    without_ring : bool
        A ring does not take the call.
    machine : Machine
        Rates of the ranks' devices and links. The number of ranks per host is counted.

    Raises
    ------
    ValueError
        If `ulysses` does not divide the ranks.

    Examples
    --------
    >>> call = AttentionSpec(1, 8, 8, 65536, 65536, 128, "float16", 0.1)
    >>> choose_mesh("auto", None, call, "fa_tc", ["one host"] * 4, balanced=False)
    Mesh(size=4, ulysses=1)
    """
    size = len(hosts)
    if method == "mixed":
        return Mesh(size, 0 if ulysses is None else ulysses)
    if method == "ring":
        return Mesh(size, 1)
    if method == "ulysses" or without_ring:
        return Mesh(size, size)
    machine = replace(machine, per_host=min(Counter(hosts).values()))
    rung = "fa_int8" if variant == "fa_int8" else _STAND_IN
    return fastest(call, size, machine, variant=rung, balanced=balanced).mesh
