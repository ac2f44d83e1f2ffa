"""Stages of a training step that weigh places: convolutions, linear layers and means."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ...kernels.cpu.gathers import ROWS
from ...kernels.cpu.lanes import lanes
from ...locks import cached_property
from ..kernels import places as kernels
from ..linear import Linear
from ..shared.checks import on_host
from ..shared.kron import kron
from .places import Map, PlaceTable, TapTable, View, gathering, scattering, widen
from .stages import Apply, ChannelWork, LayerStage, Samples, Span, Task, in_lanes, put_grad, write

Array = NDArray[Any]

# Bytes of places that a block of positions reads, so that a cache holds them for all rows.
_CACHE = 1 << 20
# Weights that a task reads.
_TAKEN = 1 << 14
# Weights that a task copies, one after the other.
_COPIED = 1 << 18
# Shares of the weights from which on all are used, and from which on BLAS multiplies so large a
# matrix, as `python -m bench density` has measured. Without AVX-512 blocks of rows, which take more
# registers than there are, are slower at any density.
DENSITY = 0.5 if lanes(np.dtype(np.float32)) == 16 else 1.0
MATRIX, MATRIX_DENSITY = 1 << 18, 0.3


class _Sums(LayerStage):
    """Weighted sums of places, by tables for both directions."""

    _ahead: Sequence[_Bound]
    _back: Sequence[_Bound]

    def _set_tables(self, ahead: Sequence[_Bound], back: Sequence[_Bound]) -> None:
        self._ahead, self._back = ahead, back
        self.ahead, self.back = (
            ChannelWork(np.sum([table.ends for table in tables], axis=0))
            for tables in (ahead, back)
        )

    def forward(self, part: Span) -> None:
        (source,), result = self.sources, self.result
        arrays = result.x, source.x, self.read.get("bias", self.nothing), self.nothing
        for table in self._ahead:
            table.sum(part, arrays, adds=False, rectifies=result.rectified)

    def backward(self, part: Span) -> None:
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

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        (source,), result = self.sources, self.result
        jacobian = kron(self.op._y, self.op._x)
        self._set_tables(
            [_mixing(jacobian.T.tocsr(), source, result, samples)],
            [_mixing(jacobian, result, source, samples)],
        )


def _mixing(matrix: sp.csr_array, source: Map, result: Map, samples: Samples) -> _Bound:
    """Return the table of a matrix that multiplies each image; a row is a place of the result."""
    read, write = (one.numbers().reshape(-1, math.prod(one.shape[-2:])) for one in (source, result))
    table = PlaceTable(
        matrix.indptr.astype(np.int64),
        read[0, matrix.indices] - read[0, 0],
        np.arange(matrix.nnz),
        read[:, 0],
        write[0] - write[0, 0],
        write[:, 0],
        1,
        (1, int(np.ptp(read[0]))),
        (source.size, result.size),
    )
    bound = _Bound(table, samples)
    bound.weight[:] = matrix.data
    return bound


class WeightStage(LayerStage):
    """A convolution or a linear layer.

    Attributes
    ----------
    reason : str
        Why not only the weights that are kept are used, to be printed.
    """

    reason = ""
    _weights: Array  # all of them, flat, as they were read last

    @staticmethod
    def pays(op: Any) -> bool:
        """Return whether no other stage is faster, when those before in the list are not."""
        return True

    def __init__(self, name: str, op: Any, result: Map, source: Map) -> None:
        super().__init__(name, op, result, source)
        self.copied = ("bias",) if "bias" in op.params else ()

    @cached_property
    def kept_at(self) -> NDArray[np.int64]:
        """Where kept weights are among all."""
        return np.flatnonzero(self.op.kept_weights())

    def kept_weights(self) -> Array:
        """Return a copy of the kept weights, as they were read last."""
        return self._weights[self.kept_at]

    def read_params(self) -> tuple[list[Task], list[Task]]:
        super().read_params()
        weight = on_host(f"{self.name}.weight", self.op.read_parameter("weight"))
        return self._copy(np.ascontiguousarray(weight, self.samples.dtype).reshape(-1))

    @abstractmethod
    def _copy(self, weight: Array) -> tuple[list[Task], list[Task]]:
        """Return tasks that copy a weight, flat, as :meth:`read_params` returns them."""


class Weigh(WeightStage, _Sums):
    """A layer of which only kept weights are used."""

    def __init__(self, name: str, op: Any, result: Map, source: Map) -> None:
        super().__init__(name, op, result, source)
        sides = zip((source, result), op.sides, strict=True)
        views = [View(one, (math.prod(one.shape) // math.prod(side), *side)) for one, side in sides]
        self._small, self._large = views if op.transposed else views[::-1]
        widen(op.windows, self._small, self._large)

    def _taps(self, mask: NDArray[np.bool_]) -> TapTable:
        """Return the weights in a mask, as they lie in memory."""
        mask = mask.reshape(*mask.shape[:2], *(window.kernel for window in self.op.windows))
        small, inner, y, x = np.nonzero(mask)
        large = inner + small // (len(mask) // self.op.groups) * mask.shape[1]
        return TapTable(small, large, y, x)

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        # From the large side to the small one, and back.
        self._gather, scattered = self._tables(samples)
        directions = [self._gather], scattered
        self._set_tables(*(directions[::-1] if self.op.transposed else directions))

    def _tables(self, samples: Samples) -> tuple[_Bound, Sequence[_Bound]]:
        arguments = self._taps(self.op.kept_weights()), self.op.windows, self._small, self._large
        gather = _Bound(gathering(*arguments), samples)
        self._grad = np.zeros(len(gather.order), samples.dtype)
        return gather, [_Bound(table, samples) for table in scattering(*arguments)]

    def kept_weights(self) -> Array:
        """Return a copy of the kept weights, as they were read last."""
        return self._gather.weight.copy()

    def _copy(self, weight: Array) -> tuple[list[Task], list[Task]]:
        kept = self._gather.weight
        others = [table for table in (*self._ahead, *self._back) if table is not self._gather]
        return _takes(kept, weight, self.kept_at), [
            task for table in others for task in _takes(table.weight, kept, table.order)
        ]

    def param_grads(self, out: dict[str, Array]) -> list[Task]:
        result, table = self.result, self._gather
        tasks = self._sum_weights(out["weight"].reshape(-1))
        if self.copied and self.op.transposed:
            out["bias"][:] = result.inner(result.grad).sum(axis=(0, -1, -2, -3))
        elif self.copied:
            tasks += [
                partial(kernels.sum_rows, rows, table.where, out["bias"], result.grad)
                for rows in ChannelWork(table.ends).parts()
            ]
        return tasks

    def _read(self) -> tuple[Array, Array]:
        """Return what the gradients of weights are sums of: the large side, and the small one."""
        sides = self.sources[0].x, self.result.grad
        return sides[::-1] if self.op.transposed else sides

    def _sum_weights(self, out: Array) -> list[Task]:
        """Return tasks that write the gradients of kept weights."""
        table, sums, sides = self._gather, self._sums(out), self._read()

        def add_up(rows: Span) -> None:
            table.sum_weights(rows, sums, *sides, self.samples.is_whole)
            self._hand_over(rows, out)

        return [partial(add_up, rows) for rows in ChannelWork(table.ends).parts()]

    def _sums(self, out: Array) -> Array:
        """Return where the gradients of weights are summed up."""
        return self._grad

    def _hand_over(self, rows: Span, out: Array) -> None:
        """Write the gradients of the kept weights of some rows, once they are summed up."""
        first, last = (int(self._gather.ptr[row]) for row in rows)
        kernels.put((first, last), out, self._grad, self.kept_at)


class WeighAll(Weigh):
    """A layer of which most weights are kept: all are used, pruned ones as 0."""

    reason = "dense: faster by blocks of rows"
    kept_weights = WeightStage.kept_weights

    @staticmethod
    def pays(op: Any) -> bool:
        """Return whether that is faster than to use only the weights that are kept."""
        kept = op.kept_weights()
        fewest = min(len(kept) // op.groups, kept.shape[1])
        return fewest >= ROWS and bool(kept.mean() > DENSITY)

    def _tables(self, samples: Samples) -> tuple[_Bound, Sequence[_Bound]]:
        kept = self.op.kept_weights()
        self._bits = _bits(kept, samples.dtype)
        # Gradients of pruned weights are not for the caller.
        self._grad = np.zeros(0 if self._bits is None else kept.size, samples.dtype)
        groups, columns, of_column = self.op.groups, kept.shape[1], math.prod(kept.shape[2:])
        rows, of_row = len(kept) // groups, columns * of_column
        arguments = self.op.windows, self._small, self._large
        # The first row of each group stands for all of its rows.
        first = np.zeros(kept.shape, np.bool_)
        first[::rows] = True
        behind = np.arange(len(kept)) % rows * of_row
        table, self._weights = gathering(self._taps(first), *arguments), samples.zeros(kept.size)
        gather = _Full(table, samples, self._weights, rows, behind, np.flatnonzero(first))
        # Back, the weights of as many rows as are taken at once lie side by side.
        first[:] = False
        first[:, 0] = True
        group, row = np.divmod(np.arange(groups * columns), columns)
        whole, together = -(-columns // ROWS), ROWS * rows * of_column
        behind = (group * whole + row // ROWS) * together + row % ROWS
        packed = samples.zeros(groups * whole * together)
        self._packing = packed, self._weights, (rows, columns, of_column)
        entries = np.tile(np.arange(rows * of_column) * ROWS, groups)
        return gather, [
            _Full(table, samples, packed, columns, behind, entries)
            for table in scattering(self._taps(first), *arguments)
        ]

    def _copy(self, weight: Array) -> tuple[list[Task], list[Task]]:
        rows, of_row = len(self.op.kept_weights()), len(weight) // len(self.op.kept_weights())
        spans = _spans(rows, max(_COPIED // of_row, 1))
        return [
            partial(_copy, (a * of_row, b * of_row), self._weights, weight, self._bits)
            for a, b in spans
        ], [partial(kernels.pack, span, *self._packing) for span in spans]

    def _sums(self, out: Array) -> Array:
        return out if self._bits is None else self._grad

    def _hand_over(self, rows: Span, out: Array) -> None:
        if self._bits is not None:
            of_row = len(out) // len(self.op.kept_weights())
            _copy((rows[0] * of_row, rows[1] * of_row), out, self._grad, self._bits)


class Multiply(WeightStage, Apply):
    """A linear layer of which most weights are kept, and so many that BLAS is faster.

    BLAS has threads of its own, on which the last bits of its products may depend.
    """

    reason = "dense: faster by BLAS"

    @staticmethod
    def pays(op: Any) -> bool:
        """Return whether that is faster than to weigh places."""
        if not isinstance(op, Linear) or op.weight.size < MATRIX:
            return False
        return bool(op.kept_weights().mean() > MATRIX_DENSITY)

    def bind(self, samples: Samples, kept: Array) -> None:
        super().bind(samples, kept)
        mask = self.op.kept_weights()
        self._bits = _bits(mask, samples.dtype)
        self._weights = np.zeros(mask.size, samples.dtype)
        self._matrix = self._weights.reshape(mask.shape)

    def _copy(self, weight: Array) -> tuple[list[Task], list[Task]]:
        spans = _spans(weight.size, _COPIED)
        return [partial(_copy, span, self._weights, weight, self._bits) for span in spans], []

    def forward(self, part: Span) -> None:
        y = self._input() @ self._matrix.T
        if self.copied:
            y += self.read["bias"]
        if self.result.rectified:
            np.maximum(y, 0, out=y)
        write(self.result, y, self.samples)

    def backward(self, part: Span) -> None:
        (source,), (add,) = self.sources, self.adds
        if add is not None:
            below = in_lanes(source, self._above() @ self._matrix, self.samples)
            put_grad(source, below, add=add)

    def _input(self) -> Array:
        return self._x().reshape(-1, self.op.in_features)

    def _above(self) -> Array:
        return self._of_result(self.result.grad).reshape(-1, self.op.out_features)

    def param_grads(self, out: dict[str, Array]) -> list[Task]:
        weight, above = out["weight"], self._above()
        if self._bits is None:
            np.matmul(above.T, self._input(), out=weight)
        else:
            sums = (above.T @ self._input()).reshape(-1)
            _copy((0, sums.size), weight.reshape(-1), sums, self._bits)
        if self.copied:
            above.sum(axis=0, out=out["bias"])
        return []


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return numbers in half of their memory, if none is too large."""
    return numbers.astype(np.int32) if numbers.max(initial=0) < 1 << 31 else numbers


