"""Calls of kernels through the foreign function interface of XLA: programs, primitives, rules."""
