"""Steps whose rows are spread over ranks: what each sends and receives, and its rows' product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chain import Chain, LocalGrads
from ..kernels._threads import thread_count, work
from ..kernels.cpu import Book
from ..pattern import Pattern
from ..plan import Gradients
from ..program import RUN_GRAIN, Program, Workspace
from .communicator import Communicator, Fault
from .halo import Halo, Index, length
from .maps import State, Terms, vector_of, vector_words

__all__ = ["Messages", "Rows"]

# Nanoseconds of a multiply-add, roughly: below a grain of them, no other threads are woken.
_NANOSECONDS = 0.3


class _Steps(Program):
    """A program whose steps are run one by one, each from a vector of its own.

    Gradient ``4 k`` is what step `k` reads, and ``4 k + 2`` what it makes; what lies between them
    is nothing.

    Parameters
    ----------
    patterns : sequence of Pattern
        The rows of this rank, at least one step.
    reads : sequence of int
        Where the vector that each step reads starts, for one sample.
    makes : sequence of int
        The same of what it makes.
    """

    def __init__(
        self, patterns: Sequence[Pattern], reads: Sequence[int], makes: Sequence[int]
    ) -> None:
        steps = np.arange(len(patterns))
        self.n = len(patterns)
        self.patterns = list(patterns)
        self.ops = np.stack([np.ones_like(steps), 4 * steps, steps, 4 * steps + 2], axis=1)
        self.work = np.array([pattern.nnz for pattern in patterns], np.int64)
        # A stage each; the last is the one more that an inclusive scan has.
        self.levels = [("step", np.array([[k, k + 1]], np.int64)) for k in range(self.n - 1)]
        self.slots = np.empty(0, np.int64)
        self.index_bytes = 0
        wide = any(pattern.index_dtype == np.int64 for pattern in set(patterns))
        self.index_dtype = np.dtype(np.int64 if wide else np.int32)
        rows, cols = np.array([pattern.shape for pattern in patterns], np.int64).T
        first, out = np.array(reads, np.int64), np.array(makes, np.int64)
        self.offsets = np.stack([first, first + cols, out, out + rows], axis=1).reshape(-1)


class _Engine(Workspace):
    """Runs some of the steps of such a program."""

    def run_steps(self, out: NDArray[Any], first: int, last: int, threads: int) -> None:
        """Steps `first` to ``last - 1``, by so many threads at most."""
        book, stages = self._book, self._stages
        book[: Book.BATCH] = 0
        book[Book.OUT] = out.ctypes.data
        # The tables begin with the first of these stages, units are counted on.
        book[Book.FIRST_UNIT] = stages.first_unit[first:].ctypes.data
        book[Book.STAGES] = stages.stages[first:].ctypes.data
        book[Book.NEXT] = book[Book.DONE] = stages.first_unit[first]
        book[Book.STAGE_COUNT] = last - first
        book[Book.UNITS] = stages.first_unit[last]
        work(self._kernel, self._tables, min(threads, self.threads))


class Messages:
    """What a rank sends and receives before each step, on some terms.

    Parameters
    ----------
    halos : sequence of Halo
        Of all steps. Their messages take turns in the same memory.
    terms : Terms
        What the ranks have agreed on.
    """

    def __init__(self, halos: Sequence[Halo], terms: Terms) -> None:
        self._terms = terms
        self._sends: dict[Halo, list[_Message]] = {}
        self._receives: dict[Halo, list[_Message]] = {}
        for table, name in ((self._sends, "sends"), (self._receives, "receives")):
            parts = {halo: getattr(halo, name) for halo in halos}
            room = max((self._words(part) for part in parts.values()), default=0)
            buffer = np.zeros(room, np.int64)
            for halo, part in parts.items():
                table[halo] = self._cut(buffer, part)

    def of(self, halo: Halo) -> tuple[list[_Message], list[_Message]]:
        """Those that are sent, and those that are received."""
        return self._sends[halo], self._receives[halo]

    def _words(self, part: Sequence[tuple[int, Index]]) -> int:
        return sum(vector_words(length(index), self._terms) for _, index in part)

    def _cut(self, buffer: NDArray[np.int64], part: Sequence[tuple[int, Index]]) -> list[_Message]:
        found, start = [], 0
        for row, index in part:
            size = length(index)
            words = buffer[start : start + vector_words(size, self._terms)]
            found.append(_Message(row, index, words, vector_of(words, size, self._terms)))
            start += len(words)
        return found


class _Message(NamedTuple):
    """A message: to or from whom, which entries, and its words, of which these are the entries."""

    row: int
    where: Index
    words: NDArray[np.int64]
    entries: NDArray[Any]


class Rows:
    """Applies this rank's rows of some steps to gradients that are spread over the same ranks.

    Parameters
    ----------
    comm : Communicator
        In which those ranks follow each other.
    row : int
        Which of them this is.
    halos : sequence of Halo
        What it exchanges before each step.

    Attributes
    ----------
    sizes : list of int
        Entries that it owns of every gradient; empty if there are no steps.
    """

    def __init__(self, comm: Communicator, row: int, halos: Sequence[Halo]) -> None:
        self._comm = comm
        self._head = comm.rank - row
        self._halos = halos
        self.n = len(halos)
        self.sizes: list[int] = []
        self._key: Any = None
        self._workspace: _Engine | None = None
        if not halos:
            return
        patterns = [halo.pattern for halo in halos]
        self.sizes = [halos[0].own.stop - halos[0].own.start]
        self.sizes += [pattern.shape[0] for pattern in patterns]
        # Of a run's memory the first part is for vectors with entries of others.
        room = max((halo.pattern.shape[1] for halo in halos if halo.receives), default=0)
        self._starts = np.concatenate([[room], room + np.cumsum(self.sizes)]).tolist()
        reads = [0 if halo.receives else self._starts[k] for k, halo in enumerate(halos)]
        self._program = _Steps(patterns, reads, self._starts[1:-1])
        # Steps between which nothing is exchanged are run at once.
        talks = [k for k, halo in enumerate(halos) if k == 0 or halo.sends or halo.receives]
        self._runs = list(pairwise([*talks, self.n]))

    def messages(self, terms: Terms) -> Messages:
        """Memory for what is sent and received on these terms."""
        return Messages(self._halos, terms)

    def prepare(self, chain: Chain, terms: Terms) -> _Engine | None:
        """A workspace for such Jacobians; None if there is nothing to compute."""
        batched = chain.leaves[:, 1] != 0
        key = terms, batched.tobytes()
        if self._key != key and self.n:
            self._key = self._workspace = None
            if terms.samples:
                self._workspace = _Engine(
                    self._program,
                    chain.leaves,
                    terms.dtype,
                    terms.samples,
                    batched,
                    terms.local,
                    thread_count(),
                )
            self._key = key
        return self._workspace

    def sweep(
        self,
        y: NDArray[Any] | None,
        chain: Chain,
        local_grads: Any,
        messages: Messages,
        terms: Terms,
        count: int,
        steps: int,
        fault: Fault,
        *,
        stacked: bool,
    ) -> tuple[Gradients, NDArray[Any]] | None:
        """Apply the first steps; all ranks that share them call this, whatever has happened.

        Parameters
        ----------
        y : ndarray or None
            Its entries of the gradient that enters; None if there are none, since somebody failed.
        chain : Chain
            The Jacobians.
        local_grads : None or list
            What is added to each gradient.
        messages : Messages
            For these terms.
        terms : Terms
            Agreed on.
        count : int
            Gradients that are asked for.
        steps : int
            Steps to apply.
        fault : Fault
            Keeps what goes wrong.
        stacked : bool
            Whether gradients are wanted as one array, if they are of one length.

        Returns
        -------
        tuple, or None
            Its entries of the gradients, and of what leaves the last step; None if anything has
            gone wrong, here or with those that it needs.
        """
        made: list[NDArray[Any]] | None = None
        out = np.empty(0)
        if y is not None:
            with fault:
                # The engine has addresses of what lives as long as this.
                local = LocalGrads(local_grads, count, self.sizes or y.shape[-1:], terms.shape)
                out, made = self._begin(y, chain, local, terms, steps)
        for first, last in self._runs if steps else ():
            if first >= steps:
                break
            y = None if made is None else made[first]
            good = self._exchange(self._halos[first], messages, y, out, fault)
            if good and terms.samples:
                good = fault.passes(partial(self._apply, out, first, min(last, steps), terms))
            made = made if good else None
        if made is None:
            return None
        size = made[0].shape[-1]
        if not stacked or any(array.shape[-1] != size for array in made[:count]):
            return made[:count], made[-1]
        start = terms.samples * (self._starts[0] if self.n else 0)
        stack = out[start : start + count * made[0].size]
        return stack.reshape(count, *made[0].shape), made[-1]

    def _begin(
        self,
        y: NDArray[Any],
        chain: Chain,
        local: LocalGrads,
        terms: Terms,
        steps: int,
    ) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Memory of a run, and the entries of each gradient in it, of which the first are there."""
        sizes = self.sizes or [y.shape[-1]]
        starts = self._starts if self.n else [0]
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        samples = terms.samples
        out = np.empty(samples * (starts[steps] + sizes[steps]), terms.dtype)
        made = [
            out[samples * start :][: samples * size].reshape(*terms.shape, size)
            for start, size in zip(starts[: steps + 1], sizes, strict=False)
        ]
        local.add_first(y, made[0])
        workspace = self.prepare(chain, terms)
        if workspace is not None:
            workspace.local_grads[:] = 0
            local.fill(workspace.local_grads)
        return out, made

    def _exchange(
        self,
        halo: Halo,
        messages: Messages,
        y: NDArray[Any] | None,
        out: NDArray[Any],
        fault: Fault,
    ) -> bool:
        """Put together what a step reads; whether all is well, as it is not if there is no `y`."""
        sends, receives = messages.of(halo)
        good = y is not None and fault.passes(partial(_pack, y, sends))
        if sends or receives:
            for message in sends:
                message.words[0] = State.VECTOR if good else State.BAD
            self._comm.exchange(
                [(self._head + message.row, message.words) for message in sends],
                [(self._head + message.row, message.words) for message in receives],
            )
            good = good and all(message.words[0] == State.VECTOR for message in receives)
        if y is not None and good and receives:
            good = fault.passes(partial(_unpack, y, receives, halo, out))
        return good

    def _apply(self, out: NDArray[Any], first: int, last: int, terms: Terms) -> None:
        workspace = self._workspace
        assert workspace is not None
        taken = terms.samples * int(self._program.work[first:last].sum()) * _NANOSECONDS
        threads = thread_count() if taken >= RUN_GRAIN else 1
        workspace.run_steps(out, first, last, threads)


def _pack(y: NDArray[Any], sends: Sequence[_Message]) -> None:
    """Write to messages what others need."""
    for message in sends:
        message.entries[...] = y[..., message.where]


def _unpack(y: NDArray[Any], receives: Sequence[_Message], halo: Halo, out: NDArray[Any]) -> None:
    """Write what a step reads to the beginning of `out`."""
    shape = *y.shape[:-1], halo.pattern.shape[1]
    reads = out[: math.prod(shape)].reshape(shape)
    reads[..., halo.own] = y
    for message in receives:
        reads[..., message.where] = message.entries
