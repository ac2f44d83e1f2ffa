"""Planning together: what each rank brings, what it costs, and how parts are combined."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chains.containers import check_dtype
from ..chains.reading import name_of
from ..checks import check_choice, check_count_or_none
from ..errors import InputError
from ..execution.threads import thread_count, usable_cores
from ..plan.choice import InputKind
from ..plan.costs.operations import Model
from ..symbolic.implicit import ImplicitPattern, Step, explicit, solved_of
from ..symbolic.pattern import Pattern
from .communicator import Communicator, reads_device_memory
from .exchange import ALGORITHMS
from .forecast import Forecast, Setting, forecasts
from .grid import Grid
from .halo import even, find_halos
from .loads import Loads
from .maps import ScanTerms
from .network import Network, observe
from .part import MapCost, Part, PartCost
from .plan import Combination, Options, ParallelPlan, Ranks
from .rows import RowSweep


@dataclass(frozen=True)
class _Asked:
    """A rank's options and the outline of its part; every rank gets a copy."""

    n: int
    sizes: tuple[int, int] | None
    patterns: str
    # Checked. The device is None without steps, since any will do.
    options: Options
    # The rank's machine, the cores that it may use there, and its threads.
    machine: str
    cores: frozenset[int]
    threads: int
    # Samples and bytes of a value to plan for.
    samples: int
    itemsize: int


class Request(NamedTuple):
    """A rank's patterns and options, with the samples and the bytes of a value to plan for."""

    patterns: Sequence[Step]
    options: Options
    samples: int
    itemsize: int


def make_plan(world: Communicator, read: Callable[[], Request]) -> ParallelPlan:
    """Make a plan from the requests of all ranks; if one is invalid, raise on all."""
    request, asked = world.together(lambda: _ask(world, read()))
    everyone: list[_Asked] = world.gather(asked)
    _check_together(everyone)
    grid, patterns = asked.options.grid, request.patterns
    options = asked.options._replace(device=_check_devices(everyone))
    group = world.split(grid.group(world.rank), world.rank, grid)
    dtype = np.dtype(options.dtype or f"f{max(each.itemsize for each in everyone)}")
    samples = max(each.samples for each in everyone)
    position = grid.position(world.rank)

    def decide(ranks: Communicator, kind: InputKind, part: Part | RowSweep | None) -> Combination:
        """Decide how these ranks, all or a group, combine their parts for input of this kind."""
        model, network = ranks.together(lambda: (kind.model(), Network.load()))
        terms = ScanTerms(model.dtype, model.batch, model.batch > 1, True)
        planned: Part | RowSweep
        if grid.rows > 1:
            entering = _entering(everyone, grid, position)
            rows = list(map(explicit, patterns))  # :func:`_ask` has refused others
            planned, cost = _plan_rows(world, group, rows, entering, options, model, terms, network)
        else:
            before = part if isinstance(part, Part) else None
            planned, cost = ranks.together(
                lambda: _plan_part(position, patterns, options, model, before)
            )
        costs = _share(ranks, cost)[: grid.group_size]
        setting = Setting(costs, grid, network, model, terms, _load(everyone))
        forecast, reason = _choose(ranks, group, setting, options.schedule)
        way = Combination(planned, costs, forecast, reason, kind)
        return ranks.together(lambda: way.prepared(position))

    way = decide(world, InputKind(samples, dtype), None)
    digest = hashlib.blake2b(repr((everyone, way.forecast)).encode(), digest_size=8).digest()
    signature = int.from_bytes(digest, "big") >> 4
    direct = options.device == "cuda" and not world.agree(flag=not reads_device_memory())
    ranks = Ranks(world, group, direct, signature)

    def settle(kind: InputKind) -> Combination:
        return decide(group, kind, way.part)

    return world.together(lambda: ParallelPlan(ranks, patterns, way, options, settle))


def _plan_part(
    position: int, patterns: Sequence[Step], options: Options, model: Model, before: Part | None
) -> tuple[Part, PartCost]:
    """Plan this rank's part of the chain; the rank holds whole steps."""
    grid, device = options.grid, options.device or "cpu"
    is_last = position == grid.chain - 1
    dtype = None if options.dtype is None else np.dtype(options.dtype)
    here = InputKind(model.batch, model.dtype, device == "cuda").model()
    if before is None:
        part = Part(patterns, here, options.batch, dtype, device)
    else:
        part = before.planned_for(here)
    cost = part.cost(
        position > 0 and not is_last and options.schedule != "vectors",
        grid.chain if options.schedule == "auto" else None,
        last=is_last,
    )
    return part, cost


