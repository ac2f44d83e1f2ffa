"""Parts of square matrices: one block per head, or fewer rows or columns.

A parameter stacks the blocks of a gate's heads: ``(…, units, units/heads)``.
"""

from __future__ import annotations

from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray


def whole_of(xp: Any, parts: Array, heads: int, units: int, fill: float = 0) -> Array:
    """Return square matrices with these parts, and one value elsewhere.

    The parts are the blocks of heads on the diagonal or, with one head, the first rows and columns.
    """
    *lead, rows, cols = parts.shape
    if heads == 1:
        whole = xp.full((*lead, units, units), fill, parts.dtype)
        whole[..., :rows, :cols] = parts
        return whole
    whole = xp.full((*lead, heads, cols, heads, cols), fill, parts.dtype)
    head = xp.arange(heads)
    whole[..., head, :, head, :] = xp.moveaxis(parts.reshape(*lead, heads, cols, cols), -3, 0)
    return whole.reshape(*lead, units, units)


def parts_of(xp: Any, whole: Array, heads: int, rows: int, cols: int) -> Array:
    """Return the parts of square matrices, with these numbers of rows and columns."""
    *lead, units, _ = whole.shape
    if heads == 1:
        return whole[..., :rows, :cols]
    head = xp.arange(heads)
    apart = whole.reshape(*lead, heads, cols, heads, cols)[..., head, :, head, :]
    return xp.moveaxis(apart, 0, -3).reshape(*lead, units, cols)
