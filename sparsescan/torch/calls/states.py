"""States of a cell: kernels have them joined, modules have separate tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def joined(states: Tensor | Sequence[Tensor]) -> Tensor:
    """Join initial states: ``[h, c]`` for an LSTM.

    Their gradients are separate arrays; a plain concatenation would give views of one array.
    """
    if isinstance(states, Tensor):
        return states
    return torch.cat([1 * each for each in states], -1) if len(states) > 1 else states[0]


def beside(states: Any, reset_states: Any) -> Any:
    """Join initial states (None is zeros) with those that resets set, direction by direction."""
    if isinstance(reset_states, tuple):
        begin = (None,) * len(reset_states) if states is None else states
        return tuple(beside(*both) for both in zip(begin, reset_states, strict=True))
    states = torch.zeros_like(reset_states) if states is None else states
    return torch.stack([states, reset_states], 1).flatten(0, 1)


def apart(joint: Tensor, count: int) -> tuple[Tensor, ...]:
    """Split joined states into separate arrays, which may be written to."""
    if count == 1:
        return (joint,)
    parts = joint.chunk(count, -1)
    return tuple(each.clone(memory_format=torch.contiguous_format) for each in parts)
