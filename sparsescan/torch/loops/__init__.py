"""Modules that loop in Python: the loop is found in short traces, and run by kernels."""
