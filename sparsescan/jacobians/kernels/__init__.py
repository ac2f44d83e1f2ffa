"""Kernels of the layers."""
