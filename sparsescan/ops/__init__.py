"""Operations that NumPy, PyTorch and JAX share: recurrences, filters, scans, attention."""
