"""Layers that treat the two axes of an image one after the other, as Kronecker products."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ...arrays.arrays import Mirrored
from ...errors import InputError
from ...locks import cached_property
from ...symbolic.pattern import Pattern, trusted
from .checks import check_sizes
from .operator import Operator

Array = Any


class Taps:
    """Along one axis, the inputs that each output reads, and by which weights.

    Parameters
    ----------
    size : int
        Size of the input.
    inputs : ndarray of int, shape (size_out, taps)
        The inputs that each output reads, increasing; outside the axis the weight is 0.
    weights : ndarray of float64, shape (size_out, taps)
        The weights; 0 where there is no input to be read.
    """

    def __init__(self, size: int, inputs: NDArray[Any], weights: NDArray[Any]) -> None:
        self.size, self.size_out = size, len(inputs)
        self.inputs, self.weights = inputs, weights
        self.nnz = int(np.count_nonzero(weights))

    def transposed(self) -> sp.csr_array:
        """Return the matrix from outputs to inputs, shape ``(size, size_out)``."""
        column, tap = np.nonzero(self.weights)
        entries = self.weights[column, tap], (self.inputs[column, tap], column)
        return sp.csr_array(entries, shape=(self.size, self.size_out))

    @cached_property
    def _read(self) -> tuple[Mirrored, Mirrored, Mirrored]:
        """For each tap and output, an input, its weight, and whether it is to be read."""
        inside = np.clip(self.inputs, 0, self.size - 1)
        return (Mirrored(inside.T), Mirrored(self.weights.T), Mirrored(self.weights.T != 0))

    def read(self, xp: Any, x: Array, axis: int, fill: float) -> Array:
        """Return the inputs that outputs read along an axis, which becomes two: taps, outputs."""
        inputs, _, met = self._read
        values = x[(slice(None),) * axis + (inputs.on(xp),)]
        if self.weights.all():
            return values
        mask = met.on(xp).reshape(met.on(xp).shape + (1,) * (x.ndim - axis - 1))
        return xp.where(mask, values, x.dtype.type(fill))

    def apply(self, xp: Any, x: Array, axis: int) -> Array:
        """Return the weighted sums along an axis."""
        weights = self._read[1].on(xp).astype(x.dtype, copy=False)
        weights = weights.reshape(weights.shape + (1,) * (x.ndim - axis - 1))
        return (self.read(xp, x, axis, 0) * weights).sum(axis=axis)


class Images(Operator):
    """A layer that reads images one by one, ``(…, height, width)``, each axis by its own taps."""

    _y: Taps
    _x: Taps

    def _set_images(self, input_shape: Any) -> None:
        shape = check_sizes("input_shape", input_shape)
        if len(shape) < 3:
            raise InputError(
                f"input_shape is {shape}; expected (channels, height, width), maybe after more axes"
            )
        self._set_shapes(shape, 2)

    def _set_taps(self, y: Taps, x: Taps) -> None:
        self._y, self._x = y, x
        self._set_output((y.size_out, x.size_out))

    def _core_nnz(self) -> int:
        return self._y.nnz * self._x.nnz

    def _core_pattern(self) -> Pattern:
        product = kron(self._y, self._x)
        return trusted(product.indptr, product.indices, product.shape)


class Separable(Images):
    """``(∂y/∂x)ᵀ = I ⊗ A_y ⊗ A_x`` with two sparse matrices that do not depend on the input."""

    _reads_input = False

    def _forward(self, xp: Any, x: Array) -> Array:
        return self._x.apply(xp, self._y.apply(xp, x, 1), 2)

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        out[...] = self._values.on(xp).astype(out.dtype, copy=False)

    @cached_property
    def _values(self) -> Mirrored:
        """Values of the Kronecker product, in the order of its pattern."""
        return Mirrored(kron(self._y, self._x).data)


def kron(y: Taps, x: Taps) -> sp.csr_array:
    """Return the Kronecker product of two matrices, transposed: rows are inputs."""
    product = sp.kron(y.transposed(), x.transposed(), format="csr")
    product.sort_indices()
    return product
