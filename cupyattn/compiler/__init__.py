"""From a .cu file to a loaded kernel: NVRTC, the cache of compiled kernels, targets."""