def _plan_rows(
    world: Communicator,
    group: Communicator,
    patterns: Sequence[Pattern],
    entering: NDArray[np.int64],
    options: Options,
    model: Model,
    terms: ScanTerms,
    network: Network,
) -> tuple[RowSweep, PartCost]:
    """Plan this rank's rows of its steps, with the ranks that share them."""
    grid: Grid = options.grid
    sharers = world.split(world.rank // grid.rows, world.rank, (grid, "rows"))
    halos = find_halos(world, sharers, patterns, entering, options.reverse)
    skip = int(grid.position(world.rank) == grid.chain - 1)
    part, loads = world.together(
        lambda: (RowSweep(group, sharers.rank, halos), Loads(halos, skip, model, terms, network))
    )
    slowest = sharers.maximum(loads.times)
    return part, world.together(lambda: loads.cost(slowest))


def _ask(world: Communicator, request: Request) -> tuple[Request, _Asked]:
    """Check the options of this rank, and describe its part to the others."""
    patterns, options, samples, itemsize = request
    check_choice("schedule", options.schedule, "auto", "vectors", "products")
    batch = check_count_or_none("batch", options.batch, 1)
    dtype = None if options.dtype is None else check_dtype(options.dtype)
    grid = options.grid
    if grid.rows > 1 and options.schedule == "products":
        raise InputError(
            f"schedule is 'products', but grid is {grid}; expected 'auto' or 'vectors' where ranks "
            "share the rows of steps: only gradients are spread over them"
        )
    if grid.rows > 1 and options.device == "cuda":
        raise InputError(
            f"device is 'cuda', but grid is {grid}; expected the CPU where ranks share the rows of "
            "steps"
        )
    for k, pattern in enumerate(patterns):
        if grid.rows > 1 and isinstance(pattern, ImplicitPattern):
            raise InputError(
                f"{name_of(k, len(patterns), options.reverse)} is an implicit step, but grid is "
                f"{grid}; expected explicit ones where ranks share the rows of steps"
            )
        if any(solved_of(pattern)):
            raise InputError(
                f"{name_of(k, len(patterns), options.reverse)} is a step to solve with; expected "
                "steps that ranks can multiply: sparsescan.plan takes it, on one rank"
            )
    digest = hashlib.blake2b(digest_size=16)
    for pattern in patterns:
        digest.update(repr(pattern.key).encode())
    return request, _Asked(
        n=len(patterns),
        sizes=(patterns[0].shape[1], patterns[-1].shape[0]) if patterns else None,
        patterns=digest.hexdigest(),
        options=options._replace(batch=batch, dtype=None if dtype is None else dtype.name),
        machine=world.machine(),
        cores=usable_cores(),
        threads=thread_count(),
        samples=batch or samples,
        itemsize=itemsize if dtype is None else dtype.itemsize,
    )


def _load(everyone: Sequence[_Asked]) -> float:
    """Return the most threads per core of any machine; 0 if GPUs do the work."""
    machines: dict[str, list[_Asked]] = {}
    for each in everyone:
        if each.options.device != "cuda":
            machines.setdefault(each.machine, []).append(each)
    return max(
        (
            sum(each.threads for each in ranks)
            / len(frozenset[int]().union(*(each.cores for each in ranks)))
            for ranks in machines.values()
        ),
        default=0.0,
    )


def _check_devices(everyone: Sequence[_Asked]) -> str:
    """Return where all ranks scan; or raise, on every rank alike."""
    asked = [rank for rank, each in enumerate(everyone) if each.options.device is not None]
    for rank in asked:
        _check_equal(everyone, "device", rank, asked[0])
    device = everyone[asked[0]].options.device if asked else None
    return device or "cpu"


def _check_equal(
    everyone: Sequence[_Asked], name: str, rank: int, other: int, of: str = "all"
) -> None:
    """Raise if an option differs between two ranks."""
    here, there = (getattr(everyone[each].options, name) for each in (rank, other))
    if here != there:
        raise InputError(
            f"{name} is {here!r} on rank {rank}, but {there!r} on rank {other}; expected one for "
            f"{of}"
        )


def _check_together(everyone: Sequence[_Asked]) -> None:
    """Raise on every rank if options differ or parts do not chain."""
    grid = everyone[0].options.grid
    for rank, each in enumerate(everyone):
        for name in ("grid", "schedule", "dtype"):
            _check_equal(everyone, name, rank, 0)
        twin = rank % grid.group_size
        if each.patterns != everyone[twin].patterns or each.n != everyone[twin].n:
            raise InputError(
                f"rank {rank} has other patterns than rank {twin}; expected the same, since on a "
                f"grid of {grid} both hold part {grid.position(rank)} of the chain"
            )
        head = rank - twin
        _check_equal(everyone, "batch", rank, head, "all ranks of a group")
        first = rank - grid.row(rank)
        if each.n != everyone[first].n:
            raise InputError(
                f"jacobians has {each.n} steps on rank {rank}, but {everyone[first].n} on rank "
                f"{first}; expected one number for all ranks that share their rows"
            )
    before = -1
    for rank in range(0, grid.group_size, grid.rows):
        sizes = everyone[rank].sizes
        if sizes is None:
            continue
        if before >= 0 and sizes[0] != _leaving(everyone, grid, before)[-1]:
            name = name_of(0, everyone[rank].n, everyone[rank].options.reverse)
            last = "the first of " if everyone[before].options.reverse else "the last of "
            raise InputError(
                f"{name} of rank {rank} has {sizes[0]} columns, but {last}"
                f"{_ranks(before, grid.rows)} has {_leaving(everyone, grid, before)[-1]} rows; "
                "expected as many: order the parts from the last layer to the first"
            )
        before = rank


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1} together"


