"""Stages of a network's training step: layers that work on maps, all samples at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import api
from ..arrays.arrays import read_array
from ..errors import DeviceError
from ..execution.threads import share, thread_count
from ._kernels import places as kernels
from ._kernels.lanes import lanes
from ._operator import Operator
from ._places import Map, Table, Taps, View, gathering, scattering, widen
from ._windows import Window
from .activations import Elementwise
from .conv import ConvTranspose2d
from .linear import Linear
from .normalization import BatchNorm2d
from .pooling import MaxPool2d

__all__ = [
    "Add",
    "Apply",
    "Normalise",
    "Pool",
    "Samples",
    "Stage",
    "Weigh",
    "host",
    "in_lanes",
    "put_grad",
    "samples_of",
    "write",
]

Array = NDArray[Any]

# Bytes of places that a block of positions reads, so that a cache holds them for all rows.
_CACHE = 1 << 19
# Multiply-adds of vectors below which another thread would come too late.
_TASK = 20_000


class Samples(NamedTuple):
    """The samples of a training step.

    Attributes
    ----------
    batch : int
        How many there are.
    room : int
        How many a place has room for: so many that they fill whole vectors.
    dtype : dtype
        float32 or float64.
    """

    batch: int
    room: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, batch: int, dtype: np.dtype[Any]) -> Samples:
        """Return so many samples, and room for them."""
        count = lanes(dtype)
        return cls(batch, -(-batch // count) * count, dtype)

    @property
    def vectors(self) -> NDArray[np.int64]:
        """Where the vectors of a place begin."""
        return np.arange(0, self.room, lanes(self.dtype))


class Stage(ABC):
    """A layer, or a sum, from maps to a map.

    Attributes
    ----------
    name : str
        Where the layer is in its network, such as ``"2.0"``.
    sources : tuple of Map
        What it reads.
    result : Map
        What it writes.
    """

    def __init__(self, name: str, sources: tuple[Map, ...], result: Map) -> None:
        self.name, self.sources, self.result = name, sources, result

    op: Any = None
    copied: tuple[str, ...] = ()

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters of its layer."""
        return () if self.op is None else tuple(self.op.params)

    def named_params(self) -> dict[str, Array]:
        """Return the parameters of its layer."""
        return {} if self.op is None else self.op.params

    def numbers(self, samples: Samples) -> int:
        """Return how many numbers it keeps from forward to backward beside its maps."""
        return 0

    def bind(self, samples: Samples) -> None:
        """Make what depends on the number of samples and their dtype."""
        self.samples = samples
        self.nothing = np.empty(0, samples.dtype)

    def read_params(self) -> None:
        """Copy the parameters that forward and backward use."""
        self.read = {
            name: np.array(host(f"{self.name}.{name}", self.op.read_parameter(name)), dtype)
            for dtype in (self.samples.dtype,)
            for name in self.copied
        }

    @abstractmethod
    def forward(self, kept: Array) -> None:
        """Write the result, and to `kept` what :meth:`numbers` has counted."""

    @abstractmethod
    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        """Write the gradient in each source, or add to it, or leave it out where that is None."""

    def param_grads(self, out: dict[str, Array]) -> dict[str, Array]:
        """Return the gradients of the parameters, in the arrays of `out` if there are some."""
        return {}


