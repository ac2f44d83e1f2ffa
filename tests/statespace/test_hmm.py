"""Hidden Markov models, beside sums over all paths, and loops of logarithms."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax_doubles import double as double
from numpy.typing import NDArray
from sampling import long_run
from scipy.sparse import csr_array
from scipy.special import logsumexp
from torch import Tensor

from sparsescan import InputError, InputTypeError, Pattern
from sparsescan.jax.hmm import log_likelihood as by_jax
from sparsescan.statespace import hmm
from sparsescan.torch.hmm import log_likelihood as by_torch

Array = NDArray[Any]
Model = dict[str, Any]


def drawn(seed: int, steps: int, series: int, states: int) -> Model:
    """Return arguments with zeros, with axes that steps and series may share."""
    rng = np.random.default_rng(seed)

    def lead() -> tuple[int, int]:
        return steps if rng.random() < 0.4 else 1, series if rng.random() < 0.4 else 1

    a = rng.random((*lead(), states, states))
    model = {
        "log_emissions": rng.standard_normal((steps, series, states)),
        "initial": rng.random((lead()[1], states)),
        "transition": a * (rng.random(a.shape[2:]) < 0.8),
    }
    model["initial"] *= rng.random(states) < 0.8
    model["log_emissions"][rng.random((steps, series, states)) < 0.1] = -np.inf
    return model


def enumerated(
    log_emissions: Tensor, initial: Tensor, transition: Tensor, lengths: Any = None
) -> Tensor:
    """Return the probability of each series, and of the best path, as sums over all paths."""
    steps, series, states = log_emissions.shape
    found = []
    for n in range(series):
        length = steps if lengths is None else int(lengths[n])
        if length == 0:
            found.append(torch.ones(2).double())
            continue
        paths = torch.cartesian_prod(*[torch.arange(states)] * length).reshape(-1, length)
        product = initial[min(n, len(initial) - 1), paths[:, 0]]
        for t in range(length):
            product = product * log_emissions[t, n, paths[:, t]].exp()
            if t > 0:
                a = transition[min(t - 1, len(transition) - 1), min(n, transition.shape[1] - 1)]
                product = product * a[paths[:, t - 1], paths[:, t]]
        found.append(torch.stack([product.sum(), product.max()]))
    return torch.stack(found)


def gradients(found: Tensor, leaves: list[Tensor], weights: Tensor) -> list[Array]:
    """Return the gradients of logarithms of what is possible."""
    logs = torch.where(found > 0, found.clamp(min=1e-300).log(), 0.0)
    if not logs.requires_grad:
        return [np.zeros(each.shape) for each in leaves]
    grads = torch.autograd.grad((logs * weights).sum(), leaves, materialize_grads=True)
    return [each.numpy() for each in grads]


def close(ours: Any, right: Any, bound: float = 1e-10) -> None:
    for one, other in zip(ours, right, strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, bound, bound)


@settings(max_examples=long_run(400, 40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 4),
    series=st.integers(1, 3),
    states=st.integers(1, 3),
    has_lengths=st.booleans(),
)
@example(seed=0, steps=1, series=1, states=1, has_lengths=True)
def test_sums_over_all_paths(
    seed: int, steps: int, series: int, states: int, has_lengths: bool
) -> None:
    """Of dense and sparse matrices: log-likelihoods, gradients, posteriors and best paths."""
    model, rng = drawn(seed, steps, series, states), np.random.default_rng(seed)
    copies = {name: each.copy() for name, each in model.items()}
    leaves = {name: torch.tensor(each, requires_grad=True) for name, each in model.items()}
    lengths = rng.integers(0, steps + 1, series) if has_lengths else None
    probability, best = enumerated(**leaves, lengths=lengths).unbind(1)
    weights = torch.tensor(rng.standard_normal(series))
    right = gradients(probability, list(leaves.values()), weights)
    model["lengths"] = lengths
    with np.errstate(divide="ignore"):
        logs, paths = (np.log(each.detach().numpy()) for each in (probability, best))
    close([hmm.log_likelihood(**model), hmm.viterbi(**model).log_likelihood], [logs, paths])
    grads = hmm.log_likelihood_vjp(**model, grads=weights.numpy())
    close(grads, right)
    # Of a constant matrix SciPy's, and of any its values.
    is_there = (model["transition"] != 0).any((0, 1)) | (rng.random((states, states)) < 0.3)
    rows, columns = is_there.nonzero()
    values = model["transition"][..., rows, columns]
    sparse = {**model, "transition": values, "pattern": Pattern(csr_array(is_there))}
    close(hmm.viterbi(**sparse), hmm.viterbi(**model))
    ours = hmm.log_likelihood_vjp(**sparse, grads=weights.numpy())
    close(ours, [*right[:2], right[2][..., rows, columns]])
    if values.shape[:2] == (1, 1):
        matrix = csr_array((values[0, 0], columns, sparse["pattern"].indptr), shape=is_there.shape)
        of_matrix = hmm.log_likelihood_vjp(**model | {"transition": matrix}, grads=weights.numpy())
        close([of_matrix.transition.data], [ours.transition[0, 0]], 0)
    # Posteriors are gradients of all series alike; transitions those of a matrix of their own.
    every = np.broadcast_to(model["transition"], (len(model["transition"]), series, states, states))
    leaf = torch.tensor(every, requires_grad=True)
    probability = enumerated(leaves["log_emissions"], leaves["initial"], leaf, lengths)[:, 0]
    states_of, of_leaf = gradients(probability, [leaves["log_emissions"], leaf], torch.ones(series))
    found = hmm.posteriors(**model)
    close(found, [logs, states_of, (every * of_leaf).sum(0)])
    close(hmm.posteriors(**sparse)[2:], [found.transitions[:, rows, columns]])
    for name, each in copies.items():
        np.testing.assert_array_equal(each, model[name])


def by_logarithms(e: Array, initial: Array, a: Array) -> tuple[float, Array, float]:
    """Return log-likelihood, posteriors and the log-likelihood of the best path of a series."""
    with np.errstate(divide="ignore"):
        before, a = [np.log(initial) + e[0]], np.log(a)
    behind, best = [np.zeros(len(a))], before[0]
    for row in e[1:]:
        before.append(logsumexp(before[-1][:, None] + a, axis=0) + row)
        best = (best[:, None] + a).max(0) + row
    for row in e[:0:-1]:
        behind.append(logsumexp(a + row + behind[-1], axis=1))
    total = logsumexp(before[-1])
    with np.errstate(invalid="ignore"):  # of a series that is impossible
        posteriors = np.exp(np.array(before) + np.array(behind[::-1]) - total)
    return total, posteriors, best.max()


@settings(max_examples=long_run(300, 30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    states=st.integers(1, 40),
    spread=st.sampled_from([1, 100, 3000]),
    power=st.sampled_from([1, 300]),
)
def test_what_underflows_counts(seed: int, states: int, spread: float, power: int) -> None:
    """Of states that all but vanish, and come back, beside a loop of logarithms."""
    rng = np.random.default_rng(seed)
    e = spread * rng.standard_normal((30, states))
    initial, a = rng.random(states), rng.random((states, states)) ** power
    a[a < 1e-290] = 0
    total, right, best = by_logarithms(e, initial, a)
    model = {"log_emissions": e, "initial": initial, "transition": a}
    found = hmm.posteriors(**model)
    close([found.log_likelihood, hmm.viterbi(**model).log_likelihood], [total, best], 1e-11)
    close([found.states], [right if np.isfinite(total) else np.zeros_like(right)], 1e-9)
    single = {name: each.astype(np.float32) for name, each in model.items()}
    as_read = {name: each.astype(float) for name, each in single.items()}
    ours, wide = hmm.log_likelihood(**single), hmm.log_likelihood(**as_read)
    assert ours.dtype == np.float32
    assert ours == np.float32(wide)


def test_a_long_series() -> None:
    """Of 20,000 steps: posteriors sum to 1, and expected transitions to all but one step."""
    rng = np.random.default_rng(0)
    e, a = rng.standard_normal((20_000, 5)), rng.random((5, 5)) + 0.1
    a /= a.sum(1, keepdims=True)
    found = hmm.posteriors(e, initial=np.full(5, 0.2), transition=a)
    np.testing.assert_allclose(found.states.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(found.transitions.sum(), 19_999, rtol=1e-12)
    np.testing.assert_allclose(found.transitions.sum(1), found.states[:-1].sum(0), rtol=1e-10)
    total, _, _ = by_logarithms(e[:2000], np.full(5, 0.2), a)
    ours = hmm.log_likelihood(e[:2000], initial=np.full(5, 0.2), transition=a)
    np.testing.assert_allclose(ours, total, rtol=1e-11)


def test_impossible_series_and_nan() -> None:
    """Each alone: other series are as without them."""
    model = drawn(1, 4, 1, 3)
    model["transition"], model["initial"] = np.tri(3)[None, None] / 2, np.array([[1.0, 0, 0]])
    e = np.zeros((4, 3, 3))
    e[2, 0] = [-np.inf, 0, 0]  # of states that no path leads to
    e[1, 1, 2] = np.nan
    for door in (lambda **own: hmm.log_likelihood(**own), by_jax):
        found = door(**model | {"log_emissions": e})
        assert found[0] == -np.inf
        assert np.isnan(found[1])
        assert abs(found[2] - 3 * np.log(0.5)) < 1e-14
    grads = hmm.log_likelihood_vjp(**model | {"log_emissions": e})
    assert not grads.log_emissions[:, 0].any()
    assert np.isnan(grads.log_emissions[:, 1]).all()
    assert np.isnan(grads.transition).all()
    alone = hmm.posteriors(**model | {"log_emissions": e[:, [0, 2]]})
    assert alone.states[:, 1].tolist() == [[1, 0, 0]] * 4
    assert not alone.states[:, 0].any()
    path = hmm.viterbi(**model | {"log_emissions": e[:, [0, 2]]})
    assert path.states.T.tolist() == [[-1] * 4, [0] * 4]
    with pytest.raises(InputError, match="log_emissions has NaN"):
        hmm.viterbi(**model | {"log_emissions": e})


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps_and_no_axis_of_series(steps: int) -> None:
    e, half, a = np.zeros((steps, 2)), np.array([0.5, 0.25]), np.eye(2)
    model = {"initial": half, "transition": a}
    right = np.log(0.75) if steps else 0.0
    tensors = {name: torch.tensor(each, requires_grad=True) for name, each in model.items()}
    leaf = torch.tensor(e, requires_grad=True)
    of_torch = by_torch(leaf, **tensors)
    for found in (hmm.log_likelihood(e, **model), of_torch.detach(), by_jax(e, **model)):
        close([found], [right])
    posterior = np.array([[2 / 3, 1 / 3]] * steps).reshape(steps, 2)
    of_numpy = hmm.log_likelihood_vjp(e, **model)
    grads = torch.autograd.grad(of_torch, [leaf, *tensors.values()])
    of_jax = jax.grad(lambda e: by_jax(e, **model))(e)
    close([of_numpy.log_emissions, grads[0], of_jax], [posterior] * 3)
    assert of_numpy.transition.shape == (2, 2)
    assert not of_numpy.transition.any()
    path = hmm.viterbi(e, **model)
    assert path.states.tolist() == [0] * steps
    assert hmm.posteriors(e, **model).transitions.shape == (2, 2)


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_doors_have_derivatives_of_both_orders_and_maps(seed: int, is_sparse: bool) -> None:
    """Of probabilities that are 0, too, beside autograd of sums over all paths."""
    model = drawn(seed, 3, 2, 3)
    model["log_emissions"] = np.maximum(model["log_emissions"], -3)
    lengths = np.array([3, 2])
    rows, columns = np.tri(3, dtype=bool).nonzero() if is_sparse else (slice(None), slice(None))
    more: Model = {}
    if is_sparse:
        model["transition"] = model["transition"] * np.tri(3)
        more["pattern"] = Pattern(csr_array(np.tri(3)))
    leaves = {name: torch.tensor(each, requires_grad=True) for name, each in model.items()}
    own = dict(leaves)
    if is_sparse:
        own["transition"] = leaves["transition"][..., rows, columns]
    found = []
    counts = torch.tensor(lengths)
    for logs in (
        by_torch(**own, **more, lengths=counts),
        enumerated(**leaves, lengths=lengths)[:, 0].log(),
    ):
        first = torch.autograd.grad(logs.sum(), list(leaves.values()), create_graph=True)
        if is_sparse:
            first = (*first[:2], first[2] * torch.tensor(np.tri(3)))
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))
        if is_sparse:
            second = (*second[:2], second[2] * torch.tensor(np.tri(3)))
        found.append([logs, *first, *second])
    close(*[[each.detach().numpy() for each in one] for one in found], 1e-9)
    arrays = {name: each.detach().numpy() for name, each in own.items()}

    def loss(model: Model) -> Any:
        return by_jax(**model, **more, lengths=lengths).sum()

    grads = jax.jit(jax.grad(loss))(arrays)
    right = dict(zip(leaves, found[1][1:4], strict=True))
    right["transition"] = (
        right["transition"][..., rows, columns] if is_sparse else right["transition"]
    )
    close([grads[name] for name in arrays], [right[name].detach() for name in arrays])
    _, slope = jax.jvp(loss, (arrays,), (arrays,))
    along = sum((np.asarray(grads[name]) * arrays[name]).sum() for name in arrays)
    np.testing.assert_allclose(slope, along, rtol=1e-9)
    two = np.stack([arrays["transition"], arrays["transition"] / 2])
    mapped = jax.vmap(lambda a: by_jax(**arrays | {"transition": a}, **more, lengths=lengths))(two)
    each = [hmm.log_likelihood(**arrays | {"transition": a}, **more, lengths=lengths) for a in two]
    close([mapped], [np.stack(each)])
    plain = {name: torch.tensor(each) for name, each in arrays.items()}
    every = torch.func.vmap(lambda a: by_torch(**plain | {"transition": a}, **more, lengths=counts))
    close([every(torch.tensor(two))], [np.stack(each)])
    torch._dynamo.reset()
    whole = torch.compile(
        lambda e: by_torch(**plain | {"log_emissions": e}, lengths=counts, **more),
        fullgraph=True,
        backend="aot_eager",
    )
    if not is_sparse:
        close([whole(plain["log_emissions"])], [hmm.log_likelihood(**arrays, lengths=lengths)])


E = np.zeros((4, 2, 3))
GOOD: Model = {"initial": np.ones(3), "transition": np.eye(3)}
WRONG: dict[str, tuple[Model, type[Exception], str]] = {
    "axes": ({"log_emissions": E[0, 0]}, InputError, r"log_emissions has shape \(3,\)"),
    "states": ({"log_emissions": E[..., :0]}, InputError, r"log_emissions has shape \(4, 2, 0\)"),
    "initial": ({"initial": np.ones(2)}, InputError, r"initial has shape \(2,\); expected \(3,\)"),
    "transition": ({"transition": np.eye(2)}, InputError, r"transition has shape \(2, 2\)"),
    "steps": ({"transition": np.ones((3, 3, 3))}, InputError, "with 4 steps and 2 series"),
    "negative": ({"transition": -np.eye(3)}, InputError, "transition has -1.0; expected numbers"),
    "lengths": ({"lengths": np.array([5, 1])}, InputError, "lengths has 5; expected numbers from"),
    "few": ({"lengths": np.array([1])}, InputError, r"lengths has shape \(1,\); expected \(2,\)"),
    "floats": ({"lengths": np.ones(2)}, InputTypeError, "lengths has dtype float64; expected who"),
    "pattern": ({"pattern": np.eye(3)}, InputTypeError, "pattern is .*; expected a .*Pattern"),
    "size": ({"pattern": Pattern.dense((2, 2))}, InputError, r"pattern has shape \(2, 2\)"),
    "kind": ({"initial": np.ones(3, int)}, InputTypeError, "initial has dtype int64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    change, kind, message = WRONG[name]
    for function in (hmm.log_likelihood, hmm.log_likelihood_vjp, hmm.posteriors, hmm.viterbi):
        with pytest.raises(kind, match=message):
            function(**{"log_emissions": E, **GOOD, **change})
    if name not in ("kind", "floats"):
        with pytest.raises(kind, match=message):
            by_jax(**{"log_emissions": E, **GOOD, **change})
        tensors = {
            key: torch.tensor(each) if isinstance(each, np.ndarray) and key != "pattern" else each
            for key, each in {"log_emissions": E, **GOOD, **change}.items()
        }
        with pytest.raises(kind, match=message):
            by_torch(**tensors)


def test_errors_of_grads_and_of_lengths_that_are_no_tensor() -> None:
    with pytest.raises(InputError, match=r"grads has shape \(3,\); expected \(\) or \(2,\)"):
        hmm.log_likelihood_vjp(E, **GOOD, grads=np.ones(3))
    tensors = {name: torch.tensor(each) for name, each in GOOD.items()}
    with pytest.raises(InputTypeError, match=r"lengths is .*; expected a tensor of int32"):
        by_torch(torch.tensor(E), **tensors, lengths=torch.ones(2))
    own = {**GOOD, "transition": csr_array(np.eye(3)), "pattern": Pattern.dense((3, 3))}
    with pytest.raises(InputTypeError, match="values of the pattern"):
        hmm.log_likelihood(E, **own)
