"""Attention of one sequence on several devices, which exchange heads or pass keys round a ring.

>>> import numpy as np
>>> from cupyattn import distributed
>>> distributed.run(lambda group: (group.rank, group.size), 2)
[(0, 2), (1, 2)]

docs/DISTRIBUTED.md says how to start ranks in one process, under mpirun and under Slurm.
"""

from cupyattn.distributed.backward import (
    parallel_attention_backward,
    parallel_attention_varlen_backward,
)
from cupyattn.distributed.copies import CopyGroup
from cupyattn.distributed.group import Group, HostGroup, Work
from cupyattn.distributed.judge import Shared, judge, judge_backward
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.nccl import NcclGroup
from cupyattn.distributed.parallel import parallel_attention, parallel_attention_varlen
from cupyattn.distributed.partition import Partition
from cupyattn.distributed.shares import gather, share
from cupyattn.distributed.start import connect, from_environment, from_mpi, run
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
