"""Pooling: sliding windows over images, each of which gives its largest input or its mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import Mirrored
from ..checks import check_count, check_flag
from ..errors import InputError, short
from ..locks import cached_property
from ..symbolic.pattern import indptr_of, rows_of
from .kernels.values import mark_in_tiles, mark_in_windows
from .shared.checks import check_sizes
from .shared.kron import Images, Separable, Taps
from .shared.windows import Window, check_output_size

Array = Any


class _Pooling(Images):
    """Windows of one size, at equal distances."""

    def _set_windows(
        self, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> list[tuple[Window, int]]:
        """Check and set the arguments; return the windows along both axes, and their number."""
        self.kernel_size = check_sizes("kernel_size", kernel_size, 2)
        self.stride = self.kernel_size if stride is None else check_sizes("stride", stride, 2)
        self.padding = check_sizes("padding", padding, 2, 0)
        self.dilation = check_sizes("dilation", dilation, 2)
        self.ceil_mode = check_flag("ceil_mode", ceil_mode)
        half = tuple(kernel // 2 for kernel in self.kernel_size)
        if any(p > most for p, most in zip(self.padding, half, strict=True)):
            raise InputError(
                f"padding is {short(padding)}; expected at most {half}, half the kernel"
            )
        arguments = self.kernel_size, self.stride, self.padding, self.padding, self.dilation
        windows = [Window(*axis) for axis in zip(self._core, *arguments, strict=True)]
        sizes = tuple(window.count(self.ceil_mode) for window in windows)
        check_output_size(sizes, self.input_shape, self.kernel_size)
        return list(zip(windows, sizes, strict=True))


class MaxPool2d(_Pooling):
    """The largest input of each window: ``y_o = max_{i ∈ window(o)} x_i``.

    The transposed Jacobian has 1 in the row of that input, and 0 in the rows of the others:

        (∂y/∂x)ᵀ[i, o] = 1 if i = argmax window(o) else 0,  for i in window(o).

    Parameters
    ----------
    kernel_size : int or two ints
        Size of a window.
    stride : int or two ints, optional
        From a window to the next one; by default `kernel_size`.
    padding : int or two ints, default 0
        Padding around the input, at most half of `kernel_size`; it is never the maximum.
    dilation : int or two ints, default 1
        From an input in the window to the next one.
    ceil_mode : bool, default False
        Whether a last window may reach beyond the padding.
    input_shape : tuple of int
        ``(channels, height, width)``, maybe after more axes.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.MaxPool2d`: among equal inputs the first is the maximum; if there are NaN,
    the last NaN is. The Jacobian is that of BPPSA (MLSys 2020), Appendix D.3, for any windows. If
    padding and dilation leave a window without inputs, its output is ``-∞``, and its column is
    empty.

    Examples
    --------
    >>> from sparsescan.jacobians import MaxPool2d
    >>> pool = MaxPool2d(2, input_shape=(1, 2, 4))
    >>> pool.values([[[1.0, 2.0, 5.0, 5.0], [4.0, 3.0, 5.0, 0.0]]]).reshape(2, 4)
    array([[0., 0., 1., 0.],
           [1., 0., 0., 0.]])
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        *,
        ceil_mode: bool = False,
        input_shape: Any,
    ) -> None:
        self._set_images(input_shape)
        windows = self._set_windows(kernel_size, stride, padding, dilation, ceil_mode)
        axes = []
        for window, count in windows:
            inputs = window.inputs(count)
            inside = (inputs >= 0) & (inputs < window.size)
            axes.append(Taps(window.size, inputs, inside.astype(np.float64)))
        self._set_taps(*axes)
        # With padding, or a window that reaches beyond the end, there would be more of them.
        tiles = self.kernel_size == self.stride == (2, 2) and self.dilation == (1, 1)
        self._tiles = tiles and self._core_out == tuple(size // 2 for size in self._core)

    def _forward(self, xp: Any, x: Array) -> Array:
        for axis, taps in ((1, self._y), (2, self._x)):
            x = taps.read(xp, x, axis, -np.inf).max(axis=axis)
        return x

    _is_compiled = True

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        if xp is not np:
            self._fill_by_windows(xp, x, out)
        elif self._tiles:
            mark_in_tiles(np.ascontiguousarray(x), out)
        else:
            # No window is without inputs: it would be the only one, and there would be no entries.
            mark_in_windows(np.ascontiguousarray(x), *self._marks, out)

    @cached_property
    def _marks(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The taps of each window, the input of each tap, and its entry in the pattern."""
        window, tap = np.nonzero(self._inputs >= 0)
        inputs = self._inputs[window, tap]
        # Entries are sorted by inputs, then by windows.
        entries = np.empty(len(inputs), np.int64)
        entries[np.argsort(inputs, kind="stable")] = np.arange(len(inputs))
        return indptr_of(window, len(self._inputs)), inputs, entries

    def _fill_by_windows(self, xp: Any, x: Array, out: Array) -> None:
        """Write the values by operations on all windows at once, for a GPU."""
        inputs, rows, columns = (constant.on(xp) for constant in self._tables)
        values = xp.where(inputs >= 0, x.reshape(len(x), -1)[:, inputs], x.dtype.type(-np.inf))
        largest = values.max(axis=-1, keepdims=True)
        is_nan = values != values
        first = ((values == largest) & (inputs >= 0)).argmax(axis=-1)
        last_nan = inputs.shape[1] - 1 - is_nan[..., ::-1].argmax(axis=-1)
        tap = xp.where(is_nan.any(axis=-1), last_nan, first)
        chosen = inputs[xp.arange(len(inputs)), tap]
        out[...] = chosen[:, columns] == rows

    @cached_property
    def _inputs(self) -> NDArray[np.int64]:
        """The place in its image that each tap of each window reads, or -1: ``(windows, taps)``."""
        y, x = (np.where(taps.weights != 0, taps.inputs, -1) for taps in (self._y, self._x))
        y, x = y[:, None, :, None], x[None, :, None, :]
        inputs = np.where((y >= 0) & (x >= 0), y * self._core[1] + x, -1)
        return inputs.reshape(math.prod(self._core_out), -1)

    @cached_property
    def _tables(self) -> tuple[Mirrored, Mirrored, Mirrored]:
        """The input under each tap of each window, or -1; the row and column of every entry."""
        pattern = self._core_pattern()
        return (Mirrored(self._inputs), Mirrored(rows_of(pattern)), Mirrored(pattern.indices))


class AvgPool2d(_Pooling, Separable):
    """The mean of each window: ``y_o = Σ_{i ∈ window(o)} x_i / d_o``.

    The transposed Jacobian has ``1 / d_o`` in column ``o``, in the rows of the inputs of its
    window. The divisor ``d_o`` is the size of the window without parts beyond the padding.

    Parameters
    ----------
    kernel_size : int or two ints
        Size of a window.
    stride : int or two ints, optional
        From a window to the next one; by default `kernel_size`.
    padding : int or two ints, default 0
        Zeros around the input, at most half of `kernel_size`.
    ceil_mode : bool, default False
        Whether a last window may reach beyond the padding.
    count_include_pad : bool, default True
        Whether ``d_o`` counts the padding.
    divisor_override : int, optional
        Divisor instead of ``d_o``; not 0.
    input_shape : tuple of int
        ``(channels, height, width)``, maybe after more axes.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.AvgPool2d`.

    Examples
    --------
    >>> from sparsescan.jacobians import AvgPool2d
    >>> AvgPool2d(2, input_shape=(1, 2, 2)).jacobian().toarray().ravel()
    array([0.25, 0.25, 0.25, 0.25])
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        input_shape: Any,
    ) -> None:
        self._set_images(input_shape)
        windows = self._set_windows(kernel_size, stride, padding, 1, ceil_mode)
        self.count_include_pad = check_flag("count_include_pad", count_include_pad)
        if divisor_override is not None:
            divisor_override = check_count("divisor_override", divisor_override, 1)
        self.divisor_override = divisor_override
        divisors = (None, None) if divisor_override is None else (divisor_override, 1)
        self._set_taps(
            *(self._taps(*axis, divisor) for axis, divisor in zip(windows, divisors, strict=True))
        )

    def _taps(self, window: Window, count: int, divisor: int | None) -> Taps:
        """Return one axis, its weights divided by the size of each window or by a number."""
        inputs = window.inputs(count)
        inside = (inputs >= 0) & (inputs < window.size)
        counted = inputs < window.size + window.after if self.count_include_pad else inside
        counts = counted.sum(axis=1, keepdims=True) if divisor is None else divisor
        return Taps(window.size, inputs, inside / counts)


