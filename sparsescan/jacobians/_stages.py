"""Stages of a network's training step: layers that work on maps, all samples at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from .. import api
from ..arrays.arrays import read_array
from ..errors import DeviceError
from ..execution.threads import share, thread_count
from ._kernels import places as kernels
from ._kernels.lanes import lanes
from ._kron import Separable, kron
from ._operator import Operator
from ._places import Map, Table, Taps, View, gathering, scattering, widen
from ._sharing import aligned_zeros
from ._windows import Window
from .activations import Elementwise
from .conv import ConvTranspose2d
from .linear import Linear
from .normalization import BatchNorm2d
from .pooling import MaxPool2d

__all__ = [
    "Add",
    "Apply",
    "Mix",
    "Normalise",
    "Pool",
    "Samples",
    "Stage",
    "Task",
    "Weigh",
    "Work",
    "call_all",
    "host",
    "in_lanes",
    "put_grad",
    "samples_of",
    "write",
]

Array = NDArray[Any]
Task = Callable[[], None]
Part = tuple[int, int]

# Bytes of places that a block of positions reads, so that a cache holds them for all rows.
_CACHE = 1 << 20
# By how much samples may be filled up to whole vectors.
_MOST_FILLED = 1.5
# Multiply-adds of vectors below which another thread would come too late.
_TASK = 100_000
# What reading and writing a vector once takes, in such.
_READS = 10
# Weights that a task reads.
_TAKEN = 1 << 14
_AFFINE = "weight", "bias"


class Samples(NamedTuple):
    """The samples of a training step.

    Attributes
    ----------
    batch : int
        How many there are.
    room : int
        How many numbers a place has: so many that samples fill whole vectors, or, if they would
        leave many lanes empty, as many as there are samples.
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
        whole = -(-batch // count) * count
        return cls(batch, whole if whole <= _MOST_FILLED * batch else batch, dtype)

    @property
    def is_whole(self) -> bool:
        """Whether a place has whole vectors."""
        return self.room % lanes(self.dtype) == 0

    def cut(self, places: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where vectors of neighbouring places begin, and how many lanes of each are used.

        Lanes behind the last sample of a place are 0 for ever.
        """
        size = lanes(self.dtype)
        starts = np.arange(0, places * self.room, size)
        if self.is_whole:
            left = self.batch - starts % max(self.room, 1)
        else:
            left = places * self.room - starts
        return starts, np.minimum(left, size)

    def zeros(self, count: int) -> Array:
        """Return zeros, and as many behind them that vectors may read them."""
        return aligned_zeros(count + lanes(self.dtype), self.dtype)


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
    # Whether parts are channels; and whether channels of the result depend on the same channels of
    # the sources, and no others.
    by_channels = True
    is_channelwise = False

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters of its layer."""
        return () if self.op is None else tuple(self.op.params)

    def named_params(self) -> dict[str, Array]:
        """Return the parameters of its layer."""
        return {} if self.op is None else self.op.params

    def numbers(self, samples: Samples) -> int:
        """Return how many numbers it keeps from forward to backward beside its maps."""
        return 0

    def bind(self, samples: Samples, kept: Array) -> None:
        """Make what depends on the number of samples and their dtype; `kept` is of its own."""
        self.samples, self.kept = samples, kept
        self.nothing = np.empty(0, samples.dtype)

    def read_params(self) -> tuple[list[Task], list[Task]]:
        """Copy the parameters that forward and backward use; what is left are tasks.

        Those of all stages in the first list come before those in the second.
        """
        self.read = {
            name: np.array(host(f"{self.name}.{name}", self.op.read_parameter(name)), dtype)
            for dtype in (self.samples.dtype,)
            for name in self.copied
        }
        return [], []

    @property
    @abstractmethod
    def ahead(self) -> Work:
        """What forward takes, by channels of the result."""

    @property
    def back(self) -> Work:
        """What backward takes, by channels of the sources."""
        return self.ahead

    @abstractmethod
    def forward(self, part: Part) -> None:
        """Write some channels of the result, and what is kept of them."""

    def is_settled(self) -> bool:
        """Return whether the result is right; if not, another :meth:`forward` makes it so."""
        return True

    def begin_backward(self, adds: Sequence[bool | None]) -> None:
        """Learn which gradients are added to what is there; None is for one that nobody needs."""
        self.adds = adds

    @abstractmethod
    def backward(self, part: Part) -> None:
        """Write some channels of the gradient in each source, or add to it."""

    def param_grads(self, out: dict[str, Array]) -> tuple[dict[str, Array], list[Task]]:
        """Return where gradients of the parameters are written, maybe in `out`, and by which tasks.

        The tasks wait for no other, and nothing but the next forward pass changes what they read.
        """
        return {}, []


class Work(NamedTuple):
    """Work on channels, which threads may share.

    Attributes
    ----------
    ends : ndarray of int64, shape (channels + 1,)
        Multiply-adds of vectors, or as much time, of all channels before each.
    """

    ends: NDArray[np.int64]

    @classmethod
    def even(cls, channels: int, places: int, samples: Samples) -> Work:
        """Return the work of reading and writing so many places of each channel."""
        each = _READS * places * -(-samples.room // lanes(samples.dtype))
        return cls(np.arange(channels + 1) * each)

    def parts(self) -> list[Part]:
        """Return channels that are a task: as many as threads, if that is worth it."""
        whole = int(self.ends[-1])
        count = max(1, min(thread_count(), whole // _TASK))
        cuts = np.searchsorted(self.ends, np.arange(1, count) * whole // count).tolist()
        return [(a, b) for a, b in pairwise([0, *cuts, len(self.ends) - 1]) if a < b]


class _Sums(Stage):
    """Weighted sums of places, by tables for both directions."""

    _ahead: list[_Bound]
    _back: list[_Bound]

    @property
    def ahead(self) -> Work:
        return Work(np.sum([table.ends for table in self._ahead], axis=0))

    @property
    def back(self) -> Work:
        return Work(np.sum([table.ends for table in self._back], axis=0))

    def forward(self, part: Part) -> None:
        (source,), result = self.sources, self.result
        arrays = result.x, source.x, self.read.get("bias", self.nothing), self.nothing
        for table in self._ahead:
            table.sum(part, arrays, adds=False, rectifies=result.rectified)

    def backward(self, part: Part) -> None:
        (source,), (add,) = self.sources, self.adds
        if add is None:
            return
        like = source.x if source.rectified else self.nothing
        arrays = source.grad, self.result.grad, self.nothing, like
        for table in self._back:
            table.sum(part, arrays, adds=add, rectifies=False)


class Mix(_Sums):
    """A layer that weighs the places of each image in the same way, such as a mean."""

    by_channels = False  # but by places of an image

    def __init__(self, name: str, op: Separable, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        (source,), result = self.sources, self.result
        jacobian = kron(self.op._y, self.op._x)
        self._ahead = [_mixing(jacobian.T.tocsr(), source, result, samples)]
        self._back = [_mixing(jacobian, result, source, samples)]


def _mixing(matrix: sp.csr_array, source: Map, result: Map, samples: Samples) -> _Bound:
    """Return the table of a matrix that multiplies each image; a row is a place of the result."""
    read, write = (one.numbers().reshape(-1, math.prod(one.shape[-2:])) for one in (source, result))
    table = Table(
        matrix.indptr.astype(np.int64),
        read[0, matrix.indices] - read[0, 0],
        np.arange(matrix.nnz),
        read[:, 0],
        write[0] - write[0, 0],
        write[:, 0],
        1,
        (1, int(np.ptp(read[0]))),
    )
    bound = _Bound(table, samples)
    bound.weight[:] = matrix.data
    return bound


class Weigh(_Sums):
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
    def kept_at(self) -> NDArray[np.int64]:
        """Where kept weights are among all."""
        return np.flatnonzero(self.op.kept_weights())

    def _taps(self) -> Taps:
        """Return the kept weights, as they lie in memory."""
        mask = self.op.kept_weights()
        groups = getattr(self.op, "groups", 1)
        mask = mask.reshape(*mask.shape[:2], *(window.kernel for window in self._windows))
        small, inner, y, x = np.nonzero(mask)
        large = inner + small // (len(mask) // groups) * mask.shape[1]
        return Taps(small, large, y, x)

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        # From the large side to the small one, and back.
        arguments = self._taps(), self._windows, self._small, self._large
        gather, scatter = gathering(*arguments), scattering(*arguments)
        self._gather = _Bound(gather, samples)
        scattered = [_Bound(table, samples) for table in scatter]
        self._ahead, self._back = [self._gather], scattered
        if self._transposed:
            self._ahead, self._back = self._back, self._ahead
        self._grad = np.zeros(len(gather.order), samples.dtype)

    def read_params(self) -> tuple[list[Task], list[Task]]:
        super().read_params()
        name, kept = f"{self.name}.weight", self._gather.weight
        weight = host(name, self.op.read_parameter("weight"))
        weight = np.ascontiguousarray(weight, self.samples.dtype).reshape(-1)
        others = [table for table in (*self._ahead, *self._back) if table is not self._gather]
        return _takes(kept, weight, self.kept_at), [
            task for table in others for task in _takes(table.weight, kept, table.order)
        ]

    def param_grads(self, out: dict[str, Array]) -> tuple[dict[str, Array], list[Task]]:
        (source,), result, table = self.sources, self.result, self._gather
        large, small = source.x, result.grad
        if self._transposed:
            large, small = small, large
        weight = out.get("weight")
        if weight is None:
            weight = np.zeros(self.op.kept_weights().shape, self.samples.dtype)
        grads, flat = {"weight": weight}, weight.reshape(-1)

        def add_up(rows: Part) -> None:
            entries = int(table.ptr[rows[0]]), int(table.ptr[rows[1]])
            arguments = table.blocks, table.where, self.samples.is_whole
            kernels.sum_weights(rows, *arguments, self._grad, large, small)
            kernels.put(entries, flat, self._grad, self.kept_at)

        tasks: list[Task] = [partial(add_up, rows) for rows in Work(table.ends).parts()]
        if "bias" in self.params:
            size = self.op.out_channels if self._transposed else len(table.ptr) - 1
            grads["bias"] = out.get("bias", np.empty(size, self.samples.dtype))
            if self._transposed:
                grads["bias"][:] = result.inner(result.grad).sum(axis=(-1, -2, -3))
            else:
                tasks += [
                    partial(kernels.sum_rows, rows, table.where, grads["bias"], result.grad)
                    for rows in Work(table.ends).parts()
                ]
        return grads, tasks


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return numbers in half of their memory, if none is too large."""
    return numbers.astype(np.int32) if numbers.max(initial=0) < 1 << 31 else numbers


def _takes(out: Array, array: Array, places: NDArray[Any]) -> list[Task]:
    """Return tasks that write the numbers at some places."""
    return [
        partial(kernels.take, (start, min(start + _TAKEN, len(places))), out, array, places)
        for start in range(0, len(places), _TAKEN)
    ]


class _Bound:
    """A table for so many samples, as kernels take it, and how threads share it.

    Attributes
    ----------
    where : tuple of ndarray
        The table, in numbers.
    weight : ndarray
        Room for the weights in the order of the entries.
    ends : ndarray of int64
        Multiply-adds of vectors of all rows before each, and the last one's.
    is_full : bool
        Whether all lanes of all positions are in use.
    blocks : ndarray of int
        Where blocks of positions begin, and the last one ends: a cache holds what one of them reads
        for all rows.
    """

    def __init__(self, table: Table, samples: Samples) -> None:
        room, dtype = samples.room, samples.dtype
        self.ptr, self.order = table.ptr, _narrow(table.order)
        starts, counts = samples.cut(table.run)
        read_at, write_at = (
            (runs[:, None] * room + starts).reshape(-1) for runs in (table.read_at, table.write_at)
        )
        counts = np.tile(counts, len(table.read_at))
        self.is_full = bool((counts == lanes(dtype)).all())
        self.where = (
            *(table.ptr, _narrow(table.offset * room)),
            *(read_at, table.row_at * room, write_at, counts),
        )
        self.weight = np.empty(len(table.order), dtype)
        positions = len(read_at)
        block = self._block(read_at, table, samples)
        self.blocks = np.array([*range(0, max(positions, 1), block), positions], np.int64)
        # Writing a row takes time, too.
        self.ends = (table.ptr + np.arange(len(table.ptr))) * positions

    @staticmethod
    def _block(read_at: NDArray[np.int64], table: Table, samples: Samples) -> int:
        """Return how many positions read what a cache holds, in eights."""
        channels, tap = table.reach
        room = _CACHE // max(channels * samples.dtype.itemsize, 1) - tap * samples.room
        count = int(np.searchsorted(np.maximum.accumulate(read_at), read_at[:1].sum() + room))
        return max(count // 8, 1) * 8

    def sum(self, rows: Part, arrays: tuple[Any, ...], *, adds: bool, rectifies: bool) -> None:
        """Write sums of some rows; arrays are those of the kernel behind the weights."""
        flags = adds, rectifies, self.is_full
        for span in pairwise(self.blocks.tolist()):
            kernels.sum_places(rows, span, self.where, self.weight, *arrays, flags)


class Pool(Stage):
    """The largest of each window, and which it is."""

    def __init__(self, name: str, op: MaxPool2d, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op

    def numbers(self, samples: Samples) -> int:
        return self.result.size * samples.room

    is_channelwise = True

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        (source,), taps, room = self.sources, self.op._inputs, samples.room
        read = source.numbers().reshape(-1, *self.op.input_shape[-2:])
        write = self.result.numbers().reshape(len(read), -1)
        places = (read[0] - read[0, 0, 0]).reshape(-1)
        taps = np.where(taps < 0, -1, places[taps] * room)
        self._where = (
            *(taps, read[:, 0, 0] * room, write[:, 0] * room),
            (write[0] - write[0, 0]) * room,
        )
        reads = np.bincount(taps[taps >= 0], minlength=1)
        self._overlaps, self._covers = reads.max() > 1, np.count_nonzero(reads) == len(places)
        self._work = Work.even(len(read), places.size, samples)

    @property
    def ahead(self) -> Work:
        return self._work

    def forward(self, part: Part) -> None:
        arrays = self.result.x, self.kept, self.sources[0].x
        kernels.choose_largest(part, self._where, self.samples.batch, *arrays)

    def begin_backward(self, adds: Sequence[bool | None]) -> None:
        super().begin_backward(adds)
        (source,), (add,) = self.sources, adds
        if add is False and (self._overlaps or not self._covers):
            source.inner(source.grad)[...] = 0

    def backward(self, part: Part) -> None:
        (source,), (add,) = self.sources, self.adds
        if add is None:
            return
        like = source.x if source.rectified else self.nothing
        arrays = source.grad, self.kept, self.result.grad, like, bool(add or self._overlaps)
        kernels.pass_to_chosen(part, self._where, self.samples.batch, *arrays)


class Normalise(Stage):
    """A :class:`BatchNorm2d`, by the statistics of the batch or by running ones."""

    is_channelwise = True

    def __init__(self, name: str, op: BatchNorm2d, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op
        running = () if op.training else ("running_mean", "running_var")
        self.copied = (*op.params, *running)
        height, width = source.shape[-2:]
        sizes = math.prod(source.shape[:-3]), op.num_features, height, width
        self._views = View(source, sizes), View(result, sizes)

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        self._where, self._above = (_channels(view, samples.room) for view in self._views)
        channels, places = self.op.num_features, len(self._where[1])
        self._work = Work.even(channels, places, samples)
        self._sums = np.zeros((channels, 2))
        self._mean, self._variance, self._inverse = np.zeros((3, channels))
        ones, zeros = np.ones(channels, samples.dtype), np.zeros(channels, samples.dtype)
        self._default = {"weight": ones, "bias": zeros}

    @property
    def ahead(self) -> Work:
        return self._work

    def read_params(self) -> tuple[list[Task], list[Task]]:
        super().read_params()
        self._affine = self._default | self.read
        self._is_given = not self.op.training
        if self._is_given:
            self._mean, self._variance = (
                self.read[name].astype(np.float64) for name in ("running_mean", "running_var")
            )
        return [], []

    def forward(self, part: Part) -> None:
        result, batch = self.result, self.samples.batch
        arrays = result.x, self.sources[0].x, self._mean, self._variance, self._inverse
        options = self.op.eps, *map(self._affine.get, _AFFINE), self._is_given, result.rectified
        kernels.normalise(part, self._where, self._above, batch, *arrays, *options)

    def is_settled(self) -> bool:
        if self._is_given or np.isfinite(self._variance).all():
            return True
        # The squares have overflowed, or there are values that are not finite.
        (source,) = self.sources
        x = samples_of(source, source.x, self.samples).astype(np.float64)
        self._mean, self._variance = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))
        self._is_given = True
        return False

    def backward(self, part: Part) -> None:
        (source,), (add,), batch = self.sources, self.adds, self.samples.batch
        like = source.x if source.rectified else self.nothing
        flags = self.op.training, add is not None, bool(add)
        about = self._mean, self._inverse, self._affine["weight"], self._sums, flags, like
        arrays = source.grad, source.x, self.result.grad, *about
        kernels.pass_normalised(part, self._where, self._above, batch, *arrays)

    def param_grads(self, out: dict[str, Array]) -> tuple[dict[str, Array], list[Task]]:
        grads = {}
        for name, sums in zip(self.params, self._sums.T[::-1], strict=False):
            grads[name] = room = out.get(name, np.empty(len(sums), self.samples.dtype))
            room[:] = sums
        return grads, []


class Add(Stage):
    """The sum of two maps, where a residual block ends."""

    is_channelwise = True

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        result, *sources = (_runs(each, samples) for each in (self.result, *self.sources))
        self._to_sum = result, *sources
        self._from_sum = [(source, result) for source in sources]
        rows, runs = result
        # All numbers of a run count, those of empty lanes too, which are 0.
        self._run = self.result.shape[-1] * samples.room
        self._work = Work.even(len(rows), len(runs) * self.result.shape[-1], samples)

    @property
    def ahead(self) -> Work:
        return self._work

    def forward(self, part: Part) -> None:
        arrays = self.result.x, *(source.x for source in self.sources)
        flags = False, self.result.rectified
        kernels.add_maps(part, self._to_sum, self._run, *arrays, flags)

    def backward(self, part: Part) -> None:
        for source, where, add in zip(self.sources, self._from_sum, self.adds, strict=True):
            # What is only read here has the gradient of the sum, in the same memory.
            if add is None or source.twin is self.result:
                continue
            like = source.x if source.rectified else self.nothing
            kernels.pass_back(part, where, self._run, source.grad, self.result.grad, like, add)


def _runs(one: Map, samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the channels of a map begin, and its rows behind that."""
    numbers = one.numbers()[..., 0].reshape(-1, one.shape[-2]) * samples.room
    return numbers[:, 0], numbers[0] - numbers[0, 0]


class Apply(Stage):
    """Any layer, by its own functions, on samples in the order of the caller's."""

    by_channels = False

    def __init__(self, name: str, op: Operator, source: Map, result: Map) -> None:
        super().__init__(name, (source,), result)
        self.op = op
        self._plan: Any = None

    @property
    def ahead(self) -> Work:
        return Work(np.array([0, 1]))

    def forward(self, part: Part) -> None:
        write(self.result, self.op.forward(self._x()), self.samples)

    def backward(self, part: Part) -> None:
        (source,), (add,), op = self.sources, self.adds, self.op
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

    def param_grads(self, out: dict[str, Array]) -> tuple[dict[str, Array], list[Task]]:
        if not self.params:
            return {}, []
        grads = self.op.param_grads(self._x(), self._of_result(self.result.grad))
        for name, grad in grads.items():
            grads[name] = room = out.get(name, np.empty(grad.shape, self.samples.dtype))
            room[...] = grad
        return grads, []

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
    """Write an activation as the caller has it."""
    x = one.inner(one.x)[..., : samples.batch]
    x[...] = np.moveaxis(array.reshape(samples.batch, *one.shape), 0, -1)


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


def call_all(tasks: Sequence[Task]) -> None:
    """Call all, on threads that share them."""
    share(lambda k: tasks[k](), len(tasks))
