"""The catalogue of kernels: ladder, forms, tiles, features, numerics, splits, measured times."""
