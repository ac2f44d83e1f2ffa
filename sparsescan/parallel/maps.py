"""Affine maps: the elements that MPI's exclusive scan combines, on the CPU engine.

A part of the chain maps the gradient `y` that enters it to the one that leaves it: ``y → M y + c``,
where `c` comes from its local gradients. A product of the engine is such a map: values, an exponent
per column, local gradients. So a message holds the memory of a product, and the operator is an
operation of the engine, which keeps products in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..execution.workspace import Parts, Workspace
from ..kernels.numbered import numbered
from ..symbolic.pattern import Pattern, PatternProducts, multiply_adds
from ..symbolic.program import Program

# Kinds of elements.
State = numbered(
    "State",
    # the identity, for ranks without steps
    "NOTHING MAP",
    # a gradient: the element includes the gradient at the end of the chain
    "VECTOR",
    # an element that includes the last part, which no rank needs
    "UNUSED",
    # no result: a rank has failed, or a value is not finite
    "BAD",
)

_START, _STOP, _STATE, _HEADER = 0, 1, 2, 4


class ScanTerms(NamedTuple):
    """Dtype and shapes that the ranks of a chain agree on before they exchange data.

    Attributes
    ----------
    dtype : dtype
        The dtype to which all input promotes.
    batch : int or None
        Samples of each rank, or None if gradients have no batch axis.
    batched : bool
        Whether any Jacobian differs between samples.
    local : bool
        Whether there are local gradients.
    """

    dtype: np.dtype[Any]
    batch: int | None
    batched: bool
    local: bool

    @property
    def samples(self) -> int:
        """Samples of each rank."""
        return 1 if self.batch is None else self.batch

    @property
    def width(self) -> int:
        """Samples for which maps differ."""
        return self.samples if self.batched else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The batch axis of a gradient."""
        return () if self.batch is None else (self.batch,)

    def workspace(
        self, program: Program, leaves: NDArray[np.int64], batched: NDArray[np.bool_], threads: int
    ) -> Workspace:
        """Return a workspace for a program, some of whose Jacobians differ between samples."""
        dtype, samples, local = self.dtype, self.samples, self.local
        return Workspace(program, leaves, dtype, samples, batched, local, threads)


