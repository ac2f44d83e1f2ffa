"""Elimination is right when no assignment of choices costs less than the one it returns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import MemoryLimitError
from sparsescan.strategies.per_layer import elimination
from sparsescan.strategies.per_layer.elimination import minimise

SEEDS = st.integers(0, 2**32 - 1)


def chain(rng, n):
    return [(v, v + 1) for v in range(n - 1)]


def tree(rng, n):
    return [(int(rng.integers(v)), v) for v in range(1, n)]


def series_parallel(rng, n):
    """Edges subdivided, or joined by a path beside them, one node at a time."""
    ends = [(0, 1)] * (n > 1)
    for w in range(2, n):
        k = int(rng.integers(len(ends)))
        u, v = ends[k]
        ends += [(u, w), (w, v)]
        if rng.random() < 0.5:
            del ends[k]
    return ends


def general(rng, n):
    """Any pairs: cycles, parallel and opposite edges, loops, nodes without an edge."""
    return rng.integers(n, size=(int(rng.integers(3 * n)), 2)).tolist() if n else []


def complete(rng, n):
    return list(itertools.combinations(range(n), 2))


FAMILIES = [chain, tree, series_parallel, general, complete]


def integer(rng, shape):
    """Return integers: sums are exact, and ties are common."""
    return rng.integers(-2, 3, shape).astype(float)


def real(rng, shape):
    return rng.standard_normal(shape)


def forbidding(rng, shape):
    return np.where(rng.random(shape) < 0.3, np.inf, integer(rng, shape))


KINDS = [integer, real, forbidding]


def random_graph(rng, family, n, most, kind):
    sizes = rng.integers(1, most + 1, n).tolist()
    nodes = [kind(rng, k) for k in sizes]
    return nodes, [(u, v, kind(rng, (sizes[u], sizes[v]))) for u, v in family(rng, n)]


def graphs(test):
    families, kinds = st.sampled_from(FAMILIES), st.sampled_from(KINDS)
    return given(families, st.integers(0, 7), st.integers(1, 4), kinds, SEEDS)(test)


def cost_of(nodes, edges, choices):
    """Return the total of an assignment; choices may be arrays that are broadcast."""
    total = sum((cost[g] for cost, g in zip(nodes, choices, strict=True)), start=np.float64(0))
    return total + sum(cost[choices[u], choices[v]] for u, v, cost in edges)


def all_costs(nodes, edges):
    """Return the cost of every assignment, an axis for each node."""
    return cost_of(nodes, edges, np.ix_(*(range(len(cost)) for cost in nodes)))


@graphs
def test_no_assignment_costs_less(family, n, most, kind, seed):
    nodes, edges = random_graph(np.random.default_rng(seed), family, n, most, kind)
    least = all_costs(nodes, edges).min()
    choices, total = minimise(nodes, edges)
    assert choices.dtype == np.int64
    assert choices.shape == (n,)
    assert type(total) is float
    terms = n + len(edges)
    atol = 0 if kind is not real else 8 * terms**2 * np.finfo(float).eps
    np.testing.assert_allclose(cost_of(nodes, edges, choices), total, rtol=0, atol=atol)
    np.testing.assert_allclose(total, least, rtol=0, atol=atol)


@graphs
def test_numbers_and_directions_do_not_matter(family, n, most, kind, seed):
    rng = np.random.default_rng(seed)
    nodes, edges = random_graph(rng, family, n, most, integer)
    total = minimise(nodes, edges)[1]
    number = rng.permutation(n).tolist()
    renamed = [nodes[number.index(v)] for v in range(n)]
    turned = [
        (number[u], number[v], cost) if rng.random() < 0.5 else (number[v], number[u], cost.T)
        for u, v, cost in edges
    ]
    rng.shuffle(turned)
    assert minimise(renamed, turned)[1] == total


@given(st.integers(1, 8), st.integers(1, 4), SEEDS)
def test_of_equally_cheap_chains_the_first_in_lexicographic_order_is_taken(n, k, seed):
    rng = np.random.default_rng(seed)
    nodes = [integer(rng, k) for _ in range(n)]
    edges = [(u, v, integer(rng, (k, k))) for u, v in chain(rng, n)]
    costs = all_costs(nodes, edges)
    first = np.unravel_index(costs.argmin(), costs.shape)
    np.testing.assert_array_equal(minimise(nodes, edges)[0], first)


@pytest.mark.parametrize(("family", "most"), [(chain, 1), (tree, 1), (series_parallel, 2)])
@given(seed=SEEDS)
def test_trees_are_folded_leaf_by_leaf_and_series_parallel_graphs_by_deepas_rules(
    family, most, seed
):
    """Whatever the numbers of choices are, even if another node would take less work."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 100, 20).tolist()
    order = elimination._order(sizes, map(set, family(rng, 20)), 1 << 30)
    assert sorted(order) == list(range(20))
    assert max(len(neighbours) for neighbours in order.values()) == most


def test_memory_limit_counts_the_largest_table():
    """A triangle leaves a table of 3 × 4 entries, then one of 3 for the last pair."""
    nodes = [np.zeros(3), np.zeros(4), np.zeros(5)]
    edges = [(u, v, np.zeros((len(nodes[u]), len(nodes[v])))) for u, v in complete(None, 3)]
    # Node 0, 1 or 2 goes first: all of them take 60 additions, so the highest number does.
    assert minimise(nodes, edges, memory_limit=8 * 3 * 4)[1] == 0
    message = r"memory_limit is 95 B; the tables need more when node 2 is eliminated, "
    with pytest.raises(MemoryLimitError, match=message):
        minimise(nodes, edges, memory_limit=95)


def test_a_graph_that_is_too_entangled_is_refused_at_once():
    nodes = [np.zeros(10)] * 100
    edges = [(u, v, np.zeros((10, 10))) for u, v in complete(None, 100)]
    with pytest.raises(MemoryLimitError, match="node 99 is eliminated, with 99 neighbours left"):
        minimise(nodes, edges)
