"""Planning together: what all ranks bring, what it costs, and how parts are combined."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..containers import check_dtype
from ..errors import InputError
from ..pattern import Pattern
from ..planner import model_for
from ..schedule import check_count
from .communicator import Communicator, Fault
from .exchange import ALGORITHMS, observe
from .forecast import Forecast, Setting, forecasts
from .grid import Grid, check_grid
from .maps import Terms
from .network import load_network
from .part import MapCost, Part, PartCost
from .plan import ParallelPlan

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
    # What the plan is made for, if it insists on nothing.
    samples: int
    itemsize: int


class Options(NamedTuple):
    """Options of a plan."""

    grid: Any
    schedule: str
    batch: int | None = None
    dtype: DTypeLike | None = None


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
    position = grid.position(world.rank)
    chain = world.split(grid.group(world.rank), position, grid)

    dtype = None if wanted.dtype is None else np.dtype(wanted.dtype)
    itemsize = max(each.itemsize for each in everyone)
    model = model_for(
        None, dtype or np.dtype(f"f{itemsize}"), max(each.samples for each in everyone)
    )
    part, cost = None, None
    with fault:
        part = Part(patterns, model, wanted.batch, dtype)
        cost = part.cost(
            0 < position < grid.chain - 1 and asked.schedule != "vectors",
            grid.chain if asked.schedule == "auto" else None,
        )
    world.agree(fault.error)
    assert part is not None
    assert cost is not None
    costs = _share(world, cost)[: grid.chain]
    terms = Terms(model.dtype, model.batch, model.batch > 1, True)
    setting = Setting(costs, grid, load_network(), model, terms)
    forecast, reason = _choose(world, chain, setting, asked.schedule)
    digest = hashlib.blake2b(repr((everyone, forecast)).encode(), digest_size=8).digest()
    return ParallelPlan(
        world,
        chain,
        patterns,
        part,
        costs,
        forecast,
        reason=reason,
        batch=wanted.batch,
        dtype=dtype,
        signature=int.from_bytes(digest, "big") >> 4,
    )


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
    digest = hashlib.blake2b(digest_size=16)
    for pattern in patterns:
        digest.update(repr(pattern.key).encode())
    return _Asked(
        n=len(patterns),
        sizes=(patterns[0].shape[1], patterns[-1].shape[0]) if patterns else None,
        patterns=digest.hexdigest(),
        grid=check_grid(wanted.grid, world.size),
        schedule=wanted.schedule,
        batch=batch,
        dtype=None if dtype is None else dtype.name,
        samples=batch or samples,
        itemsize=itemsize if dtype is None else dtype.itemsize,
    )


def _check_together(everyone: Sequence[_Asked]) -> None:
    """Raise, on every rank the same, if what the ranks bring does not fit together."""
    first, grid = everyone[0], everyone[0].grid
    for rank, each in enumerate(everyone):
        for name in ("grid", "schedule", "dtype"):
            here, there = getattr(each, name), getattr(first, name)
            if here != there:
                raise InputError(
                    f"{name} is {here!r} on rank {rank}, but {there!r} on rank 0; expected one for "
                    "all"
                )
        twin = grid.position(rank)
        if each.patterns != everyone[twin].patterns or each.n != everyone[twin].n:
            raise InputError(
                f"rank {rank} has other patterns than rank {twin}; expected the same, since on a "
                f"grid of {grid.chain} × {grid.batch} both hold part {twin} of the chain"
            )
        head = rank - grid.position(rank)
        if each.batch != everyone[head].batch:
            raise InputError(
                f"batch is {each.batch} on rank {rank}, but {everyone[head].batch} on rank {head}; "
                "expected one for all ranks of a group"
            )
    before = -1
    for rank, each in enumerate(everyone[: grid.chain]):
        if each.sizes is None:
            continue
        previous = everyone[before].sizes if before >= 0 else None
        if previous is not None and each.sizes[0] != previous[1]:
            raise InputError(
                f"jacobians[0] of rank {rank} has {each.sizes[0]} columns, but the last of rank "
                f"{before} has {previous[1]} rows; expected as many: order the parts from the last "
                "layer to the first, as the Jacobians"
            )
        before = rank


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
    world: Communicator, chain: Communicator, setting: Setting, schedule: str
) -> tuple[Forecast, str]:
    """The way to combine the parts, which rank 0 decides on, and why."""
    chosen, reason = _decide(world, setting, schedule, ALGORITHMS[0])
    if chosen.schedule == "vectors":
        return chosen, reason
    # What the library does for messages of that size is looked at, once.
    words = chosen.layout.words(setting.terms)
    if words not in chain.algorithms:
        fault = Fault()
        buffers = None
        with fault:
            buffers = np.zeros((2, words), np.int64)
        world.agree(fault.error)
        assert buffers is not None
        chain.algorithms[words] = observe(chain, buffers)
    algorithm = chain.algorithms[words]
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
    if best.schedule == "vectors":
        return (
            "auto: nothing is predicted to take less"
            if len(found) > 1
            else "auto: no products could take less"
        )
    share = best.nanoseconds / found[0].nanoseconds
    return f"auto: predicted to take {share:.2f} of the time of vectors"
