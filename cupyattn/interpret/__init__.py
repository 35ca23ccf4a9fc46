"""Run the compiled kernels' PTX on NumPy, without a GPU and with stricter checks than a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.interpret.executor import run
    from cupyattn.interpret.findings import Finding, KernelFault
    from cupyattn.interpret.machine import schedule
    from cupyattn.interpret.observer import Observer, observe
    from cupyattn.interpret.own_kernels import TensorMap, launch
    from cupyattn.interpret.profile import Profile
    from cupyattn.interpret.stops import Break, Stop
    from cupyattn.interpret.trace import Trace
    from cupyattn.ops.interpreted import attention

__all__ = [
    "Break",
    "Finding",
    "KernelFault",
    "Observer",
    "Profile",
    "Stop",
    "TensorMap",
    "Trace",
    "attention",
    "launch",
    "observe",
    "run",
    "schedule",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "interpret.executor": ("run",),
        "interpret.findings": ("Finding", "KernelFault"),
        "interpret.machine": ("schedule",),
        "interpret.observer": ("Observer", "observe"),
        "interpret.own_kernels": ("TensorMap", "launch"),
        "interpret.profile": ("Profile",),
        "interpret.stops": ("Break", "Stop"),
        "interpret.trace": ("Trace",),
        "ops.interpreted": ("attention",),
    },
)  # fmt: skip
