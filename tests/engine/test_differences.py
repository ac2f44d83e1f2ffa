"""check_grad: right gradients pass, and of wrong ones it says what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import sparsescan
from sparsescan import BatchedCSR, CSRChain, GradientError, InputError, InputTypeError, SolveStep
from sparsescan.recurrent import GRUCell

SEEDS = st.integers(0, 2**32 - 1)


class Net:
    """Layers ``tanh(W x)`` and a loss that reads every one of them, or the last one only."""

    def __init__(self, seed: int, *, square: bool = True, every: bool = False) -> None:
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 6))
        sizes = rng.integers(2, 6, n + 1)
        if square:
            sizes[:] = sizes[0]
        self.weights = [
            rng.standard_normal((rows, cols)) * (rng.random((rows, cols)) < 0.8)
            for cols, rows in itertools.pairwise(sizes)
        ]
        self.targets = [rng.standard_normal(rows) for rows in sizes[1:]]
        self.every = every
        self.batch = (None, 3)[int(rng.integers(2))]
        self.x = rng.standard_normal((self.batch, sizes[0]) if self.batch else sizes[0])

    def states(self, x: Any) -> list[Any]:
        states = [x]
        for weight in self.weights:
            states.append(np.tanh(states[-1] @ weight.T))
        return states

    def loss(self, x: Any) -> float:
        pairs = zip(self.states(x)[1:], self.targets, strict=True)
        terms = [((state - target) ** 2).sum() for state, target in pairs]
        return float(sum(terms) if self.every else terms[-1])

    def chain(self) -> tuple[Any, list[Any], list[Any] | None]:
        """Return grad, Jacobians in the order of time, not transposed, and local gradients."""
        states = self.states(self.x)
        jacobians = [
            (1 - state**2)[..., None] * weight
            for state, weight in zip(states[1:], self.weights, strict=True)
        ]
        local = [2 * (state - each) for state, each in zip(states[1:], self.targets, strict=True)]
        return (None, jacobians, local) if self.every else (local[-1], jacobians, None)


def transposed(jacobians: list[Any]) -> list[Any]:
    return [np.swapaxes(each, -1, -2) for each in jacobians]


def says(message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(GradientError, match=message):
        sparsescan.check_grad(*arguments, **options)


@given(SEEDS, st.booleans(), st.booleans())
def test_right_gradients(seed: int, square: bool, every: bool) -> None:
    net = Net(seed, square=square, every=every)
    grad, jacobians, local = net.chain()
    jacobians = transposed(jacobians)
    assert (
        sparsescan.check_grad(net.loss, net.x, grad, jacobians, local_grads=local, reverse=True)
        < 1e-6
    )
    local = None if local is None else [*local[::-1], None]
    assert sparsescan.check_grad(net.loss, net.x, grad, jacobians[::-1], local_grads=local) < 1e-6


@given(SEEDS)
def test_transposed(seed: int) -> None:
    net = Net(seed, every=seed % 2 == 0)
    grad, jacobians, local = net.chain()
    says(
        "All fits once the Jacobians are transposed",
        *(net.loss, net.x, grad, jacobians),
        local_grads=local,
        reverse=True,
    )
    k = seed % len(jacobians)
    mixed = [one if i == k else one.swapaxes(-1, -2) for i, one in enumerate(jacobians)]
    says(
        rf"All fits once jacobians\[{k}\] is transposed",
        *(net.loss, net.x, grad, mixed),
        local_grads=local,
        reverse=True,
    )


@given(SEEDS)
def test_order(seed: int) -> None:
    net = Net(seed)
    grad, jacobians, _ = net.chain()
    says(
        "All fits in the other order: pass reverse=True",
        *(net.loss, net.x, grad, transposed(jacobians)),
    )
    says("All fits transposed and in the other order", net.loss, net.x, grad, jacobians)


@given(SEEDS)
def test_a_gradient_that_counts_twice(seed: int) -> None:
    net = Net(seed, square=False, every=True)
    _, jacobians, local = net.chain()
    assert local is not None
    jacobians = transposed(jacobians)
    says(
        rf"grad and local_grads\[{len(local)}\] are added up, .* counts twice: .* grad=None",
        *(net.loss, net.x, local[-1], jacobians),
        local_grads=[None, *local],
        reverse=True,
    )
    says(
        r"grad and local_grads\[0\] are added up",
        *(net.loss, net.x, local[-1], jacobians[::-1]),
        local_grads=local[::-1],
    )


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (2.0, "It is twice what it should be"),
        (0.5, "It is half of what it should be"),
        (-1.0, "It has the other sign"),
        (16.0, "It is 16 times what it should be: a loss may be a mean"),
    ],
)
def test_factors(factor: float, message: str) -> None:
    net = Net(5)
    grad, jacobians, _ = net.chain()
    says(message, net.loss, net.x, factor * grad, transposed(jacobians), reverse=True)


def test_anything_else_that_is_wrong() -> None:
    net = Net(1)
    grad, jacobians, _ = net.chain()
    jacobians = transposed(jacobians)
    jacobians[0] = jacobians[0] + 1e-3
    says(
        "Usual causes are Jacobians at other states", net.loss, net.x, grad, jacobians, reverse=True
    )
    message = r"^the gradient is wrong: along random directions its slopes are .*, and those of fun"
    says(message, net.loss, net.x, grad, jacobians, reverse=True, directions=1)


def forms(jacobians: Any) -> dict[str, Any]:
    """Return a chain of a few square matrices in all forms."""
    csr = [sp.csr_array(np.where(each == 0, 1e-300, each)) for each in jacobians]
    data = np.stack([each.data for each in csr])
    arrays = csr[0].indices, csr[0].indptr, csr[0].shape
    return {
        "stack": np.stack(jacobians),
        "csr": csr,
        "chain": CSRChain(data, *arrays),
        "batched": [BatchedCSR(each[None], *arrays) for each in data],
        "tuple": tuple(jacobians),
    }


@pytest.mark.parametrize("form", ["stack", "csr", "chain", "batched", "tuple"])
def test_all_forms_of_chains(form: str) -> None:
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((4, 3, 3))

    def loss(x: Any) -> Any:
        x = x[0] if x.ndim == 2 else x
        for matrix in matrices:
            x = matrix @ x
        return np.exp(x / 10).sum()

    x = rng.standard_normal(3)
    last = x
    for matrix in matrices:
        last = matrix @ last
    grad = np.exp(last / 10) / 10
    given = (x[None], grad[None]) if form == "batched" else (x, grad)
    right = forms(matrices.swapaxes(1, 2)[::-1])[form]
    assert sparsescan.check_grad(loss, *given, right) < 1e-6
    says("are transposed", loss, *given, forms(matrices[::-1])[form])


def test_steps_to_solve_with_and_implicit_steps() -> None:
    rng = np.random.default_rng(0)
    matrix = np.eye(3) + rng.standard_normal((3, 3)) / 5

    def loss(x: Any) -> Any:
        return (np.linalg.solve(matrix, x) ** 3).sum()

    x = rng.standard_normal(3)
    grad = 3 * np.linalg.solve(matrix, x) ** 2
    assert sparsescan.check_grad(loss, x, grad, [SolveStep(matrix.T)]) < 1e-6
    says("Usual causes", loss, x, grad, [SolveStep(matrix)])

    cell = GRUCell(2, 3, rng=0, dtype=np.float64)
    inputs = rng.standard_normal((5, 1, 2))

    def run(state: Any) -> Any:
        return (cell.unroll(inputs, state)[-1] ** 2).sum()

    states = cell.unroll(inputs, np.zeros((1, 3)))
    steps = cell.linearize(inputs, states[:-1])
    chain = steps.implicit(reverse=True)
    assert sparsescan.check_grad(run, states[0], 2 * states[-1], chain, reverse=True) < 1e-6
    says("It is half", run, states[0], states[-1], chain, reverse=True)


def test_single_precision() -> None:
    """Of the Jacobians, and of the function: differences are then taken over longer steps."""
    net = Net(3)
    grad, jacobians, _ = net.chain()
    single = [each.astype(np.float32) for each in transposed(jacobians)]
    assert 1e-12 < sparsescan.check_grad(net.loss, net.x, grad, single, reverse=True) < 1e-4

    def loss(x: Any) -> Any:
        return np.float32(net.loss(x.astype(np.float32)))

    assert sparsescan.check_grad(loss, net.x, grad, single, reverse=True) < 1e-2
    says("are transposed", loss, net.x, grad, jacobians, reverse=True)


def test_scales_of_x() -> None:
    for scale in (1e-9, 1.0, 1e9):

        def loss(x: Any, scale: float = scale) -> Any:
            return np.sin(x / scale).sum()

        x = scale * np.array([0.3, 0.7])
        slope = np.cos(x / scale) / scale
        eye = np.eye(2)
        assert sparsescan.check_grad(loss, x, slope, [eye]) < 1e-6
        says("It is twice", loss, x, 2 * slope, [eye])


def test_equal_calls_draw_equal_directions() -> None:
    net = Net(4)
    grad, jacobians, _ = net.chain()
    seen: list[Any] = []

    def loss(x: Any) -> float:
        seen.append(x)
        return net.loss(x)

    for _ in range(2):
        sparsescan.check_grad(loss, net.x, grad, transposed(jacobians), reverse=True)
    half = len(seen) // 2
    for one, two in zip(seen[:half], seen[half:], strict=True):
        np.testing.assert_array_equal(one, two)


def fun(x: Any) -> Any:
    return (x**2).sum()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"fun": 3}, InputTypeError, "fun is 3; expected a function of x"),
        (
            {"fun": lambda x: x},
            InputError,
            r"fun returned array\(.*; expected the loss, one number",
        ),
        ({"fun": lambda x: None}, InputError, "fun returned None; expected the loss"),
        ({"fun": lambda x: np.nan}, InputError, "fun returned nan near x; expected a finite"),
        ({"x": "ab"}, InputError, "x has shape .*; expected numbers"),
        ({"x": np.ones((1, 1, 3))}, InputError, "x has shape .*; expected numbers"),
        ({"x": np.ones(4)}, InputError, r"x has shape \(4,\), but the gradient .* \(3,\)"),
        ({"step": 0}, InputError, "step is 0; expected a positive number"),
        ({"directions": 0}, InputError, "directions is 0; expected at least 1"),
        ({"reverse": 2}, InputTypeError, "reverse is 2"),
        ({"grad": np.ones(2)}, InputError, "grad has shape"),
        ({"grad": [1, 2, 3]}, InputTypeError, "grad has dtype int64"),
        ({"jacobians": np.eye(3)}, InputError, "jacobians has shape"),
        ({"local_grads": [None] * 3}, InputError, "local_grads has 3 entries"),
    ],
)
def test_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "fun": fun,
        "x": np.ones(3),
        "grad": np.full(3, 2.0),
        "jacobians": [np.eye(3)],
    }
    sparsescan.check_grad(**given)
    with pytest.raises(error, match=f"^{message}"):
        sparsescan.check_grad(**(given | changed))


def test_functions_without_a_slope() -> None:
    rng = np.random.default_rng(0)
    noises: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: x.sum() + rng.random(), "fun gives two losses for the same x"),
        (lambda x: float(np.sign(x.sum() - 3) + 1e-3 * x.sum()), "fun has no clear slope at x"),
    ]
    for noisy, message in noises:
        with pytest.raises(InputError, match=message):
            sparsescan.check_grad(noisy, np.ones(3), np.ones(3), [np.eye(3)])
