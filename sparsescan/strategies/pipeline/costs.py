"""Costs of stages of a pipeline, and the cuts with which the slowest is as cheap as can be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..graph import Graph, blocks
from ..machine import Machine
from ..strategy import LayerPlan
from .schedule import Placement

__all__ = [
    "agreeing",
    "balance",
    "beside",
    "block_ends",
    "checked",
    "inside_of",
    "kept_entries",
    "layer_plans",
    "sent",
    "stage_costs",
    "times_of",
    "why_together",
]

_Costs = NDArray[np.float64]


def balance(costs: _Costs, stages: int) -> tuple[int, ...] | None:
    """Cut a chain into stages of which the most expensive is as cheap as can be.

    Parameters
    ----------
    costs : ndarray of float64, shape (n + 1, n + 1)
        Cost of a stage of layers ``a`` to ``b - 1``, for ``a < b``; inf where there can be none.
    stages : int
        Number of stages.

    Returns
    -------
    tuple of int or None
        First layer of each stage but the first; None if there is no way.

    Examples
    --------
    >>> sizes = np.array([3, 1, 1, 1, 3.0])
    >>> ends = np.concatenate([[0], np.cumsum(sizes)])
    >>> balance(np.where(ends > ends[:, None], ends - ends[:, None], np.inf), 3)
    (1, 4)
    """
    n = len(costs) - 1
    best = costs[0]
    choices = []
    for _ in range(stages - 1):
        # Cost of the slowest stage up to b, if the last of them begins at a.
        slowest = np.maximum(best[:, None], costs)
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


def times_of(network: Graph, machine: Machine, samples: int) -> tuple[_Costs, _Costs, _Costs]:
    """Return nanoseconds of each layer forward and backward, and of a message behind each."""
    numbers, same = np.unique(network.alike[1:], return_inverse=True)
    forward = np.array([machine.forward(network, k, samples) for k in numbers.tolist()])[same]
    backward = np.array(
        [
            machine.backward(network, k, samples) + machine.update(network, k)
            for k in numbers.tolist()
        ]
    )[same]
    forward[-1] += machine.loss(samples)
    sizes = samples * machine.itemsize * np.array([layer.size for layer in network.layers])
    messages = np.array(machine.network.latency + machine.network.inverse_bandwidth * sizes, float)
    messages[[0, -1]] = 0
    return forward, backward, messages


def block_ends(network: Graph) -> list[int]:
    """Return the last layer of each block, from the input on."""
    return [0, *(block.stop - 1 for block in blocks(network))]


def inside_of(network: Graph) -> dict[str, NDArray[np.bool_]]:
    """Return, by the reason, whether there can be no register behind each layer."""
    shared, block = np.zeros(len(network.layers), bool), np.ones(len(network.layers), bool)
    last = {layer.shares: k for k, layer in enumerate(network.layers) if layer.shares is not None}
    for first, k in last.items():
        shared[first:k] = True
    block[block_ends(network)] = False
    return {"layers that share their weights": shared, "layers of a block": block}


def why_together(inside: dict[str, NDArray[np.bool_]], where: Any) -> str:
    """Say which layers stay together there."""
    names = " and ".join(which for which, layers in inside.items() if layers[where].any())
    return f": {names} stay together" if names else ""


def checked(placement: Placement, workers: int, inside: dict[str, NDArray[np.bool_]]) -> Placement:
    """Check that there is a stage for each worker, and no register inside a block."""
    registers = placement.registers
    if len(placement.parts) != workers:
        raise InputError(
            f"registers is {registers}; expected {workers - 1} of them for {workers} workers"
        )
    wrong = [p for p in registers if any(layers[p] for layers in inside.values())]
    if wrong:
        raise InputError(
            f"registers is {registers}; expected none after layer {wrong[0]}"
            + why_together(inside, wrong[0])
        )
    return placement


def stage_costs(ends: _Costs, messages: _Costs) -> _Costs:
    """Return costs of every possible stage: its layers, and its messages on both sides.

    `ends` are sums over all layers before each place where a stage can begin or end, `messages` the
    costs of a message there.
    """
    costs = ends - ends[:, None] + messages + messages[:, None]
    return np.where(np.arange(len(ends)) > np.arange(len(ends))[:, None], costs, np.inf)


def agreeing(machine: Machine, workers: int) -> float:
    """Return nanoseconds in which workers agree that nothing is wrong, and on the loss."""
    return machine.collective("maximum", workers) + machine.collective("broadcast", workers)


def beside(messages: _Costs, part: slice) -> float:
    """Return nanoseconds of the messages on both sides of a stage."""
    return float(messages[part.start] + messages[part.stop])


def kept_entries(network: Graph, part: slice) -> int:
    """Count entries, for one sample, of the input of a stage and of the outputs of its layers."""
    return sum(layer.size for layer in network.layers[part.start : part.stop + 1])


def layer_plans(
    network: Graph, machine: Machine, placement: Placement, batch: int
) -> tuple[LayerPlan, ...]:
    """Return what each layer sends, and what it needs for one minibatch."""
    plans, last = [], len(placement.parts) - 1
    for stage, part in enumerate(placement.parts):
        for k in range(part.start + 1, part.stop + 1):
            layer = network.layers[k]
            size = layer.size * (k == part.stop and stage < last)
            size += network.layers[part.start].size * (k == part.start + 1 and stage > 0)
            sent = batch * machine.itemsize * size
            memory = machine.needed(layer.weights, batch * layer.size)
            stages = range(stage, stage + 1)
            plans.append(LayerPlan(layer.name, (1, 1, 1, 1), stages, sent, memory))
    return tuple(plans)


def sent(network: Graph, machine: Machine, placement: Placement, batch: int) -> int:
    """Count bytes that the busiest worker sends: activations forward, gradients backward."""
    cuts = [0, *(network.layers[p].size for p in placement.registers), 0]
    return machine.itemsize * batch * max(a + b for a, b in itertools.pairwise(cuts))
