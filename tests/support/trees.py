"""Random schedules, and elements that show which of them were joined."""

from __future__ import annotations

import itertools

import numpy as np
from oracles import every_schedule

from sparsescan import Schedule


def letters(n: int) -> str:
    """`n` different characters, so that an interval of elements is one substring."""
    return "".join(chr(0x4E00 + k) for k in range(n))


Runs = list[list[tuple[int, int, int]]]


def random_levels(rng: np.random.Generator, n: int) -> list[tuple[str, Runs]]:
    """Return a random tree between linear and Blelloch, level by level.

    Neighbours are joined into groups, the groups into larger ones, and so on; what is left in the
    end is scanned linearly, and each group then swept from its left end. A group is multiplied up
    in one run, or in levels of their own, whose results its sweep starts from.
    """
    up: list[tuple[str, Runs]] = []
    down: list[tuple[str, Runs]] = []
    bounds = list(range(n + 1))
    while len(bounds) > 2 and rng.random() < 0.8:
        depth = len(down)
        inner = np.array(bounds[1:-1])
        ends = [0, *inner[rng.random(len(inner)) < rng.uniform(0.2, 0.9)].tolist(), n]
        first: Runs = []
        later: list[Runs] = [[] for _ in range(n)]
        sweeps: Runs = []
        for start, stop in itertools.pairwise(ends):
            nodes = [k for k in bounds if start <= k <= stop]
            steps = [(start, mid, last) for mid, last in itertools.pairwise(nodes[1:])]
            if start == 0:
                first.append(steps)
            elif rng.random() < 0.5:
                first.append(steps)
                sweeps.append([(0, mid, last) for mid, last in itertools.pairwise(nodes[:-1])])
            else:
                for k, step in enumerate(steps):
                    later[k].append([step])
                sweeps += [[(0, start, mid)] for mid in nodes[1:-1]]
        up.append((f"up {depth}", first))
        up += [(f"up {depth}, step {k}", runs) for k, runs in enumerate(later)]
        down.append((f"down {depth}", sweeps))
        bounds = ends
    linear = [(0, mid, stop) for mid, stop in itertools.pairwise(bounds[1:])]
    # The first group of each level has made its prefixes already.
    prefixes = {(0, k) for _, runs in up for run in runs for start, _, k in run if start == 0}
    levels = [*up, ("linear", [linear]), *reversed(down)]
    return [
        (
            name,
            [[op for op in run if name[:2] == "up" or (0, op[2]) not in prefixes] for run in runs],
        )
        for name, runs in levels
    ]


def any_schedule(rng: np.random.Generator, n: int) -> Schedule:
    """Return one that has a name, or a random tree."""
    if rng.random() < 0.5:
        return Schedule.from_levels(n, random_levels(rng, n))
    named = every_schedule(n)
    return named[rng.integers(len(named))]


def products_of(schedule: Schedule) -> list[tuple[int, int]]:
    """Return all products ``[start, stop)`` that it makes."""
    ops = [op for level in schedule.levels for op in level.ops.tolist()]
    return [(start, stop) for start, _, stop in ops if start > 0]