class Weigh(Stage):
    """A convolution or a linear layer, of which only kept weights are used."""

    def __init__(self, name: str, op: Any, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op
        self.copied = ("bias",) if "bias" in op.params else ()
        if isinstance(op, Linear):
            one = Window(1, 1, 1, 0, 0, 1)
            self._windows, self._transposed = (one, one), False
            blocks = math.prod(source.shape) // op.in_features
            read, written = ((blocks, size, 1, 1) for size in (op.in_features, op.out_features))
        else:
            self._windows, self._transposed = op._windows, isinstance(op, ConvTranspose2d)
            blocks = math.prod(source.shape) // (op.in_channels * math.prod(op._size))
            read = blocks, op.in_channels, *op._size
            written = blocks, op.out_channels, *op._size_out
        views = View(source, read), View(result, written)
        self._small, self._large = views if self._transposed else views[::-1]
        widen(self._windows, self._small, self._large)

    @cached_property
    def taps(self) -> Taps:
        """The kept weights, as they lie in memory."""
        mask = self.op.kept_weights()
        groups = getattr(self.op, "groups", 1)
        mask = mask.reshape(*mask.shape[:2], *(window.kernel for window in self._windows))
        small, inner, y, x = np.nonzero(mask)
        large = inner + small // (len(mask) // groups) * mask.shape[1]
        return Taps(small, large, y, x, np.flatnonzero(mask))

    @cached_property
    def _tables(self) -> tuple[Table, list[Table]]:
        """The table from the large side to the small one, and those back."""
        arguments = self.taps, self._windows, self._small, self._large
        return gathering(*arguments), list(scattering(*arguments))

    def bind(self, samples: Samples) -> None:
        super().bind(samples)
        gather, scatter = self._tables
        self._gather = _Bound(gather, samples)
        scattered = [_Bound(table, samples) for table in scatter]
        self._ahead, self._back = [self._gather], scattered
        if self._transposed:
            self._ahead, self._back = self._back, self._ahead
        self._weight = np.empty(len(gather.order), samples.dtype)
        self._grad = np.empty_like(self._weight)

    def read_params(self) -> None:
        super().read_params()
        name = f"{self.name}.weight"
        weight = np.ascontiguousarray(
            host(name, self.op.read_parameter("weight")), self.samples.dtype
        )
        kernels.take(self._weight, weight.reshape(-1), self.taps.source)

    def forward(self, kept: Array) -> None:
        (source,), result = self.sources, self.result
        flags = False, result.rectified
        self._sum(
            self._ahead,
            result.x,
            source.x,
            self.read.get("bias", self.nothing),
            self.nothing,
            flags,
        )

    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        (source,), result, (add,) = self.sources, self.result, adds
        if add is not None:
            like = source.x if source.rectified else self.nothing
            flags = add, False
            self._sum(self._back, source.grad, result.grad, self.nothing, like, flags)

    def param_grads(self, out: dict[str, Array]) -> dict[str, Array]:
        (source,), result, table = self.sources, self.result, self._gather
        large, small = source.x, result.grad
        if self._transposed:
            large, small = small, large
        call_all(
            [
                partial(
                    kernels.sum_weights,
                    self._grad,
                    large,
                    small,
                    rows,
                    table.blocks,
                    table.ptr,
                    table.offset,
                    table.read_at,
                    table.row_at,
                    table.write_at,
                )
                for rows in table.rows
            ]
        )
        weight = out.get("weight")
        if weight is None:
            weight = np.zeros(self.op.kept_weights().shape, self.samples.dtype)
        kernels.put(weight.reshape(-1), self._grad, self.taps.source)
        grads = {"weight": weight}
        if "bias" in self.params:
            rows, places = self._written
            grads["bias"] = bias = out.get("bias", np.empty(len(rows), self.samples.dtype))
            kernels.sum_rows(bias, result.grad, rows, places)
        return grads

    @property
    def _written(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where channels of the result begin, and where their vectors lie behind that."""
        view = self._large if self._transposed else self._small
        rows, places = _channels(view, self.samples.room)
        return rows, (places[:, None] + self.samples.vectors).reshape(-1)

    def _sum(
        self,
        tables: list[_Bound],
        out: Array,
        x: Array,
        bias: Array,
        like: Array,
        flags: tuple[bool, bool],
    ) -> None:
        """Write the sums of some tables."""
        tasks: list[Callable[[], None]] = []
        for table in tables:
            weight = self._weight
            if table.weight is not None:
                weight = table.weight
                kernels.take(weight, self._weight, table.order)
            tasks += [
                partial(
                    kernels.sum_places,
                    out,
                    x,
                    rows,
                    positions,
                    table.ptr,
                    table.offset,
                    weight,
                    table.read_at,
                    table.row_at,
                    table.write_at,
                    bias,
                    like,
                    flags,
                )
                for rows, positions in table.tasks
            ]
        call_all(tasks)


class _Bound:
    """A table for so many samples, as kernels take it, and how threads share it.

    Attributes
    ----------
    weight : ndarray or None
        Room for the weights in the order of the entries; None if they have it already.
    rows : list of tuple
        Rows that are a task, where positions are not divided.
    tasks : list of tuple
        Rows and positions that are a task.
    """

    def __init__(self, table: Table, samples: Samples) -> None:
        room, dtype, vectors = samples.room, samples.dtype, samples.vectors
        self.ptr, self.order = table.ptr, table.order
        self.offset, self.row_at = table.offset * room, table.row_at * room
        self.read_at = (table.read_at[:, None] * room + vectors).reshape(-1)
        self.write_at = (table.write_at[:, None] * room + vectors).reshape(-1)
        in_order = np.array_equal(table.order, np.arange(len(table.order)))
        self.weight = None if in_order else np.empty(len(table.order), dtype)
        positions, entries = len(self.read_at), len(self.offset)
        # Each entry reads places of its own; those of one block stay in the cache for all rows.
        reach = len(np.unique(table.offset)) * lanes(dtype) * dtype.itemsize
        block = max(8, _CACHE // max(reach, 1) // 8 * 8)
        cuts = [*range(0, max(positions, 1), block), positions]
        self.blocks = np.array(cuts, np.int64)
        parts = min(2 * thread_count(), max(1, entries * positions // _TASK))
        ends = np.searchsorted(table.ptr, np.arange(1, parts) * entries // parts).tolist()
        starts = [0, *ends, len(table.ptr) - 1]
        self.rows = [(a, b) for a, b in pairwise(starts) if a < b]
        self.tasks = [(rows, span) for span in pairwise(cuts) for rows in self.rows]


class Pool(Stage):
    """The largest of each window, and which it is."""

    def __init__(self, name: str, op: MaxPool2d, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op

    def numbers(self, samples: Samples) -> int:
        return self.result.size * samples.room

    def bind(self, samples: Samples) -> None:
        super().bind(samples)
        (source,), taps, room = self.sources, self.op._inputs, samples.room
        read = source.numbers().reshape(-1, *self.op.input_shape[-2:])
        write = self.result.numbers().reshape(len(read), -1)
        places = (read[0] - read[0, 0, 0]).reshape(-1)
        self._taps = np.where(taps < 0, -1, places[taps] * room)
        self._read_at, self._row_at = read[:, 0, 0] * room, write[:, 0] * room
        self._write_at = (write[0] - write[0, 0]) * room
        work = taps.size * len(read) * len(samples.vectors)
        parts = max(1, min(2 * thread_count(), work // _TASK, len(read)))
        cuts = [len(read) * part // parts for part in range(parts + 1)]
        self._rows = list(pairwise(cuts))

    def forward(self, kept: Array) -> None:
        (source,) = self.sources
        self._share(kernels.choose_largest, self.result.x, kept, source.x)

    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        (source,), (add,) = self.sources, adds
        if add is None:
            return
        if not add:
            source.inner(source.grad)[...] = 0
        like = source.x if source.rectified else self.nothing
        self._share(kernels.pass_to_chosen, source.grad, kept, self.result.grad, like)

    def _share(self, kernel: Any, *arrays: Array) -> None:
        where = self._taps, self._read_at, self._row_at, self._write_at, self.samples.vectors
        call_all([partial(kernel, rows, *where, *arrays) for rows in self._rows])


class Normalise(Stage):
    """A :class:`BatchNorm2d`, by the statistics of the batch or by running ones."""

    def __init__(self, name: str, op: BatchNorm2d, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op
        running = () if op.training else ("running_mean", "running_var")
        self.copied = (*op.params, *running)
        height, width = source.shape[-2:]
        sizes = math.prod(source.shape[:-3]), op.num_features, height, width
        self._views = View(source, sizes), View(result, sizes)

    def bind(self, samples: Samples) -> None:
        super().bind(samples)
        self._where = [_channels(view, samples.room) for view in self._views]
        self._valid = (np.arange(samples.room) < samples.batch).astype(samples.dtype)
        channels = self.op.num_features
        work = len(self._where[0][1]) * len(samples.vectors) * channels
        parts = max(1, min(2 * thread_count(), work // _TASK, channels))
        self._parts = list(pairwise(channels * part // parts for part in range(parts + 1)))
        self._count = samples.batch * len(self._where[0][1])
        self._sums = np.zeros((channels, 2))
        self._ones, self._zeros = (
            np.ones(channels, samples.dtype),
            np.zeros(channels, samples.dtype),
        )

    def forward(self, kept: Array) -> None:
        (source,), result, dtype, op = self.sources, self.result, self.samples.dtype, self.op
        if op.training:
            wide = self._sum(source.x, self._zeros)[:, 0] / self._count
            self._mean = wide.astype(dtype)
            # What rounding the mean left out enters the variance.
            first, second = self._sum(source.x, self._mean).T / self._count
            variance = second - first * first
            if not np.isfinite(variance).all():
                x = samples_of(source, source.x, self.samples).astype(np.float64)
                variance = x.var(axis=(0, 2, 3))
        else:
            self._mean, variance = self.read["running_mean"], self.read["running_var"]
        self._inverse = 1 / np.sqrt(variance + op.eps)
        self._weight = self.read.get("weight", self._ones)
        bias = self.read.get("bias", self._zeros)
        factor = (self._weight * self._inverse).astype(dtype)
        flags = False, result.rectified
        arguments = *self._where[0], source.x, self._mean, factor, bias, self.samples.room
        call_all(
            [
                partial(kernels.scale_channels, part, *arguments, *self._where[1], result.x, flags)
                for part in self._parts
            ]
        )

    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        (source,), (add,), dtype = self.sources, adds, self.samples.dtype
        if add is None:
            return
        own = self._weight * self._inverse
        factor = shift = self._zeros
        if self.op.training:
            sums = self._moments() / self._count
            shift = (-own * sums[:, 0]).astype(dtype)
            factor = (-own * self._inverse * sums[:, 1]).astype(dtype)
        like = source.x if source.rectified else self.nothing
        arguments = *self._where[0], source.x, self._mean, factor, shift, self._valid
        grad = *self._where[1], self.result.grad, own.astype(dtype), source.grad, like, (add, False)
        call_all([partial(kernels.scale_grads, part, *arguments, *grad) for part in self._parts])

    def param_grads(self, out: dict[str, Array]) -> dict[str, Array]:
        if not self.params:
            return {}
        grads = {}
        for name, sums in zip(("weight", "bias"), self._moments().T[::-1], strict=True):
            grads[name] = room = out.get(name, np.empty(len(sums), self.samples.dtype))
            room[:] = sums
        return grads

    def _moments(self) -> Array:
        """Return the sums of the gradient, and of it times the normalised input."""
        inverse = self._inverse.astype(self.samples.dtype)
        (source,), (rows, places) = self.sources, self._where[1]
        return self._sum(source.x, self._mean, inverse, self.result.grad, rows, places)

    def _sum(self, x: Array, mean: Array, factor: Any = None, *other: Array) -> NDArray[np.float64]:
        """Return what :func:`sum_moments` writes."""
        nowhere = self._where[0][0][:0]
        factor = self._ones if factor is None else factor
        arguments = *self._where[0], x, mean, factor, *(other or (self.nothing, nowhere, nowhere))
        call_all(
            [
                partial(kernels.sum_moments, part, *arguments, self._valid, self._sums)
                for part in self._parts
            ]
        )
        return self._sums.copy()


class Add(Stage):
    """The sum of two maps, where a residual block ends."""

    def forward(self, kept: Array) -> None:
        (a, b), result = self.sources, self.result
        out = result.inner(result.x)
        np.add(a.inner(a.x), b.inner(b.x), out=out)
        if result.rectified:
            np.maximum(out, 0, out=out)

    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        grad = self.result.inner(self.result.grad)
        for source, add in zip(self.sources, adds, strict=True):
            put_grad(source, grad, add)


class Apply(Stage):
    """Any layer, by its own functions, on samples in the order of the caller's."""

    def __init__(self, name: str, op: Operator, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op
        self._plan: Any = None

    def forward(self, kept: Array) -> None:
        write(self.result, self.op.forward(self._x()), self.samples)

    def backward(self, kept: Array, adds: Sequence[bool | None]) -> None:
        (source,), (add,), op = self.sources, adds, self.op
        if add is None:
            return
        x, y, grad = self._x(), self._of_result(self.result.x), self._of_result(self.result.grad)
        if isinstance(op, Elementwise):
            below = grad * op.values(x, y).reshape(grad.shape)
        else:
            if self._plan is None:
                self._plan = api.plan([op.pattern])
            values = op.values(x, y).astype(grad.dtype, copy=False)
            below = self._plan.inclusive_scan(grad.reshape(len(grad), -1), [values])[-1]
        put_grad(source, in_lanes(source, below, self.samples), add)

    def param_grads(self, out: dict[str, Array]) -> dict[str, Array]:
        if not self.params:
            return {}
        grads = self.op.param_grads(self._x(), self._of_result(self.result.grad))
        return {name: grad.astype(self.samples.dtype, copy=False) for name, grad in grads.items()}

    def _x(self) -> Array:
        (source,) = self.sources
        return samples_of(source, source.x, self.samples).reshape(-1, *self.op.input_shape)

    def _of_result(self, array: Array) -> Array:
        return samples_of(self.result, array, self.samples).reshape(-1, *self.op.output_shape)


def _channels(view: View, room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where channels begin, and where their places lie behind that."""
    numbers = view.numbers() * room
    return numbers[0, :, 0, 0], (numbers[:, 0] - numbers[0, 0, 0, 0]).reshape(-1)


def samples_of(one: Map, array: Array, samples: Samples) -> Array:
    """Return a map's array as the caller has it: ``(batch, *shape)``."""
    return np.ascontiguousarray(np.moveaxis(one.inner(array)[..., : samples.batch], -1, 0))


def in_lanes(one: Map, array: Array, samples: Samples) -> Array:
    """Return an array of the caller's with samples last, and 0 where there are none."""
    room = np.zeros((*one.shape, samples.room), samples.dtype)
    room[..., : samples.batch] = np.moveaxis(array.reshape(samples.batch, *one.shape), 0, -1)
    return room


def write(one: Map, array: Array, samples: Samples) -> None:
    """Write an activation as the caller has it; where there are no samples, the first again.

    What is finite for a sample then is so there, too.
    """
    x = one.inner(one.x)
    x[..., : samples.batch] = np.moveaxis(array.reshape(samples.batch, *one.shape), 0, -1)
    x[..., samples.batch :] = x[..., :1]


def put_grad(one: Map, grad: Array, add: bool | None) -> None:
    """Write a gradient ``(*shape, room)``, or add it, where the map is not 0 by its activation."""
    if add is None:
        return
    if one.rectified:
        grad = np.where(one.inner(one.x) <= 0, grad.dtype.type(0), grad)
    room = one.inner(one.grad)
    if add:
        room += grad
    else:
        room[...] = grad


def host(name: str, array: Any) -> Array:
    """Return an array that is in host memory, or raise an error that names it."""
    checked = read_array(name, array)
    if type(checked) is not np.ndarray:
        raise DeviceError(f"{name} is on a GPU; expected an array of NumPy, as training steps take")
    return checked


def call_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Call all, on threads that share them."""
    share(lambda k: tasks[k](), len(tasks))
