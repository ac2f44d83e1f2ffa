"""Seeded data that looks like the real thing, from the last layer to the first.

No product of the chains below vanishes or explodes, so no peer is slowed down by denormal numbers.
No value is zero but what is zero in a network: the slopes of ReLU, and the inputs that max pooling
drops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray

import sparsescan
from sparsescan.jacobians import Conv2d, MaxPool2d, Operator, ReLU, Sequential


class Dense(NamedTuple):
    """``grad (batch, size)`` and ``jacobians (n, batch, size, size)``."""

    grad: NDArray[Any]
    jacobians: NDArray[Any]


class Stencil(NamedTuple):
    """``grad (size,)`` and a chain of ``n`` steps that share one pattern."""

    grad: NDArray[Any]
    chain: sparsescan.CSRChain

    def matrices(self, *, shared: bool) -> list[sp.csr_array]:
        """The steps as SciPy arrays, with one copy of the index arrays or one each."""
        chain, matrices = self.chain, []
        for values in chain.data:
            indices, indptr = chain.indices, chain.indptr
            if not shared:
                indices, indptr = indices.copy(), indptr.copy()
            matrices.append(sp.csr_array((values, indices, indptr), shape=chain.shape))
        return matrices


def pruned_conv(
    rng: np.random.Generator,
    in_channels: int,
    out_channels: int,
    side: int,
    *,
    pruned: float = 0.97,
    dtype: DTypeLike = np.float32,
) -> sp.csr_array:
    """Transposed Jacobian of a Conv2d, 3×3 with padding 1, on ``side × side`` images.

    Of random normal weights the fraction `pruned` with the smallest magnitude is dropped. Row
    ``(c, y, x)`` is an input and column ``(o, v, u)`` an output, with ``y = v + ky - 1`` and
    ``x = u + kx - 1``.
    """
    weight = rng.standard_normal((out_channels, in_channels, 3, 3))
    kept = np.abs(weight) >= np.quantile(np.abs(weight), pruned)
    o, c, ky, kx = (axis[:, None] for axis in np.nonzero(kept))
    v, u = (axis.ravel() for axis in np.indices((side, side)))
    y, x = v + ky - 1, u + kx - 1
    inside = (y >= 0) & (y < side) & (x >= 0) & (x < side)
    rows = ((c * side + y) * side + x)[inside]
    cols = ((o * side + v) * side + u)[inside]
    values = np.broadcast_to(weight[kept][:, None], inside.shape)[inside]
    shape = (in_channels * side**2, out_channels * side**2)
    return sp.coo_array((values.astype(dtype), (rows, cols)), shape=shape).tocsr()


def conv_pair(
    side: int = 16, channels: tuple[int, int, int] = (64, 128, 256)
) -> list[sp.csr_array]:
    """The transposed Jacobians ``[J₂, J₁]`` of two pruned convolutions."""
    rng = np.random.default_rng(0)
    first, middle, last = channels
    j1 = pruned_conv(rng, first, middle, side)
    return [pruned_conv(rng, middle, last, side), j1]


def vgg11(pruned: float, side: int = 32, narrow: int = 1) -> Sequential:
    """The convolutional part of VGG-11, for ``side × side`` images, maybe `narrow` times narrower.

    Of the random normal weights of each layer the fraction `pruned` with the smallest magnitude is
    dropped. The others are scaled as by He et al. (2015), so that activations keep their size.
    """
    rng, channels = np.random.default_rng(3), 3
    layers: list[Operator] = []
    for width in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        shape = (channels, side, side)
        if width == "M":
            if side > 1:
                layers.append(MaxPool2d(2, input_shape=shape))
                side //= 2
            continue
        out = width // narrow
        weight = rng.standard_normal((out, channels, 3, 3), np.float32)
        kept = np.abs(weight) >= np.quantile(np.abs(weight), pruned)
        conv = Conv2d(channels, out, 3, padding=1, input_shape=shape, weight_mask=kept, rng=rng)
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
    rng = np.random.default_rng(2)
    w_hh = np.linalg.qr(rng.standard_normal((hidden, hidden)))[0]
    h = np.zeros((batch, hidden))
    jacobians = np.empty((steps, batch, hidden, hidden), dtype)
    for t in range(steps):
        h = np.tanh(h @ w_hh.T + 0.002 * rng.standard_normal((batch, hidden)))
        jacobians[steps - 1 - t] = w_hh.T * (1 - h**2)[:, None, :]
    return Dense(rng.standard_normal((batch, hidden)).astype(dtype), jacobians)
