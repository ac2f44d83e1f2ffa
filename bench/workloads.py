"""Seeded data that looks like the real thing, from the last layer to the first.

No product of the chains below vanishes or explodes, so no peer is slowed down by denormal numbers.
No value is zero but what is zero in a network: the slopes of ReLU, and the inputs that max pooling
drops.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray

import sparsescan
from sparsescan.jacobians import Conv2d, MaxPool2d, ReLU, Sequential
from sparsescan.jacobians.shared.operator import Operator

# Channels of VGG-11's convolutions; M is a max-pool.
VGG11_WIDTHS = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


class Dense(NamedTuple):
    """``grad (batch, size)`` and ``jacobians (n, batch, size, size)``."""

    grad: NDArray[Any]
    jacobians: NDArray[Any]


class Stencil(NamedTuple):
    """``grad (size,)`` and a chain of ``n`` steps that share one pattern."""

    grad: NDArray[Any]
    chain: sparsescan.CSRChain

    def matrices(self, *, shared: bool) -> list[sp.csr_array]:
        """Return the steps as SciPy arrays, with one copy of the index arrays or one each."""
        chain, matrices = self.chain, []
        for values in chain.data:
            indices, indptr = chain.indices, chain.indptr
            if not shared:
                indices, indptr = indices.copy(), indptr.copy()
            matrices.append(sp.csr_array((values, indices, indptr), shape=chain.shape))
        return matrices


def pruned_conv(
    weight: NDArray[Any], shape: tuple[int, ...], pruned: float, rng: Any = 0
) -> tuple[Conv2d, NDArray[np.bool_]]:
    """Return a Conv2d, 3×3 with padding 1, for images of a shape, and which weights it keeps.

    The fraction `pruned` of the weights with the smallest magnitude is dropped.
    """
    kept = np.abs(weight) >= np.quantile(np.abs(weight), pruned)
    out, channels, *_ = weight.shape
    conv = Conv2d(channels, out, 3, padding=1, input_shape=shape, weight_mask=kept, rng=rng)
    conv.weight = weight.astype(np.float32)
    return conv, kept


def pruned_jacobian(
    rng: np.random.Generator, channels: tuple[int, int], side: int, pruned: float = 0.97
) -> sp.csr_array:
    """Return the transposed Jacobian of a pruned convolution with random normal weights."""
    weight = rng.standard_normal((channels[1], channels[0], 3, 3))
    return pruned_conv(weight, (channels[0], side, side), pruned)[0].jacobian()


def conv_pair(
    side: int = 16, channels: tuple[int, int, int] = (64, 128, 256)
) -> list[sp.csr_array]:
    """Return transposed Jacobians ``[J₂, J₁]`` of two pruned convolutions, with int64 indices."""
    rng = np.random.default_rng(0)
    jacobians = [pruned_jacobian(rng, pair, side) for pair in pairwise(channels)]
    return [with_indices(jacobian, np.int64) for jacobian in reversed(jacobians)]


def with_indices(matrix: sp.csr_array, dtype: DTypeLike) -> sp.csr_array:
    """Return the matrix, whose index arrays are changed to another type."""
    matrix.indices, matrix.indptr = (x.astype(dtype) for x in (matrix.indices, matrix.indptr))
    return matrix


def vgg11(pruned: float, side: int = 32, narrow: int = 1) -> Sequential:
    """Return the convolutions of VGG-11, for ``side × side`` images, maybe `narrow` times narrower.

    The fraction `pruned` of each layer's random normal weights, those of the smallest magnitude, is
    dropped. The others are scaled as by He et al. (2015), so that activations keep their size.
    """
    rng, channels = np.random.default_rng(3), 3
    layers: list[Operator] = []
    for width in VGG11_WIDTHS:
        shape = (channels, side, side)
        if isinstance(width, str):
            if side > 1:
                layers.append(MaxPool2d(2, input_shape=shape))
                side //= 2
            continue
        out = width // narrow
        weight = rng.standard_normal((out, channels, 3, 3), np.float32)
        conv, kept = pruned_conv(weight, shape, pruned, rng)
        conv.weight = weight * np.sqrt(2 * out / np.sum(weight[kept] ** 2))
        layers += [conv, ReLU(input_shape=conv.output_shape)]
        channels = out
    return Sequential(layers)


def stencil(n: int, side: int, dtype: DTypeLike) -> Stencil:
    """`n` steps of a 5-point stencil on ``side × side`` unknowns.

    Positive random weights that sum to one in each row: averages of a positive gradient.
    """
    rng = np.random.default_rng(1)
    size = side**2
    y, x = (axis.ravel() for axis in np.indices((side, side)))
    dy, dx = np.array([[-1, 0], [0, -1], [0, 0], [0, 1], [1, 0]]).T  # in the order of columns
    row_y, row_x = y[:, None] + dy, x[:, None] + dx
    inside = (row_y >= 0) & (row_y < side) & (row_x >= 0) & (row_x < side)
    indices = (row_y * side + row_x)[inside].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(inside.sum(axis=1))]).astype(np.int32)
    data = rng.random((n, len(indices)), np.float32).astype(dtype)
    data += 0.5
    data /= np.repeat(np.add.reduceat(data, indptr[:-1], axis=1), np.diff(indptr), axis=1)
    grad = rng.uniform(0.5, 1.5, size).astype(dtype)
    return Stencil(grad, sparsescan.CSRChain(data, indices, indptr, (size, size)))


def tanh_rnn(steps: int, batch: int, hidden: int, dtype: DTypeLike = np.float32) -> Dense:
    """Jacobians ``W_hhᵀ diag(1 - h_t²)`` of a tanh RNN that has read noise, with orthogonal `W_hh`.

    The noise is faint, so that the units stay in the near-linear range of tanh.
    """
    grad, slopes, weights = tanh_rnn_slopes(steps, batch, hidden)
    jacobians = np.empty((steps, batch, hidden, hidden), dtype)
    np.multiply(weights, slopes[:, :, None, :], out=jacobians, casting="same_kind")
    return Dense(grad.astype(dtype), jacobians)


class Slopes(NamedTuple):
    """The gradient, slopes ``1 - h_t²`` and weights ``W_hhᵀ`` of a tanh RNN, in float64."""

    grad: NDArray[Any]
    slopes: NDArray[Any]
    weights: NDArray[Any]


def tanh_rnn_slopes(steps: int, batch: int, hidden: int) -> Slopes:
    """Return what the Jacobians of :func:`tanh_rnn` are made of."""
    rng = np.random.default_rng(2)
    w_hh = np.linalg.qr(rng.standard_normal((hidden, hidden)))[0]
    h = np.zeros((batch, hidden))
    slopes = np.empty((steps, batch, hidden))
    for t in range(steps):
        h = np.tanh(h @ w_hh.T + 0.002 * rng.standard_normal((batch, hidden)))
        slopes[steps - 1 - t] = 1 - h**2
    return Slopes(rng.standard_normal((batch, hidden)), slopes, w_hh.T)
