"""LSTMs with projections, as PyTorch's modules have them, by cells of as many numbers as units.

Behind the numbers of a state that is shorter than others there are zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...recurrent.catalogue import ProjectedLSTM
from .shapes import register


@functools.cache
def mode_of(size: int, has_bias: bool) -> str:
    """Return what the operators know cells by that have so many projections."""
    return register(ProjectedLSTM, {"proj_size": size}, has_bias)


def projected(run: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return a function of PyTorch's states and parameters from one of those of our cells."""
    size, units, directions = module.proj_size, module.hidden_size, 1 + module.bidirectional
    more = units - size

    def filled(layer: int, own: list[Tensor]) -> list[Tensor]:
        """Return the parameters of a direction in our order, with columns that read zeros."""
        weight_ih, weight_hh, *biases, weight_hr = own
        if layer:
            weight_ih = pad(weight_ih.unflatten(1, (directions, size)), (0, more)).flatten(1)
        return [weight_ih, weight_hh, weight_hr, *biases]

    def call(
        x: Tensor, state: Tensor | None, lengths: Any, weights: list[Tensor], resets: Any
    ) -> tuple[Tensor, Tensor]:
        if state is not None:
            h, c = state.split([size, units], -1)
            state = torch.cat([pad(h, (0, more)), c], -1)
        count, filled_up = len(weights) // (module.num_layers * directions), list[Tensor]()
        for k in range(0, len(weights), count):
            filled_up += filled(k // (count * directions), weights[k : k + count])
        output, last = run(x, state, lengths, filled_up, resets)
        output = output.unflatten(-1, (directions, units))[..., :size].flatten(-2)
        return output.contiguous(), torch.cat([last[..., :size], last[..., units:]], -1)

    return call
