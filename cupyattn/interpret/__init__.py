"""Runs the compiled kernels' PTX on NumPy: no GPU needed, and stricter than one."""

from cupyattn.interpret.debug import attention
from cupyattn.interpret.executor import run
from cupyattn.interpret.findings import Finding, KernelFault
from cupyattn.interpret.machine import schedule
from cupyattn.interpret.observe import Observer, observe
from cupyattn.interpret.profile import Profile
from cupyattn.interpret.stops import Break, Stop
from cupyattn.interpret.trace import Trace

__all__ = [
    "Break",
    "Finding",
    "KernelFault",
    "Observer",
    "Profile",
    "Stop",
    "Trace",
    "attention",
    "observe",
    "run",
    "schedule",
]
