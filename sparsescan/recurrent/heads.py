"""Matrices by heads: square blocks, which are on the diagonal of a matrix of all units.

A parameter has the rows of all blocks, one below the other: ``(…, units, units/heads)``.
"""

from __future__ import annotations

from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray


def whole_of(xp: Any, blocks: Array, heads: int, fill: float = 0) -> Array:
    """Return matrices ``(…, units, units)`` with blocks on their diagonals, elsewhere one value."""
    *lead, units, size = blocks.shape
    whole = xp.full((*lead, heads, size, heads, size), fill, blocks.dtype)
    head = xp.arange(heads)
    whole[..., head, :, head, :] = xp.moveaxis(blocks.reshape(*lead, heads, size, size), -3, 0)
    return whole.reshape(*lead, units, units)


def blocks_of(xp: Any, whole: Array, heads: int) -> Array:
    """Return the blocks on the diagonals of matrices, ``(…, units, units/heads)``."""
    *lead, units, _ = whole.shape
    size, head = units // heads, xp.arange(heads)
    apart = whole.reshape(*lead, heads, size, heads, size)[..., head, :, head, :]
    return xp.moveaxis(apart, 0, -3).reshape(*lead, units, size)
