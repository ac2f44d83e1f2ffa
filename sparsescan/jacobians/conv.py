"""Convolutions: the Jacobian holds nothing but weights, at places known from the architecture."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..errors import InputError
from ..kernels.stencil import meetings
from ..pattern import Pattern
from ..schedule import check_count
from ._checks import Shape, check_sizes
from ._operator import Operator
from ._parameters import Parameter, Parametrised, check_mask, initial, masked
from ._stencil import Stencil, axis
from ._windows import windows

__all__ = ["Conv1d", "Conv2d", "ConvTranspose2d"]

Array = Any


class _Convolution(Parametrised, Operator):
    """What convolutions have in common; one-dimensional ones have images of height 1."""

    weight = Parameter()
    bias = Parameter()
    _reads_input = False
    _axes = 2
    _transposed = False

    def __init__(
        self,
        channels: tuple[int, int],
        kernel_size: Any,
        stride: Any,
        padding: Any,
        output_padding: Any,
        dilation: Any,
        groups: int,
        bias: bool,
        padding_mode: str,
        input_shape: Any,
        weight_mask: ArrayLike | None,
        dtype: DTypeLike,
        rng: np.random.Generator | int | None,
    ) -> None:
        self.in_channels = check_count("in_channels", channels[0], 1)
        self.out_channels = check_count("out_channels", channels[1], 1)
        self.groups = check_count("groups", groups, 1)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise InputError(
                f"groups is {groups}; expected a divisor of in_channels = {channels[0]} and "
                f"out_channels = {channels[1]}"
            )
        self.kernel_size = check_sizes("kernel_size", kernel_size, self._axes)
        self.stride = check_sizes("stride", stride, self._axes)
        self.dilation = check_sizes("dilation", dilation, self._axes)
        if padding_mode != "zeros":
            raise InputError(f"padding_mode is {padding_mode!r}; expected 'zeros'")
        before, after = self._read_padding(padding)
        self.padding = before
        self._set_shapes(input_shape, self._axes + 1)
        if self._core[0] != self.in_channels:
            raise InputError(
                f"input_shape is {self.input_shape}; expected {self.in_channels} channels "
                f"before the last {self._axes} axes"
            )
        # As images, whatever the number of axes.
        self._kernel, self._stride, self._dilation = (
            _image(sizes, 1) for sizes in (self.kernel_size, self.stride, self.dilation)
        )
        self._before, self._after = _image(before, 0), _image(after, 0)
        self._size = _image(self._core[1:], 1)
        self.output_padding = check_sizes("output_padding", output_padding, self._axes, 0)
        self._size_out = self._output_size(_image(self.output_padding, 0))
        if min(self._size_out) < 1:
            raise InputError(
                f"input_shape is {self.input_shape}; too small for kernel_size "
                f"{self.kernel_size}: the output would be of size {self._size_out[-self._axes :]}"
            )
        self._set_output((self.out_channels, *self._size_out[2 - self._axes :]))
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        if self._transposed:
            shape = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        self._mask = check_mask("weight_mask", weight_mask, shape)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self._set_parameters(
            {"weight": shape, "bias": (self.out_channels,) if bias else None},
            initial(bound, dtype, rng),
        )

    def _read_padding(self, padding: Any) -> tuple[Shape, Shape]:
        """Zeros before and after each axis."""
        if isinstance(padding, str):
            if padding not in ("same", "valid") or self._transposed:
                wanted = "integers" if self._transposed else "integers, 'same' or 'valid'"
                raise InputError(f"padding is {padding!r}; expected {wanted}")
            if padding == "valid":
                return (0,) * self._axes, (0,) * self._axes
            if max(self.stride) > 1:
                raise InputError(f"padding is 'same'; expected a stride of 1, not {self.stride}")
            both = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple(b // 2 for b in both), tuple(b - b // 2 for b in both)
        sizes = check_sizes("padding", padding, self._axes, 0)
        return sizes, sizes

    def _output_size(self, output_padding: Shape) -> Shape:
        """``(height, width)`` of the output."""
        return tuple(
            (n + before + after - d * (k - 1) - 1) // s + 1
            for n, before, after, k, s, d in zip(
                self._size,
                self._before,
                self._after,
                self._kernel,
                self._stride,
                self._dilation,
                strict=True,
            )
        )

    # -- Pattern and values ---------------------------------------------------------------------

    def _core_nnz(self) -> int:
        weights = [weight for _, weight, _ in self._meetings]
        if self._mask is None:
            pairs = self.in_channels * self.out_channels // self.groups
            return pairs * len(weights[0]) * len(weights[1])
        kept = self._mask.on(np).reshape(-1, *self._kernel).sum(axis=0)
        rows, cols = (
            np.bincount(weight, minlength=size)
            for weight, size in zip(weights, self._kernel, strict=True)
        )
        return int(rows @ kept @ cols)

    def _core_pattern(self) -> Pattern:
        return self._stencil.pattern()

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        self._stencil.fill(xp, self._by_input(self.weight), out[0])

    @cached_property
    def _meetings(self) -> list[tuple[Any, Any, Any]]:
        """For each axis, which outputs each place meets, and by which weights."""
        return [
            meetings(n, out, k, s, p, d, self._transposed)
            for n, out, k, s, p, d in zip(
                self._size,
                self._size_out,
                self._kernel,
                self._stride,
                self._before,
                self._dilation,
                strict=True,
            )
        ]

    @cached_property
    def _stencil(self) -> Stencil:
        y, x = (axis(*found) for found in self._meetings)
        ins, outs = self.in_channels // self.groups, self.out_channels // self.groups
        group = np.arange(self.in_channels) // ins
        return Stencil(
            y,
            x,
            (math.prod(self._core), math.prod(self._core_out)),
            group * (outs * math.prod(self._size_out)),
            outputs=outs,
            kernel=(self._kernel[0], self._kernel[1]),
            size_out=(self._size_out[0], self._size_out[1]),
            mask=None if self._mask is None else self._by_input(self._mask.on(np)),
        )

    def _by_input(self, weight: Array) -> Array:
        """A weight as ``(in_channels, out_channels / groups, height, width)``, flat."""
        if self._transposed:
            return weight.reshape(-1)
        ins = self.in_channels // self.groups
        grouped = weight.reshape(self.groups, -1, ins, math.prod(self._kernel))
        return grouped.swapaxes(1, 2).reshape(-1)

    # -- Forward and parameter gradients --------------------------------------------------------

    def _grouped_weight(self, xp: Any) -> Array:
        """The weight, zero where it is pruned, of shape ``(groups, ·, ·, height, width)``."""
        weight = masked(xp, self.weight, self._mask)
        return weight.reshape(self.groups, -1, weight.shape[1], *self._kernel)

    def _add_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias[:, None, None]

    def _weight_grads(self, xp: Any, weight: Array, y: Array) -> dict[str, Array]:
        """Gradients from that of the weight, in any shape, and that of the output."""
        grads = {"weight": masked(xp, weight.reshape(self.weight.shape), self._mask)}
        return grads if self.bias is None else grads | {"bias": y.sum(axis=(0, 2, 3))}

    def _images(self, x: Array) -> Array:
        """Samples as ``(m, channels, height, width)``."""
        return x.reshape(len(x), x.shape[1], *_image(x.shape[2:], 1))


class _Forward(_Convolution):
    """Convolutions, as they are and not transposed."""

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
        super().__init__(
            (in_channels, out_channels),
            kernel_size,
            stride,
            padding,
            0,
            dilation,
            groups,
            bias,
            padding_mode,
            input_shape,
            weight_mask,
            dtype,
            rng,
        )

    def _columns(self, xp: Any, x: Array) -> Array:
        """What each output of each group reads: ``(m, groups, read, outputs)``."""
        x = self._images(x)
        ends = tuple(a - b for a, b in zip(self._after, self._before, strict=True))
        view = windows(xp, x, self._kernel, self._stride, self._before, self._dilation, ends=ends)
        ins = self.in_channels // self.groups
        view = view.reshape(len(x), self.groups, ins, *view.shape[2:])
        return view.transpose(0, 1, 2, 5, 6, 3, 4).reshape(
            len(x), self.groups, ins * math.prod(self._kernel), math.prod(self._size_out)
        )

    def _forward(self, xp: Any, x: Array) -> Array:
        weight = self._grouped_weight(xp)
        y = xp.matmul(weight.reshape(*weight.shape[:2], -1), self._columns(xp, x))
        return self._add_bias(y.reshape(len(x), self.out_channels, *self._size_out))

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        columns = self._columns(xp, x)
        outs = self.out_channels // self.groups
        grads = grad_y.reshape(len(x), self.groups, outs, columns.shape[-1])
        weight = xp.matmul(grads, columns.swapaxes(-1, -2)).sum(axis=0)
        return self._weight_grads(xp, weight, self._images(grad_y))


class Conv1d(_Forward):
    """Convolution of signals, as :class:`torch.nn.Conv1d`; see :class:`Conv2d`.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As for :class:`Conv2d`, with one integer in place of two.
    input_shape : tuple of int
        ``(in_channels, length)``, maybe after more axes.
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
        Groups of channels that do not see each other.
    bias : bool, default True
        Whether there is one.
    padding_mode : {"zeros"}
        What lies around the input.
    input_shape : tuple of int
        ``(in_channels, height, width)``, maybe after more axes.
    weight_mask : array_like of bool, shape of the weight, optional
        True where a weight is kept. A pruned weight counts as 0, has a gradient of 0, and leaves
        the pattern.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        What draws initial parameters, from the same distribution as PyTorch.

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
    is made once and copied.

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
    """Transposed convolution of images: what a :class:`Conv2d` with this weight does to gradients.

    The transposed Jacobian has, in the row of input ``(c, y, x)`` and the column of output
    ``(o, v, u)``, the weight

        W[c, o, (v + padding - y·stride) / dilation, (u + padding - x·stride) / dilation],

    where these are integers inside the kernel.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, groups, bias, dilation, padding_mode
        As for :class:`Conv2d`, in PyTorch's order; no ``padding="same"``.
    output_padding : int or two ints, default 0
        Rows and columns that the output has more; less than the stride or the dilation.
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

    _transposed = True

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
        super().__init__(
            (in_channels, out_channels),
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            bias,
            padding_mode,
            input_shape,
            weight_mask,
            dtype,
            rng,
        )

    def _output_size(self, output_padding: Shape) -> Shape:
        for extra, s, d in zip(output_padding, self._stride, self._dilation, strict=True):
            if extra >= max(s, d):
                raise InputError(
                    f"output_padding is {self.output_padding}; expected less than the stride "
                    f"{self.stride} or the dilation {self.dilation}"
                )
        return tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for n, s, p, d, k, extra in zip(
                self._size,
                self._stride,
                self._before,
                self._dilation,
                self._kernel,
                output_padding,
                strict=True,
            )
        )

    def _forward(self, xp: Any, x: Array) -> Array:
        # Each weight adds the whole input, spread by the stride, at its own place of the output.
        weight = self._grouped_weight(xp)
        inputs = x.reshape(len(x), self.groups, weight.shape[1], math.prod(self._size))
        rows = weight.reshape(self.groups, weight.shape[1], -1).swapaxes(-1, -2)
        parts = xp.matmul(rows, inputs).reshape(
            len(x), self.out_channels, *self._kernel, *self._size
        )
        spans = [
            s * (n - 1) + d * (k - 1) + 1
            for n, s, d, k in zip(
                self._size, self._stride, self._dilation, self._kernel, strict=True
            )
        ]
        spans = [
            max(span, p + size)
            for span, p, size in zip(spans, self._before, self._size_out, strict=True)
        ]
        y = xp.zeros((len(x), self.out_channels, *spans), parts.dtype)
        for i in range(self._kernel[0]):
            for j in range(self._kernel[1]):
                at = [
                    slice(k * d, k * d + s * (n - 1) + 1, s)
                    for k, d, s, n in zip(
                        (i, j), self._dilation, self._stride, self._size, strict=True
                    )
                ]
                y[:, :, at[0], at[1]] += parts[:, :, i, j]
        (top, left), (height, width) = self._before, self._size_out
        return self._add_bias(y[:, :, top : top + height, left : left + width])

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        view = windows(xp, grad_y, self._kernel, self._stride, self._before, self._dilation)
        height, width = self._size
        view = view[:, :, :height, :width]
        ins, outs = self.in_channels // self.groups, self.out_channels // self.groups
        columns = view.reshape(len(x), self.groups, outs, *view.shape[2:])
        columns = columns.transpose(0, 1, 3, 4, 2, 5, 6).reshape(
            len(x), self.groups, height * width, outs * math.prod(self._kernel)
        )
        inputs = x.reshape(len(x), self.groups, ins, height * width)
        weight = xp.matmul(inputs, columns).sum(axis=0)
        return self._weight_grads(xp, weight, grad_y)


def _image(sizes: Shape, missing: int) -> Shape:
    """Sizes of one or two axes as those of two."""
    return sizes if len(sizes) == 2 else (missing, *sizes)
