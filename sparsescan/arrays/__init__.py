"""Arrays of NumPy and CuPy: which, where, on which stream."""
