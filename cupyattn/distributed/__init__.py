"""Attention of one sequence on several devices, which exchange heads or pass keys round a ring.

>>> import numpy as np
>>> from cupyattn import distributed
>>> distributed.run(lambda group: (group.rank, group.size), 2)
[(0, 2), (1, 2)]

docs/DISTRIBUTED.md says how to start ranks in one process, under mpirun and under Slurm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.distributed.backward import (
        parallel_attention_backward,
        parallel_attention_varlen_backward,
    )
    from cupyattn.distributed.copies import CopyGroup
    from cupyattn.distributed.group import Group, HostGroup, Work
    from cupyattn.distributed.mesh import Mesh
    from cupyattn.distributed.nccl import NcclGroup
    from cupyattn.distributed.parallel import parallel_attention, parallel_attention_varlen
    from cupyattn.distributed.partition import Partition
    from cupyattn.distributed.rank_shares import gather, share
    from cupyattn.distributed.start import connect, from_environment, from_mpi, run
    from cupyattn.distributed.torch_groups import from_torch
    from cupyattn.distributed.verdict import Shared, judge, judge_backward
    from cupyattn.errors import RankError

__all__ = [
    "CopyGroup",
    "Group",
    "HostGroup",
    "Mesh",
    "NcclGroup",
    "Partition",
    "RankError",
    "Shared",
    "Work",
    "connect",
    "from_environment",
    "from_mpi",
    "from_torch",
    "gather",
    "judge",
    "judge_backward",
    "parallel_attention",
    "parallel_attention_backward",
    "parallel_attention_varlen",
    "parallel_attention_varlen_backward",
    "run",
    "share",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "distributed.backward": (
            "parallel_attention_backward", "parallel_attention_varlen_backward",
        ),
        "distributed.copies": ("CopyGroup",),
        "distributed.group": ("Group", "HostGroup", "Work"),
        "distributed.mesh": ("Mesh",),
        "distributed.nccl": ("NcclGroup",),
        "distributed.parallel": ("parallel_attention", "parallel_attention_varlen"),
        "distributed.partition": ("Partition",),
        "distributed.rank_shares": ("gather", "share"),
        "distributed.start": ("connect", "from_environment", "from_mpi", "run"),
        "distributed.torch_groups": ("from_torch",),
        "distributed.verdict": ("Shared", "judge", "judge_backward"),
        "errors": ("RankError",),
    },
)  # fmt: skip
