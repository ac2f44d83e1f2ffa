"""Stages of a network's training step: layers that work on maps, all samples at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import api
from ...execution.calls import aligned_zeros
from ...execution.threads import thread_count
from ...kernels.cpu.lanes import lanes
from ...locks import cached_property
from ..activations import Elementwise
from ..kernels import places as kernels
from ..normalization import BatchNorm
from ..shared.checks import on_host
from .places import Map, View

Array = NDArray[Any]
Task = Callable[[], None]
Span = tuple[int, int]

# By how much samples may be filled up to whole vectors.
_MOST_FILLED = 1.5
# Multiply-adds of vectors below which another thread would come too late.
_TASK = 100_000
# The time to read and write a vector once, in multiply-adds.
_READS = 10


class Samples(NamedTuple):
    """The samples of a training step.

    Attributes
    ----------
    batch : int
        How many there are.
    blocks, room : int
        Blocks of samples, each with places of its own, and how many numbers such a place has: the
        lanes of a vector; or, if samples would leave many of them empty, there is one block of as
        many numbers as samples.
    dtype : dtype
        float32 or float64.
    """

    batch: int
    blocks: int
    room: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, batch: int, dtype: np.dtype[Any]) -> Samples:
        """Return so many samples, and room for them."""
        count = lanes(dtype)
        blocks = -(-batch // count)
        if blocks * count <= _MOST_FILLED * batch:
            return cls(batch, blocks, count, dtype)
        return cls(batch, 1, batch, dtype)

    @property
    def numbers(self) -> int:
        """How many numbers a place has in all blocks."""
        return self.blocks * self.room

    @property
    def vectors(self) -> int:
        """How many vectors these are, at least."""
        return -(-self.numbers // lanes(self.dtype))

    @property
    def is_whole(self) -> bool:
        """Whether a place of a block is a vector."""
        return self.room == lanes(self.dtype)

    def cut(self, places: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where vectors of neighbouring places begin, and how many lanes of each are used.

        The latter by blocks. Lanes behind the last sample of a place are 0 for ever.
        """
        size = lanes(self.dtype)
        starts = np.arange(0, places * self.room, size)
        if self.is_whole:
            left = self.batch - np.arange(self.blocks)[:, None] * self.room
            left = np.broadcast_to(left, (self.blocks, len(starts)))
        else:
            left = (places * self.room - starts)[None]
        return starts, np.minimum(left, size)

    def lots(self, *maps: Map) -> tuple[int, ...]:
        """Return `batch` and `room`, and how far blocks of each map are apart, as kernels do."""
        return self.batch, self.room, *(each.size * self.room for each in maps)

    def zeros(self, count: int) -> Array:
        """Return zeros, and as many behind them that vectors may read them."""
        return aligned_zeros(count + lanes(self.dtype), self.dtype)


class LayerStage(ABC):
    """A layer, or a sum, from maps to a map.

    Attributes
    ----------
    name : str
        Where the layer is in its network, such as ``"2.0"``.
    op : Operator or None
        The layer; a sum has none.
    result : Map
        What it writes.
    sources : tuple of Map
        What it reads.
    ahead, back : ChannelWork
        The work of :meth:`forward`, by channels of the result, and that of :meth:`backward`, by
        those of the sources; set by :meth:`bind`.
    """

    ahead: ChannelWork
    back: ChannelWork
    copied: tuple[str, ...] = ()
    # Whether parts are channels; and whether channels of the result depend on the same channels of
    # the sources, and no others.
    by_channels = True
    is_channelwise = False

    def __init__(self, name: str, op: Any, result: Map, *sources: Map) -> None:
        self.name, self.op, self.result, self.sources = name, op, result, sources

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
        self.read = {}
        for name in self.copied:
            param = on_host(f"{self.name}.{name}", self.op.read_parameter(name))
            self.read[name] = np.array(param, self.samples.dtype)
        return [], []

    @abstractmethod
    def forward(self, part: Span) -> None:
        """Write some channels of the result, and what is kept of them."""

    def is_settled(self) -> bool:
        """Return whether the result is right; if not, another :meth:`forward` makes it so."""
        return True

    def begin_backward(self, adds: Sequence[bool | None]) -> None:
        """Learn which gradients are added to what is there; None is for one that nobody needs."""
        self.adds = adds

    @abstractmethod
    def backward(self, part: Span) -> None:
        """Write some channels of the gradient in each source, or add to it."""

    def param_grads(self, out: dict[str, Array]) -> list[Task]:
        """Write the gradients of the parameters to arrays by their names; what is left are tasks.

        The tasks wait for no other, and nothing but the next forward pass changes what they read.
        """
        return []


