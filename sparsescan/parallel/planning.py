"""Planning together: what all ranks bring, what it costs, and how parts are combined."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..containers import check_dtype
from ..errors import InputError
from ..kernels._threads import thread_count, usable_cores
from ..pattern import Pattern
from ..planner import model_for
from ..schedule import check_count
from .communicator import Communicator, Fault, reads_device_memory
from .exchange import ALGORITHMS, observe
from .forecast import Forecast, Setting, forecasts
from .grid import Grid, check_grid
from .halo import even, find_halos
from .loads import Loads
from .maps import Terms
from .network import load_network
from .part import MapCost, Part, PartCost
from .plan import ParallelPlan
from .rows import Rows

__all__ = ["Options", "make_plan"]

_SCHEDULES = ("auto", "vectors", "products")


@dataclass(frozen=True)
class _Asked:
    """What a rank brings to a plan."""

    n: int
    sizes: tuple[int, int] | None
    patterns: str
    grid: Grid
    schedule: str
    batch: int | None
    dtype: str | None
    # None if it does not matter, since there are no steps.
    device: str | None
    # The machine that the rank is on, the cores that it may use there, and its threads.
    machine: str
    cores: frozenset[int]
    threads: int
    # What the plan is made for, if it insists on nothing.
    samples: int
    itemsize: int


class Options(NamedTuple):
    """Options of a plan."""

    grid: Any
    schedule: str
    batch: int | None = None
    dtype: DTypeLike | None = None
    device: str | None = None


def make_plan(
    world: Communicator,
    fault: Fault,
    patterns: Sequence[Pattern],
    wanted: Options,
    samples: int,
    itemsize: int,
) -> ParallelPlan:
    """A plan; raise on all ranks what is wrong on any, of what the caller has found too."""
    asked = None
    with fault:
        asked = _ask(world, patterns, wanted, samples, itemsize)
    world.agree(fault.error)
    assert asked is not None
    everyone: list[_Asked] = world.gather(asked)
    _check_together(everyone)
    grid = asked.grid
    group = world.split(grid.group(world.rank), world.rank, grid)

    device = _check_devices(everyone)
    dtype = None if wanted.dtype is None else np.dtype(wanted.dtype)
    itemsize = max(each.itemsize for each in everyone)
    samples = max(each.samples for each in everyone)
    known = None
    with fault:
        known = model_for(None, dtype or np.dtype(f"f{itemsize}"), samples), load_network()
    world.agree(fault.error)
    assert known is not None
    model, network = known
    terms = Terms(model.dtype, model.batch, model.batch > 1, True)
    part: Part | Rows | None = None
    cost: PartCost | None = None
    position = grid.position(world.rank)
    is_last = position == grid.chain - 1
    if grid.rows > 1:
        rows = world.split(world.rank // grid.rows, world.rank, (grid, "rows"))
        halos = find_halos(world, rows, patterns, _entering(everyone, grid, position), fault)
        loads = None
        with fault:
            part = Rows(group, rows.rank, halos)
            loads = Loads(halos, int(is_last), model, terms, network)
        world.agree(fault.error)
        assert loads is not None
        slowest = rows.maximum(loads.times)
        with fault:
            cost = loads.cost(slowest)
    else:
        with fault:
            here = model_for(device, model.dtype, model.batch)
            part = Part(patterns, here, wanted.batch, dtype, device)
            cost = part.cost(
                position > 0 and not is_last and asked.schedule != "vectors",
                grid.chain if asked.schedule == "auto" else None,
                last=is_last,
            )
    world.agree(fault.error)
    assert part is not None
    assert cost is not None
    costs = _share(world, cost)[: grid.group_size]
    setting = Setting(costs, grid, network, model, terms, _load(everyone))
    forecast, reason = _choose(world, group, setting, asked.schedule)
    digest = hashlib.blake2b(repr((everyone, forecast)).encode(), digest_size=8).digest()
    direct = device == "cuda" and world.minimum(reads_device_memory()) == 1
    made = None
    with fault:
        made = ParallelPlan(
            world,
            group,
            patterns,
            part,
            costs,
            forecast,
            reason=reason,
            batch=wanted.batch,
            dtype=dtype,
            device=device,
            sends_from_device=direct,
            signature=int.from_bytes(digest, "big") >> 4,
        )
    world.agree(fault.error)
    assert made is not None
    return made


def _ask(
    world: Communicator,
    patterns: Sequence[Pattern],
    wanted: Options,
    samples: int,
    itemsize: int,
) -> _Asked:
    """The options and the part of this rank, checked."""
    if wanted.schedule not in _SCHEDULES:
        raise InputError(
            f"schedule is {wanted.schedule!r}; expected 'auto', 'vectors' or 'products'"
        )
    batch = None if wanted.batch is None else check_count("batch", wanted.batch, 1)
    dtype = None if wanted.dtype is None else check_dtype(wanted.dtype)
    grid = check_grid(wanted.grid, world.size)
    if grid.rows > 1 and wanted.schedule == "products":
        raise InputError(
            f"schedule is 'products', but grid is {grid}; expected 'auto' or 'vectors' where ranks "
            "share the rows of steps: only gradients are spread over them"
        )
    if wanted.device not in (None, "cpu", "cuda"):
        raise InputError(f"device is {wanted.device!r}; expected None, 'cpu' or 'cuda'")
    if grid.rows > 1 and wanted.device == "cuda":
        raise InputError(
            f"device is 'cuda', but grid is {grid}; expected the CPU where ranks share the rows of "
            "steps"
        )
    digest = hashlib.blake2b(digest_size=16)
    for pattern in patterns:
        digest.update(repr(pattern.key).encode())
    return _Asked(
        n=len(patterns),
        sizes=(patterns[0].shape[1], patterns[-1].shape[0]) if patterns else None,
        patterns=digest.hexdigest(),
        grid=grid,
        schedule=wanted.schedule,
        batch=batch,
        dtype=None if dtype is None else dtype.name,
        device=wanted.device,
        machine=world.machine(),
        cores=usable_cores(),
        threads=thread_count(),
        samples=batch or samples,
        itemsize=itemsize if dtype is None else dtype.itemsize,
    )


def _load(everyone: Sequence[_Asked]) -> float:
    """Threads for each core of the machine that has most; none where GPUs do the work."""
    found: dict[str, list[_Asked]] = {}
    for each in everyone:
        if each.device != "cuda":
            found.setdefault(each.machine, []).append(each)
    return max(
        (
            sum(each.threads for each in ranks)
            / len(frozenset[int]().union(*(each.cores for each in ranks)))
            for ranks in found.values()
        ),
        default=0.0,
    )


def _check_devices(everyone: Sequence[_Asked]) -> str:
    """Where all ranks scan; or an error, on every rank the same."""
    first = None
    for rank, each in enumerate(everyone):
        if each.device is None:
            continue
        if first is not None and each.device != everyone[first].device:
            raise InputError(
                f"device is {each.device!r} on rank {rank}, but {everyone[first].device!r} on rank "
                f"{first}; expected one for all"
            )
        first = rank if first is None else first
    return "cpu" if first is None else str(everyone[first].device)


def _check_together(everyone: Sequence[_Asked]) -> None:
    """Raise, on every rank the same, if what the ranks bring does not fit together."""
    grid = everyone[0].grid
    for rank, each in enumerate(everyone):
        for name in ("grid", "schedule", "dtype"):
            here, there = getattr(each, name), getattr(everyone[0], name)
            if here != there:
                raise InputError(
                    f"{name} is {here!r} on rank {rank}, but {there!r} on rank 0; expected one for "
                    "all"
                )
        twin = rank % grid.group_size
        if each.patterns != everyone[twin].patterns or each.n != everyone[twin].n:
            raise InputError(
                f"rank {rank} has other patterns than rank {twin}; expected the same, since on a "
                f"grid of {grid} both hold part {grid.position(rank)} of the chain"
            )
        head = rank - twin
        if each.batch != everyone[head].batch:
            raise InputError(
                f"batch is {each.batch} on rank {rank}, but {everyone[head].batch} on rank {head}; "
                "expected one for all ranks of a group"
            )
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
            last = "the last of " + _ranks(before, grid.rows)
            raise InputError(
                f"jacobians[0] of rank {rank} has {sizes[0]} columns, but {last} has "
                f"{_leaving(everyone, grid, before)[-1]} rows; expected as many: order the parts "
                "from the last layer to the first, as the Jacobians"
            )
        before = rank


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1} together"


def _leaving(everyone: Sequence[_Asked], grid: Grid, head: int) -> NDArray[np.int64]:
    """Which entries the ranks that share rows own of the gradient that leaves their part."""
    made = [each.sizes[1] for each in everyone[head : head + grid.rows] if each.sizes is not None]
    return np.cumsum([0, *made])


def _entering(everyone: Sequence[_Asked], grid: Grid, position: int) -> NDArray[np.int64]:
    """The same of the gradient that enters a part: what leaves the one before, or equal shares."""
    for before in range(position - 1, -1, -1):
        if everyone[before * grid.rows].n:
            return _leaving(everyone, grid, before * grid.rows)
    sizes = everyone[position * grid.rows].sizes
    return even(0 if sizes is None else sizes[0], grid.rows)


def _share(world: Communicator, cost: PartCost) -> list[PartCost]:
    """The costs of all ranks; each pattern is sent once, however many parts have it."""
    light = replace(cost, maps={})
    mine = {form: (made.nanoseconds, made.bytes, made.pattern) for form, made in cost.maps.items()}
    named = {form: (*rest, pattern.key) for form, (*rest, pattern) in mine.items()}
    everyone: list[tuple[PartCost, dict[str, tuple[float, int, Any]]]]
    everyone = world.gather((light, named))
    patterns: dict[Any, Pattern] = {}
    for rank, (_, maps) in enumerate(everyone):
        for form, (_, _, key) in maps.items():
            if key not in patterns:
                held = mine[form][2] if rank == world.rank else None
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
    """The way to combine the parts, which rank 0 decides on, and why."""
    chosen, reason = _decide(world, setting, schedule, ALGORITHMS[0])
    if chosen.schedule == "vectors":
        return chosen, reason
    # What the library does for messages of that size is looked at, once.
    words = chosen.layout.words(setting.terms)
    if words not in group.algorithms:
        fault = Fault()
        buffers = None
        with fault:
            buffers = np.zeros((2, words), np.int64)
        world.agree(fault.error)
        assert buffers is not None
        group.algorithms[words] = observe(group, buffers)
    algorithm = group.algorithms[words]
    if algorithm == chosen.algorithm:
        return chosen, reason
    return _decide(world, setting, schedule, algorithm)


def _decide(
    world: Communicator, setting: Setting, schedule: str, algorithm: str
) -> tuple[Forecast, str]:
    """What takes least by this algorithm; rank 0 says."""
    fault = Fault()
    decided = None
    with fault:
        if world.rank == 0:
            found = forecasts(setting, algorithm, limited=schedule == "auto")
            allowed = [each for each in found if schedule in ("auto", each.schedule)] or found[:1]
            best = min(allowed, key=lambda each: each.nanoseconds)
            decided = best, _reason(best, found, schedule)
    world.agree(fault.error)
    answer: tuple[Forecast, str] = world.broadcast(decided, 0)
    return answer


def _reason(best: Forecast, found: Sequence[Forecast], schedule: str) -> str:
    if schedule != "auto":
        return "asked for" if best.schedule == schedule else f"{schedule} have nothing to combine"
    if best.grid.rows > 1:
        return "auto: the rows of steps are spread, so that there are no products"
    if best.schedule == "vectors":
        return (
            "auto: nothing is predicted to take less"
            if len(found) > 1
            else "auto: no products could take less"
        )
    share = best.nanoseconds / found[0].nanoseconds
    return f"auto: predicted to take {share:.2f} of the time of vectors"
