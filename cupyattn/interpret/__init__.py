"""Runs the compiled kernels' PTX on NumPy: no GPU needed, and stricter than one."""
