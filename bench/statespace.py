"""Log-likelihoods of state spaces and gradients, beside a jitted ``lax.scan`` and other libraries.

These are statsmodels, and hmmlearn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsescan.torch import hmm
from sparsescan.torch.statespace import log_likelihood

from . import peers, races
from .experiment import Results
from .races import JAX, OURS
from .timing import Call

Array = NDArray[Any]

ALONE, STATSMODELS = "the log-likelihood alone", "statsmodels, the log-likelihood alone"
HMMLEARN = "hmmlearn, posteriors alone"
_ROUNDING = 1e-9


def _unrolled(
    jax: Any, total: Callable[[int, dict[str, Any]], Any], model: dict[str, Any]
) -> dict[str, Call]:
    """Return jitted calls of a log-likelihood and its gradients, whose scan is unrolled or not."""

    def call(unroll: int) -> Call:
        compiled = jax.jit(jax.value_and_grad(partial(total, unroll)))

        def run() -> Any:
            with jax.enable_x64(True):
                found, grads = jax.block_until_ready(compiled(model))
            return [found, *map(grads.get, model)]

        return run

    return {f"unroll={n}": call(n) for n in (1, 4)}


@dataclass(frozen=True)
class Model:
    """A stable model with random matrices that all steps share, and its series."""

    states: int
    observed: int
    steps: int
    series: int = 1

    @property
    def name(self) -> str:
        sizes = f"{self.states} states, {self.observed} observed"
        return f"Kalman filter, {sizes}, T={self.steps:,}, B={self.series}"

    def arrays(self) -> tuple[Array, dict[str, Array]]:
        """Return the series, and the model."""
        rng = np.random.default_rng(0)
        f = rng.standard_normal((self.states, self.states))
        model = {
            "transition": 0.95 * f / np.abs(np.linalg.eigvals(f)).max(),
            "observation": rng.standard_normal((self.observed, self.states)),
            "transition_covariance": 0.3 * np.eye(self.states),
            "observation_covariance": 0.5 * np.eye(self.observed),
            "initial_covariance": np.eye(self.states),
        }
        return rng.standard_normal((self.steps, self.series, self.observed)), model

    def measure(self, quick: bool) -> Results:
        """Return the times of calls."""
        makers = {
            OURS: partial(self.ours, True),
            ALONE: partial(self.ours, False),
            JAX: self.scan,
            STATSMODELS: self.statsmodels,
        }
        return races.timed(makers, {JAX: 10, STATSMODELS: 3}, quick, self._differences, few=True)

    def _differences(self, calls: dict[str, Call]) -> dict[str, float]:
        """Compare log-likelihoods, and gradients where there are some."""
        found = {who: [np.asarray(each) for each in call()] for who, call in calls.items()}
        ours = dict(enumerate(found.pop(OURS)))
        return {
            f"{what}, {who}": each
            for who, theirs in found.items()
            for what, each in races.apart(ours, dict(enumerate(theirs)), _ROUNDING).items()
        }

    def ours(self, has_gradients: bool) -> dict[str, Call]:
        y, model = self.arrays()
        series = torch.from_numpy(y)
        own = {
            name: torch.from_numpy(each).requires_grad_(has_gradients)
            for name, each in model.items()
        }

        def call() -> Any:
            total = log_likelihood(series, **own).sum()
            grads = torch.autograd.grad(total, list(own.values())) if has_gradients else ()
            return [total.detach(), *grads]

        return peers.in_threads(call)

    def scan(self) -> dict[str, Call]:
        jax = peers.load_jax()
        jnp, (y, model) = jax.numpy, self.arrays()

        def one(y: Any, model: dict[str, Any], unroll: int) -> Any:
            f, h = model["transition"], model["observation"]
            q, r = model["transition_covariance"], model["observation_covariance"]

            def step(state: Any, y: Any) -> Any:
                mean, p = state
                hp, v = h @ p, y - h @ mean
                factor = jnp.linalg.cholesky(hp @ h.T + r)
                z = jax.scipy.linalg.solve_triangular(factor, v, lower=True)
                gain = jax.scipy.linalg.cho_solve((factor, True), hp).T
                found = -z @ z / 2 - jnp.log(jnp.diagonal(factor) * (2 * jnp.pi) ** 0.5).sum()
                return (f @ (mean + gain @ v), f @ (p - gain @ hp) @ f.T + q), found

            return jax.lax.scan(
                step, (jnp.zeros(len(f)), model["initial_covariance"]), y, unroll=unroll
            )[1].sum()

        def total(unroll: int, model: dict[str, Any]) -> Any:
            # As ours, gradients are those in symmetric parts.
            halves = {name: each / 2 for name, each in model.items() if "covariance" in name}
            model = model | {name: each + each.T for name, each in halves.items()}
            return jax.vmap(lambda y: one(y, model, unroll), 1)(y).sum()

        return _unrolled(jax, total, model)

    def statsmodels(self) -> dict[str, Call]:
        name = "statsmodels.tsa.statespace.kalman_filter"
        kind = peers.require(name, "pip install statsmodels").KalmanFilter
        y, model = self.arrays()
        f, h, q, r, p = model.values()
        filters = []
        for n in range(self.series):
            each = kind(self.observed, self.states)
            each.bind(y[:, n].copy())
            each["transition"], each["design"], each["selection"] = f, h, np.eye(self.states)
            each["state_cov"], each["obs_cov"] = q, r
            each.initialize_known(np.zeros(self.states), p)
            filters.append(each)
        return {"": lambda: [sum(each.loglike() for each in filters)]}


MODELS = [
    Model(states, observed, steps, series)
    for states, observed in ((4, 1), (12, 3))
    for steps, series in ((1_000, 1), (1_000, 64), (100_000, 1))
]


@dataclass(frozen=True)
class Hidden:
    """A hidden Markov model with dense transitions, and its emissions."""

    states: int
    steps: int

    @property
    def name(self) -> str:
        return f"Hidden Markov model, {self.states} states, T={self.steps:,}"

    def arrays(self) -> dict[str, Array]:
        """Return logarithms of emissions, and probabilities."""
        rng = np.random.default_rng(0)
        a = rng.random((self.states, self.states)) + 0.1
        return {
            "log_emissions": rng.standard_normal((self.steps, self.states)),
            "initial": np.full(self.states, 1 / self.states),
            "transition": a / a.sum(1, keepdims=True),
        }

    def measure(self, quick: bool) -> Results:
        """Return the times of calls."""
        makers = {OURS: self.ours, JAX: self.scan, HMMLEARN: self.hmmlearn}
        return races.timed(makers, {JAX: 3}, quick, self._differences, few=True)

    def _differences(self, calls: dict[str, Call]) -> dict[str, float]:
        """Compare log-likelihoods, and gradients where there are some."""
        found = {who: [np.asarray(each) for each in call()] for who, call in calls.items()}
        ours = dict(enumerate(found.pop(OURS)))
        return {
            f"{what}, {who}": each
            for who, theirs in found.items()
            for what, each in races.apart(ours, dict(enumerate(theirs)), _ROUNDING).items()
        }

    def ours(self) -> dict[str, Call]:
        own = {
            name: torch.from_numpy(each).requires_grad_() for name, each in self.arrays().items()
        }

        def call() -> Any:
            total = hmm.log_likelihood(**own)
            return [total.detach(), *torch.autograd.grad(total, list(own.values()))]

        return peers.in_threads(call)

    def scan(self) -> dict[str, Call]:
        jax = peers.load_jax()
        jnp, model = jax.numpy, self.arrays()
        logsumexp = jax.scipy.special.logsumexp

        def total(unroll: int, model: dict[str, Any]) -> Any:
            e, a = model["log_emissions"], jnp.log(model["transition"])

            def step(x: Any, e: Any) -> Any:
                return logsumexp(x[:, None] + a, axis=0) + e, None

            first = jnp.log(model["initial"]) + e[0]
            return logsumexp(jax.lax.scan(step, first, e[1:], unroll=unroll)[0])

        return _unrolled(jax, total, model)

    def hmmlearn(self) -> dict[str, Call]:
        """Return calls for log-likelihoods and posteriors, by logarithms and by scaling."""
        base = peers.require("hmmlearn.base", "pip install hmmlearn").BaseHMM
        e, initial, a = self.arrays().values()

        class Given(base):  # type: ignore[misc, valid-type]
            def _compute_log_likelihood(self, x: Any) -> Any:
                return x

            def _compute_likelihood(self, x: Any) -> Any:
                return np.exp(x)

            def _check(self) -> None:
                pass

        def call(kind: str) -> Call:
            model = Given(self.states, implementation=kind)
            model.startprob_, model.transmat_ = initial, a
            return lambda: list(model.score_samples(e))

        return {kind: call(kind) for kind in ("log", "scaling")}


HIDDEN = [Hidden(states, 100_000) for states in (8, 32)]