class AdaptiveAvgPool2d(Separable):
    """The means of windows that divide the image: ``y_o = Σ_{i ∈ window(o)} x_i / |window(o)|``.

    The transposed Jacobian has ``1 / |window(o)|`` in column ``o``, in the rows of the inputs of
    its window. Along an axis of size ``H``, with ``O`` outputs, output ``o`` reads the inputs

        ⌊o H / O⌋, …, ⌈(o + 1) H / O⌉ - 1.

    Parameters
    ----------
    output_size : int or two of int and None
        Height and width of the output; None keeps those of the input.
    input_shape : tuple of int
        ``(channels, height, width)``, maybe after more axes.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.AdaptiveAvgPool2d`.

    Examples
    --------
    >>> from sparsescan.jacobians import AdaptiveAvgPool2d
    >>> AdaptiveAvgPool2d((1, 2), input_shape=(1, 1, 3)).jacobian().toarray()
    array([[0.5, 0. ],
           [0.5, 0.5],
           [0. , 0.5]])
    """

    def __init__(self, output_size: Any, *, input_shape: Any) -> None:
        self._set_images(input_shape)
        self.output_size = output_size
        if isinstance(output_size, (tuple, list)) and len(output_size) == 2:
            output_size = [
                size if given is None else given
                for given, size in zip(output_size, self._core, strict=True)
            ]
        sizes = check_sizes("output_size", output_size, 2)
        self._set_taps(*(_parts(*pair) for pair in zip(self._core, sizes, strict=True)))


def _parts(size: int, count: int) -> Taps:
    """Cut an axis into `count` almost equal parts; they overlap if `count` does not divide it."""
    output = np.arange(count)[:, None]
    first, end = output * size // count, -(-(output + 1) * size // count)
    inputs = first + np.arange((end - first).max())
    return Taps(size, inputs, (inputs < end) / (end - first))
