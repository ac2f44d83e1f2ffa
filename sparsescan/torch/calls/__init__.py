"""Calls of modules and functions: prepared, recorded, as operators, and their derivatives."""
