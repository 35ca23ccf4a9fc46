"""Attention kernels for CuPy and NumPy, compiled at run time, checked against derived bounds."""
