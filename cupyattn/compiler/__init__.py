"""Turn a .cu file into a loaded kernel: NVRTC, the cache of compiled kernels, targets."""
