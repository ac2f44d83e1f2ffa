"""The cheapest choice for every node of a graph, by node and edge elimination (DeePa, section 4).

A cost is a table with an axis for each node of its scope: one for a node, two for an edge. Two
rules make a graph smaller and keep its least total (DeePa's equations 2 and 3, theorems 1 and 2):

    node elimination    t[c_u, c_v] = min_{c_w} t_uw[c_u, c_w] + t_w[c_w] + t_wv[c_w, c_v]
    edge elimination    t[c_u, c_v] = t₁[c_u, c_v] + t₂[c_u, c_v]

DeePa states the first for a node with one edge in and one edge out, and enumerates the choices of
the nodes that the rules leave. But neither directions nor two neighbours are needed: a node with
neighbours ``N`` leaves a table with ``|N|`` axes. So the same rule folds leaves, where it is
cheapest, and the core, where it is never worse than enumeration.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from ...errors import MemoryLimitError
from ...formatting import exact_bytes

Table = NDArray[np.float64]
Edge = tuple[int, int, Table]


def minimise(
    node_costs: Sequence[Table], edges: Iterable[Edge] = (), *, memory_limit: int = 1 << 30
) -> tuple[NDArray[np.int64], float]:
    """Return the choices ``g`` of all nodes that together cost least, and what they cost.

        total(g) = Σ_v node_costs[v][g(v)] + Σ_{(u, v, cost) in edges} cost[g(u), g(v)]

    Parameters
    ----------
    node_costs : sequence of ndarray, each of shape (k_v,)
        The cost of each choice of each node; ``k_v`` may differ and is at least 1. ``inf`` forbids
        a choice.
    edges : iterable of (int, int, ndarray)
        Nodes ``u`` and ``v`` and what each pair of their choices costs, of shape ``(k_u, k_v)``;
        ``inf`` forbids a pair. Edges may be parallel, opposite, or loops from a node to itself.
    memory_limit : int, optional
        Bytes that the table of a node elimination may take, 1 GiB by default.

    Returns
    -------
    choices : ndarray of int64, shape (len(node_costs),)
        The choice of every node.
    total : float
        The sum above, rounded once; ``inf`` if everything is forbidden.

    Raises
    ------
    MemoryLimitError
        If a table needs more than `memory_limit`.

    Notes
    -----
    DeePa (section 4): equation 1 is the total, its ``compute + update`` a node's cost and its
    ``xfer`` an edge's; equations 2 and 3 are the eliminations, theorems 1 and 2 their proof.

    Leaves are eliminated first, then nodes with two neighbours, then those with the least work,
    which is the number of joint choices of a node and its neighbours. With ``k`` choices for each
    of ``n`` nodes that makes ``O(n k²)`` for chains and trees, ``O(n k³)`` for series-parallel
    graphs, and ``O(n k^(w + 1))`` if no node has over ``w`` neighbours when it is eliminated.
    """
    links = list(edges)
    sizes = [len(cost) for cost in node_costs]
    # Nodes of one choice connect nothing.
    scopes = [{v for v in (u, w) if sizes[v] > 1} for u, w, _ in links]
    order = _order(sizes, scopes, memory_limit)
    rank = {node: place for place, node in enumerate(order)}
    # Tables by scope, whose axes are nodes in the order of elimination, wait at the first of them.
    waiting: list[dict[tuple[int, ...], Table]] = [{} for _ in sizes]

    def add(scope: tuple[int, ...], table: Table) -> None:
        """Add tables of one scope (equation 3)."""
        kept = [axis for axis, node in enumerate(scope) if sizes[node] > 1]
        axes = sorted(kept, key=lambda axis: rank[scope[axis]])
        if axes:
            key = tuple(scope[axis] for axis in axes)
            part = table.transpose(*axes, *(set(range(len(scope))) - set(axes)))
            part = part.reshape([sizes[node] for node in key])
            known = waiting[key[0]]
            known[key] = known[key] + part if key in known else part

    for node, cost in enumerate(node_costs):
        add((node,), cost)
    for u, v, cost in links:
        add(*(((u,), cost.diagonal()) if u == v else ((u, v), cost)))
    for node, neighbours in order.items():
        # The least sum of tables over the choices of the node (equation 2).
        scope = tuple(sorted(neighbours, key=rank.__getitem__))
        parts = [
            table.reshape([sizes[v] if v in own else 1 for v in (node, *scope)])
            for own, table in waiting[node].items()
        ]
        sums = (reduce(np.add, [part[c] for part in parts]) for c in range(sizes[node]))
        add(scope, reduce(np.minimum, sums))
    choices = np.zeros(len(sizes), np.int64)
    for node in reversed(order):
        parts = [
            table[(slice(None), *choices[list(own[1:])])] for own, table in waiting[node].items()
        ]
        choices[node] = reduce(np.add, parts).argmin()
    chosen = [cost[choice] for cost, choice in zip(node_costs, choices, strict=True)]
    return choices, math.fsum(chosen + [cost[choices[u], choices[v]] for u, v, cost in links])


def _order(
    sizes: Sequence[int], scopes: Iterable[set[int]], memory_limit: int
) -> dict[int, set[int]]:
    """Return the nodes in the order of their elimination, with the neighbours each has by then."""
    neighbours: dict[int, set[int]] = {v: set() for v, size in enumerate(sizes) if size > 1}
    for scope in scopes:
        for node in scope:
            neighbours[node] |= scope - {node}

    def claim(node: int) -> tuple[int, int, int]:
        """Return the key by which the next node is chosen: leaves first, then the least work."""
        work = math.prod(sizes[other] for other in neighbours[node]) * sizes[node]
        return min(len(neighbours[node]), 3), work, -node

    order: dict[int, set[int]] = {}
    claims = [claim(node) for node in neighbours]
    heapq.heapify(claims)
    while claims:
        first = heapq.heappop(claims)
        _, work, node = *first[:2], -first[2]
        if node not in neighbours or first != claim(node):
            continue
        near = order[node] = neighbours.pop(node)
        if 8 * work > memory_limit * sizes[node]:
            raise MemoryLimitError(
                f"memory_limit is {exact_bytes(memory_limit)}; the tables need more when node "
                f"{node} is eliminated, with {len(near)} neighbours left"
            )
        for other in near:
            neighbours[other] |= near
            neighbours[other] -= {node, other}
        for other in near:
            heapq.heappush(claims, claim(other))
    return order
