"""Calls of modules and functions: prepared calls, recordings, operators and derivatives."""
