"""Windows that slide over images, as views."""

from __future__ import annotations

from typing import Any

__all__ = ["pooled_size", "windows"]

Array = Any
Pair = tuple[int, ...]  # (of the height, of the width)


def windows(
    xp: Any,
    x: Array,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    fill: float = 0.0,
    ends: Pair | None = None,
) -> Array:
    """Every window of every image, to be read only.

    Parameters
    ----------
    xp : module
        The one that `x` is an array of.
    x : ndarray, shape (m, C, H, W)
        The images.
    kernel_size, stride, padding, dilation : tuple of two ints
        As in PyTorch.
    fill : float
        What lies around the images.
    ends : tuple of two ints, optional
        More padding below and to the right.

    Returns
    -------
    ndarray, shape (m, C, OH, OW, KH, KW)
        A view of `x`, or of a copy if there is padding.
    """
    ends = ends or (0, 0)
    if any(padding) or any(ends):
        before = padding
        after = tuple(p + e for p, e in zip(padding, ends, strict=True))
        padded = tuple(n + b + a for n, b, a in zip(x.shape[2:], before, after, strict=True))
        images = xp.full((*x.shape[:2], *padded), fill, x.dtype)
        inner = tuple(slice(b, b + n) for b, n in zip(before, x.shape[2:], strict=True))
        images[(..., *inner)] = x
        x = images
    size = tuple(
        pooled_size(n, k, s, 0, d)
        for n, k, s, d in zip(x.shape[2:], kernel_size, stride, dilation, strict=True)
    )
    steps = tuple(s * bytes_ for s, bytes_ in zip(stride, x.strides[2:], strict=True))
    taps = tuple(d * bytes_ for d, bytes_ in zip(dilation, x.strides[2:], strict=True))
    return xp.lib.stride_tricks.as_strided(
        x, (*x.shape[:2], *size, *kernel_size), (*x.strides[:2], *steps, *taps)
    )


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool = False
) -> int:
    """How many windows there are along an axis of this size; less than 1 if there is none.

    With `ceil_mode`, the last window may reach beyond the padding, if it starts before its end.
    """
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count
