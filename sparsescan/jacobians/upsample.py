"""Upsampling: images of another size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ..checks import check_choice, check_flag
from ..errors import InputError, InputTypeError, short
from .shared.checks import check_sizes
from .shared.kron import Separable, Taps

# Fractions with larger denominators than this are not meant by a float.
_LARGEST_DENOMINATOR = 10**6


class Upsample(Separable):
    """Resize images, by the nearest input or by linear interpolation along both axes.

    With the position ``t`` of an output in the input, ``i = ⌊t⌋`` and ``λ = t - i``, along each
    axis

        y = x_i                         for "nearest",
        y = (1 - λ) x_i + λ x_{i + 1}   for "bilinear";

    The transposed Jacobian has these weights, or products of two of them, where they are not 0.

    Parameters
    ----------
    size : int or two ints, optional
        Height and width of the output.
    scale_factor : float or two floats, optional
        Used in place of `size`: the output's height is ``⌊height * scale_factor⌋``.
    mode : {"nearest", "bilinear"}
        How to interpolate.
    align_corners : bool, optional
        Only for "bilinear": whether the centres of the corner pixels coincide; by default their
        edges do.
    input_shape : tuple of int
        ``(channels, height, width)``, maybe after more axes.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Upsample`, which computes ``t`` from `scale_factor` if it is given, not from
    the sizes; for "nearest" in float32. For "bilinear", ``t`` is exact here: `scale_factor` is read
    as the simplest fraction it can mean. Where PyTorch has a rounding error in place of a weight of
    0, there is no entry here.

    Examples
    --------
    >>> from sparsescan.jacobians import Upsample
    >>> up = Upsample(size=(1, 3), mode="bilinear", align_corners=True, input_shape=(1, 1, 2))
    >>> up.jacobian().toarray()
    array([[1. , 0.5, 0. ],
           [0. , 0.5, 1. ]])
    """

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        *,
        input_shape: Any,
    ) -> None:
        self._set_images(input_shape)
        self.size, self.scale_factor = size, scale_factor
        self.mode, self.align_corners = mode, align_corners
        check_choice("mode", mode, "nearest", "bilinear")
        if mode == "nearest" and align_corners is not None:
            raise InputError(
                f"align_corners is {short(align_corners)}; expected None, since mode is 'nearest'"
            )
        if (size is None) == (scale_factor is None):
            raise InputError(
                f"size is {short(size)} and scale_factor is {short(scale_factor)}; expected one of "
                "them"
            )
        scales: Sequence[float | None] = (None, None)
        if size is not None:
            sizes = check_sizes("size", size, 2)
        else:
            scales = factors = _read_scales(scale_factor)
            sizes = tuple(int(n * s) for n, s in zip(self._core, factors, strict=True))
            if min(sizes) < 1:
                raise InputError(
                    f"scale_factor is {short(scale_factor)}; too small for input_shape "
                    f"{self.input_shape}: the output would be of size {sizes}"
                )
        axes = zip(self._core, sizes, scales, strict=True)
        if mode == "nearest":
            self._set_taps(*(_nearest(*axis) for axis in axes))
        else:
            corners = align_corners is not None and check_flag("align_corners", align_corners)
            self._set_taps(*(_linear(*axis, corners) for axis in axes))


def _read_scales(scale_factor: Any) -> tuple[float, ...]:
    """Return two positive numbers, from two or one."""
    pair = scale_factor if isinstance(scale_factor, Sequence) else (scale_factor,) * 2
    try:
        scales = tuple(float(scale) for scale in itertools.islice(pair, 3))
    except Exception:  # a caller's own class may raise any
        scales = ()
    if len(scales) != 2:
        raise InputTypeError(
            f"scale_factor is {short(scale_factor)}; expected a number or 2 numbers"
        )
    if not all(0 < scale < math.inf for scale in scales):
        raise InputError(
            f"scale_factor is {short(scale_factor)}; expected positive, finite numbers"
        )
    return scales


def _nearest(size: int, size_out: int, scale: float | None) -> Taps:
    """Return one axis of nearest neighbours, at positions rounded down as PyTorch does."""
    output = np.arange(size_out)
    if size_out == size:
        inputs = output
    elif size_out == 2 * size:
        inputs = output // 2
    else:
        step = np.float32(size) / np.float32(size_out) if scale is None else np.float32(1 / scale)
        inputs = np.floor(output.astype(np.float32) * step).astype(np.int64)
    return Taps(size, np.minimum(inputs, size - 1)[:, None], np.ones((size_out, 1)))


def _linear(size: int, size_out: int, scale: float | None, align_corners: bool) -> Taps:
    """Return one axis of linear interpolation."""
    if size_out == size:
        step = Fraction(1)
    elif align_corners:
        step = Fraction(size - 1, max(size_out - 1, 1))
    else:
        step = Fraction(size, size_out) if scale is None else 1 / _simplest(scale)
    offset = Fraction(0 if align_corners else 1, 2)
    inputs = np.zeros((size_out, 2), np.int64)
    weights = np.zeros((size_out, 2))
    for output in range(size_out):
        position = max((output + offset) * step - offset, Fraction(0))
        position = min(position, Fraction(size - 1))
        first = math.floor(position)
        inputs[output] = first, first + 1
        weights[output] = 1 - (position - first), position - first
    return Taps(size, inputs, weights)


def _simplest(number: float) -> Fraction:
    """Return the simple fraction that a float means, such as 1/3, if there is one."""
    simple = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
    return simple if float(simple) == number else Fraction(number)
