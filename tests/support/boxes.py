"""Boxes of indices: a range along every axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Box = tuple[tuple[int, int], ...]


def blocks(shape: Sequence[int], degrees: Sequence[int], ranks: int) -> list[Box]:
    """Cut a shape into so many parts along every axis; ranks that are left over get empty ones."""
    boxes: list[Box] = [
        tuple(
            (size * k // parts, size * (k + 1) // parts)
            for size, k, parts in zip(shape, place, degrees, strict=True)
        )
        for place in np.ndindex(*degrees)
    ]
    return boxes + [((0, 0),) * len(shape)] * (ranks - len(boxes))


def intersection(a: Box, b: Box) -> Box:
    """Return the box that two boxes share, of volume 0 if there is none."""
    ends = [(max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True)]
    return tuple((low, max(low, high)) for low, high in ends)


def volume(box: Box) -> int:
    """Return the number of entries of a box."""
    return math.prod(max(stop - start, 0) for start, stop in box)