def _leaving(everyone: Sequence[_Asked], grid: Grid, head: int) -> NDArray[np.int64]:
    """Return the bounds of each rank's entries in the gradient that leaves its part."""
    sizes = [each.sizes[1] for each in everyone[head : head + grid.rows] if each.sizes is not None]
    return np.cumsum([0, *sizes])


def _entering(everyone: Sequence[_Asked], grid: Grid, position: int) -> NDArray[np.int64]:
    """Return the bounds of each rank's entries in the gradient that enters its part.

    They are the bounds in the gradient that leaves the part before, or of equal shares.
    """
    for before in range(position - 1, -1, -1):
        if everyone[before * grid.rows].n:
            return _leaving(everyone, grid, before * grid.rows)
    sizes = everyone[position * grid.rows].sizes
    return even(0 if sizes is None else sizes[0], grid.rows)


def _share(world: Communicator, cost: PartCost) -> list[PartCost]:
    """Return the costs of all ranks; a pattern that several parts share is sent once."""
    light = replace(cost, maps={})
    named = {
        form: (each.nanoseconds, each.bytes, each.pattern.key) for form, each in cost.maps.items()
    }
    everyone: list[tuple[PartCost, dict[str, tuple[float, int, Any]]]]
    everyone = world.gather((light, named))
    patterns: dict[Any, Pattern] = {}
    for rank, (_, maps) in enumerate(everyone):
        for form, (_, _, key) in maps.items():
            if key not in patterns:
                held = cost.maps[form].pattern if rank == world.rank else None
                patterns[key] = world.broadcast(held, rank)
    return [
        replace(
            each,
            maps={
                form: MapCost(time, nbytes, patterns[key])
                for form, (time, nbytes, key) in maps.items()
            },
        )
        for each, maps in everyone
    ]


def _choose(
    world: Communicator, group: Communicator, setting: Setting, schedule: str
) -> tuple[Forecast, str]:
    """Choose, on rank 0 for all, how to combine the parts; return the reason, too."""
    best, reason = _decide(world, setting, schedule, ALGORITHMS[0])
    if best.schedule == "vectors":
        return best, reason
    # The algorithm of the library for messages of that size is observed, once: some groups may have
    # done so when they planned alone.
    words = best.capacity.words(setting.terms)
    known = words in group.algorithms
    buffers = world.together(lambda: None if known else np.zeros((2, words), np.int64))
    if buffers is not None:
        group.algorithms[words] = observe(group, buffers)
    observed = world.broadcast(group.algorithms[words], 0)
    if observed == best.algorithm:
        return best, reason
    return _decide(world, setting, schedule, observed)


def _decide(
    world: Communicator, setting: Setting, schedule: str, algorithm: str
) -> tuple[Forecast, str]:
    """Return the fastest forecast by this algorithm, as rank 0 decides, and the reason."""

    def decide() -> tuple[Forecast, str] | None:
        if world.rank > 0:
            return None
        ways = forecasts(setting, algorithm, limited=schedule == "auto")
        allowed = [each for each in ways if schedule in ("auto", each.schedule)] or ways[:1]
        best = min(allowed, key=lambda each: each.nanoseconds)
        return best, _reason(best, ways, schedule)

    decided: tuple[Forecast, str] = world.broadcast(world.together(decide), 0)
    return decided


def _reason(best: Forecast, ways: Sequence[Forecast], schedule: str) -> str:
    if schedule != "auto":
        return "asked for" if best.schedule == schedule else f"{schedule} have nothing to combine"
    if best.grid.rows > 1:
        return "auto: the rows of steps are spread, so that there are no products"
    if best.schedule == "vectors":
        return (
            "auto: nothing is predicted to take less"
            if len(ways) > 1
            else "auto: no products could take less"
        )
    share = best.nanoseconds / ways[0].nanoseconds
    return f"auto: predicted to take {share:.2f} of the time of vectors"
