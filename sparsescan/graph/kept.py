"""What is kept of a forward pass for a backward pass, which computes the rest again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

from .expressions import topological
from .operations import Node

_Place: TypeAlias = "tuple[Node | None, int]"


def least_kept(
    forward: Sequence[Node],
    needed_back: Sequence[Node],
    outputs: Sequence[Node],
    sources: Collection[Node],
) -> list[Node]:
    """Return the fewest vectors to keep, from which a backward pass computes what it needs.

    They are a least cut between sources and what the backward pass needs. Of all least cuts it is
    the one that leaves fewest operations to that pass.

    Parameters
    ----------
    forward : sequence of Node
        All that the forward pass computes, each behind its arguments.
    needed_back : sequence of Node
        What the backward pass computes.
    outputs : sequence of Node
        What is kept anyway.
    sources : collection of Node
        Leaves that the backward pass cannot read. It reads all others.
    """
    free = {each for each in forward if not each.arguments and each not in sources}
    free.update(outputs)
    inside = [each for each in forward if each not in free]
    members = set(inside)
    needed = members.intersection(topological(needed_back, is_leaf=(members | free).__contains__))
    users: dict[Node, list[Node]] = {each: [] for each in inside}
    for each in inside:
        for argument in each.arguments:
            if argument in members:
                users[argument].append(each)
    cut = _least_cut(users, [each for each in inside if each in sources], needed)
    return [each for each in inside if each in cut]


def _least_cut(users: dict[Node, list[Node]], sources: list[Node], needed: set[Node]) -> set[Node]:
    """Return the fewest nodes that all ways from some to others lead through, the last there are.

    By flow: each node takes one unit, and is two places, before and behind it.
    """
    begin: _Place = (None, 0)
    end: _Place = (None, 1)
    room: dict[_Place, dict[_Place, float]] = {begin: {}, end: {}}

    def connect(a: _Place, b: _Place, capacity: float) -> None:
        room.setdefault(a, {})[b] = capacity
        room.setdefault(b, {}).setdefault(a, 0)

    for each, readers in users.items():
        connect((each, 0), (each, 1), 1)
        for user in readers:
            connect((each, 1), (user, 0), math.inf)
    for each in sources:
        connect(begin, (each, 0), math.inf)
    for each in needed:
        connect((each, 1), end, math.inf)
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
        at = end
        while at != begin:
            room[way[at]][at] -= 1
            room[at][way[at]] += 1
            at = way[at]
    # From where the end can still be reached.
    reach, stack = {end}, [end]
    while stack:
        at = stack.pop()
        found = [place for place in room[at] if room[place][at] > 0 and place not in reach]
        reach.update(found)
        stack += found
    return {each for each in users if (each, 1) in reach and (each, 0) not in reach}
