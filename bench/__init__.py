"""Benchmarks: the engine and its peers, side by side."""
