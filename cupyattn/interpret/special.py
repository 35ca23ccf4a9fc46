"""Special registers: the position of a lane in its warp, block, cluster and grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.ordering import WARP

if TYPE_CHECKING:
    from cupyattn.interpret.machine import Machine


_AXES = (
    "tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid",
)  # fmt: skip
#: Names of all modelled registers.
SPECIAL_REGISTERS = frozenset(
    {
        "WARP_SZ", "%laneid", "%warpid", "%nwarpid", "%cluster_ctarank", "%cluster_nctarank",
        "%is_explicit_cluster", "%dynamic_smem_size", "%total_smem_size",
        *(f"%lanemask_{how}" for how in ("eq", "lt", "le", "gt", "ge")),
        *(f"%{name}.{axis}" for name in _AXES for axis in "xyz"),
    }
)  # fmt: skip


def special_registers(machine: Machine) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the special registers that are modelled, by name: one value for each lane."""
    lane = (machine.thread % WARP).astype(np.uint32)
    one = np.uint32(1)
    rank, blocks = (machine.first_block + machine.lane // machine.threads), machine.clusters.blocks
    counts = {
        "%nwarpid": machine.threads // WARP,
        "%cluster_nctarank": blocks,
        "%is_explicit_cluster": int(blocks > 1),
        "%dynamic_smem_size": machine.dynamic_shared,
        "%total_smem_size": machine.shared.nbytes,
        "WARP_SZ": WARP,
    }
    known: dict[str, npt.NDArray[Any]] = {
        "%laneid": lane,
        "%warpid": machine.thread // WARP,
        "%cluster_ctarank": rank % blocks,
        "%lanemask_eq": one << lane,
        "%lanemask_lt": (one << lane) - one,
        "%lanemask_le": (one << lane) - one | (one << lane),
        "%lanemask_gt": ~((one << lane) - one | (one << lane)),
        "%lanemask_ge": ~((one << lane) - one),
    }
    grid, block = machine.shapes
    thread, place = machine.thread, rank
    for axis, across, deep in zip("xyz", grid, block, strict=True):
        size = blocks if axis == "x" else 1  # of a cluster
        known[f"%tid.{axis}"], thread = thread % deep, thread // deep
        known[f"%ctaid.{axis}"] = at = place % across
        known[f"%clusterid.{axis}"], known[f"%cluster_ctaid.{axis}"] = at // size, at % size
        place = place // across
        counts[f"%ntid.{axis}"], counts[f"%nctaid.{axis}"] = deep, across
        counts[f"%cluster_nctaid.{axis}"], counts[f"%nclusterid.{axis}"] = size, across // size
    known |= {name: np.full(machine.size, count) for name, count in counts.items()}
    return {name: value.astype(np.uint32) for name, value in known.items()}
