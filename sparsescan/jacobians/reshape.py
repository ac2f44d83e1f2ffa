"""Layers that move or drop elements: their Jacobians do not depend on the values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.arrays import check_no_mask, host_array, is_cupy, namespace
from ..checks import check_number
from ..errors import InputError, InputTypeError, short
from ..symbolic.pattern import Pattern, index_dtype, trusted
from .shared.checks import Shape, batched, check_dim, check_sizes
from .shared.operator import Operator

Array = Any


class Dropout(Operator):
    """``y = x·mask/(1 - p)``, so ``(∂y/∂x)ᵀ = diag(mask)/(1 - p)``.

    Without a mask, as in evaluation, both are the identity.

    Parameters
    ----------
    p : float, default 0.5
        The probability, from 0 to 1, with which the caller drops an element.
    input_shape : tuple of int
        Shape of one sample.
    mask : array_like of bool, shape ``input_shape`` or ``(batch, *input_shape)``, optional
        True where an element is kept; one mask for all samples, or one per sample.

    Attributes
    ----------
    mask : ndarray of bool or None
        The mask. Set it before every iteration; it is shared, not copied.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Dropout`, but the caller draws the mask, since forward and Jacobian must use
    the same mask. If it has a batch axis, so must the input, and the values then depend on the
    sample.

    A dropped element stays in the pattern. The pattern of a layer with a mask is empty only for
    ``p = 1``, when a mask can keep no element.

    Without a mask, ``forward`` returns `x` itself or a view of it.

    Examples
    --------
    >>> from sparsescan.jacobians import Dropout
    >>> Dropout(0.75, input_shape=(3,), mask=[True, False, True]).values()
    array([4., 0., 4.])
    """

    _samples_apart = False  # each sample has its own mask, by its place in the batch

    def __init__(self, p: float = 0.5, *, input_shape: Any, mask: Any = None) -> None:
        self.p = check_number("p", p)
        if not 0 <= self.p <= 1:
            raise InputError(f"p is {p}; expected 0 to 1")
        self._set_shapes(input_shape, None)
        self._set_output(self._core)
        self.mask = mask

    @property
    def mask(self) -> Array:
        """Which elements are kept, or None for all, without the factor ``1/(1 - p)``."""
        return self._mask

    @mask.setter
    def mask(self, mask: Any) -> None:
        if mask is not None:
            if type(mask) is not np.ndarray and not is_cupy(mask):
                mask = host_array("mask", mask)
            if mask.dtype != np.bool_:
                raise InputTypeError(f"mask has dtype {mask.dtype}; expected bool")
            if self.input_shape not in (mask.shape, mask.shape[1:]):
                expected = f"{self.input_shape} or {batched(self.input_shape)}"
                raise InputError(f"mask has shape {mask.shape}; expected {expected}")
        self._mask = mask
        self._reads_input = mask is not None and mask.shape != self.input_shape
        # With p = 1, whether there is a mask decides the pattern.
        vars(self).pop("pattern", None)
        vars(self).pop("nnz", None)

    def _read(self, name: str, array: Any, shape: Shape) -> tuple[Array, Shape]:
        array, lead = super()._read(name, array, shape)
        if self._reads_input and array.shape != self.mask.shape:
            raise InputError(
                f"{name} has shape {array.shape}, but the mask has shape {self.mask.shape}; "
                "expected the same"
            )
        return array, lead

    def _core_nnz(self) -> int:
        return 0 if self.p == 1 and self.mask is not None else math.prod(self._core)

    def _core_pattern(self) -> Pattern:
        size = math.prod(self._core)
        if self._core_nnz():
            return Pattern.diagonal(size)
        return trusted(np.zeros(size + 1), np.empty(0), (size, size))

    def _forward(self, xp: Any, x: Array) -> Array:
        if self.mask is None:
            return x
        namespace(x, self.mask)
        # As in PyTorch, an infinite element that is dropped becomes NaN.
        return x * (self.mask * x.dtype.type(self._scale))

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        if self.mask is None:
            out.fill(1)
        else:
            namespace(out, self.mask)
            xp.multiply(self.mask.reshape(out.shape), out.dtype.type(self._scale), out=out)

    @property
    def _scale(self) -> float:
        return 0.0 if self.p == 1 else 1 / (1 - self.p)


class _Moved(Operator):
    """A layer that puts each element of the input at one place of the output."""

    _reads_input = False

    def _core_nnz(self) -> int:
        return math.prod(self._core)

    def _core_pattern(self) -> Pattern:
        rows, cols = self.shape
        dtype = index_dtype((rows, cols), rows)
        places = self._moved_back(np.arange(cols, dtype=dtype).reshape(self._core_out))
        return trusted(np.arange(rows + 1, dtype=dtype), places.flatten(), (rows, cols))

    def _moved_back(self, y: Array) -> Array:
        """Return the output's elements in the order of the input."""
        return y

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        out.fill(1)


class Flatten(_Moved):
    """``y = x`` with some axes joined into one, so ``(∂y/∂x)ᵀ = I``.

    Parameters
    ----------
    start_dim, end_dim : int, default 1 and -1
        The first and the last of the axes, counted with the batch axis, which is 0 and not allowed.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torch.nn.Flatten`. ``forward`` returns a view of `x` where it can.

    Examples
    --------
    >>> from sparsescan.jacobians import Flatten
    >>> Flatten(input_shape=(3, 4, 4))
    Flatten((3, 4, 4) → (48,), nnz=48)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1, *, input_shape: Any) -> None:
        self._set_shapes(input_shape, None)
        start = check_dim("start_dim", start_dim, self._core)
        stop = check_dim("end_dim", end_dim, self._core) + 1
        if start >= stop:
            raise InputError(
                f"start_dim is {start_dim}, but end_dim is {end_dim}; expected an end that is not "
                "before the start"
            )
        self.start_dim, self.end_dim = start_dim, end_dim
        joined = math.prod(self._core[start:stop])
        self._set_output((*self._core[:start], joined, *self._core[stop:]))

    def _forward(self, xp: Any, x: Array) -> Array:
        return x


