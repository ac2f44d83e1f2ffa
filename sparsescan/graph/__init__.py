"""Expressions of vectors, one number a unit: operations, derivatives, and texts for targets."""