class ChannelWork(NamedTuple):
    """Work on channels, which threads may share.

    Attributes
    ----------
    ends : ndarray of int64, shape (channels + 1,)
        Multiply-adds of vectors, or as much time, of all channels before each.
    """

    ends: NDArray[np.int64]

    @classmethod
    def even(cls, channels: int, places: int, samples: Samples) -> ChannelWork:
        """Return the work of reading and writing so many places of each channel."""
        each = _READS * places * samples.vectors
        return cls(np.arange(channels + 1) * each)

    def parts(self) -> list[Span]:
        """Return channels that are a task: as many as threads, if that is worth it."""
        whole = int(self.ends[-1])
        count = max(1, min(thread_count(), whole // _TASK))
        cuts = np.searchsorted(self.ends, np.arange(1, count) * whole // count).tolist()
        return [(a, b) for a, b in pairwise([0, *cuts, len(self.ends) - 1]) if a < b]


class Pool(LayerStage):
    """The largest of each window, and which it is."""

    is_channelwise = True

    def numbers(self, samples: Samples) -> int:
        return self.result.size * samples.numbers

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        (source,), sizes, sizes_out = self.sources, self.op.input_shape, self.op.output_shape
        read_at, places = View(source, (1, -1, *sizes[-2:])).begins()
        row_at, write_at = View(self.result, (1, -1, *sizes_out[-2:])).begins()
        taps, room = self.op._inputs, samples.room
        taps = np.where(taps < 0, -1, places[taps] * room)
        self._where = taps, read_at * room, row_at * room, write_at * room
        reads = np.bincount(taps[taps >= 0], minlength=1)
        self._overlaps, self._covers = reads.max() > 1, np.count_nonzero(reads) == len(places)
        self.ahead = self.back = ChannelWork.even(len(read_at), len(places), samples)
        self._lots = samples.lots(source, self.result)

    def forward(self, part: Span) -> None:
        arrays = self.result.x, self.kept, self.sources[0].x
        kernels.choose_largest(part, self._where, self._lots, *arrays)

    def begin_backward(self, adds: Sequence[bool | None]) -> None:
        super().begin_backward(adds)
        (source,), (add,) = self.sources, adds
        if add is False and (self._overlaps or not self._covers):
            source.inner(source.grad)[...] = 0

    def backward(self, part: Span) -> None:
        (source,), (add,) = self.sources, self.adds
        like = source.x if source.rectified else self.nothing
        arrays = source.grad, self.kept, self.result.grad, like, bool(add or self._overlaps)
        kernels.pass_to_chosen(part, self._where, self._lots, *arrays)


class Normalise(LayerStage):
    """A batch normalisation, by the statistics of the batch or by running ones."""

    is_channelwise = True

    def __init__(self, name: str, op: BatchNorm, result: Map, source: Map) -> None:
        super().__init__(name, op, result, source)
        running = () if op.training else ("running_mean", "running_var")
        self.copied = (*op.params, *running)
        size = op.channel_size
        sizes = math.prod(source.shape) // (op.num_features * size), op.num_features, 1, size
        self._views = View(source, sizes), View(result, sizes)

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        self._where, self._above = (
            tuple(samples.room * each for each in view.begins()) for view in self._views
        )
        self._lots = samples.lots(*self.sources, self.result)
        channels, places = self.op.num_features, len(self._where[1])
        self.ahead = self.back = ChannelWork.even(channels, places, samples)
        self._sums = np.zeros((channels, 2))
        self._mean, self._variance, self._inverse = np.zeros((3, channels))
        ones, zeros = np.ones(channels, samples.dtype), np.zeros(channels, samples.dtype)
        self._default = {"weight": ones, "bias": zeros}

    def read_params(self) -> tuple[list[Task], list[Task]]:
        super().read_params()
        self._affine = self._default | self.read
        self._is_given = not self.op.training
        if self._is_given:
            self._mean, self._variance = (
                self.read[name].astype(np.float64) for name in ("running_mean", "running_var")
            )
        return [], []

    def forward(self, part: Span) -> None:
        statistics = self._mean, self._variance, self._inverse
        affine = self.op.eps, self._affine["weight"], self._affine["bias"]
        arrays = self.result.x, self.sources[0].x
        flags, where = (self._is_given, self.result.rectified), (self._where, self._above)
        kernels.normalise(part, *where, self._lots, arrays, statistics, affine, flags)

    def is_settled(self) -> bool:
        if self._is_given or np.isfinite(self._variance).all():
            return True
        # The squares have overflowed, or there are values that are not finite.
        (source,) = self.sources
        x = samples_of(source, source.x, self.samples).astype(np.float64)
        x = x.reshape(len(x), self.op.num_features, -1)
        self._mean, self._variance = x.mean(axis=(0, 2)), x.var(axis=(0, 2))
        self._is_given = True
        return False

    def update_running_stats(self) -> None:
        """Let the running statistics, if there are any, take in the batch that has run forward."""
        if self.op.training and self.op.track_running_stats:
            self.op._take_in(self._mean, self._variance)

    def backward(self, part: Span) -> None:
        (source,), (add,) = self.sources, self.adds
        like = source.x if source.rectified else self.nothing
        arrays = source.grad, source.x, self.result.grad, like
        statistics, weight = (self._mean, self._inverse, self._sums), self._affine["weight"]
        flags, where = (self.op.training, add is not None, bool(add)), (self._where, self._above)
        kernels.pass_normalised(part, *where, self._lots, arrays, statistics, weight, flags)

    def param_grads(self, out: dict[str, Array]) -> list[Task]:
        for array, sums in zip(out.values(), self._sums.T[::-1], strict=False):
            array[:] = sums
        return []


class Add(LayerStage):
    """The sum of two maps, where a residual block ends."""

    is_channelwise = True

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        result, *sources = (_runs(each, samples) for each in (self.result, *self.sources))
        self._to_sum = result, *sources
        self._from_sum = [(source, result, result) for source in sources]
        rows, runs = result
        # All numbers of a run count, those of empty lanes too, which are 0.
        self._run = self.result.shape[-1] * samples.room
        self.ahead = self.back = ChannelWork.even(
            len(rows), len(runs) * self.result.shape[-1], samples
        )

    def forward(self, part: Span) -> None:
        arrays = self.result.x, *(source.x for source in self.sources), self.nothing
        flags = False, self.result.rectified
        kernels.add_maps(part, self._to_sum, self._run, *arrays, flags)

    def backward(self, part: Span) -> None:
        for source, where, add in zip(self.sources, self._from_sum, self.adds, strict=True):
            # A source that is only read here has the gradient of the sum, in the same memory.
            if add is None or source.twin is self.result:
                continue
            like = source.x if source.rectified else self.nothing
            arrays = source.grad, self.result.grad, self.nothing, like
            kernels.add_maps(part, where, self._run, *arrays, (add, False))


def _runs(one: Map, samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the channels of a map begin, and the rows of all blocks behind that."""
    numbers = one.numbers()[..., 0].reshape(-1, one.shape[-2])
    blocks = np.arange(samples.blocks)[:, None] * one.size
    behind = (blocks + numbers[0] - numbers[0, 0]).reshape(-1)
    return numbers[:, 0] * samples.room, behind * samples.room


class Apply(LayerStage):
    """Any layer, by its own functions, on samples in the order of the caller's."""

    by_channels = False
    ahead = back = ChannelWork(np.array([0, 1]))

    @cached_property
    def _plan(self) -> Any:
        return api.plan([self.op.pattern])

    def forward(self, part: Span) -> None:
        write(self.result, self.op.forward(self._x()), self.samples)

    def backward(self, part: Span) -> None:
        (source,), (add,), op = self.sources, self.adds, self.op
        if add is None:
            return
        x, y, grad = self._x(), self._of_result(self.result.x), self._of_result(self.result.grad)
        if isinstance(op, Elementwise):
            below = grad * op.values(x, y).reshape(grad.shape)
        else:
            values = op.values(x, y).astype(grad.dtype, copy=False)
            below = self._plan.inclusive_scan(grad.reshape(len(grad), -1), [values])[-1]
        put_grad(source, in_lanes(source, below, self.samples), add=add)

    def param_grads(self, out: dict[str, Array]) -> list[Task]:
        if out:
            grads = self.op.param_grads(self._x(), self._of_result(self.result.grad))
            for name, grad in grads.items():
                out[name][...] = grad
        return []

    def _x(self) -> Array:
        (source,) = self.sources
        return samples_of(source, source.x, self.samples).reshape(-1, *self.op.input_shape)

    def _of_result(self, array: Array) -> Array:
        return samples_of(self.result, array, self.samples).reshape(-1, *self.op.output_shape)


def samples_of(one: Map, array: Array, samples: Samples) -> Array:
    """Return a map's array as the caller has it: ``(batch, *shape)``."""
    whole = np.moveaxis(one.inner(array), -1, 1)
    return np.array(whole.reshape(samples.numbers, *one.shape)[: samples.batch])


def in_lanes(one: Map, array: Array, samples: Samples) -> Array:
    """Return an array of the caller's with samples last, and 0 where there are none."""
    room = np.zeros((samples.blocks, samples.room, *one.shape), samples.dtype)
    room.reshape(samples.numbers, *one.shape)[: samples.batch] = array.reshape(-1, *one.shape)
    return np.moveaxis(room, 1, -1)


def write(one: Map, array: Array, samples: Samples) -> None:
    """Write an activation as the caller has it."""
    array, room = array.reshape(samples.batch, *one.shape), samples.room
    for block, x in enumerate(one.inner(one.x)):
        some = array[block * room : (block + 1) * room]
        x[..., : len(some)] = np.moveaxis(some, 0, -1)


def put_grad(one: Map, grad: Array, *, add: bool) -> None:
    """Write a gradient ``(blocks, *shape, room)``, 0 where the map's activation is, or add it."""
    if one.rectified:
        grad = np.where(one.inner(one.x) <= 0, grad.dtype.type(0), grad)
    room = one.inner(one.grad)
    if add:
        room += grad
    else:
        room[...] = grad