def _bits(kept: NDArray[np.bool_], dtype: np.dtype[Any]) -> Array | None:
    """Return all bits for each weight that is kept, else none; or None if all weights are."""
    if kept.all():
        return None
    return -kept.reshape(-1).astype(f"i{dtype.itemsize}")


def _copy(some: Span, out: Array, array: Array, bits: Array | None) -> None:
    """Copy some numbers, or 0 for those that are not kept, even if they are NaN."""
    here = slice(*some)
    if bits is None:
        out[here] = array[here]
    else:
        np.bitwise_and(array[here].view(bits.dtype), bits[here], out=out[here].view(bits.dtype))


def _spans(size: int, step: int) -> list[Span]:
    """Return numbers below a size in spans of so many at most."""
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _takes(out: Array, array: Array, places: NDArray[Any]) -> list[Task]:
    """Return tasks that write the numbers at some places."""
    spans = _spans(len(places), _TAKEN)
    return [partial(kernels.take, span, out, array, places) for span in spans]


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

    def __init__(self, table: PlaceTable, samples: Samples) -> None:
        room, dtype = samples.room, samples.dtype
        self.ptr, self.order = table.ptr, _narrow(table.order)
        starts, counts = samples.cut(table.run)
        block = np.arange(samples.blocks)[:, None, None]
        read_at, write_at = (
            ((block * size + runs[:, None]) * room + starts).reshape(-1)
            for runs, size in zip((table.read_at, table.write_at), table.sizes, strict=True)
        )
        counts = np.repeat(counts, len(table.read_at), axis=0).reshape(-1)
        self.is_full = bool((counts == lanes(dtype)).all())
        self.where = (
            *(table.ptr, _narrow(table.offset * room)),
            *(read_at, table.row_at * room, write_at, counts),
        )
        self.weight = np.empty(len(table.order), dtype)
        positions, step = len(read_at), self._block(read_at, table, samples)
        self.blocks = np.array([*range(0, max(positions, 1), step), positions], np.int64)
        # Writing a row takes time, too.
        self.ends = (table.ptr + np.arange(len(table.ptr))) * positions

    @staticmethod
    def _block(read_at: NDArray[np.int64], table: PlaceTable, samples: Samples) -> int:
        """Return how many positions read what a cache holds, in eights."""
        channels, tap = table.reach
        room = _CACHE // max(channels * samples.dtype.itemsize, 1) - tap * samples.room
        of_block = len(read_at) // max(samples.blocks, 1)
        first = read_at[:of_block]
        count = int(np.searchsorted(np.maximum.accumulate(first), first[:1].sum() + room))
        if count == of_block > 0:
            count *= max(1, room // max(int(np.ptp(first)) + samples.room, 1))
        return max(count // 8, 1) * 8

    def sum(self, rows: Span, arrays: tuple[Any, ...], *, adds: bool, rectifies: bool) -> None:
        """Write sums of some rows; arrays are those of the kernel."""
        flags = adds, rectifies, self.is_full
        for span in pairwise(self.blocks.tolist()):
            self._sum(rows, span, arrays, flags)

    def _sum(self, rows: Span, span: Span, arrays: tuple[Any, ...], flags: Any) -> None:
        kernels.sum_places(rows, span, self.where, self.weight, arrays, flags)

    def sum_weights(self, rows: Span, out: Array, x: Array, grad: Array, is_whole: bool) -> None:
        """Write the gradients of the weights of some rows."""
        kernels.sum_weights(rows, self.blocks, self.where, is_whole, out, x, grad)


class _Full(_Bound):
    """A table of which all rows of a group read the same places.

    Parameters
    ----------
    table : PlaceTable
        Its entries are those of the first row of each group.
    weight : ndarray
        Room for all weights.
    rows : int
        Rows of a group.
    behind : ndarray of int
        How far the weights of each row are behind those of the first one of its group.
    places : ndarray of int
        Where the weight of each entry is.
    """

    def __init__(
        self,
        table: PlaceTable,
        samples: Samples,
        weight: Array,
        rows: int,
        behind: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> None:
        super().__init__(table, samples)
        row = np.arange(len(table.ptr) - 1)
        first = row - row % rows
        begin, end = table.ptr[first], table.ptr[first + 1]
        self.lists = begin, end, behind, _narrow(places[table.order])
        self.weight = weight
        self.ends = np.concatenate([[0], np.cumsum((end - begin + 1) * len(self.where[2]))])

    def _sum(self, rows: Span, span: Span, arrays: tuple[Any, ...], flags: Any) -> None:
        kernels.sum_all_places(rows, span, self.where, self.lists, self.weight, arrays, flags)

    def sum_weights(self, rows: Span, out: Array, x: Array, grad: Array, is_whole: bool) -> None:
        arguments = self.blocks, self.where, self.lists, is_whole
        kernels.sum_all_weights(rows, *arguments, out, x, grad)
