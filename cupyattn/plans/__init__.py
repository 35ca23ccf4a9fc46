"""Plans of calls: the kernels to launch, and their parameters, as pure data."""
