"""Layers that weigh places in windows, described once, and their matrix: rows that repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ...chains.weights import spread
from ...checks import check_flag
from ...locks import cached_property
from ...parameters.parametrised import Weighted
from ...symbolic.implicit import ImplicitPattern
from ...symbolic.indexed import IndexedPattern, indexed
from ...symbolic.pattern import Pattern, index_dtype, trusted
from ..kernels.values import shift_rows
from .checks import Shape
from .operator import Operator
from .windows import Connections, Window

Array = Any


class Weighing(Weighted, Operator):
    """A layer whose outputs are sums of weighted inputs, at places that windows give.

    The windows slide over the input, or over the output of a transposed layer. Jacobians and
    training steps follow from this description; a linear layer has a single place.

    Attributes
    ----------
    sides : tuple of tuple of int
        ``(channels, height, width)`` of the input, and of the output.
    windows : tuple of Window
        The windows along height and width.
    groups : int
        Groups of channels without connections between them.
    """

    _reads_input = False
    sides: tuple[Shape, Shape]
    windows: tuple[Window, Window]
    groups: int = 1
    transposed = False

    def _declare_weight(
        self, kernel: Shape, bias: bool, weight_mask: ArrayLike | None, dtype: DTypeLike, rng: Any
    ) -> None:
        """Declare the parameters, once both sides are known."""
        outputs = self.sides[1][0]
        outer, inner = (side[0] for side in self.sides[:: 1 if self.transposed else -1])
        shape = (outer, inner // self.groups, *kernel)
        biases = outputs if check_flag("bias", bias) else None
        self.declare_weight(shape, biases, weight_mask, dtype, rng)

    def _arguments(self, input_shape: Shape, channels: slice) -> dict[str, Any]:
        return {
            "bias": self.bias is not None,
            "weight_mask": None if self._mask is None else self._mask.on(np)[channels],
        }

    @property
    def window_counts(self) -> Shape:
        """How many windows there are along height and width."""
        return self.sides[0 if self.transposed else 1][1:]

    @cached_property
    def _connections(self) -> list[Connections]:
        """For each axis, the outputs that each input reaches, and by which weights."""
        axes = zip(self.windows, self.window_counts, strict=True)
        return [window.connections(count, self.transposed) for window, count in axes]

    @cached_property
    def _stencil(self) -> IndexedPattern:
        """Where the matrix of a block has which weights."""
        shape, (inputs, *_), (outputs, *_) = self.shapes["weight"], *self.sides
        size = math.prod(shape)
        places = np.arange(size, dtype=index_dtype((0, 0), size))
        if self._mask is not None:
            places[~self._mask.on(np).reshape(-1)] = -1
        if not self.transposed:
            grouped = places.reshape(self.groups, -1, inputs // self.groups, math.prod(shape[2:]))
            places = grouped.swapaxes(1, 2)
        kernel = (window.kernel for window in self.windows)
        places = places.reshape(inputs, outputs // self.groups, *kernel)
        return stencil(places, self._connections, self.sides[1], size)

    def _core_nnz(self) -> int:
        y, x = (axis.weight for axis in self._connections)
        height, width = (window.kernel for window in self.windows)
        if self._mask is None:
            return math.prod(self.shapes["weight"]) // (height * width) * len(y) * len(x)
        kept = self.kept_weights().reshape(-1, height, width).sum(axis=0)
        return int(np.bincount(y, minlength=height) @ kept @ np.bincount(x, minlength=width))

    def _core_pattern(self) -> Pattern:
        return self._stencil.pattern

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        weight, room = self.read_parameter("weight").reshape(-1), out[0]
        weight = weight if weight.dtype == room.dtype else weight.astype(room.dtype)
        values = spread(self._stencil, weight, room)
        if values is not room:  # on a device
            room[...] = values

    def _implicit_pattern(self) -> ImplicitPattern | None:
        pattern, index = self.pattern, self._stencil
        if pattern.kind != "general" or index.distinct >= pattern.nnz:
            return None
        if self._blocks > 1:
            starts = np.tile(index.starts, self._blocks)
            index = indexed(pattern, starts, index.sources, index.size)
        return ImplicitPattern([index])

    def _implicit_values(self, x: Array, y: Array) -> list[Array]:
        return [self.read_parameter("weight").reshape(-1)]


def stencil(
    places: NDArray[Any], connections: Sequence[Connections], size_out: Shape, weights: int
) -> IndexedPattern:
    """Return where the matrix of a layer has which weights.

    Its row ``(channel, y, x)`` holds the weights from this input to each output. Wherever two
    places of a channel have the same weights, the columns of their rows differ by a constant. So
    each row is a template and a place; there are about as many templates as weights times borders.

    Parameters
    ----------
    places : ndarray of int, shape (input channels, output channels of one group, *kernel)
        Where each weight is in the caller's array, flat; -1 for one that is pruned.
    connections : list of Connections
        The outputs that the places of both spatial axes reach.
    size_out : tuple of int
        ``(channels, height, width)`` of the output.
    weights : int
        How many weights the caller's array has.
    """
    inputs, reached, outputs = *places.shape[:2], size_out[0]
    (of_y, first_y, y_classes), (of_x, first_x, x_classes) = map(_classes, connections)
    shape = inputs * len(of_y) * len(of_x), math.prod(size_out)
    _, height, width = size_out
    channels = np.arange(reached)[:, None] * (height * width)
    sources, behind = list[NDArray[Any]](), list[NDArray[Any]]()
    for (tap_y, to_y), (tap_x, to_x) in product(y_classes, x_classes):
        sources.append(places[:, :, tap_y[:, None], tap_x].reshape(inputs, -1))
        behind.append((channels + (to_y[:, None] * width + to_x).reshape(-1)).reshape(-1))
    counts = np.stack([np.count_nonzero(some >= 0, axis=1) for some in sources], axis=1)
    # By channels and classes, as both templates and their columns are.
    joined, every = np.concatenate(sources, axis=1).reshape(-1), np.concatenate(behind)
    kept = np.flatnonzero(joined >= 0)
    # The template of each row, and its place: the first column that it may have.
    channel = np.arange(inputs)[:, None, None]
    template = (channel * len(y_classes) + of_y[:, None]) * len(x_classes) + of_x
    group = channel // (inputs * reached // outputs)
    place = (group * reached * height + first_y[:, None]) * width + first_x
    counts, of = counts.reshape(-1), template.reshape(-1)
    starts, indptr = (np.cumsum(counts) - counts)[of], np.append(0, np.cumsum(counts[of]))
    dtype = index_dtype(shape, int(indptr[-1]))
    indices, columns = np.empty(indptr[-1], dtype), every.astype(dtype)[kept % len(every)]
    shift_rows(indptr, starts, columns, place.reshape(-1), indices)
    return indexed(trusted(indptr, indices, shape), starts, joined[kept], weights)


def _classes(connections: Connections) -> tuple[NDArray[Any], NDArray[Any], list[Any]]:
    """Return the class of each place of an axis, the first output it reaches, and the classes.

    Places of a class have the same weights, of which it holds the taps, and how far the output of
    each is from the first. The weights of a place are equally far apart, so the first one and their
    number tell them all.
    """
    ptr, weight, output = connections
    count = np.diff(ptr)
    # A place without outputs has an empty class, whatever its number.
    first, tap = (np.append(array, 0)[ptr[:-1]] for array in (output, weight))
    _, examples, of = np.unique(
        tap * (count.max() + 1) + count, return_index=True, return_inverse=True
    )
    each = [(slice(*ptr[k : k + 2]), first[k]) for k in examples]
    return of.reshape(-1), first, [(weight[some], output[some] - at) for some, at in each]
