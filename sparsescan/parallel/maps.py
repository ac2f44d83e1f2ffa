"""Maps: the elements that an exclusive scan of MPI combines, on the CPU engine.

A part of the chain takes the gradient `y` that enters it to the one that leaves it by an affine map
``y → M y + c``, with `c` what its local gradients add up to. That is what a node of the engine is:
values, an exponent for each column, local gradients. So a message is the memory of a node, and the
operator an operation of the engine; products stay in range here as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..pattern import Pattern, Products, multiply_adds
from ..program import Parts, Program, Workspace

__all__ = [
    "Apply",
    "Compose",
    "Given",
    "Layout",
    "Merger",
    "Message",
    "Ranges",
    "State",
    "Terms",
    "vector_of",
    "vector_words",
]


class _State(NamedTuple):
    """What an element is."""

    # of ranks without steps: the identity
    NOTHING: int = 0
    MAP: int = 1
    # it holds the gradient at the end of the chain, and is one
    VECTOR: int = 2
    # it holds the last part, which no prefix does
    UNUSED: int = 3
    # no result: somebody failed, or met a value that is not finite
    BAD: int = 4


State = _State()

_START, _STOP, _STATE, _HEADER = 0, 1, 2, 4


class Terms(NamedTuple):
    """What the ranks of a chain agree on before they exchange data.

    Attributes
    ----------
    dtype : dtype
        To which all input promotes.
    batch : int or None
        Samples of each, or None if gradients have no batch axis.
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


