"""The catalogue of kernels: ladder, tiles, features, numerics, splits, measured times."""
