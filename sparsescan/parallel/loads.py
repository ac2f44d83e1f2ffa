"""Loads: the work of a step on the ranks that share its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..execution.threads import thread_count
from ..execution.workspace import table_bytes
from ..plan.costs.operations import Model
from ..symbolic.pattern import Pattern
from .halo import Halo, even, length, reach_of, take_rows
from .maps import ScanTerms, vector_words
from .network import Network
from .part import NO_STEPS, PartCost, step_time

# Beyond this number equal steps do not fit in a cache, so that more of them take no longer each.
_MANY = 1000


class Load(NamedTuple):
    """Work of one rank in a step; or arrays of it, for some steps or ranks.

    Attributes
    ----------
    rows, cols, nnz : int
        Size of its pattern, with the columns that it reads.
    index_bytes : int
        Bytes of index arrays, of the pattern and of messages, at most.
    messages, sent, received : int
        Messages that it sends, their bytes, and the bytes of those that it receives.
    """

    rows: Any
    cols: Any
    nnz: Any
    index_bytes: Any
    messages: Any
    sent: Any
    received: Any


def load_of(halo: Halo, terms: ScanTerms) -> Load:
    """Return the load of one step on this rank."""
    needed, read = (
        np.array([length(index) for _, index in part], np.int64)
        for part in (halo.sends, halo.receives)
    )
    pattern = halo.pattern
    return Load(
        *pattern.shape,
        pattern.nnz,
        _index_bytes(pattern) + 8 * int(needed.sum()),
        len(halo.sends),
        int(_bytes(needed, terms).sum()),
        int(_bytes(read, terms).sum()),
    )


def _bytes(counts: NDArray[np.int64], terms: ScanTerms) -> NDArray[np.int64]:
    """Return the bytes of messages with so many entries."""
    words: NDArray[np.int64] = 8 * vector_words(counts, terms)
    return words


def _index_bytes(pattern: Pattern) -> int:
    if pattern.kind != "general":
        return 0
    return pattern.index_dtype.itemsize * (pattern.nnz + pattern.shape[0] + 1)


def _apply_time(pattern: Pattern, count: int, model: Model, known: dict[Any, Any]) -> float:
    """Return the nanoseconds of one of so many steps, each run on its own.

    They depend on the kind and size of the pattern only.
    """
    count = min(count, _MANY)
    key = "apply", model.batch, model.dtype, pattern.kind, pattern.shape, pattern.nnz, count
    if key not in known:
        known[key] = sum(step_time(model, pattern, count))
    nanoseconds: float = known[key]
    return nanoseconds


def _cost(
    loads: Load,
    counts: NDArray[np.int64],
    applied: NDArray[np.int64],
    entering: int,
    leaving: int,
    times: tuple[float, float],
    model: Model,
) -> PartCost:
    """Return what a rank's rows take.

    `loads` are those of different steps; `counts` says how often each step comes, and `applied` how
    often it is applied. `times` are those of the slowest rank in each step: to apply it, and to
    send the entries that others need.
    """
    steps = int(counts.sum())
    entries = int(counts @ loads.nnz) + entering + int(counts @ loads.rows) + int(loads.cols.max())
    if model.batch > 2:
        # Eight samples side by side.
        entries += thread_count() * 8 * int(loads.cols.max()) // model.batch
    nbytes = model.batch * model.dtype.itemsize * entries + table_bytes(steps, 0)
    nbytes += int(loads.sent.max() + loads.received.max() + loads.index_bytes.sum())
    return PartCost(
        steps=steps,
        sizes=(entering, leaving),
        nnz=int(counts @ loads.nnz),
        nanoseconds=times[0],
        bytes=nbytes,
        maps={},
        waiting=times[1],
        messages=int(applied @ loads.messages),
        sent=int(applied @ loads.sent),
    )


class Loads:
    """The loads of this rank's rows, where an exclusive scan does not apply the last `skip` steps.

    Attributes
    ----------
    times : list of int
        Nanoseconds to apply each of the others, and then to send the entries for each.
    """

    def __init__(
        self, halos: Sequence[Halo], skip: int, model: Model, terms: ScanTerms, network: Network
    ) -> None:
        self._halos, self._model = halos, model
        self._last = max(len(halos) - skip, 0)
        self._counts = Counter(halos)
        self._own = {halo: load_of(halo, terms) for halo in self._counts}
        known: dict[Any, Any] = {}
        taken = {
            halo: _apply_time(halo.pattern, count, model, known)
            for halo, count in self._counts.items()
        }
        sending = {halo: _sending(load, network) for halo, load in self._own.items()}
        self.times = [
            round(table[halo]) for table in (taken, sending) for halo in halos[: self._last]
        ]

    def cost(self, slowest: Sequence[int]) -> PartCost:
        """Return what the rows take, if the slowest rank that shares the steps has these times."""
        halos, last = self._halos, self._last
        if not halos:
            return NO_STEPS
        applied = Counter(halos[:last])
        return _cost(
            Load(*np.array(list(self._own.values())).T),
            np.array(list(self._counts.values())),
            np.array([applied[halo] for halo in self._counts]),
            length(halos[0].own),
            halos[-1].pattern.shape[0],
            (float(sum(slowest[:last])), float(sum(slowest[last:]))),
            self._model,
        )


def _sending(load: Load, network: Network) -> Any:
    return network.latency * load.messages + network.inverse_bandwidth * load.sent


def costs_of_shares(
    patterns: Sequence[Pattern],
    rows: int,
    skip: int,
    model: Model,
    terms: ScanTerms,
    network: Network,
    known: dict[Any, Any],
) -> list[PartCost]:
    """Return what all ranks take, if each has an equal share of the rows of every step."""
    if not patterns:
        return [NO_STEPS] * rows
    counts = Counter(patterns)
    applied = Counter(patterns[: len(patterns) - skip])
    shares = [_shares(pattern, rows, terms, known) for pattern in counts]
    working = waiting = 0.0
    for (pattern, count), (parts, loads) in zip(counts.items(), shares, strict=True):
        working += applied[pattern] * max(_apply_time(part, count, model, known) for part in parts)
        waiting += applied[pattern] * float(_sending(loads, network).max())
    entering, leaving = even(patterns[0].shape[1], rows), even(patterns[-1].shape[0], rows)
    table = np.array([loads for _, loads in shares])
    return [
        _cost(
            Load(*table[:, :, row].T),
            np.array(list(counts.values())),
            np.array([applied[pattern] for pattern in counts]),
            int(entering[row + 1] - entering[row]),
            int(leaving[row + 1] - leaving[row]),
            (working, waiting),
            model,
        )
        for row in range(rows)
    ]


def _shares(
    pattern: Pattern, rows: int, terms: ScanTerms, known: dict[Any, Any]
) -> tuple[set[Pattern], Load]:
    """Return the patterns of equal shares of the rows of a step, and the loads of all ranks."""
    key = "shares", pattern.key, rows, terms
    if key in known:
        shares: tuple[set[Pattern], Load] = known[key]
        return shares
    owned, cuts = even(pattern.shape[1], rows), even(pattern.shape[0], rows)
    loads = Load(*np.zeros((len(Load._fields), rows), np.int64))
    parts = set()
    for row in range(rows):
        reach = reach_of(take_rows(pattern, cuts[row], cuts[row + 1]), owned, row)
        parts.add(reach.pattern)
        for array, value in zip(loads, [*reach.pattern.shape, reach.pattern.nnz], strict=False):
            array[row] = value
        loads.index_bytes[row] += _index_bytes(reach.pattern)
        counts = np.diff(reach.ends)
        counts[row] = 0
        others = np.flatnonzero(counts)
        sizes = _bytes(counts[others], terms)
        loads.received[row] = sizes.sum()
        loads.messages[others] += 1
        loads.sent[others] += sizes
        loads.index_bytes[others] += 8 * counts[others]
    known[key] = parts, loads
    return parts, loads
