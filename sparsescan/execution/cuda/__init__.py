"""Runs of programs on a CUDA device."""
