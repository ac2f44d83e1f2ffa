"""Numeric kernels: they check nothing, decide nothing, and know no policy."""