class Pad(_Moved):
    """``y = x`` with zeros around it: ``(∂y/∂x)ᵀ`` has a single 1 in every row.

    Parameters
    ----------
    pad_width : int, pair of int or sequence of pairs of int
        The number of zeros before and after, along every axis of one sample, as for
        :func:`numpy.pad`: ``((before, after), …)``, one pair for all axes, or one number for both
        ends of all axes.
    input_shape : tuple of int
        Shape of one sample.

    Attributes
    ----------
    pad_width : tuple of pairs of int
        A pair for each axis.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    After a pooling, with zeros as additional channels, it is the shortcut of residual networks that
    has no parameters (He, Zhang, Ren and Sun, CVPR 2016, section 3.3, option A).

    Examples
    --------
    >>> from sparsescan.jacobians import Pad
    >>> Pad(((0, 16), (0, 0), (0, 0)), input_shape=(16, 8, 8))
    Pad((16, 8, 8) → (32, 8, 8), nnz=1024)
    >>> Pad((1, 0), input_shape=(2,)).jacobian().toarray()
    array([[0., 1., 0.],
           [0., 0., 1.]])
    """

    def __init__(self, pad_width: Any, *, input_shape: Any) -> None:
        self._set_shapes(input_shape, None)
        self.pad_width = _check_pad_width(pad_width, len(self._core))
        self._inside = tuple(
            slice(before, before + size)
            for size, (before, _) in zip(self._core, self.pad_width, strict=True)
        )
        self._set_output(
            tuple(size + sum(pair) for size, pair in zip(self._core, self.pad_width, strict=True))
        )

    def _moved_back(self, y: Array) -> Array:
        return y[self._inside]

    def _forward(self, xp: Any, x: Array) -> Array:
        y = xp.zeros((len(x), *self._core_out), x.dtype)
        y[(slice(None), *self._inside)] = x
        return y


class Permute(_Moved):
    """``y = x`` with its axes in another order: ``(∂y/∂x)ᵀ`` is a permutation matrix.

    Parameters
    ----------
    dims : tuple of int
        For each axis of the output, the axis of the input that it is, counted with the batch axis.
        The batch axis stays first: ``dims[0]`` is 0.
    input_shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    Notes
    -----
    As :class:`torchvision.ops.Permute`. ``forward`` returns a view of `x` where it can.

    Examples
    --------
    >>> from sparsescan.jacobians import Permute
    >>> Permute((0, 2, 1), input_shape=(2, 2)).jacobian().toarray()
    array([[1., 0., 0., 0.],
           [0., 0., 1., 0.],
           [0., 1., 0., 0.],
           [0., 0., 0., 1.]])
    """

    def __init__(self, dims: Any, *, input_shape: Any) -> None:
        self._set_shapes(input_shape, None)
        axes = len(self._core) + 1
        self.dims = check_sizes("dims", dims, least=-axes)
        self._order = tuple(dim + axes if dim < 0 else dim for dim in self.dims)
        if self._order[:1] != (0,) or sorted(self._order) != list(range(axes)):
            raise InputError(f"dims is {short(dims)}; expected 0, the batch, then 1 to {axes - 1}")
        self._set_output(tuple(self._core[dim - 1] for dim in self._order[1:]))

    def _moved_back(self, y: Array) -> Array:
        return y.transpose(np.argsort(self._order[1:]))

    def _forward(self, xp: Any, x: Array) -> Array:
        return x.transpose(self._order)


def _check_pad_width(value: Any, axes: int) -> tuple[tuple[int, int], ...]:
    """Return a pair of widths for each axis, or raise an error that says what is wrong."""
    wrong = f"pad_width is {short(value)}; expected a pair of integers for each of {axes} axes"
    check_no_mask("pad_width", value)
    try:
        widths = np.array(value)
        pairs = np.broadcast_to(widths, (axes, 2))
    except Exception:  # a caller's own class may raise any
        raise InputError(wrong) from None
    if widths.dtype.kind not in "iu":
        raise InputTypeError(wrong)
    if (widths < 0).any():
        raise InputError(f"pad_width is {short(value)}; expected integers of at least 0")
    return tuple((before, after) for before, after in pairs.tolist())
