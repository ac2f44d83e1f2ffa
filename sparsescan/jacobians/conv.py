"""Convolutions: the Jacobian's entries are weights, at places known from the architecture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..checks import check_choice, check_count
from ..errors import InputError, short
from .shared.checks import Shape, check_sizes
from .shared.operator import Operator
from .shared.stencil import Weighing
from .shared.windows import Window, check_output_size, slide

Array = Any


class _Convolution(Weighing):
    """Convolutions, transposed or not; one-dimensional ones have images of height 1."""

    _axes = 2

    def _set_channels(
        self, in_channels: int, out_channels: int, groups: int, padding_mode: str, input_shape: Any
    ) -> None:
        """Check and set the arguments that do not depend on the windows."""
        self.in_channels = check_count("in_channels", in_channels, 1)
        self.out_channels = check_count("out_channels", out_channels, 1)
        self.groups = check_count("groups", groups, 1)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise InputError(
                f"groups is {groups}; expected a divisor of in_channels = {in_channels} and "
                f"out_channels = {out_channels}"
            )
        check_choice("padding_mode", padding_mode, "zeros")
        self._set_shapes(input_shape, self._axes + 1)
        if self._core[0] != self.in_channels:
            raise InputError(
                f"input_shape is {self.input_shape}; expected {self.in_channels} channels "
                f"before the last {self._axes} axes"
            )

    def _set_windows(
        self, kernel_size: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any = 0
    ) -> None:
        """Check and set the arguments of the windows, and the sizes of both sides."""
        self.kernel_size = check_sizes("kernel_size", kernel_size, self._axes)
        self.stride = check_sizes("stride", stride, self._axes)
        self.dilation = check_sizes("dilation", dilation, self._axes)
        self.padding, after = self._read_padding(padding)
        size = _image(self._core[1:], 1)
        kernels, strides, dilations = (
            _image(numbers, 1) for numbers in (self.kernel_size, self.stride, self.dilation)
        )
        axes = kernels, strides, _image(self.padding, 0), _image(after, 0), dilations
        y, x = (Window(*axis) for axis in zip(size, *axes, strict=True))
        size_out: Shape = (y.count(), x.count())
        if self.transposed:
            self.output_padding = check_sizes("output_padding", output_padding, 2, 0)
            for extra, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True):
                if extra >= max(s, d):
                    raise InputError(
                        f"output_padding is {self.output_padding}; expected less than the stride "
                        f"{self.stride} or the dilation {self.dilation}"
                    )
            windows = zip(size, self.output_padding, (y, x), strict=True)
            size_out = tuple(_span(w, n) - 2 * w.before + extra for n, extra, w in windows)
            y, x = (Window(*axis) for axis in zip(size_out, *axes, strict=True))
        self.windows = y, x
        core = size_out[-self._axes :]
        check_output_size(core, self.input_shape, self.kernel_size)
        self.sides = (self.in_channels, *size), (self.out_channels, *size_out)
        self._set_output((self.out_channels, *core))

    def _read_padding(self, padding: Any) -> tuple[Shape, Shape]:
        """Return the zeros before and after each axis."""
        if isinstance(padding, str):
            if padding not in ("same", "valid") or self.transposed:
                wanted = "integers" if self.transposed else "integers, 'same' or 'valid'"
                raise InputError(f"padding is {short(padding)}; expected {wanted}")
            if padding == "valid":
                return (0,) * self._axes, (0,) * self._axes
            if max(self.stride) > 1:
                raise InputError(f"padding is 'same'; expected a stride of 1, not {self.stride}")
            both = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple(b // 2 for b in both), tuple(b - b // 2 for b in both)
        sizes = check_sizes("padding", padding, self._axes, 0)
        return sizes, sizes

    # -- Forward and parameter gradients --------------------------------------------------------

    def _grouped_weight(self, xp: Any) -> Array:
        """Return the weight, 0 where it is pruned, as one matrix for each group."""
        weight = self.kept_weight(xp)
        return weight.reshape(self.groups, len(weight) // self.groups, -1)

    def _add_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias[:, None, None]

    def _grouped(self, x: Array) -> Array:
        """Return samples as ``(m, groups, channels, places)``."""
        channels, places = x.shape[1], math.prod(x.shape[2:])
        return x.reshape(len(x), self.groups, channels // self.groups, places)

    def _columns(self, xp: Any, images: Array) -> Array:
        """Return the inputs of each window in each group: ``(m, groups, read, windows)``."""
        height, width = self.window_counts
        images = images.reshape(*images.shape[:2], *(window.size for window in self.windows))
        view = slide(xp, images, *self.windows)[:, :, :height, :width]
        read = view.shape[1] // self.groups * math.prod(self.kernel_size)
        columns = view.transpose(0, 1, 4, 5, 2, 3)
        return columns.reshape(len(view), self.groups, read, height * width)

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        small, large = (x, grad_y) if self.transposed else (grad_y, x)
        columns = self._columns(xp, large)
        weight = xp.matmul(self._grouped(small), columns.swapaxes(-1, -2)).sum(axis=0)
        return self.weight_grads(xp, weight, grad_y, (0, *range(2, grad_y.ndim)))


class _Forward(_Convolution):
    """Convolutions that are not transposed."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        input_shape: Any,
        weight_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        self._set_channels(in_channels, out_channels, groups, padding_mode, input_shape)
        self._set_windows(kernel_size, stride, padding, dilation)
        self._declare_weight(self.kernel_size, bias, weight_mask, dtype, rng)

    def restrict(
        self, input_shape: Any, channels: slice = slice(None), **arguments: Any
    ) -> Operator:
        """Return this layer for part of its input and some output channels, of whole groups or one.

        See :meth:`.Operator.restrict`.
        """
        uneven = any(window.before != window.after for window in self.windows)
        if uneven and "padding" not in arguments:
            raise InputError("padding is 'same', of unequal sides; expected sizes for the part")
        return super().restrict(input_shape, channels, **arguments)

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        inputs = input_shape[len(input_shape) - self._axes - 1]
        return super()._arguments(input_shape, channels) | {
            "in_channels": inputs,
            "out_channels": len(range(*channels.indices(self.out_channels))),
            "groups": max(1, self.groups * inputs // self.in_channels),
            **{name: getattr(self, name) for name in ("kernel_size", "stride", "padding")},
            "dilation": self.dilation,
        }

    def _forward(self, xp: Any, x: Array) -> Array:
        y = xp.matmul(self._grouped_weight(xp), self._columns(xp, x))
        return self._add_bias(y.reshape(len(x), *self.sides[1]))


class Conv1d(_Forward):
    """Convolution of signals, as :class:`torch.nn.Conv1d`; see :class:`Conv2d`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As for :class:`Conv2d`, with one integer in place of two.
    input_shape : tuple of int
        ``(in_channels, length)``; more axes may come first.
    weight_mask, dtype, rng
        As for :class:`Conv2d`.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Examples
    --------
    >>> from sparsescan.jacobians import Conv1d
    >>> Conv1d(1, 1, 3, padding=1, input_shape=(1, 4)).pattern
    Pattern((4, 4), nnz=10, general)
    """

    _axes = 1


class Conv2d(_Forward):
    """Convolution of images: ``y_o = b_o + Σ_c W_oc ⋆ x_c``.

    The transposed Jacobian has, in the row of input ``(c, y, x)`` and the column of output
    ``(o, v, u)``, the weight that joins them:

        W[o, c, (y + padding - v·stride) / dilation, (x + padding - u·stride) / dilation],

    where these are integers inside the kernel. It does not depend on the input.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels of the input and the output.
    kernel_size, stride, padding, dilation : int or two ints
        As in PyTorch; by default 1, 0 and 1. The padding may also be ``"same"``
        or ``"valid"``.
    groups : int, default 1
        Groups of channels without connections between them.
    bias : bool, default True
        Whether there is one.
    padding_mode : {"zeros"}
        The padding mode: zeros around the input.
    input_shape : tuple of int
        ``(in_channels, height, width)``; more axes may come first.
    weight_mask : array_like of bool, shape of the weight, optional
        True where a weight is kept. A pruned weight counts as 0, has a gradient of 0, and leaves
        the pattern.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        Source of the initial parameters, from the same distribution as PyTorch.

    Attributes
    ----------
    weight : ndarray, shape (out_channels, in_channels / groups, kernel height, kernel width)
        The weight; an array that is set is shared, not copied.
    bias : ndarray or None, shape (out_channels,)
        The bias.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Conv2d`. The Jacobian is that of BPPSA (MLSys 2020), Algorithms 2 to 4, for
    any kernel, stride, padding, dilation and groups. Its rows repeat from place to place, so each
    different row is computed once and copied.

    Examples
    --------
    >>> from sparsescan.jacobians import Conv2d
    >>> conv = Conv2d(3, 64, 3, padding=1, input_shape=(3, 32, 32))
    >>> conv
    Conv2d((3, 32, 32) → (64, 32, 32), nnz=1696512)
    >>> round(1 - conv.nnz / (conv.shape[0] * conv.shape[1]), 5)  # its sparsity
    0.99157
    """


class ConvTranspose2d(_Convolution):
    """Transposed convolution: it maps like the gradient of a :class:`Conv2d` with this weight.

    The transposed Jacobian has, in the row of input ``(c, y, x)`` and the column of output
    ``(o, v, u)``, the weight

        W[c, o, (v + padding - y·stride) / dilation, (u + padding - x·stride) / dilation],

    where these are integers inside the kernel.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, groups, bias, dilation, padding_mode
        As for :class:`Conv2d`, in PyTorch's order; no ``padding="same"``.
    output_padding : int or two ints, default 0
        Additional rows and columns of the output; fewer than the stride or the dilation.
    input_shape, weight_mask, dtype, rng
        As for :class:`Conv2d`.

    Attributes
    ----------
    weight : ndarray, shape (in_channels, out_channels / groups, kernel height, kernel width)
        The weight; an array that is set is shared, not copied.
    bias : ndarray or None, shape (out_channels,)
        The bias.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.ConvTranspose2d`.

    Examples
    --------
    >>> from sparsescan.jacobians import ConvTranspose2d
    >>> ConvTranspose2d(8, 4, 2, stride=2, input_shape=(8, 5, 5))
    ConvTranspose2d((8, 5, 5) → (4, 10, 10), nnz=3200)
    """

    transposed = True
    _arguments = Operator._arguments  # parts have all channels

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        *,
        input_shape: Any,
        weight_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        self._set_channels(in_channels, out_channels, groups, padding_mode, input_shape)
        self._set_windows(kernel_size, stride, padding, dilation, output_padding)
        self._declare_weight(self.kernel_size, bias, weight_mask, dtype, rng)

    def _forward(self, xp: Any, x: Array) -> Array:
        # Each weight adds the whole input, spread by the stride, to its place in the output.
        (_, height, width), (channels, height_out, width_out) = self.sides
        y, x_axis = self.windows
        rows = self._grouped_weight(xp).swapaxes(-1, -2)
        parts = xp.matmul(rows, self._grouped(x)).reshape(
            len(x), channels, y.kernel, x_axis.kernel, height, width
        )
        room = [
            max(_span(window, size), window.before + window.size)
            for window, size in zip(self.windows, (height, width), strict=True)
        ]
        whole = xp.zeros((len(x), channels, *room), parts.dtype)
        for i in range(y.kernel):
            for j in range(x_axis.kernel):
                at = _places(y, i, height), _places(x_axis, j, width)
                whole[(..., *at)] += parts[:, :, i, j]
        top, left = y.before, x_axis.before
        return self._add_bias(whole[:, :, top : top + height_out, left : left + width_out])


def _span(window: Window, count: int) -> int:
    """Return how many places some windows cover, padding included."""
    return window.stride * (count - 1) + window.dilation * (window.kernel - 1) + 1


def _places(window: Window, tap: int, count: int) -> slice:
    """Return the places that one tap of each window reads, counted from the padding's start."""
    start = tap * window.dilation
    return slice(start, start + window.stride * (count - 1) + 1, window.stride)


def _image(sizes: Shape, missing: int) -> Shape:
    """Return sizes of one or two axes as those of two."""
    return sizes if len(sizes) == 2 else (missing, *sizes)
