"""Attention of one sequence on several devices."""

from cupyattn.distributed.group import Group, HostGroup
from cupyattn.distributed.parallel import parallel_attention, parallel_attention_varlen
from cupyattn.distributed.partition import Partition
from cupyattn.distributed.start import run
