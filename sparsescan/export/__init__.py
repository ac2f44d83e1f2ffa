"""Trained networks outside of Python: C files."""

from .files import c

__all__ = ["c"]
