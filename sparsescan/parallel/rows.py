"""Sweeps over steps whose rows are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chains.chain import Chain
from ..chains.grads import LocalGrads
from ..execution.stages import RUN_GRAIN
from ..execution.threads import thread_count
from ..execution.workspace import Workspace
from ..plan.scan_plan import Gradients
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from .communicator import Communicator, Fault
from .halo import Halo, Index, length
from .maps import ScanTerms, State, vector_of, vector_words

# Nanoseconds of a multiply-add, roughly: one thread takes runs shorter than a grain.
_NANOSECONDS = 0.3


def _program(patterns: Sequence[Pattern], reads: Sequence[int], makes: Sequence[int]) -> Program:
    """Make a program whose steps are run one by one; each is a stage that reads its own vector.

    Step `k` reads gradient ``4 k`` and writes gradient ``4 k + 2``; those between them are empty.
    For one sample the vectors start at `reads` and `makes`.
    """
    n, steps = len(patterns), np.arange(len(patterns))
    rows, cols = np.array([pattern.shape for pattern in patterns], np.int64).T
    first, out = np.array(reads, np.int64), np.array(makes, np.int64)
    return Program.from_tables(
        n,
        patterns,
        ops=np.stack([np.ones_like(steps), 4 * steps, steps, 4 * steps + 2], axis=1),
        work=np.array([pattern.nnz for pattern in patterns], np.int64),
        # The last operation, the one more of an inclusive scan, is a stage without being listed.
        levels=[("step", np.array([[k, k + 1]], np.int64)) for k in range(n - 1)],
        offsets=np.stack([first, first + cols, out, out + rows], axis=1).reshape(-1),
    )


class _Message(NamedTuple):
    """A message: its other rank, which entries, and its words, with a view of the entries."""

    row: int
    where: Index
    words: NDArray[np.int64]
    entries: NDArray[Any]


class Messages:
    """The messages that a rank sends and receives before each step.

    Parameters
    ----------
    halos : sequence of Halo
        The halos of all steps. Their messages take turns in the same memory.
    terms : ScanTerms
        Terms of the scan.
    """

    def __init__(self, halos: Sequence[Halo], terms: ScanTerms) -> None:
        self.sends = _messages({halo: halo.sends for halo in halos}, terms)
        self.receives = _messages({halo: halo.receives for halo in halos}, terms)


def _messages(
    exchanges: Mapping[Halo, Sequence[tuple[int, Index]]], terms: ScanTerms
) -> dict[Halo, list[_Message]]:
    sizes = {
        halo: [vector_words(length(index), terms) for _, index in exchange]
        for halo, exchange in exchanges.items()
    }
    buffer = np.zeros(max(map(sum, sizes.values()), default=0), np.int64)
    return {
        halo: [
            _Message(row, index, words, vector_of(words, length(index), terms))
            for (row, index), words in zip(
                exchange, np.split(buffer, np.cumsum(sizes[halo])), strict=False
            )
        ]
        for halo, exchange in exchanges.items()
    }


class SweepRequest(NamedTuple):
    """A request to a :class:`RowSweep`.

    Attributes
    ----------
    chain : Chain
        The Jacobians.
    local : LocalGrads
        The local gradients, checked.
    messages : Messages
        Messages on these terms.
    terms : ScanTerms
        Terms of the scan.
    gradients : int
        Number of gradients to return.
    steps : int
        Number of steps to apply.
    stacked : bool
        Whether to return the gradients as one array, if they are of one length.
    """

    chain: Chain
    local: LocalGrads
    messages: Messages
    terms: ScanTerms
    gradients: int
    steps: int
    stacked: bool


class RowSweep:
    """Applies this rank's rows of some steps to gradients that are spread over the same ranks.

    Parameters
    ----------
    comm : Communicator
        The communicator in which those ranks are adjacent.
    row : int
        Which of them this is.
    halos : sequence of Halo
        Exchanges before each step.

    Attributes
    ----------
    halos : sequence of Halo
        Exchanges before each step.
    sizes : list of int
        Its number of entries of every gradient; empty if there are no steps.
    """

    def __init__(self, comm: Communicator, row: int, halos: Sequence[Halo]) -> None:
        self._comm = comm
        self._head = comm.rank - row
        self.halos = halos
        self.n = len(halos)
        self.sizes: list[int] = []
        self._key: Any = None
        self._workspace: Workspace | None = None
        if not halos:
            return
        patterns = [halo.pattern for halo in halos]
        self.sizes = [halos[0].own.stop - halos[0].own.start]
        self.sizes += [pattern.shape[0] for pattern in patterns]
        # The first part of a run's memory is for vectors with entries of other ranks.
        room = max((halo.pattern.shape[1] for halo in halos if halo.receives), default=0)
        self._starts = np.concatenate([[room], room + np.cumsum(self.sizes)]).tolist()
        reads = [0 if halo.receives else self._starts[k] for k, halo in enumerate(halos)]
        self._program = _program(patterns, reads, self._starts[1:-1])
        # Consecutive steps without exchanges run at once.
        firsts = [k for k, halo in enumerate(halos) if k == 0 or halo.sends or halo.receives]
        self._runs = list(pairwise([*firsts, self.n]))

    def prepare(self, chain: Chain, terms: ScanTerms) -> Workspace | None:
        """Return a workspace for such Jacobians; None if there is nothing to compute."""
        batched = chain.leaves[:, 1] != 0
        key = terms, batched.tobytes()
        if self._key != key and self.n:
            self._key = self._workspace = None
            if terms.samples:
                self._workspace = terms.workspace(
                    self._program, chain.leaves, batched, thread_count()
                )
            self._key = key
        return self._workspace

    def sweep(
        self, y: NDArray[Any] | None, request: SweepRequest, fault: Fault
    ) -> tuple[Gradients, NDArray[Any]] | None:
        """Apply the first steps. All ranks that share the steps call this, even after a failure.

        Parameters
        ----------
        y : ndarray or None
            This rank's entries of the gradient that enters; None after a failure.
        request : SweepRequest
            The steps, and the form of the result.
        fault : Fault
            Keeps an exception.

        Returns
        -------
        tuple, or None
            This rank's entries of the gradients, and of the one that leaves the last step; None if
            this rank has failed, or one whose entries it needs.
        """
        terms, count = request.terms, request.gradients
        gradients: list[NDArray[Any]] | None = None
        out = np.empty(0)
        if y is not None:
            with fault:
                out, gradients = self._begin(y, request)
        for first, last in self._runs if request.steps else ():
            if first >= request.steps:
                break
            y = None if gradients is None else gradients[first]
            good = self._exchange(self.halos[first], request.messages, y, out, fault)
            if good and terms.samples:
                stop = min(last, request.steps)
                good = fault.passes(partial(self._apply, out, first, stop, request))
            gradients = gradients if good else None
        if gradients is None:
            return None
        size = gradients[0].shape[-1]
        if not request.stacked or any(array.shape[-1] != size for array in gradients[:count]):
            return gradients[:count], gradients[-1]
        start = terms.samples * (self._starts[0] if self.n else 0)
        stack = out[start : start + count * gradients[0].size]
        return stack.reshape(count, *gradients[0].shape), gradients[-1]

    def _begin(
        self, y: NDArray[Any], request: SweepRequest
    ) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Return the memory of a run, and its gradients; the first one is filled in."""
        chain, local, terms, steps = request.chain, request.local, request.terms, request.steps
        sizes = self.sizes or [y.shape[-1]]
        starts = self._starts if self.n else [0]
        chain.convert(terms.dtype)
        local.convert(terms.dtype)
        samples = terms.samples
        out = np.empty(samples * (starts[steps] + sizes[steps]), terms.dtype)
        gradients = [
            out[samples * start :][: samples * size].reshape(*terms.shape, size)
            for start, size in zip(starts[: steps + 1], sizes, strict=False)
        ]
        local.add_first(y, gradients[0])
        workspace = self.prepare(chain, terms)
        if workspace is not None:
            workspace.local_grads[:] = 0
            local.fill(workspace.local_grads)
        return out, gradients

    def _exchange(
        self,
        halo: Halo,
        messages: Messages,
        y: NDArray[Any] | None,
        out: NDArray[Any],
        fault: Fault,
    ) -> bool:
        """Gather the vector that a step reads; return False if a rank involved has failed."""
        sends, receives = messages.sends[halo], messages.receives[halo]
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

    def _apply(self, out: NDArray[Any], first: int, last: int, request: SweepRequest) -> None:
        if self._workspace is not None:
            work = request.terms.samples * int(self._program.work[first:last].sum())
            nanoseconds = work * _NANOSECONDS
            threads = thread_count() if nanoseconds >= RUN_GRAIN else 1
            self._workspace.run_stages(out, first, last, threads, nanoseconds)


def _pack(y: NDArray[Any], sends: Sequence[_Message]) -> None:
    """Write the entries that others need to messages."""
    for message in sends:
        message.entries[...] = y[..., message.where]


def _unpack(y: NDArray[Any], receives: Sequence[_Message], halo: Halo, out: NDArray[Any]) -> None:
    """Write the vector that a step reads to the beginning of `out`."""
    shape = *y.shape[:-1], halo.pattern.shape[1]
    reads = out[: math.prod(shape)].reshape(shape)
    reads[..., halo.own] = y
    for message in receives:
        reads[..., message.where] = message.entries
