"""The time of operations on a machine."""