def vector_words(size: Any, terms: Terms) -> Any:
    """Words of a message with so many entries of a gradient, the first being its state."""
    return 1 + -(-terms.samples * size * terms.dtype.itemsize // 8)


def vector_of(message: NDArray[np.int64], size: int, terms: Terms) -> NDArray[Any]:
    """The entries in such a message."""
    values = message[1:].view(terms.dtype)[: terms.samples * size]
    return values.reshape(*terms.shape, size)


class Layout(NamedTuple):
    """Sizes for which a message has room."""

    rows: int
    cols: int
    nnz: int

    def ends(self, terms: Terms) -> list[int]:
        """Where header, gradient, exponents and values of a message end, in words of 8 bytes."""
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

    def words(self, terms: Terms) -> int:
        """Words of a message."""
        return self.ends(terms)[-1]


class Message:
    """An element of the scan, in the words that are sent."""

    def __init__(self, words: NDArray[np.int64], layout: Layout, terms: Terms) -> None:
        self.words = words
        self.header = words[:_HEADER]
        ends = layout.ends(terms)
        parts = [words[a:b] for a, b in pairwise(ends)]
        self._vector = parts[0].view(terms.dtype)
        self._exponents = parts[1].view(np.int32)
        self._values = parts[2].view(terms.dtype)
        self._samples, self._width = terms.samples, terms.width

    @property
    def range(self) -> tuple[int, int]:
        """First and last-plus-one of the parts that it stands for."""
        return int(self.header[_START]), int(self.header[_STOP])

    @property
    def state(self) -> int:
        """One of :data:`State`."""
        return int(self.header[_STATE])

    def describe(self, start: int, stop: int, state: int) -> None:
        """Write what it stands for."""
        self.header[:] = start, stop, state, 0

    def vector(self, size: int) -> NDArray[Any]:
        """The gradient; or what local gradients add up to. A row for each sample."""
        return _rows(self._vector, self._samples, size)

    def exponents(self, cols: int) -> NDArray[Any]:
        """Exponents of the columns, and whether any is not zero."""
        return _rows(self._exponents, self._width, cols + 1)

    def values(self, nnz: int) -> NDArray[Any]:
        """Values of the matrix."""
        return _rows(self._values, self._width, nnz)


def _rows(section: NDArray[Any], count: int, size: int) -> NDArray[Any]:
    return section[: count * size].reshape(count, size)


class Ranges:
    """Patterns of the maps of neighbouring parts, combined.

    Parameters
    ----------
    parts : sequence of Pattern or None
        Of every part; None if it is the identity, or not a map.
    products : Products, optional
        Which may refuse one.
    """

    def __init__(self, parts: Sequence[Pattern | None], products: Products | None = None) -> None:
        self._known = {(k, k + 1): pattern for k, pattern in enumerate(parts)}
        self._multiply = products or Products()

    def __call__(self, start: int, stop: int) -> Pattern | None:
        """The pattern of parts `start` to ``stop - 1``, the same however they are combined."""
        if (start, stop) not in self._known:
            # Where blocks of an exclusive scan meet, so that most are known already.
            bits = (start ^ (stop - 1)).bit_length() - 1
            mid = (stop - 1) >> bits << bits
            left, right = self(start, mid), self(mid, stop)
            if left is not None and right is not None:
                self._known[start, stop] = self._multiply(right, left)
            else:
                self._known[start, stop] = right if left is None else left
        return self._known[start, stop]


class Given(Program):
    """A program whose first products are given, and which makes one thing of them.

    It has one Jacobian, which nothing reads.
    """

    def __init__(
        self, products: Sequence[Pattern], op: list[int], work: int, batched: bool
    ) -> None:
        self.n = 1
        self.patterns = [Pattern.diagonal(1), *products]
        self.ops = np.array([op, [1, 0, 0, 1]], np.int64)
        self.work = np.array([work, 1], np.int64)
        self.levels = [("merge", np.array([[0, 1]], np.int64))]
        self.slots = np.full(len(products), -1, np.int64)
        self.index_bytes = 0
        wide = any(pattern.index_dtype == np.int64 for pattern in products)
        self.index_dtype = np.dtype(np.int64 if wide else np.int32)
        self.offsets = np.arange(3)
        self._batched = batched

    def batched(self, leaves: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which nodes differ between samples: all or none."""
        return np.full(len(self.patterns), self._batched)

    def nbytes(self, dtype: np.dtype[Any], batch: int) -> int:
        """Bytes of its products, if they differ between samples."""
        sizes = [(p.nnz + p.shape[0], p.shape[1] + 1) for p in self.patterns[1:]]
        values, exponents = np.sum(sizes, axis=0).tolist()
        return int(batch * (dtype.itemsize * values + 4 * exponents))


class Compose(Given):
    """The map that is `left` and then `right`: product 2 of products 0 and 1."""

    def __init__(self, left: Pattern, right: Pattern, out: Pattern, batched: bool) -> None:
        super().__init__([left, right, out], [0, 1, 2, 3], multiply_adds(right, left), batched)


class Apply(Given):
    """The gradient that a map, product 0, makes of another one."""

    def __init__(self, pattern: Pattern, batched: bool) -> None:
        super().__init__([pattern], [1, 0, 1, 1], pattern.nnz, batched)
        rows, cols = pattern.shape
        self.offsets = np.array([0, cols, cols + rows])


class Merger:
    """The operator: ``merger(a, b)`` writes ``a ◇ b`` to `b`, with `a` of the earlier parts.

    It never raises: an element that cannot be made is bad, and so is all that is made of it.

    Parameters
    ----------
    ranges : Ranges
        Patterns of maps.
    layout : Layout
        Of messages.
    terms : Terms
        Agreed on by all ranks.
    threads : int
        Threads that may take part.

    Attributes
    ----------
    error : BaseException or None
        What was raised, if anything was.
    """

    def __init__(self, ranges: Ranges, layout: Layout, terms: Terms, threads: int) -> None:
        self._ranges = ranges
        self._layout = layout
        self._terms = terms
        self._threads = threads
        self._workspaces: dict[tuple[Pattern, ...], Workspace] = {}
        self.error: BaseException | None = None

    def prepare(self, start: int, mid: int, stop: int) -> None:
        """Make what a merge needs, so that it will not have to."""
        left, right = self._ranges(start, mid), self._ranges(mid, stop)
        if right is not None:
            if start == 0:
                self._apply(right)
            elif left is not None:
                self._compose(left, right, self._ranges(start, stop))

    def __call__(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        """Write ``a ◇ b`` to `b`."""
        left, right = (Message(words, self._layout, self._terms) for words in (a, b))
        (start, mid), (found, stop) = left.range, right.range
        try:
            state = self._merge(left, right) if mid == found else State.BAD
        except BaseException as error:
            self.error = self.error or error
            state = State.BAD
        right.describe(start, stop, state)

    def _merge(self, left: Message, right: Message) -> int:
        """The state of what was made."""
        states = left.state, right.state
        for worst in (State.BAD, State.UNUSED):
            if worst in states:
                return worst
        if left.state == State.NOTHING or right.state == State.NOTHING:
            if right.state == State.NOTHING:
                right.words[:] = left.words
            return max(states)
        if right.state == State.VECTOR:
            return State.BAD
        pattern = self._ranges(*right.range)
        assert pattern is not None
        if left.state == State.VECTOR:
            y = left.vector(pattern.shape[1])
            made = self.apply(right, pattern, y)
            if made is None:
                return State.BAD
            right.vector(pattern.shape[0])[:] = made
            return State.VECTOR
        return self._combine(left, right, pattern)

    def apply(self, message: Message, pattern: Pattern, y: NDArray[Any]) -> NDArray[Any] | None:
        """The gradient that a map makes of another one; None if a value is not finite."""
        workspace = self._apply(pattern)
        self._fill(workspace, 0, message, pattern)
        out = np.empty(y.size + len(y) * pattern.shape[0], self._terms.dtype)
        out[: y.size] = y.reshape(-1)
        if not workspace.run(out, False):
            return None
        return out[y.size :].reshape(len(y), pattern.shape[0])

    def _combine(self, left: Message, right: Message, pattern: Pattern) -> int:
        (start, mid), (_, stop) = left.range, right.range
        earlier, out = self._ranges(start, mid), self._ranges(start, stop)
        assert earlier is not None
        assert out is not None
        if out.nnz > self._layout.nnz or out.shape[1] > self._layout.cols:
            return State.BAD
        workspace = self._compose(earlier, pattern, out)
        self._fill(workspace, 0, left, earlier)
        self._fill(workspace, 1, right, pattern)
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

    def _compose(self, left: Pattern, right: Pattern, out: Pattern | None) -> Workspace:
        assert out is not None
        return self._made((left, right), lambda batched: Compose(left, right, out, batched))

    def _apply(self, pattern: Pattern) -> Workspace:
        return self._made((pattern,), lambda batched: Apply(pattern, batched))

    def _made(self, key: tuple[Pattern, ...], program: Any) -> Workspace:
        if key not in self._workspaces:
            terms = self._terms
            self._workspaces[key] = Workspace(
                program(terms.batched),
                np.zeros((1, 2), np.int64),
                terms.dtype,
                terms.samples,
                np.zeros(1, bool),
                terms.local,
                self._threads,
            )
        return self._workspaces[key]
