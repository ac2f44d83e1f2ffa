"""Initial states that are parameters: the states that a call begins with, and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Array = Any
Shape = tuple[int, ...]
# The name and the block of the parameter that a state begins with.
Begins = Mapping[int, tuple[str, int]]


def initial_states(
    xp: Any, begins: Begins, states: int, params: Sequence[Mapping[str, Array]], shape: Shape
) -> Array:
    """Return the initial states of a network, ``(layers · directions, …, state_size)``.

    Parameters
    ----------
    xp : module
        NumPy, CuPy, PyTorch or ``jax.numpy``.
    begins : dict of int to (str, int)
        The states that begin with parameters; others begin with zeros.
    states : int
        The number of states of a cell.
    params : sequence of dict of str to array
        The parameters of each direction of each layer, by their names in the cell.
    shape : tuple of int
        The shape of one state of a direction: ``(batch, hidden_size)`` or ``(hidden_size,)``.
    """
    parts = []
    for k in range(states):
        name, block = begins.get(k, next(iter(begins.values())))
        own = slice(block * shape[-1], (block + 1) * shape[-1])
        rows = xp.stack([each[name][own] for each in params])
        parts.append(rows if k in begins else xp.zeros_like(rows))
    found = xp.concatenate(parts, -1)
    lead, width = shape[:-1], found.shape[-1]
    found = found.reshape(len(params), *[1] * len(lead), width)
    return xp.broadcast_to(found, (len(params), *lead, width))


def add_initial_grads(
    begins: Begins, grads: Sequence[Mapping[str, Array]], state_grad: Array, units: int
) -> None:
    """Add gradients in initial states, ``(layers · directions, batch, …)``, to parameters."""
    for own, grad in zip(grads, state_grad, strict=True):
        for k, (name, block) in begins.items():
            total = grad[:, k * units : (k + 1) * units].sum(0)
            own[name][block * units : (block + 1) * units] += total
