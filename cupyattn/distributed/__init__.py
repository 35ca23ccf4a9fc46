"""Attention of one sequence on several devices."""

from cupyattn.distributed.backward import (
    parallel_attention_backward,
    parallel_attention_varlen_backward,
)
from cupyattn.distributed.group import Group, HostGroup
from cupyattn.distributed.parallel import parallel_attention, parallel_attention_varlen
from cupyattn.distributed.partition import Partition
from cupyattn.distributed.start import run
