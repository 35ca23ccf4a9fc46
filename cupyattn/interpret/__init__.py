"""Runs the compiled kernels' PTX on NumPy: no GPU needed, and stricter than one."""

from cupyattn.interpret.executor import run
from cupyattn.interpret.findings import Finding, KernelFault

__all__ = ["Finding", "KernelFault", "run"]