def vector_words(size: Any, terms: ScanTerms) -> Any:
    """Return the words of a message with `size` entries of a gradient; the first is its state."""
    return 1 + -(-terms.samples * size * terms.dtype.itemsize // 8)


def vector_of(message: NDArray[np.int64], size: int, terms: ScanTerms) -> NDArray[Any]:
    """Return the entries in such a message, as a view."""
    values = message[1:].view(terms.dtype)[: terms.samples * size]
    return values.reshape(*terms.shape, size)


class Capacity(NamedTuple):
    """The largest map for which a message has room."""

    rows: int
    cols: int
    nnz: int

    def ends(self, terms: ScanTerms) -> list[int]:
        """Return where header, gradient, exponents and values end, in words of 8 bytes."""
        itemsize, width = terms.dtype.itemsize, terms.width
        sizes = [
            terms.samples * self.rows * itemsize,
            width * (self.cols + 1) * 4,
            width * self.nnz * itemsize,
        ]
        ends = [_HEADER]
        for nbytes in sizes:
            ends.append(ends[-1] + -(-nbytes // 8))
        return ends

    def words(self, terms: ScanTerms) -> int:
        """Return the words of a message."""
        return self.ends(terms)[-1]


class Message:
    """An element of the scan, as a view of the words that are sent."""

    def __init__(self, words: NDArray[np.int64], capacity: Capacity, terms: ScanTerms) -> None:
        self.words = words
        self.header = words[:_HEADER]
        ends = capacity.ends(terms)
        vector, exponents, values = (words[a:b] for a, b in pairwise(ends))
        self._vector = vector.view(terms.dtype)
        self._exponents = exponents.view(np.int32)
        self._values = values.view(terms.dtype)
        self._samples, self._width = terms.samples, terms.width

    @property
    def range(self) -> tuple[int, int]:
        """First and last-plus-one of its parts."""
        return int(self.header[_START]), int(self.header[_STOP])

    @property
    def state(self) -> int:
        """One of :data:`State`."""
        return int(self.header[_STATE])

    def describe(self, start: int, stop: int, state: int) -> None:
        """Write the range of its parts, and its state."""
        self.header[:] = start, stop, state, 0

    def vector(self, size: int) -> NDArray[Any]:
        """Return the gradient, or the sum of local gradients: a row per sample."""
        return _rows(self._vector, self._samples, size)

    def exponents(self, cols: int) -> NDArray[Any]:
        """Return the exponents of the columns; the last word says whether any is not zero."""
        return _rows(self._exponents, self._width, cols + 1)

    def values(self, nnz: int) -> NDArray[Any]:
        """Return the values of the matrix."""
        return _rows(self._values, self._width, nnz)


def _rows(section: NDArray[Any], count: int, size: int) -> NDArray[Any]:
    return section[: count * size].reshape(count, size)


class Ranges:
    """Maps of neighbouring parts, combined: their patterns, and the programs that combine them.

    Parameters
    ----------
    parts : sequence of Pattern or None
        The pattern of every part; None if it is the identity, or not a map.
    products : PatternProducts, optional
        Products of patterns, which may have a limit.
    """

    def __init__(
        self, parts: Sequence[Pattern | None], products: PatternProducts | None = None
    ) -> None:
        self._known = {(k, k + 1): pattern for k, pattern in enumerate(parts)}
        self._multiply = products or PatternProducts()
        self._programs: dict[tuple[Pattern, ...], Program] = {}

    def __call__(self, start: int, stop: int) -> Pattern | None:
        """Return the pattern of parts `start` to ``stop - 1``, however they are combined."""
        if (start, stop) not in self._known:
            # Exclusive scans combine blocks that meet here, so most patterns are known.
            bits = (start ^ (stop - 1)).bit_length() - 1
            mid = (stop - 1) >> bits << bits
            left, right = self(start, mid), self(mid, stop)
            if left is not None and right is not None:
                self._known[start, stop] = self._multiply(right, left)
            else:
                self._known[start, stop] = right if left is None else left
        return self._known[start, stop]

    def program(self, start: int, mid: int, stop: int) -> Program | None:
        """Return the program that a scan merges two ranges by; None if it computes nothing."""
        return self.apply(mid, stop) if start == 0 else self.compose(start, mid, stop)

    def apply(self, start: int, stop: int) -> Program | None:
        """Return the program that applies a map, product 0, to a gradient."""
        pattern = self(start, stop)
        if pattern is None:
            return None
        key = (pattern,)
        if key not in self._programs:
            rows, cols = pattern.shape
            self._programs[key] = _one_operation(key, [1, 0, 1, 1], pattern.nnz, cols, rows)
        return self._programs[key]

    def compose(self, start: int, mid: int, stop: int) -> Program | None:
        """Return the program that composes two maps: product 2 from products 0 and 1."""
        left, right, out = self(start, mid), self(mid, stop), self(start, stop)
        if left is None or right is None or out is None:
            return None
        key = left, right, out
        if key not in self._programs:
            work = multiply_adds(right, left)
            self._programs[key] = _one_operation(key, [0, 1, 2, 3], work, 1, 1)
        return self._programs[key]


def _one_operation(
    products: Sequence[Pattern], op: list[int], work: int, entering: int, leaving: int
) -> Program:
    """Make a program of one operation. Every program needs a Jacobian; nothing reads this one."""
    return Program.from_tables(
        1,
        [Pattern.diagonal(1), *products],
        ops=np.array([op, [1, 0, 0, 1]], np.int64),
        work=np.array([work, 1], np.int64),
        levels=[("merge", np.array([[0, 1]], np.int64))],
        offsets=np.array([0, entering, entering + leaving]),
    )


def product_bytes(program: Program, dtype: np.dtype[Any], batch: int) -> int:
    """Return the bytes of a program's products, if they differ between samples."""
    products = program.patterns[program.n :]
    values = sum(pattern.nnz + pattern.shape[0] for pattern in products)
    exponents = sum(pattern.shape[1] + 1 for pattern in products)
    return batch * (dtype.itemsize * values + 4 * exponents)


class Merger:
    """The operator: ``merger(a, b)`` writes ``a ◇ b`` to `b`, with `a` of the earlier parts.

    It never raises: if it fails, the element is bad, and so is every combination with it.

    Parameters
    ----------
    ranges : Ranges
        The maps.
    capacity : Capacity
        Capacity of messages.
    terms : ScanTerms
        Terms of the scan.
    threads : int
        Threads that may take part.

    Attributes
    ----------
    error : BaseException or None
        The first exception, if there was one.
    """

    def __init__(self, ranges: Ranges, capacity: Capacity, terms: ScanTerms, threads: int) -> None:
        self._ranges = ranges
        self._capacity = capacity
        self._terms = terms
        self._threads = threads
        self._workspaces: dict[Program, Workspace] = {}
        self.error: BaseException | None = None

    def prepare(self, start: int, mid: int, stop: int) -> None:
        """Make the workspace of a merge, so that the merge allocates nothing."""
        program = self._ranges.program(start, mid, stop)
        if program is not None:
            self._workspace(program)

    def __call__(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        """Write ``a ◇ b`` to `b`."""
        left, right = (Message(words, self._capacity, self._terms) for words in (a, b))
        (start, mid), (second, stop) = left.range, right.range
        try:
            state = self._merge(left, right) if mid == second else State.BAD
        except BaseException as error:
            self.error = self.error or error
            state = State.BAD
        right.describe(start, stop, state)

    def _merge(self, left: Message, right: Message) -> int:
        """Write the combination of two messages to `right`; return its state."""
        states = left.state, right.state
        for worst in (State.BAD, State.UNUSED):
            if worst in states:
                return worst
        if State.NOTHING in states:
            if right.state == State.NOTHING:
                right.words[:] = left.words
            return max(states)
        if right.state == State.VECTOR:
            return State.BAD
        return (self._apply if left.state == State.VECTOR else self._compose)(left, right)

    def _apply(self, left: Message, right: Message) -> int:
        program = self._ranges.apply(*right.range)
        if program is None:
            return State.BAD
        _, pattern = program.patterns
        y = left.vector(pattern.shape[1])
        workspace = self._workspace(program)
        self._fill(workspace, 0, right, pattern)
        out = np.empty(y.size + len(y) * pattern.shape[0], self._terms.dtype)
        out[: y.size] = y.reshape(-1)
        if not workspace.run(out, False):
            return State.BAD
        right.vector(pattern.shape[0])[:] = out[y.size :].reshape(len(y), -1)
        return State.VECTOR

    def _compose(self, left: Message, right: Message) -> int:
        program = self._ranges.compose(*left.range, right.range[1])
        if program is None:
            return State.BAD
        _, earlier, later, out = program.patterns
        if out.nnz > self._capacity.nnz or out.shape[1] > self._capacity.cols:
            return State.BAD
        workspace = self._workspace(program)
        self._fill(workspace, 0, left, earlier)
        self._fill(workspace, 1, right, later)
        if not workspace.run(np.empty(1, self._terms.dtype), False):
            return State.BAD
        self.write(right, workspace.product(2), out)
        return State.MAP

    def write(self, message: Message, product: Parts, pattern: Pattern) -> None:
        """Copy a product to a message."""
        values, exponents, local = product
        message.values(pattern.nnz)[:] = values
        message.exponents(pattern.shape[1])[:] = exponents
        if self._terms.local:
            message.vector(pattern.shape[0])[:] = local

    def _fill(self, workspace: Workspace, k: int, message: Message, pattern: Pattern) -> None:
        """Copy a message to product `k`."""
        values, exponents, local = workspace.product(k)
        values[:] = message.values(pattern.nnz)
        exponents[:] = message.exponents(pattern.shape[1])
        if self._terms.local:
            local[:] = message.vector(pattern.shape[0])

    def _workspace(self, program: Program) -> Workspace:
        if program not in self._workspaces:
            # Products differ between samples if the one Jacobian does.
            leaves, batched = np.zeros((1, 2), np.int64), np.full(1, self._terms.batched)
            made = self._terms.workspace(program, leaves, batched, self._threads)
            self._workspaces[program] = made
        return self._workspaces[program]
