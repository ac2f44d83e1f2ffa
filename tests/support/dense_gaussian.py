"""State spaces as one Gaussian of all states and observations, by algebra that autograd reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def dense_likelihood(observations: Tensor, **model: Tensor) -> Tensor:
    """Return the log-likelihood of each series; arguments have axes of steps and series."""
    return torch.stack([_one(observations, n, model) for n in range(observations.shape[1])])


def dense_moments(observations: Tensor, **model: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return moments of filtered and predicted states, and those of smoothed states."""
    steps, series, _ = observations.shape
    size = model["observation"].shape[-1]
    filtered, smoothed = [], []
    for n in range(series):
        joint = _joint(observations, n, model)
        known = [_given(observations[:, n], last, *joint) for last in range(steps + 1)]
        means = torch.stack([mean.unflatten(0, (steps, size)) for mean, _ in known])
        blocks = torch.stack(
            [p.unflatten(1, (steps, size)).unflatten(0, (steps, size)) for _, p in known]
        )
        # Axes: how many steps are observed, the steps of two states, and their numbers.
        blocks = blocks.transpose(2, 3)
        t = torch.arange(steps)
        own = means[t + 1, t], blocks[t + 1, t, t], means[t, t], blocks[t, t, t]
        filtered.append(own)
        smoothed.append((means[-1], blocks[-1, t, t], blocks[-1, t[1:], t[:-1]]))
    return tuple(  # type: ignore[return-value]
        [torch.stack(each, 1) for each in zip(*moments, strict=True)]
        for moments in (filtered, smoothed)
    )


def _given(
    y: Tensor, last: int, mean: Tensor, covariance: Tensor, h: Tensor, d: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of all states, given the observations before `last`."""
    there = ~torch.isnan(y.detach())
    there[last:] = False
    there = there.reshape(-1)
    own = h[there]
    s = own @ covariance @ own.mT + r[there][:, there]
    gain = torch.linalg.solve(s, own @ covariance).mT
    apart = (y.reshape(-1) - d - h @ mean)[there]
    return mean + gain @ apart, covariance - gain @ own @ covariance


def _joint(observations: Tensor, n: int, model: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return mean and covariance of all states of a series, and how it is observed."""

    def at(name: str, t: int) -> Any:
        each = model.get(name)
        if each is None:
            return 0.0
        if name.startswith("initial"):
            own = each[min(n, len(each) - 1)]
        else:
            own = each[min(t, len(each) - 1), min(n, each.shape[1] - 1)]
        return (own + own.mT) / 2 if name.endswith("covariance") else own

    steps = len(observations)
    mean = observations.new_zeros(model["observation"].shape[-1]) + at("initial_mean", 0)
    none = observations.new_zeros(observations.shape[-1])
    means, offsets, covariances = [], [], [[at("initial_covariance", 0)]]
    for t in range(steps):
        means.append(mean)
        offsets.append(none + at("observation_offset", t))
        f = at("transition", t)
        mean = f @ mean + at("transition_offset", t)
        row = [f @ each for each in covariances[-1]]
        covariances.append([*row, row[-1] @ f.mT + at("transition_covariance", t)])
    rows = [
        torch.cat(
            [
                covariances[max(s, t)][min(s, t)].mT if s > t else covariances[t][s]
                for s in range(steps)
            ],
            1,
        )
        for t in range(steps)
    ]
    return (
        torch.cat(means),
        torch.cat(rows),
        torch.block_diag(*[at("observation", t) for t in range(steps)]),
        torch.cat(offsets),
        torch.block_diag(*[at("observation_covariance", t) for t in range(steps)]),
    )


def _one(observations: Tensor, n: int, model: dict[str, Tensor]) -> Tensor:
    y = observations[:, n].reshape(-1)
    if not len(y):
        return observations.sum()
    mean, covariance, h, d, r = _joint(observations, n, model)
    there = ~torch.isnan(y.detach())
    own = h[there]
    factor = torch.linalg.cholesky(own @ covariance @ own.mT + r[there][:, there])
    apart = (y - d - h @ mean)[there]
    z = torch.linalg.solve_triangular(factor, apart[:, None], upper=False)
    normal = len(apart) * math.log(2 * math.pi) / 2
    return -(z * z).sum() / 2 - factor.diagonal().log().sum() - normal
