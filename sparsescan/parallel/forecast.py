"""Forecast: predict a scan over many ranks, and the fastest way to combine parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..chains.containers import check_dtype
from ..checks import check_count
from ..errors import InputError
from ..formatting import align, format_bytes, format_time
from ..plan.choice import InputKind
from ..plan.costs.operations import Model, run_time
from ..symbolic.pattern import Pattern, PatternProducts, TooLargeError
from .exchange import ALGORITHMS, allreduce_messages, exscan_messages, rounds
from .grid import Grid, check_grid
from .loads import costs_of_shares
from .maps import Capacity, Ranges, ScanTerms, product_bytes, vector_words
from .network import Network
from .part import FORMS, Part, PartCost

# With more ranks, a search among grids would take minutes.
_MOST_RANKS = 1 << 16

# Words of the two agreements of a scan.
OPEN, CLOSE = 8, 2
# The most ranks that a forecast prints.
_MOST = 8


@dataclass(frozen=True)
class Forecast:
    """Predicted time, messages and memory of a scan, by one way to combine the parts.

    Attributes
    ----------
    grid : Grid
        How ranks share chain and batch.
    schedule : {"vectors", "products"}
        Whether gradients go from rank to rank, or parts are multiplied and MPI's exclusive scan
        combines the products.
    form : {"exact", "dense", None}
        How products are stored.
    algorithm : {"doubling", "linear", None}
        Algorithm of the exclusive scan.
    capacity : Capacity
        The largest map that messages of products can hold.
    nanoseconds : float
        The time from the first rank's start to the last rank's end.
    working, waiting : float
        Arithmetic and communication on the critical path. If a machine has more ranks than cores,
        the ranks that work at the same time share the cores.
    messages, bytes, memory : tuple of int
        For every rank, the messages and bytes that it sends, and the most bytes that it holds.
    """

    grid: Grid
    schedule: str
    form: str | None
    algorithm: str | None
    capacity: Capacity = field(repr=False)
    nanoseconds: float
    working: float
    waiting: float
    messages: tuple[int, ...] = field(repr=False)
    bytes: tuple[int, ...] = field(repr=False)
    memory: tuple[int, ...] = field(repr=False)

    def __str__(self) -> str:
        how = "" if self.form is None else f" ({self.form}, {self.algorithm} exscan)"
        rows = [["rank", "messages", "sent", "memory"]]
        columns = self.messages, self.bytes, self.memory
        for rank in range(min(self.grid.size, _MOST)):
            rows.append([f"{rank}", *_cells(*(column[rank] for column in columns))])
        if self.grid.size > _MOST:
            rows.append(["most", *_cells(*map(max, columns))])
        return "\n".join(
            [
                f"  grid: {self.grid.chain:,} parts of the chain × {self.grid.batch:,} groups of "
                "samples" + f" × {self.grid.rows:,} shares of the rows" * (self.grid.rows > 1),
                f"  parts are combined by {self.schedule}{how}",
                f"  predicted: {format_time(self.nanoseconds)}, of which "
                f"{format_time(self.waiting)} are communication",
                "  ranks, for a scan:",
                *align(rows),
            ]
        )


def _cells(messages: int, nbytes: int, memory: int) -> list[str]:
    return [f"{messages:,}", format_bytes(nbytes), format_bytes(memory)]


class Setting(NamedTuple):
    """The input of all forecasts for a chain."""

    # The costs of the ranks of a group.
    parts: Sequence[PartCost]
    grid: Grid
    network: Network
    model: Model
    terms: ScanTerms
    # Threads of all ranks of a machine for each of its cores, where they are most.
    load: float = 0.0

    def slowdown(self, share: float) -> float:
        """Return how much longer work takes while this share of the ranks does it."""
        return max(1.0, share * self.load)


def boundaries(parts: Sequence[PartCost]) -> list[int]:
    """Return the lengths of the gradients that enter each part, and leave the last one.

    Where ranks share rows, `parts` are those of one of them, and so are the lengths.
    """
    sizes = [part.sizes for part in parts if part.sizes is not None]
    size = sizes[0][0] if sizes else 0
    lengths = [size]
    for part in parts:
        size = size if part.sizes is None else part.sizes[1]
        lengths.append(size)
    return lengths


def forecasts(
    setting: Setting, algorithm: str = ALGORITHMS[0], *, limited: bool = True
) -> list[Forecast]:
    """Predict all ways to combine; if `limited`, without those whose products do not pay."""
    ways = [_by_vectors(setting)]
    if setting.grid.chain > 1 and setting.grid.rows == 1:
        inner = [part for part in setting.parts[1:-1] if part.steps]
        for form in FORMS:
            if all(form in part.maps for part in inner):
                try:
                    ways.append(_by_products(setting, form, algorithm, limited))
                except TooLargeError:
                    continue
    return ways


def _forecast(
    setting: Setting,
    schedule: str,
    *,
    form: str | None = None,
    algorithm: str | None = None,
    capacity: Capacity,
    working: float,
    waiting: float,
    members: Sequence[tuple[int, int, int]],
) -> Forecast:
    """Add up a forecast.

    `members` has for each rank of a group the messages that it sends, their bytes, and its memory
    beside that of its part.
    """
    grid, network = setting.grid, setting.network
    messages, nbytes = [], []
    for rank in range(grid.size):
        member = rank % grid.group_size
        count, size, _ = members[member]
        opening = allreduce_messages(grid.group_size, member)
        closing = allreduce_messages(grid.size, rank)
        messages.append(opening + closing + count)
        nbytes.append(8 * OPEN * opening + 8 * CLOSE * closing + size)
    held = [part.bytes + more for part, (*_, more) in zip(setting.parts, members, strict=True)]
    waiting += network.allreduce(grid.group_size, 8 * OPEN)
    waiting += network.allreduce(grid.size, 8 * CLOSE)
    return Forecast(
        grid,
        schedule,
        form,
        algorithm,
        capacity,
        working + waiting,
        working,
        waiting,
        tuple(messages),
        tuple(nbytes),
        tuple(held * grid.batch),
    )


def _by_vectors(setting: Setting) -> Forecast:
    grid, parts = setting.grid, setting.parts
    # Bytes of the messages into each part: a line for each share of the rows.
    sizes = np.array(
        [
            [8 * vector_words(size, setting.terms) for size in boundaries(parts[row :: grid.rows])]
            for row in range(grid.rows)
        ]
    )
    members = []
    for member, part in enumerate(parts):
        position, row = grid.position(member), grid.row(member)
        goes_on = int(position < grid.chain - 1)
        leaving = int(sizes[row, position + 1])
        sent = goes_on + part.messages, goes_on * leaving + part.sent
        members.append((*sent, 2 * int(sizes[row].max())))
    # Ranks that share rows take as long as the slowest of them.
    heads = parts[:: grid.rows]
    return _forecast(
        setting,
        "vectors",
        capacity=Capacity(0, 0, 0),
        working=sum(part.nanoseconds for part in heads) * setting.slowdown(1 / grid.chain),
        waiting=sum(part.waiting for part in heads)
        + sum(setting.network.message(size) for size in sizes.max(axis=0)[1:-1].tolist()),
        members=members,
    )


def _by_products(setting: Setting, form: str, algorithm: str, limited: bool) -> Forecast:
    parts, terms = setting.parts, setting.terms
    count = setting.grid.chain
    maps = [part.maps.get(form) for part in parts]
    # The first is a gradient, and the last is not used.
    patterns = [None if cost is None else cost.pattern for cost in maps]
    patterns[0] = patterns[-1] = None
    # About as many multiply-adds as the parts take together.
    work = max(sum(cost.nanoseconds for cost in maps if cost is not None), 1e6)
    ranges = Ranges(patterns, PatternProducts(work=work if limited else math.inf))
    scan = rounds(algorithm, count)
    programs = {
        merge: ranges.program(*merge) if merge.stop < count else None
        for ranks in scan
        for merges in ranks
        for merge in merges
    }
    times = {
        each: 0.0 if each is None else run_time(setting.model, each)
        for each in set(programs.values())
    }
    stored = [pattern for pattern in patterns if pattern is not None]
    composed = {merge for merge in programs if merge.start > 0 and merge.stop < count}
    stored += [p for m in composed if (p := ranges(m.start, m.stop)) is not None]
    capacity = Capacity(
        rows=max(boundaries(parts)[1:-1]),
        cols=max((pattern.shape[1] for pattern in stored), default=0),
        nnz=max((pattern.nnz for pattern in stored), default=0),
    )
    nbytes = 8 * capacity.words(terms)
    call = setting.network.call
    # In each round the slowest rank holds up the others.
    merging = sum(
        max(sum(call + times[programs[merge]] for merge in merges) for merges in ranks)
        for ranks in scan
    )
    first, *others = parts
    working = max(
        [first.nanoseconds, *(cost.nanoseconds for cost in maps[1:-1] if cost is not None)]
    )
    working += merging + max((part.nanoseconds for part in others), default=0.0)
    members = []
    for rank, cost in enumerate(maps):
        sent = exscan_messages(algorithm, count, rank)
        mine = {programs[merge] for ranks in scan for merge in ranks[rank]}
        held = sum(
            product_bytes(p, terms.dtype, setting.model.batch) for p in mine if p is not None
        )
        held += cost.bytes if cost and 0 < rank < count - 1 else 0
        members.append((sent, sent * nbytes, 4 * nbytes + held))
    return _forecast(
        setting,
        "products",
        form=form,
        algorithm=algorithm,
        capacity=capacity,
        working=working * setting.slowdown(1),
        waiting=len(scan) * setting.network.round(nbytes),
        members=members,
    )


def predict(
    patterns: Sequence[Pattern],
    grid: tuple[int, ...] | int,
    *,
    batch: int = 1,
    dtype: DTypeLike = np.float64,
    network: Network | None = None,
) -> Forecast:
    """Predict the cost of a scan by a grid of ranks, or find the best grid; this needs no MPI.

    Parameters
    ----------
    patterns : sequence of Pattern
        Patterns of all Jacobians, with all their rows, from the LAST layer to the first.
    grid : Grid, tuple of int, or int
        ``(chain, batch)`` or ``(chain, batch, rows)``; steps, samples and rows are shared equally.
        A number of ranks means the grid of this many ranks with the least predicted time.
    batch : int, default 1
        The number of samples of all groups together.
    dtype : {float32, float64}
        Dtype of the values.
    network : Network, optional
        Constants of the network; by default the measured ones, or those built in. The prediction
        assumes this machine's speed of arithmetic.

    Returns
    -------
    Forecast
        The fastest way to combine the parts, if all Jacobians differ between samples. Its `grid` is
        the grid.

    Raises
    ------
    InputError, InputTypeError
        If an option is wrong.

    Examples
    --------
    >>> from sparsescan import Pattern
    >>> from sparsescan.parallel import predict
    >>> chain = [Pattern.dense((8, 8))] * 100_000
    >>> predict(chain, (64, 1)).nanoseconds < predict(chain, (2, 1)).nanoseconds
    True
    >>> predict([Pattern.dense((20, 20))] * 100, 4, batch=64).grid
    Grid(chain=1, batch=4, rows=1)
    """
    batch, chosen = check_count("batch", batch, 1), check_dtype(dtype)
    if isinstance(grid, int):
        ranks = check_count("ranks", grid, 1, _MOST_RANKS)
        most = max((pattern.shape[0] for pattern in patterns), default=1)
        grids = [
            Grid(ranks // groups // rows, groups, rows)
            for groups in _divisors(ranks, batch)
            for rows in _divisors(ranks // groups, most)
        ]
    else:
        grids = [check_grid(grid, None)]
    constants = network or Network.load()
    # Costs of equal parts and equal steps.
    known: dict[Any, Any] = {}
    ways: list[Forecast] = []
    for each in grids:
        model = InputKind(-(-batch // each.batch), chosen).model()
        ways += forecasts(setting_of_equal_parts(patterns, each, model, constants, known))
    return min(ways, key=lambda forecast: forecast.nanoseconds)


def best_grid(patterns: Sequence[Pattern], ranks: int, **options: Any) -> Grid:
    """Return the grid of :func:`predict` for some ranks; the last release's name for it."""
    return predict(patterns, check_count("ranks", ranks, 1, _MOST_RANKS), **options).grid


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors that are not larger than `most`, and 1."""
    return [k for k in range(1, max(min(number, most), 1) + 1) if number % k == 0]


def setting_of_equal_parts(
    patterns: Sequence[Pattern], grid: Grid, model: Model, network: Network, known: dict[Any, Any]
) -> Setting:
    """Return the setting of equal parts, each planned once where several have the same patterns."""
    if not patterns:
        raise InputError("patterns is empty; expected at least one")
    terms = ScanTerms(model.dtype, model.batch, model.batch > 1, True)
    numbers: dict[Pattern, int] = {}
    steps = np.array([numbers.setdefault(pattern, len(numbers)) for pattern in patterns])
    parts: list[PartCost] = []
    for position in range(grid.chain):
        held = grid.steps(position * grid.rows, len(patterns))
        wanted, last = 0 < position < grid.chain - 1, position == grid.chain - 1
        key = grid, wanted, last, steps[held].tobytes()
        if key not in known:
            mine = patterns[held]
            if grid.rows > 1:
                known[key] = costs_of_shares(
                    mine, grid.rows, int(last), model, terms, network, known
                )
            else:
                part = Part(mine, model, model.batch, model.dtype)
                known[key] = [part.cost(wanted, grid.chain, last=last)]
        parts += known[key]
    return Setting(parts, grid, network, model, terms)
