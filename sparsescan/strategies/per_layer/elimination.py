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
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MemoryLimitError
from ...formatting import exact_bytes

Table = NDArray[np.float64]
Scope = tuple[int, ...]
Edge = tuple[int, int, Table]

# Entries of a sum of tables that is made at once: 512 KiB, which a second-level cache holds.
_BLOCK = 1 << 16


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
        Bytes that the tables made by node eliminations may take together, 1 GiB by default.

    Returns
    -------
    choices : ndarray of int64, shape (len(node_costs),)
        The choice of every node.
    total : float
        The sum above, rounded once; ``inf`` if everything is forbidden.

    Raises
    ------
    MemoryLimitError
        If the tables need more than `memory_limit`.

    Notes
    -----
    DeePa (section 4): equation 1 is the total, its ``compute + update`` a node's cost and its
    ``xfer`` an edge's; equations 2 and 3 are the eliminations, theorems 1 and 2 their proof.

    Leaves are eliminated first, then nodes with two neighbours, then those with the least work,
    which is the number of joint choices of a node and its neighbours. With ``k`` choices for each
    of ``n`` nodes that makes ``O(n k²)`` for chains and trees, ``O(n k³)`` for series-parallel
    graphs, and ``O(n k^(w + 1))`` if no node has over ``w`` neighbours when it is eliminated.

    The total is the least up to the rounding of sums. Among equally cheap assignments, the one is
    returned in which each node, in reverse order of elimination, takes its lowest choice that the
    nodes before it leave optimal. Where the rule above ties, the highest number goes first: in a
    chain numbered from end to end with ``k`` choices everywhere, node 0 decides before node 1, ….
    """
    links = list(edges)
    choices = _solve(node_costs, links, memory_limit)
    chosen = [cost[choice] for cost, choice in zip(node_costs, choices, strict=True)]
    total = math.fsum(chosen + [cost[choices[u], choices[v]] for u, v, cost in links])
    return np.array(choices, np.int64), total


def _solve(costs: Sequence[Table], edges: Sequence[Edge], memory_limit: int) -> list[int]:
    sizes = [len(cost) for cost in costs]
    tables = list(_tables(costs, edges))
    order = _order(sizes, [scope for scope, _ in tables], memory_limit)
    rank = {node: place for place, node in enumerate(order)}

    # A table waits at the node of its scope that is eliminated first, which is its first axis.
    waiting: dict[int, dict[Scope, Table]] = {node: {} for node in order}
    for scope, table in tables:
        if len(scope) == 2 and rank[scope[0]] > rank[scope[1]]:
            scope, table = scope[::-1], np.ascontiguousarray(table.T)
        _eliminate_edge(waiting[scope[0]], scope, table)
    for node, neighbours in order.items():
        if neighbours:
            scope = tuple(sorted(neighbours, key=rank.__getitem__))
            table = _eliminate_node(waiting[node], (node, *scope), sizes)
            _eliminate_edge(waiting[scope[0]], scope, table)

    choices = [0] * len(sizes)
    for node in reversed(order):
        parts = []
        for scope, table in waiting[node].items():
            at: tuple[Any, ...] = (slice(None), *(choices[other] for other in scope[1:]))
            parts.append(table[at])
        choices[node] = int(reduce(np.add, parts).argmin())
    return choices


def _tables(costs: Sequence[Table], edges: Sequence[Edge]) -> Iterator[tuple[Scope, Table]]:
    """Return costs by scope, which leaves out nodes of one choice: they connect nothing."""
    for node, cost in enumerate(costs):
        if len(cost) > 1:
            yield (node,), cost
    for u, v, cost in edges:
        if u == v:
            cost = cost.diagonal()
        scope = tuple(node for node in dict.fromkeys((u, v)) if len(costs[node]) > 1)
        if scope:
            yield scope, cost.reshape([len(costs[node]) for node in scope])


def _order(sizes: Sequence[int], scopes: Iterable[Scope], memory_limit: int) -> dict[int, set[int]]:
    """Return the nodes in the order of their elimination, with the neighbours each has by then."""
    neighbours: dict[int, set[int]] = {}
    for scope in scopes:
        for node in scope:
            neighbours.setdefault(node, set()).update(scope)
    for node, near in neighbours.items():
        near.remove(node)

    def entries(node: int) -> float:
        """Return the size of the table that the node leaves, infinite if over the limit."""
        product = 1
        for other in neighbours[node]:
            product *= sizes[other]
            if 8 * product > memory_limit:
                return math.inf
        return product

    def claim(node: int) -> tuple[int, float, int]:
        """Return the key by which the next node is chosen: leaves first, then the least work."""
        return min(len(neighbours[node]), 3), entries(node) * sizes[node], -node

    order: dict[int, set[int]] = {}
    needed = 0.0
    claims = [claim(node) for node in neighbours]
    heapq.heapify(claims)
    while claims:
        first = heapq.heappop(claims)
        node = -first[2]
        if node not in neighbours or first != claim(node):
            continue
        needed += 8 * entries(node) if neighbours[node] else 0
        near = order[node] = neighbours.pop(node)
        if needed > memory_limit:
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


def _eliminate_edge(bucket: dict[Scope, Table], scope: Scope, table: Table) -> None:
    """Add tables of one scope (equation 3)."""
    bucket[scope] = bucket[scope] + table if scope in bucket else table


def _eliminate_node(bucket: dict[Scope, Table], scope: Scope, sizes: Sequence[int]) -> Table:
    """Return the least sum of the tables over the choices of the first node (equation 2)."""
    parts = [
        table.reshape([sizes[node] if node in own else 1 for node in scope])
        for own, table in bucket.items()
    ]
    out = np.empty([sizes[node] for node in scope[1:]])
    _least_sum(parts, out, sizes[scope[0]])
    return out


def _least_sum(parts: Sequence[Table], out: Table, length: int) -> None:
    """Return the minimum over the first axis of the sum, in blocks that fit a cache."""
    if out.size * length <= _BLOCK or out.size == 1:
        reduce(np.add, parts).min(axis=0, out=out)
        return
    axis = next(axis for axis, size in enumerate(out.shape) if size > 1)
    middle = out.shape[axis] // 2
    for half in slice(middle), slice(middle, None):
        block = (slice(None),) * axis + (half,)
        # An axis of length 1 stands for all of the other tables' axis.
        cut = [part[(slice(None), *block)] if part.shape[axis + 1] > 1 else part for part in parts]
        _least_sum(cut, out[block], length)
