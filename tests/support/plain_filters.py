"""Recursive filters step by step, by PyTorch's own operations, which autograd differentiates."""

from __future__ import annotations

import torch
from torch import Tensor


def stacked(y: list[Tensor], like: Tensor) -> Tensor:
    """Return samples of steps along a last axis; without steps, an empty one of a like tensor."""
    return torch.stack(y, -1) if y else like[..., :0]


def changing(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Filter along the last axis with coefficients ``(…, steps or 1, taps)``."""
    steps = x.shape[-1]
    b, a = (each.expand(*each.shape[:-2], steps, each.shape[-1]) for each in (b, a))
    y: list[Tensor] = []
    for t in range(steps):
        total = torch.zeros((), dtype=torch.result_type(b, x))
        for k in range(min(b.shape[-1], t + 1)):
            total = total + b[..., t, k] * x[..., t - k]
        for k in range(1, min(a.shape[-1], t + 1)):
            total = total - a[..., t, k] * y[t - k]
        y.append(total / a[..., t, 0])
    return stacked(y, x.to(torch.result_type(b, x)))
