"""Which kernels a call launches, with which parameters: pure data."""
