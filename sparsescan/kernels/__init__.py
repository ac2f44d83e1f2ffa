"""Numeric kernels only, no policy."""
