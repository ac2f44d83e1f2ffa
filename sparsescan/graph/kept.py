"""Choose what a forward pass keeps; the backward pass recomputes the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from .expressions import topological
from .operations import Node

# The cost of a vector that is kept as one number; others cost 1. Sums of it are exact.
_UNIFORM = 1 / 64
_Place: TypeAlias = "tuple[Node | None, int]"


def least_kept(
    forward: Sequence[Node],
    needed_back: Sequence[Node],
    outputs: Sequence[Node],
    sources: Collection[Node],
    uniform: Collection[Node] = (),
) -> list[Node]:
    """Return the fewest vectors that a forward pass has to keep for a backward pass.

    The backward pass computes everything else that it needs from these vectors. They are a minimum
    cut between the sources and what the backward pass needs: the minimum cut that leaves the fewest
    operations to the backward pass.

    Parameters
    ----------
    forward : sequence of Node
        Everything that the forward pass computes, each node after its arguments.
    needed_back : sequence of Node
        What the backward pass computes.
    outputs : sequence of Node
        Vectors that are kept in any case.
    sources : collection of Node
        Leaves that the backward pass cannot read; it can read all others.
    uniform : collection of Node
        Vectors whose numbers are all equal, so keeping them takes next to nothing.
    """
    free = {vector for vector in forward if not vector.arguments and vector not in sources}
    free.update(outputs)
    inside = [vector for vector in forward if vector not in free]
    members = set(inside)
    needed = members.intersection(topological(needed_back, is_leaf=(members | free).__contains__))
    users: dict[Node, list[Node]] = {vector: [] for vector in inside}
    for vector in inside:
        for argument in vector.arguments:
            if argument in members:
                users[argument].append(vector)
    read = [vector for vector in inside if vector in sources]
    cut = _least_cut(users, read, needed, dict.fromkeys(uniform, _UNIFORM))
    return [vector for vector in inside if vector in cut]


def _least_cut(
    users: dict[Node, list[Node]],
    sources: list[Node],
    needed: set[Node],
    costs: Mapping[Node, float],
) -> set[Node]:
    """Return the fewest nodes that all paths from sources to needed nodes go through.

    This is a maximum flow (Ford and Fulkerson, 1956). Each node is split into an entry and an exit,
    joined by an edge whose capacity is its cost, by default 1. Of all minimum cuts it returns the
    last one along the paths.
    """
    begin: _Place = (None, 0)
    end: _Place = (None, 1)
    # The residual capacity from each place to another.
    room: dict[_Place, dict[_Place, float]] = {begin: {}, end: {}}

    def connect(a: _Place, b: _Place, capacity: float) -> None:
        room.setdefault(a, {})[b] = capacity
        room.setdefault(b, {}).setdefault(a, 0)

    for vector, readers in users.items():
        connect((vector, 0), (vector, 1), costs.get(vector, 1))
        for user in readers:
            connect((vector, 1), (user, 0), math.inf)
    for vector in sources:
        connect(begin, (vector, 0), math.inf)
    for vector in needed:
        connect((vector, 1), end, math.inf)
    while True:
        way: dict[_Place, _Place] = {begin: begin}
        queue = [begin]
        for at in queue:
            for step, left in room[at].items():
                if left > 0 and step not in way:
                    way[step] = at
                    queue.append(step)
        if end not in way:
            break
        steps, at = list[tuple[_Place, _Place]](), end
        while at != begin:
            steps.append((way[at], at))
            at = way[at]
        flow = min(room[a][b] for a, b in steps)
        for a, b in steps:
            room[a][b] -= flow
            room[b][a] += flow
    # The places from which the end can still be reached.
    reach, stack = {end}, [end]
    while stack:
        at = stack.pop()
        found = [place for place in room[at] if room[place][at] > 0 and place not in reach]
        reach.update(found)
        stack += found
    return {vector for vector in users if (vector, 1) in reach and (vector, 0) not in reach}
