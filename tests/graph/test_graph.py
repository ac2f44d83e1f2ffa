"""The graph alone: gradients and slopes of random expressions, and what is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsescan.graph import functions
from sparsescan.graph.derivatives import WithSlope, gradients, with_slopes
from sparsescan.graph.expressions import evaluate, topological
from sparsescan.graph.kept import least_kept
from sparsescan.graph.operations import Node, apply, linear_map, number, symbol
from sparsescan.graph.render.numpy import function_of

UNITS = 7
INPUTS = [symbol("input", k) for k in range(3)]
UNARY = ["negative", "tanh", "sigmoid", "softplus", "sin", "cos", "absolute", "relu"]
BINARY = ["add", "subtract", "multiply", "minimum", "maximum", "arctan2"]
OTHERS: dict[str, Callable[..., Any]] = {
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "less": lambda a, b: (a < b).to(a.dtype),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}


@st.composite
def expressions(draw: st.DrawFn) -> list[Node]:
    """Draw two vectors that are computed from the inputs."""
    nodes = list(INPUTS)
    for _ in range(draw(st.integers(1, 14))):
        a, b, c = (draw(st.sampled_from(nodes)) for _ in range(3))
        kind = draw(
            st.sampled_from([*UNARY, *BINARY, "product", "exp", "log1p", "divide", "where"])
        )
        if kind == "product":
            nodes.append(linear_map(("W",), a, draw(st.booleans())))
        elif kind == "where":
            nodes.append(apply("where", a < 0.37, b, c))
        else:
            arguments = (a, b) if kind in BINARY else (a,)
            if kind == "exp":  # it does not overflow
                arguments = (apply("tanh", a),)
            elif kind == "log1p":
                arguments = (0.5 * apply("sin", a),)
            elif kind == "divide":
                arguments = a, apply("exp", apply("sin", b))
            nodes.append(apply(kind, *arguments))
    return nodes[-2:]


Rule = Callable[[Node, list[Any]], Any]


def rule_of(matrix: Any, constant: Callable[[float], Any], functions: Any) -> Rule:
    """Return a rule that computes vectors; leaves have to be there."""

    def rule(node: Node, arguments: list[Any]) -> Any:
        if node.operation == "number":
            return constant(node.details[0])
        assert arguments, f"{node} is not there"
        if node.operation == "product":
            return (matrix.T if node.details[-1] else matrix) @ arguments[0]
        return functions(node.operation)(*arguments)

    return rule


@settings(max_examples=60)
@given(expressions(), st.integers(0, 2**32 - 1), st.sampled_from([1e-15, 1.0]))
def test_derivatives_are_those_of_autograd(roots: list[Node], seed: int, scale: float) -> None:
    """In both modes, and from no more than what is kept."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((UNITS, UNITS)) / UNITS
    inputs, directions = scale * rng.standard_normal((2, len(INPUTS), UNITS))
    above = rng.standard_normal((len(roots), UNITS))

    def value(root: Node, arrays: dict[Node, Any]) -> Any:
        rule = rule_of(matrix, partial(np.full, UNITS), function_of)
        return evaluate([root], rule, arrays)[root]

    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    rule = rule_of(
        torch.tensor(matrix),
        lambda number: torch.full((UNITS,), number, dtype=torch.float64),
        lambda name: OTHERS.get(name) or getattr(torch, name),
    )
    results = evaluate(roots, rule, dict(zip(INPUTS, leaves, strict=True)))
    loss = (torch.stack([results[root] for root in roots]) * torch.tensor(above)).sum()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    arrays: dict[Node, Any] = dict(zip(INPUTS, inputs, strict=True))
    seeds = [symbol("gradient", k) for k in range(len(roots))]
    cotangents = dict(zip(seeds, above, strict=True))
    adjoints = gradients(list(zip(roots, seeds, strict=True)))
    grads = [adjoints.get(leaf, number(0)) for leaf in INPUTS]
    found = [value(grad, arrays | cotangents) for grad in grads]
    for mine, theirs in zip(found, expected, strict=True):
        atol = 1e-12 * theirs.abs().max().item()
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)

    turns = [symbol("direction", k) for k in range(len(INPUTS))]
    arrays |= dict(zip(turns, directions, strict=True))

    def with_turn(node: Node, _: Any) -> WithSlope | None:
        return (node, turns[node.details[0]]) if node.operation == "input" else None

    pairs = with_slopes(roots, with_turn)
    slopes = [0 * above[0] if slope is None else value(slope, arrays) for _, slope in pairs]
    forward, backward = above * slopes, np.array(found) * directions
    size = np.abs(forward).sum() + np.abs(backward).sum()
    assert abs(forward.sum() - backward.sum()) <= 1e-12 * size

    kept = least_kept(topological(roots), grads, roots, INPUTS)
    assert len(kept) <= len(INPUTS)
    there = {node: value(node, arrays) for node in (*kept, *roots)}
    for grad, whole in zip(grads, found, strict=True):
        np.testing.assert_allclose(value(grad, there | cotangents), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["erf", "erfc"])
@settings(max_examples=60)
@given(st.floats(-27, 27))
def test_error_functions_are_those_of_scipy(name: str, a: float) -> None:
    """By relative errors, which grow with the exponent of small numbers."""
    leaf = symbol("input", 0)
    value = getattr(functions, name)(leaf)
    rule = rule_of(None, float, function_of)
    found = evaluate([value], rule, {leaf: a})[value]
    expected = getattr(scipy.special, name)(a)
    assert abs(found - expected) <= 32 * np.finfo(float).eps * (1 + a * a) * abs(expected)


def test_what_takes_next_to_nothing_is_kept_instead_of_a_vector() -> None:
    """The output is kept in any case, and what is the same for all units is one number."""
    output, same = apply("exp", INPUTS[0]), apply("exp", INPUTS[1])
    late = apply("tanh", output - same)
    forward = topological([late])
    assert least_kept(forward, [late], [output], INPUTS) == [late]
    assert least_kept(forward, [late], [output], INPUTS, [same]) == [same]
