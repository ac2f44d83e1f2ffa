"""State spaces as one Gaussian: the joint covariance of all that is observed, by autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def dense_likelihood(observations: Tensor, **model: Tensor) -> Tensor:
    """Return the log-likelihood of each series; arguments have axes of steps and series."""
    return torch.stack([_one(observations, n, model) for n in range(observations.shape[1])])


def _one(observations: Tensor, n: int, model: dict[str, Tensor]) -> Tensor:
    def at(name: str, t: int) -> Any:
        each = model.get(name)
        if each is None:
            return 0.0
        if name.startswith("initial"):
            own = each[min(n, len(each) - 1)]
        else:
            own = each[min(t, len(each) - 1), min(n, each.shape[1] - 1)]
        return (own + own.mT) / 2 if name.endswith("covariance") else own

    steps, mean, means = len(observations), at("initial_mean", 0), []
    if not isinstance(mean, Tensor):
        mean = observations.new_zeros(model["observation"].shape[-1])
    covariances = [[at("initial_covariance", 0)]]  # of a state with those before it
    for t in range(steps):
        means.append(at("observation", t) @ mean + at("observation_offset", t))
        f = at("transition", t)
        mean = f @ mean + at("transition_offset", t)
        row = [f @ each for each in covariances[-1]]
        covariances.append([*row, row[-1] @ f.mT + at("transition_covariance", t)])
    rows = []
    for t in range(steps):
        both = [
            at("observation", t)
            @ (covariances[t][s] if s <= t else covariances[s][t].mT)
            @ at("observation", s).mT
            for s in range(steps)
        ]
        both[t] = both[t] + at("observation_covariance", t)
        rows.append(torch.cat(both, 1))
    y = observations[:, n].reshape(-1)
    if not rows:
        return observations.sum()
    there = ~torch.isnan(y.detach())
    apart = (y - torch.cat(means))[there]
    factor = torch.linalg.cholesky(torch.cat(rows)[there][:, there])
    z = torch.linalg.solve_triangular(factor, apart[:, None], upper=False)
    normal = len(apart) * math.log(2 * math.pi) / 2
    return -(z * z).sum() / 2 - factor.diagonal().log().sum() - normal
