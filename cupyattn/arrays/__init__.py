"""NumPy or CuPy: kinds of arrays, addresses, overlaps, and the form of an array."""
